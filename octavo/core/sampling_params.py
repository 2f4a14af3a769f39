"""How one request samples and when it stops. Checked when made, so that nothing wrong reaches the engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Integral, Real
from typing import Any

from octavo.errors import InvalidRequestError

# Limits are by cost: each of these sizes work or memory that one request makes the engine do.
MAX_N = 64
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
# For what only has to be a number: it fits whatever the engine and a socket keep it in.
MAX_COUNT = 2**63 - 1

# Below this, dividing logits by the temperature overflows float32; the result is the greedy one anyway.
GREEDY_TEMPERATURE = 1e-5


_WHOLE_NUMBERS = {
    "n": (1, MAX_N),
    "top_k": (-1, MAX_COUNT),
    "seed": (0, MAX_SEED),
    "max_tokens": (1, MAX_COUNT),
    "min_tokens": (0, MAX_COUNT),
    "logprobs": (0, MAX_LOGPROBS),
}
_OPTIONAL = ("seed", "max_tokens", "logprobs")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        n: Choices to generate for the prompt, each with its own noise. 1 to 64.
        temperature: Divides the logits. 0, and anything below 1e-5, takes the most likely token; among equals the
            lowest id.
        top_p: Keep the smallest set of most likely tokens whose probabilities reach this sum. Above 0, up to 1.
        top_k: Keep this many most likely tokens; 0 or -1 keeps all.
        min_p: Keep tokens at least this fraction as likely as the likeliest. 0 to 1.
        seed: Makes a request's tokens repeat, whatever else the engine does. None derives one from the engine's
            seed and the order of arrival.
        max_tokens: Tokens to generate at most; None for as many as `max_model_len` leaves room for.
        min_tokens: Before this many tokens, neither end-of-sequence, nor stop ids, nor stop strings end the request.
        stop: Strings that end the text, which then does not contain them (see `include_stop_str_in_output`).
        stop_token_ids: Ids that end the request, besides the model's own end-of-sequence ids.
        ignore_eos: Go on after the model's end-of-sequence ids. `stop_token_ids` still stop.
        logprobs: Return the log-probability of each token, and of this many most likely ones. 0 to 20.
        skip_reading_prefix_cache: Compute the whole prompt, even where cached blocks would do. What is computed is
            still cached for others.
        include_stop_str_in_output: Keep the matched stop string at the end of the text.
        skip_special_tokens: Leave special tokens out of the text.
        detokenize: Make text. Without it outputs carry token ids only, and stop strings are refused.

    Raises:
        InvalidRequestError: A value is of the wrong type or out of range; the message names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_reading_prefix_cache: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name, (smallest, largest) in _WHOLE_NUMBERS.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                self._set(name, _whole(name, getattr(self, name), smallest, largest))
        self._set("temperature", _real("temperature", self.temperature, low=0.0))
        self._set("top_p", _real("top_p", self.top_p, above=0.0, high=1.0))
        self._set("min_p", _real("min_p", self.min_p, low=0.0, high=1.0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}; lower one.",
                parameter="min_tokens",
            )
        for name in (
            "ignore_eos",
            "skip_reading_prefix_cache",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "detokenize",
        ):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")
        # Tuples, so that a caller's list can change without changing a request that is under way.
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                "stop strings need text, and detokenize is False; use stop_token_ids, or set detokenize=True.",
                parameter="stop",
            )

    def _set(self, name: str, value: Any) -> None:
        # Only while it is made: afterwards an instance is frozen, and may be shared by requests.
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    wanted = "a string or a list of strings"
    strings = (stop,) if isinstance(stop, str) else _as_tuple("stop", stop, wanted, MAX_STOP_STRINGS)
    if len(strings) > MAX_STOP_STRINGS:
        raise _refusal("stop", f"at most {MAX_STOP_STRINGS} strings", "more")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise _wrong("stop", string, "strings that are not empty")
        if len(string) > MAX_STOP_STRING_CHARS:
            raise _refusal("stop", f"strings of at most {MAX_STOP_STRING_CHARS} characters", f"one of {len(string)}")
        if has_lone_surrogate(string):
            raise _wrong("stop", string, "text without lone surrogates")
    return strings


def has_lone_surrogate(text: str) -> bool:
    """Say whether text holds half of a surrogate pair, which no encoding can write."""
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def _stop_token_ids(token_ids: Sequence[int] | None) -> tuple[int, ...]:
    ids = _as_tuple("stop_token_ids", token_ids, "a list of token ids", MAX_STOP_TOKEN_IDS)
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise _refusal("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids", "more")
    for token_id in ids:
        if not _is_whole(token_id, 0, MAX_TOKEN_ID):
            raise _refusal(
                "stop_token_ids", f"a list of whole numbers from 0 to {MAX_TOKEN_ID}", f"one with {_shown(token_id)}"
            )
    return tuple(int(token_id) for token_id in ids)


def _as_tuple(name: str, values: Any, wanted: str, most: int) -> tuple[Any, ...]:
    """Return the values, one too many where there are more than `most`: an iterable may have no end."""
    if values is None:
        return ()
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise _wrong(name, values, wanted)
    return tuple(islice(values, most + 1))


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if not _is_whole(value, low, high):
        raise _wrong(name, value, f"a whole number from {low} to {high}")
    return int(value)


def _is_whole(value: Any, low: int, high: int) -> bool:
    # Of any type, such as numpy's. bool is an int to Python; n=True is a mistake all the same.
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high


def _real(
    name: str, value: Any, *, low: float | None = None, above: float | None = None, high: float | None = None
) -> float:
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_real else math.nan
    except OverflowError:
        # A whole number larger than any float.
        number = math.inf
    # Positive form: every comparison with NaN is false, so NaN fails here.
    inside = (
        math.isfinite(number)
        and (low is None or number >= low)
        and (above is None or number > above)
        and (high is None or number <= high)
    )
    if not inside:
        limits = [f"from {low:g}" if low is not None else f"above {above:g}"]
        if high is not None:
            limits.append(f"up to {high:g}")
        raise _wrong(name, value, "a finite number " + " ".join(limits))
    return number


def _wrong(name: str, value: Any, wanted: str) -> InvalidRequestError:
    return _refusal(name, wanted, _shown(value))


def _shown(value: Any) -> str:
    try:
        return repr(value)[:200]
    except ValueError:
        # Python refuses to write out thousands of digits.
        return "a number of thousands of digits"


def _refusal(name: str, wanted: str, found: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {wanted}, not {found}.", parameter=name)
