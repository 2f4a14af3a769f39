"""Every form that a prompt may have, and every one that it may not."""

from array import array

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError
from octavo.prompts import ParsedPrompt, as_params_list, as_prompt_list, parse_prompt
from octavo.testing.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
FORMS = "A prompt must be text, a list of token ids, or a dict with one of them, not "


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("ab", ParsedPrompt("ab", [97, 98])),
        ([5, 6], ParsedPrompt(None, [5, 6])),
        ((5, 6), ParsedPrompt(None, [5, 6])),
        (range(3), ParsedPrompt(None, [0, 1, 2])),
        (array("i", [5, 6]), ParsedPrompt(None, [5, 6])),
        ({"prompt": "ab"}, ParsedPrompt("ab", [97, 98])),
        ({"prompt_token_ids": [5, 6]}, ParsedPrompt(None, [5, 6])),
        (
            {"prompt": "a", "request_id": "mine", "cache_salt": "tenant", "priority": 3},
            ParsedPrompt("a", [97], request_id="mine", cache_salt="tenant", priority=3),
        ),
        (
            {"prompt_token_ids": [5], "request_id": "mine", "cache_salt": "tenant", "priority": -1},
            ParsedPrompt(None, [5], request_id="mine", cache_salt="tenant", priority=-1),
        ),
    ],
)
def test_a_prompt_may_be_text_ids_or_a_dict_with_one_of_them(prompt, parsed):
    assert parse_prompt(prompt, TOKENIZER) == parsed


def test_ids_need_no_tokenizer():
    assert parse_prompt([5, 6], None).token_ids == [5, 6]
    assert parse_prompt({"prompt_token_ids": [5, 6]}, None).token_ids == [5, 6]


def test_the_callers_list_can_change_afterwards():
    ids = [5, 6]
    parsed = parse_prompt(ids, None)
    ids.append(7)
    assert parsed.token_ids == [5, 6]


@pytest.mark.parametrize(
    ("prompt", "parameter", "sentence"),
    [
        ("", "prompt", "The prompt is empty; it needs at least one token."),
        ({"prompt": ""}, "prompt", "The prompt is empty; it needs at least one token."),
        ({"prompt": 5}, "prompt", "A prompt's text must be a str, not 5."),
        ({"prompt": None}, "prompt", "A prompt's text must be a str, not None."),
        ({"prompt": [5]}, "prompt", "A prompt's text must be a str, not [5]."),
        ({}, "prompt", "A prompt given as a dict has either 'prompt' or 'prompt_token_ids'."),
        ({"priority": 1}, "prompt", "A prompt given as a dict has either 'prompt' or 'prompt_token_ids'."),
        (
            {"prompt": "a", "prompt_token_ids": [5]},
            "prompt",
            "A prompt given as a dict has either 'prompt' or 'prompt_token_ids'.",
        ),
        (
            {"prompt": "a", "salt": "x"},
            "salt",
            "A prompt has no key 'salt'; there are: prompt, prompt_token_ids, request_id, cache_salt, priority.",
        ),
        (
            {"prompt": "a", 7: "x"},
            "7",
            "A prompt has no key 7; there are: prompt, prompt_token_ids, request_id, cache_salt, priority.",
        ),
        ({"prompt_token_ids": "12"}, "prompt", FORMS + "'12'."),
        ({"prompt_token_ids": None}, "prompt", FORMS + "None."),
        ({"prompt_token_ids": {1: 2}}, "prompt", FORMS + "{1: 2}."),
        (5, "prompt", FORMS + "5."),
        (None, "prompt", FORMS + "None."),
        (b"ab", "prompt", FORMS + "b'ab'."),
        ({5, 6}, "prompt", FORMS + "{5, 6}."),
    ],
)
def test_any_other_form_is_refused_and_the_parameter_named(prompt, parameter, sentence):
    with pytest.raises(InvalidRequestError) as caught:
        parse_prompt(prompt, TOKENIZER)
    assert str(caught.value) == sentence
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("prompt", ["ab", {"prompt": "ab"}])
def test_text_needs_a_tokenizer(prompt):
    with pytest.raises(InvalidRequestError) as caught:
        parse_prompt(prompt, None)
    assert str(caught.value) == "The model has no tokenizer; pass prompt_token_ids."
    assert caught.value.parameter == "prompt"


def test_a_wrong_prompt_is_quoted_only_in_part():
    with pytest.raises(InvalidRequestError) as caught:
        parse_prompt(b"x" * 100_000, TOKENIZER)
    assert len(str(caught.value)) < 400


# -- one or many ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "listed"),
    [
        ("ab", ["ab"]),
        ({"prompt": "ab"}, [{"prompt": "ab"}]),
        ([5, 6], [[5, 6]]),
        (range(2), [range(2)]),
        (["ab", "c"], ["ab", "c"]),
        (("ab", "c"), ["ab", "c"]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["ab", [5], {"prompt": "c"}], ["ab", [5], {"prompt": "c"}]),
        ([5, "ab"], [5, "ab"]),
        ([], []),
    ],
)
def test_one_prompt_or_a_list_of_them_becomes_a_list(prompts, listed):
    assert as_prompt_list(prompts) == listed


@pytest.mark.parametrize("prompts", [5, None, b"ab", bytearray(b"ab"), {"a", "b"}, iter(["a"])])
def test_what_is_neither_a_prompt_nor_a_list_is_refused(prompts):
    with pytest.raises(InvalidRequestError, match="prompts must be a prompt or a list of them, not ") as caught:
        as_prompt_list(prompts)
    assert caught.value.parameter == "prompt"


def test_one_params_serves_all_prompts_and_a_list_serves_them_in_order():
    first, second = SamplingParams(n=1), SamplingParams(n=2)
    assert as_params_list(first, 3) == [first, first, first]
    assert as_params_list((first, second), 2) == [first, second]
    assert as_params_list(None, 2) == [SamplingParams(), SamplingParams()]
    assert as_params_list([], 0) == []


@pytest.mark.parametrize(
    ("params", "found"),
    [([SamplingParams()], "1"), ([SamplingParams()] * 3, "3"), ([], "0")],
)
def test_another_number_of_params_than_of_prompts_is_refused_with_both(params, found):
    with pytest.raises(InvalidRequestError) as caught:
        as_params_list(params, 2)
    assert str(caught.value) == f"There are 2 prompts and {found} SamplingParams; pass one for all, or one for each."
    assert caught.value.parameter == "sampling_params"


@pytest.mark.parametrize("params", [5, {"n": 2}, [{"n": 2}, {"n": 1}], "greedy"])
def test_what_is_no_params_is_refused(params):
    with pytest.raises(InvalidRequestError, match="sampling_params must be a SamplingParams, or a list with one"):
        as_params_list(params, 2)
