"""What giving back the blocks behind a window saves: requests at a time from the same bytes, with it and without.

    python benchmarks/hybrid_memory.py [--model MODEL] [--memory 2GiB] [--tokens 8192] [--budget 512] [--compute]

Two engines, the second with `disable_hybrid_kv_cache_manager`, get as many requests at once as their bytes hold, and
plan steps until all have ended. Nothing is computed: tokens are made up, so that the scheduler, the block pool and the
managers do all that they do, and no weights are needed. The default model is Gemma 3 270M by its config alone. A model
folder, a .gguf or a config.json will do. With --compute, which needs a model's weights, whole engines then do the same
with random prompts, which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from octavo.cli.memory_size import parse_memory_size
from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.core.block_pool import BlockPool
from octavo.core.kv_cache_config import KVCacheConfig, format_bytes, num_blocks_in
from octavo.core.kv_cache_coordinator import hash_unit_of
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.prefix_hash import PrefixHasher
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step_plan import StepResult
from octavo.errors import ConfigError, OctavoError
from octavo.plugins.families import HASH_FUNCTIONS, REQUEST_QUEUES
from octavo.plugins.registry import scan
from octavo.selection.managers import choose_managers
from octavo.selection.select import model_needs_elsewhere

# From the model's own GGUF file (google/gemma-3-270m-it); the layers' pattern is its family's.
GEMMA_3_270M = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}


@dataclass(frozen=True)
class Outcome:
    """What became of the requests in one engine.

    Attributes:
        groups: Each group's kind and number of layers.
        num_blocks: Blocks that the bytes make.
        bytes_per_request: Bytes of the most blocks that one request may hold at a time.
        blocks_per_request: Those blocks, by group.
        requests: Requests that were added, all at once: as many as surely fit, each with the most that it may hold.
        most_at_a_time: Most requests that ran at a time.
        preemptions: Of all requests.
        finished: Requests that ended with all of their tokens.
        steps: Steps that it took.
        most_in_decode: Most blocks that a request which generates held, by group.
    """

    groups: list[tuple[str, int]]
    num_blocks: int
    bytes_per_request: int
    blocks_per_request: list[int]
    requests: int
    most_at_a_time: int
    preemptions: int
    finished: int
    steps: int
    most_in_decode: list[int]


def run(config: EngineConfig, num_bytes: int, num_tokens: int, num_new: int) -> Outcome:
    """Plan as many requests as fit, of `num_tokens` tokens, the last `num_new` of them generated, until all end."""
    registry = scan()
    needs = model_needs_elsewhere(config, registry)
    layout = KVCacheConfig(num_blocks_in(num_bytes, needs.groups), needs.groups)
    pool = BlockPool(layout.num_blocks)
    managers = [
        chosen.part.create(group.spec, pool, group_id, config.scheduler.max_num_seqs)
        for group_id, (chosen, group) in enumerate(
            zip(choose_managers(registry, {}, needs.groups), needs.groups, strict=True)
        )
    ]
    hasher = PrefixHasher(registry.load(HASH_FUNCTIONS, "sha256")(), hash_unit_of(managers), b"root")
    budget = config.scheduler.max_num_batched_tokens
    kv_cache_manager = KVCacheManager(pool, managers, hasher, max_tokens_in_flight=budget)
    scheduler = Scheduler(
        kv_cache_manager,
        registry.load(REQUEST_QUEUES, "fcfs")(),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=budget,
        watermark=config.scheduler.watermark,
    )
    blocks_per_request = kv_cache_manager.coordinator.max_blocks_by_group(num_tokens, budget)
    num_watermark_blocks = int(config.scheduler.watermark * pool.num_usable_blocks)
    num_requests = (pool.num_usable_blocks - num_watermark_blocks) // sum(blocks_per_request)
    if not num_requests:
        raise ValueError(
            f"{format_bytes(num_bytes)} hold no request of {num_tokens} tokens: one takes "
            f"{format_bytes(sum(blocks_per_request) * layout.bytes_per_block)}; raise --memory or lower --tokens"
        )
    rng = np.random.default_rng(0)
    for number in range(num_requests):
        prompt = rng.integers(3, needs.spec.vocab_size, num_tokens - num_new).tolist()
        params = SamplingParams(temperature=0, max_tokens=num_new)
        scheduler.add_request(Request(f"request-{number}", prompt, params, max_model_len=num_tokens, arrival=number))
    most_at_a_time = finished = 0
    most_in_decode = np.zeros(len(managers), int)
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        most_at_a_time = max(most_at_a_time, len(scheduler.running))
        for row in plan.rows[: plan.num_decode_entries].tolist():
            held = [len(blocks) for blocks in kv_cache_manager.coordinator.block_ids_by_group(row)]
            most_in_decode = np.maximum(most_in_decode, held)
        num_samples = int(plan.samples.sum())
        tokens = rng.integers(3, needs.spec.vocab_size, num_samples).tolist()
        output = scheduler.update_from_output(plan, StepResult(tokens, [False] * num_samples, [None] * num_samples))
        finished += sum(reason == "length" for reason in output.finish_reasons)
    stats = scheduler.stats()
    return Outcome(
        [(group.spec.kind, len(group.layers)) for group in needs.groups],
        layout.num_blocks,
        sum(blocks_per_request) * layout.bytes_per_block,
        blocks_per_request,
        num_requests,
        most_at_a_time,
        stats.preemptions,
        finished,
        stats.steps,
        most_in_decode.tolist(),
    )


def configs(model: str, budget: int) -> list[EngineConfig]:
    """Return the settings with the hybrid pool, and without."""
    return [
        EngineConfig(
            model=model,
            device="cpu",
            cache=CacheConfig(disable_hybrid_kv_cache_manager=is_disabled),
            scheduler=SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=1024),
        )
        for is_disabled in (False, True)
    ]


def compare(model: str, num_bytes: int, num_tokens: int, num_new: int, budget: int) -> list[Outcome]:
    """Return what became of the requests with the hybrid pool, and without."""
    return [run(config, num_bytes, num_tokens, num_new) for config in configs(model, budget)]


@dataclass(frozen=True)
class Computed:
    """What became of the requests in a whole engine.

    Attributes:
        requests: Requests that were added, all at once.
        most_at_a_time: Most requests that were seen to run at a time.
        preemptions: Of all requests.
        finished: Requests that ended with all of their tokens.
        seconds: From the first to the last, the model being loaded.
    """

    requests: int
    most_at_a_time: int
    preemptions: int
    finished: int
    seconds: float


def compute(config: EngineConfig, num_bytes: int, num_requests: int, num_tokens: int, num_new: int) -> Computed:
    """Run requests through an engine with the model's weights."""
    from octavo import LLM

    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    done = threading.Event()
    running = [0]
    with LLM(
        config.model,
        device=config.device,
        max_model_len=num_tokens,
        kv_cache_memory_bytes=num_bytes,
        disable_hybrid_kv_cache_manager=config.cache.disable_hybrid_kv_cache_manager,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
    ) as llm:

        def watch() -> None:
            while not done.wait(0.5):
                running.append(llm.stats().running)

        watcher = threading.Thread(target=watch)
        watcher.start()
        prompts = [
            {"prompt_token_ids": rng.integers(3, 50_000, num_tokens - num_new).tolist()} for _ in range(num_requests)
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
    return Computed(
        num_requests,
        max(running),
        sum(output.num_preemptions for output in outputs),
        sum(len(output.outputs[0].token_ids) == num_new for output in outputs),
        seconds,
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Return both outcomes side by side."""

    def groups(outcome: Outcome) -> str:
        sizes: dict[tuple[str, int], int] = {}
        for group in outcome.groups:
            sizes[group] = sizes.get(group, 0) + 1
        return ", ".join(f"{count} x {layers} {kind}" for (kind, layers), count in sizes.items())

    rows = {
        "groups x layers": [groups(outcome) for outcome in outcomes],
        "blocks in the pool": [str(outcome.num_blocks) for outcome in outcomes],
        "blocks a request, at most": [
            f"{sum(o.blocks_per_request)} ({' + '.join(map(str, o.blocks_per_request))})" for o in outcomes
        ],
        "bytes a request, at most": [format_bytes(outcome.bytes_per_request) for outcome in outcomes],
        "requests that fit": [str(outcome.requests) for outcome in outcomes],
        "requests at a time": [str(outcome.most_at_a_time) for outcome in outcomes],
        "finished": [str(outcome.finished) for outcome in outcomes],
        "preemptions": [str(outcome.preemptions) for outcome in outcomes],
        "steps": [str(outcome.steps) for outcome in outcomes],
        "blocks in decode, at most": [" + ".join(map(str, outcome.most_in_decode)) for outcome in outcomes],
    }
    width = max(len(cells[0]) for cells in rows.values())
    lines = [f"{'':26} {'hybrid pool':{width}}   all layers keep all tokens"]
    lines += [f"{name:26} {cells[0]:{width}}   {cells[1]}" for name, cells in rows.items()]
    hybrid, full = outcomes
    lines.append(
        f"{'ratio':26} {hybrid.most_at_a_time / full.most_at_a_time:.2f} times the requests at a time; by bytes a "
        f"request, without rounding to whole ones, {full.bytes_per_request / hybrid.bytes_per_request:.2f}"
    )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder, a .gguf file or a config.json; without it Gemma 3 270M's config")
    parser.add_argument("--memory", default="2GiB", help="bytes of the KV cache")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a request, prompt and output together")
    parser.add_argument("--new-tokens", type=int, default=1024, help="how many of them are generated")
    parser.add_argument("--budget", type=int, default=512, help="tokens that a step computes at most")
    parser.add_argument("--compute", action="store_true", help="also run them with the weights of --model")
    parser.add_argument("--json", action="store_true", help="print a list of two objects")
    arguments = parser.parse_args()
    if arguments.compute and arguments.model is None:
        parser.error("--compute needs the weights of a model: name one with --model")
    if not 0 < arguments.new_tokens < arguments.tokens:
        parser.error(f"--new-tokens must be from 1 to {arguments.tokens - 1}, for a request has --tokens in all")
    try:
        num_bytes = parse_memory_size("--memory", arguments.memory)
    except ConfigError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model is None:
            model = str(Path(folder) / "config.json")
            Path(model).write_text(json.dumps(GEMMA_3_270M))
        try:
            outcomes = compare(model, num_bytes, arguments.tokens, arguments.new_tokens, arguments.budget)
        except (OctavoError, ValueError) as error:
            parser.error(str(error))
    if arguments.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
        return
    print(
        f"{arguments.model or 'Gemma 3 270M'} in float32, {format_bytes(num_bytes)} of KV cache, requests "
        f"of {arguments.tokens} tokens, {arguments.budget} tokens a step\n"
    )
    print(table(outcomes))
    if arguments.compute:
        print("\nwith the weights")
        for name, config, outcome in zip(
            ("hybrid pool", "all layers keep all"), configs(model, arguments.budget), outcomes, strict=True
        ):
            computed = compute(config, num_bytes, outcome.requests, arguments.tokens, arguments.new_tokens)
            print(
                f"{name:20} {computed.finished} of {computed.requests} finished in {computed.seconds:.0f} s, up to "
                f"{computed.most_at_a_time} at a time, {computed.preemptions} preemptions",
                flush=True,
            )


if __name__ == "__main__":
    main()
