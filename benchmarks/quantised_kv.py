"""What a quantised KV cache saves, what it costs in accuracy, and in time on this machine.

    python benchmarks/quantised_kv.py [--model PATH] [--dtype float32] [--tokens 499] [--runs 5]

Feeds the model a text of some 400 words, with keys and values as they are and then in each format, and compares the
logits after every token: the mean and the largest difference, the KL divergence, how often the best next token is the
same, and the perplexity of the text. Static scales are those with which the keys and values of this very text just fit,
as a calibrated checkpoint has them; "1.0" is what fp8_e4m3 takes from a checkpoint without any. Requests are those of
2048 tokens that fit into 1 GiB at a time.

Times are processor times on a CPU, medians of several runs, the formats in turn: of a prompt of the text's tokens in
one step, and of a step with one token behind it. With OMP_NUM_THREADS=1 they are seconds of one core.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from octavo import EngineConfig
from octavo.core.kv_cache_plan import RequestLimits, plan_from_memory
from octavo.plugins.registry import scan
from octavo.selection.managers import request_cost
from octavo.selection.select import select
from octavo.testing.quantised_kv import TEXT, Bench, BenchRunner, by_head, by_tensor, difference

MEMORY_BYTES = 1 << 30
REQUEST_TOKENS = 2048
DTYPES = ("fp8_e4m3", "int8")


@dataclass(frozen=True)
class Entry:
    """A KV cache to measure, and what it is called in the table."""

    dtype: str
    scales: str
    runner: BenchRunner


def entries(bench: Bench, exact: BenchRunner, num_tokens: int) -> list[Entry]:
    """Return a KV cache of each format, for whose static scales `exact` has been fed."""
    made = []
    for dtype in DTYPES:
        if dtype == "fp8_e4m3":
            made.append(Entry(dtype, "1.0", bench.runner(dtype)))
        for name, granularity in (("per_tensor", by_tensor), ("per_head", by_head)):
            made.append(Entry(dtype, name, bench.runner(dtype, exact.scales(dtype, granularity, num_tokens))))
        made.append(Entry(dtype, "per_token_head", bench.runner(f"{dtype}_per_token_head")))
    return made


def requests_that_fit(config: EngineConfig, runner: BenchRunner) -> int:
    """Return how many requests of REQUEST_TOKENS tokens fit into MEMORY_BYTES at a time."""
    managers = {of_group.group.spec.kind: of_group.manager for of_group in select(config, scan()).groups}
    groups = runner.layout.groups
    cost = request_cost(config, [managers[group.spec.kind] for group in groups], groups)
    limits = RequestLimits(runner.spec.max_position, REQUEST_TOKENS)
    return plan_from_memory(MEMORY_BYTES, cost, limits).concurrency_at(REQUEST_TOKENS).num_requests


def milliseconds(runner: BenchRunner, token_ids: Sequence[int], start: int, end: int) -> float:
    """Return the processor time that the tokens [start, end) take in one step."""
    began = time.process_time()
    runner.fill(token_ids, start, end)
    return 1000 * (time.process_time() - began)


def times(runners: Sequence[BenchRunner], token_ids: Sequence[int], num_runs: int) -> list[tuple[float, float]]:
    """Return of each runner the milliseconds of processor time of a whole prompt, and of one more token."""
    prompts: list[list[float]] = [[] for _ in runners]
    tokens: list[list[float]] = [[] for _ in runners]
    last = len(token_ids) - 1
    for _ in range(num_runs):
        for runner, of_prompt, of_token in zip(runners, prompts, tokens, strict=True):
            of_prompt.append(milliseconds(runner, token_ids, 0, last))
            of_token += [milliseconds(runner, token_ids, last, last + 1) for _ in range(5)]
    medians = (tuple(map(statistics.median, pair)) for pair in zip(prompts, tokens, strict=True))
    return [(prompt, token) for prompt, token in medians]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or a .gguf file; without it, the demo model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=499, help="tokens of the text, at most")
    parser.add_argument("--runs", type=int, default=5, help="runs to time; 0 for none")
    arguments = parser.parse_args()
    config = EngineConfig.from_flat(model=arguments.model, dtype=arguments.dtype)
    bench = Bench(config)
    token_ids = bench.encode(TEXT)[: arguments.tokens]
    exact = bench.runner(bench.dtype)
    reference = exact.logits(token_ids)
    measured = entries(bench, exact, len(token_ids))
    spread = f"{reference.std():.2f}"
    print(f"{arguments.model or 'demo model'} in {bench.dtype}, {len(token_ids)} tokens, logits spread by {spread}\n")
    print("| `kv_cache_dtype` | scales | bytes a token | requests | mean | largest | KL | same token | perplexity |")
    print("|---|---|---|---|---|---|---|---|---|")
    own = difference(reference, reference, token_ids)
    print(
        f"| {bench.dtype} | | {exact.bytes_per_token:g} | {requests_that_fit(config, exact)} | | | | | "
        f"{own.perplexity:.2f} |"
    )
    for entry in measured:
        found = difference(entry.runner.logits(token_ids), reference, token_ids)
        print(
            f"| {entry.dtype} | {entry.scales} | {entry.runner.bytes_per_token:g} | "
            f"{requests_that_fit(config, entry.runner)} | {found.mean:.3f} | {found.largest:.2f} | "
            f"{found.divergence:.4f} | {found.agreement:.1%} | {found.perplexity:.2f} |"
        )
    if not arguments.runs:
        return
    timed = [entry for entry in measured if entry.scales in ("per_tensor", "per_token_head")]
    print(f"\n| `kv_cache_dtype` | scales | prompt of {len(token_ids) - 1} tokens | one more token |")
    print("|---|---|---|---|")
    labels = [(bench.dtype, ""), *[(entry.dtype, entry.scales) for entry in timed]]
    found_times = times([exact, *[entry.runner for entry in timed]], token_ids, arguments.runs)
    for (dtype, scales), (prompt, token) in zip(labels, found_times, strict=True):
        print(f"| {dtype} | {scales} | {prompt:.0f} ms | {token:.1f} ms |")


if __name__ == "__main__":
    main()
