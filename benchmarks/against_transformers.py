"""One greedy stream on the packaged model, Octavo and Hugging Face generate in turn, in float32.

    python benchmarks/against_transformers.py [--runs 3] [--prompt-tokens 128] [--new-tokens 128]

Needs the test extra (transformers reads GGUF files with accelerate). Prints tokens a second of each run, the ratio of
each pair, and the machine's limit: a stream cannot go faster than its weights can be read from memory once a token.
Each library runs in a process of its own, and waits while the other works.
"""

import argparse
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection


def serve_octavo(pipe: Connection, prompt: list[int], num_new_tokens: int) -> None:
    """Answer each message with the seconds that Octavo took."""
    from octavo import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
    with LLM(num_kv_blocks=1 + (len(prompt) + num_new_tokens) // 16 + 1) as llm:
        pipe.send(0.0)
        while pipe.recv():
            llm.reset_prefix_cache()
            start = time.perf_counter()
            llm.generate(prompt, params, use_tqdm=False)
            pipe.send(time.perf_counter() - start)


def serve_transformers(pipe: Connection, prompt: list[int], num_new_tokens: int) -> None:
    """Answer each message with the seconds that transformers took; first with the bytes of its weights."""
    import torch

    from octavo.models.checkpoint import open_checkpoint
    from octavo.testing import hugging_face

    model = hugging_face.load(open_checkpoint(None).path)
    ids = torch.tensor([prompt])
    lengths = {"min_new_tokens": num_new_tokens, "max_new_tokens": num_new_tokens}
    pipe.send(4 * sum(parameter.numel() for parameter in model.parameters()))
    while pipe.recv():
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)
        pipe.send(time.perf_counter() - start)


def serve_reads(pipe: Connection, prompt: list[int], num_new_tokens: int) -> None:
    """Answer each message with the bytes a second that all cores together read from memory."""
    from octavo.benchmark.limits import read_bytes_per_s

    pipe.send(0.0)
    while pipe.recv():
        pipe.send(read_bytes_per_s())


class Worker:
    """A process of its own, so that one library's idle threads do not get into another's way."""

    def __init__(self, serve: Callable[..., None], prompt: list[int], num_new_tokens: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, prompt, num_new_tokens), daemon=True)
        self._process.start()
        self.first_answer: float = self._pipe.recv()

    def ask(self) -> float:
        self._pipe.send(True)
        answer: float = self._pipe.recv()
        return answer

    def end(self) -> None:
        self._pipe.send(False)
        self._process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    rng = random.Random(0)
    prompt = [rng.randrange(100, 40000) for _ in range(options.prompt_tokens)]

    reader = Worker(serve_reads, prompt, options.new_tokens)
    limit = reader.ask()
    reader.end()
    octavo = Worker(serve_octavo, prompt, options.new_tokens)
    transformers = Worker(serve_transformers, prompt, options.new_tokens)
    octavo.ask(), transformers.ask()
    ratios = []
    for run in range(options.runs):
        ours, theirs = octavo.ask(), transformers.ask()
        ratios.append(theirs / ours)
        print(
            f"run {run}: octavo {options.new_tokens / ours:.1f} tokens/s, "
            f"transformers {options.new_tokens / theirs:.1f} tokens/s, ratio {ratios[-1]:.2f}"
        )
    octavo.end(), transformers.end()
    print(f"median ratio {statistics.median(ratios):.2f} over {options.runs} pairs, prompt included in the time")
    num_weight_bytes = transformers.first_answer
    print(
        f"limit: {num_weight_bytes / 1e6:.0f} MB of weights a token at {limit / 1e9:.1f} GB/s read are "
        f"{limit / num_weight_bytes:.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
