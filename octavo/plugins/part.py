"""A plugin that was chosen: found, imported, checked, and given its options."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from octavo.config import PluginChoice
from octavo.errors import OctavoError, PluginBroken, PluginOptionsError, describe, message_of
from octavo.plugins.families import Family
from octavo.plugins.registry import Plugin, Registry

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True)
class Part:
    """A plugin, ready to be made an object of.

    Attributes:
        plugin: What was registered.
        loaded: The class, or an observer's module.
        options: An instance of its `Options`; None when it has none.
    """

    plugin: Plugin
    loaded: Any
    options: Any

    @property
    def keywords(self) -> dict[str, Any]:
        """What its constructor gets as keyword arguments, besides what the family's contract says."""
        return {} if self.options is None else {"options": self.options}

    def keywords_for(self, method: Callable[..., Any]) -> dict[str, Any]:
        """What a method gets besides what the contract says: the options, where it takes them."""
        return self.keywords if takes_options(method) else {}

    def create(self, *arguments: Any) -> Any:
        """Make the object.

        Raises:
            PluginBroken: Its constructor raised something that is not one of Octavo's own errors.
        """
        with self.blamed("when it was made"):
            return self.loaded(*arguments, **self.keywords)

    @contextmanager
    def blamed(self, occasion: str) -> Iterator[None]:
        """Name the plugin in what it raises, unless the error is one of Octavo's own and speaks for itself."""
        try:
            yield
        except (OctavoError, KeyboardInterrupt):
            raise
        # SystemExit and the like too: no part may end the program.
        except BaseException as cause:
            raise PluginBroken(
                f"The {self.plugin.family.label} {self.plugin} raised {type(cause).__name__} {occasion}: "
                f"{message_of(cause)}"
            ) from cause


def takes_options(method: Callable[..., Any]) -> bool:
    """Whether a method that need not has a parameter for its class's options."""
    return "options" in inspect.signature(method).parameters


def choose(registry: Registry, family: Family, choice: PluginChoice) -> Part:
    """Return the part that a config names.

    Raises:
        PluginError: It cannot be had, or does not take the options.
    """
    return load_part(registry, registry.find(family, choice.name), choice.options)


def load_part(registry: Registry, plugin: Plugin, options: dict[str, Any]) -> Part:
    """As `choose`, for a plugin that was found before."""
    loaded = registry.load_plugin(plugin)
    return Part(plugin, loaded, checked_options(f"the {plugin.family.label} {plugin}", loaded, options))


def checked_options(subject: str, loaded: Any, given: Mapping[str, Any]) -> Any:
    """Return an instance of a part's `Options` with the given ones; None for a part that has none.

    Args:
        subject: What sentences call the part.
        loaded: The part.
        given: Options by name.

    Raises:
        PluginOptionsError: It does not take them.
    """
    schema = getattr(loaded, "Options", None)
    if schema is None:
        if given:
            raise PluginOptionsError(f"T{subject[1:]} takes no options, and was given {', '.join(map(repr, given))}.")
        return None
    from pydantic import ValidationError

    names = _option_names(schema)
    if schema.model_config.get("extra") != "allow":
        # Whatever the model's own setting: an option that nobody reads is a mistake.
        for name in given:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                suggestion = f" Did you mean {close[0]!r}?" if close else ""
                raise PluginOptionsError(
                    f"T{subject[1:]} does not take the option {name!r}.{suggestion} It takes: "
                    f"{', '.join(names) or 'none'}."
                )
    try:
        return schema.model_validate(copy.deepcopy(dict(given)))
    except ValidationError as error:
        sentences = [_sentence(fault, subject, _is_secret(schema, fault["loc"])) for fault in error.errors()]
        raise PluginOptionsError(" ".join(sentences)) from None
    except Exception as cause:
        raise PluginBroken(f"T{subject[1:]} raised {describe(cause)} when it checked its options.") from cause


def _option_names(schema: type[BaseModel]) -> list[str]:
    """Return the names that options may be given by, aliases where a field has them."""
    return [name for names in _names_by_field(schema).values() for name in names]


def _names_by_field(schema: type[BaseModel]) -> dict[str, list[str]]:
    from pydantic import AliasChoices, AliasPath

    by_name = schema.model_config.get("populate_by_name") or schema.model_config.get("validate_by_name")
    names_by_field: dict[str, list[str]] = {}
    for name, field in schema.model_fields.items():
        alias = field.validation_alias or field.alias
        choices = alias.choices if isinstance(alias, AliasChoices) else [name if alias is None else alias]
        names = [str(choice.path[0]) if isinstance(choice, AliasPath) else choice for choice in choices]
        names_by_field[name] = [*names, name] if alias is not None and by_name else names
    return names_by_field


def _is_secret(schema: type[BaseModel], location: tuple[int | str, ...]) -> bool:
    """Say whether the option that a fault is about, or something inside of it, is not to be shown."""
    fields = schema.model_fields
    concerned = [
        fields[name] for name, names in _names_by_field(schema).items() if location and location[0] in (name, *names)
    ]
    return any(_has_secret(field) for field in concerned or fields.values())


def _has_secret(field: Any, seen: frozenset[Any] = frozenset()) -> bool:
    if not field.repr or "Secret" in repr(field.annotation):
        return True
    inner_models = [model for model in _models_in(field.annotation) if model not in seen]
    return any(_has_secret(inner, seen | {model}) for model in inner_models for inner in model.model_fields.values())


def _models_in(annotation: Any) -> Iterator[Any]:
    """Yield the pydantic models in a type, those inside of lists, unions and the like included."""
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _sentence(fault: Any, subject: str, is_secret: bool) -> str:
    name = ".".join(map(str, fault["loc"]))
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "missing":
        return f"The option {name!r} of {subject} is missing, and has no default."
    if not name:
        return f"The options of {subject} cannot go together: {message[0].lower()}{message[1:]}."
    # What a schema calls secret must not end in a log.
    value = "not valid" if is_secret else repr(fault["input"])
    return f"The option {name!r} of {subject} is {value}: {message[0].lower()}{message[1:]}."
