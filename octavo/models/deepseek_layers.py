"""What a DeepSeek layer is made of, and how its weights are found in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.models.config_values import ACTIVATIONS
from octavo.models.deepseek_config import DeepseekConfig, RouterConfig
from octavo.models.linear import linear
from octavo.models.mixture_of_experts import (
    Experts,
    Routing,
    choose_experts,
    expert_weights,
    gated,
    keep_best_groups,
)
from octavo.models.weight_loader import WeightLoader


@dataclass(frozen=True)
class LatentHeads:
    """Implements `LatentProjection`: the way between one layer's latents and its heads.

    Attributes:
        expansion: Each head's rows make first its key, without the part for positions, then its value.
            [num_heads, nope_dim + value_dim, latent_dim]
        nope_dim: Numbers in a key that carry no position.
        rope_dim: Numbers that do.
    """

    expansion: Tensor
    nope_dim: int
    rope_dim: int

    @property
    def key_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def value_dim(self) -> int:
        return self.expansion.shape[1] - self.nope_dim

    def absorb(self, query: Tensor) -> Tensor:
        """See `LatentProjection.absorb`."""
        nope, rope = torch.split(query, [self.nope_dim, self.rope_dim], dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), self.expansion[:, : self.nope_dim])
        return torch.cat((absorbed.transpose(0, 1), rope), dim=-1)

    def project(self, attended: Tensor) -> Tensor:
        """See `LatentProjection.project`."""
        values = self.expansion[:, self.nope_dim :].transpose(1, 2)
        return torch.bmm(attended.transpose(0, 1), values).transpose(0, 1)

    def expand(self, latents: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """See `LatentProjection.expand`."""
        expansion = self.expansion[heads]
        latent, rope = torch.split(latents, [expansion.shape[2], self.rope_dim], dim=-1)
        expanded = linear(latent, expansion.flatten(0, 1)).view(len(latents), *expansion.shape[:2])
        nope, values = torch.split(expanded, [self.nope_dim, self.value_dim], dim=-1)
        return torch.cat((nope, rope[:, None].expand(-1, len(expansion), -1)), dim=-1), values


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's attention.

    Attributes:
        query_latent: Compresses queries, and `query_norm` normalises what comes of it; None where queries are not
            compressed. [query_latent_dim, hidden_size]
        query: [num_heads * query_dim, query_latent_dim or hidden_size]
        latent: Makes the latent, and the key that carries the position. [latent_dim + rope_dim, hidden_size]
        latent_norm: [latent_dim]
        heads: Between latents and heads.
        output: [hidden_size, num_heads * value_dim]
        query_latent_bias: And the other biases: one number a row of their projection, or None.
    """

    query_latent: Tensor | None
    query_latent_bias: Tensor | None
    query_norm: Tensor | None
    query: Tensor
    latent: Tensor
    latent_bias: Tensor | None
    latent_norm: Tensor
    heads: LatentHeads
    output: Tensor
    output_bias: Tensor | None


@dataclass(frozen=True)
class DenseMLP:
    """What every token goes through.

    Attributes:
        gate_up: The two inner projections. [2 * intermediate_size, hidden_size]
        down: [hidden_size, intermediate_size]
        gate_up_bias: And `down_bias`: one number a row, or None.
        activation: [num_tokens, 2 * intermediate_size] to [num_tokens, intermediate_size].
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor) -> Tensor:
        inner = self.activation(linear(hidden, self.gate_up, self.gate_up_bias))
        return linear(inner, self.down, self.down_bias)


@dataclass(frozen=True)
class MixedMLP:
    """What a token goes through where there are experts.

    Attributes:
        router: Float32, whatever the other weights are. [num_experts, hidden_size]
        router_bias: Added to scores for the choice alone, float32; None in V2. [num_experts]
        router_config: What is made of the router's numbers.
        experts: Of which each token goes to a few.
        shared: What all tokens go through besides.
    """

    router: Tensor
    router_bias: Tensor | None
    router_config: RouterConfig
    experts: Experts
    shared: DenseMLP

    def __call__(self, hidden: Tensor) -> Tensor:
        routing = route(linear(hidden.float(), self.router), self.router_bias, self.router_config)
        return self.experts.mix(hidden, routing) + self.shared(hidden)


@dataclass(frozen=True)
class DeepseekLayer:
    """One layer's weights.

    Attributes:
        attention_norm: [hidden_size]
        attention: What it says.
        mlp_norm: [hidden_size]
        mlp: Dense in the first layers, mixed in the others.
    """

    attention_norm: Tensor
    attention: AttentionWeights
    mlp_norm: Tensor
    mlp: DenseMLP | MixedMLP


def route(router_logits: Tensor, bias: Tensor | None, config: RouterConfig) -> Routing:
    """Choose each token's experts, among those of its best groups.

    Args:
        router_logits: Float32. [num_tokens, num_experts]
        bias: Of a sigmoid router. [num_experts]
    """
    if not config.is_sigmoid:
        scores = router_logits.softmax(dim=-1)
        group_scores = torch.unflatten(scores, 1, (config.num_groups, -1)).amax(dim=-1)
        choosable = keep_best_groups(scores, group_scores, config.groups_per_token, fill=0.0)
    else:
        scores = router_logits.sigmoid()
        biased = scores if bias is None else scores + bias
        group_scores = torch.unflatten(biased, 1, (config.num_groups, -1)).topk(2, dim=-1).values.sum(dim=-1)
        choosable = keep_best_groups(biased, group_scores, config.groups_per_token, fill=-torch.inf)
    experts = choose_experts(choosable, config.experts_per_token).experts
    weights = scores.gather(1, experts)
    if config.is_normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(experts, weights * config.scale)


def load_layer(loader: WeightLoader, config: DeepseekConfig, index: int) -> DeepseekLayer:
    """Claim a layer's tensors. Queries and keys are as the file has them: see `pair_halves`."""
    prefix = f"model.layers.{index}"
    return DeepseekLayer(
        attention_norm=loader.tensor(f"{prefix}.input_layernorm.weight", config.hidden_size),
        attention=_attention(loader, config, f"{prefix}.self_attn"),
        mlp_norm=loader.tensor(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
        mlp=(
            _dense_mlp(loader, config, f"{prefix}.mlp", config.intermediate_size)
            if index < config.num_dense_layers
            else _mixed_mlp(loader, config, f"{prefix}.mlp")
        ),
    )


def _attention(loader: WeightLoader, config: DeepseekConfig, prefix: str) -> AttentionWeights:
    query_rows, latent_rows = config.num_heads * config.query_dim, config.latent_dim + config.rope_dim
    expanded_rows = config.num_heads * (config.nope_dim + config.value_dim)

    def bias(name: str, num_rows: int) -> Tensor | None:
        return loader.tensor(f"{prefix}.{name}.bias", num_rows) if config.attention_bias else None

    if (query_latent_dim := config.query_latent_dim) is None:
        query_latent = query_latent_bias = query_norm = None
        query = loader.tensor(f"{prefix}.q_proj.weight", query_rows, config.hidden_size)
    else:
        query_latent = loader.tensor(f"{prefix}.q_a_proj.weight", query_latent_dim, config.hidden_size)
        query_latent_bias = bias("q_a_proj", query_latent_dim)
        query_norm = loader.tensor(f"{prefix}.q_a_layernorm.weight", query_latent_dim)
        query = loader.tensor(f"{prefix}.q_b_proj.weight", query_rows, query_latent_dim)
    expansion = loader.tensor(f"{prefix}.kv_b_proj.weight", expanded_rows, config.latent_dim)
    return AttentionWeights(
        query_latent=query_latent,
        query_latent_bias=query_latent_bias,
        query_norm=query_norm,
        query=query,
        latent=loader.tensor(f"{prefix}.kv_a_proj_with_mqa.weight", latent_rows, config.hidden_size),
        latent_bias=bias("kv_a_proj_with_mqa", latent_rows),
        latent_norm=loader.tensor(f"{prefix}.kv_a_layernorm.weight", config.latent_dim),
        heads=LatentHeads(torch.unflatten(expansion, 0, (config.num_heads, -1)), config.nope_dim, config.rope_dim),
        output=loader.tensor(f"{prefix}.o_proj.weight", config.hidden_size, config.num_heads * config.value_dim),
        output_bias=bias("o_proj", config.hidden_size),
    )


def _dense_mlp(loader: WeightLoader, config: DeepseekConfig, prefix: str, intermediate_size: int) -> DenseMLP:
    def gate_up(kind: str, *row_shape: int) -> Tensor:
        rows = dict.fromkeys((f"{prefix}.gate_proj.{kind}", f"{prefix}.up_proj.{kind}"), intermediate_size)
        return loader.stacked(rows, *row_shape)

    return DenseMLP(
        gate_up=gate_up("weight", config.hidden_size),
        down=loader.tensor(f"{prefix}.down_proj.weight", config.hidden_size, intermediate_size),
        gate_up_bias=gate_up("bias") if config.mlp_bias else None,
        down_bias=loader.tensor(f"{prefix}.down_proj.bias", config.hidden_size) if config.mlp_bias else None,
        activation=_activation(config),
    )


def _mixed_mlp(loader: WeightLoader, config: DeepseekConfig, prefix: str) -> MixedMLP:
    router = config.router
    experts = expert_weights(
        loader,
        f"{prefix}.experts",
        num_experts=router.num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.expert_size,
    )
    return MixedMLP(
        router=loader.tensor(f"{prefix}.gate.weight", router.num_experts, config.hidden_size, dtype=torch.float32),
        router_bias=loader.tensor(f"{prefix}.gate.e_score_correction_bias", router.num_experts, dtype=torch.float32)
        if router.is_sigmoid
        else None,
        router_config=router,
        experts=Experts(experts.gate_up, experts.down, _activation(config)),
        shared=_dense_mlp(loader, config, f"{prefix}.shared_experts", config.shared_size),
    )


def _activation(config: DeepseekConfig) -> Callable[[Tensor], Tensor]:
    function, arguments = ACTIVATIONS[config.activation]
    return partial(gated, function=partial(getattr(F, function), **arguments))


def pair_halves(weights: AttentionWeights, config: DeepseekConfig) -> None:
    """Reorder, in place, the projections' rows that make what turns.

    In the file the two numbers of a pair are neighbours; `apply_rope` has one in each half. Queries and keys are
    reordered alike, so that their products stay the same.
    """
    projections = [torch.unflatten(weights.query, 0, (config.num_heads, -1)), weights.latent[None]]
    if weights.latent_bias is not None:
        projections.append(weights.latent_bias[None])
    for projection in projections:
        turning = projection[:, -config.rope_dim :]
        turning.copy_(torch.cat((turning[:, 0::2], turning[:, 1::2]), dim=1))
