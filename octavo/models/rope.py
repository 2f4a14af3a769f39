"""Rotary position embeddings, with the ways of stretching them that Hugging Face configs name.

A head's numbers i and i + head_dim / 2 form a pair, which turns by position * frequency[i].
Each `_..._frequencies` follows the function of the same scheme in transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError, UnsupportedModelError

# Tables that old checkpoints carry along; `Rope` computes what they hold.
_TABLES = re.compile(r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
# Above any number of a rope: bases go up to some 1e8, and factors are far below.
_LARGEST = 1e12


@dataclass(frozen=True)
class RopeSpec:
    """What the config says about positions.

    Attributes:
        parameters: The config's `rope_parameters` or `rope_scaling`, with `rope_type` and `rope_theta` filled in.
        head_dim: Numbers in a head; all of them take part.
        max_position_embeddings: As the config gives it.
    """

    parameters: Mapping[str, Any]
    head_dim: int
    max_position_embeddings: int

    @property
    def rope_type(self) -> str:
        return str(self.parameters["rope_type"])

    @property
    def max_position(self) -> int:
        """Positions at which every token's rotation depends on nothing but its position.

        "longrope" turns all tokens differently once the sequence is longer than the original length, those included
        whose keys are cached already; so it is served up to that length. "dynamic" does so past
        `max_position_embeddings`.
        """
        if self.rope_type == "longrope":
            return min(self.max_position_embeddings, self.integer("original_max_position_embeddings"))
        return self.max_position_embeddings

    def number(self, key: str, default: float | None = None) -> float:
        value = self.parameters.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST:
            raise CheckpointError(
                f"The config gives {value!r} as {key} of the rope type {self.rope_type!r}; it has to be a number."
            )
        return value

    def number_above(self, bound: float, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if not value > bound:
            raise CheckpointError(
                f"The config gives {value!r} as {key} of the rope type {self.rope_type!r}; it has to be above "
                f"{bound:g}."
            )
        return value

    def integer(self, key: str) -> int:
        value = self.number(key, self.max_position_embeddings if key == "original_max_position_embeddings" else None)
        if value != int(value) or not 1 < value < 2**31:
            raise CheckpointError(f"The config gives {value!r} as rope's {key}; it has to be a whole number above 1.")
        return int(value)

    def numbers(self, key: str) -> Tensor:
        """Return a list with one number above 0 a frequency, float32. [head_dim / 2]"""
        values = self.parameters.get(key)
        count = self.head_dim // 2
        is_long_enough = isinstance(values, list) and len(values) == count
        if not is_long_enough or not all(type(v) in (int, float) and 0 < v < _LARGEST for v in values or ()):
            raise CheckpointError(
                f"The config has to give {count} numbers above 0 as {key} of the rope type {self.rope_type!r}, one for "
                f"each pair of a head of {self.head_dim}."
            )
        return torch.tensor(values, dtype=torch.float32)


def is_rope_table(tensor_name: str) -> bool:
    """Say whether a checkpoint's tensor holds what is computed here anyway."""
    return bool(_TABLES.fullmatch(tensor_name))


def read_rope(config: Mapping[str, Any], *, head_dim: int, max_position_embeddings: int) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Raises:
        UnsupportedModelError: The rope type is unknown, or differs between layers.
        CheckpointError: A number that the type needs is missing or is no number.
    """
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("rope_parameters") and config.get("rope_scaling") not in (None, {}, stated):
        raise UnsupportedModelError(
            "The config has both rope_parameters and rope_scaling, and they differ; leave out the one that is not "
            "meant."
        )
    if not isinstance(stated, Mapping):
        raise CheckpointError(f"The config gives {stated!r} as its rope parameters; they have to be an object.")
    rope_type = stated.get("rope_type", stated.get("type")) or "default"
    if any(isinstance(value, Mapping) for value in stated.values()):
        raise UnsupportedModelError(
            f"The config gives rope parameters to each kind of layer ({', '.join(map(str, stated))}); only models with "
            "one set for all layers can be run."
        )
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"The config asks for the rope type {rope_type!r}. Known types: {', '.join(ROPE_TYPES)}."
        )
    for partial in (stated.get("partial_rotary_factor"), config.get("partial_rotary_factor")):
        if partial not in (None, 1.0):
            raise UnsupportedModelError(
                f"The config asks for rope on {partial} of each head (partial_rotary_factor); only 1.0 can be run."
            )
    parameters = {"rope_theta": config.get("rope_theta") or 10000.0, **stated, "rope_type": rope_type}
    # Some configs keep it outside; there it has precedence, as in transformers.
    if config.get("original_max_position_embeddings") is not None:
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    spec = RopeSpec(parameters, head_dim, max_position_embeddings)
    ROPE_TYPES[rope_type](spec)
    return spec


@dataclass(frozen=True)
class Rope:
    """Turns positions into rotations.

    Attributes:
        frequencies: Radians a position, float32. [head_dim / 2]
        factor: On all cosines and sines.
    """

    frequencies: Tensor
    factor: float

    @classmethod
    def from_spec(cls, spec: RopeSpec, *, device: str) -> Rope:
        frequencies, factor = ROPE_TYPES[spec.rope_type](spec)
        return cls(frequencies.to(device), factor)

    def rotations(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what `apply_rope` multiplies with, computed in float32. Two of [num_tokens, 1, head_dim]

        Computed once a step for all layers, which costs some microseconds; a table of all positions would cost memory
        for the longest context that a config names, up to gigabytes, and be no faster.
        """
        angles = positions[:, None, None].float() * self.frequencies
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def apply_rope(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate queries and keys.

    Args:
        heads: [num_tokens, num_heads, head_dim]
        cos: And `signed_sin`: from `Rope.rotations`. [num_tokens, 1, head_dim]

    Returns:
        A new tensor. [num_tokens, num_heads, head_dim]
    """
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return torch.addcmul(heads * cos, swapped, signed_sin)


def _default_frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(spec, spec.number_above(1, "rope_theta")), 1.0


def _linear_frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    return _default_frequencies(spec)[0] / spec.number_above(0, "factor"), 1.0


def _dynamic_frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    # Up to max_position_embeddings, where serving ends, this scheme changes nothing.
    spec.number_above(0, "factor")
    return _default_frequencies(spec)


def _frequency_factor_frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    # Not Hugging Face's: llama.cpp's converter works the llama3 scheme out into one divisor a frequency.
    return _default_frequencies(spec)[0] / spec.numbers("frequency_factors"), 1.0


def _llama3_frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    factor = spec.number_above(0, "factor")
    low_freq_factor = spec.number_above(0, "low_freq_factor")
    high_freq_factor = spec.number_above(0, "high_freq_factor")
    original_length = spec.integer("original_max_position_embeddings")
    frequencies = _default_frequencies(spec)[0]
    wavelengths = 2 * math.pi / frequencies
    # Waves that fit the original length often stay, those that never fit are stretched, others lie between.
    smooth = (original_length / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original_length / low_freq_factor, frequencies / factor, between)
    return torch.where(wavelengths < original_length / high_freq_factor, frequencies, scaled), 1.0


def _yarn_frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    theta, factor = spec.number_above(1, "rope_theta"), spec.number_above(0, "factor")
    original_length = spec.integer("original_max_position_embeddings")

    def pair_that_turns(num_rotations: float) -> float:
        """Return the index of the pair that turns so often over the original length."""
        return spec.head_dim * math.log(original_length / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(spec.number_above(0, "beta_fast", 32.0))
    high = pair_that_turns(spec.number_above(0, "beta_slow", 1.0))
    if spec.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    high += 0.001 if low == high else 0.0
    stretched = ((torch.arange(spec.head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = _wavelengths(spec, theta)
    frequencies = 1.0 / (factor * wavelengths) * stretched + 1.0 / wavelengths * (1 - stretched)
    return frequencies, _yarn_attention_factor(spec, factor)


def _yarn_attention_factor(spec: RopeSpec, factor: float) -> float:
    if spec.parameters.get("attention_factor") is not None:
        return spec.number_above(0, "attention_factor")

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    mscale, mscale_all_dim = (
        # 0 stands for none.
        spec.number_above(0, key) if spec.parameters.get(key) else 0.0
        for key in ("mscale", "mscale_all_dim")
    )
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _longrope_frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    spec.numbers("long_factor")  # for sequences longer than `max_position`: checked, not used
    original_length = spec.integer("original_max_position_embeddings")
    factor = spec.number_above(0, "factor", spec.max_position_embeddings / original_length)
    inferred = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_length))
    wavelengths = spec.numbers("short_factor") * _wavelengths(spec, spec.number_above(1, "rope_theta"))
    return 1.0 / wavelengths, spec.number_above(0, "attention_factor", inferred)


def _wavelengths(spec: RopeSpec, theta: float) -> Tensor:
    """Return what a position is divided by to give each pair's angle, in radians, float32. [head_dim / 2]"""
    return torch.pow(theta, torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim)


# Each returns the frequencies of the pairs, float32 [head_dim / 2], and a factor on all cosines and sines.
ROPE_TYPES: dict[str, Callable[[RopeSpec], tuple[Tensor, float]]] = {
    "default": _default_frequencies,
    "linear": _linear_frequencies,
    "dynamic": _dynamic_frequencies,
    "yarn": _yarn_frequencies,
    "longrope": _longrope_frequencies,
    "llama3": _llama3_frequencies,
    "frequency_factors": _frequency_factor_frequencies,
}
