"""How a KV cache is stored and scaled: what was asked for, and what the checkpoint has.

settings ── names of the checkpoint's tensors ──► a name of KV_FORMATS ── the model's layers ──► the scales of each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.config import QUANTISED_KV_CACHE_DTYPES, EngineConfig
from octavo.core.interfaces import AttentionSpec, Checkpoint
from octavo.core.interfaces.kv_format import KV_FORMATS, SCALE_BYTES
from octavo.core.interfaces.kv_scales import LayerScales
from octavo.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from octavo.models.kv_scales import CheckpointScales

AUTO, PER_TENSOR, PER_TOKEN_HEAD = "auto", "per_tensor", "per_token_head"


@dataclass(frozen=True)
class KVScales:
    """How what layers keep is scaled.

    Attributes:
        layers: Each layer's scales; empty where they are 1, or in the pages, or there is nothing to scale.
        origin: Where they come from, as a sentence has it; empty for a KV cache that is not quantised.
        warning: What whoever runs an engine with them should know; None where there is nothing.
    """

    layers: tuple[LayerScales | None, ...] = ()
    origin: str = ""
    warning: str | None = None


UNSCALED = KVScales()


@dataclass(frozen=True)
class Scaling:
    """What is decided of the scales before the model's layers are known.

    Attributes:
        kv_dtype: How numbers are stored, a name of KV_FORMATS.
        scales: `kv_cache_scales` of the config.
        source: Where that was written.
        of_checkpoint: The checkpoint's; None where they are not used.
        is_bare_config: Whether the weights are not here, so that nobody can say which scales they have.
    """

    kv_dtype: str
    scales: str = AUTO
    source: str = "default"
    of_checkpoint: CheckpointScales | None = None
    is_bare_config: bool = False

    def resolved(self, specs: Sequence[AttentionSpec]) -> KVScales:
        """Return the scales of a model with these attention layers.

        Raises:
            CheckpointError: The checkpoint's scales cannot be used.
        """
        kv_format = KV_FORMATS[self.kv_dtype]
        if not kv_format.is_quantised:
            return UNSCALED
        if self.of_checkpoint is not None:
            layers = tuple(map(self._granted, self.of_checkpoint.read(specs)))
            return KVScales(layers, f"{_granularity(layers, specs)}, from the checkpoint, by {self.source}")
        if kv_format.has_page_scales:
            return KVScales(origin=self._origin_in_pages(), warning=self._warning_of_pages(specs))
        if self.is_bare_config:
            return KVScales(origin=f"{self.scales}, from the checkpoint, whose weights are not here, by {self.source}")
        return KVScales(
            origin=f"1.0, for the checkpoint has none, by {self.source}",
            warning=f"The checkpoint has no scales for a KV cache in {self.kv_dtype}, and kv_cache_scales is "
            f"{self.scales!r}, so all scales are 1.0: numbers beyond {kv_format.largest:g} are cut off, and small ones "
            f"lose digits. Compare the answers, or set kv_cache_scales={PER_TOKEN_HEAD!r}.",
        )

    def _granted(self, scales: LayerScales | None) -> LayerScales | None:
        """Return a layer's scales as they were asked for: one for all heads is the largest of theirs."""
        if scales is None or self.scales != PER_TENSOR:
            return scales
        return LayerScales((max(scales.key),), (max(scales.value),))

    def _origin_in_pages(self) -> str:
        if self.scales == PER_TOKEN_HEAD:
            return f"one for each token and head, kept in the page, by {self.source}"
        reason = "whether the checkpoint has some is not known without its weights, and none are assumed"
        reason = reason if self.is_bare_config else "the checkpoint has none"
        return f"one for each token and head, kept in the page, by {self.source}; 'auto': {reason}"

    def _warning_of_pages(self, specs: Sequence[AttentionSpec]) -> str | None:
        if self.scales != AUTO or self.is_bare_config:
            return None
        vector_bytes = min(spec.head_dim for spec in specs) * KV_FORMATS[self.kv_dtype].element_bytes
        dtype = self.kv_dtype.removesuffix(f"_{PER_TOKEN_HEAD}")
        return (
            f"The checkpoint has no scales for a KV cache in {dtype}, so each token and head has its own, kept in the "
            f"page: {SCALE_BYTES} bytes beside {vector_bytes}, {SCALE_BYTES / vector_bytes:.1%} more than with scales "
            f"of the checkpoint. kv_cache_scales={PER_TOKEN_HEAD!r} says that this is meant."
        )


def choose_scaling(config: EngineConfig, checkpoint: Checkpoint, dtype: str) -> Scaling:
    """Decide how the KV cache is stored. No number is read.

    Args:
        config: The settings.
        checkpoint: The model's files.
        dtype: Of weights and activations.

    Raises:
        ConfigError: The scales that were asked for are not there, and nothing can stand in for them.
        CheckpointError: The names of the weights' tensors cannot be read.
    """
    # Imported here, for it reads tensors, and torch takes more than a second.
    from octavo.models.kv_scales import CheckpointScales

    cache = config.cache
    if cache.kv_cache_dtype not in QUANTISED_KV_CACHE_DTYPES:
        return Scaling(dtype if cache.kv_cache_dtype == AUTO else cache.kv_cache_dtype)
    in_pages = f"{cache.kv_cache_dtype}_{PER_TOKEN_HEAD}"
    scales, source = cache.kv_cache_scales, config.source_of("kv_cache_scales")
    if scales == PER_TOKEN_HEAD:
        return Scaling(in_pages, scales, source)
    try:
        found = CheckpointScales(checkpoint)
    except CheckpointError:
        if not _is_bare_config(checkpoint):
            raise
        return Scaling(in_pages if scales == AUTO else cache.kv_cache_dtype, scales, source, is_bare_config=True)
    if found:
        return Scaling(cache.kv_cache_dtype, scales, source, found)
    if scales == AUTO:
        return Scaling(in_pages, scales, source)
    if cache.kv_cache_dtype == "int8":
        raise ConfigError(
            f"kv_cache_scales is {scales!r} and kv_cache_dtype 'int8', and the checkpoint has no scales for the KV "
            "cache: with 1.0 only the whole numbers of keys and values would be kept, and nearly everything lost. Set "
            f"kv_cache_scales={PER_TOKEN_HEAD!r}, or take kv_cache_dtype='fp8_e4m3'."
        )
    return Scaling(cache.kv_cache_dtype, scales, source)


def _is_bare_config(checkpoint: Checkpoint) -> bool:
    """Whether there are no weights to ask. Whoever is going to run the model has some."""
    from octavo.models.config_checkpoint import ConfigCheckpoint

    return isinstance(checkpoint, ConfigCheckpoint) and not checkpoint.has_weights


def _granularity(layers: Sequence[LayerScales | None], specs: Sequence[AttentionSpec]) -> str:
    if all(spec.value_is_key_prefix for spec in specs):
        return "one for the latents of each layer"
    most = max((len(scales.key + scales.value) for scales in layers if scales is not None), default=2)
    return "one for each KV head" if most > 2 else "one for keys and one for values of each layer"
