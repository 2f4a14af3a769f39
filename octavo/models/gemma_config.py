"""What a Gemma 2 or Gemma 3 config asks for, and whether it can be computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.config_values import activation, flag, not_negative, positive, refuse_unless_neutral, shortened
from octavo.models.rope import RopeSpec, read_rope

MODEL_TYPES = ("gemma2", "gemma3_text", "gemma3")

_FULL, _SLIDING = "full_attention", "sliding_attention"

# The families' own sizes, from transformers' configuration_gemma2 and configuration_gemma3: configs on the hub leave
# out what agrees with them.
_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
_FAMILY_SIZES = {
    "gemma2": _SIZES | {"vocab_size": 256_000, "max_position_embeddings": 8192},
    "gemma3_text": _SIZES | {"vocab_size": 262_208, "max_position_embeddings": 131_072},
}
# Every so manieth layer sees everything, those between see a window.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}
_ROPE_THETAS = {_FULL: 1_000_000.0, _SLIDING: 10_000.0}
_CAPS: dict[str, dict[str, float | None]] = {
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {"final_logit_softcapping": None},
}

# Keys that would change the result, and the values at which they mean nothing. None always does.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "attention_bias": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "is_decoder": (True, False),
    "add_cross_attention": (False,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
}
_FAMILY_NEUTRAL_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "gemma2": _NEUTRAL_VALUES | {"sliding_window_pattern": (2,)},
    # Gemma 3 has queries and keys of bounded length instead. transformers takes the key and does nothing with it.
    "gemma3_text": _NEUTRAL_VALUES | {"attn_logit_softcapping": ()},
}


@dataclass(frozen=True)
class GemmaConfig:
    """A config, read and found to be computable.

    Attributes:
        qk_norm: Whether each head's queries and keys are normalised before rope.
        scale: Factor on every query-key product.
        attention_soft_cap: Bound on the scores, None for none.
        final_soft_cap: Bound on the logits, None for none.
        windows: Keys that a layer's query sees, its own included, None for all; one entry a layer.
        ropes: The different ways in which positions turn queries and keys.
        rope_of_layer: Which of `ropes` a layer has; one entry a layer.
        is_part: Whether the checkpoint holds more than this language model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    qk_norm: bool
    scale: float
    attention_soft_cap: float | None
    final_soft_cap: float | None
    windows: tuple[int | None, ...]
    ropes: tuple[RopeSpec, ...]
    rope_of_layer: tuple[int, ...]
    is_part: bool

    @property
    def max_position(self) -> int:
        """Positions for which all layers' ropes are made."""
        return min(rope.max_position for rope in self.ropes)


def read_config(config: Mapping[str, Any]) -> GemmaConfig:
    """Read a Hugging Face config, defaults as in transformers.

    Args:
        config: Of the model_type "gemma3", which also sees pictures, the language model is read.

    Raises:
        UnsupportedModelError: The config asks for something that is not computed here.
        CheckpointError: A value is missing or makes no sense.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"The config's model_type is {model_type!r}; this class runs {', '.join(MODEL_TYPES)}."
        )
    is_part = model_type == "gemma3"
    if is_part:
        config, model_type = _text_config(config), "gemma3_text"
    refuse_unless_neutral(config, _FAMILY_NEUTRAL_VALUES[model_type])
    sizes = {key: positive(config, key, default) for key, default in _FAMILY_SIZES[model_type].items()}
    num_query_heads, num_kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    head_dim, num_layers = sizes["head_dim"], sizes["num_hidden_layers"]
    if num_query_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"The config gives {num_query_heads} query heads, {num_kv_heads} KV heads and a head_dim of {head_dim}; "
            "query heads have to be a multiple of KV heads, and head_dim even."
        )
    kinds = _layer_kinds(config, model_type, num_layers)
    if _SLIDING in kinds and "sliding_window" in config and config["sliding_window"] is None:
        raise CheckpointError(
            f"The config gives no sliding_window, and {kinds.count(_SLIDING)} of its {num_layers} layers see one. Give "
            "their number of keys, or make all layer_types 'full_attention'."
        )
    ropes = _ropes(config, model_type, kinds, head_dim, sizes["max_position_embeddings"])
    caps = {key: _cap(config, key, default) for key, default in _CAPS[model_type].items()}
    return GemmaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=num_layers,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        rms_norm_eps=not_negative(config, "rms_norm_eps", 1e-6),
        tie_word_embeddings=flag(config, "tie_word_embeddings", default=True),
        qk_norm=model_type == "gemma3_text",
        scale=_above_zero(config, "query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256)) ** -0.5,
        attention_soft_cap=caps.get("attn_logit_softcapping"),
        final_soft_cap=caps["final_logit_softcapping"],
        windows=tuple(sizes["sliding_window"] if kind == _SLIDING else None for kind in kinds),
        ropes=tuple(ropes.values()),
        rope_of_layer=tuple(list(ropes).index(kind if kind in ropes else _FULL) for kind in kinds),
        is_part=is_part,
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's config from that of a model which also sees pictures."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", "gemma3_text") != "gemma3_text":
        raise UnsupportedModelError(
            f"The config's model_type is 'gemma3' and its text_config {shortened(text)}; the language model of a "
            "Gemma 3 is run, whose text_config has the model_type 'gemma3_text'."
        )
    # Weights are quantised and tied, or not, for the whole.
    whole = {key: config[key] for key in ("quantization_config", "compression_config") if key in config}
    return {**text, **whole, "tie_word_embeddings": config.get("tie_word_embeddings")}


def _layer_kinds(config: Mapping[str, Any], model_type: str, num_layers: int) -> list[str]:
    stated = config.get("layer_types")
    if stated is None:
        # Of Gemma 2 any other number has been refused.
        full_every = positive(config, "sliding_window_pattern", _FULL_EVERY[model_type])
        return [_SLIDING if (layer + 1) % full_every else _FULL for layer in range(num_layers)]
    known = isinstance(stated, list) and all(kind in (_FULL, _SLIDING) for kind in stated)
    if not known or len(stated) != num_layers:
        raise UnsupportedModelError(
            f"The config's layer_types are {shortened(stated)}; a {model_type} of {num_layers} layers is run with one "
            "of 'full_attention' and 'sliding_attention' a layer."
        )
    return list(stated)


def _ropes(
    config: Mapping[str, Any], model_type: str, kinds: list[str], head_dim: int, max_position_embeddings: int
) -> dict[str, RopeSpec]:
    """Return the rope of each kind of layer that occurs; all layers of a Gemma 2 have that of the full ones."""
    if model_type == "gemma2":
        return {_FULL: read_rope(config, head_dim=head_dim, max_position_embeddings=max_position_embeddings)}
    return {
        kind: read_rope(
            {**config, "rope_scaling": None, "rope_theta": None, "rope_parameters": parameters},
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
        )
        for kind, parameters in _rope_parameters(config).items()
        if kind in kinds
    }


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a Gemma 3's rope parameters by kind of layer.

    Configs from transformers 5 give them so. Older ones have `rope_theta` and `rope_scaling` for the full layers, and
    `rope_local_base_freq` for those with a window, which are never scaled.
    """
    stated = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    by_kind = isinstance(stated, Mapping) and all(
        kind in (_FULL, _SLIDING) and isinstance(parameters, Mapping | None) for kind, parameters in stated.items()
    )
    if not by_kind or not isinstance(scaling, Mapping):
        raise CheckpointError(
            f"The config gives {shortened(scaling if by_kind else stated)} as its rope parameters; a Gemma 3 has an "
            "object 'full_attention' and one 'sliding_attention' in rope_parameters, or a flat rope_scaling for the "
            "layers with full attention."
        )
    older = {_FULL: config.get("rope_theta"), _SLIDING: config.get("rope_local_base_freq")}
    parameters = {kind: {"rope_theta": older[kind] or _ROPE_THETAS[kind]} | (stated.get(kind) or {}) for kind in older}
    parameters[_FULL] |= scaling
    return parameters


def _cap(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    value = config.get(key, default)
    return None if value is None else _above_zero(config, key, value)


def _above_zero(config: Mapping[str, Any], key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise CheckpointError(f"The config gives {shortened(value)} as {key}; it has to be a number above 0.")
    return float(value)
