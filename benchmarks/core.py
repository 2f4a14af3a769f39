"""What the KV core and the scheduler cost, without a model: nothing computes, tokens are made up.

    python benchmarks/core.py [--runs 5] [--json]

Prints each figure as the least of several runs, the machine being shared, beside a limit and beside what the
best-known engine of the kind was measured at on a like machine (vLLM 0.32, its own scheduler and block pool).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.prefix_hash import PrefixHasher
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step_plan import StepPlan, StepResult
from octavo.plugins.families import HASH_FUNCTIONS, KV_MANAGERS, REQUEST_QUEUES
from octavo.plugins.registry import scan

BLOCK_SIZE = 16
FULL = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_dim=1, dtype="float32")
WINDOW = SlidingWindowSpec(BLOCK_SIZE, num_kv_heads=1, head_dim=1, dtype="float32", window=128)


@dataclass(frozen=True)
class Figure:
    """A measured number, what it should be at most, and what the peer was measured at."""

    what: str
    value: float
    unit: str
    limit: float
    peer: str


def make_scheduler(
    num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int, specs: Sequence[KVCacheSpec] = (FULL,)
) -> Scheduler:
    """Return a scheduler over a prefix-cached pool with the default parts, and a KV-cache group for each spec."""
    registry = scan()
    pool = BlockPool(num_blocks)
    managers = [
        registry.load(KV_MANAGERS, spec.kind)(spec, pool, group_id, max_num_seqs) for group_id, spec in enumerate(specs)
    ]
    hasher = PrefixHasher(registry.load(HASH_FUNCTIONS, "sha256")(), BLOCK_SIZE, b"root")
    return Scheduler(
        KVCacheManager(pool, managers, hasher, max_tokens_in_flight=max_num_batched_tokens),
        registry.load(REQUEST_QUEUES, "fcfs")(),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def made_up(plan: StepPlan, number: int) -> StepResult:
    """Return a result for a plan, as a sampler would."""
    num_samples = int(np.count_nonzero(plan.samples))
    return StepResult([number % 50_000] * num_samples, [False] * num_samples, [None] * num_samples)


def request(number: int, prompt: list[int]) -> Request:
    params = SamplingParams(temperature=0, max_tokens=10_000)
    return Request(
        f"request-{number}", prompt, params, max_model_len=100_000, arrival=number, eos_token_ids=frozenset({2})
    )


def decode_microseconds(num_requests: int, specs: Sequence[KVCacheSpec] = (FULL,)) -> float:
    """Return the time of schedule and update a request a step, over 64 steps of decoding.

    Prompts differ in length, so that each step takes some requests over the edge of a block.
    """
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(num_requests * 40 * len(specs), num_requests, 1 << 20, specs)
    for number in range(num_requests):
        prompt = rng.integers(3, 50_000, 200 + number % BLOCK_SIZE).tolist()
        scheduler.add_request(request(number, prompt))
    for number in range(3):
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, made_up(plan, number + 5))
    num_steps, seconds = 64, 0.0
    for number in range(num_steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        seconds += time.perf_counter() - start
        result = made_up(plan, number + 100)
        start = time.perf_counter()
        output = scheduler.update_from_output(plan, result)
        seconds += time.perf_counter() - start
        assert len(output) == plan.num_decode_entries == num_requests
    return seconds / num_steps / num_requests * 1e6


def pool_microseconds() -> float:
    """Return the time to allocate and free a block, in batches as requests do."""
    pool = BlockPool(20_000)
    start = time.perf_counter()
    for _ in range(100):
        pool.free_blocks(reversed(pool.get_new_blocks(2_000)))
    return (time.perf_counter() - start) / 200_000 * 1e6


def pool_build_milliseconds() -> float:
    """Return the time to make a pool of 200,000 blocks."""
    start = time.perf_counter()
    BlockPool(200_000)
    return (time.perf_counter() - start) * 1e3


def prompt_milliseconds() -> tuple[float, float]:
    """Return the time from add_request to the end of one schedule() for a prompt of 32,768 tokens: cold, and warm."""
    prompt = np.random.default_rng(1).integers(3, 50_000, 32_768).tolist()
    scheduler = make_scheduler(5_000, 8, 32_768)
    seconds = []
    for number in range(2):
        one = request(number, prompt)
        start = time.perf_counter()
        scheduler.add_request(one)
        plan = scheduler.schedule()
        seconds.append(time.perf_counter() - start)
        assert plan.num_tokens == (32_768, 16)[number]
        scheduler.update_from_output(plan, made_up(plan, 7))
        scheduler.abort_request(one.request_id)
    return seconds[0] * 1e3, seconds[1] * 1e3


def blocked_head_microseconds() -> float:
    """Return what a waiting request that does not fit adds to a step."""

    def step_seconds(has_waiting: bool) -> float:
        scheduler = make_scheduler(200, 16, 1 << 15)
        scheduler.add_request(request(0, list(range(3, 2003))))
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, made_up(plan, 9))
        if has_waiting:
            scheduler.add_request(request(1, list(range(5000, 7500))))
        seconds = 0.0
        for number in range(300):
            start = time.perf_counter()
            plan = scheduler.schedule()
            seconds += time.perf_counter() - start
            scheduler.update_from_output(plan, made_up(plan, number + 10))
        return seconds / 300

    return (step_seconds(True) - step_seconds(False)) * 1e6


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request as a queue sees it."""

    request_id: str
    priority: int
    arrival: int
    num_tokens: int = 100


def priority_queue_microseconds() -> float:
    """Return the time to add a request to the priority queue and to pop the next one, while 100,000 wait."""
    queue = scan().load(REQUEST_QUEUES, "priority")()
    priorities = np.random.default_rng(2).integers(-5, 6, 110_000).tolist()
    requests = [Waiting(f"request-{number}", priority, number) for number, priority in enumerate(priorities)]
    for one in requests[:100_000]:
        queue.add_request(one)
    start = time.perf_counter()
    for one in requests[100_000:]:
        queue.add_request(one)
        queue.pop_request()
    return (time.perf_counter() - start) / 10_000 * 1e6


def import_milliseconds() -> float:
    """Return what importing the scheduler takes above a bare interpreter."""

    def seconds(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    return (seconds("import octavo.core.scheduler") - seconds("pass")) * 1e3


def measure(num_runs: int) -> list[Figure]:
    """Return all figures."""

    def least(function: Callable[[], float]) -> float:
        return min(function() for _ in range(num_runs))

    prompts = [prompt_milliseconds() for _ in range(num_runs)]
    return [
        Figure(
            "schedule + update, 256 decoding",
            least(lambda: decode_microseconds(256)),
            "us a request a step",
            2,
            "17-22",
        ),
        Figure(
            "schedule + update, 1024 decoding", least(lambda: decode_microseconds(1024)), "us a request a step", 2, ""
        ),
        Figure(
            "the same, full and 2 window groups",
            least(lambda: decode_microseconds(256, (FULL, WINDOW, WINDOW))),
            "us a request a step",
            5,
            "42",
        ),
        Figure("allocate + free", least(pool_microseconds), "us a block", 0.5, "1.1"),
        Figure("build a pool of 200,000 blocks", least(pool_build_milliseconds), "ms", 20, "800"),
        Figure("cold prompt of 32,768 tokens", min(cold for cold, _ in prompts), "ms", 3, "2.6"),
        Figure("the same again, warm", min(warm for _, warm in prompts), "ms", 2, ""),
        Figure("a blocked waiting head", least(blocked_head_microseconds), "us a step", 20, ""),
        Figure("add + pop, 100,000 waiting by priority", least(priority_queue_microseconds), "us", 100, ""),
        Figure("importing the core", least(import_milliseconds), "ms", 150, "6100"),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="how often each figure is measured; the least counts")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    arguments = parser.parse_args()
    figures = measure(arguments.runs)
    if arguments.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=2))
        return
    print(f"{'':38} {'Octavo':>9}   {'limit':>6}   {'vLLM 0.32':>9}")
    for figure in figures:
        print(f"{figure.what:38} {figure.value:9.2f}   {figure.limit:6g}   {figure.peer:>9}   {figure.unit}")


if __name__ == "__main__":
    main()
