"""Urgent requests go first, in the places of others where there are too few, and nobody is displaced for nothing.

The pools have blocks of 4 tokens. A request of 4n + 1 tokens has n + 1 blocks, which are enough for three more.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from octavo.core.engine_core import EngineCore
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError
from octavo.request_queues import FCFSQueue, PriorityQueue
from octavo.testing.engines import (
    Finished,
    assert_nothing_leaks,
    assert_tables_are_sound,
    collect,
    make_hashing_engine,
    run_to_end,
)
from octavo.testing.hashing_runner import HashingRunner, expected_tokens

BLOCK_SIZE = 4


@dataclass
class Engine:
    """An engine, and all that was asked of it and came of it."""

    core: EngineCore
    runner: HashingRunner
    asked: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    records: dict[str, Finished] = field(default_factory=dict)

    def add(self, request_id, prompt, priority=0, max_tokens=8):
        """Add a request; a number stands for a prompt of so many tokens that begins like no other."""
        if isinstance(prompt, int):
            prompt = [100 + len(self.asked), *range(prompt - 1)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        self.core.add_request(request_id, prompt, params, priority=priority)
        self.asked[request_id] = (prompt, max_tokens)

    def step(self, num_steps=1):
        for _ in range(num_steps):
            collect(self.records, self.core.step())
            assert_tables_are_sound(self.core.scheduler)

    def finish(self):
        """Step to the end; each request has generated what it would have generated alone, with nothing cached."""
        for _ in range(5000):
            if not self.core.has_unfinished_requests():
                break
            self.step()
        for request_id, (prompt, max_tokens) in self.asked.items():
            assert self.records[request_id].token_ids == expected_tokens(prompt, max_tokens, self.runner.vocab_size)
            assert self.records[request_id].finish_reason == "length"
        assert_nothing_leaks(self.core)

    @property
    def running(self):
        return [request.request_id for request in self.core.scheduler.running]

    @property
    def waiting(self):
        return [request.request_id for request in self.core.scheduler.waiting]

    @property
    def preempted(self):
        """The ids of requests that were preempted, and how often."""
        under_way = [*self.core.scheduler.running, *self.core.scheduler.waiting]
        counts = {request_id: record.num_preemptions for request_id, record in self.records.items()}
        counts |= {request.request_id: request.num_preemptions for request in under_way}
        return {request_id: count for request_id, count in counts.items() if count}

    def first_step_of(self, request_id):
        """Return the number of the first step that computed something of a request."""
        return next(number for number, plan in enumerate(self.runner.plans) if request_id in plan.request_ids)


@pytest.fixture
def make_engine(make_kv) -> Iterator[Callable[..., Engine]]:
    """Makes engines with a priority queue; in the end each one is to have finished everything."""
    engines: list[Engine] = []

    def make(num_blocks=200, *, queue=None, ageing=None, caching=True, **options) -> Engine:
        kv = make_kv(num_blocks, BLOCK_SIZE, caching=caching, num_rows=options.get("max_num_seqs", 8))
        queue = PriorityQueue(PriorityQueue.Options(ageing=ageing)) if queue is None else queue
        engines.append(Engine(*make_hashing_engine(kv, queue, **options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.finish()
        engine.core.shutdown()


# -- who gets a number that the queue does not order by ---------------------------------------------------------


@pytest.mark.parametrize("priority", [-3, 1])
def test_with_fcfs_a_priority_is_refused_and_leaves_nothing_behind(make_engine, priority):
    engine = make_engine(queue=FCFSQueue())
    with pytest.raises(InvalidRequestError) as caught:
        engine.add("r", 5, priority=priority)
    assert str(caught.value) == (
        f"priority is {priority}, and the request queue FCFSQueue does not order by priority; leave it at 0, or choose "
        "a queue that does."
    )
    assert caught.value.parameter == "priority"
    engine.add("r", 5, priority=0)


def test_a_priority_below_zero_is_more_urgent_than_none(make_engine):
    engine = make_engine(max_num_seqs=1)
    engine.add("usual", 5)
    engine.add("urgent", 5, priority=-3)
    engine.step()
    assert (engine.running, engine.waiting) == (["urgent"], ["usual"])


# -- displacement for a slot ------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_an_urgent_request_starts_within_two_steps_where_a_less_urgent_one_has_the_only_slot(
    make_engine, caching, is_ahead
):
    engine = make_engine(max_num_seqs=1, caching=caching, async_scheduling=is_ahead)
    engine.add("low", 9, priority=5, max_tokens=50)
    engine.step(10)
    num_steps = len(engine.runner.plans)
    engine.add("high", 7, max_tokens=12)
    engine.finish()
    # A step that is planned already goes without it.
    assert engine.first_step_of("high") == num_steps + is_ahead
    assert engine.preempted == {"low": 1}
    # Nobody runs beside the urgent one.
    steps_of_high = [plan.request_ids for plan in engine.runner.plans if "high" in plan.request_ids]
    assert steps_of_high == [["high"]] * 12


def test_a_displaced_request_goes_on_where_it_was_when_the_urgent_one_has_ended(make_engine):
    engine = make_engine(max_num_seqs=1)
    engine.add("low", 9, priority=5, max_tokens=50)
    engine.step(10)
    assert len(engine.records["low"].token_ids) == 10
    engine.add("high", 7, max_tokens=4)
    engine.step(4)
    assert engine.records["high"].finish_reason == "length"
    assert len(engine.records["low"].token_ids) == 10
    engine.step()
    assert len(engine.records["low"].token_ids) == 11
    # Of 19 tokens, of which 18 were computed, 4 blocks are found.
    assert engine.runner.plans[-1].num_new_tokens.tolist() == [3]
    assert engine.core.stats().recomputed_tokens == 2


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_request_of_the_same_priority_displaces_nobody(make_engine, num_slots):
    engine = make_engine(num_slots * 4, max_num_seqs=num_slots)
    for number in range(5):
        engine.add(f"r{number}", 9, priority=2, max_tokens=5)
        engine.step()
    engine.finish()
    assert engine.preempted == {}
    first_steps = [engine.first_step_of(f"r{number}") for number in range(5)]
    assert first_steps == sorted(first_steps)


def test_where_a_slot_is_free_nobody_is_displaced_for_one(make_engine):
    engine = make_engine(max_num_seqs=2)
    engine.add("low", 9, priority=5)
    engine.step()
    engine.add("high", 9)
    engine.step()
    assert engine.running == ["low", "high"]
    engine.finish()
    assert engine.preempted == {}


def test_several_urgent_requests_take_their_places_in_one_step(make_engine):
    engine = make_engine(max_num_seqs=3)
    for number in range(3):
        engine.add(f"low{number}", 9, priority=5, max_tokens=20)
    engine.step()
    for number in range(2):
        engine.add(f"high{number}", 9, priority=number)
    engine.step()
    assert engine.running == ["low0", "high0", "high1"]
    assert sorted(engine.runner.plans[-1].request_ids) == ["high0", "high1", "low0"]
    assert engine.waiting == ["low1", "low2"]
    assert engine.preempted == {"low1": 1, "low2": 1}


def test_a_request_that_is_more_urgent_than_some_displaces_those_alone(make_engine):
    engine = make_engine(max_num_seqs=3)
    for priority in (1, 7, 3):
        engine.add(f"p{priority}", 9, priority=priority, max_tokens=20)
        engine.step()
    # The first takes the place of 7; the second the place of 3, and not of its equal; the third of nobody.
    for number in range(3):
        engine.add(f"new{number}", 9, priority=2, max_tokens=20)
        engine.step()
    assert engine.running == ["p1", "new0", "new1"]
    assert engine.waiting == ["new2", "p3", "p7"]


def test_a_more_urgent_head_displaces_whom_the_one_before_it_could_not(make_engine):
    engine = make_engine(max_num_seqs=1)
    engine.add("low", 9, priority=1, max_tokens=20)
    engine.step()
    engine.add("equal", 9, priority=1)
    engine.step()
    assert engine.running == ["low"]
    engine.add("high", 9)
    engine.step()
    assert engine.running == ["high"]
    assert engine.waiting == ["low", "equal"]


def test_what_waits_behind_is_not_admitted_in_a_step_that_displaces(make_engine):
    engine = make_engine(10, max_num_seqs=3)
    engine.add("low", 33, priority=5)
    engine.step()
    engine.add("high", 9)
    engine.add("behind", 5, priority=1)
    engine.step()
    assert engine.running == ["high"]
    engine.step()
    assert engine.running == ["high", "behind"]


# -- displacement for memory ------------------------------------------------------------------------------------

# Three requests of 4 blocks each fill the pool of 12. In order of admission:
HOLDERS = {"p1": 1, "p3": 3, "p2": 2}


def fill(engine):
    for request_id, priority in HOLDERS.items():
        engine.add(request_id, 13, priority=priority, max_tokens=12)
    engine.step()
    assert engine.core.stats().free_blocks == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("num_blocks", "victims"),
    [
        (1, ["p3"]),
        (4, ["p3"]),
        (5, ["p3", "p2"]),
        (8, ["p3", "p2"]),
        (9, ["p3", "p2", "p1"]),
        (12, ["p3", "p2", "p1"]),
    ],
)
def test_as_few_are_displaced_as_make_room_and_the_least_urgent_first(make_engine, caching, num_blocks, victims):
    engine = make_engine(12, caching=caching)
    fill(engine)
    engine.add("high", 4 * num_blocks - 3, max_tokens=3)
    engine.step()
    assert engine.running == [*(name for name in HOLDERS if name not in victims), "high"]
    assert engine.preempted == dict.fromkeys(victims, 1)


def test_of_equals_the_last_to_arrive_is_displaced_first(make_engine):
    engine = make_engine(12)
    for number in range(3):
        engine.add(f"r{number}", 13, priority=4)
    engine.step()
    engine.add("high", 5)
    engine.step()
    assert engine.preempted == {"r2": 1}


@pytest.mark.parametrize(("num_blocks", "victims"), [(4, ["p3"]), (8, ["p3", "p2"]), (9, []), (12, [])])
def test_where_all_that_may_be_displaced_are_too_few_none_is(make_engine, num_blocks, victims):
    engine = make_engine(12)
    fill(engine)
    # Not more urgent than the first of the holders.
    engine.add("head", 4 * num_blocks - 3, priority=1, max_tokens=3)
    engine.step()
    assert engine.preempted == dict.fromkeys(victims, 1)
    assert ("head" in engine.running) == bool(victims)
    if not victims:
        assert engine.core.stats().waiting_because.startswith(f"WAIT_MEMORY: {num_blocks} blocks ")


def test_a_head_in_vain_lets_nobody_behind_it_displace(make_engine):
    engine = make_engine(12)
    fill(engine)
    engine.add("head", 33, priority=1, max_tokens=3)
    engine.add("small", 5, priority=2)
    engine.step()
    assert engine.preempted == {}
    assert engine.waiting == ["head", "small"]


def test_a_head_that_was_in_vain_is_asked_about_those_that_are_left(make_engine):
    engine = make_engine(12)
    engine.add("urgent", 13, max_tokens=4)
    engine.add("ends first", 13, priority=5, max_tokens=2)
    engine.add("low", 13, priority=3, max_tokens=20)
    engine.step()
    engine.add("head", 33, priority=1, max_tokens=3)
    engine.step(3)
    # 4 blocks are free since the second step, and the 4 of "urgent" since this one.
    assert engine.running == ["low"]
    assert engine.preempted == {}
    engine.step()
    assert engine.running == ["head"]


@pytest.mark.parametrize("num_sharing", [1, 2])
@pytest.mark.parametrize(("num_blocks", "is_displaced"), [(5, True), (6, False)])
def test_blocks_that_the_head_shares_with_whom_it_displaces_are_not_counted_twice(
    make_engine, num_blocks, is_displaced, num_sharing
):
    # Those who share have 3 blocks together and one each; "urgent" has so many that 5 of the pool are not its own.
    # The head finds 3. While others hold them it takes `num_blocks` - 3 free ones, and without the others `num_blocks`.
    engine = make_engine(7 + num_sharing)
    prefix = list(range(12))
    engine.add("urgent", 4 * num_sharing + 5, max_tokens=3)
    for number in range(num_sharing):
        engine.add(f"victim{number}", [*prefix, 70 + number], priority=5)
    engine.step()
    assert engine.core.stats().free_blocks == 2 - num_sharing
    engine.add("head", [*prefix, 90, *range(4 * num_blocks - 15)], priority=1, max_tokens=3)
    engine.step()
    assert engine.preempted == ({f"victim{number}": 1 for number in range(num_sharing)} if is_displaced else {})
    assert ("head" in engine.running) == is_displaced
    engine.finish()
    assert engine.records["head"].num_cached_tokens == 12


def test_blocks_that_others_go_on_to_hold_are_not_counted_as_free(make_engine):
    # "urgent" and "victim" hold 3 blocks together, and one each; 3 are free.
    engine = make_engine(8)
    prefix = list(range(12))
    engine.add("urgent", [*prefix, 60], max_tokens=3)
    engine.add("victim", [*prefix, 70], priority=5, max_tokens=3)
    engine.step()
    assert engine.core.stats().free_blocks == 3
    engine.add("too large", 17, priority=1, max_tokens=3)
    engine.step()
    assert engine.preempted == {}
    engine.core.abort_request("too large")
    del engine.asked["too large"]
    engine.add("small", 13, priority=1, max_tokens=3)
    engine.step()
    assert engine.preempted == {"victim": 1}


@pytest.mark.parametrize(("num_blocks", "is_displaced"), [(12, True), (13, False)])
def test_the_watermark_stays_free_for_those_that_go_on(make_engine, num_blocks, is_displaced):
    engine = make_engine(20, watermark=0.1)
    engine.add("urgent", 21, max_tokens=6)
    engine.add("low", 21, priority=5, max_tokens=6)
    engine.step()
    # 8 are free. With those of "low" there are 14, of which 2 are kept.
    engine.add("head", 4 * num_blocks - 3, priority=1, max_tokens=3)
    engine.step()
    assert engine.preempted == ({"low": 1} if is_displaced else {})


def test_the_watermark_does_not_count_where_nobody_else_is_left(make_engine):
    engine = make_engine(20, watermark=0.1)
    engine.add("low", 21, priority=5)
    engine.step()
    engine.add("head", 77, max_tokens=3)
    engine.step()
    assert engine.running == ["head"]


@pytest.mark.parametrize(("num_blocks", "is_displaced"), [(10, True), (11, False)])
def test_what_is_owed_to_a_prompt_under_way_is_not_given_away(make_engine, num_blocks, is_displaced):
    engine = make_engine(20, max_num_batched_tokens=8)
    engine.add("urgent", 37, max_tokens=3)
    engine.step()
    engine.add("low", 1, priority=5, max_tokens=2)
    engine.step()
    # "urgent" holds or is owed 10 blocks, and "low" holds 1.
    engine.add("head", 4 * num_blocks - 3, priority=1, max_tokens=3)
    engine.step()
    assert engine.preempted == ({"low": 1} if is_displaced else {})


def test_nothing_is_owed_to_a_prompt_that_is_displaced(make_engine):
    engine = make_engine(20, max_num_batched_tokens=8)
    engine.add("low", 61, priority=5)
    engine.step()
    assert engine.core.stats().free_blocks == 18
    # All 20 blocks: 18 are free, and 14 of those were owed.
    engine.add("head", 77, max_tokens=3)
    engine.step()
    assert engine.running == ["head"]


# -- displaced in the middle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_prompt_that_is_half_computed_is_displaced_and_equals_cold(make_engine, caching, num_steps):
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=10, caching=caching)
    engine.add("low", 37, priority=5)
    engine.step(num_steps)
    assert "low" not in engine.records
    engine.add("high", 5, max_tokens=2)
    engine.step()
    assert engine.runner.plans[-1].request_ids == ["high"]
    engine.finish()
    assert engine.preempted == {"low": 1}
    # Whole blocks are found again, and nothing that was never computed.
    num_computed = 10 * num_steps
    found = num_computed // BLOCK_SIZE * BLOCK_SIZE if caching else 0
    assert engine.core.stats().recomputed_tokens == num_computed - found


def test_without_chunked_prefill_the_head_runs_whole_in_the_place_of_another(make_engine):
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=16, enable_chunked_prefill=False)
    engine.add("low", 16, priority=5, max_tokens=30)
    engine.step(20)
    engine.add("high", 16, max_tokens=3)
    engine.step()
    assert engine.runner.plans[-1].num_new_tokens.tolist() == [16]
    assert engine.runner.plans[-1].request_ids == ["high"]
    engine.finish()
    assert engine.preempted == {"low": 1}


def test_a_request_is_displaced_as_often_as_more_urgent_ones_arrive(make_engine):
    engine = make_engine(max_num_seqs=1)
    engine.add("low", 9, priority=5, max_tokens=30)
    for number in range(4):
        engine.step(3)
        engine.add(f"high{number}", 5, priority=number % 2, max_tokens=2)
    engine.finish()
    assert engine.preempted == {"low": 4}


# -- nobody waits for ever --------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [0, 2])
def test_a_preempted_request_has_run_again_before_any_equal_that_arrived_later(make_engine, priority):
    engine = make_engine(10, max_num_seqs=4)
    engine.add("first", 17, priority=priority, max_tokens=12)
    engine.add("second", 17, priority=priority, max_tokens=12)
    while not engine.preempted:
        engine.step()
    assert engine.preempted == {"second": 1}
    num_steps = len(engine.runner.plans)
    for number in range(20):
        engine.add(f"later{number}", 5, priority=priority, max_tokens=2)
        engine.step()
    engine.finish()
    resumed = next(n for n, p in enumerate(engine.runner.plans) if n >= num_steps and "second" in p.request_ids)
    assert resumed <= min(engine.first_step_of(f"later{number}") for number in range(20))


def low_among_urgent_ones(engine, num_steps):
    """Let an urgent request come in each step, each of which takes two; return the step that first served another."""
    engine.add("low", 5, priority=1, max_tokens=1)
    for number in range(num_steps):
        engine.add(f"high{number}", 5, max_tokens=2)
        engine.step()
    ran = [number for number, plan in enumerate(engine.runner.plans) if "low" in plan.request_ids]
    return ran[0] if ran else None


def test_without_ageing_a_request_waits_while_more_urgent_ones_keep_coming(make_engine):
    assert low_among_urgent_ones(make_engine(max_num_seqs=1), 40) is None


@pytest.mark.parametrize("ageing", [1, 5, 20])
def test_with_ageing_a_request_waits_for_as_many_more_urgent_ones_only(make_engine, ageing):
    # One more urgent by 1 goes first if it arrived fewer than `ageing` requests later: `ageing` - 1 of them.
    assert low_among_urgent_ones(make_engine(max_num_seqs=1, ageing=ageing), 50) == 2 * (ageing - 1)


@pytest.mark.parametrize("ageing", [None, 4])
def test_with_ageing_a_request_is_not_displaced_by_those_that_it_has_passed(make_engine, ageing):
    engine = make_engine(max_num_seqs=1, ageing=ageing)
    engine.add("low", 5, priority=1, max_tokens=30)
    for number in range(3):
        engine.add(f"high{number}", 5, max_tokens=2)
    while len(engine.records.get("low", Finished()).token_ids) < 3:
        engine.step()
    engine.add("passed", 5, max_tokens=2)
    engine.finish()
    assert engine.preempted == ({"low": 1} if ageing is None else {})


@pytest.mark.parametrize("seed", range(30))
def test_each_displacement_takes_an_arrival_of_higher_priority_of_its_own(make_engine, seed):
    rng = random.Random(seed)
    engine = make_engine(max_num_seqs=rng.randint(1, 4), max_num_batched_tokens=rng.choice([4, 9, 64]))
    arrivals = []
    for number in range(25):
        priority = rng.randint(-2, 2)
        arrivals.append(priority)
        engine.add(f"r{number}", rng.randint(1, 30), priority=priority, max_tokens=rng.randint(1, 20))
        engine.step(rng.randint(0, 6))
    engine.finish()
    for number, priority in enumerate(arrivals):
        num_more_urgent = sum(later < priority for later in arrivals[number + 1 :])
        assert engine.records[f"r{number}"].num_preemptions <= num_more_urgent


class ShortDisplacesLong(FCFSQueue):
    """Displaces by length and orders by arrival, which does not go together."""

    contract_version = 1

    def displaces(self, waiting, running):
        return waiting.num_tokens < running.num_tokens


def test_a_queue_that_displaces_against_its_own_order_still_serves_everybody(make_engine):
    engine = make_engine(queue=ShortDisplacesLong(), max_num_seqs=1)
    engine.add("long", 40, max_tokens=20)
    engine.step()
    engine.add("short", 5, max_tokens=5)
    engine.finish()
    assert engine.preempted["long"] > 1


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompt_that_must_run_whole_displaces_as_many_as_its_tokens_take_of_the_budget(make_kv, async_scheduling):
    engine, _ = make_hashing_engine(
        make_kv(500, 4),
        PriorityQueue(),
        max_num_seqs=7,
        max_num_batched_tokens=8,
        enable_chunked_prefill=False,
        async_scheduling=async_scheduling,
    )
    prompts = {f"low{number}": [number + 1] for number in range(7)} | {"urgent": range(50, 58)}
    for request_id, prompt in prompts.items():
        if request_id == "urgent":
            for _ in range(10):
                engine.step()
        params = SamplingParams(temperature=0, max_tokens=40)
        engine.add_request(request_id, prompt, params, priority=0 if request_id == "urgent" else 5)
    brought = [engine.step().request_ids for _ in range(3)]
    assert any("urgent" in request_ids for request_ids in brought[: 2 + async_scheduling])
    assert engine.stats().preemptions == 7
    run_to_end(engine)
    assert_nothing_leaks(engine)
