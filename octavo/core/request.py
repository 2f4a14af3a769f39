"""A request inside the engine: its tokens, and what it needs to know of itself. Only the scheduler reads it."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence

from octavo.core.outputs import FinishReason
from octavo.core.prefix_hash import ExtraKey
from octavo.core.sampling_params import SamplingParams

NO_ROW = -1

# Name, and how often the weights of that name have changed.
AdapterKey = tuple[str, int]


class RequestStatus(enum.Enum):
    """Where a request stands. A preempted one waits as well, and has tokens of its own already."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One choice of what a caller asked for.

    Attributes:
        request_id: Unique among the requests that are under way.
        token_ids: The prompt, then what was generated, int32. They survive a preemption.
        num_prompt_tokens: How many of them are the prompt.
        max_total_tokens: The request ends when it has this many tokens.
        arrival: Position in the order of arrival; unique for the engine's life.
        choice: Which of the n choices; part of what the sampling noise is keyed by.
        seed: The other part.
        block_keys: Prefix-cache keys of its first full blocks, as far as they were needed.
        findable_prefixes: Lengths, in tokens, of its beginnings that stay findable behind it, ascending. Only
            KVCacheManager reads it. None, before it is admitted, for all.
        row: Its place in all per-row columns and tables while it holds blocks, else NO_ROW.
        num_cached_tokens: Prompt tokens that the prefix cache had when it was first admitted; None before.
        num_hit_tokens: Tokens that it found in the prefix cache when it was last admitted.
        distrusts_prefix_cache: Whether it is computed from nothing, because what it found may have been wrong.
        num_computed_before_preemption: Tokens whose keys and values the latest preemption threw away.
    """

    __slots__ = (
        "__weakref__",
        "arrival",
        "block_keys",
        "choice",
        "distrusts_prefix_cache",
        "eos_token_ids",
        "findable_prefixes",
        "first_block_extra",
        "hit_memo",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_before_preemption",
        "num_hit_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "priority",
        "request_id",
        "row",
        "seed",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        arrival: int = 0,
        choice: int = 0,
        seed: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: AdapterKey | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.request_id = request_id
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.params = params
        room = max_model_len - self.num_prompt_tokens
        self.max_total_tokens = self.num_prompt_tokens + min(room, params.max_tokens or room)
        self.arrival = arrival
        self.choice = choice
        self.seed = seed
        self.priority = priority
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.first_block_extra = _first_block_extra(cache_salt, adapter)
        self.block_keys: list[bytes] = []
        self.findable_prefixes: list[int] | None = None
        # (pool generation, number of tokens, hit) of the last look-up; only KVCacheManager reads it.
        self.hit_memo: tuple[int, int, object] | None = None
        self.row = NO_ROW
        self.status = RequestStatus.WAITING
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.distrusts_prefix_cache = False
        self.num_computed_before_preemption = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def append_token(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Take in a generated token; return why the request ends with it, and the stop id that ended it.

        End of sequence goes before the caller's stop ids, and both before the length. `min_tokens` plays no part
        here: until it is reached the sampler does not choose an id that would stop.
        """
        self.token_ids.append(token_id)
        return self.end_with(token_id)

    def end_with(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Return why the request ends with the token that it has last, and the stop id that ended it."""
        if token_id in self.eos_token_ids:
            return "stop", None
        if token_id in self.stop_token_ids:
            return "stop", token_id
        if len(self.token_ids) >= self.max_total_tokens:
            return "length", None
        return None, None


def _first_block_extra(cache_salt: str | None, adapter: AdapterKey | None) -> tuple[ExtraKey, ...]:
    """Return what else than tokens the first block stands for; the chain of keys carries it on."""
    salt: tuple[ExtraKey, ...] = () if cache_salt is None else (("salt", cache_salt),)
    return salt if adapter is None else (*salt, ("lora", *adapter))
