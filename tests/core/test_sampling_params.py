"""What a request may ask for: every field, at its limits and past them."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError, OctavoError

# More digits than Python is willing to print.
UNPRINTABLE = pytest.param(10**5000, id="10**5000")
UNFLOATABLE = pytest.param(10**400, id="10**400")

GOOD = {
    "n": [1, 64],
    "temperature": [0, 0.0, 1, 0.5, 1e-30, 1e-7, 1e308],
    "top_p": [1, 1.0, 0.5, 1e-9],
    "top_k": [-1, 0, 1, 10**9, 2**63 - 1],
    "min_p": [0, 0.0, 0.3, 1, 1.0],
    "seed": [None, 0, 2**63 - 1],
    "max_tokens": [None, 1, 2**63 - 1],
    "min_tokens": [0, 16],
    "stop": [None, "x", [], ["x"] * 32, ("x", "y"), "x" * 1024, "\N{SNOWMAN}"],
    "stop_token_ids": [None, [], [0], (1, 2), range(1024), [2**31 - 1]],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 20],
    "skip_reading_prefix_cache": [True, False],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
    "detokenize": [True, False],
}

NOT_INTS = [True, False, "1", 1.0, math.nan, math.inf, [1]]
NOT_REALS = [True, "0.5", "nan", None, [0.5], math.nan, math.inf, -math.inf, 1j]
NOT_BOOLS = [0, 1, None, "yes", "False"]

BAD = {
    "n": [0, -1, 65, 10**6, 10**18, None, UNPRINTABLE, *NOT_INTS],
    "temperature": [-1e-9, -1, UNFLOATABLE, UNPRINTABLE, *NOT_REALS],
    "top_p": [0, 0.0, -0.5, 1.0001, 2, UNFLOATABLE, *NOT_REALS],
    "top_k": [-2, 2**63, None, UNPRINTABLE, *NOT_INTS],
    "min_p": [-1e-9, 1.0001, UNFLOATABLE, *NOT_REALS],
    "seed": [-1, 2**63, UNPRINTABLE, *NOT_INTS],
    "max_tokens": [0, -1, 2**63, UNPRINTABLE, *NOT_INTS],
    "min_tokens": [-1, 17, 2**63, None, UNPRINTABLE, *NOT_INTS],
    "stop": [
        "",
        [""],
        ["x", ""],
        5,
        True,
        [5],
        [None],
        b"x",
        {"x": 1},
        ["x"] * 33,
        ["x"] * 10_000,
        "x" * 1025,
        "\ud800",
        ["x \udfff"],
    ],
    "stop_token_ids": ["12", b"12", 5, {1: 2}, [-1], [2**31], [True], ["1"], [1.0], [None], range(1025)],
    "ignore_eos": NOT_BOOLS,
    "logprobs": [-1, 21, 10**6, UNPRINTABLE, *NOT_INTS],
    "skip_reading_prefix_cache": NOT_BOOLS,
    "include_stop_str_in_output": NOT_BOOLS,
    "skip_special_tokens": NOT_BOOLS,
    "detokenize": NOT_BOOLS,
}


def cases(table):
    """Pair each field with each of its values, keeping the ids of those that cannot be printed."""
    pairs = []
    for field, values in table.items():
        for value in values:
            if value in (UNPRINTABLE, UNFLOATABLE):
                pairs.append(pytest.param(field, *value.values, id=f"{field}-{value.id}"))
            else:
                pairs.append((field, value))
    return pairs


def test_the_tables_of_this_test_cover_every_field():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(GOOD) == set(BAD) == fields


@pytest.mark.parametrize(("field", "value"), cases(GOOD))
def test_a_value_within_its_limits_is_taken(field, value):
    taken = getattr(SamplingParams(**{field: value}), field)
    if field == "stop":
        assert taken == ((value,) if isinstance(value, str) else tuple(value or ()))
    elif field == "stop_token_ids":
        assert taken == tuple(value or ())
    else:
        assert taken == value


@pytest.mark.parametrize(("field", "value"), cases(BAD))
def test_a_wrong_value_is_refused_by_an_error_that_names_the_field(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.parameter == field
    assert str(caught.value).startswith(field)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, OctavoError)
    # Whatever was passed, the message can be logged and sent on.
    assert len(str(caught.value).encode()) < 500


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"n": 65}, "n must be a whole number from 1 to 64, not 65."),
        ({"n": True}, "n must be a whole number from 1 to 64, not True."),
        ({"temperature": math.nan}, "temperature must be a finite number from 0, not nan."),
        ({"temperature": "a b"}, "temperature must be a finite number from 0, not 'a b'."),
        ({"top_p": 0}, "top_p must be a finite number above 0 up to 1, not 0."),
        ({"min_p": 1.5}, "min_p must be a finite number from 0 up to 1, not 1.5."),
        ({"top_k": -2}, "top_k must be a whole number from -1 to 9223372036854775807, not -2."),
        (
            {"max_tokens": 10**5000},
            "max_tokens must be a whole number from 1 to 9223372036854775807, not a number of thousands of digits.",
        ),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20, not 21."),
        ({"detokenize": 0}, "detokenize must be True or False, not 0."),
        ({"stop": ["x"] * 33}, "stop must be at most 32 strings, not more."),
        ({"stop": "x" * 1025}, "stop must be strings of at most 1024 characters, not one of 1025."),
        ({"stop": ["a", ""]}, "stop must be strings that are not empty, not ''."),
        ({"stop": 5}, "stop must be a string or a list of strings, not 5."),
        ({"stop": "a \ud800"}, r"stop must be text without lone surrogates, not 'a \ud800'."),
        ({"stop_token_ids": range(1025)}, "stop_token_ids must be at most 1024 ids, not more."),
        (
            {"stop_token_ids": [-1]},
            "stop_token_ids must be a list of whole numbers from 0 to 2147483647, not one with -1.",
        ),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list of token ids, not '12'."),
        (
            {"min_tokens": 9, "max_tokens": 8},
            "min_tokens is 9, more than max_tokens, which is 8; lower one.",
        ),
        (
            {"stop": "END", "detokenize": False},
            "stop strings need text, and detokenize is False; use stop_token_ids, or set detokenize=True.",
        ),
    ],
)
def test_the_sentence_names_the_field_the_limits_and_the_value(fields, sentence):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    assert str(caught.value) == sentence
    assert caught.value.parameter == next(iter(fields))


def test_min_tokens_may_equal_max_tokens_and_needs_no_maximum():
    assert SamplingParams(min_tokens=8, max_tokens=8).min_tokens == 8
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6


def test_stop_ids_need_no_text():
    params = SamplingParams(stop_token_ids=[5], detokenize=False)
    assert params.stop_token_ids == (5,)
    assert params.stop_strings == ()


def test_the_callers_lists_can_change_afterwards():
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b")
    ids[0] = 2
    assert params.stop_strings == ("a",)
    assert params.stop_token_ids == (1,)
    # What a caller passes may be used up by looking at it once.
    assert SamplingParams(stop=(s for s in "ab")).stop_strings == ("a", "b")


def test_one_instance_can_serve_many_requests_for_nobody_can_change_it():
    params = SamplingParams(stop="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5
    assert params == SamplingParams(stop=["x"])
    assert hash(params) == hash(SamplingParams(stop=["x"]))


def test_fields_are_given_by_name():
    with pytest.raises(TypeError):
        SamplingParams(4)


def test_a_list_without_an_end_is_refused_too():
    with pytest.raises(InvalidRequestError, match="at most 32 strings"):
        SamplingParams(stop=itertools.repeat("a"))
    with pytest.raises(InvalidRequestError, match="at most 1024 ids"):
        SamplingParams(stop_token_ids=itertools.count())


def test_numbers_may_be_numpys_and_are_plain_ones_afterwards():
    params = SamplingParams(n=np.int64(2), temperature=np.float32(0.5), top_k=np.int32(3), stop_token_ids=np.arange(2))
    assert [type(value) for value in (params.n, params.temperature, params.top_k)] == [int, float, int]
    assert params.stop_token_ids == (0, 1)
    with pytest.raises(InvalidRequestError, match="temperature must be a finite number"):
        SamplingParams(temperature=np.float32("nan"))
