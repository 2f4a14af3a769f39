"""The work that is measured: prompts as token ids, and how many tokens to generate greedily for each.

The named workloads are the same numbers on every machine, so that figures of different engines can be compared.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable
from dataclasses import dataclass

from octavo.errors import ConfigError

# Ids of the named workloads, from one to below the other: none of the special ones that many vocabularies begin with.
FIRST_TOKEN_ID = 100
END_OF_TOKEN_IDS = 40_000
# What a workload of the user's own is called.
CUSTOM = "custom"


@dataclass(frozen=True)
class Workload:
    """Requests that all arrive at once.

    Attributes:
        name: What it is called in a report.
        prompts: Token ids of each request.
        output_len: Tokens to generate for each of them, whatever ends them otherwise.
    """

    name: str
    prompts: tuple[list[int], ...]
    output_len: int

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        """Tokens to generate for all prompts together."""
        return len(self.prompts) * self.output_len

    @property
    def max_request_len(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(prompt) for prompt in self.prompts) + self.output_len


def named_workload(name: str) -> Workload:
    """Return one of `WORKLOAD_NAMES`.

    Raises:
        ConfigError: There is no workload of that name.
    """
    if name not in _MAKERS:
        raise ConfigError(_not_found(name))
    prompts, output_len = _MAKERS[name](random.Random(0))
    return Workload(name, tuple(prompts), output_len)


def custom_workload(
    num_prompts: int, input_len: int, output_len: int, *, vocab_size: int, seed: int, name: str = CUSTOM
) -> Workload:
    """Return prompts of one length, whose ids are drawn from the whole vocabulary. The same seed draws the same ids."""
    rng = random.Random(seed)
    prompts = tuple([rng.randrange(vocab_size) for _ in range(input_len)] for _ in range(num_prompts))
    return Workload(name, prompts, output_len)


def _not_found(name: str) -> str:
    if name == CUSTOM:
        return (
            f"{CUSTOM!r} is no name of a workload that there is; a workload of your own is made with --num-prompts, "
            "--input-len and --output-len."
        )
    close = difflib.get_close_matches(name, WORKLOAD_NAMES, n=1)
    suggestion = f" Did you mean {close[0]!r}?" if close else ""
    return f"There is no workload called {name!r}.{suggestion} There are: {', '.join(WORKLOAD_NAMES)}."


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN_ID, END_OF_TOKEN_IDS) for _ in range(count)]


def _single(rng: random.Random) -> tuple[list[list[int]], int]:
    return [_ids(rng, 128)], 128


def _batch(rng: random.Random) -> tuple[list[list[int]], int]:
    return [_ids(rng, rng.randrange(32, 512)) for _ in range(64)], 128


def _prefix(rng: random.Random) -> tuple[list[list[int]], int]:
    shared = _ids(rng, 1024)
    return [shared + _ids(rng, 32) for _ in range(64)], 32


def _long(rng: random.Random) -> tuple[list[list[int]], int]:
    return [_ids(rng, 4096) for _ in range(4)], 64


_MAKERS: dict[str, Callable[[random.Random], tuple[list[list[int]], int]]] = {
    "single": _single,
    "batch": _batch,
    "prefix": _prefix,
    "long": _long,
}
WORKLOAD_NAMES = tuple(_MAKERS)
