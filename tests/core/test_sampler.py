"""Which token a row gets: from its own logits, settings and position, and from nothing else."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.sampler import Sampler, uniform_noise
from octavo.core.sampling_params import SamplingParams
from octavo.core.step_plan import RowSampling

LOGITS = [1.5, -0.25, 2.0, 0.5, -1.0, 1.9, 0.0, -3.0]


def row(number=0, **settings):
    defaults = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 7,
        "choice": 0,
        "num_prompt_tokens": 0,
        "min_tokens": 0,
        "masked_before_min_tokens": (),
        "num_logprobs": None,
    }
    return RowSampling(row=number, **defaults | settings)


def sample(rows, logits, positions):
    """Return the step's result for rows 0, 1, 2... of a new sampler."""
    sampler = Sampler()
    for number, sampling in enumerate(rows):
        sampler.set_row(RowSampling(**vars(sampling) | {"row": number}))
    return sampler.sample(torch.tensor(logits), range(len(rows)), positions)


def tokens(settings, logits, num_positions):
    """Return what one row chooses from the same logits at positions 0, 1, 2..."""
    sampler = Sampler()
    sampler.set_row(settings)
    repeated = torch.tensor([logits] * num_positions)
    return sampler.sample(repeated, [settings.row] * num_positions, range(num_positions)).token_ids


def expected_distribution(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Truncate as the docs say, one token after the other."""
    weights = [math.exp(logit / temperature) for logit in logits]
    kept = [i for i, weight in enumerate(weights) if weight >= min_p * max(weights)]
    kept.sort(key=lambda i: (-weights[i], i))
    kept = kept[: top_k or None]
    total = sum(weights[i] for i in kept)
    smallest_set, reached = [], 0.0
    for i in kept:
        smallest_set.append(i)
        reached += weights[i]
        if reached >= top_p * total:
            break
    total = sum(weights[i] for i in smallest_set)
    return {i: weights[i] / total for i in smallest_set}


# -- noise ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "noise"),
    [
        ((0, 0, 0), 0.156742553465558),
        ((7, 0, 3), 0.32541466495141846),
        ((7, 1, 3), 0.5899433553244471),
        ((7, 0, 4), 0.9765547059919115),
        ((8, 0, 3), 0.8464687011986718),
        ((2**63 - 1, 63, 131072), 0.7997475807571099),
    ],
)
def test_noise_is_the_same_number_in_every_process_and_version(key, noise):
    assert uniform_noise(*key) == noise


def test_noise_differs_by_seed_by_choice_and_by_position():
    keys = [(seed, choice, position) for seed in range(10) for choice in range(10) for position in range(100)]
    noise = [uniform_noise(*key) for key in keys]
    assert len(set(noise)) == len(keys)
    assert all(0 <= number < 1 for number in noise)
    assert abs(sum(noise) / len(noise) - 0.5) < 0.01


def test_tokens_follow_from_seed_choice_and_position_and_change_with_each():
    settings = row(temperature=1.0)
    first = tokens(settings, LOGITS, 64)
    assert tokens(settings, LOGITS, 64) == first
    assert tokens(row(temperature=1.0, seed=8), LOGITS, 64) != first
    assert tokens(row(temperature=1.0, choice=1), LOGITS, 64) != first
    assert len(set(first)) > 3


# -- greedy -----------------------------------------------------------------------------------------------------


def test_greedy_takes_the_largest_and_among_equals_the_lowest_id():
    logits = [[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0], [-5.0, -9.0, -8.0, -5.0]]
    assert sample([row()] * 3, logits, [0, 0, 0]).token_ids == [1, 0, 0]


def test_top_k_of_one_is_greedy_ties_included():
    logits = [0.0, 3.0, 1.0, 3.0]
    assert set(tokens(row(temperature=1.0, top_k=1), logits, 200)) == {1}
    assert set(tokens(row(temperature=0.0), logits, 200)) == {1}


@pytest.mark.parametrize("temperature", [0, 1e-7, 1e-30, 9.99e-6])
def test_a_temperature_next_to_nothing_is_accepted_and_greedy(temperature):
    assert SamplingParams(temperature=temperature).is_greedy


def test_the_smallest_temperature_that_divides_does_not_overflow():
    assert not SamplingParams(temperature=1e-5).is_greedy
    logits = [3.0e38, 3.3e38, -3.3e38, 3.3e38]
    assert set(tokens(row(temperature=1e-5), logits, 100)) == {1, 3}
    assert set(tokens(row(temperature=1e-5), [1.0, 1.1, 1.05], 100)) == {1}


def test_greedy_ignores_the_truncation():
    assert tokens(row(top_p=0.1, top_k=3, min_p=0.5), LOGITS, 5) == [2] * 5


# -- the distribution -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "truncation",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.8, "min_p": 0.1},
        {"temperature": 0.7, "top_k": 4, "top_p": 0.9},
        {"temperature": 5.0, "top_p": 0.6, "min_p": 0.65},
    ],
)
def test_tokens_come_as_often_as_the_truncated_distribution_says(truncation):
    num_positions = 20_000
    counts = Counter(tokens(row(**truncation), LOGITS, num_positions))
    expected = expected_distribution(LOGITS, **truncation)
    assert set(counts) == set(expected)
    chi_square = sum((counts[i] - num_positions * p) ** 2 / (num_positions * p) for i, p in expected.items())
    # Seven degrees of freedom exceed this once in ten thousand seeds.
    assert chi_square < 29.9


def test_top_p_is_a_share_of_what_min_p_and_top_k_left():
    # 0.4 and 0.3 are kept by top_k; the first alone is 0.57 of them.
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert set(tokens(row(temperature=1.0, top_k=2, top_p=0.55), logits, 500)) == {0}
    assert set(tokens(row(temperature=1.0, top_k=2, top_p=0.6), logits, 500)) == {0, 1}
    assert set(tokens(row(temperature=1.0, min_p=0.7, top_p=0.55), logits, 500)) == {0}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, 1), (0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.7500001, 4), (1.0, 4)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it_and_at_least_one(top_p, kept):
    # Four tokens of a quarter each, exactly; among equals the lowest ids are kept.
    assert set(tokens(row(temperature=1.0, top_p=top_p), [0.0] * 4, 400)) == set(range(kept))


def test_min_p_keeps_what_is_exactly_as_likely_as_it_asks():
    half = math.log(0.5)
    logits = [0.0, 0.0, half + 1e-4, half - 1e-4]
    assert set(tokens(row(temperature=1.0, min_p=0.5), logits, 500)) == {0, 1, 2}
    assert set(tokens(row(temperature=1.0, min_p=1.0), logits, 500)) == {0, 1}


def test_min_p_looks_at_the_distribution_after_the_temperature():
    logits = [0.0, math.log(0.5)]
    assert set(tokens(row(temperature=1.0, min_p=0.6), logits, 500)) == {0}
    assert set(tokens(row(temperature=2.0, min_p=0.6), logits, 500)) == {0, 1}


@pytest.mark.parametrize("top_k", [8, 9, 1000, 2**63 - 1])
def test_a_top_k_of_the_whole_vocabulary_or_more_truncates_nothing(top_k):
    assert tokens(row(temperature=1.0, top_k=top_k), LOGITS, 500) == tokens(row(temperature=1.0), LOGITS, 500)


def test_top_k_keeps_the_lowest_ids_among_equals():
    assert set(tokens(row(temperature=1.0, top_k=3), [0.0] * 6, 400)) == {0, 1, 2}


# -- neighbours -------------------------------------------------------------------------------------------------

FINITE_LOGITS = st.floats(-30, 30, width=32)


@st.composite
def batches(draw):
    vocab_size = draw(st.integers(2, 12))
    num_rows = draw(st.integers(1, 6))
    rows = [
        row(
            temperature=draw(st.sampled_from([0.0, 1e-5, 0.3, 1.0, 7.0])),
            top_p=draw(st.sampled_from([1.0, 0.9, 0.3])),
            top_k=draw(st.sampled_from([0, 1, 3, 50])),
            min_p=draw(st.sampled_from([0.0, 0.1, 1.0])),
            seed=draw(st.integers(0, 2**63 - 1)),
            choice=draw(st.integers(0, 3)),
            num_prompt_tokens=draw(st.integers(1, 4)),
            min_tokens=draw(st.integers(0, 4)),
            masked_before_min_tokens=draw(st.sampled_from([(), (0,), (1, 0)])),
            num_logprobs=draw(st.sampled_from([None, 0, 3])),
        )
        for _ in range(num_rows)
    ]
    logits = draw(
        st.lists(
            st.lists(FINITE_LOGITS, min_size=vocab_size, max_size=vocab_size), min_size=num_rows, max_size=num_rows
        )
    )
    positions = draw(st.lists(st.integers(1, 8), min_size=num_rows, max_size=num_rows))
    return rows, logits, positions, draw(st.permutations(range(num_rows)))


@settings(max_examples=100, deadline=None)
@given(batches())
def test_what_a_row_gets_depends_neither_on_its_neighbours_nor_on_their_order(batch):
    rows, logits, positions, order = batch
    alone = [sample([rows[i]], [logits[i]], [positions[i]]) for i in range(len(rows))]
    together = sample([rows[i] for i in order], [logits[i] for i in order], [positions[i] for i in order])
    for place, i in enumerate(order):
        assert together.failed[place] == alone[i].failed[0]
        assert together.logprobs[place] == alone[i].logprobs[0]
        assert together.token_ids[place] == alone[i].token_ids[0]
        assert 0 <= together.token_ids[place] < len(logits[0])


def test_a_row_samples_as_its_newest_owner():
    sampler = Sampler()
    sampler.set_row(row(3, temperature=1.0, top_k=2))
    sampler.set_row(row(3))
    sampler.set_row(row(1, masked_before_min_tokens=(2,), min_tokens=1))
    assert sampler.sample(torch.tensor([LOGITS, LOGITS]), [3, 1], [0, 0]).token_ids == [2, 5]


# -- logits that are not finite ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad",
    [
        [math.nan, *LOGITS[1:]],
        [*LOGITS[:-1], math.nan],
        [math.nan] * 8,
        [*LOGITS[:3], math.inf, *LOGITS[4:]],
        [-math.inf] * 8,
        [-math.inf] * 7 + [math.nan],
    ],
    ids=["NaN first", "NaN last", "all NaN", "+inf", "all -inf", "-inf and NaN"],
)
def test_a_row_of_which_nothing_can_be_chosen_fails_alone(bad, temperature):
    rows = [row(temperature=temperature, num_logprobs=8, seed=seed, top_p=0.9) for seed in range(3)]
    result = sample(rows, [LOGITS, bad, LOGITS], [4, 5, 6])
    assert result.failed == [False, True, False]
    without = sample([rows[0], rows[2]], [LOGITS, LOGITS], [4, 6])
    assert [result.token_ids[0], result.token_ids[2]] == without.token_ids
    assert [result.logprobs[0], result.logprobs[2]] == without.logprobs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_impossible_token_is_no_failure_and_its_logprob_is_finite(temperature):
    logits = [-math.inf, 0.0, -math.inf, 0.0]
    sampler = Sampler()
    sampler.set_row(row(temperature=temperature, num_logprobs=4))
    result = sampler.sample(torch.tensor([logits] * 100), [0] * 100, range(100))
    assert not any(result.failed)
    assert set(result.token_ids) == ({1} if temperature == 0 else {1, 3})
    top = result.logprobs[0].top
    assert [token_id for token_id, _ in top] == [1, 3, 0, 2]
    assert top[0][1] == pytest.approx(math.log(0.5))
    assert top[2][1] == top[3][1] == torch.finfo(torch.float32).min


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_could_only_stop_too_early_fails_instead_of_choosing_what_is_masked(temperature):
    masked = row(temperature=temperature, min_tokens=1, masked_before_min_tokens=(1, 2))
    result = sample([masked, row()], [[-math.inf, 0.0, 1.0], [0.0, 1.0, 0.0]], [0, 0])
    assert result.failed == [True, False]
    assert result.token_ids[1] == 1


# -- min_tokens -------------------------------------------------------------------------------------------------


def test_stops_are_masked_exactly_until_min_tokens_are_there():
    # The prompt has 5 tokens, so the token at position 5 is output number 0.
    settings = row(num_prompt_tokens=5, min_tokens=3, masked_before_min_tokens=(2, 5))
    sampler = Sampler()
    sampler.set_row(settings)
    chosen = {p: sampler.sample(torch.tensor([LOGITS]), [0], [p]).token_ids for p in (9, 7, 5, 6, 8, 7)}
    # The masked ones are the best and the second best.
    assert chosen == {5: [0], 6: [0], 7: [0], 8: [2], 9: [2]}


def test_masking_a_stop_leaves_the_neighbours_logits_alone():
    settings = row(min_tokens=2, masked_before_min_tokens=(2,))
    assert sample([row(), settings, row()], [LOGITS] * 3, [0, 0, 0]).token_ids == [2, 5, 2]


def test_random_rows_do_not_choose_a_masked_stop_either():
    logits = [0.0, 8.0, 0.0]
    settings = row(temperature=1.0, min_tokens=100, masked_before_min_tokens=(1,))
    chosen = tokens(settings, logits, 200)
    assert 1 not in chosen[:100]
    assert chosen[100:].count(1) > 90


# -- log-probabilities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 0.2, "top_k": 2}, {"temperature": 9.0, "min_p": 0.9}])
def test_logprobs_are_those_of_the_model_before_temperature_and_truncation(options):
    expected = torch.log_softmax(torch.tensor(LOGITS), dim=0).tolist()
    result = sample([row(num_logprobs=3, **options)], [LOGITS], [11])
    (logprobs,) = result.logprobs
    assert logprobs.token_id == result.token_ids[0]
    assert logprobs.logprob == expected[result.token_ids[0]]
    assert logprobs.top == ((2, expected[2]), (5, expected[5]), (0, expected[0]))


def test_logprobs_show_what_min_tokens_masked():
    settings = row(num_logprobs=1, min_tokens=1, masked_before_min_tokens=(2,))
    (logprobs,) = sample([settings], [LOGITS], [0]).logprobs
    assert logprobs.token_id == 5
    assert logprobs.top[0][0] == 2
    assert logprobs.logprob < logprobs.top[0][1] < 0


def test_equally_likely_tokens_are_listed_lowest_id_first():
    (logprobs,) = sample([row(num_logprobs=3)], [[1.0, 2.0, 0.0, 2.0, 1.0]], [0]).logprobs
    assert [token_id for token_id, _ in logprobs.top] == [1, 3, 0]


def test_each_row_gets_as_many_logprobs_as_it_asked_for():
    rows = [row(), row(num_logprobs=0), row(num_logprobs=20)]
    none, zero, all_eight = sample(rows, [LOGITS] * 3, [0] * 3).logprobs
    assert none is None
    assert zero.top == ()
    assert zero.logprob == pytest.approx(torch.log_softmax(torch.tensor(LOGITS), dim=0)[2].item())
    assert len(all_eight.top) == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    sampler = Sampler()
    sampler.set_row(row(num_logprobs=1))
    logits = torch.tensor([LOGITS]).to(dtype)
    expected = torch.log_softmax(logits[0].float(), dim=0)[2].item()
    assert sampler.sample(logits, [0], [0]).logprobs[0].logprob == expected
