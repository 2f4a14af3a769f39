"""Experts against a loop over tokens, and who is sent where."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.models.mixture_of_experts import Experts, Routing, choose_experts, gated, keep_best_groups

NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE = 6, 8, 10


@pytest.fixture
def experts() -> Experts:
    random = torch.Generator().manual_seed(0)
    return Experts(
        gate_up=torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE, generator=random),
        down=torch.randn(NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE, generator=random),
        activation=gated,
        gate_up_bias=torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE_SIZE, generator=random),
        down_bias=torch.randn(NUM_EXPERTS, HIDDEN_SIZE, generator=random),
    )


def drawn(num_tokens: int, experts_per_token: int = 3) -> tuple[Tensor, Routing]:
    """Return tokens, and different experts for each of them."""
    random = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=random)
    return torch.randn(num_tokens, HIDDEN_SIZE, generator=random), choose_experts(scores, experts_per_token)


def one_expert(experts: Experts, number: int, token: Tensor) -> Tensor:
    assert experts.gate_up_bias is not None
    assert experts.down_bias is not None
    gate, up = (experts.gate_up[number] @ token + experts.gate_up_bias[number]).chunk(2)
    return experts.down[number] @ (F.silu(gate) * up) + experts.down_bias[number]


def mixed_token_by_token(experts: Experts, hidden: Tensor, routing: Routing) -> Tensor:
    rows = []
    for token, numbers, weights in zip(hidden, routing.experts.tolist(), routing.weights, strict=True):
        rows.append(sum(weight * one_expert(experts, n, token) for n, weight in zip(numbers, weights, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 100])
@pytest.mark.parametrize("experts_per_token", [1, 3, NUM_EXPERTS])
def test_a_token_gets_the_weighted_sum_of_its_experts(
    num_tokens: int, experts_per_token: int, experts: Experts
) -> None:
    hidden, routing = drawn(num_tokens, experts_per_token)
    expected = mixed_token_by_token(experts, hidden, routing)
    torch.testing.assert_close(experts.mix(hidden, routing), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 30])
def test_weights_may_be_those_of_what_goes_in(num_tokens: int, experts: Experts) -> None:
    hidden, routing = drawn(num_tokens)
    expected = [
        sum(one_expert(experts, n, weight * token) for n, weight in zip(numbers, weights, strict=True))
        for token, numbers, weights in zip(hidden, routing.experts.tolist(), routing.weights, strict=True)
    ]
    torch.testing.assert_close(
        experts.mix_weighted_inputs(hidden, routing), torch.stack(expected), atol=1e-4, rtol=1e-4
    )


def test_all_tokens_may_want_the_same_experts(experts: Experts) -> None:
    hidden, routing = drawn(200)
    crowded = replace(routing, experts=torch.tensor([[4, 0, 5]]).repeat(200, 1))
    expected = mixed_token_by_token(experts, hidden, crowded)
    torch.testing.assert_close(experts.mix(hidden, crowded), expected, atol=1e-4, rtol=1e-4)


def test_an_expert_that_nobody_chose_is_not_asked(experts: Experts) -> None:
    hidden, routing = drawn(20)
    chosen = Routing(routing.experts.clamp(max=2), routing.weights)
    expected = experts.mix(hidden, chosen)
    experts.gate_up[3:] = torch.nan
    assert torch.equal(experts.mix(hidden, chosen), expected)


def test_no_tokens_are_no_rows(experts: Experts) -> None:
    hidden, routing = drawn(0)
    assert experts.mix(hidden, routing).shape == (0, HIDDEN_SIZE)
    assert experts.mix_weighted_inputs(hidden, routing).shape == (0, HIDDEN_SIZE)


def test_matrices_may_be_transposed_views(experts: Experts) -> None:
    hidden, routing = drawn(20)
    views = replace(
        experts,
        gate_up=experts.gate_up.transpose(1, 2).contiguous().transpose(1, 2),
        down=experts.down.transpose(1, 2).contiguous().transpose(1, 2),
    )
    torch.testing.assert_close(views.mix(hidden, routing), experts.mix(hidden, routing))


def test_biases_may_be_missing(experts: Experts) -> None:
    hidden, routing = drawn(20)
    zeros = replace(experts, gate_up_bias=torch.zeros(NUM_EXPERTS, 20), down_bias=torch.zeros(NUM_EXPERTS, 8))
    without = replace(experts, gate_up_bias=None, down_bias=None)
    assert torch.equal(without.mix(hidden, routing), zeros.mix(hidden, routing))


def test_the_result_has_the_tokens_dtype_and_is_summed_in_the_weights(experts: Experts) -> None:
    hidden, routing = drawn(50)
    halved = Experts(experts.gate_up.bfloat16(), experts.down.bfloat16(), gated)
    mixed = halved.mix(hidden.bfloat16(), routing)
    assert mixed.dtype == torch.bfloat16
    exact = Experts(halved.gate_up.float(), halved.down.float(), gated).mix(hidden.bfloat16().float(), routing)
    torch.testing.assert_close(mixed.float(), exact, atol=0.03 * exact.abs().max().item(), rtol=0.03)
    assert halved.mix_weighted_inputs(hidden.bfloat16(), routing).dtype == torch.bfloat16


def test_what_it_is_given_is_left_as_it_was(experts: Experts) -> None:
    hidden, routing = drawn(20)
    before = [tensor.clone() for tensor in (hidden, routing.experts, routing.weights)]
    experts.mix(hidden, routing)
    experts.mix_weighted_inputs(hidden, routing)
    assert all(map(torch.equal, before, (hidden, routing.experts, routing.weights)))


def test_the_best_experts_are_chosen_with_their_scores() -> None:
    routing = choose_experts(torch.tensor([[0.1, 0.5, 0.4], [0.9, 0.0, 0.1]]), 2)
    assert routing.experts.tolist() == [[1, 2], [0, 2]]
    torch.testing.assert_close(routing.weights, torch.tensor([[0.5, 0.4], [0.9, 0.1]]))


def test_experts_outside_of_the_best_groups_are_filled_over() -> None:
    scores = torch.tensor([[0.1, 0.2, 0.9, 0.3, 0.4, 0.5], [0.6, 0.7, 0.0, 0.0, 0.1, 0.2]])
    group_scores = torch.tensor([[0.2, 0.9, 0.5], [0.7, 0.0, 0.2]])
    kept = keep_best_groups(scores, group_scores, 2, fill=-1.0)
    assert kept.tolist() == [
        pytest.approx([-1, -1, 0.9, 0.3, 0.4, 0.5]),
        pytest.approx([0.6, 0.7, -1, -1, 0.1, 0.2]),
    ]
    assert torch.equal(keep_best_groups(scores, group_scores, 3, fill=-1.0), scores)


def test_gates_may_have_another_function() -> None:
    rows = torch.tensor([[-1.0, 2.0, 3.0, 4.0]])
    assert partial(gated, function=torch.relu)(rows).tolist() == [[0.0, 8.0]]
    torch.testing.assert_close(gated(rows), F.silu(rows[:, :2]) * rows[:, 2:])
