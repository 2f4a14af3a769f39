"""What the user asked for. Nothing here is measured or derived.

Field names are unique over all sections, so keyword arguments and command-line flags are flat while files are nested.
"""

from __future__ import annotations

import copy
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from octavo.errors import ConfigError


@dataclass(frozen=True)
class PluginChoice:
    """A part, chosen by name, and its options. Wherever a setting takes one, a plain name works too.

    Attributes:
        name: As the part is registered; "package:name" picks one of several packages that use the name.
        options: For the part's own `Options`, which checks them.
    """

    name: str
    options: dict[str, Any] = dataclass_field(default_factory=dict)

    def __str__(self) -> str:
        # Options may be secrets; their names are not.
        return f"{self.name} with {', '.join(map(str, self.options))}" if self.options else str(self.name)

    def __repr__(self) -> str:
        return f"PluginChoice({str(self)!r})"


_CHOICE_FORM = 'a table such as { name = "my_part", options = { size = 64 } }'
# What a config file can hold where a name or a table should be, and what is no part at any rate.
_PLAIN = (type(None), bool, int, float, str, list, tuple, set, dict)


def _as_choice(given: Any) -> Any:
    """Turn a name, or a table of name and options, into a choice."""
    options: Any = {}
    match given:
        case PluginChoice(name=str(name)):
            options = given.options
        case str(name):
            pass
        case {"name": str(name), **others}:
            if unknown := [str(key) for key in others if key != "options"]:
                raise ValueError(_beside_the_name(unknown))
            options = others.get("options", {})
        case _ if not isinstance(given, _PLAIN):
            raise ValueError(
                "it must be the name of a part, under which a package registers it as an entry point; "
                "octavo.testing.installed registers one without a package"
            )
        case _:
            raise ValueError(f"it must be a name, or {_CHOICE_FORM}")
    if not name:
        raise ValueError("the name is empty")
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        raise ValueError(f"options must be a table of names and values: {_CHOICE_FORM}")
    try:
        # A copy: what the caller does with the table later must not change the config.
        return PluginChoice(name, copy.deepcopy(options))
    except Exception:
        raise ValueError("options must be plain values, which can be copied") from None


def _beside_the_name(unknown: Sequence[str]) -> str:
    """Say where options go. Their values may be secrets and are not shown."""
    if any(difflib.get_close_matches(key, ["options"]) for key in unknown):
        return "beside 'name' it may have 'options' alone"
    written = ", ".join(f"{key} = ..." for key in unknown)
    return f"beside the name, a part's options stand in a table of their own; write options = {{ {written} }}"


def _as_choices(given: Any) -> Any:
    """Turn a list of choices, or a single one, into a tuple."""
    if isinstance(given, (list, tuple)):
        return tuple(given)
    if given is None or given == "":
        raise ValueError("it must be a list of names, and an empty list for none")
    return (given,)


def _as_sizes(given: Any) -> Any:
    """Turn a list of sizes into a tuple."""
    if given == [] or given == ():
        raise ValueError("the list is empty; enforce_eager captures nothing")
    return tuple(given) if isinstance(given, list) else given


_Choice = Annotated[PluginChoice, BeforeValidator(_as_choice)]


class _Sources(dict[str, str]):
    """Where settings came from, by name. Configs that ask for the same are equal wherever that was written."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Sources)

    __hash__ = None


# The type of an error whose message is a whole sentence.
_CONTRADICTION = "contradiction"


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=()
    )


# Each says how large the KV cache is. One of them at most is given; a setting that is put in later takes the place of
# the other one.
_CACHE_SIZES = ("num_kv_blocks", "kv_cache_memory_bytes")


# Values of `kv_cache_dtype` whose numbers have scales.
QUANTISED_KV_CACHE_DTYPES = ("fp8_e4m3", "int8")


class CacheConfig(_Section):
    """The KV cache."""

    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens in a block."""
    num_kv_blocks: int | None = Field(default=None, ge=2)
    """Blocks in the pool, the null block counted in. None sizes the pool from memory. Not together with
    `kv_cache_memory_bytes`."""
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """Bytes for the KV cache. None takes a share of the memory that the device has. Not together with
    `num_kv_blocks`."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory to use in all: weights, activations, and the KV cache with what is left."""
    cpu_memory_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the free memory that the KV cache takes on a CPU. Pages that are never used cost nothing."""
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "fp8_e4m3", "int8"] = "auto"
    """How keys and values are stored: as "float32", "float16" or "bfloat16", or quantised to a byte a number, as
    "fp8_e4m3" or "int8"; "auto" is the model's dtype."""
    kv_cache_scales: Literal["auto", "per_tensor", "per_head", "per_token_head"] = "auto"
    """How a quantised KV cache is scaled. "per_tensor" and "per_head" take scales of the checkpoint, one a layer or one
    a KV head; "per_token_head" computes one for each token and head, which is kept beside it. "auto" takes the
    checkpoint's where it has some, else is "per_token_head"."""
    enable_prefix_caching: bool = True
    """Whether requests reuse the blocks of equal prompt beginnings."""
    disable_hybrid_kv_cache_manager: bool = False
    """Whether layers that read a window or a chunk keep all tokens, as full attention does. Otherwise they give back
    what no later token reads, and all kinds of layers share one pool."""
    verify_prefix_cache: bool = False
    """Whether each prefix that is found is computed anew and compared, to find faults. It takes more time than no
    prefix cache."""
    hash_function: _Choice = PluginChoice("sha256")
    """The hash function that makes the prefix cache's keys."""
    hash_seed: str | None = None
    """Makes the keys the same in every process. None takes PYTHONHASHSEED where that fixes a seed, else a
    random one."""
    kv_managers: dict[str, _Choice] = Field(default_factory=dict)
    """KV-cache managers by the kind of spec they serve, where the default one is not wanted. As a flag:
    kind=name,kind=name."""

    @model_validator(mode="after")
    def _has_one_size(self) -> Self:
        if all(getattr(self, name) is not None for name in _CACHE_SIZES):
            raise PydanticCustomError(
                _CONTRADICTION,
                "The size of the KV cache is given twice, by num_kv_blocks and by kv_cache_memory_bytes; leave one "
                "out.",
            )
        return self

    @model_validator(mode="after")
    def _scales_what_has_scales(self) -> Self:
        if self.kv_cache_scales != "auto" and self.kv_cache_dtype not in QUANTISED_KV_CACHE_DTYPES:
            raise PydanticCustomError(
                _CONTRADICTION,
                f"kv_cache_scales is {self.kv_cache_scales!r}, and kv_cache_dtype {self.kv_cache_dtype!r} has no "
                f"scales; set kv_cache_dtype to {' or '.join(map(repr, QUANTISED_KV_CACHE_DTYPES))}, or leave "
                "kv_cache_scales out.",
            )
        return self


class SchedulerConfig(_Section):
    """Which requests run, and how much a step computes."""

    max_num_seqs: int = Field(default=64, ge=1, le=65536)
    """Requests that run at a time."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Tokens that a step computes at most."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps. Without it a prompt runs whole in one step or waits."""
    long_prefill_token_threshold: int = Field(default=0, ge=0)
    """Tokens of one prompt that a step computes at most; 0 sets no limit. A lower one keeps steps short, so that
    generating requests get their tokens more evenly."""
    watermark: float = Field(default=0.01, ge=0, lt=1)
    """Share of the KV cache that no request is admitted into while others run, so that they can grow."""
    async_scheduling: bool = False
    """Whether a step is planned while the one before it runs."""
    request_queue: _Choice = PluginChoice("fcfs")
    """The queue that orders waiting requests."""


class EngineConfig(_Section):
    """Everything an engine is made from."""

    model: str | None = None
    """A folder, a .gguf file, or a name on the Hugging Face hub. None is the packaged demo model."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type of weights and activations: "float32", "float16" or "bfloat16"; "auto" is float32 on a CPU, and the
    checkpoint's own elsewhere."""
    device: str = "auto"
    """Where to run, as torch names it; "auto" is a GPU where there is one."""
    max_model_len: int | Literal["auto"] = "auto"
    """Tokens in the longest request, prompt and output together. "auto" is as long as the model's positions and the
    KV cache allow."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Requests that have no seed of their own get one that follows from this and their order of arrival: the same seed,
    the same tokens. It matters where the temperature is above 0."""
    attention_backend: _Choice = PluginChoice("auto")
    """The attention backend; "auto" chooses among Octavo's own."""
    attention_backends: dict[str, _Choice] = Field(default_factory=dict)
    """Attention backends by the kind of what layers keep, where another one than `attention_backend` is wanted. As a
    flag: kind=name,kind=name."""
    model_impl: _Choice = PluginChoice("auto")
    """The model class; "auto" goes by the checkpoint's `model_type`, and takes `transformers` where Octavo has no class
    of its own."""
    enforce_eager: bool = False
    """Whether decode steps on a GPU are computed kernel by kernel. Otherwise they are captured in CUDA graphs at the
    start, where the model and its attention backends allow it."""
    cudagraph_capture_sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...] | None, BeforeValidator(_as_sizes)] = (
        None
    )
    """Numbers of requests for which decode steps are captured; a step is padded to the next one. None captures 1, 2, 4,
    8, further multiples of 8, and `max_num_seqs`, up to 512. As a flag: size,size."""
    hooks: Annotated[tuple[_Choice, ...], BeforeValidator(_as_choices)] = ()
    """Observers to tell what the engine does. As a flag: name,name."""
    cache: CacheConfig = CacheConfig()
    """The KV cache."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Which requests run, and how much a step computes."""
    _sources: _Sources = PrivateAttr(default_factory=_Sources)

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
                raise ConfigError(_no_such_setting(name, list(sections)))
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
        try:
            config = cls._validated(nested)
        except ConfigError as error:
            raise ConfigError(f"In {str(path)!r}: {error}") from None
        return config.with_sources(dict.fromkeys(config._set_fields(), str(path)))

    def with_settings(self, **fields: Any) -> EngineConfig:
        """Return a config with some fields, named as in `from_flat`, changed. One of `num_kv_blocks` and
        `kv_cache_memory_bytes` takes the place of the other.

        Raises:
            ConfigError: As `from_flat`.
        """
        flat = {
            name: getattr(part, name)
            for part in (self, self.cache, self.scheduler)
            for name in part.model_fields_set - {"cache", "scheduler"}
        }
        sets_size = any(fields.get(name) is not None for name in _CACHE_SIZES)
        replaced = {*fields, *_CACHE_SIZES} if sets_size else set(fields)
        kept = {name: value for name, value in flat.items() if name not in replaced}
        changed = self.from_flat(**kept, **fields)
        return changed.with_sources({name: place for name, place in self._sources.items() if name not in replaced})

    def with_sources(self, sources: Mapping[str, str]) -> Self:
        """Return the same config, knowing of some settings where they were written: a file, a flag."""
        named = self.model_copy()
        named._sources = _Sources({**self._sources, **sources})
        return named

    def source_of(self, name: str) -> str:
        """Say where a setting's value comes from: "default", "argument", a flag, or a file."""
        return self._sources.get(name) or ("argument" if name in self._set_fields() else "default")

    def _set_fields(self) -> set[str]:
        sections = (self.cache, self.scheduler)
        return (self.model_fields_set - {"cache", "scheduler"}).union(*(part.model_fields_set for part in sections))

    @classmethod
    def _validated(cls, nested: dict[str, Any]) -> EngineConfig:
        try:
            return cls.model_validate(nested)
        except ValidationError as cause:
            raise ConfigError(" ".join(_sentences(cause.errors()))) from None


def field_sections() -> dict[str, str | None]:
    """Return each field's section, None for those at the top, in the order of the docs."""
    sections: dict[str, str | None] = {}
    for name, field in EngineConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Section):
            sections.update(dict.fromkeys(field.annotation.model_fields, name))
        else:
            sections[name] = None
    return sections


def _sentences(errors: Sequence[Any]) -> list[str]:
    """Return a sentence for each value that is wrong, whatever number of types it might have had."""
    by_name: dict[str, list[Any]] = {}
    for error in errors:
        by_name.setdefault(_name_of(error), []).append(error)
    return [_sentence(name, of_name) for name, of_name in by_name.items()]


def _name_of(error: Any) -> str:
    """Return the setting, and what is below it, without the type that was tried."""
    parts = [str(part) for part in error["loc"]]
    is_of_choice = error["type"] == "value_error"
    if not is_of_choice and (parts[-1:] == ["int"] or parts[-1].startswith("literal[")):
        parts.pop()
    return ".".join(parts)


def _sentence(name: str, errors: Sequence[Any]) -> str:
    first = errors[0]
    if first["type"] == "extra_forbidden":
        return _unknown(name)
    if first["type"] == _CONTRADICTION:
        return str(first["msg"])
    # Names are unique over all sections, so the name alone is what flags and keyword arguments are called too.
    section, _, name_in_section = name.partition(".")
    name = name_in_section if section in ("cache", "scheduler") and name_in_section else name
    message = first["msg"].removeprefix("Value error, ")
    others = [f" or {error['msg'].removeprefix('Input should be ')}" for error in errors[1:]]
    return f"{name} is {_shown(first['input'])}: {message[0].lower()}{message[1:]}{''.join(others)}."


def _shown(value: Any) -> str:
    """Return a value for an error message: of a table the names alone, since options may be secrets."""
    if isinstance(value, dict):
        return "a table of " + (", ".join(map(repr, value)) or "nothing")
    return repr(value)


def _unknown(name: str) -> str:
    """Say that a file has a setting, or a section, that does not exist or stands in the wrong place."""
    sections = field_sections()
    plain = name.rpartition(".")[2]
    if plain in sections:
        place = f"in the section [{sections[plain]}]" if sections[plain] else "at the top, before any section"
        return f"{plain!r} belongs {place}."
    names = [*sections, *dict.fromkeys(section for section in sections.values() if section)]
    return _no_such_setting(name, names)


def _no_such_setting(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name.rpartition(".")[2], known, n=1)
    way_out = (
        f"Did you mean {close[0]!r}?"
        if close
        else f"`octavo generate --help` lists all settings; an option of a part stands beside the part's name, in "
        f"{_CHOICE_FORM}."
    )
    return f"There is no setting called {name!r}. {way_out}"


def environment_warnings(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each variable that looks like a setting of Octavo's, which takes none from there."""
    settings = field_sections()
    sentences = []
    for variable in sorted(environment):
        if not variable.startswith("OCTAVO_"):
            continue
        name = variable.removeprefix("OCTAVO_").lower()
        close = name if name in settings else next(iter(difflib.get_close_matches(name, settings, n=1)), None)
        way_out = (
            f"pass {close} as an argument, as the flag --{close.replace('_', '-')}, or in a config file"
            if close
            else "unset it"
        )
        sentences.append(
            f"The environment variable {variable} has no effect: Octavo takes no settings from there; {way_out}."
        )
    return sentences
