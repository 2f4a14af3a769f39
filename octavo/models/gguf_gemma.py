"""What is particular to Gemma 2 and Gemma 3 in GGUF files.

Much of it is not in the file: llama.cpp has it in its code, by architecture and size, and so it is here. The source is
llama.cpp's llama-model.cpp, where it loads the hyperparameters of LLM_ARCH_GEMMA2 and LLM_ARCH_GEMMA3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.models.gguf_keys import ArchitectureKeys

if TYPE_CHECKING:
    from torch import Tensor

# GGUF architecture -> Hugging Face model_type.
ARCHITECTURES = {"gemma2": "gemma2", "gemma3": "gemma3_text"}

# Four norms a layer: "ffn_norm" is before the MLP, in Hugging Face's names not the one after attention.
LAYER_MODULES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_PATTERN = "attention.sliding_window_pattern"
_LOCAL_BASE = "rope.freq_base_swa"
# Keys under the architecture's name that only Gemma's reader knows.
KEYS = frozenset({*_CAPS, _PATTERN, _LOCAL_BASE})

# The number of layers by which llama.cpp knows the 27B models, whose scores are scaled by another number than head_dim.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def config_of_family(architecture: str, keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the Hugging Face config that other families do not have, or have otherwise.

    Args:
        config: What holds for all families.
    """
    head_dim, num_layers = config["head_dim"], config["num_hidden_layers"]
    is_27b = num_layers == _LAYERS_OF_27B[architecture]
    family: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else head_dim,
        **_windows(architecture, keys, num_layers),
        **{key: keys.number(key) for key in _CAPS if key in keys},
    }
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": keys.number(_LOCAL_BASE, default=10000.0)}
        family["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return family


def undo_norm_shift(tensor: Tensor) -> Tensor:
    """Return a norm's weight as Hugging Face has it: llama.cpp's converter adds 1, which the model adds itself."""
    return tensor.float() - 1.0


def _windows(architecture: str, keys: ArchitectureKeys, num_layers: int) -> dict[str, Any]:
    if architecture == "gemma3" and not keys.integer("attention.sliding_window", default=0):
        return {"layer_types": ["full_attention"] * num_layers}
    window = {"sliding_window": keys.integer("attention.sliding_window")}
    if _PATTERN not in keys:
        return window  # the family's: every second or every sixth layer sees everything
    if not keys.is_array(_PATTERN):
        return window | {"sliding_window_pattern": keys.integer(_PATTERN)}
    has_window = keys.flags(_PATTERN, num_layers)
    return window | {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in has_window]}
