"""The workloads are the same numbers everywhere, or no two engines could be compared by them."""

import hashlib
import json

import pytest

from octavo.benchmark.workloads import WORKLOAD_NAMES, custom_workload, named_workload
from octavo.errors import ConfigError

# Requests, prompt tokens, tokens to generate for each, the first prompt's first and the last one's last ids, a digest.
PINNED = {
    "single": (1, 128, 128, [25347, 27662, 2753], [9691, 14437, 3064], "a8816aa67bb8f3b5"),
    "batch": (64, 16103, 128, [25347, 27662, 2753], [4603, 15599, 4649], "eba38e19fdb88f79"),
    "prefix": (64, 67584, 32, [25347, 27662, 2753], [17773, 15625, 17258], "139ee900556cab75"),
    "long": (4, 16384, 64, [25347, 27662, 2753], [24245, 2403, 25676], "5084bfb52cc25fd6"),
}


@pytest.mark.parametrize("name", PINNED)
def test_a_named_workload_is_always_the_same_numbers(name):
    workload = named_workload(name)
    num_requests, num_prompt_tokens, output_len, first, last, digest = PINNED[name]
    assert workload.name == name
    assert len(workload.prompts) == num_requests
    assert workload.num_prompt_tokens == num_prompt_tokens
    assert workload.output_len == output_len
    assert workload.num_output_tokens == num_requests * output_len
    assert workload.prompts[0][:3] == first
    assert workload.prompts[-1][-3:] == last
    assert hashlib.sha256(json.dumps(workload.prompts).encode()).hexdigest()[:16] == digest


def test_all_names_are_pinned_here():
    assert tuple(PINNED) == WORKLOAD_NAMES


def test_the_longest_request_counts_its_output():
    assert named_workload("single").max_request_len == 256
    assert named_workload("batch").max_request_len == max(map(len, named_workload("batch").prompts)) + 128


def test_the_prefix_workload_shares_1024_tokens_and_no_more():
    prompts = named_workload("prefix").prompts
    assert {tuple(prompt[:1024]) for prompt in prompts} == {tuple(prompts[0][:1024])}
    assert len({prompt[1024] for prompt in prompts}) > 60


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("quick", "There is no workload called 'quick'. There are: single, batch, prefix, long."),
        (
            "singel",
            "There is no workload called 'singel'. Did you mean 'single'? There are: single, batch, prefix, long.",
        ),
        (
            "custom",
            "'custom' is no name of a workload that there is; a workload of your own is made with --num-prompts, "
            "--input-len and --output-len.",
        ),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_the_way_out(name, sentence):
    with pytest.raises(ConfigError) as caught:
        named_workload(name)
    assert str(caught.value) == sentence


def test_a_custom_workload_has_the_size_that_was_asked_for_and_ids_of_the_whole_vocabulary():
    workload = custom_workload(30, 20, 5, vocab_size=8, seed=0)
    assert [len(prompt) for prompt in workload.prompts] == [20] * 30
    assert (workload.name, workload.output_len) == ("custom", 5)
    assert {token_id for prompt in workload.prompts for token_id in prompt} == set(range(8))


def test_the_seed_decides_on_the_ids_of_a_custom_workload():
    one, again, other = (custom_workload(2, 9, 5, vocab_size=512, seed=seed).prompts for seed in (1, 1, 2))
    assert one == again != other
    assert one[0] != one[1]
