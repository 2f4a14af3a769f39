"""What a request knows of itself: its tokens, its room, and why it ends."""

import pytest

from octavo.core.request import NO_ROW, Request, RequestStatus
from octavo.core.sampling_params import SamplingParams

EOS = frozenset({2, 3})


def make_request(prompt=(10, 11, 12), *, max_model_len=100, eos=EOS, params=None, **sampling):
    return Request(
        "r",
        prompt,
        params or SamplingParams(**{"max_tokens": 5} | sampling),
        max_model_len=max_model_len,
        eos_token_ids=eos,
    )


def test_a_new_request_waits_with_its_prompt_and_holds_nothing():
    prompt = [10, 11, 12]
    request = make_request(prompt)
    prompt.append(13)
    assert request.token_ids.tolist() == [10, 11, 12]
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert request.status is RequestStatus.WAITING
    assert request.row == NO_ROW
    assert request.num_cached_tokens is None


def test_tokens_that_come_are_counted_as_output():
    request = make_request()
    request.append_token(40)
    request.append_token(41)
    assert request.token_ids.tolist() == [10, 11, 12, 40, 41]
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (5, 3, 2)


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "num_outputs"),
    [(5, 100, 5), (1, 100, 1), (None, 100, 97), (None, 4, 1), (500, 100, 97), (97, 100, 97), (2**63 - 1, 100, 97)],
)
def test_a_request_ends_at_max_tokens_or_at_the_models_length_whichever_comes_first(
    max_tokens, max_model_len, num_outputs
):
    request = make_request(max_tokens=max_tokens, max_model_len=max_model_len)
    for _ in range(num_outputs - 1):
        assert request.append_token(40) == (None, None)
    assert request.append_token(40) == ("length", None)
    assert request.num_output_tokens == num_outputs


@pytest.mark.parametrize("token_id", sorted(EOS))
def test_any_end_of_sequence_id_ends_the_request_and_is_kept(token_id):
    request = make_request()
    assert request.append_token(token_id) == ("stop", None)
    assert request.token_ids[-1] == token_id


def test_a_stop_id_of_the_caller_ends_the_request_and_is_named():
    request = make_request(stop_token_ids=[50, 51])
    assert request.append_token(40) == (None, None)
    assert request.append_token(51) == ("stop", 51)


def test_ignore_eos_goes_on_past_every_end_of_sequence_id_but_not_past_the_callers_own():
    request = make_request(ignore_eos=True, stop_token_ids=[3, 50])
    assert request.eos_token_ids == frozenset()
    assert request.append_token(2) == (None, None)
    assert request.append_token(3) == ("stop", 3)


def test_end_of_sequence_goes_before_a_stop_id_and_both_before_the_length():
    assert make_request(max_tokens=1, stop_token_ids=[2]).append_token(2) == ("stop", None)
    assert make_request(max_tokens=1, stop_token_ids=[50]).append_token(50) == ("stop", 50)
    assert make_request(max_tokens=1).append_token(40) == ("length", None)


def test_stop_ids_in_the_prompt_end_nothing():
    request = make_request([2, 50], stop_token_ids=[50])
    assert request.append_token(40) == (None, None)


def test_a_salt_is_part_of_the_first_blocks_key_and_of_a_kind_of_its_own():
    assert make_request().first_block_extra == ()
    salted = Request("r", [1], SamplingParams(), max_model_len=8, cache_salt="tenant")
    assert salted.first_block_extra == (("salt", "tenant"),)


def test_two_requests_may_share_one_sampling_params():
    params = SamplingParams(max_tokens=2, stop_token_ids=[50])
    first, second = make_request(params=params), make_request([7], params=params)
    first.append_token(40)
    assert second.num_output_tokens == 0
    assert second.append_token(50) == ("stop", 50)
    assert params == SamplingParams(max_tokens=2, stop_token_ids=[50])
