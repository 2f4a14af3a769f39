"""What has gone wrong in prefix caches elsewhere: hits that are too long, shared too widely, stale or too late."""

import os
import random
import subprocess
import sys

import pytest
from hashing_engines import assert_cold, finish, greedy, make_engine, scheduled, step

from octavo import EngineConfig, PluginChoice, SamplingParams
from octavo.core.block_pool import BlockPool
from octavo.hash_functions import Sha256
from octavo.testing.engines import Finished, assert_pool_is_sound

# -- how long a hit is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompt_that_is_known_whole_is_computed_from_its_last_block_on(num_tokens, num_hit, async_scheduling):
    engine, runner = make_engine(async_scheduling=async_scheduling)
    for cached in (0, num_hit):
        engine.add_request("r", range(num_tokens), greedy(1))
        record = finish(engine)["r"]
        assert record.num_cached_tokens == cached
        assert_cold(record, range(num_tokens), 1)
        assert scheduled(runner)[-1] == {"r": num_tokens - cached}
    engine.shutdown()


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(4, 0), (8, 4)])
def test_a_models_token_and_its_log_probabilities_are_those_of_a_cold_prompt(
    make_llm, tiny_folder, num_tokens, num_hit
):
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5, detokenize=False)
    prompt = [3 + 17 * number for number in range(num_tokens)]
    cold = make_llm(tiny_folder, num_kv_blocks=20, block_size=4, enable_prefix_caching=False)
    (expected,) = cold.generate(prompt, params, use_tqdm=False)
    llm = make_llm(tiny_folder, num_kv_blocks=20, block_size=4)
    for cached in (0, num_hit):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.num_cached_tokens == cached
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        (got,), (wanted,) = output.outputs[0].logprobs, expected.outputs[0].logprobs
        assert [token for token, _ in got.top] == [token for token, _ in wanted.top]
        assert [p for _, p in got.top] == pytest.approx([p for _, p in wanted.top], abs=1e-4)


def test_a_preempted_request_is_scheduled_for_what_its_hit_leaves_and_no_more():
    """The hit is looked up anew when it resumes: others took some of its blocks meanwhile, or none."""
    engine, runner = make_engine(6)
    prompts = {"a": range(10), "b": range(100, 109)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(10))
    records = finish(engine)
    assert (records["a"].num_preemptions, records["b"].num_preemptions) == (0, 1)
    for request_id, prompt in prompts.items():
        assert_cold(records[request_id], prompt, 10)
    steps = scheduled(runner)
    preempted_in = next(number for number, step_ in enumerate(steps) if "b" not in step_)
    resumed_in = next(number for number, step_ in enumerate(steps) if number > preempted_in and "b" in step_)
    plan = runner.plans[resumed_in]
    entry = plan.request_ids.index("b")
    num_known = 9 + preempted_in
    # Of its three blocks `a` took the one that was not full, and the second.
    assert num_known == 12
    assert int(plan.first_positions[entry]) == 4
    assert steps[resumed_in]["b"] == 12 - 4
    assert engine.stats().recomputed_tokens == 11 - 4
    assert sum(step_.get("b", 0) for step_ in steps) == 9 + 9 + engine.stats().recomputed_tokens


# -- what is taken for the same -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_size", "first", "second"),
    [
        # The second block is equal, the first one is not.
        (4, [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 0, 5, 6, 7, 8, 9]),
        # The same digits in a row.
        (2, [1, 23, 5], [12, 3, 5]),
        # The same tokens in another order.
        (4, [1, 2, 3, 4, 5], [2, 1, 3, 4, 5]),
        # The same bytes, shifted.
        (2, [0, 256, 5], [256, 0, 5]),
    ],
)
def test_prompts_that_look_alike_find_nothing_of_each_other(block_size, first, second):
    engine, _ = make_engine(block_size=block_size)
    for prompt in (first, second):
        engine.add_request("r", prompt, greedy(3))
        record = finish(engine)["r"]
        assert record.num_cached_tokens == 0
        assert_cold(record, prompt, 3)


def test_the_default_hash_function_is_one_whose_collisions_nobody_can_construct():
    # A hit is not compared token by token, so equal keys have to mean equal tokens.
    assert EngineConfig().cache.hash_function == PluginChoice("sha256")
    assert Sha256().is_collision_resistant
    assert len(Sha256().digest(b"")) == 32


def hits(engine, *options):
    """Run one and the same prompt with each of several options; return what each found."""
    found = []
    for option in options:
        engine.add_request("r", range(9), greedy(3), **option)
        record = finish(engine)["r"]
        assert_cold(record, range(9), 3)
        found.append(record.num_cached_tokens)
    return found


def test_a_salt_shares_with_its_like_and_with_nobody_else_either_way():
    engine, _ = make_engine()
    a, b, none = {"cache_salt": "a"}, {"cache_salt": "b"}, {}
    assert hits(engine, a, a, b, none) == [0, 8, 0, 0]
    assert hits(engine, none, b, a) == [8, 8, 8]


def test_an_adapter_shares_with_the_same_weights_of_the_same_name_and_with_nobody_else_either_way():
    engine, _ = make_engine()
    old, new, other, none = ({"adapter": key} for key in (("style", 1), ("style", 2), ("tone", 1), None))
    assert hits(engine, old, old, new, other, none) == [0, 8, 0, 0, 0]
    # Each of them left its own behind.
    assert hits(engine, none, other, new, old) == [8, 8, 8, 8]


def test_a_salt_is_not_taken_for_an_adapter_of_the_same_name():
    engine, _ = make_engine()
    salt, adapter = {"cache_salt": "style"}, {"adapter": ("style", 0)}
    both, swapped = salt | adapter, {"cache_salt": "other", "adapter": ("style", 0)}
    assert hits(engine, salt, adapter, both, swapped) == [0, 0, 0, 0]
    assert hits(engine, swapped, both, adapter, salt) == [8, 8, 8, 8]


PRINT_KEYS = """
from array import array
from octavo.core.prefix_hash import PrefixHasher, hash_root, hash_seed_from_environment
from octavo.hash_functions import Blake2b, Sha256, Sha256Cbor
for function in (Sha256(), Blake2b(), Sha256Cbor()):
    for extra in ((), (("salt", "a"),), (("lora", "a", 1),)):
        keys = []
        PrefixHasher(function, 2, hash_root(function, {seed})).extend(keys, array("i", range(6)), extra)
        print(b"".join(keys).hex())
"""


def printed_keys(seed, python_hash_seed):
    """Return the keys that a process of its own makes, one line for each hash function and salt or adapter."""
    program = PRINT_KEYS.format(seed=seed)
    environment = {**os.environ, "PYTHONHASHSEED": python_hash_seed}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_processes_agree_on_all_keys_where_their_hash_seed_is_the_same_and_on_none_without():
    first, second = (printed_keys("'shared'", python_hash_seed) for python_hash_seed in ("1", "2"))
    assert first == second
    assert len(set(first)) == 9
    assert not set(printed_keys("'other'", "1")) & set(first)
    # Without a seed the root is random.
    alone = [printed_keys("None", "1") for _ in range(2)]
    assert not set(alone[0]) & set(alone[1])
    # Python's own seed counts where it is fixed.
    fixed = [printed_keys("hash_seed_from_environment()", seed) for seed in ("1", "1", "2")]
    assert fixed[0] == fixed[1]
    assert not set(fixed[0]) & set(fixed[2])


# -- what is findable, and for how long ---------------------------------------------------------------------------


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_block_that_was_handed_out_for_other_content_is_not_found_by_its_old_key():
    pool = BlockPool(2)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [key(1)], 0)
    pool.free_blocks([block])
    assert pool.get_cached_block(key(1), 0) == block
    assert pool.get_new_blocks(1) == [block]
    assert pool.get_cached_block(key(1), 0) is None
    pool.cache_full_blocks([block], [key(2)], 0)
    assert pool.get_cached_block(key(1), 0) is None
    assert pool.get_cached_block(key(2), 0) == block


def test_a_call_that_frees_one_block_too_often_frees_none_of_its_blocks():
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks[:1], [key(1)], 0)
    before = pool.free_queue(), [pool.ref_count(block) for block in blocks], pool.generation
    with pytest.raises(ValueError, match=r"^block 2 is freed more often than it is held \(1\)$"):
        pool.free_blocks([1, 2, 3, 2])
    assert (pool.free_queue(), [pool.ref_count(block) for block in blocks], pool.generation) == before
    # Held twice, it is free after two: one block more, not two.
    pool.touch([2])
    pool.free_blocks([2, 2])
    assert pool.num_free_blocks == 3
    pool.free_blocks([1, 3])
    assert sorted(pool.get_new_blocks(5)) == [1, 2, 3, 4, 5]


def test_a_free_block_that_is_adopted_stands_in_the_queue_once_when_it_is_given_back():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [key(1), key(2)], 0)
    pool.free_blocks(reversed(blocks))
    # Adopted twice, and given back once: still held.
    pool.touch([1])
    pool.touch([1])
    pool.free_blocks([1])
    assert pool.free_queue() == [3, 2]
    assert pool.get_new_blocks(2) == [3, 2]
    with pytest.raises(ValueError, match="1 blocks were asked for and 0 are free"):
        pool.get_new_blocks(1)
    pool.free_blocks([1])
    assert pool.free_queue() == [1]
    assert_pool_is_sound(pool)


def test_with_the_cache_off_fifty_requests_in_a_small_pool_leave_no_key():
    rng = random.Random(0)
    engine, _ = make_engine(10, caching=False)
    pool = engine.scheduler.kv_cache_manager.pool
    prompts = {f"r{number}": [*range(rng.randint(0, 12)), 99, number] for number in range(50)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(10))
    records: dict[str, Finished] = {}
    while engine.has_unfinished_requests():
        step(engine, records)
        assert pool.cached_blocks() == {}
    finish(engine, records)
    for request_id, prompt in prompts.items():
        assert_cold(records[request_id], prompt, 10)
        assert records[request_id].num_cached_tokens == 0
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompt_that_comes_again_at_once_finds_as_much_as_later(make_llm, tiny_folder, async_scheduling):
    prompt = "a prompt that is longer than some blocks"
    # With the ninth token eight of the answer are computed, which fill two blocks.
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    llm = make_llm(tiny_folder, num_kv_blocks=60, block_size=4, async_scheduling=async_scheduling)
    found = []
    for _ in range(3):
        stream = llm.stream({"prompt": prompt, "request_id": "same"}, params)
        # The last piece comes in the step that ends the request.
        while stream.output is None:
            next(stream, None)
        found.append(stream.output.num_cached_tokens)
    assert found == [0, 36, 36]
    # A second turn finds the answer too, but for its last token.
    answer = stream.output.outputs[0].token_ids
    turn = {"prompt_token_ids": [*stream.output.prompt_token_ids, *answer, 5, 6]}
    assert llm.generate(turn, params, use_tqdm=False)[0].num_cached_tokens == 40 + 8


# -- on and off ---------------------------------------------------------------------------------------------------


def test_with_the_cache_a_models_ids_are_those_without_it_and_its_logits_are_as_near_as_makes_no_difference(
    make_llm, tiny_folder, monkeypatch
):
    from octavo.models.llama import LlamaModel

    logits_of, seen = LlamaModel.logits, []

    def noted(self, hidden):
        scores = logits_of(self, hidden)
        seen.append(scores.clone())
        return scores

    monkeypatch.setattr(LlamaModel, "logits", noted)
    rng = random.Random(0)
    shared = [rng.randrange(3, 512) for _ in range(60)]
    prompts = [
        [*shared[: rng.choice([0, 7, 16, 33, 60])], *(rng.randrange(3, 512) for _ in range(rng.randint(1, 20)))]
        for _ in range(20)
    ]
    rng.shuffle(prompts)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    logits, ids = {}, {}
    for caching in (True, False):
        llm = make_llm(tiny_folder, num_kv_blocks=100, block_size=4, enable_prefix_caching=caching)
        seen.clear()
        outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
        logits[caching], ids[caching] = list(seen), [output.outputs[0].token_ids for output in outputs]
        num_cached = sum(output.num_cached_tokens for output in outputs)
        assert num_cached > 300 if caching else num_cached == 0
        # All at once, in another order, and now with everything in the cache.
        order = rng.sample(range(20), 20)
        together = llm.generate([prompts[number] for number in order], params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in together] == [ids[caching][number] for number in order]
    assert ids[True] == ids[False]
    assert len(logits[True]) == len(logits[False]) == 20 * 8
    differences = [
        float((with_cache - without).abs().max())
        for with_cache, without in zip(logits[True], logits[False], strict=True)
    ]
    assert max(differences) <= 1e-4
