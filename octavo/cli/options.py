"""Flags for every field of the config, made from the config itself."""

from __future__ import annotations

import functools
import inspect
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from octavo.config import CacheConfig, EngineConfig, PluginChoice, SchedulerConfig, field_sections
from octavo.errors import ConfigError


def with_engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command a flag for each config field and `--config`; it gets the result as `config`."""

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> Any:
        path = arguments.pop("config_file")
        given = {name: arguments.pop(name) for name in field_sections()}
        return command(config=make_config(path, {k: v for k, v in given.items() if v is not None}), **arguments)

    own = [p for p in inspect.signature(command).parameters.values() if p.name != "config"]
    wrapped.__signature__ = inspect.Signature([*own, _config_option(), *_field_options()])  # type: ignore[attr-defined]
    # typer reads annotations from here before it looks at the signature.
    wrapped.__annotations__ = {p.name: p.annotation for p in wrapped.__signature__.parameters.values()}  # type: ignore[attr-defined]
    return wrapped


def make_config(path: Path | None, given: dict[str, Any]) -> EngineConfig:
    """Return the file's config, or the defaults, with the given flags on top."""
    flags = {name: _parse(name, value) for name, value in given.items()}
    config = EngineConfig() if path is None else EngineConfig.from_toml(path)
    return config.with_settings(**flags).with_sources({name: f"flag {flag_of(name)}" for name in flags})


def with_model(config: EngineConfig, model_argument: str | None) -> EngineConfig:
    """Return the config with the model that a command was given as an argument, if it was.

    Raises:
        ConfigError: The config names one, too.
    """
    if model_argument is None:
        return config
    if config.model is not None:
        raise ConfigError(f"The model is named twice: {model_argument!r} and {config.model!r}.")
    return config.with_settings(model=model_argument)


def flag_of(name: str) -> str:
    """Return the flag of a setting, such as "--block-size"."""
    return "--" + name.replace("_", "-")


def _config_option() -> inspect.Parameter:
    option = typer.Option("--config", help="A TOML file with settings; flags override it.")
    return _parameter("config_file", Annotated[Path | None, option])


def _field_options() -> list[inspect.Parameter]:
    parameters = []
    for name, section in field_sections().items():
        field = _field(name, section)
        default = field.get_default(call_default_factory=True)
        shown = str(default) if default or type(default) in (bool, int, float) else "none"
        flag = flag_of(name)
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if field.annotation is bool else flag,
            help=f"{' '.join((field.description or '').split())} [default: {shown}]",
            show_default=False,
        )
        parameters.append(_parameter(name, Annotated[_flag_type(field.annotation) | None, option]))
    return parameters


def _field(name: str, section: str | None) -> FieldInfo:
    sections: dict[str | None, type[BaseModel]] = {
        None: EngineConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
    }
    return sections[section].model_fields[name]


def _flag_type(annotation: Any) -> Any:
    """Return what the command line parses a field as; the config checks it again."""
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return members[0] if len(members) == 1 and members[0] in (int, float, str) else str
    return annotation if annotation in (int, float, bool, str) else str


def _parse(name: str, value: Any) -> Any:
    annotation = _field(name, field_sections()[name]).annotation
    chooses_plugins = annotation is PluginChoice or get_origin(annotation) in (dict, tuple)
    if isinstance(value, str) and chooses_plugins and value.strip().startswith(("{", "[")):
        return _parse_toml(name, value)
    if isinstance(value, str) and get_origin(annotation) in (dict, tuple) and "{" in value:
        # A list or a table whose brackets were left out, for some of its parts have options.
        return _parse_toml(name, f"[{value}]" if get_origin(annotation) is tuple else f"{{ {value} }}")
    if isinstance(value, str) and get_origin(annotation) is tuple:
        return [chosen.strip() for chosen in value.split(",")]
    if isinstance(value, str) and get_origin(annotation) is dict:
        pairs = [pair.partition("=") for pair in value.split(",")]
        if not all(key.strip() and chosen.strip() for key, _, chosen in pairs):
            raise ConfigError(
                f"{flag_of(name)} is {value!r}; it must be pairs such as full_attention=my_part, with commas."
            )
        return {key.strip(): chosen.strip() for key, _, chosen in pairs}
    if isinstance(value, str) and any(get_origin(member) is tuple for member in get_args(annotation)):
        return [_number_or_text(number) for number in value.split(",")]
    takes_number_or_word = any(get_origin(member) is Literal for member in get_args(annotation)) and int in get_args(
        annotation
    )
    return _number_or_text(value) if isinstance(value, str) and takes_number_or_word else value


def _number_or_text(text: str) -> int | str:
    """Return a whole number; what is none stays as it is, for the config to refuse."""
    try:
        return int(text)
    except ValueError:
        return text


def _parse_toml(name: str, text: str) -> Any:
    """Read what a config file would have to the right of the equals sign: how a flag gives a part its options."""
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError as cause:
        example = 'name = "my_part", options = { size = 64 }'
        raise ConfigError(
            f"{flag_of(name)} cannot be read as TOML: {cause}. A part with options is written {{ {example} }}."
        ) from None


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
