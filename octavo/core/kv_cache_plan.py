"""What a KV cache of some size holds, told from its layout alone: nothing is allocated.

memory ── bytes per block ──► number of blocks ── what a request takes ──► longest request, requests at a time
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.core.interfaces.kv_cache_spec import KVCacheSpec
from octavo.core.interfaces.kv_format import KV_FORMATS
from octavo.core.kv_cache_config import (
    SHORTEST_REQUEST,
    KVCacheConfig,
    KVCacheGroup,
    Padding,
    RequestCost,
    bytes_per_block,
    counted,
    format_bytes,
    hit_alignment,
    num_blocks_from_memory,
    num_blocks_in,
    padding_of,
)
from octavo.errors import ConfigError, NotEnoughMemoryError

# The shortest length that concurrency is told for, where requests may be that long. Each next one is twice as long.
FIRST_LENGTH = 512
# More than any machine has: 8 EiB. Sizes from there on are slips.
MORE_THAN_ANY_MEMORY = 1 << 63


@dataclass(frozen=True)
class RequestLimits:
    """How long requests may be, the KV cache left aside.

    Attributes:
        max_position: Tokens in the longest sequence that the model's positions are made for.
        max_model_len: Tokens in the longest request; "auto" for what the positions and the KV cache allow.

    Raises:
        ConfigError: `max_model_len` is not from 2 to `max_position`.
    """

    max_position: int
    max_model_len: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.max_model_len != "auto" and not SHORTEST_REQUEST <= self.max_model_len <= self.max_position:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}; it must be from {SHORTEST_REQUEST} (a prompt token and a new "
                f"one) to {self.max_position}, the longest sequence that the model's positions are made for."
            )

    @property
    def longest(self) -> int:
        return self.max_position if self.max_model_len == "auto" else self.max_model_len

    @property
    def shortest(self) -> int:
        """Tokens in the longest request that the KV cache must hold."""
        return SHORTEST_REQUEST if self.max_model_len == "auto" else self.max_model_len


@dataclass(frozen=True)
class Concurrency:
    """How many requests of one length a KV cache holds at a time, when they share no blocks.

    Attributes:
        num_tokens: The length, prompt and output together.
        blocks_per_request: Blocks that one of them holds at most.
        num_usable_blocks: Blocks that there are for all of them.
    """

    num_tokens: int
    blocks_per_request: int
    num_usable_blocks: int

    @property
    def num_requests(self) -> int:
        return self.num_usable_blocks // self.blocks_per_request

    @property
    def exact(self) -> float:
        """The same as a fraction: 2.5 requests are two, and a third up to its half."""
        return self.num_usable_blocks / self.blocks_per_request


@dataclass(frozen=True)
class GroupPlan:
    """What one KV-cache group takes.

    Attributes:
        group: The layers, and what each of them keeps.
        bytes_per_block: Bytes of a block of the pool, which serves all groups.
        blocks_per_request: Blocks that the longest request holds at most in this group.
        is_bounded: Whether that stops to grow with the request, for blocks are given back.
        padding: What of a block lies idle when this group holds it, for another group fills it with more.
    """

    group: KVCacheGroup
    bytes_per_block: int
    blocks_per_request: int
    is_bounded: bool
    padding: Padding

    @property
    def page_bytes(self) -> int:
        """Bytes of a block in one layer."""
        return self.group.spec.page_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token in all layers of the group, while it is kept."""
        return self.group.spec.bytes_per_token * len(self.group.layers)

    @property
    def unused_bytes_per_block(self) -> int:
        return self.padding.num_bytes

    @property
    def bytes_per_request(self) -> int:
        """Bytes of the blocks that the longest request holds at most in this group."""
        return self.blocks_per_request * self.bytes_per_block


@dataclass(frozen=True)
class SpecPlan:
    """What the groups of one spec take: they differ in their layers only.

    Attributes:
        groups: One at least.
    """

    groups: tuple[GroupPlan, ...]

    @property
    def spec(self) -> KVCacheSpec:
        """What each of the layers keeps."""
        return self.groups[0].group.spec

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of all groups, in the model's order."""
        return tuple(sorted(layer for group in self.groups for layer in group.group.layers))

    @property
    def page_bytes(self) -> int:
        return self.groups[0].page_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of a page that are scales, and what stands between them and the numbers."""
        kept, kv_format = self.spec, KV_FORMATS.get(getattr(self.spec, "dtype", ""))
        if kv_format is None or not kv_format.has_page_scales:
            return 0
        without = kept_in(kept, kv_format.name.removesuffix("_per_token_head"))
        return kept.page_bytes - without.page_bytes

    @property
    def is_bounded(self) -> bool:
        return self.groups[0].is_bounded

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token in all of the layers, while it is kept."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def blocks_per_request(self) -> int:
        """Blocks that the longest request holds at most, in all groups of the spec together."""
        return sum(group.blocks_per_request for group in self.groups)

    @property
    def bytes_per_request(self) -> int:
        return sum(group.bytes_per_request for group in self.groups)


@dataclass(frozen=True)
class CachePlan:
    """What a KV cache holds.

    Attributes:
        cost: What one request takes.
        limits: How long requests may be.
        num_blocks: Blocks in the pool, the null block included.
        available_bytes: What the blocks were cut from, or what they take where their number was given.
    """

    cost: RequestCost
    limits: RequestLimits
    num_blocks: int
    available_bytes: int

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The layout that an engine makes."""
        return KVCacheConfig(self.num_blocks, self.cost.groups)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def unused_bytes(self) -> int:
        """Bytes that are left over, too few for one more block."""
        return self.available_bytes - self.kv_cache_config.total_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token in all groups, while each keeps it."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def lasting_bytes_per_token(self) -> float:
        """Bytes of a token in the groups that keep it for as long as its request lives."""
        return sum(group.bytes_per_token for group in self.groups if not group.is_bounded)

    @property
    def idle_share(self) -> float:
        """Which share of what a request of `max_model_len` tokens holds lies idle."""
        return self.cost.idle_share(self.max_model_len)

    @property
    def hit_alignment(self) -> int:
        """What the length of a prefix hit, in tokens, is a multiple of."""
        return hit_alignment(group.spec for group in self.cost.groups)

    @property
    def groups(self) -> tuple[GroupPlan, ...]:
        """What each group takes, for a request of `max_model_len` tokens."""
        block_bytes = bytes_per_block(self.cost.groups)
        return tuple(
            GroupPlan(group, block_bytes, num_blocks, is_bounded, padding_of(group, self.cost.groups))
            for group, num_blocks, is_bounded in zip(
                self.cost.groups,
                self.cost.num_blocks_by_group(self.max_model_len),
                self.cost.is_bounded_by_group(),
                strict=True,
            )
        )

    @property
    def groups_by_spec(self) -> tuple[SpecPlan, ...]:
        """The same, those of one spec together."""
        by_spec: dict[KVCacheSpec, list[GroupPlan]] = {}
        for group in self.groups:
            by_spec.setdefault(group.group.spec, []).append(group)
        return tuple(SpecPlan(tuple(groups)) for groups in by_spec.values())

    @property
    def longest_request(self) -> int:
        """Tokens in the longest request that the blocks hold, as far as the model's positions go; 0 for none."""
        return self.cost.longest_request(self.num_usable_blocks, self.limits.max_position)

    @property
    def max_model_len(self) -> int:
        """Tokens in the longest request that an engine accepts."""
        return self.longest_request if self.limits.max_model_len == "auto" else self.limits.max_model_len

    def concurrency_at(self, num_tokens: int) -> Concurrency:
        """Say how many requests of `num_tokens` tokens fit at a time."""
        return Concurrency(num_tokens, self.cost.num_blocks(num_tokens), self.num_usable_blocks)

    def concurrency_by_length(self) -> tuple[Concurrency, ...]:
        """Say it for 512, 1024, 2048 ... tokens, for the longest request that fits, and for the longest allowed."""
        lengths = {*_doubling(FIRST_LENGTH, self.limits.longest), self.max_model_len, self.limits.longest}
        return tuple(self.concurrency_at(length) for length in sorted(lengths))


def kept_in(spec: KVCacheSpec, kv_dtype: str) -> KVCacheSpec:
    """Return what a layer would keep in another format; the same where its spec names none."""
    if getattr(spec, "dtype", None) not in KV_FORMATS:
        return spec
    # Each spec that has a dtype is a dataclass with a field of that name.
    with_dtype: Any = spec
    kept: KVCacheSpec = replace(with_dtype, dtype=kv_dtype)
    return kept


def plan_from_memory(available_bytes: int, cost: RequestCost, limits: RequestLimits) -> CachePlan:
    """Return what a KV cache of so many bytes holds.

    Raises:
        NotEnoughMemoryError: Not one request of the length that has to fit. The message has the bytes that would do.
        ConfigError: No machine has so many bytes.
    """
    _check_plausible(available_bytes)
    try:
        num_blocks = num_blocks_from_memory(available_bytes, cost, limits.shortest)
    except NotEnoughMemoryError as error:
        fits = error.max_model_len_that_fits
        raise NotEnoughMemoryError(
            _too_small(available_bytes, cost, limits, fits), max_model_len_that_fits=fits
        ) from None
    return CachePlan(cost, limits, num_blocks, available_bytes)


def plan_from_blocks(num_blocks: int, cost: RequestCost, limits: RequestLimits) -> CachePlan:
    """Return what a KV cache of so many blocks holds, the null block included.

    Raises:
        NotEnoughMemoryError: Not one request, and no length was asked for.
        ConfigError: No machine has room for so many blocks.
    """
    total_bytes = num_blocks * bytes_per_block(cost.groups)
    _check_plausible(total_bytes)
    plan = CachePlan(cost, limits, num_blocks, total_bytes)
    if plan.max_model_len:
        return plan
    needed = cost.num_blocks(SHORTEST_REQUEST)
    raise NotEnoughMemoryError(
        f"A request of {SHORTEST_REQUEST} tokens takes {counted(needed, 'block')} beside the null block, and "
        f"num_kv_blocks is {num_blocks}, the null block included. Raise it to {needed + 1} or more.",
        max_model_len_that_fits=0,
    )


def _doubling(first: int, end: int) -> Iterator[int]:
    while first < end:
        yield first
        first *= 2


def _check_plausible(num_bytes: int) -> None:
    if num_bytes >= MORE_THAN_ANY_MEMORY:
        raise ConfigError(
            f"The KV cache would have {num_bytes} bytes, which is more than any machine has. Give a smaller size."
        )


def _too_small(available_bytes: int, cost: RequestCost, limits: RequestLimits, fits: int) -> str:
    block_bytes, num_blocks = bytes_per_block(cost.groups), num_blocks_in(available_bytes, cost.groups)
    needed = cost.num_bytes(limits.shortest) + block_bytes
    way_out = f"{'set' if fits else 'lower'} {cost.ways_to_need_less(fits)}"
    return (
        f"A request of {limits.shortest} tokens takes {counted(cost.num_blocks(limits.shortest), 'block')} of "
        f"{_bytes(block_bytes)} beside the null block, and there is room for {num_blocks} in "
        f"{_bytes(available_bytes)}, the null block included. Give the KV cache {_bytes(needed)} or more, or {way_out}."
    )


def _bytes(count: int) -> str:
    """Return a size in bytes, and as people read it where that is another text."""
    return format_bytes(count) if count < 1024 else f"{count} bytes ({format_bytes(count)})"
