"""When memory is short: who gives way, how often, and that everybody ends as if alone."""

import random

import pytest
from hashing_engines import VOCAB_SIZE, assert_cold, finish, greedy, make_engine, scheduled, step

from octavo.request_queues import FCFSQueue, PriorityQueue
from octavo.testing.engines import Finished
from octavo.testing.hashing_runner import expected_tokens

OF_THE_MOMENT = {"running", "waiting", "free_blocks", "used_blocks", "cached_blocks", "waiting_because"}

# -- a preemption at an exact moment ------------------------------------------------------------------------------


def run_and_displace(num_tokens: int, *, prompt=(1, 2), max_tokens=14, **settings):
    """Run a request alone until it has so many tokens; then a more urgent one takes its place for one token."""
    engine, runner = make_engine(queue=PriorityQueue(), max_num_seqs=1, **settings)
    records = {"low": Finished()}
    engine.add_request("low", prompt, greedy(max_tokens), priority=5)
    while len(prompt) + len(records["low"].token_ids) < num_tokens:
        step(engine, records)
    engine.add_request("high", [7], greedy(1), priority=0)
    num_steps = len(runner.plans)
    finish(engine, records)
    assert scheduled(runner)[num_steps] == {"high": 1}
    assert records["low"].num_preemptions == engine.stats().preemptions == 1
    assert_cold(records["high"], [7], 1)
    assert_cold(records["low"], prompt, max_tokens)
    return runner.plans[num_steps + 1 :]


# A block has 4 tokens: one less, exactly one, one more, and the first of a third block.
@pytest.mark.parametrize("num_tokens", [3, 4, 5, 8, 9])
@pytest.mark.parametrize("caching", [True, False])
def test_a_request_preempted_anywhere_in_a_block_resumes_with_what_its_hit_leaves_and_equals_cold(num_tokens, caching):
    resumed = run_and_displace(num_tokens, caching=caching)
    # The last token was not computed yet; the cache has the full blocks of those before it.
    num_found = (num_tokens - 1) // 4 * 4 if caching else 0
    assert resumed[0].first_positions.tolist() == [num_found]
    assert resumed[0].num_new_tokens.tolist() == [num_tokens - num_found]
    # From then on a token a step, none of them twice.
    positions = [int(plan.first_positions[0] + plan.num_new_tokens[0]) for plan in resumed]
    assert positions == list(range(num_tokens, 16))
    assert all(plan.samples.tolist() == [True] for plan in resumed)


def test_a_step_that_holds_only_a_resumed_request_is_a_prefill_of_all_its_tokens_and_samples_once():
    resumed = run_and_displace(23, prompt=(1, 2, 3), max_tokens=24, caching=False, max_num_batched_tokens=8)
    assert [plan.num_new_tokens.tolist() for plan in resumed[:4]] == [[8], [8], [7], [1]]
    assert [plan.samples.tolist() for plan in resumed[:4]] == [[False], [False], [True], [True]]


def test_a_more_urgent_request_has_its_first_token_in_the_next_step_and_the_displaced_one_resumes():
    engine, _ = make_engine(queue=PriorityQueue(), max_num_seqs=1)
    records = {"low": Finished(), "high": Finished()}
    engine.add_request("low", range(9), greedy(50), priority=5)
    for _ in range(3):
        step(engine, records)
    engine.add_request("high", range(50, 57), greedy(6), priority=0)
    step(engine, records)
    assert (len(records["low"].token_ids), len(records["high"].token_ids)) == (3, 1)
    finish(engine, records)
    assert (records["low"].num_preemptions, records["high"].num_preemptions) == (1, 0)
    assert_cold(records["low"], range(9), 50)
    assert_cold(records["high"], range(50, 57), 6)


# -- growth at the edge of a block --------------------------------------------------------------------------------


def grow_to_five_tokens(num_usable_blocks):
    """Two requests of three tokens in blocks of four; return the engine after each has five, or would have."""
    engine, runner = make_engine(num_usable_blocks)
    records: dict[str, Finished] = {}
    engine.add_request("a", [1, 2, 3], greedy(3))
    # One token less, so that it stays within its block.
    engine.add_request("b", [11, 12], greedy(3))
    states = []
    for _ in range(3):
        step(engine, records)
        tables = engine.scheduler.kv_cache_manager.coordinator.managers[0]
        states.append({r.request_id: len(tables.block_table(r.row)) for r in engine.scheduler.running})
    finish(engine, records)
    assert_cold(records["a"], [1, 2, 3], 3)
    assert_cold(records["b"], [11, 12], 3)
    return scheduled(runner)[:3], states, records["b"].num_preemptions


def test_the_fourth_token_of_a_block_takes_no_memory_and_the_fifth_preempts_the_latest_arrival():
    steps, states, num_preemptions = grow_to_five_tokens(2)
    assert steps == [{"a": 3, "b": 2}, {"a": 1, "b": 1}, {"a": 1}]
    # In the second step both run on, in a full pool. In the third a has its last token, and its blocks are free again.
    assert states == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {}]
    assert num_preemptions == 1


def test_with_one_free_block_the_fifth_token_takes_it_and_both_run_on():
    steps, states, num_preemptions = grow_to_five_tokens(3)
    assert steps == [{"a": 3, "b": 2}, {"a": 1, "b": 1}, {"a": 1, "b": 1}]
    assert states == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {}]
    assert num_preemptions == 0


def test_a_table_has_two_blocks_when_five_tokens_are_stored():
    engine, _ = make_engine(2)
    engine.add_request("a", [1, 2, 3], greedy(8))
    tables = engine.scheduler.kv_cache_manager.coordinator.managers[0]
    lengths = []
    for _ in range(4):
        engine.step()
        (request,) = engine.scheduler.running
        lengths.append(len(tables.block_table(request.row)))
    # 3, 4, 5 and 6 tokens stored.
    assert lengths == [1, 1, 2, 2]
    assert engine.stats().free_blocks == 0
    finish(engine)


# -- how often one is preempted -----------------------------------------------------------------------------------


def test_a_long_prompt_that_was_preempted_does_not_come_back_for_a_chunk_while_another_generates():
    engine, runner = make_engine(8, max_num_batched_tokens=4)
    engine.add_request("a", [1, 2, 3], greedy(29))
    engine.add_request("long", range(100, 120), greedy(4))
    records = finish(engine)
    # Five blocks for its prompt and one more at the edge: at first there is room, and while `a` grows there is none.
    assert records["long"].num_preemptions == 1
    assert_cold(records["a"], [1, 2, 3], 29)
    assert_cold(records["long"], range(100, 120), 4)
    ran = ["long" in step_ for step_ in scheduled(runner)]
    # It runs in two stretches: until it is preempted, and after `a` has ended.
    assert sum(after and not before for before, after in zip([False, *ran], ran, strict=False)) == 2


def random_load(rng, num_requests):
    """Prompts that often begin alike, not always with whole blocks, and how many tokens each asks for."""
    shared = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (5, 11, 19, 8)]
    load = []
    for _ in range(num_requests):
        beginning = rng.choice([[], *shared])[: rng.choice([5, 19])]
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 21))]
        load.append(([*beginning, *own], rng.randint(1, 40)))
    return load


@pytest.mark.parametrize("seed", range(24))
def test_without_displacement_a_request_is_preempted_at_most_once_more_than_others_end_meanwhile(seed):
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    engine, _ = make_engine(
        -(-rng.choice([84, 100, 140]) // block_size),
        block_size,
        caching=rng.random() < 0.7,
        reuse=rng.random() < 0.7,
        max_num_batched_tokens=rng.choice([4, 16, 64]),
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        watermark=rng.choice([0.0, 0.01, 0.1]),
        queue=rng.choice([FCFSQueue, PriorityQueue])(),
    )
    load = random_load(rng, 30)
    records: dict[str, Finished] = {}
    # How many had ended when a request was added, and when it ended itself.
    ended_before, ended_after = {}, {}
    num_idle = num_added = 0
    while num_added < len(load) or engine.has_unfinished_requests():
        if num_added < len(load) and rng.random() < 0.6:
            prompt, max_tokens = load[num_added]
            request_id = f"r{num_added}"
            engine.add_request(request_id, prompt, greedy(max_tokens))
            ended_before[request_id] = len(ended_after)
            num_added += 1
            continue
        step(engine, records)
        for request_id, record in records.items():
            if record.finish_reason is not None and request_id not in ended_after:
                ended_after[request_id] = len(ended_after)
        stats = engine.stats()
        num_idle = num_idle + 1 if stats.waiting and not stats.running else 0
        assert num_idle <= 2
    for number, (prompt, max_tokens) in enumerate(load):
        record = records[f"r{number}"]
        assert_cold(record, prompt, max_tokens)
        num_others = ended_after[f"r{number}"] - ended_before[f"r{number}"]
        assert record.num_preemptions <= num_others + 1
    finish(engine)


def test_random_loads_do_preempt():
    """What is said above of preemptions says nothing unless there are some."""
    rng = random.Random(1)
    engine, _ = make_engine(21, max_num_batched_tokens=16)
    load = random_load(rng, 30)
    for number, (prompt, max_tokens) in enumerate(load):
        engine.add_request(f"r{number}", prompt, greedy(max_tokens))
    finish(engine)
    assert engine.stats().preemptions > 10


@pytest.mark.parametrize("queue", [FCFSQueue, PriorityQueue])
def test_preempted_requests_come_back_in_order_of_arrival_before_twenty_that_arrived_later(queue):
    engine, runner = make_engine(8, queue=queue())
    prompts = {name: range(100 * number, 100 * number + 4) for number, name in enumerate("xba")}
    num_tokens = {"x": 26, "b": 20, "a": 12}
    records: dict[str, Finished] = {}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(num_tokens[name]))
    while engine.stats().preemptions < 2:
        step(engine, records)
    # First `a` gave way, the last to arrive, and then `b`.
    assert [request.request_id for request in engine.scheduler.waiting] == ["b", "a"]
    since = len(runner.plans)
    for number in range(20):
        prompts[f"later{number}"] = [900 + number]
        engine.add_request(f"later{number}", prompts[f"later{number}"], greedy(2))
        step(engine, records)
    finish(engine, records)
    order = list(dict.fromkeys(name for step_ in scheduled(runner)[since:] for name in step_ if name != "x"))
    assert order == ["b", "a", *(f"later{number}" for number in range(20))]
    for name, prompt in prompts.items():
        assert_cold(records[name], prompt, num_tokens.get(name, 2))


# -- nothing is stuck ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("seed", range(4))
def test_requests_that_share_nearly_all_they_hold_all_end_in_as_many_steps_as_one_by_one(seed, budget):
    """The prefix fills half of the pool and everybody has it: to preempt one frees a block or two."""
    rng = random.Random(seed)
    num_usable_blocks = 12
    engine, _ = make_engine(num_usable_blocks, max_num_batched_tokens=budget, watermark=rng.choice([0.0, 0.1]))
    prefix = range(24)
    load = [([*prefix, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6)))], 16) for _ in range(12)]
    for number, (prompt, max_tokens) in enumerate(load):
        engine.add_request(f"r{number}", prompt, greedy(max_tokens))
    # The most urgent one is never preempted for another: it has half the budget at least, then a token a step.
    max_steps = sum(-(-len(prompt) // (budget // 2)) + max_tokens + 1 for prompt, max_tokens in load)
    records = finish(engine, max_steps=max_steps)
    for number, (prompt, max_tokens) in enumerate(load):
        assert_cold(records[f"r{number}"], prompt, max_tokens)
        assert records[f"r{number}"].num_preemptions <= len(load)
    assert engine.stats().preemptions > 0
    assert records["r0"].num_preemptions == 0


def test_requests_with_one_and_the_same_prompt_as_large_as_the_pool_allows_all_end():
    engine, _ = make_engine(5)
    for number in range(6):
        engine.add_request(f"r{number}", range(16), greedy(4))
    # Four blocks are shared but for the last, of which each computes its last token again; the fifth is for one.
    records = finish(engine, max_steps=6 * (1 + 4 + 1))
    for number in range(6):
        assert_cold(records[f"r{number}"], range(16), 4)


def run_whole_load(load, **settings):
    """Return how often requests were preempted, and how many tokens were computed again for it."""
    engine, _ = make_engine(16, max_num_batched_tokens=16, **settings)
    for number, (prompt, max_tokens) in enumerate(load):
        engine.add_request(f"r{number}", prompt, greedy(max_tokens))
    records = finish(engine)
    for number, (prompt, max_tokens) in enumerate(load):
        assert_cold(records[f"r{number}"], prompt, max_tokens)
    return engine.stats().preemptions, engine.stats().recomputed_tokens


@pytest.mark.parametrize(("watermark", "num_preemptions"), [(0.0, 1), (0.25, 0)])
def test_the_watermark_keeps_a_request_from_being_started_and_preempted_two_steps_later(watermark, num_preemptions):
    engine, runner = make_engine(4, watermark=watermark)
    records: dict[str, Finished] = {}
    engine.add_request("a", [1, 2, 3], greedy(4))
    step(engine, records)
    engine.add_request("b", range(100, 112), greedy(2))
    finish(engine, records)
    # Without it `b` takes the last three blocks, and in the next step `a` needs one.
    started = {step_.get("b") for step_ in scheduled(runner)[1:3]}
    assert started == ({12, None} if num_preemptions else {None})
    assert records["b"].num_preemptions == engine.stats().preemptions == num_preemptions
    assert_cold(records["a"], [1, 2, 3], 4)
    assert_cold(records["b"], range(100, 112), 2)


def test_with_a_watermark_random_loads_preempt_less_than_half_as_often_and_compute_less_again():
    totals = {}
    for watermark in (0.0, 0.25):
        numbers = []
        for seed in range(8):
            rng = random.Random(seed)
            load = [([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(6, 12))], 20) for _ in range(12)]
            numbers.append(run_whole_load(load, watermark=watermark))
        totals[watermark] = [sum(column) for column in zip(*numbers, strict=True)]
    (preemptions, recomputed), (fewer_preemptions, fewer_recomputed) = totals[0.0], totals[0.25]
    assert preemptions > 50
    assert fewer_preemptions < preemptions / 2
    assert fewer_recomputed < recomputed


def test_a_request_that_fits_only_into_what_is_kept_free_waits_while_others_run_and_not_alone():
    # A quarter of eight blocks is kept: two.
    engine, runner = make_engine(8, watermark=0.25)
    engine.add_request("a", range(8), greedy(4))
    engine.add_request("b", range(100, 120), greedy(1))
    records = finish(engine)
    # Two blocks for `a` leave six; `b` needs five of them and would leave one.
    assert [set(step_) for step_ in scheduled(runner)] == [{"a"}] * 4 + [{"b"}]
    assert_cold(records["b"], range(100, 120), 1)
    engine.add_request("whole pool", range(200, 231), greedy(1))
    assert_cold(finish(engine)["whole pool"], range(200, 231), 1)


# -- a long day ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("caching", [True, False])
def test_three_hundred_requests_of_which_a_fifth_is_aborted_leave_the_pool_as_it_was(caching, async_scheduling):
    rng = random.Random(7)
    engine, _ = make_engine(20, 8, caching=caching, async_scheduling=async_scheduling, max_num_batched_tokens=48)
    canary = expected_tokens(range(13), 5, VOCAB_SIZE)
    engine.add_request("canary", range(13), greedy(5))
    assert finish(engine)["canary"].token_ids == canary
    # Beginnings that end inside a block of 8.
    shared = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (5, 11, 19, 27)]
    asked: dict[str, tuple[list[int], int]] = {}
    records: dict[str, Finished] = {}
    to_abort: list[str] = []
    last = vars(engine.stats())
    while len(asked) < 300 or engine.has_unfinished_requests():
        while len(asked) < 300 and rng.random() < 0.5:
            request_id = f"r{len(asked)}"
            length = rng.randint(1, 40)
            prompt = [*rng.choice([[], *shared]), *(rng.randrange(VOCAB_SIZE) for _ in range(length))][:length]
            asked[request_id] = (prompt, rng.randint(1, 40))
            engine.add_request(request_id, prompt, greedy(asked[request_id][1]))
            if rng.random() < 0.2:
                to_abort.append(request_id)
        if to_abort and rng.random() < 0.3:
            engine.abort_request(to_abort.pop(rng.randrange(len(to_abort))))
        step(engine, records)
        stats = engine.stats()
        # Blocks that are cached and free are counted once.
        assert stats.free_blocks + stats.used_blocks == 20
        assert stats.added_requests == stats.running + stats.waiting + stats.ended_requests
        assert all(value >= last[name] for name, value in vars(stats).items() if name not in OF_THE_MOMENT)
        last = vars(stats)
    assert len(records) == 300
    num_aborted = 0
    for request_id, (prompt, max_tokens) in asked.items():
        record = records[request_id]
        if record.finish_reason == "abort":
            num_aborted += 1
            assert record.token_ids == expected_tokens(prompt, len(record.token_ids), VOCAB_SIZE)
        else:
            assert_cold(record, prompt, max_tokens)
    assert num_aborted > 30
    assert engine.stats().preemptions > 10
    finish(engine)
    engine.add_request("canary", range(13), greedy(5))
    assert finish(engine)["canary"].token_ids == canary
    engine.shutdown()
