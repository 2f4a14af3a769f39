"""What `async_scheduling` gains: the same requests with it and without, in turn, on the packaged model.

    python benchmarks/planning_ahead.py [--runs 5] [--requests 32] [--new-tokens 32]

Prints the seconds of each pair of runs, and how long the two need in relation to each other. Both engines are in this
process, and one waits while the other works.
"""

import argparse
import random
import statistics
import time

from octavo import LLM, SamplingParams

PROMPT_TOKENS = 32


def run_seconds(llm: LLM, prompts: list[list[int]], num_new_tokens: int) -> tuple[float, list[list[int]]]:
    """Return how long the requests took, and what they generated."""
    params = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start, [output.outputs[0].token_ids for output in outputs]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="pairs of runs")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(arguments.requests)]
    num_blocks = 1 + arguments.requests * (1 + (PROMPT_TOKENS + arguments.new_tokens) // 16)
    ratios = []
    with LLM(num_kv_blocks=num_blocks) as plain, LLM(num_kv_blocks=num_blocks, async_scheduling=True) as ahead:
        for llm in (plain, ahead):
            run_seconds(llm, prompts[:2], 2)
        for _ in range(arguments.runs):
            without, expected = run_seconds(plain, prompts, arguments.new_tokens)
            with_it, tokens = run_seconds(ahead, prompts, arguments.new_tokens)
            if tokens != expected:
                raise SystemExit("planning ahead has changed an answer")
            ratios.append(without / with_it)
            print(f"without {without:6.2f} s   with {with_it:6.2f} s   {ratios[-1]:.3f}")
    print(f"with it {statistics.median(ratios):.3f} times as fast (median of {arguments.runs} pairs)")


if __name__ == "__main__":
    main()
