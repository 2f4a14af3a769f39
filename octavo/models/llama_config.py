"""What a Llama-, Mistral-, Qwen2- or Qwen3-style config asks for, and whether it can be computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.rope import RopeSpec, read_rope

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Hugging Face's names -> functions of torch.nn.functional and their keyword arguments.
ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("silu", {}),
    "swish": ("silu", {}),
    "gelu": ("gelu", {}),
    "gelu_new": ("gelu", {"approximate": "tanh"}),
    "gelu_pytorch_tanh": ("gelu", {"approximate": "tanh"}),
    "relu": ("relu", {}),
    "relu6": ("relu6", {}),
    "mish": ("mish", {}),
    "tanh": ("tanh", {}),
    "sigmoid": ("sigmoid", {}),
}

# Keys that some model or fork gives a meaning which changes the result, and the values at which they mean nothing.
# None always does.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "attn_logit_softcapping": (0, 0.0),
    "final_logit_softcapping": (0, 0.0),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "scale_emb": (1, 1.0),
    "scale_depth": (),
    "clip_qkv": (0, 0.0),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "attention_chunk_size": (0,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "alibi": (False,),
    "position_embedding_type": ("rope", "rotary", "absolute"),
    "is_decoder": (True, False),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "mrope_section": (),
    "dual_chunk_attention_config": (),
    "cross_attention_layers": ([],),
    "vision_config": (),
    "block_configs": (),
}


@dataclass(frozen=True)
class LlamaConfig:
    """A config, read and found to be computable.

    Attributes:
        qkv_bias: Whether queries, keys and values have biases.
        output_bias: Whether attention's output projection has one.
        mlp_bias: Whether the three projections of the MLP have one.
        qk_norm: Whether each head's queries and keys are normalised before rope.
        windows: Keys that a layer's query sees, its own included, None for all; one entry a layer.
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
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope: RopeSpec


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
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
    _refuse_what_is_not_computed(config)
    hidden_size = _positive(config, "hidden_size")
    num_query_heads = _positive(config, "num_attention_heads")
    num_kv_heads = _positive(config, "num_key_value_heads", num_query_heads)
    default_head_dim = 128 if model_type == "qwen3" else hidden_size // num_query_heads
    head_dim = _positive(config, "head_dim", default_head_dim)
    if num_query_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"The config gives {num_query_heads} query heads, {num_kv_heads} KV heads and a head_dim of {head_dim}; "
            "query heads have to be a multiple of KV heads, and head_dim even."
        )
    num_layers = _positive(config, "num_hidden_layers")
    attention_bias = _flag(config, "attention_bias")
    return LlamaConfig(
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=_activation(config),
        rms_norm_eps=_epsilon(config),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        # Qwen2 has these biases by its architecture and no others; Mistral has none.
        qkv_bias=model_type == "qwen2" or (model_type in ("llama", "qwen3") and attention_bias),
        output_bias=model_type in ("llama", "qwen3") and attention_bias,
        mlp_bias=model_type == "llama" and _flag(config, "mlp_bias"),
        qk_norm=model_type == "qwen3",
        windows=_windows(config, model_type, num_layers),
        rope=read_rope(config, head_dim=head_dim, max_position_embeddings=_positive(config, "max_position_embeddings")),
    )


def _refuse_what_is_not_computed(config: Mapping[str, Any]) -> None:
    for key, neutral_values in _NEUTRAL_VALUES.items():
        value = config.get(key)
        if value is not None and value not in neutral_values:
            way_out = (
                "Use a copy of the model that is not quantised, or a GGUF file"
                if key in ("quantization_config", "compression_config")
                else "A model class that computes it can be added as a plugin"
            )
            raise UnsupportedModelError(
                f"The config sets {key} to {_shortened(value)}, which changes what the model computes and is not "
                f"supported. {way_out}."
            )


def _windows(config: Mapping[str, Any], model_type: str, num_layers: int) -> tuple[int | None, ...]:
    window = _window(config, model_type)
    if model_type == "mistral":
        kinds = ["full_attention" if window is None else "sliding_attention"] * num_layers
    elif window is None:
        kinds = ["full_attention"] * num_layers
    else:
        first = _whole(config, "max_window_layers", 28)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]

    stated = config.get("layer_types")
    if stated is not None:
        # Only Qwen lets a config choose layer by layer; elsewhere the list may only repeat what holds anyway.
        free_to_choose = window is not None and model_type in ("qwen2", "qwen3")
        known = isinstance(stated, list) and all(kind in ("full_attention", "sliding_attention") for kind in stated)
        if not known or len(stated) != num_layers or (stated != kinds and not free_to_choose):
            raise UnsupportedModelError(
                f"The config's layer_types are {_shortened(stated)}; a {model_type} of {num_layers} layers with "
                f"the sliding window {window} is run with one of 'full_attention' and 'sliding_attention' a layer, "
                "the latter only where there is a window."
            )
        kinds = stated
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(config: Mapping[str, Any], model_type: str) -> int | None:
    if model_type in ("qwen2", "qwen3"):
        if not _flag(config, "use_sliding_window"):
            return None
        return _positive(config, "sliding_window", 4096)
    # A key that is not there means Mistral's default, null means no window.
    window = config.get("sliding_window", 4096 if model_type == "mistral" else None)
    if window is None:
        return None
    if model_type == "llama":
        raise UnsupportedModelError(
            f"The config sets sliding_window to {window!r}, which the model_type 'llama' has no meaning for. If the "
            "model was trained with a window its model_type is 'mistral'; if not, set the key to null."
        )
    return _positive(config, "sliding_window", 4096)


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"The config asks for the activation {name!r} (hidden_act). Known: {', '.join(ACTIVATIONS)}."
        )
    return name


def _epsilon(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if type(value) not in (int, float) or not 0 <= value < 1e30:
        raise CheckpointError(
            f"The config gives {value!r} as rms_norm_eps; it has to be a number that is not negative."
        )
    return float(value)


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _whole(config, key, default)
    if value == 0:
        raise CheckpointError(f"The config gives 0 as {key}; it has to be positive.")
    return value


# Far above what any model has. A file with a larger number is broken, and acting on it would take memory for nothing.
_LARGEST = {
    "num_hidden_layers": 4096,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "head_dim": 1 << 16,
}
_LARGEST_ELSEWHERE = 2**31 - 1


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"The config lacks {key!r}, which every model of its kind needs.")
    if type(value) is not int or value < 0:
        raise CheckpointError(f"The config gives {_shortened(value)} as {key}; it has to be a whole number.")
    largest = _LARGEST.get(key, _LARGEST_ELSEWHERE)
    if value > largest:
        raise CheckpointError(f"The config gives {_shortened(value)} as {key}; no model has more than {largest}.")
    return value


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"The config gives {_shortened(value)} as {key}; it has to be true or false.")
    return bool(value)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
