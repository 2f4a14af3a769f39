"""What a Llama-, Mistral-, Qwen2- or Qwen3-style config asks for, and whether it can be computed."""

from __future__ import annotations

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

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
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
    refuse_unless_neutral(config, _NEUTRAL_VALUES)
    hidden_size = positive(config, "hidden_size")
    num_query_heads = positive(config, "num_attention_heads")
    num_kv_heads = positive(config, "num_key_value_heads", num_query_heads)
    default_head_dim = 128 if model_type == "qwen3" else hidden_size // num_query_heads
    head_dim = positive(config, "head_dim", default_head_dim)
    if num_query_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"The config gives {num_query_heads} query heads, {num_kv_heads} KV heads and a head_dim of {head_dim}; "
            "query heads have to be a multiple of KV heads, and head_dim even."
        )
    num_layers = positive(config, "num_hidden_layers")
    attention_bias = flag(config, "attention_bias")
    return LlamaConfig(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=activation(config, "hidden_act", "silu"),
        rms_norm_eps=not_negative(config, "rms_norm_eps", 1e-6),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        # Qwen2 has these biases by its architecture and no others; Mistral has none.
        qkv_bias=model_type == "qwen2" or (model_type in ("llama", "qwen3") and attention_bias),
        output_bias=model_type in ("llama", "qwen3") and attention_bias,
        mlp_bias=model_type == "llama" and flag(config, "mlp_bias"),
        qk_norm=model_type == "qwen3",
        windows=_windows(config, model_type, num_layers),
        rope=read_rope(config, head_dim=head_dim, max_position_embeddings=positive(config, "max_position_embeddings")),
    )


def _windows(config: Mapping[str, Any], model_type: str, num_layers: int) -> tuple[int | None, ...]:
    window = _window(config, model_type)
    if model_type == "mistral":
        kinds = ["full_attention" if window is None else "sliding_attention"] * num_layers
    elif window is None:
        kinds = ["full_attention"] * num_layers
    else:
        first = whole(config, "max_window_layers", 28)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]

    stated = config.get("layer_types")
    if stated is not None:
        # Only Qwen lets a config choose layer by layer; elsewhere the list may only repeat what holds anyway.
        free_to_choose = window is not None and model_type in ("qwen2", "qwen3")
        known = isinstance(stated, list) and all(kind in ("full_attention", "sliding_attention") for kind in stated)
        if not known or len(stated) != num_layers or (stated != kinds and not free_to_choose):
            raise UnsupportedModelError(
                f"The config's layer_types are {shortened(stated)}; a {model_type} of {num_layers} layers with "
                f"the sliding window {window} is run with one of 'full_attention' and 'sliding_attention' a layer, "
                "the latter only where there is a window."
            )
        kinds = stated
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(config: Mapping[str, Any], model_type: str) -> int | None:
    if model_type in ("qwen2", "qwen3"):
        if not flag(config, "use_sliding_window"):
            return None
        return positive(config, "sliding_window", 4096)
    # A key that is not there means Mistral's default, null means no window.
    window = config.get("sliding_window", 4096 if model_type == "mistral" else None)
    if window is None:
        return None
    if model_type == "llama":
        raise UnsupportedModelError(
            f"The config sets sliding_window to {window!r}, which the model_type 'llama' has no meaning for. If the "
            "model was trained with a window its model_type is 'mistral'; if not, set the key to null."
        )
    return positive(config, "sliding_window", 4096)
