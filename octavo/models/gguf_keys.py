"""What a GGUF file says of its architecture: the metadata under the architecture's name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import CheckpointError, UnsupportedModelError

# Keys under the architecture's name that this reader turns into the config ...
_CONFIG_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_log_multiplier",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
# ... keys that say nothing about the arithmetic ...
_SILENT_KEYS = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "expert_used_count", "pooling_type"})
# ... and keys that may be there with the one value at which they change nothing. Any other key is refused.
_NEUTRAL_VALUES = {
    "attention.causal": True,
    "expert_count": 0,
    "leading_dense_block_count": 0,
    "logit_scale": 1.0,
    "use_parallel_residual": False,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}


class ArchitectureKeys:
    """The metadata under the architecture's name, checked as it is read."""

    def __init__(self, path: Path, architecture: str, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._architecture = architecture
        prefix = f"{architecture}."
        self._values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}

    def refuse_unknown(self, known_besides: Collection[str] = ()) -> None:
        """Raise UnsupportedModelError when there is a key that nothing reads.

        Args:
            known_besides: Keys that are read of this architecture, and not of all.
        """
        for key, value in self._values.items():
            is_number = isinstance(value, (bool, int, float))
            neutral = is_number and key in _NEUTRAL_VALUES and value == _NEUTRAL_VALUES[key]
            if not (neutral or key in _CONFIG_KEYS or key in _SILENT_KEYS or key in known_besides):
                raise UnsupportedModelError(
                    f"{self._path} sets {self._architecture}.{key} to {value!r}, which would change what the model "
                    "computes in a way that is not supported."
                )

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def is_array(self, key: str) -> bool:
        return isinstance(self._values.get(key), np.ndarray)

    def flags(self, key: str, count: int) -> list[bool]:
        """Return an array's values, one a layer."""
        value = self._read(key, None)
        if not isinstance(value, np.ndarray) or value.shape != (count,) or not np.isin(value, (0, 1)).all():
            raise self._wrong(key, value, f"true or false for each of its {count} layers")
        return [bool(item) for item in value.tolist()]

    def integer(self, key: str, *, default: int | None = None) -> int:
        value = self._read(key, default)
        # A file may give a number for each layer; here all layers are alike.
        if isinstance(value, np.ndarray):
            distinct = set(value.tolist())
            if len(distinct) != 1:
                raise UnsupportedModelError(
                    f"{self._path} gives different numbers to its layers as {self._architecture}.{key}; only models "
                    "whose layers are alike can be run."
                )
            value = distinct.pop()
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(key, value, "a whole number")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self._read(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def text(self, key: str, *, default: str | None = None) -> str:
        value = self._read(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def _read(self, key: str, default: Any) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self._path} lacks the metadata {self._architecture}.{key}, which the model needs.")
        return value

    def _wrong(self, key: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self._path} gives {value!r} as {self._architecture}.{key}; it has to be {wanted}.")
