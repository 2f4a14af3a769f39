"""Mixtures of experts: which experts a token goes to, and what they make of it.

    scores ──► Routing                       choose_experts, keep_best_groups
    hidden rows + Routing ──► hidden rows    Experts.mix, Experts.mix_weighted_inputs

No token is dropped, however uneven the load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.models.linear import linear
from octavo.models.weight_loader import WeightLoader


@dataclass(frozen=True)
class Routing:
    """Where each token goes.

    Attributes:
        experts: Numbers of a token's experts, in any order, int64. [num_tokens, experts_per_token]
        weights: How much each of them counts, in any dtype. [num_tokens, experts_per_token]
    """

    experts: Tensor
    weights: Tensor


def choose_experts(scores: Tensor, experts_per_token: int) -> Routing:
    """Send each token to its best experts, with their scores as weights.

    Args:
        scores: [num_tokens, num_experts]
    """
    weights, experts = torch.topk(scores, experts_per_token, dim=-1)
    return Routing(experts, weights)


def keep_best_groups(scores: Tensor, group_scores: Tensor, groups_per_token: int, *, fill: float) -> Tensor:
    """Return the scores with `fill` for the experts outside of each token's best groups.

    Args:
        scores: [num_tokens, num_experts], group after group.
        group_scores: [num_tokens, num_groups]
        groups_per_token: How many groups are kept.
        fill: What no expert of a kept group scores less than.
    """
    best = torch.topk(group_scores, groups_per_token, dim=-1).indices
    is_kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
    experts_per_group = scores.shape[1] // group_scores.shape[1]
    return scores.masked_fill(~is_kept.repeat_interleave(experts_per_group, dim=1), fill)


@dataclass(frozen=True)
class Experts:
    """The weights of one layer's experts. Tensors may have any strides: a transposed view serves as well as a copy.

    Attributes:
        gate_up: The two inner projections, stacked. [num_experts, 2 * intermediate_size, hidden_size]
        down: [num_experts, hidden_size, intermediate_size]
        activation: What is between: [num_rows, 2 * intermediate_size] to [num_rows, intermediate_size].
        gate_up_bias: [num_experts, 2 * intermediate_size]
        down_bias: [num_experts, hidden_size]
    """

    gate_up: Tensor
    down: Tensor
    activation: Callable[[Tensor], Tensor]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def mix(self, hidden: Tensor, routing: Routing) -> Tensor:
        """Return the sum over a token's experts of weight * expert(token). [num_tokens, hidden_size]

        Args:
            hidden: [num_tokens, hidden_size]
        """
        outputs = self._by_choice(hidden, routing.experts, None)
        mixed = outputs[:, 0] * routing.weights[:, :1]
        for choice in range(1, routing.experts.shape[1]):
            mixed += outputs[:, choice] * routing.weights[:, choice : choice + 1]
        return mixed.to(hidden.dtype)

    def mix_weighted_inputs(self, hidden: Tensor, routing: Routing) -> Tensor:
        """Return the sum over a token's experts of expert(weight * token), as Llama 4 has it.

        Args:
            hidden: [num_tokens, hidden_size]

        Returns:
            [num_tokens, hidden_size]
        """
        return self._by_choice(hidden, routing.experts, routing.weights).sum(dim=1)

    def _by_choice(self, hidden: Tensor, experts: Tensor, input_weights: Tensor | None) -> Tensor:
        """Return what each of a token's experts makes of it. [num_tokens, experts_per_token, hidden_size]"""
        # Sorted by expert, so that each expert that anybody chose has one product to do.
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        inputs = hidden[torch.div(order, experts.shape[1], rounding_mode="floor")]
        if input_weights is not None:
            inputs = inputs * input_weights.flatten()[order, None].to(hidden.dtype)
        outputs = hidden.new_empty(len(order), hidden.shape[1])
        num_rows_by_expert = torch.bincount(chosen, minlength=len(self.gate_up)).tolist()
        start = 0
        for expert, num_rows in enumerate(num_rows_by_expert):
            if num_rows:
                rows = slice(start, start + num_rows)
                outputs[order[rows]] = self._one_expert(expert, inputs[rows])
                start = rows.stop
        return outputs.view(*experts.shape, hidden.shape[1])

    def _one_expert(self, expert: int, rows: Tensor) -> Tensor:
        """Return one expert's output for its rows. [num_rows, hidden_size]"""
        gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        down_bias = None if self.down_bias is None else self.down_bias[expert]
        inner = self.activation(linear(rows, self.gate_up[expert], gate_up_bias))
        return linear(inner, self.down[expert], down_bias)


def gated(gate_up: Tensor, *, function: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """Return function(gate) * up of rows that have first the gates, then the ups. [num_rows, intermediate_size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return function(gate) * up


@dataclass(frozen=True)
class ExpertWeights:
    """Experts' matrices, to be filled by the loader. Shapes as in `Experts`."""

    gate_up: Tensor
    down: Tensor


def expert_weights(
    loader: WeightLoader, prefix: str, *, num_experts: int, hidden_size: int, intermediate_size: int
) -> ExpertWeights:
    """Claim the matrices of a layer's experts, in whichever of two forms the checkpoint has them.

    One by one, as files on the hub have them and `save_pretrained` writes them:

        {prefix}.{expert}.gate_proj.weight, .up_proj.weight [intermediate, hidden], .down_proj.weight [hidden, inter...]

    or stacked, as transformers has them in memory:

        {prefix}.gate_up_proj [num_experts, 2 * intermediate, hidden], {prefix}.down_proj [num_experts, hidden, ...]
    """
    gate_up_shape = (num_experts, 2 * intermediate_size, hidden_size)
    down_shape = (num_experts, hidden_size, intermediate_size)
    if loader.has(f"{prefix}.gate_up_proj"):
        return ExpertWeights(
            loader.tensor(f"{prefix}.gate_up_proj", *gate_up_shape), loader.tensor(f"{prefix}.down_proj", *down_shape)
        )
    gates_and_ups = {
        f"{prefix}.{expert}.{name}.weight": intermediate_size
        for expert in range(num_experts)
        for name in ("gate_proj", "up_proj")
    }
    downs = {f"{prefix}.{expert}.down_proj.weight": hidden_size for expert in range(num_experts)}
    return ExpertWeights(
        loader.stacked(gates_and_ups, hidden_size).view(gate_up_shape),
        loader.stacked(downs, intermediate_size).view(down_shape),
    )
