"""The engine and the plain engine of the reference do the same, step by step, whatever is asked of them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, fields, replace

import pytest

from octavo.core.engine_core import EngineCore
from octavo.core.interfaces import FullAttentionSpec, SingleTypeKVCacheManager
from octavo.core.outputs import EngineOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.stats import EngineStats
from octavo.core.step_plan import StepPlan, StepResult
from octavo.errors import InvalidRequestError
from octavo.hash_functions import Sha256
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.request_queues import FCFSQueue, PriorityQueue
from octavo.testing.engines import assert_nothing_leaks, assert_tables_are_sound, make_kv_cache_manager
from octavo.testing.hashing_runner import HashingRunner, next_token
from octavo.testing.reference import News, ReferenceEngine, Refused
from octavo.testing.reference_cache import FullAttention, ReferenceCache, ReferencePool, ReferenceRequest

VOCAB_SIZE = 40
MAX_MODEL_LEN = 150
PlainPlan = list[tuple[ReferenceRequest, int]]
OF_THE_MOMENT = ("running", "waiting", "free_blocks", "used_blocks", "cached_blocks", "waiting_because")


@dataclass(frozen=True)
class Settings:
    """How both engines are built."""

    num_usable_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    watermark: float
    caching: bool
    shares_within_a_step: bool
    heeds_priority: bool
    ageing: int | None
    has_window: bool = False


def draw_settings(rng: random.Random) -> Settings:
    """Memory is short mostly: what happens then is what goes wrong. Where it is not, budget and slots are."""
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    num_tokens = rng.choice([40, 40, 80, 400])
    return Settings(
        num_usable_blocks=rng.randint(4, max(4, num_tokens // block_size)),
        block_size=block_size,
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


# Tokens that a query reads where there is a window, itself included.
WINDOW = 6


class WindowManager(SingleTypeKVCacheManager):
    """What nothing reads any more is given back when a block is full."""

    contract_version = 1
    serves = FullAttentionSpec

    def skipped_blocks(self, num_computed_tokens):
        full = num_computed_tokens - num_computed_tokens % self.block_size
        return range(max(full - WINDOW + 1, 0) // self.block_size)

    def longest_prefix(self, is_cached, max_blocks, alignment_blocks):
        run = 0
        for block in range(max_blocks - 1, -1, -1):
            run = run + 1 if is_cached(block) else 0
            if run * self.block_size >= WINDOW - 1:
                return block + run
        return run

    @classmethod
    def max_blocks_per_request(cls, spec, max_model_len, max_tokens_in_flight):
        behind = -(-(WINDOW - 1) // spec.block_size)
        ahead = -(-(spec.block_size - 1 + max_tokens_in_flight) // spec.block_size)
        return min(behind + ahead, -(-max_model_len // spec.block_size))


class WindowAttention(FullAttention):
    """The same in the reference."""

    def __init__(self, block_size, max_num_batched_tokens):
        super().__init__(block_size)
        self.max_num_batched_tokens = max_num_batched_tokens

    def unread_blocks(self, num_computed):
        first_of_block = self.block_size * (num_computed // self.block_size)
        blocks = range(num_computed // self.block_size + 1)
        return range(sum((block + 1) * self.block_size <= first_of_block - WINDOW + 1 for block in blocks))

    def longest_prefix(self, is_cached):
        num_read = self.blocks_for(WINDOW - 1)
        lengths = range(len(is_cached) + 1)
        return max(length for length in lengths if all(is_cached[max(length - num_read, 0) : length]))

    def most_blocks(self, num_tokens):
        in_step = self.blocks_for(self.block_size - 1 + self.max_num_batched_tokens)
        return min(self.blocks_for(WINDOW - 1) + in_step, self.blocks_for(num_tokens))


class WindowRunner:
    """Writes the tokens of a step, then looks at each slot that one of them reads."""

    def __init__(self, block_size, tokens_of):
        self.block_size = block_size
        self.tokens_of = tokens_of
        self.fail_next = None
        self.failing_request_ids = set()
        self.slots = {}

    def run(self, plan):
        if self.fail_next is not None and plan.num_entries:
            raise self.fail_next
        ends = plan.num_new_tokens.cumsum().tolist()
        entries = list(zip(plan.request_ids, plan.first_positions.tolist(), plan.num_new_tokens.tolist(), strict=True))
        for entry, (_, first, num_new) in enumerate(entries):
            for position, token in enumerate(plan.token_ids[ends[entry] - num_new : ends[entry]].tolist(), first):
                self.slots[self.slot(plan, entry, position)] = token
        result = StepResult()
        for entry, (request_id, first, num_new) in enumerate(entries):
            tokens = self.tokens_of(request_id)
            # The first new token reads the furthest back.
            for position in range(max(first - WINDOW + 1, 0), first + num_new):
                assert self.slots[self.slot(plan, entry, position)] == tokens[position]
            if plan.samples[entry]:
                result.token_ids.append(next_token(tokens, VOCAB_SIZE))
                result.failed.append(request_id in self.failing_request_ids)
                result.logprobs.append(None)
        return result

    def slot(self, plan, entry, position):
        block = int(plan.block_tables[0][entry, position // self.block_size])
        assert block, "a slot of the null block"
        return block, position % self.block_size


class BothEngines:
    """An engine and the plain one, driven alike and compared after each step."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        kv_cache_manager = make_kv_cache_manager(
            WindowManager if settings.has_window else FullAttentionManager,
            Sha256() if settings.caching else None,
            num_usable_blocks=settings.num_usable_blocks,
            block_size=settings.block_size,
            num_rows=settings.max_num_seqs,
            reuses_blocks_within_a_step=settings.shares_within_a_step,
        )
        kv_cache_manager.max_tokens_in_flight = settings.max_num_batched_tokens
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
        self.runner: HashingRunner | WindowRunner = HashingRunner(self.pool.num_blocks, settings.block_size, VOCAB_SIZE)
        attention = FullAttention(settings.block_size)
        if settings.has_window:
            self.runner = WindowRunner(settings.block_size, self._tokens_of)
            attention = WindowAttention(settings.block_size, settings.max_num_batched_tokens)
        self.engine = EngineCore(
            self.scheduler,
            self.runner,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({7}),
        )
        plain_pool = ReferencePool(self.pool.num_blocks, caching=settings.caching)
        self.plain = ReferenceEngine(
            ReferenceCache(plain_pool, attention),
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
        self.contents: dict[bytes, object] = {}
        self.happened: Counter[str] = Counter()
        self.is_undisturbed = True

    def _tokens_of(self, request_id: str) -> list[int]:
        (request,) = [request for request in self.plain.running if request.request_id == request_id]
        return request.tokens

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
        for table, request in zip(plan.block_tables[0].tolist(), requests, strict=True):
            assert table == request.table + [0] * (len(table) - len(request.table))
        assert plan.num_tokens <= self.settings.max_num_batched_tokens

    def compare(self) -> None:
        scheduler, plain = self.scheduler, self.plain
        assert [r.request_id for r in scheduler.running] == [r.request_id for r in plain.running]
        line = sorted(plain.waiting, key=plain.urgency)
        assert [r.request_id for r in scheduler.waiting] == [r.request_id for r in line]
        (manager,) = scheduler.kv_cache_manager.coordinator.managers
        for request, plain_request in zip(scheduler.running, plain.running, strict=True):
            assert manager.block_table(request.row).tolist() == plain_request.table
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
        for (_, key), blocks in cached.items():
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


def draw_request(both: BothEngines, rng: random.Random, number: int, prompts: list[list[int]]) -> ReferenceRequest:
    """A request whose prompt often begins like others', or is another's, and often ends with a block."""
    size, capacity = both.settings.block_size, both.settings.num_usable_blocks * both.settings.block_size
    if prompts and rng.random() < 0.4:
        prompt = rng.choice(prompts[-6:])
    else:
        shared = [rng.randrange(3)] * rng.choice([0, size, 2 * size, 3 * size, rng.randint(0, 20)])
        num_own = rng.choice([0, 1, size, rng.randint(0, 30), rng.randint(0, 140)])
        own = [rng.randrange(VOCAB_SIZE) for _ in range(num_own)]
        prompt = (shared + own)[: rng.choice([capacity, capacity // 2 + 1, capacity + 2])]
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


@pytest.mark.parametrize("seed", range(120))
def test_a_random_trace_is_the_same_in_the_reference(seed):
    run_trace(seed)


@pytest.mark.parametrize("seed", range(30))
def test_a_random_trace_with_a_window_is_the_same_in_the_reference(seed):
    run_trace(seed, settings=replace(draw_settings(random.Random(seed)), has_window=True))


def test_random_traces_show_all_that_can_happen():
    """Those above prove nothing about what does not happen in them."""
    shown: Counter[str] = Counter()
    for seed in range(40):
        shown += run_trace(seed).shown()
    assert [name for name in SHOWN if not shown[name]] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_many_more_random_traces_are_the_same_in_the_reference(seed):
    for offset in range(10):
        run_trace(1000 + 10 * seed + offset, num_steps=100)
        settings = replace(draw_settings(random.Random(f"window {seed} {offset}")), has_window=True)
        run_trace(1000 + 10 * seed + offset, num_steps=100, settings=settings)
