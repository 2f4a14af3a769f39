"""Scales for a quantised KV cache in a checkpoint: the names they go by, and what they must be.

    ...layers.7.self_attn.k_scale               v_scale           vLLM, llm-compressor
    ...layers.7.self_attn.attn.k_scale          attn.v_scale      as vLLM's own modules have them
    ...layers.7.self_attn.k_proj.k_scale        v_proj.v_scale    ModelOpt
    ...layers.7.self_attn.k_proj.output_scale   v_proj.output_scale   older compressed-tensors
    ...layers.7.self_attn.kv_scale              one for both      older FP8 checkpoints, and MLA

A scale is one number, or one a KV head, in any floating-point type. The names are those that vLLM's loaders map
(`maybe_remap_kv_scale_name` in vllm/model_executor/model_loader/weight_utils.py, and `get_cache_scale` of its
compressed-tensors). The layer's number is that of the attention layer. Scales of queries (`q_scale`,
`q_proj.output_scale`) and of probabilities (`prob_scale`) may stand beside them and are not read: here neither is
quantised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_format import KV_FORMATS
from octavo.core.interfaces.kv_scales import LayerScales
from octavo.core.interfaces.model import Checkpoint
from octavo.errors import CheckpointError
from octavo.models.config_values import QUANTISATION_KEYS, shortened

_KEY, _VALUE, _BOTH = "k", "v", "kv"
# Takes time in proportion to the name's length: the looking ahead keeps it from trying each way to cut a part in two.
_NAME = re.compile(
    # The parts of a model that see or hear have no KV cache.
    r"(?!.*(?:vision|visual|audio))(?P<stack>(?:.+\.)?(?:layers|h|blocks))\.(?P<layer>\d{1,6})\."
    r"(?=\w*(?:attn|attention|mixer))\w+\.(?:\w+\.){0,2}"
    r"(?:(?P<kind>kv|k|v|q|prob|prob_output)_(?P<what>scale|zero_point)|"
    r"(?<=[kvq]_proj\.)output_(?P<output>scale|zero_point))",
    re.ASCII,
)
# Layers beside the decoder's: those that guess further tokens, and an encoder's.
_OTHER_STACK = re.compile(r"(?:.+\.)?(?:mtp|encoder)\..+")
# What a config says of the KV cache's numbers, as compressed-tensors and as ModelOpt write it -> the kv_dtype of it.
_SCHEMES = {("float", 8): "fp8_e4m3", ("int", 8): "int8"}
_ALGORITHMS = {"FP8": "fp8_e4m3", "INT8": "int8"}
# What is meant where a config says nothing: the names are those of FP8 checkpoints.
_UNSAID = "fp8_e4m3"

_WAY_OUT = "Set kv_cache_scales='per_token_head', which reads no scales of the checkpoint."


@dataclass(frozen=True)
class _ScaleName:
    stack: str
    layer: int
    kind: str
    what: str


def has_static_scales(kv_dtype: str) -> bool:
    """Whether numbers stored so were divided by a scale that is not in the page."""
    kv_format = KV_FORMATS.get(kv_dtype)
    return kv_format is not None and kv_format.is_quantised and not kv_format.has_page_scales


def is_kv_cache_name(name: str) -> bool:
    """Whether a tensor of that name is about a quantised KV cache: no weight, and none that a model has a place for."""
    return _parse(name) is not None


def _parse(name: str) -> _ScaleName | None:
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    # "...k_proj.output_scale": the projection says of what.
    kind = found["kind"] or name.rpartition("_proj.output_")[0][-1]
    return _ScaleName(found["stack"], int(found["layer"]), kind, found["what"] or found["output"])


def _of_decoder(found: Mapping[str, _ScaleName]) -> dict[str, _ScaleName]:
    """Leave out what is another stack's of layers. The decoder's is the one with scales for most layers."""
    layers: dict[str, set[int]] = {}
    for name in found.values():
        if name.what == "scale" and _OTHER_STACK.fullmatch(name.stack) is None:
            layers.setdefault(name.stack, set()).add(name.layer)
    most = max(map(len, layers.values()), default=0)
    # Of two with as many, nobody knows: both stay, as two scales for one thing.
    return {tensor: name for tensor, name in found.items() if len(layers.get(name.stack, ())) == most > 0}


class CheckpointScales:
    """The scales of a checkpoint. Their names are known at once, their numbers are read by `read`.

    Args:
        checkpoint: Any.

    Raises:
        CheckpointError: The names cannot be had.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        # By layer and kind, and by layer, the names.
        self._names: dict[tuple[int, str], list[str]] = {}
        self._zero_points: dict[int, list[str]] = {}
        parsed = {tensor: name for tensor in checkpoint.tensor_names() if (name := _parse(tensor)) is not None}
        read = {tensor: name for tensor, name in parsed.items() if name.kind in (_KEY, _VALUE, _BOTH)}
        for tensor, name in _of_decoder(read).items():
            if name.what == "zero_point":
                self._zero_points.setdefault(name.layer, []).append(tensor)
            else:
                self._names.setdefault((name.layer, name.kind), []).append(tensor)

    def __bool__(self) -> bool:
        return bool(self._names)

    def read(self, specs: Sequence[AttentionSpec]) -> tuple[LayerScales | None, ...]:
        """Return each layer's; None of those that are not stored with them.

        Args:
            specs: The model's attention layers.

        Raises:
            CheckpointError: A layer has none, or several, or a zero point; a scale is not a positive, finite number, or
                not one for all KV heads or for each; latents have different ones as keys and as values; they are for
                numbers of another kind. The message names the tensor.
        """
        return tuple(
            self._of_layer(layer, spec) if has_static_scales(spec.kv_dtype) else None
            for layer, spec in enumerate(specs)
        )

    def _of_layer(self, layer: int, spec: AttentionSpec) -> LayerScales:
        self._refuse_zero_points(layer)
        factor = self._factor(spec.kv_dtype)
        key_name = self._name(layer, _KEY, _BOTH)
        key = self._scale(key_name, spec.num_kv_heads, factor)
        if spec.value_is_key_prefix and (layer, _VALUE) not in self._names:
            return LayerScales(key, key)
        value_name = self._name(layer, _VALUE, _BOTH)
        value = self._scale(value_name, spec.num_kv_heads, factor)
        if spec.value_is_key_prefix and value != key:
            raise CheckpointError(
                f"The KV-cache scales {key_name!r} and {value_name!r} differ, and are for the same latents, which are "
                f"keys and values at once. {_WAY_OUT}"
            )
        return LayerScales(key, value)

    def _name(self, layer: int, *kinds: str) -> str:
        """Return the tensor that is a layer's scale of any of these kinds."""
        found = [name for kind in kinds for name in self._names.get((layer, kind), ())]
        if len(found) > 1:
            raise CheckpointError(
                f"The checkpoint gives two KV-cache scales for one thing, {found[0]!r} and {found[1]!r}. {_WAY_OUT}"
            )
        if found:
            return found[0]
        example, names = next(iter(self._names.values()))[0], [f"{kind}_scale" for kind in kinds]
        raise CheckpointError(
            f"The checkpoint has KV-cache scales, such as {example!r}, and no {' or '.join(names)} for layer {layer}. "
            f"{_WAY_OUT}"
        )

    def _scale(self, name: str, num_kv_heads: int, factor: float) -> tuple[float, ...]:
        tensor = self._checkpoint.tensor(name)
        # One number, or one a head; further dimensions of size 1 say nothing.
        has_right_shape = tensor.numel() in (1, num_kv_heads) and max(tensor.shape, default=1) == tensor.numel()
        if not tensor.is_floating_point() or not has_right_shape:
            heads = f" or of shape [{num_kv_heads}], one a KV head" if num_kv_heads > 1 else ""
            raise CheckpointError(
                f"The KV-cache scale {name!r} is {str(tensor.dtype).removeprefix('torch.')} of shape "
                f"{list(tensor.shape)}; it has to be one floating-point number{heads}. {_WAY_OUT}"
            )
        scales: list[float] = tensor.flatten().float().tolist()
        if wrong := [scale for scale in scales if not (math.isfinite(scale) and scale > 0)]:
            raise CheckpointError(
                f"The KV-cache scale {name!r} is {wrong[0]:g}; it has to be a positive, finite number. {_WAY_OUT}"
            )
        return tuple(scale * factor for scale in scales)

    def _factor(self, kv_dtype: str) -> float:
        """Return by what scales have to be multiplied: they may be for codes that go up to another number."""
        intended = _intended_dtype(self._checkpoint.config)
        largest, wanted = KV_FORMATS[intended].largest, KV_FORMATS[kv_dtype].largest
        # Only quantised formats come here.
        return (largest or 1.0) / (wanted or 1.0)

    def _refuse_zero_points(self, layer: int) -> None:
        for name in self._zero_points.get(layer, ()):
            # torch counts no zeros in 8-bit floats and in unsigned numbers.
            if self._checkpoint.tensor(name).float().any():
                raise CheckpointError(
                    f"The checkpoint's KV-cache scales go with a zero point ({name!r}), and codes here are symmetric "
                    f"around 0. {_WAY_OUT}"
                )


def _intended_dtype(config: Mapping[str, Any]) -> str:
    """Return the format that a checkpoint's scales are made for; fp8_e4m3 where its config does not say.

    Raises:
        CheckpointError: It is one that is not served.
    """
    for holder in (config, config.get("text_config")):
        for key in QUANTISATION_KEYS:
            quantisation = holder.get(key) if isinstance(holder, Mapping) else None
            if not isinstance(quantisation, Mapping):
                continue
            scheme, algorithm = quantisation.get("kv_cache_scheme"), quantisation.get("kv_cache_quant_algo")
            if isinstance(scheme, Mapping):
                return _known(_SCHEMES, (scheme.get("type"), scheme.get("num_bits")), f"{key}.kv_cache_scheme", scheme)
            if algorithm is not None:
                return _known(_ALGORITHMS, algorithm, f"{key}.kv_cache_quant_algo", algorithm)
    return _UNSAID


def _known(formats: Mapping[Any, str], name: Any, key: str, shown: Any) -> str:
    try:
        return formats[name]
    except (KeyError, TypeError):
        raise CheckpointError(
            f"The checkpoint's KV-cache scales are for numbers of another kind than fp8_e4m3 and int8 ({key} is "
            f"{shortened(shown)}). {_WAY_OUT}"
        ) from None
