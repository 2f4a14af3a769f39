"""Parts that do not keep their contract cost the requests that they harm, and no others."""

import json

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.request_queues import FCFSQueue
from octavo.testing.engines import assert_nothing_leaks, make_hashing_engine, make_kv_cache_manager, run_to_end
from octavo.testing.hashing_runner import expected_tokens


def greedy(max_tokens=8):
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def ending(record):
    return record.finish_reason, record.stop_reason


class DenyingQueue(FCFSQueue):
    """Says that nobody waits."""

    def __len__(self):
        return 0


class LosingQueue(FCFSQueue):
    """Loses every second request."""

    def add_request(self, request):
        if request.arrival % 2 == 0:
            super().add_request(request)


class LosingThePreemptedQueue(FCFSQueue):
    """Does not take back what was preempted."""

    def prepend_request(self, request):
        pass


def test_a_request_that_the_queue_has_lost_ends_in_the_next_step_while_others_go_on(make_kv, caplog):
    engine, _ = make_hashing_engine(make_kv(20, 4), LosingQueue())
    for number in range(4):
        engine.add_request(f"r{number}", [number, 5, 6], greedy())
    first = engine.step()
    assert [
        (request_id, reason) for request_id, reason in zip(first.request_ids, first.stop_reasons, strict=True) if reason
    ] == [("r1", "lost"), ("r3", "lost")]
    records = run_to_end(engine)
    for number in (0, 2):
        tokens = first.token_ids_of(first.request_ids.index(f"r{number}")) + records[f"r{number}"].token_ids
        assert tokens == expected_tokens([number, 5, 6], 8, 1000)
    assert_nothing_leaks(engine)
    sentence = "the request queue LosingQueue has lost the request 'r1', which is ended: "
    assert caplog.messages[0].startswith(sentence)
    state = json.loads(caplog.messages[0].removeprefix(sentence))
    assert state["line"] == ["r0", "r2"]
    assert [request["request_id"] for request in state["requests"]] == ["r0", "r1", "r2", "r3"]


def test_preempted_requests_that_the_queue_has_lost_end_and_the_others_equal_cold(make_kv, caplog):
    engine, _ = make_hashing_engine(make_kv(20, 4), LosingThePreemptedQueue())
    prompts = {f"r{number}": range(10 * number, 10 * number + 8) for number in range(8)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(60))
    records = run_to_end(engine)
    lost = {request_id for request_id, record in records.items() if record.stop_reason == "lost"}
    assert lost == {request_id for request_id, record in records.items() if record.num_preemptions}
    assert 0 < len(lost) < 8
    for request_id, record in records.items():
        assert record.token_ids == expected_tokens(prompts[request_id], len(record.token_ids), 1000)
    assert sum("has lost the request" in message for message in caplog.messages) == len(lost)
    assert_nothing_leaks(engine)


def test_what_was_aborted_is_reported_beside_what_was_lost(make_kv, caplog):
    engine, _ = make_hashing_engine(make_kv(20, 4), LosingQueue())
    engine.add_request("a", [1, 2, 3], greedy(2))
    engine.add_request("b", [1, 2, 3], greedy(2))
    engine.abort_request("a")
    output = engine.step()
    assert output.request_ids == ["a", "b"]
    assert output.finish_reasons == ["abort", "error"]
    assert not engine.has_unfinished_requests()


def test_where_the_queue_denies_that_requests_wait_they_end_instead_of_waiting_for_ever(make_kv, caplog):
    engine, _ = make_hashing_engine(make_kv(20, 4), DenyingQueue())
    engine.add_request("a", [1, 2, 3], greedy(2))
    engine.add_request("b", [1, 2, 3], greedy(2))
    records = run_to_end(engine, max_steps=6)
    assert {request_id: ending(record) for request_id, record in records.items()} == {
        "a": ("error", "stuck"),
        "b": ("error", "stuck"),
    }
    sentence = (
        "nothing can go on, and the request 'a' is ended for it; the request queue DenyingQueue or a KV-cache manager "
        "does not keep its contract: "
    )
    assert caplog.messages[0].startswith(sentence)
    assert json.loads(caplog.messages[0].removeprefix(sentence))["free_blocks"] == 20


class HoardingManager(FullAttentionManager):
    """Gives back all but the first block of a request."""

    contract_version = 1

    def free(self, row):
        self.num_blocks[row] = max(self.num_blocks[row], 1)
        first = self.block_tables[row, 0]
        self.block_tables[row, 0] = 0
        super().free(row)
        self.hoarded = [*getattr(self, "hoarded", []), int(first)]


def test_the_request_that_leaked_blocks_leave_no_room_for_ends_with_the_numbers_in_the_log(caplog):
    kv = make_kv_cache_manager(HoardingManager, None, num_usable_blocks=4, block_size=4)
    engine, _ = make_hashing_engine(kv, FCFSQueue(), max_num_seqs=1)
    for number in range(2):
        engine.add_request(f"small{number}", [number], greedy(1))
    # Admissible, for an empty pool would hold it; but two of the four blocks are lost by then.
    engine.add_request("large", range(12), greedy(2))
    engine.add_request("small", [7], greedy(2))
    records = run_to_end(engine, max_steps=12)
    assert ending(records["large"]) == ("error", "stuck")
    assert records["small"].token_ids == expected_tokens([7], 2, 1000)
    (message,) = caplog.messages
    assert message.startswith("nothing can go on, and the request 'large' is ended for it; ")
    state = json.loads(message[message.index("{") :])
    assert (state["free_blocks"], state["used_blocks"], state["line"]) == (2, 2, ["large", "small"])
    assert state["requests"][0] == {
        "request_id": "large",
        "status": "WAITING",
        "priority": 0,
        "arrival": 2,
        "num_prompt_tokens": 12,
        "num_tokens": 12,
        "num_computed_tokens": 0,
        "num_blocks": 0,
        "num_preemptions": 0,
    }


class GreedyManager(FullAttentionManager):
    """Says that a request needs one block, and then two."""

    contract_version = 1

    def get_num_blocks_to_allocate(self, row, num_tokens, hit=()):
        return super().get_num_blocks_to_allocate(row, num_tokens, hit) + (2 if row >= 0 else 0)


def test_a_manager_that_refuses_what_it_admitted_is_named():
    kv = make_kv_cache_manager(GreedyManager, None, num_usable_blocks=3, block_size=4)
    engine, _ = make_hashing_engine(kv, FCFSQueue())
    engine.add_request("a", range(8), greedy(2))
    with pytest.raises(Exception, match=r"^The KV cache admitted 'a' and then had no room for it: 4 blocks are needed"):
        engine.step()
