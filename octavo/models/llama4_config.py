"""What a Llama-4-style config asks for, and whether it can be computed."""

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
)
from octavo.models.rope import RopeSpec, read_rope

TEXT_MODEL_TYPE = "llama4_text"
# The same decoder beside an encoder of images. Text runs without that, so its weights are left unread.
MODEL_TYPE_WITH_IMAGES = "llama4"

# Keys that change the result for another family, and the values at which they mean nothing. None always does.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "sliding_window": (),
    "attn_logit_softcapping": (0, 0.0),
    "final_logit_softcapping": (0, 0.0),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "add_cross_attention": (False,),
    "mrope_section": (),
}


@dataclass(frozen=True)
class TemperatureTuning:
    """Sharpens attention far into a text: a query is scaled by 1 + scale * log(1 + floor((position + 1) / floor)).

    Attributes:
        floor: Positions at which the factor stays the same (`floor_scale`).
        scale: How much it grows (`attn_scale`).
    """

    floor: float
    scale: float


@dataclass(frozen=True)
class Llama4Config:
    """A config, read and found to be computable.

    Attributes:
        tensor_prefix: What the names of all tensors of the decoder begin with.
        intermediate_size: Width of an expert, and of the expert that every token visits.
        dense_intermediate_size: Width of the MLP in a layer without experts.
        attention_bias: Whether the four projections of attention have biases.
        qk_norm: Whether queries and keys are normalised after rope, in layers that have rope.
        chunks: Size of the chunks that a layer's attention stays within, None for all keys; one entry a layer.
        has_rope: Whether a layer's queries and keys turn with their position; one entry a layer.
        has_experts: Whether a layer's MLP is a mixture of experts; one entry a layer.
        temperature_tuning: Of the layers without rope; None for none.
    """

    tensor_prefix: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    dense_intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    chunks: tuple[int | None, ...]
    has_rope: tuple[bool, ...]
    has_experts: tuple[bool, ...]
    num_experts: int
    num_experts_per_token: int
    temperature_tuning: TemperatureTuning | None
    rope: RopeSpec


def read_config(config: Mapping[str, Any]) -> Llama4Config:
    """Read a Hugging Face config, defaults as in transformers.

    Raises:
        UnsupportedModelError: The config asks for something that is not computed here.
        CheckpointError: A value is missing or makes no sense.
    """
    model_type = config.get("model_type")
    if model_type == TEXT_MODEL_TYPE:
        return _read_text_config(config, tensor_prefix="")
    if model_type != MODEL_TYPE_WITH_IMAGES:
        raise UnsupportedModelError(
            f"The config's model_type is {model_type!r}; this class runs {TEXT_MODEL_TYPE}, {MODEL_TYPE_WITH_IMAGES}."
        )
    text_config = config.get("text_config")
    if not isinstance(text_config, Mapping):
        raise CheckpointError(
            f"The config gives {shortened(text_config)} as text_config; a model of the model_type "
            f"{MODEL_TYPE_WITH_IMAGES!r} describes its decoder there, as an object."
        )
    # A quantised model says so for all of its parts.
    refuse_unless_neutral(config, _NEUTRAL_VALUES)
    return _read_text_config(text_config, tensor_prefix="language_model.")


def _read_text_config(config: Mapping[str, Any], *, tensor_prefix: str) -> Llama4Config:
    refuse_unless_neutral(config, _NEUTRAL_VALUES)
    num_query_heads = positive(config, "num_attention_heads")
    num_kv_heads = positive(config, "num_key_value_heads", num_query_heads if "num_key_value_heads" in config else 8)
    head_dim = _head_dim(config, num_query_heads)
    if num_query_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"The config gives {num_query_heads} query heads, {num_kv_heads} KV heads and a head_dim of {head_dim}; "
            "query heads have to be a multiple of KV heads, and head_dim even."
        )
    num_layers = positive(config, "num_hidden_layers")
    has_rope = _layers_with_rope(config, num_layers)
    num_experts = positive(config, "num_local_experts", 16)
    num_experts_per_token = positive(config, "num_experts_per_tok", 1)
    if num_experts_per_token > num_experts:
        raise CheckpointError(
            f"The config sends each token to {num_experts_per_token} experts (num_experts_per_tok) of {num_experts} "
            "(num_local_experts)."
        )
    return Llama4Config(
        tensor_prefix=tensor_prefix,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=positive(config, "hidden_size"),
        intermediate_size=positive(config, "intermediate_size"),
        dense_intermediate_size=positive(config, "intermediate_size_mlp", 16384),
        num_layers=num_layers,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=activation(config, "hidden_act", "silu"),
        rms_norm_eps=not_negative(config, "rms_norm_eps", 1e-5),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        attention_bias=flag(config, "attention_bias"),
        qk_norm=flag(config, "use_qk_norm", default=True),
        chunks=_chunks(config, has_rope),
        has_rope=has_rope,
        has_experts=_layers_with_experts(config, num_layers),
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        temperature_tuning=_temperature_tuning(config),
        rope=read_rope(
            {**config, "rope_theta": config.get("rope_theta") or 500000.0},
            head_dim=head_dim,
            max_position_embeddings=positive(config, "max_position_embeddings", 131072),
        ),
    )


def _head_dim(config: Mapping[str, Any], num_query_heads: int) -> int:
    # A key that is not there means 128, null the usual share of the hidden size.
    if "head_dim" in config:
        return positive(config, "head_dim", positive(config, "hidden_size") // num_query_heads)
    return 128


def _layers_with_rope(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    stated = config.get("no_rope_layers")
    # Whatever its name says: 1 stands for a layer with rope, 0 for one without.
    if not stated:
        interval = positive(config, "no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(stated, list) or len(stated) < num_layers or any(entry not in (0, 1) for entry in stated):
        raise CheckpointError(
            f"The config gives {shortened(stated)} as no_rope_layers; it has to be a list with 1 (rope) or 0 (none) "
            f"for each of the {num_layers} layers."
        )
    return tuple(bool(entry) for entry in stated[:num_layers])


def _chunks(config: Mapping[str, Any], has_rope: tuple[bool, ...]) -> tuple[int | None, ...]:
    # A key that is not there means 8192, null no chunks.
    size = config.get("attention_chunk_size", 8192)
    chunk = None if size is None else positive(config, "attention_chunk_size", 8192)
    stated = config.get("layer_types")
    if stated is None:
        return tuple(chunk if rope else None for rope in has_rope)
    kinds = ("full_attention",) if chunk is None else ("full_attention", "chunked_attention")
    if not isinstance(stated, list) or len(stated) != len(has_rope) or any(kind not in kinds for kind in stated):
        raise UnsupportedModelError(
            f"The config's layer_types are {shortened(stated)}; a Llama 4 of {len(has_rope)} layers with the "
            f"attention_chunk_size {chunk} is run with {' or '.join(map(repr, kinds))} for each."
        )
    return tuple(chunk if kind == "chunked_attention" else None for kind in stated)


def _layers_with_experts(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    stated = config.get("moe_layers")
    if stated is None:
        step = positive(config, "interleave_moe_layer_step", 1)
        return tuple((layer + 1) % step == 0 for layer in range(num_layers))
    if not isinstance(stated, list) or any(type(layer) is not int for layer in stated):
        raise CheckpointError(
            f"The config gives {shortened(stated)} as moe_layers; it has to be a list of the numbers of layers."
        )
    return tuple(layer in stated for layer in range(num_layers))


def _temperature_tuning(config: Mapping[str, Any]) -> TemperatureTuning | None:
    wanted = config.get("attn_temperature_tuning", True)
    # Published configs say 4 where they mean true.
    if not isinstance(wanted, (bool, int)):
        raise CheckpointError(
            f"The config gives {shortened(wanted)} as attn_temperature_tuning; it has to be true or false."
        )
    if not wanted:
        return None
    scale = config.get("attn_scale", 0.1)
    if type(scale) not in (int, float) or not math.isfinite(scale):
        raise CheckpointError(f"The config gives {shortened(scale)} as attn_scale; it has to be a number.")
    return TemperatureTuning(positive(config, "floor_scale", 8192), float(scale))
