"""Renders a model's Jinja template for conversations, in a sandbox: a template comes with the model, from strangers.

What templates may use is what transformers offers them. Its own renderer takes a second to import; this takes
a twentieth of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import InvalidRequestError

# A rendered conversation has no more characters, and nothing in between more items.
MAX_CHARS = 10_000_000
_SMALL = 1000


class ChatTemplate:
    """A compiled template.

    Raises:
        InvalidRequestError: The template is not valid Jinja, so no conversation can be rendered.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`. `special_tokens` are variables that templates write out, such as bos_token."""
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            # Constants are not worked out while compiling, where the sandbox does not look.
            optimized=False,
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        # Beside its own errors, Jinja lets through what Python makes of code that is too deep or too large.
        except Exception as error:
            raise InvalidRequestError(
                f"The model's chat template is not valid Jinja: {error}. Write the prompt out as text instead.",
                parameter="messages",
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the conversation as text, up to where the assistant's answer begins.

        Raises:
            InvalidRequestError: A message is malformed, or the template refuses the conversation.
        """
        checked = _checked(messages)
        try:
            pieces = self._template.generate(
                messages=checked, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
            return _joined(pieces)
        # A template is a program; what it trips over in these messages may be of any kind.
        except Exception as error:
            raise InvalidRequestError(
                f"The model's chat template does not accept these messages: {error}", parameter="messages"
            ) from error


def _checked(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages is a {type(messages).__name__}; it has to be a list of messages, each with role and content.",
            parameter="messages",
        )
    if not messages:
        raise InvalidRequestError("messages is empty; a conversation needs at least one message.", parameter="messages")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"messages[{index}] is a {type(message).__name__}; it has to be an object with 'role' and 'content'.",
            parameter="messages",
        )
    for key in ("role", "content"):
        if key not in message:
            raise InvalidRequestError(f"messages[{index}] has no {key!r}.", parameter="messages")
    for key, value in message.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidRequestError(
                f"messages[{index}][{key!r}] is a {type(value).__name__}; only text can be served.",
                parameter="messages",
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"messages[{index}][{key!r}] holds half of a surrogate pair at character {error.start}, which is not "
                "text. Decode it again from its source.",
                parameter="messages",
            ) from error
    # Plain strings: a subclass could bring methods into the sandbox.
    return {str.__str__(key): str.__str__(value) for key, value in message.items()}


def _joined(pieces: Iterable[str]) -> str:
    """Return the pieces as one text, unless that gets out of hand."""
    kept, num_chars = [], 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_CHARS:
            raise ValueError(f"it writes more than {MAX_CHARS} characters")
        kept.append(piece)
    return "".join(kept)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses the two operators with which a short template makes something huge."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise ValueError(f"it raises numbers beyond {_SMALL}")
        for factor, other in ((left, right), (right, left)):
            if isinstance(factor, Sized) and isinstance(other, int) and len(factor) * other > MAX_CHARS:
                raise ValueError(f"it repeats something to more than {MAX_CHARS} items")
        return super().call_binop(context, operator, left, right)


def _is_small(number: Any) -> bool:
    return isinstance(number, (int, float)) and abs(number) <= _SMALL


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; here it only wraps text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would end up in the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
