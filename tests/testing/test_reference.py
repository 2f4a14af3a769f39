"""The plain engine does what the worked examples say, number for number."""

from __future__ import annotations

import pytest

from octavo.testing.reference import News, ReferenceEngine, Refused
from octavo.testing.reference_cache import FullAttention, ReferenceCache, ReferencePool, ReferenceRequest


def make_engine(num_usable_blocks: int, block_size: int, *, caching: bool = True, **options) -> ReferenceEngine:
    """An engine whose requests all generate 1, 1, 1 ..."""
    pool = ReferencePool(num_usable_blocks + 1, caching=caching)
    options = {"watermark": 0.0, **options}
    return ReferenceEngine(ReferenceCache(pool, FullAttention(block_size)), lambda request: 1, **options)


def add(engine: ReferenceEngine, request_id: str, prompt, max_tokens: int = 1000, **options) -> ReferenceRequest:
    request = ReferenceRequest(request_id, list(prompt), max_tokens, **options)
    engine.add(request)
    return request


def step(engine: ReferenceEngine) -> dict[str, int]:
    """Run a step; return the tokens of each request, in the order of the plan."""
    plan = engine.schedule()
    engine.take_in(plan)
    return {request.request_id: num_new for request, num_new in plan}


def test_the_life_of_a_pool_of_ten_blocks():
    engine = make_engine(10, 4)
    pool = engine.pool
    r0 = add(engine, "r0", range(100, 115), max_tokens=4)
    step(engine)
    assert r0.table == [1, 2, 3, 4]
    assert sorted(pool.content) == [1, 2, 3]
    step(engine)
    step(engine)
    assert (r0.computed, len(r0.tokens)) == (17, 18)
    assert sorted(pool.content) == [1, 2, 3, 4]
    assert r0.table == [1, 2, 3, 4, 5]

    r1 = add(engine, "r1", [*range(100, 110), 1, 2, 3, 4], max_tokens=2)
    # Both have their next token in this step, and r0 its last.
    assert step(engine) == {"r0": 1, "r1": 6}
    assert r1.num_cached == 8
    assert r1.table == [1, 2, 6, 7]
    assert r0 not in engine.running
    assert pool.free == [5, 8, 9, 10, 4, 3]
    step(engine)
    assert pool.free == [7, 5, 8, 9, 10, 4, 3, 6, 2, 1]

    r2 = add(engine, "r2", [*range(100, 112), *range(17)])
    step(engine)
    assert r2.num_cached == 12
    assert r2.table == [1, 2, 3, 7, 5, 8, 9, 10]
    assert pool.free == [4, 6]
    assert set(pool.free) < set(pool.content)


def test_a_shared_prefix_is_held_once_by_each():
    pool = ReferencePool(5)
    first = pool.allocate(3)
    for block in first:
        pool.register(block, block)
    pool.touch(first[:2])
    second = [*first[:2], *pool.allocate(1)]
    pool.register(second[2], "another")
    assert list(pool.references.values()) == [2, 2, 1, 1]
    pool.give_back(reversed(first))
    assert list(pool.references.values()) == [1, 1, 0, 1]
    pool.give_back(reversed(second))
    assert list(pool.references.values()) == [0, 0, 0, 0]
    assert [pool.find(content) for content in (*first, "another")] == [1, 2, 3, 4]


def test_a_long_prompt_gets_what_two_decoding_requests_leave_of_the_budget():
    engine = make_engine(400, 16, max_num_batched_tokens=256, max_model_len=2000)
    add(engine, "a", [1, 2])
    add(engine, "b", [3, 4])
    step(engine)
    long = add(engine, "long", range(1000))
    assert [step(engine) for _ in range(4)] == [{"a": 1, "b": 1, "long": chunk} for chunk in (254, 254, 254, 238)]
    assert len(long.tokens) == 1001


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(100, 7), (50, 4), (200, 13), (2050, 129), (2350, 147)])
def test_blocks_of_sixteen_tokens(num_tokens, num_blocks):
    assert FullAttention(16).blocks_for(num_tokens) == num_blocks


def test_a_system_prompt_of_whole_blocks_is_shared_whole_and_another_one_without_its_last_block():
    engine = make_engine(1000, 16, max_num_batched_tokens=4096, max_model_len=4096)
    add(engine, "first", range(2050))
    step(engine)
    whole = add(engine, "whole", [*range(2000), 1, 2])
    assert step(engine)["whole"] == 2
    assert whole.num_cached == 2000
    longer = add(engine, "longer", [*range(2050), 1, 2])
    step(engine)
    assert longer.num_cached == 2048


def test_the_last_token_of_a_prompt_is_computed_however_much_is_cached():
    engine = make_engine(10, 4)
    for name, num_cached in (("first", 0), ("second", 4)):
        request = add(engine, name, range(8))
        step(engine)
        assert request.num_cached == num_cached


def test_salts_keep_requests_apart():
    engine = make_engine(30, 4)
    hits = []
    for number, salt in enumerate(["a", "a", "b", None]):
        request = add(engine, str(number), range(8), salt=salt)
        step(engine)
        hits.append(request.num_cached)
    assert hits == [0, 4, 0, 0]


def test_who_skips_reading_the_cache_is_read_by_others():
    engine = make_engine(30, 4)
    skipping = [add(engine, str(number), range(8), skips_reading=True) for number in range(2)]
    step(engine)
    reading = add(engine, "reading", range(8))
    step(engine)
    assert [request.num_cached for request in (*skipping, reading)] == [0, 0, 4]
    assert engine.counters["queried_tokens"] == 8


def test_a_short_prompt_behind_a_long_one_has_its_first_token_in_the_step_that_admits_it():
    engine = make_engine(400, 16, max_num_batched_tokens=64)
    add(engine, "long", range(400))
    assert step(engine) == {"long": 64}
    add(engine, "short", range(500, 505))
    # Half for the long one, five for the short one, and the rest again for the long one.
    assert step(engine) == {"long": 59, "short": 5}
    assert step(engine) == {"short": 1, "long": 63}


def test_a_prompt_gets_no_less_than_an_eighth_of_the_budget():
    engine = make_engine(400, 16, max_num_batched_tokens=16, max_num_seqs=8)
    for number in range(8):
        add(engine, str(number), [number] * 40)
    # 8, 4, and then two each until nothing is left.
    assert step(engine) == {"0": 8, "1": 4, "2": 2, "3": 2}


def test_the_threshold_limits_a_prompt_that_is_alone():
    engine = make_engine(400, 16, max_num_batched_tokens=64, long_prefill_token_threshold=9)
    add(engine, "long", range(30))
    assert [step(engine)["long"] for _ in range(4)] == [9, 9, 9, 3]


def test_blocks_owed_to_a_prompt_under_way_are_not_given_to_another():
    engine = make_engine(6, 4, max_num_batched_tokens=8)
    add(engine, "long", range(17))
    step(engine)
    add(engine, "other", [1] * 5)
    # Four blocks are free, of which three are owed.
    assert len(engine.pool.free) == 4
    assert step(engine) == {"long": 8}
    assert engine.counters["waits_for_memory"] == 1


def test_a_block_owed_for_the_last_token_of_a_prompt_is_not_given_to_another():
    engine = make_engine(3, 4, max_num_batched_tokens=10, long_prefill_token_threshold=4)
    add(engine, "one over", range(5), max_tokens=3)
    add(engine, "other", [1] * 8)
    assert step(engine) == {"one over": 4}
    assert engine.counters["waits_for_memory"] == 1
    assert step(engine) == {"one over": 1}
    assert engine.counters["preemptions"] == 0


def test_the_watermark_is_kept_free_while_others_run():
    engine = make_engine(10, 4, watermark=0.39)
    assert engine.num_watermark_blocks == 3
    add(engine, "first", range(32))
    assert step(engine) == {"first": 32}
    add(engine, "second", range(100, 104))
    step(engine)
    assert engine.counters["waits_for_memory"] == 1
    engine.abort("first")
    assert step(engine) == {"second": 4}


def test_the_least_urgent_request_gives_its_blocks_up_and_goes_on_where_it_was():
    engine = make_engine(4, 4)
    add(engine, "first", range(7), max_tokens=3)
    second = add(engine, "second", range(50, 57), max_tokens=5)
    step(engine)
    step(engine)
    # Each needs a third block.
    assert step(engine) == {"first": 1}
    assert (second.num_preemptions, len(second.tokens), second.table) == (1, 9, [])
    # Its blocks were reused, the last one first.
    assert [engine.pool.find(content) is not None for content in engine.cache.contents(second)] == [True, False]
    while engine.running + engine.waiting:
        step(engine)
    assert len(second.tokens) == 12
    assert engine.counters["preemptions"] == 1
    # Of its eight computed tokens it found four.
    assert engine.counters["recomputed_tokens"] == 4


def test_who_is_alone_and_fills_the_pool_ends():
    engine = make_engine(2, 4)
    add(engine, "alone", range(7))
    step(engine)
    step(engine)
    assert engine.take_in(engine.schedule()) == [News("alone", None, "length", "kv_cache_full", 0, 0)]
    assert engine.pool.free == [2, 1]


def test_an_urgent_request_takes_the_slot_of_the_least_urgent_one():
    engine = make_engine(20, 4, max_num_seqs=2, heeds_priority=True)
    for name, priority in (("a", 5), ("b", 5)):
        add(engine, name, [priority], priority=priority)
    step(engine)
    add(engine, "urgent", [1, 2, 3], priority=0)
    assert step(engine) == {"a": 1, "urgent": 3}
    assert [request.request_id for request in engine.waiting] == ["b"]


def test_nobody_is_displaced_in_vain():
    engine = make_engine(6, 4, heeds_priority=True)
    add(engine, "first", range(8), priority=0)
    add(engine, "second", range(50, 58), priority=5)
    step(engine)
    # Six blocks: it needs five, and "first", which is more urgent, has two of them, soon three.
    add(engine, "urgent", range(100, 119), priority=1)
    step(engine)
    assert engine.counters["preemptions"] == 0


def test_a_prompt_that_must_run_whole_displaces_nobody_in_a_step_that_has_no_room_for_it():
    engine = make_engine(
        40, 4, max_num_seqs=2, max_num_batched_tokens=8, enable_chunked_prefill=False, heeds_priority=True
    )
    add(engine, "first", [1], priority=0)
    add(engine, "second", [2], priority=5)
    step(engine)
    # With the token of "first", eight are one too many.
    add(engine, "urgent", range(8), priority=1)
    assert step(engine) == {"first": 1, "second": 1}
    engine.abort("urgent")
    add(engine, "urgent", range(7), priority=1)
    assert step(engine) == {"first": 1, "urgent": 7}


def test_a_beginning_that_two_prompts_share_is_computed_once_and_others_pass_meanwhile():
    engine = make_engine(40, 4, max_num_batched_tokens=16, long_prefill_token_threshold=4)
    add(engine, "first", range(16))
    same = add(engine, "same", [*range(12), 1])
    add(engine, "other", [5, 6])
    assert step(engine) == {"first": 4, "other": 2}
    assert step(engine) == {"first": 4, "other": 1}
    # The third block, which is computed in this step, is the last that both have.
    assert step(engine) == {"first": 4, "other": 1, "same": 1}
    assert same.num_cached == 12
    assert engine.counters["waits_for_step"] == 2


@pytest.mark.parametrize(("ageing", "first"), [(None, "urgent"), (3, "urgent"), (2, "old")])
def test_with_ageing_a_request_passes_more_urgent_ones_that_came_so_many_later(ageing, first):
    engine = make_engine(20, 4, max_num_seqs=1, heeds_priority=True, ageing=ageing)
    add(engine, "old", [1], max_tokens=1, priority=1)
    add(engine, "between", [1], max_tokens=1, priority=9)
    add(engine, "urgent", [1], max_tokens=1, priority=0)
    assert list(step(engine)) == [first]


def test_without_chunks_a_prompt_runs_whole_or_waits():
    engine = make_engine(40, 4, max_num_batched_tokens=16, enable_chunked_prefill=False)
    with pytest.raises(Refused, match="does not fit into a step"):
        add(engine, "too long", range(17))
    add(engine, "first", range(10))
    add(engine, "second", range(50, 60))
    add(engine, "third", [1])
    assert step(engine) == {"first": 10}
    assert step(engine) == {"first": 1, "second": 10, "third": 1}


def test_a_failed_step_leaves_nothing_to_be_found_and_loses_no_token():
    engine = make_engine(10, 4)
    add(engine, "first", range(8))
    engine.roll_back(engine.schedule())
    assert not engine.pool.content
    assert sorted(engine.pool.free) == list(range(1, 11))
    assert step(engine) == {"first": 8}
    assert engine.counters["computed_tokens"] == 8


def test_after_logits_that_are_not_finite_nobody_finds_the_blocks():
    engine = make_engine(10, 4)
    engine.next_token = lambda request: None
    add(engine, "first", range(9))
    assert engine.take_in(engine.schedule()) == [News("first", None, "error", "non_finite_logits", 0, 0)]
    assert not engine.pool.content


def test_a_reset_takes_the_blocks_of_running_requests_if_it_is_to():
    engine = make_engine(10, 4)
    request = add(engine, "first", range(9))
    step(engine)
    assert not engine.reset_prefix_cache()
    engine.reset_running_requests()
    assert engine.reset_prefix_cache()
    assert step(engine) == {"first": 10}
    assert request.num_cached == 0


class Window(FullAttention):
    """A token reads itself and the four before it; a block has two."""

    def unread_blocks(self, num_computed):
        return range(max(num_computed - 4, 0) // 2)

    def longest_prefix(self, is_cached):
        ends = range(len(is_cached), 0, -1)
        return next((end for end in ends if all(is_cached[max(end - 2, 0) : end])), 0)


def test_a_window_needs_the_blocks_that_it_reads_and_gives_the_others_back():
    engine = ReferenceEngine(ReferenceCache(ReferencePool(11), Window(2)), lambda request: 1, watermark=0.0)
    first = add(engine, "first", range(9), max_tokens=4)
    step(engine)
    assert first.table == [1, 2, 3, 4, 5]
    step(engine)
    assert first.table == [0, 0, 3, 4, 5]
    assert engine.pool.free == [6, 7, 8, 9, 10, 2, 1]
    # Others use up all but the last of what was given back.
    engine.pool.give_back(engine.pool.allocate(6))
    assert engine.pool.find((None, (0, 1))) == 1
    assert engine.pool.find((None, (0, 1, 2, 3))) is None
    second = add(engine, "second", range(9))
    step(engine)
    assert second.num_cached == 8
    # 6 went to the first one in this step.
    assert second.table == [0, 0, 3, 4, 7]
