"""What stays findable of a request where blocks are given back on the way, and what it holds meanwhile."""

import random

import pytest
from hashing_engines import VOCAB_SIZE, assert_cold, chunk, full, greedy, make_engine, window

from octavo.core.kv_cache_config import RequestCost, make_groups
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.hash_functions import Sha256
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.kv_managers.sliding_window import SlidingWindowManager
from octavo.testing.engines import (
    assert_nothing_leaks,
    assert_pool_is_sound,
    collect,
    make_hybrid_kv_cache_manager,
    run_to_end,
)


def tokens(count, first=0):
    return [(first + 7 * number) % VOCAB_SIZE for number in range(count)]


# -- whole conversations ------------------------------------------------------------------------------------------


class Chat:
    """An engine of several groups; each prompt runs to its end before the next one begins."""

    def __init__(self, *groups, num_usable_blocks=600, budget=256, **settings) -> None:
        self.engine, _ = make_engine(
            num_usable_blocks, groups=groups, max_num_batched_tokens=budget, max_model_len=8192, **settings
        )
        self.kv = self.engine.scheduler.kv_cache_manager
        self.num_prompts = 0

    def add(self, prompt, max_tokens=1):
        self.num_prompts += 1
        self.engine.add_request(f"r{self.num_prompts}", prompt, greedy(max_tokens))
        return f"r{self.num_prompts}"

    def say(self, prompt, max_tokens=1):
        """Return how many tokens of a prompt were found, and the prompt with its answer."""
        request_id = self.add(prompt, max_tokens)
        record = run_to_end(self.engine)[request_id]
        assert_nothing_leaks(self.engine)
        assert_cold(record, prompt, max_tokens)
        return record.num_cached_tokens, [*prompt, *record.token_ids]


def test_each_turn_of_a_conversation_finds_all_full_blocks_of_those_before_it():
    chat = Chat(full(16), window(16, 128))
    hit, text = chat.say(tokens(1000), 600)
    assert (hit, len(text)) == (0, 1600)
    hit, text = chat.say([*text, *tokens(200, first=1)], 600)
    assert (hit, len(text)) == (1584, 2400)
    hit, text = chat.say([*text, *tokens(200, first=2)])
    assert (hit, len(text)) == (2384, 2601)


def test_the_turns_find_the_same_where_steps_are_planned_ahead():
    chat = Chat(full(4), window(4, 24), async_scheduling=True)
    hits, text = [], []
    for turn in range(5):
        hit, text = chat.say([*text, *tokens(50, first=turn)], 39)
        hits.append(hit)
    # Of 89, 178 ... tokens all but the last are computed, and of those the whole blocks found.
    assert hits == [0, 88, 176, 264, 352]


@pytest.mark.parametrize(
    ("num_usable_blocks", "hits"),
    # What the trunk gave back on the way is findable for as long as nobody needs the memory: 43 blocks of 700 tokens.
    # Later the first branch finds nothing, and leaves behind what the others need.
    [(600, [688, 688, 688]), (150, [0, 688, 688])],
)
def test_of_branches_of_one_trunk_all_but_the_first_find_what_they_share(num_usable_blocks, hits):
    chat = Chat(full(16), window(16, 128), num_usable_blocks=num_usable_blocks)
    trunk = tokens(1000)
    chat.say(trunk, 600)
    assert [chat.say([*trunk[:700], *tokens(300, first=branch)])[0] for branch in (1, 2, 3)] == hits


def test_the_same_prompt_is_found_after_its_window_has_moved_on():
    chat = Chat(full(16), window(16, 128))
    prompt = tokens(1000)
    assert chat.say(prompt, 600)[0] == 0
    assert [chat.say(prompt)[0] for _ in range(3)] == [992, 992, 992]


def test_a_prompt_of_whole_blocks_is_found_but_for_its_last_block():
    chat = Chat(full(16), window(16, 128))
    prompt = tokens(992)
    assert [chat.say(prompt, 200)[0] for _ in range(2)] == [0, 976]


def test_a_branch_that_found_something_leaves_what_it_found_to_the_next():
    chat = Chat(full(16), window(16, 128))
    system = tokens(700)
    chat.say(system)
    # 43 whole blocks of a system prompt of 700 tokens.
    hits = [chat.say([*system, *tokens(400, first=user)], 150)[0] for user in (1, 2, 3)]
    assert hits == [688, 688, 688]


@pytest.mark.parametrize(
    ("groups", "hits"),
    [
        # Blocks of 16 and 32: hits are multiples of 32.
        ((full(16), window(32, 128)), (0, 608, 480)),
        ((full(32), window(16, 128)), (0, 608, 480)),
        ((window(16, 128), window(16, 40)), (0, 624, 496)),
        ((full(16), window(16, 128), chunk(16, 256)), (0, 624, 496)),
        ((full(16), chunk(16, 128)), (0, 624, 496)),
        ((full(48), window(32, 100), chunk(16, 80)), (0, 576, 480)),
        ((window(16, 128),), (0, 624, 496)),
    ],
)
def test_turns_and_repeated_prompts_are_found_whatever_the_groups_are(groups, hits):
    chat = Chat(*groups)
    first, text = chat.say(tokens(500), 140)
    second, _ = chat.say([*text, *tokens(100, first=1)], 150)
    assert (first, second, chat.say(tokens(500))[0]) == hits


@pytest.mark.parametrize("is_ahead", [False, True], ids=["step by step", "planned ahead"])
def test_who_waits_for_a_prompt_finds_what_they_share_when_that_one_has_moved_on(is_ahead):
    chat = Chat(full(16), window(16, 128), budget=64, async_scheduling=is_ahead, long_prefill_token_threshold=48)
    trunk = tokens(1500)
    first = chat.add(trunk)
    finished = {}
    for _ in range(3):
        collect(finished, chat.engine.step())
    second = chat.add([*trunk[:700], *tokens(100, first=1)])
    finished |= run_to_end(chat.engine)
    assert (finished[first].num_cached_tokens, finished[second].num_cached_tokens) == (0, 688)


def test_a_long_answer_evicts_no_prefix():
    """What its window gives back is used again before anything that somebody may ask for."""
    chat = Chat(full(16), window(16, 64), num_usable_blocks=160)
    system = tokens(640)
    chat.say(system)
    # Of the 120 blocks that it takes, the window holds five at a time.
    chat.say(tokens(300, first=1), 660)
    assert chat.say([*system, 3])[0] == 640


# -- who is evicted first ----------------------------------------------------------------------------------------


class Holder:
    """Plays the scheduler for a KV cache of several groups."""

    def __init__(self, *groups, num_usable_blocks=200) -> None:
        self.kv = make_hybrid_kv_cache_manager(groups, Sha256(), num_usable_blocks=num_usable_blocks)
        self.computed: dict[Request, int] = {}

    def start(self, token_ids, num_new):
        request = Request("r", token_ids, SamplingParams(), max_model_len=10_000)
        hit = self.kv.get_computed_blocks(request)
        request.row = next(row for row in range(64) if row not in {other.row for other in self.computed})
        self.kv.choose_findable_prefixes(request, hit)
        self.computed[request] = hit.num_tokens
        self.go_on(request, num_new, hit)
        return request

    def go_on(self, request, num_new, hit=None):
        assert self.kv.allocate_slots(request, self.computed[request], num_new, hit)
        self.computed[request] += num_new
        self.kv.commit_step()

    def end(self, request):
        self.kv.leave_computed_blocks(request, self.computed[request])
        self.kv.free(request)
        del self.computed[request]

    def table(self, request, group):
        return self.kv.coordinator.managers[group].block_table(request.row).tolist()

    def findable(self, request, group):
        """Return which of a request's blocks can be found, by number."""
        keys = request.block_keys[: self.computed.get(request, request.num_tokens) // 4]
        return [index for index, key in enumerate(keys) if self.kv.pool.get_cached_block(key, group) is not None]

    def use_memory(self, *, but_for):
        """Let others take all free blocks but so many."""
        self.kv.pool.get_new_blocks(self.kv.pool.num_free_blocks - but_for)


def test_what_is_given_back_and_nobody_asks_for_is_evicted_before_all_that_somebody_may_ask_for():
    holder = Holder(full(4), window(4, 8))
    holder.end(holder.start(tokens(20, first=1), 20))
    # Five blocks of the full group, and three of the window for its prompt and its end.
    likely = holder.kv.pool.free_queue()[-8:]
    request = holder.start(tokens(100), 40)
    own = holder.table(request, 1)
    holder.go_on(request, 4)
    # Seen from token 40 the window reaches back to token 33, so that eight blocks go; the prompt's end is far.
    assert holder.table(request, 1)[:8] == [0] * 8
    assert holder.kv.pool.free_queue()[-16:] == [*own[7::-1], *likely]
    assert holder.findable(request, 1) == list(range(11))
    holder.use_memory(but_for=8)
    assert holder.findable(request, 1) == [8, 9, 10]
    assert holder.findable(request, 0) == list(range(11))
    assert_pool_is_sound(holder.kv.pool)


def test_what_the_same_prompt_needs_is_evicted_last():
    holder = Holder(full(4), window(4, 8))
    request = holder.start(tokens(42), 42)
    own = holder.table(request, 1)
    for token_id in range(30):
        request.append_token(token_id)
        holder.go_on(request, 1)
    # A hit on 40 tokens reads the blocks of 33 .. 39.
    assert holder.kv.pool.free_queue()[-2:] == own[8:10]
    holder.use_memory(but_for=2)
    assert holder.findable(request, 1) == [8, 9, 15, 16, 17]
    holder.end(request)
    again = holder.start(tokens(42), 2)
    assert holder.table(again, 1)[:10] == [0] * 8 + own[8:10]


def test_what_somebody_else_holds_stays_as_likely_to_be_found_as_it_is():
    holder = Holder(full(4), window(4, 8))
    first = holder.start(tokens(100), 40)
    own = holder.table(first, 1)
    # It adopts what the first one has just computed, and stays there.
    second = holder.start([*tokens(40), 1, 2, 3], 3)
    assert holder.table(second, 1)[8:10] == own[8:10]
    holder.go_on(first, 20)
    holder.go_on(first, 4)
    # Nobody will ask for that again as far as the first one knows. The second one found it.
    assert second.findable_prefixes == [40]
    for token_id in range(30):
        second.append_token(token_id)
        holder.go_on(second, 1)
    assert holder.kv.pool.free_queue()[-2:] == own[8:10]


def test_what_is_found_once_is_as_likely_to_be_found_again():
    holder = Holder(full(4), window(4, 8))
    first = holder.start(tokens(100), 40)
    own = holder.table(first, 1)
    holder.go_on(first, 20)
    holder.go_on(first, 4)
    assert set(own[8:10]) <= set(holder.kv.pool.free_queue())
    second = holder.start([*tokens(40), 1, 2, 3], 3)
    assert holder.table(second, 1)[8:10] == own[8:10]
    holder.kv.free(second)
    assert set(own[8:10]) <= set(holder.kv.pool.free_queue()[-4:])


def test_who_turns_off_further_on_leaves_both_what_it_found_and_where_it_turned_off():
    holder = Holder(full(4), window(4, 8))
    holder.end(holder.start(tokens(31), 31))
    trunk = holder.start(tokens(63), 35)
    holder.end(trunk)
    # Of what it computed only what the full group has is left.
    pool = holder.kv.pool
    pool.forget_blocks(pool.get_cached_block(key, 1) for key in trunk.block_keys[7:])
    branch = holder.start([*tokens(63), *tokens(37, first=1)], 4)
    assert branch.findable_prefixes == [28, 60, 96]
    while holder.computed[branch] < 100:
        holder.go_on(branch, 4)
    holder.end(branch)
    # 25 blocks of the full group, and 8 of the trunk with the same content as some of them.
    holder.use_memory(but_for=25 + 8 + 7)
    assert holder.findable(branch, 1) == [5, 6, 13, 14, 22, 23, 24]
    for num_shared, hit in ((31, 28), (63, 60)):
        request = Request("r", [*tokens(num_shared), 5, 5, 5, 5, 5], SamplingParams(), max_model_len=10_000)
        assert holder.kv.get_computed_blocks(request).num_tokens == hit


def test_what_a_waiting_request_shares_with_a_prompt_stays_findable():
    hits = []
    for has_sibling in (True, False):
        holder = Holder(full(4), window(4, 8))
        prompt = holder.start(tokens(100), 8)
        sibling = Request("s", [*tokens(31), 5, 5, 5, 5], SamplingParams(), max_model_len=10_000)
        num_tokens, key = holder.kv.next_block(prompt, 8)
        assert holder.kv.needs_block(sibling, num_tokens, key)
        if has_sibling:
            holder.kv.keep_shared_prefix(prompt, sibling)
            holder.kv.keep_shared_prefix(prompt, sibling)
            # What they share, 7 blocks of 31 tokens, and the prompt itself.
            assert prompt.findable_prefixes == [28, 96]
        for _ in range(22):
            holder.go_on(prompt, 4)
        holder.use_memory(but_for=2)
        hits.append(holder.kv.get_computed_blocks(sibling).num_tokens)
    assert hits == [28, 0]


def test_with_the_end_of_a_request_what_goes_on_from_there_is_left_and_no_more():
    holder = Holder(full(4), window(4, 8))
    request = holder.start(tokens(20), 20)
    for token_id in range(44):
        request.append_token(token_id)
        holder.go_on(request, 1)
    holder.end(request)
    # Of the window two blocks for a hit on 16 tokens, the prompt, and two for one on all 64.
    holder.use_memory(but_for=16 + 2 + 2)
    assert [holder.findable(request, group) for group in (0, 1)] == [list(range(16)), [2, 3, 14, 15]]
    follow_up = Request("f", [*request.token_ids, 1, 2], SamplingParams(), max_model_len=10_000)
    assert holder.kv.get_computed_blocks(follow_up).num_tokens == 64


def test_without_a_prefix_cache_blocks_are_given_back_all_the_same():
    kv = make_hybrid_kv_cache_manager([full(4), window(4, 8)], None, num_usable_blocks=40)
    request = Request("r", tokens(50), SamplingParams(), max_model_len=100)
    request.row = 0
    kv.choose_findable_prefixes(request, kv.get_computed_blocks(request))
    assert kv.allocate_slots(request, 0, 40)
    assert kv.allocate_slots(request, 40, 1)
    assert [len(blocks) for blocks in kv.coordinator.block_ids_by_group(0)] == [11, 3]
    kv.leave_computed_blocks(request, 41)
    kv.free(request)
    assert kv.pool.num_cached_blocks == 0


# -- what is held -------------------------------------------------------------------------------------------------


def test_start_up_counts_what_a_request_really_takes_and_that_is_less_than_half_of_all():
    specs = [full(16)[1], *[window(16, 64)[1]] * 3]
    groups = make_groups(specs)
    managers = (FullAttentionManager, *[SlidingWindowManager] * 3)
    cost = RequestCost(groups, managers, max_tokens_in_flight=128)
    # ceil(63 / 16) blocks before the last full one, ceil((15 + 128) / 16) from there on.
    assert cost.num_blocks_by_group(1024) == [64, 13, 13, 13]
    assert cost.num_blocks(1024) / (4 * 64) < 0.45
    chat = Chat(full(16), *[window(16, 64)] * 3, num_usable_blocks=cost.num_blocks(1024) + 12, budget=128)
    most = [0, 0, 0, 0]
    # One that generates takes a token of each step, so that the chunks of the other begin anywhere in a block.
    decoding = chat.add([1, 2, 3], 40)
    chat.engine.step()
    long = chat.add(tokens(1000), 24)
    while chat.engine.has_unfinished_requests():
        chat.engine.step()
        for request in chat.engine.scheduler.running:
            if request.request_id == long:
                held = map(len, chat.kv.coordinator.block_ids_by_group(request.row))
                most = list(map(max, zip(most, held, strict=True)))
    assert most == cost.num_blocks_by_group(1024) == chat.kv.coordinator.max_blocks_by_group(1024, 128)
    assert decoding != long


def test_in_a_decode_a_window_of_eight_holds_three_blocks_of_four_at_most():
    chat = Chat(full(4), window(4, 8))
    request_id = chat.add(tokens(9), 100)
    chat.engine.step()
    most = 0
    while chat.engine.has_unfinished_requests():
        chat.engine.step()
        for request in chat.engine.scheduler.running:
            assert request.request_id == request_id
            most = max(most, len(chat.kv.coordinator.block_ids_by_group(request.row)[1]))
    assert most == 3


def test_of_a_hit_of_twenty_blocks_a_window_adopts_what_it_reads():
    holder = Holder(full(4), window(4, 8))
    holder.end(holder.start(tokens(82), 82))
    num_free = holder.kv.pool.num_free_blocks
    request = Request("r", [*tokens(80), 9, 9], SamplingParams(), max_model_len=200)
    hit = holder.kv.get_computed_blocks(request)
    assert hit.num_tokens == 80
    assert [sum(map(bool, blocks)) for blocks in hit.blocks] == [20, 2]
    # The two tokens behind it take a block in each group.
    assert holder.kv.coordinator.num_blocks_to_allocate_by_group(-1, 82, hit) == [21, 3]
    second = holder.start([*tokens(80), 9, 9], 2)
    assert [len(blocks) for blocks in holder.kv.coordinator.block_ids_by_group(second.row)] == [21, 3]
    assert num_free - holder.kv.pool.num_free_blocks == 24


def test_what_is_owed_to_a_request_is_never_less_than_it_will_take():
    rng = random.Random(0)
    for _ in range(40):
        windows = [window(rng.choice((4, 4, 8)), rng.randint(1, 40)) for _ in range(rng.randint(1, 3))]
        holder, in_flight = (
            Holder(*[full(4)][: rng.randint(0, 1)], *windows, num_usable_blocks=900),
            rng.choice((4, 16)),
        )
        holder.kv.max_tokens_in_flight = in_flight
        # It stays where it is, and holds what the other one adopts and gives back.
        first = holder.start(tokens(120), in_flight)
        while holder.computed[first] < 96:
            holder.go_on(first, in_flight)
        request = holder.start([*tokens(rng.randint(0, 96)), *tokens(rng.randint(1, 150), first=3)], 1)
        owed, num_free = holder.kv.num_blocks_owed(request), holder.kv.pool.num_free_blocks
        while (num_behind := request.num_tokens - holder.computed[request]) > 0:
            holder.go_on(request, min(rng.choice((1, in_flight)), num_behind))
            assert num_free - holder.kv.pool.num_free_blocks <= owed
