"""Attention backends by name, with options: "flash_attn+provider=torch_gather"."""

from __future__ import annotations

import json
from typing import Any

from octavo.config import PluginChoice
from octavo.core.interfaces.attention import AttentionSpec
from octavo.plugins.families import ATTENTION_BACKENDS
from octavo.plugins.part import Part, choose
from octavo.plugins.registry import scan
from octavo.selection.backends import reasons_against


def choice_of(text: str) -> PluginChoice:
    """Return the choice that a text stands for: a name, and options behind it, each with a "+" before it.

    An option's value is JSON where it can be read so, and else text.
    """
    name, *pairs = text.split("+")
    options = {}
    for pair in pairs:
        option, _, value = pair.partition("=")
        options[option] = _value_of(value)
    return PluginChoice(name, options)


def part_of(text: str) -> Part:
    """Return the backend that a text stands for, and its options, checked.

    Raises:
        PluginError: It cannot be had, or does not take the options.
    """
    return choose(scan(), ATTENTION_BACKENDS, choice_of(text))


def reasons_of(part: Part, spec: AttentionSpec) -> tuple[str, ...]:
    """Return why a backend, with its options, cannot serve a layer."""
    return reasons_against(part, [spec])


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
