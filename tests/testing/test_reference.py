"""The plain engine does what the worked examples say, number for number."""

from __future__ import annotations

import pytest

from octavo.testing.reference import News, ReferenceEngine, Refused
from octavo.testing.reference_attention import ChunkedLocal, FullAttention, SlidingWindow
from octavo.testing.reference_cache import ReferenceCache, ReferencePool, ReferenceRequest


def make_engine(
    num_usable_blocks: int, *groups: int | FullAttention, caching: bool = True, in_flight: int = 1 << 30, **options
) -> ReferenceEngine:
    """An engine whose requests all generate 1, 1, 1 ... A group that is a number is full attention of such blocks."""
    pool = ReferencePool(num_usable_blocks + 1, caching=caching)
    attentions = [FullAttention(group) if isinstance(group, int) else group for group in groups]
    cache = ReferenceCache(pool, *attentions, max_tokens_in_flight=in_flight)
    return ReferenceEngine(cache, lambda request: 1, **{"watermark": 0.0, **options})


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
    assert r0.tables == [[1, 2, 3, 4]]
    assert sorted(pool.content) == [1, 2, 3]
    step(engine)
    step(engine)
    assert (r0.computed, len(r0.tokens)) == (17, 18)
    assert sorted(pool.content) == [1, 2, 3, 4]
    assert r0.tables == [[1, 2, 3, 4, 5]]

    r1 = add(engine, "r1", [*range(100, 110), 1, 2, 3, 4], max_tokens=2)
    # Both have their next token in this step, and r0 its last.
    assert step(engine) == {"r0": 1, "r1": 6}
    assert r1.num_cached == 8
    assert r1.tables == [[1, 2, 6, 7]]
    assert r0 not in engine.running
    assert pool.free == [5, 8, 9, 10, 4, 3]
    step(engine)
    assert pool.free == [7, 5, 8, 9, 10, 4, 3, 6, 2, 1]

    r2 = add(engine, "r2", [*range(100, 112), *range(17)])
    step(engine)
    assert r2.num_cached == 12
    assert r2.tables == [[1, 2, 3, 7, 5, 8, 9, 10]]
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
    assert (second.num_preemptions, len(second.tokens), second.tables) == (1, 9, [])
    # Its blocks were reused, the last one first.
    assert [engine.pool.find(content) is not None for content in engine.cache.contents(second, 0)] == [True, False]
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


# -- several groups, and blocks that are given back ------------------------------------------------------------------


def run(engine: ReferenceEngine, request_id: str, prompt, max_tokens: int = 1, **options) -> ReferenceRequest:
    """Run a request to its end."""
    request = add(engine, request_id, prompt, max_tokens, **options)
    while request in engine.running + engine.waiting:
        step(engine)
    return request


def evict_what_is_unlikely_to_be_found(engine: ReferenceEngine) -> None:
    engine.pool.forget(sorted(engine.pool.unlikely))


def found(engine: ReferenceEngine) -> list[list[int]]:
    """Return, by group, the ends of the blocks that can be found, in tokens. For one request without a salt."""
    contents = sorted((group, len(tokens)) for group, _, tokens in engine.pool.content.values())
    return [[end for number, end in contents if number == group] for group in range(len(engine.cache.attentions))]


def test_a_window_needs_the_blocks_that_it_reads_and_gives_the_others_back():
    # A token reads itself and the four before it.
    engine = make_engine(10, SlidingWindow(2, 5))
    first = add(engine, "first", range(9), max_tokens=4)
    step(engine)
    assert first.tables == [[1, 2, 3, 4, 5]]
    step(engine)
    # After nine tokens the last possible hit is at 8, and reads from 4 on. That is the prompt's end, too.
    assert first.tables == [[0, 0, 3, 4, 5]]
    # The two can be found, but who looks for a prompt of two or four tokens?
    assert found(engine) == [[2, 4, 6, 8, 10]]
    assert engine.pool.soon == [6, 7, 8, 9, 10, 2, 1]
    # Others use up all but the last of what was given back.
    engine.pool.give_back(engine.pool.allocate(6))
    assert found(engine) == [[2, 6, 8, 10]]
    second = add(engine, "second", range(9))
    step(engine)
    assert second.num_cached == 8
    # 6 went to the first one in this step.
    assert second.tables == [[0, 0, 3, 4, 7]]


def test_what_is_likely_to_be_found_is_handed_out_last():
    engine = make_engine(8, SlidingWindow(2, 3))
    first = add(engine, "first", range(7), max_tokens=6)
    for _ in range(4):
        step(engine)
    # A hit at the end of the prompt, at 6, reads the block before it. It came back after those that nobody looks for.
    assert first.tables == [[0, 0, 0, 4, 5]]
    assert (engine.pool.soon, engine.pool.late) == ([6, 7, 8, 2, 1], [3])


def test_the_first_chunk_is_given_back_in_the_step_after_the_one_that_read_it():
    # Window 4, blocks of one token.
    engine = make_engine(30, SlidingWindow(1, 4), max_num_batched_tokens=8, in_flight=8)
    request = add(engine, "a", range(16))
    step(engine)
    assert request.tables == [[1, 2, 3, 4, 5, 6, 7, 8]]
    step(engine)
    assert request.tables[0][:9] == [0, 0, 0, 0, 0, 6, 7, 8, 9]


def test_a_window_of_eight_tokens_in_blocks_of_four_holds_three_blocks_while_it_generates():
    engine = make_engine(20, SlidingWindow(4, 8), max_num_batched_tokens=16, in_flight=1)
    request = add(engine, "a", range(16), max_tokens=100)
    step(engine)
    held = []
    while request in engine.running:
        step(engine)
        held.append(len(request.blocks))
    assert max(held) == 3
    assert engine.cache.most_blocks(1000) == [3]


def test_a_chunk_goes_as_a_whole_when_the_next_one_begins():
    engine = make_engine(20, ChunkedLocal(2, 6))
    request = add(engine, "a", range(5), max_tokens=4)
    step(engine)
    step(engine)
    assert (request.computed, request.tables) == (6, [[1, 2, 3]])
    step(engine)
    assert request.tables == [[0, 0, 0, 4]]


def test_a_chunk_that_nothing_was_computed_of_needs_nothing():
    engine = make_engine(20, ChunkedLocal(2, 6))
    request = add(engine, "a", range(15))
    assert step(engine) == {"a": 3}
    assert (request.num_cached, request.tables) == (12, [[0, 0, 0, 0, 0, 0, 1, 2]])


def test_blocks_of_four_and_six_tokens_are_found_in_twelves():
    engine = make_engine(30, 4, 6)
    first = run(engine, "first", range(31))
    assert found(engine) == [[4, 8, 12, 16, 20, 24], [6, 12, 18, 24]]
    second = add(engine, "second", [*range(30), 7, 7])
    step(engine)
    assert (first.num_cached, second.num_cached) == (0, 24)
    assert [len(table) for table in second.tables] == [8, 6]


def test_a_hit_is_as_long_as_every_group_supports():
    engine = make_engine(40, 2, SlidingWindow(2, 5), ChunkedLocal(2, 8))
    run(engine, "first", range(21))
    evict_what_is_unlikely_to_be_found(engine)
    # Of the window's group and of the chunk's there is what a hit at 20 needs.
    assert found(engine) == [[*range(2, 21, 2)], [18, 20], [18, 20]]
    # At 16 a chunk begins, and the full group has all. The window's would need 14 and 16; at 0 it needs nothing.
    hit = engine.cache.find_hit(ReferenceRequest("second", [*range(17), 5], 1))
    assert (hit.num_tokens, hit.junction) == (0, 16)
    hit = engine.cache.find_hit(ReferenceRequest("third", list(range(21)), 1))
    assert (hit.num_tokens, hit.junction) == (20, 20)
    assert [table.count(0) for table in hit.tables] == [0, 8, 8]


@pytest.mark.parametrize(("is_memory_short", "expected"), [(False, [0, 10, 10]), (True, [0, 0, 10])])
def test_a_branch_is_found_at_once_or_where_memory_is_short_by_the_third(is_memory_short, expected):
    engine = make_engine(200, 2, SlidingWindow(2, 5))
    prompt = list(range(30))
    cached = []
    for number in (50, 51, 52):
        cached.append(run(engine, str(number), [*prompt[:11], number, *prompt]).num_cached)
        if is_memory_short:
            evict_what_is_unlikely_to_be_found(engine)
    # Where the second one finds ten tokens in one group alone, it leaves behind what the other one lacks there.
    assert cached == expected


def test_what_a_waiting_request_shares_with_a_prompt_under_way_is_kept_for_it():
    engine = make_engine(100, 2, SlidingWindow(2, 5), max_num_batched_tokens=4, in_flight=4)
    add(engine, "first", range(30))
    step(engine)
    second = add(engine, "second", [*range(11), 7], max_tokens=1)
    while second in engine.running + engine.waiting:
        step(engine)
        evict_what_is_unlikely_to_be_found(engine)
    assert second.num_cached == 10


def test_a_conversation_finds_all_of_the_turn_before():
    engine = make_engine(200, 16, SlidingWindow(16, 33), max_model_len=2000, max_num_batched_tokens=256)
    turn = run(engine, "one", range(100), max_tokens=60)
    assert (len(turn.tokens), turn.num_cached) == (160, 0)
    evict_what_is_unlikely_to_be_found(engine)
    again = run(engine, "two", [*turn.tokens, *range(50)])
    # Its last token was not computed.
    assert again.num_cached == 144


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_is_given_back_is_likely_to_be_found_only_where_somebody_else_holds_it(is_shared):
    engine = make_engine(60, SlidingWindow(2, 5))
    first = add(engine, "first", range(5), max_tokens=20)
    for _ in range(5):
        step(engine)
    assert first.computed == 9
    block = first.tables[0][2]
    if is_shared:
        second = add(engine, "second", first.tokens[:9], max_tokens=20)
    step(engine)
    if is_shared:
        assert second.tables == [[0, 0, block, first.tables[0][3], 6]]
    step(engine)
    # A hit at the end of its prompt, at 4, does not need what it gave back now.
    assert (first.tables[0][2], block in engine.pool.unlikely) == (0, not is_shared)


@pytest.mark.parametrize(
    ("groups", "in_flight", "num_tokens", "most"),
    [
        ([16, SlidingWindow(16, 64)], 128, 1024, [64, 13]),
        ([SlidingWindow(4, 8)], 1, 1000, [3]),
        # What lies behind the last hit, up to eleven tokens, counts as in flight.
        ([4, SlidingWindow(6, 8)], 1, 1000, [250, 5]),
        ([ChunkedLocal(4, 8)], 1, 1000, [2]),
        # A chunk may begin in the middle of a block, behind two tokens.
        ([ChunkedLocal(4, 6)], 1, 1000, [2]),
        ([ChunkedLocal(4, 6)], 2, 1000, [3]),
        ([4, ChunkedLocal(4, 64)], 8, 20, [5, 5]),
    ],
)
def test_the_most_blocks_of_a_request(groups, in_flight, num_tokens, most):
    assert make_engine(10, *groups, in_flight=in_flight).cache.most_blocks(num_tokens) == most
