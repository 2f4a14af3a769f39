"""The engine and the plain engine of the reference do the same, step by step, whatever is asked of them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, fields
from functools import cache

import hashing_engines
import pytest

from octavo.core.engine_core import EngineCore
from octavo.core.outputs import EngineOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.stats import EngineStats
from octavo.core.step_plan import StepPlan, StepResult
from octavo.errors import InvalidRequestError
from octavo.hash_functions import Sha256
from octavo.request_queues import FCFSQueue, PriorityQueue
from octavo.testing.engines import (
    assert_nothing_leaks,
    assert_tables_are_sound,
    make_hashing_runner,
    make_hybrid_kv_cache_manager,
)
from octavo.testing.hashing_runner import next_token
from octavo.testing.reference import News, ReferenceEngine, Refused
from octavo.testing.reference_attention import ChunkedLocal, FullAttention, SlidingWindow
from octavo.testing.reference_cache import (
    NULL,
    ReferenceCache,
    ReferenceHit,
    ReferencePool,
    ReferenceRequest,
    real_blocks,
)

VOCAB_SIZE = 40
MAX_MODEL_LEN = 150
PlainPlan = list[tuple[ReferenceRequest, int]]
OF_THE_MOMENT = ("running", "waiting", "free_blocks", "used_blocks", "cached_blocks", "waiting_because")


@dataclass(frozen=True)
class Group:
    """What a KV-cache group keeps; `reach` is the window or the chunk."""

    kind: str
    block_size: int
    reach: int = 0

    def in_engine(self) -> hashing_engines.Group:
        make = getattr(hashing_engines, self.kind)
        return make(self.block_size, self.reach) if self.reach else make(self.block_size)

    def in_reference(self) -> FullAttention:
        match self.kind:
            case "window":
                return SlidingWindow(self.block_size, self.reach)
            case "chunk":
                return ChunkedLocal(self.block_size, self.reach)
        return FullAttention(self.block_size)


@dataclass(frozen=True)
class Settings:
    """How both engines are built."""

    num_usable_blocks: int
    groups: tuple[Group, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    watermark: float
    caching: bool
    shares_within_a_step: bool
    heeds_priority: bool
    ageing: int | None


# What groups there are, and how large their blocks are in comparison.
LAYOUTS = {
    "full, window": (("full", 1), ("window", 1)),
    "full, two windows": (("full", 1), ("window", 1), ("window", 1)),
    "chunk, full": (("chunk", 1), ("full", 1)),
    "window, chunk": (("window", 1), ("chunk", 1)),
    "full, window, 4 to 6": (("full", 4), ("window", 6)),
    "window, full, 1 to 2": (("window", 1), ("full", 2)),
    "chunk, mla, 2 to 1": (("chunk", 2), ("mla", 1)),
    "window, chunk, 4 to 6": (("window", 4), ("chunk", 6)),
    "window": (("window", 1),),
    "chunk": (("chunk", 1),),
}


def draw_groups(rng: random.Random, layout: str) -> tuple[Group, ...]:
    size = rng.choice([1, 2, 3, 4, 8, 16])
    # A hit is whole blocks of every group. With a least common multiple longer than prompts nothing would be found.
    largest = max(times for _, times in LAYOUTS[layout])
    size = {1: size, 2: size, 6: 1 + size % 2}[largest]
    return tuple(Group(kind, size * times, draw_reach(rng, kind)) for kind, times in LAYOUTS[layout])


def draw_reach(rng: random.Random, kind: str) -> int:
    """A window or a chunk; many are no whole blocks."""
    return rng.choice([1, 2, 4, 6, 8, 16, rng.randint(1, 40)]) if kind in ("window", "chunk") else 0


def draw_settings(rng: random.Random, layout: str | None = None) -> Settings:
    """Memory is short mostly: what happens then is what goes wrong. Where it is not, budget and slots are."""
    groups = (Group("full", rng.choice([1, 2, 3, 4, 8, 16])),) if layout is None else draw_groups(rng, layout)
    num_tokens = rng.choice([40, 40, 80, 400])
    return Settings(
        num_usable_blocks=rng.randint(4, max(4, sum(num_tokens // group.block_size for group in groups))),
        groups=groups,
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.choice([1, 2, 3, 5, 8, 13, 24, 64]),
        enable_chunked_prefill=rng.random() < 0.6,
        long_prefill_token_threshold=rng.choice([0, 0, 1, 4, 9]),
        watermark=rng.choice([0.0, 0.0, 0.01, 0.1, 0.3]),
        caching=rng.random() < 0.85,
        shares_within_a_step=rng.random() < 0.7,
        heeds_priority=rng.random() < 0.7,
        ageing=rng.choice([None, None, 1, 3, 10]),
    )


class WatchedCache(ReferenceCache):
    """Counts what happens in it."""

    def __init__(self, happened: Counter[str], *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.happened = happened

    def adopt(self, request: ReferenceRequest, hit: ReferenceHit) -> None:
        self.happened["null entries in a hit"] += any(NULL in table for table in hit.tables)
        self.happened["one group has more than the hit"] += hit.junction > hit.num_tokens
        super().adopt(request, hit)

    def give_back_unread(self, request: ReferenceRequest, num_computed: int) -> None:
        before = request.blocks
        super().give_back_unread(request, num_computed)
        for block in set(before).difference(request.blocks):
            self.happened["given back and likely to be found"] += block in self.pool.late
            self.happened["given back and unlikely to be found"] += block in self.pool.unlikely
            self.happened["given back and held by another"] += block not in self.pool.free


class BothEngines:
    """An engine and the plain one, driven alike and compared after each step."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.happened: Counter[str] = Counter()
        kv_cache_manager = make_hybrid_kv_cache_manager(
            [group.in_engine() for group in settings.groups],
            Sha256() if settings.caching else None,
            num_usable_blocks=settings.num_usable_blocks,
            num_rows=settings.max_num_seqs,
            max_tokens_in_flight=settings.max_num_batched_tokens,
            reuses_blocks_within_a_step=settings.shares_within_a_step,
        )
        queue = PriorityQueue(PriorityQueue.Options(ageing=settings.ageing)) if settings.heeds_priority else FCFSQueue()
        self.scheduler = Scheduler(
            kv_cache_manager,
            queue,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            enable_chunked_prefill=settings.enable_chunked_prefill,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            watermark=settings.watermark,
        )
        self.pool = kv_cache_manager.pool
        self.runner = make_hashing_runner(self.scheduler, VOCAB_SIZE)
        self.engine = EngineCore(
            self.scheduler,
            self.runner,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({7}),
        )
        plain_pool = ReferencePool(self.pool.num_blocks, caching=settings.caching)
        self.plain = ReferenceEngine(
            WatchedCache(
                self.happened,
                plain_pool,
                *[group.in_reference() for group in settings.groups],
                max_tokens_in_flight=settings.max_num_batched_tokens,
            ),
            self._next_token,
            heeds_priority=settings.heeds_priority,
            ageing=settings.ageing if settings.heeds_priority else None,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=settings.enable_chunked_prefill,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            watermark=settings.watermark,
            shares_within_a_step=settings.shares_within_a_step,
        )
        # What was found under each key, by the plain engine's name for it. One to one, for as long as they live.
        self.contents: dict[tuple[int, bytes], object] = {}
        self.is_undisturbed = True
        # Tokens of the longest request.
        self.capacity = max(n for n in range(MAX_MODEL_LEN) if not self.plain.never_fits(n))

    def _next_token(self, request: ReferenceRequest) -> int | None:
        if request.request_id in self.runner.failing_request_ids:
            return None
        return next_token(request.tokens, VOCAB_SIZE)

    # -- operations ---------------------------------------------------------------------------------------------

    def add(self, request: ReferenceRequest) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=request.max_tokens,
            ignore_eos=not request.eos_ids,
            stop_token_ids=sorted(request.stop_ids),
            skip_reading_prefix_cache=request.skips_reading,
        )
        prompt, salt = list(request.tokens), request.salt
        is_refused = False
        try:
            self.plain.add(request)
        except Refused:
            self.happened["refused"] += 1
            is_refused = True
        try:
            self.engine.add_request(request.request_id, prompt, params, priority=request.priority, cache_salt=salt)
            assert not is_refused
        except InvalidRequestError:
            assert is_refused

    def abort(self, request_id: str) -> None:
        self.is_undisturbed = False
        self.engine.abort_request(request_id)
        self.plain.abort(request_id)

    def reset(self) -> None:
        self.happened["reset"] += self.plain.reset_prefix_cache()
        result = self.scheduler.reset_prefix_cache()
        assert bool(result) is self.plain.reset_prefix_cache()

    def reset_with_running_requests(self) -> None:
        self.plain.reset_running_requests()
        assert self.plain.reset_prefix_cache()
        self.happened["reset_with_running_requests"] += bool(self.scheduler.running)
        num_running = len(self.scheduler.running)
        result = self.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert result
        assert result.num_preempted == num_running

    def step(self, *, aborted: str | None = None) -> None:
        """Plan and run a step; one request may be aborted while it runs."""
        ran_before, num_preemptions = set(self.plain.running), self.plain.counters["preemptions"]
        plan, plain_plan = self.scheduler.schedule(), self.plain.schedule()
        # Where others were preempted, only one that displaces them is admitted.
        has_admitted = not ran_before.issuperset(self.plain.running)
        self.happened["displaced"] += has_admitted and self.plain.counters["preemptions"] > num_preemptions
        self.compare_plans(plan, plain_plan)
        self.compare()
        try:
            result = self.runner.run(plan)
        except StepFailed:
            self._roll_back(plan, plain_plan)
        else:
            if aborted is not None:
                self.abort(aborted)
            self._take_in(plan, result, plain_plan)
        self.runner.fail_next = None
        self.runner.failing_request_ids = set()
        self.compare()

    def _roll_back(self, plan: StepPlan, plain_plan: PlainPlan) -> None:
        self.happened["failed_step"] += 1
        self.is_undisturbed = False
        by_arrival = sorted(zip(plan.arrivals, plan.request_ids, strict=True))
        assert self.scheduler.roll_back(plan) == [request_id for _, request_id in by_arrival]
        self.plain.roll_back(plain_plan)

    def _take_in(self, plan: StepPlan, result: StepResult, plain_plan: PlainPlan) -> None:
        news = self.plain.take_in(plain_plan)
        assert news_of(self.scheduler.update_from_output(plan, result)) == news
        for one in news:
            ending = one.stop_reason if isinstance(one.stop_reason, str) else one.finish_reason
            self.happened[f"ends by {ending}"] += ending is not None
            self.is_undisturbed &= ending != "non_finite_logits"

    def shown(self) -> Counter[str]:
        """What happened so far, by name."""
        return self.happened + self.plain.counters + Counter(evicted_blocks=self.pool.num_evictions)

    # -- comparison ---------------------------------------------------------------------------------------------

    def compare_plans(self, plan: StepPlan, plain_plan: PlainPlan) -> None:
        requests = [request for request, _ in plain_plan]
        assert plan.request_ids == [request.request_id for request in requests]
        assert plan.arrivals == [request.arrival for request in requests]
        assert plan.num_new_tokens.tolist() == [num_new for _, num_new in plain_plan]
        assert plan.first_positions.tolist() == [request.computed - num_new for request, num_new in plain_plan]
        assert plan.samples.tolist() == [request.behind == 0 for request in requests]
        assert plan.num_decode_entries == sum(num_new == 1 for _, num_new in plain_plan)
        known = [request.tokens[request.computed - n : request.computed] for request, n in plain_plan]
        assert plan.token_ids.tolist() == [token for tokens in known for token in tokens]
        for group, tables in enumerate(plan.block_tables):
            for table, request in zip(tables.tolist(), requests, strict=True):
                plain_table = request.tables[group]
                assert table == plain_table + [0] * (len(table) - len(plain_table))
        assert plan.num_tokens <= self.settings.max_num_batched_tokens

    def compare(self) -> None:
        scheduler, plain = self.scheduler, self.plain
        assert [r.request_id for r in scheduler.running] == [r.request_id for r in plain.running]
        line = sorted(plain.waiting, key=plain.urgency)
        assert [r.request_id for r in scheduler.waiting] == [r.request_id for r in line]
        managers = scheduler.kv_cache_manager.coordinator.managers
        for request, plain_request in zip(scheduler.running, plain.running, strict=True):
            assert [manager.block_table(request.row).tolist() for manager in managers] == plain_request.tables
            most = plain.cache.most_blocks(len(plain_request.tokens))
            held = [len(real_blocks(table)) for table in plain_request.tables]
            assert all(num_held <= num_most for num_held, num_most in zip(held, most, strict=True))
        assert_tables_are_sound(scheduler)
        assert self.pool.free_queue() == plain.pool.free
        self.compare_contents()
        stats = scheduler.stats()
        assert (stats.running, stats.waiting) == (len(plain.running), len(plain.waiting))
        assert stats.free_blocks == len(plain.pool.free)
        assert stats.cached_blocks == len(plain.pool.content)
        counters = Counter({**plain.counters, "evicted_blocks": plain.pool.num_evictions})
        growing = [field.name for field in fields(EngineStats) if field.name not in OF_THE_MOMENT]
        assert {name: getattr(stats, name) for name in growing} == {name: counters[name] for name in growing}
        self.check_counters(stats)

    def compare_contents(self) -> None:
        """Keys and contents name each other, and the blocks under each are the same, in the same order."""
        blocks_of: dict[object, list[int]] = {}
        for block, content in self.plain.pool.content.items():
            blocks_of.setdefault(content, []).append(block)
        cached = self.pool.cached_blocks()
        content_of_block = self.plain.pool.content
        for key, blocks in cached.items():
            content = self.contents.setdefault(key, content_of_block.get(blocks[0]))
            assert blocks == blocks_of.get(content)
        assert len(cached) == len(blocks_of)

    def check_counters(self, stats: EngineStats) -> None:
        """What docs/scheduling.md says of the counters."""
        assert stats.hit_tokens <= stats.queried_tokens <= stats.prompt_tokens
        assert stats.free_blocks + stats.used_blocks == self.settings.num_usable_blocks
        assert stats.added_requests == stats.running + stats.waiting + stats.ended_requests
        if self.is_undisturbed and not stats.running and not stats.waiting:
            computed_anew = stats.recomputed_tokens - stats.found_tokens
            computed_once = stats.prompt_tokens - stats.hit_tokens + stats.generated_tokens - stats.ended_requests
            assert stats.computed_tokens == computed_once + computed_anew


class StepFailed(Exception):
    """What the runner raises in a step that fails."""


def news_of(output: EngineOutput) -> list[News]:
    return [
        News(
            output.request_ids[entry],
            (output.token_ids_of(entry) or [None])[0],
            output.finish_reasons[entry],
            output.stop_reasons[entry],
            output.num_cached_tokens[entry],
            output.num_preemptions[entry],
        )
        for entry in range(len(output))
    ]


def draw_tokens(rng: random.Random, size: int) -> list[int]:
    number = rng.choice([0, 1, size, rng.randint(0, 30), rng.randint(0, 140)])
    return [rng.randrange(VOCAB_SIZE) for _ in range(number)]


def draw_request(both: BothEngines, rng: random.Random, number: int, prompts: list[list[int]]) -> ReferenceRequest:
    """A request whose prompt often begins like others', or is another's, and often ends with a block."""
    size, capacity = both.plain.cache.alignment, both.capacity
    if prompts and rng.random() < 0.4:
        prompt = rng.choice(prompts[-6:])
        if rng.random() < 0.5:
            # It turns off somewhere on the way.
            prompt = prompt[: rng.randint(0, len(prompt))] + draw_tokens(rng, size)
    else:
        shared = [rng.randrange(3)] * rng.choice([0, size, 2 * size, 3 * size, rng.randint(0, 20)])
        prompt = shared + draw_tokens(rng, size)
    prompt = prompt[: rng.choice([capacity, capacity // 2 + 1, capacity + 2])]
    if rng.random() < 0.95:
        prompt = prompt or [0]
    prompts.append(prompt)
    return ReferenceRequest(
        # Ids come back once their owners have ended, and are refused before.
        f"r{number}" if rng.random() < 0.7 else f"again{number % 3}",
        list(prompt),
        max_tokens=rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 60)]),
        priority=rng.randint(-4, 4) if both.settings.heeds_priority or rng.random() < 0.02 else 0,
        salt=rng.choice([None, None, None, None, "a", "b"]),
        skips_reading=rng.random() < 0.1,
        eos_ids=rng.choice([frozenset(), frozenset({7})]),
        stop_ids=rng.choice([frozenset(), frozenset(), frozenset({3, 12})]),
    )


def run_trace(seed: int, num_steps: int = 50, settings: Settings | None = None) -> BothEngines:
    """Run a random trace to its end; return the engines, in which nothing may be left."""
    rng = random.Random(seed)
    both = BothEngines(settings or draw_settings(rng))
    # In some traces nothing goes wrong, so that the sums can be checked.
    is_rough = rng.random() < 0.7
    load = rng.choice([0.2, 0.5, 1.5])
    prompts: list[list[int]] = []
    for _ in range(num_steps):
        while rng.random() < load / (1 + load) and len(both.plain.waiting) < 12:
            both.add(draw_request(both, rng, len(prompts), prompts))
        aborted = None
        under_way = [request.request_id for request in both.plain.running + both.plain.waiting]
        if is_rough and under_way:
            if rng.random() < 0.05:
                both.abort(rng.choice(under_way))
            if rng.random() < 0.05:
                aborted = rng.choice(under_way)
            if rng.random() < 0.05:
                both.runner.failing_request_ids = {rng.choice(under_way)}
            elif rng.random() < 0.06:
                both.runner.fail_next = StepFailed()
        if rng.random() < 0.03:
            both.reset()
        if rng.random() < 0.03:
            both.reset_with_running_requests()
        both.step(aborted=aborted)
    for _ in range(5000):
        if not both.engine.has_unfinished_requests():
            break
        both.step()
    both.compare()
    assert_nothing_leaks(both.engine)
    return both


SHOWN = (
    "evicted_blocks",
    "hit_tokens",
    "preemptions",
    "displaced",
    "recomputed_tokens",
    "found_tokens",
    "waits_for_memory",
    "waits_for_step",
    "never_fitted",
    "refused",
    "ends by stop",
    "ends by kv_cache_full",
    "ends by abort",
    "failed_step",
    "ends by non_finite_logits",
    "reset",
    "reset_with_running_requests",
)
SHOWN_WHERE_BLOCKS_ARE_GIVEN_BACK = (
    "null entries in a hit",
    "one group has more than the hit",
    "given back and likely to be found",
    "given back and unlikely to be found",
    "given back and held by another",
)


@cache
def shown_in(seed: int, layout: str | None = None) -> Counter[str]:
    """Run a random trace, once; return what happened in it."""
    settings = None if layout is None else draw_settings(random.Random(f"{layout} {seed}"), layout)
    return run_trace(seed, settings=settings).shown()


NUM_TRACES = 85
NUM_TRACES_OF_LAYOUT = 4


@pytest.mark.parametrize("seed", range(NUM_TRACES))
def test_a_random_trace_is_the_same_in_the_reference(seed):
    shown_in(seed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(NUM_TRACES_OF_LAYOUT))
def test_a_random_trace_where_blocks_are_given_back_is_the_same_in_the_reference(seed, layout):
    shown_in(seed, layout)


def test_random_traces_show_all_that_can_happen():
    """Those above prove nothing about what does not happen in them."""
    shown = sum((shown_in(seed) for seed in range(NUM_TRACES)), Counter())
    given_back = sum((shown_in(s, layout) for layout in LAYOUTS for s in range(NUM_TRACES_OF_LAYOUT)), Counter())
    assert [name for name in SHOWN if not shown[name]] == []
    assert [name for name in SHOWN if name != "found_tokens" and not given_back[name]] == []
    assert [name for name in SHOWN_WHERE_BLOCKS_ARE_GIVEN_BACK if not given_back[name]] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_many_more_random_traces_are_the_same_in_the_reference(seed):
    for offset in range(7):
        run_trace(1000 + 10 * seed + offset, num_steps=100)
    for layout in LAYOUTS:
        for offset in range(2):
            settings = draw_settings(random.Random(f"{layout} {seed} {offset} slow"), layout)
            run_trace(1000 + 10 * seed + offset, settings=settings)
