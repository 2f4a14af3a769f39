"""What the user asked for. Nothing here is measured or derived.

Field names are unique over all sections, so keyword arguments and command-line flags are flat while files are nested.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from octavo.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class CacheConfig(_Section):
    """The KV cache."""

    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens in a block."""
    num_kv_blocks: int | None = Field(default=None, ge=2)
    """Blocks in the pool, the null block counted in. None sizes the pool from memory."""
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """Bytes for the KV cache. None takes a share of the memory that the device has."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory to use in all: weights, activations, and the KV cache with what is left."""
    cpu_memory_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the free memory that the KV cache takes on a CPU. Pages that are never used cost nothing."""
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Element type of stored keys and values; "auto" is the model's."""
    enable_prefix_caching: bool = True
    """Whether requests reuse the blocks of equal prompt beginnings."""
    hash_function: str = "sha256"
    """Name of the hash function that makes the prefix cache's keys."""
    hash_seed: str | None = None
    """Makes the keys the same in every process. None takes PYTHONHASHSEED where that fixes a seed, else a
    random one."""
    kv_managers: dict[str, str] = Field(default_factory=dict)
    """KV-cache managers by the kind of spec they serve, where the default one is not wanted. As a flag:
    kind=name,kind=name."""


class SchedulerConfig(_Section):
    """Which requests run, and how much a step computes."""

    max_num_seqs: int = Field(default=64, ge=1, le=65536)
    """Requests that run at a time."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Tokens that a step computes at most."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps. Without it a prompt runs whole in one step or waits."""
    request_queue: str = "fcfs"
    """Name of the queue that orders waiting requests."""


class EngineConfig(_Section):
    """Everything an engine is made from."""

    model: str | None = None
    """A folder, a .gguf file, or a name on the Hugging Face hub. None is the packaged demo model."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type of weights and activations; "auto" is float32 on a CPU, and the checkpoint's own elsewhere."""
    device: str = "auto"
    """Where to run, as torch names it; "auto" is a GPU where there is one."""
    max_model_len: int | Literal["auto"] = "auto"
    """Tokens in the longest request, prompt and output together. "auto" is as long as the model's positions and the
    KV cache allow."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Requests that have no seed of their own get one that follows from this and their order of arrival: the same seed,
    the same tokens. It matters where the temperature is above 0."""
    attention_backend: str = "auto"
    """Name of the attention backend; "auto" chooses among Octavo's own."""
    model_impl: str = "auto"
    """Name of the model class; "auto" goes by the checkpoint's `model_type`."""
    cache: CacheConfig = CacheConfig()
    """The KV cache."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Which requests run, and how much a step computes."""

    @classmethod
    def from_flat(cls, **fields: Any) -> EngineConfig:
        """Make a config from field names of all sections together.

        Raises:
            ConfigError: A name is unknown, with the closest one; or a value is of the wrong type or out of range.
        """
        nested: dict[str, Any] = {}
        sections = field_sections()
        for name, value in fields.items():
            if name not in sections:
                raise ConfigError(f"There is no setting called {name!r}.{_suggest(name, list(sections))}")
            section = sections[name]
            (nested.setdefault(section, {}) if section else nested)[name] = value
        return cls._validated(nested)

    @classmethod
    def from_toml(cls, path: str | Path) -> EngineConfig:
        """Read a config file: fields at the top, [cache] and [scheduler] as tables.

        Raises:
            ConfigError: The file cannot be read, or holds something else than settings.
        """
        try:
            nested = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        # A ValueError is a path with a null byte in it, a file that is not UTF-8, or one that is not TOML.
        except (OSError, ValueError) as cause:
            raise ConfigError(f"The config file {str(path)!r} cannot be read: {cause}.") from cause
        return cls._validated(nested)

    def with_settings(self, **fields: Any) -> EngineConfig:
        """Return a config with some fields, named as in `from_flat`, changed.

        Raises:
            ConfigError: As `from_flat`.
        """
        given = self.model_dump(exclude_unset=True)
        flat = {name: value for name, value in given.items() if name not in ("cache", "scheduler")}
        return self.from_flat(**(flat | given.get("cache", {}) | given.get("scheduler", {}) | fields))

    @classmethod
    def _validated(cls, nested: dict[str, Any]) -> EngineConfig:
        try:
            return cls.model_validate(nested)
        except ValidationError as cause:
            raise ConfigError(" ".join(_sentence(error) for error in cause.errors())) from None


def field_sections() -> dict[str, str | None]:
    """Return each field's section, None for those at the top, in the order of the docs."""
    sections: dict[str, str | None] = {}
    for name, field in EngineConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Section):
            sections.update(dict.fromkeys(field.annotation.model_fields, name))
        else:
            sections[name] = None
    return sections


def _sentence(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"] if not str(part).startswith(("literal", "int", "constrained")))
    if error["type"] == "extra_forbidden":
        return _unknown(name)
    # Names are unique over all sections, so the name alone is what flags and keyword arguments are called too.
    section, _, name_in_section = name.partition(".")
    name = name_in_section if section in ("cache", "scheduler") and name_in_section else name
    return f"{name} is {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}."


def _unknown(name: str) -> str:
    """Say that a file has a setting, or a section, that does not exist or stands in the wrong place."""
    sections = field_sections()
    plain = name.rpartition(".")[2]
    if plain in sections:
        place = f"in the section [{sections[plain]}]" if sections[plain] else "at the top, before any section"
        return f"{plain!r} belongs {place}."
    names = [*sections, *dict.fromkeys(section for section in sections.values() if section)]
    return f"There is no setting called {name!r}.{_suggest(plain, names)}"


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" There are: {', '.join(known)}."
