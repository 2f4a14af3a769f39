"""Reads single values of a Hugging Face config, checked, for the classes that each know one family's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError

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

# Where configs say how a model is quantised.
QUANTISATION_KEYS = ("quantization_config", "compression_config")
# What says there that the KV cache is meant to be quantised, as compressed-tensors and as ModelOpt write it.
_KV_CACHE_KEYS = frozenset({"kv_cache_scheme", "kv_cache_quant_algo"})
# What may stand beside it of a model whose weights are left as they are: anything, or one of these values.
_SAYS_NOTHING_OF_WEIGHTS = frozenset(
    {"exclude_modules", "global_compression_ratio", "ignore", "producer", "quantization_status", "version"}
)
_LEAVES_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "config_groups": (None, {}),
    "format": (None, "dense"),
    "quant_algo": (None, "NO_QUANT"),
    "quant_method": ("compressed-tensors", "modelopt"),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}

# Far above what any model has. A file with a larger number is broken, and acting on it would take memory for nothing.
_LARGEST = {
    "num_hidden_layers": 4096,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "head_dim": 1 << 16,
}
_LARGEST_ELSEWHERE = 2**31 - 1


def whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a number that may be 0. CheckpointError when it is none, or missing without a default."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"The config lacks {key!r}, which every model of its kind needs.")
    if type(value) is not int or value < 0:
        raise CheckpointError(f"The config gives {shortened(value)} as {key}; it has to be a whole number.")
    largest = _LARGEST.get(key, _LARGEST_ELSEWHERE)
    if value > largest:
        raise CheckpointError(f"The config gives {shortened(value)} as {key}; no model has more than {largest}.")
    return value


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number of at least 1, as `whole` does."""
    value = whole(config, key, default)
    if value == 0:
        raise CheckpointError(f"The config gives 0 as {key}; it has to be positive.")
    return value


def flag(config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """Return whether a key is true; null, and a key that is not there, mean the default."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"The config gives {shortened(value)} as {key}; it has to be true or false.")
    return default if value is None else value


def activation(config: Mapping[str, Any], key: str, default: str) -> str:
    """Return a name from `ACTIVATIONS`. UnsupportedModelError when the config gives another one."""
    name = config.get(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"The config asks for the activation {name!r} ({key}). Known: {', '.join(ACTIVATIONS)}."
        )
    return name


def not_negative(config: Mapping[str, Any], key: str, default: float) -> float:
    """Return a number of at least 0."""
    value = config.get(key, default)
    if type(value) not in (int, float) or not 0 <= value < 1e30:
        raise CheckpointError(f"The config gives {value!r} as {key}; it has to be a number that is not negative.")
    return float(value)


def refuse_unless_neutral(config: Mapping[str, Any], neutral_values: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedModelError when a key has a value at which it changes the result.

    Args:
        neutral_values: Keys that change the result, and the values at which they do not. None never does.
    """
    for key, values in neutral_values.items():
        value = config.get(key)
        if key in QUANTISATION_KEYS and not quantises_weights(value):
            continue
        if value is not None and value not in values:
            way_out = (
                "Use a copy of the model that is not quantised, or a GGUF file"
                if key in QUANTISATION_KEYS
                else "A model class that computes it can be added as a plugin"
            )
            raise UnsupportedModelError(
                f"The config sets {key} to {shortened(value)}, which changes what the model computes and is not "
                f"supported. {way_out}."
            )


def quantises_weights(quantisation: Any) -> bool:
    """Whether what a config says under one of QUANTISATION_KEYS is about more than the KV cache, which any model may
    keep as it likes.
    """
    if quantisation is None:
        return False
    if not isinstance(quantisation, Mapping):
        return True
    if all(quantisation.get(key) is None for key in _KV_CACHE_KEYS):
        return True
    return any(
        value not in _LEAVES_WEIGHTS.get(key, ())
        for key, value in quantisation.items()
        if key not in _KV_CACHE_KEYS | _SAYS_NOTHING_OF_WEIGHTS
    )


def shortened(value: Any) -> str:
    """Return what a message shows of a value, 120 characters at most."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
