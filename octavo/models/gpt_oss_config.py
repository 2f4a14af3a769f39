"""What a gpt-oss-style config asks for, and whether it can be computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.config_values import (
    flag,
    not_negative,
    positive,
    quantises_weights,
    refuse_unless_neutral,
    shortened,
)
from octavo.models.rope import RopeSpec, read_rope

MODEL_TYPE = "gpt_oss"

# Keys that change the result for another family, and the values at which they mean nothing. None always does.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "compression_config": (),
    "attention_chunk_size": (0,),
    "attn_logit_softcapping": (0, 0.0),
    "final_logit_softcapping": (0, 0.0),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "add_cross_attention": (False,),
    "mrope_section": (),
    "vision_config": (),
}
# What positions are stretched by where the config has no word on it.
_DEFAULT_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class GptOssConfig:
    """A config, read and found to be computable.

    Attributes:
        intermediate_size: Width of an expert.
        attention_bias: Whether the four projections of attention have biases.
        windows: Keys that a layer's query sees, its own included, None for all; one entry a layer.
        swiglu_alpha: Factor within the sigmoid of an expert's gate.
        swiglu_limit: Bound of an expert's gate, from above, and of what it gates, from both sides.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    windows: tuple[int | None, ...]
    num_experts: int
    num_experts_per_token: int
    swiglu_alpha: float
    swiglu_limit: float
    rope: RopeSpec


def read_config(config: Mapping[str, Any]) -> GptOssConfig:
    """Read a Hugging Face config, defaults as in transformers.

    Raises:
        UnsupportedModelError: The config asks for something that is not computed here.
        CheckpointError: A value is missing or makes no sense.
    """
    model_type = config.get("model_type")
    if model_type != MODEL_TYPE:
        raise UnsupportedModelError(f"The config's model_type is {model_type!r}; this class runs {MODEL_TYPE}.")
    _refuse_quantised(config)
    refuse_unless_neutral(config, _NEUTRAL_VALUES)
    num_query_heads = positive(config, "num_attention_heads")
    num_kv_heads = positive(config, "num_key_value_heads", num_query_heads if "num_key_value_heads" in config else 8)
    head_dim = _head_dim(config, num_query_heads)
    if num_query_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"The config gives {num_query_heads} query heads, {num_kv_heads} KV heads and a head_dim of {head_dim}; "
            "query heads have to be a multiple of KV heads, and head_dim even."
        )
    num_experts = positive(config, "num_local_experts", config.get("num_experts", 128))
    num_experts_per_token = positive(config, "num_experts_per_tok", 4)
    if num_experts_per_token > num_experts:
        raise CheckpointError(
            f"The config sends each token to {num_experts_per_token} experts (num_experts_per_tok) of {num_experts} "
            "(num_local_experts)."
        )
    return GptOssConfig(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=positive(config, "hidden_size"),
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=positive(config, "num_hidden_layers"),
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=not_negative(config, "rms_norm_eps", 1e-5),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        attention_bias=flag(config, "attention_bias", default=True),
        windows=_windows(config, positive(config, "num_hidden_layers")),
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        swiglu_alpha=not_negative(config, "swiglu_alpha", 1.702),
        swiglu_limit=not_negative(config, "swiglu_limit", 7.0),
        rope=_rope(config, head_dim),
    )


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if not quantises_weights(quantization):
        return
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    raise UnsupportedModelError(
        f"The config says that the weights are quantised ({shortened(method)}, in quantization_config), which is not "
        "supported. Use a copy whose experts are bfloat16, such as one that transformers saved after loading the model "
        "with Mxfp4Config(dequantize=True)."
    )


def _head_dim(config: Mapping[str, Any], num_query_heads: int) -> int:
    # A key that is not there means 64, null the usual share of the hidden size.
    if "head_dim" in config:
        return positive(config, "head_dim", positive(config, "hidden_size") // num_query_heads)
    return 64


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    # A key that is not there means 128, null no window.
    stated_window = config.get("sliding_window", 128)
    window = None if stated_window is None else positive(config, "sliding_window", 128)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    known = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise UnsupportedModelError(
            f"The config's layer_types are {shortened(kinds)}; a gpt-oss of {num_layers} layers with the "
            f"sliding_window {window} is run with {' or '.join(map(repr, known))} for each."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    stated = config.get("rope_parameters") or config.get("rope_scaling") or _DEFAULT_ROPE
    return read_rope(
        {**config, "rope_parameters": stated, "rope_theta": config.get("rope_theta") or 150000.0},
        head_dim=head_dim,
        max_position_embeddings=positive(config, "max_position_embeddings", 131072),
    )
