"""One greedy stream on the packaged model, Octavo and Hugging Face generate in turn, in float32.

    python benchmarks/against_transformers.py [--runs 3] [--prompt-tokens 128] [--new-tokens 128]

Needs the test extra (transformers reads GGUF files with accelerate). Prints tokens a second of each run, the ratio of
each pair, and the machine's limit: a stream cannot go faster than its weights can be read from memory once a token.
"""

import argparse
import random
import statistics
import time

import numpy as np
import torch

from octavo import LLM, SamplingParams
from octavo.models.checkpoint import open_checkpoint
from octavo.testing import hugging_face


def read_bytes_per_second() -> float:
    """Return how fast all cores together read memory that is not in a cache."""
    numbers = torch.ones(256 << 20, dtype=torch.float32)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - start)
    return numbers.numel() * 4 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()

    limit = read_bytes_per_second()
    checkpoint = open_checkpoint(None)
    reference = hugging_face.load(checkpoint.path)
    num_weight_bytes = 4 * sum(parameter.numel() for parameter in reference.parameters())
    rng = random.Random(0)
    prompt = [rng.randrange(100, 40000) for _ in range(options.prompt_tokens)]
    params = SamplingParams(temperature=0, max_tokens=options.new_tokens, ignore_eos=True)

    def octavo_seconds(llm: LLM) -> float:
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(prompt, params, use_tqdm=False)
        return time.perf_counter() - start

    def transformers_seconds() -> float:
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        with torch.inference_mode():
            reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=options.new_tokens,
                max_new_tokens=options.new_tokens,
                pad_token_id=0,
            )
        return time.perf_counter() - start

    ratios = []
    with LLM(num_kv_blocks=200) as llm:
        octavo_seconds(llm), transformers_seconds()
        for run in range(options.runs):
            ours, theirs = octavo_seconds(llm), transformers_seconds()
            ratios.append(theirs / ours)
            print(
                f"run {run}: octavo {options.new_tokens / ours:.1f} tokens/s, "
                f"transformers {options.new_tokens / theirs:.1f} tokens/s, ratio {ratios[-1]:.2f}"
            )
    print(f"median ratio {statistics.median(ratios):.2f} over {options.runs} pairs, prompt included in the time")
    print(
        f"limit: {num_weight_bytes / 1e6:.0f} MB of weights a token at {limit / 1e9:.1f} GB/s read are "
        f"{limit / num_weight_bytes:.0f} tokens/s; numpy {np.__version__}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
