"""What callers may pass as a prompt, and what the engine gets of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from octavo.core.interfaces import Tokenizer
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError


class TextPrompt(TypedDict, total=False):
    """A prompt as text, with what goes along."""

    prompt: str
    request_id: str
    cache_salt: str
    priority: int


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids, with what goes along."""

    prompt_token_ids: list[int]
    request_id: str
    cache_salt: str
    priority: int


Messages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | TextPrompt | TokensPrompt

_KEYS = ("prompt", "prompt_token_ids", "request_id", "cache_salt", "priority")


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt as the engine takes it.

    Attributes:
        text: As it was given; None when it was given as ids.
        request_id: None to have one made.
    """

    text: str | None
    token_ids: list[int]
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int = 0


def as_prompt_list(prompts: Any) -> list[Any]:
    """Return the prompts one by one, whether one was given or a list. A list of whole numbers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts must be a prompt or a list of them, not {prompts!r:.200}.", parameter="prompt"
        )
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [prompts]
    return list(prompts)


def as_conversation_list(messages: Any) -> list[Any]:
    """Return the conversations one by one, whether one was given, as a list of messages, or a list of them."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if is_list and messages and not isinstance(messages[0], Mapping):
        return as_prompt_list(messages)
    # Also what is no conversation at all: the chat template says what is wrong with it.
    return [messages]


def as_params_list(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """Return one SamplingParams for each prompt."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise InvalidRequestError(
            f"sampling_params must be a SamplingParams, or a list with one for each prompt, not {params!r:.200}.",
            parameter="sampling_params",
        )
    if len(params) != num_prompts:
        raise InvalidRequestError(
            f"There are {num_prompts} prompts and {len(params)} SamplingParams; pass one for all, or one for each.",
            parameter="sampling_params",
        )
    return list(params)


def parse_prompt(prompt: Any, tokenizer: Tokenizer | None) -> ParsedPrompt:
    """Turn a prompt into token ids.

    Raises:
        InvalidRequestError: It is none of the forms that a prompt may have, or text that cannot be tokenised here.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, _encode(prompt, tokenizer))
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in _KEYS]
        if unknown:
            hint = " Messages go to chat." if unknown[0] in ("role", "content") else ""
            raise InvalidRequestError(
                f"A prompt has no key {unknown[0]!r}; there are: {', '.join(_KEYS)}.{hint}", parameter=str(unknown[0])
            )
        if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise InvalidRequestError(
                "A prompt given as a dict has either 'prompt' or 'prompt_token_ids'.", parameter="prompt"
            )
        extras = {key: prompt[key] for key in ("request_id", "cache_salt", "priority") if key in prompt}
        if "prompt" in prompt:
            return ParsedPrompt(prompt["prompt"], _encode(prompt["prompt"], tokenizer), **extras)
        return ParsedPrompt(None, _ids(prompt["prompt_token_ids"]), **extras)
    return ParsedPrompt(None, _ids(prompt))


def _encode(text: Any, tokenizer: Tokenizer | None) -> list[int]:
    if not isinstance(text, str):
        raise InvalidRequestError(f"A prompt's text must be a str, not {text!r:.200}.", parameter="prompt")
    if not text:
        raise InvalidRequestError("The prompt is empty; it needs at least one token.", parameter="prompt")
    if tokenizer is None:
        raise InvalidRequestError("The model has no tokenizer; pass prompt_token_ids.", parameter="prompt")
    return tokenizer.encode(text)


def _ids(token_ids: Any) -> list[int]:
    if isinstance(token_ids, (str, bytes, Mapping)) or not isinstance(token_ids, Sequence):
        raise InvalidRequestError(
            f"A prompt must be text, a list of token ids, or a dict with one of them, not {token_ids!r:.200}.",
            parameter="prompt",
        )
    return list(token_ids)
