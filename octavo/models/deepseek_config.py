"""What a DeepSeek-V2- or DeepSeek-V3-style config asks for, and whether it can be computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.config_values import (
    activation,
    flag,
    not_negative,
    positive,
    refuse_unless_neutral,
    shortened,
    whole,
)
from octavo.models.rope import RopeSpec, read_rope

MODEL_TYPES = ("deepseek_v2", "deepseek_v3")

# Keys that change the result in some model or fork, and the values at which they mean nothing. None always does.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "sliding_window": (),
    "attn_logit_softcapping": (0, 0.0),
    "final_logit_softcapping": (0, 0.0),
    "logit_scale": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "index_topk": (),
    "index_n_heads": (),
    "use_qk_norm": (False,),
    "use_mla": (True,),
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "vision_config": (),
}
# The same for one of the two alone. Of moe_layer_freq, and of V2's norm_topk_prob, DeepSeek's own code takes notice and
# transformers does not; no published model sets them to anything else.
_NEUTRAL_VALUES_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    "deepseek_v2": {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),
        "moe_layer_freq": (1,),
        "rope_interleave": (True,),
    },
    "deepseek_v3": {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "mlp_bias": (False,),
    },
}
# What transformers takes for keys that a config lacks, or gives as null.
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 0,
}
_DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "norm_topk_prob": False,
    },
    "deepseek_v3": {
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
    },
}


@dataclass(frozen=True)
class RouterConfig:
    """How a token's experts are chosen.

    Attributes:
        num_experts: Experts of a layer, in `num_groups` groups of equally many.
        experts_per_token: How many a token goes to.
        num_groups: 1 where there are no groups.
        groups_per_token: Groups that a token's experts are taken from.
        scale: On all weights.
        is_normalised: Whether a token's weights are divided by their sum.
        is_sigmoid: Whether scores are sigmoids, to which a learned bias is added for the choice and not for the weight
            (V3). If not, they are a softmax (V2).
    """

    num_experts: int
    experts_per_token: int
    num_groups: int
    groups_per_token: int
    scale: float
    is_normalised: bool
    is_sigmoid: bool


@dataclass(frozen=True)
class DeepseekConfig:
    """A config, read and found to be computable.

    Attributes:
        query_latent_dim: Numbers that a query is compressed to (`q_lora_rank`); None where it is not.
        latent_dim: Numbers that keys and values are compressed to (`kv_lora_rank`).
        nope_dim: Numbers in a head's query and key that carry no position.
        rope_dim: Numbers that do.
        value_dim: Numbers in a head's value.
        scale: On every query-key product.
        intermediate_size: Of dense layers.
        num_dense_layers: Layers at the start that have no experts.
        expert_size: Intermediate size of an expert.
        shared_size: Intermediate size of what all tokens go through beside their experts.
        attention_bias: Whether the projections into the latents, and the one back, have biases.
        mlp_bias: Whether those of dense layers and of shared experts have.
        num_extra_layers: Layers after the last that predict further tokens. They are in files, and are left out.
        is_interleaved: Whether the two numbers of a pair that turns are neighbours in the file's projections.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    query_latent_dim: int | None
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    activation: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    intermediate_size: int
    num_dense_layers: int
    expert_size: int
    shared_size: int
    num_extra_layers: int
    is_interleaved: bool
    router: RouterConfig
    rope: RopeSpec

    @property
    def query_dim(self) -> int:
        """Numbers in a head's query, and in its key."""
        return self.nope_dim + self.rope_dim


def read_config(config: Mapping[str, Any]) -> DeepseekConfig:
    """Read a Hugging Face config, defaults as in transformers.

    Raises:
        UnsupportedModelError: The config asks for something that is not computed here.
        CheckpointError: A value is missing or makes no sense.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"The config's model_type is {model_type!r}; this class runs {', '.join(MODEL_TYPES)}."
        )
    refuse_unless_neutral(config, _NEUTRAL_VALUES | _NEUTRAL_VALUES_OF[model_type])
    stated = {key: value for key, value in config.items() if value is not None}
    # The one key whose null has a meaning of its own: queries are not compressed.
    compresses_queries = config.get("q_lora_rank", 0) is not None
    config = _DEFAULTS | _DEFAULTS_OF[model_type] | stated
    num_heads = positive(config, "num_attention_heads")
    num_kv_heads = positive(config, "num_key_value_heads", num_heads)
    if num_kv_heads != num_heads:
        raise UnsupportedModelError(
            f"The config gives {num_heads} query heads and {num_kv_heads} KV heads; with latent attention every query "
            "head has a key and a value of its own."
        )
    nope_dim, rope_dim = positive(config, "qk_nope_head_dim"), positive(config, "qk_rope_head_dim")
    if rope_dim % 2:
        raise CheckpointError(f"The config gives {rope_dim} as qk_rope_head_dim; it has to be even.")
    max_position = positive(config, "max_position_embeddings")
    # Some files repeat it so; transformers makes its rope from it.
    if config.get("head_dim") not in (None, rope_dim):
        raise CheckpointError(
            f"The config gives {shortened(config['head_dim'])} as head_dim and {rope_dim} as qk_rope_head_dim; they "
            "have to be the same, or head_dim left out."
        )
    rope = read_rope(config, head_dim=rope_dim, max_position_embeddings=max_position)
    return DeepseekConfig(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=positive(config, "hidden_size"),
        num_layers=positive(config, "num_hidden_layers"),
        num_heads=num_heads,
        query_latent_dim=positive(config, "q_lora_rank") if compresses_queries else None,
        latent_dim=positive(config, "kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=positive(config, "v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * _stretched_scale(rope) ** 2,
        activation=activation(config, "hidden_act", "silu"),
        rms_norm_eps=not_negative(config, "rms_norm_eps", 1e-6),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        attention_bias=flag(config, "attention_bias"),
        mlp_bias=flag(config, "mlp_bias"),
        intermediate_size=positive(config, "intermediate_size"),
        num_dense_layers=whole(config, "first_k_dense_replace"),
        expert_size=positive(config, "moe_intermediate_size"),
        shared_size=positive(config, "moe_intermediate_size") * positive(config, "n_shared_experts"),
        num_extra_layers=whole(config, "num_nextn_predict_layers"),
        is_interleaved=flag(config, "rope_interleave", default=True),
        router=_router(config),
        rope=rope,
    )


def _stretched_scale(rope: RopeSpec) -> float:
    """Return what queries and keys are multiplied with when positions are stretched, beside the rotations' factor."""
    multiplier = 0.0 if rope.rope_type == "default" else rope.number("mscale_all_dim", 0.0)
    if not multiplier:
        return 1.0
    factor = rope.number("factor")
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _router(config: Mapping[str, Any]) -> RouterConfig:
    num_experts = positive(config, "n_routed_experts")
    experts_per_token = positive(config, "num_experts_per_tok")
    is_sigmoid = config["topk_method"] == "noaux_tc"
    has_groups = config["topk_method"] != "greedy"
    num_groups = positive(config, "n_group") if has_groups else 1
    groups_per_token = positive(config, "topk_group") if has_groups else 1
    # A group is scored by its best expert, or by the sum of its two best.
    fewest_in_group = 2 if is_sigmoid else 1
    if num_experts % num_groups or num_experts // num_groups < fewest_in_group:
        raise CheckpointError(
            f"The config gives {num_experts} experts (n_routed_experts) in {num_groups} groups (n_group); every group "
            f"has to have equally many, {fewest_in_group} at least."
        )
    if groups_per_token > num_groups or experts_per_token > groups_per_token * (num_experts // num_groups):
        raise CheckpointError(
            f"The config sends a token to {experts_per_token} experts (num_experts_per_tok) of {groups_per_token} "
            f"groups (topk_group); there are {num_groups} groups of {num_experts // num_groups} experts."
        )
    return RouterConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        scale=not_negative(config, "routed_scaling_factor", 1.0),
        is_normalised=flag(config, "norm_topk_prob"),
        is_sigmoid=is_sigmoid,
    )
