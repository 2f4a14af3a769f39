"""How the KV cache is laid out and how large it is: from what layers keep and the memory there is, to blocks.

    layers ── pages of one size ──► equal specs ── equally many layers ──► groups ── memory ──► number of blocks

A KV-cache group is a set of layers that share block tables. All groups take their blocks from one pool, and their
layers lie in the same bytes: a block id belongs to one group at a time.

    block 7   │ page of slot 0 │ page of slot 1 │ page of slot 2 │
    group 0       layer 0          layer 1          layer 2           a block costs as many pages as the largest
    group 1       layer 3          layer 4          (idle)            group has layers, whichever group holds it
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from octavo.core.interfaces.kv_cache_manager import SingleTypeKVCacheManager
from octavo.core.interfaces.kv_cache_spec import KVCacheSpec
from octavo.errors import ConfigError, NotEnoughMemoryError

# Tokens: one of the prompt, and a new one.
SHORTEST_REQUEST = 2
# Tokens: longer than any request will ever be.
_ENDLESS_REQUEST = 1 << 40
# The share of the KV cache from which on it is worth a warning that nothing is ever written to it.
WORTH_A_WARNING = 0.05


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share block tables.

    Attributes:
        spec: What each of them keeps.
        layers: Their numbers, as the model counts its attention layers.
    """

    spec: KVCacheSpec
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KVCacheConfig:
    """The layout of the KV cache.

    Attributes:
        num_blocks: Blocks in the pool, the null block included.
        groups: The KV-cache groups, by group id.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in all layers together."""
        return bytes_per_block(self.groups)

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def make_groups(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Sort layers into groups, those of one spec after those of another, by the first layer that has it.

    Args:
        specs: What each layer keeps. Where pages differ in size, groups get larger blocks of tokens than these say, so
            that their pages are as large as the largest; what is no whole multiple is padded.

    Raises:
        ConfigError: There is no layer.
    """
    if not specs:
        raise ConfigError("The model has no attention layer, so there is nothing to keep in a KV cache.")
    page_bytes = max(spec.page_bytes for spec in specs)
    layers_of: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_of.setdefault(_with_page_of(spec, page_bytes), []).append(layer)
    most = _most_layers_in_group([len(layers) for layers in layers_of.values()])
    groups: list[KVCacheGroup] = []
    for spec, layers in layers_of.items():
        num_groups = -(-len(layers) // most)
        # Neighbours go to different groups, so that the groups' sizes differ by one at most.
        groups += [KVCacheGroup(spec, tuple(layers[first::num_groups])) for first in range(num_groups)]
    return tuple(groups)


def _with_page_of(spec: KVCacheSpec, page_bytes: int) -> KVCacheSpec:
    """Return a spec with as many more tokens in a block as make its page that large; itself where none do."""
    larger = spec.with_block_size(spec.block_size * (page_bytes // spec.page_bytes))
    return larger if larger.page_bytes == page_bytes else spec


def _most_layers_in_group(num_layers_by_spec: Sequence[int]) -> int:
    """Return how many layers a group has at most, when so many layers keep the same as each other.

    The smallest number wastes nothing but in the last group of a spec. Where the largest is hardly larger, one group a
    spec with some idle pages is cheaper than twice as many groups.
    """
    smallest, largest = min(num_layers_by_spec), max(num_layers_by_spec)
    return largest if largest < 1.5 * smallest else smallest


def bytes_per_block(groups: Sequence[KVCacheGroup]) -> int:
    """Return the bytes that one block takes, whichever group holds it: a page in each slot for a layer."""
    return page_bytes(groups) * num_slots(groups)


def page_bytes(groups: Sequence[KVCacheGroup]) -> int:
    """Return the bytes of a block in one slot: those of the largest page."""
    return max(group.spec.page_bytes for group in groups)


def num_slots(groups: Sequence[KVCacheGroup]) -> int:
    """Return how many layers have a place in a block: as many as the largest group has."""
    return max(len(group.layers) for group in groups)


@dataclass(frozen=True)
class Padding:
    """What of a block lies idle while one group holds it.

    Attributes:
        num_slots: Slots for which the group has no layer.
        bytes_per_page: Bytes by which each of its pages is shorter than the largest.
        num_bytes: Bytes of both together.
    """

    num_slots: int
    bytes_per_page: int
    num_bytes: int


def padding_of(group: KVCacheGroup, groups: Sequence[KVCacheGroup]) -> Padding:
    """Return what lies idle in the blocks of one of the groups."""
    used_bytes = group.spec.page_bytes * len(group.layers)
    return Padding(
        num_slots(groups) - len(group.layers),
        page_bytes(groups) - group.spec.page_bytes,
        bytes_per_block(groups) - used_bytes,
    )


def describe_groups(groups: Sequence[KVCacheGroup]) -> str:
    """Return the groups as people write them, such as "5 groups of sliding_window (3 layers each)"."""
    sizes_of: dict[KVCacheSpec, list[int]] = {}
    for group in groups:
        sizes_of.setdefault(group.spec, []).append(len(group.layers))
    return ", ".join(
        f"{counted(len(sizes), 'group')} of {spec.kind} ({describe_sizes(sizes)}, blocks of "
        f"{counted(spec.block_size, 'token')})"
        for spec, sizes in sizes_of.items()
    )


def describe_sizes(num_layers_by_group: Sequence[int]) -> str:
    """Return how many layers groups have: "3 layers", "3 layers each", "3 or 4 layers each"."""
    smallest, largest = min(num_layers_by_group), max(num_layers_by_group)
    shown = counted(largest, "layer") if smallest == largest else f"{smallest} or {largest} layers"
    return shown if len(num_layers_by_group) == 1 else f"{shown} each"


def num_blocks_in(available_bytes: int, groups: Sequence[KVCacheGroup]) -> int:
    """Return how many blocks fit into `available_bytes`, the null block included."""
    return available_bytes // bytes_per_block(groups)


def hit_alignment(specs: Iterable[KVCacheSpec]) -> int:
    """Return what the length of a prefix hit, in tokens, is a multiple of: whole blocks of every group."""
    return math.lcm(*(spec.block_size for spec in specs))


def most_blocks_by_group(
    managers: Sequence[type[SingleTypeKVCacheManager]],
    specs: Sequence[KVCacheSpec],
    num_tokens: int,
    max_tokens_in_flight: int,
    drafter_groups: Collection[int] = (),
) -> list[int]:
    """Return the most blocks that a request of up to `num_tokens` tokens holds at a time, for each group.

    Start-up sizing and admission both come here, so they cannot disagree.

    Args:
        managers: Each group's manager class.
        specs: What each group keeps.
        num_tokens: Tokens in the longest such request.
        max_tokens_in_flight: New tokens that a request may have in a step.
        drafter_groups: Groups in which a hit ends a block earlier; see `KVCacheCoordinator`.
    """
    alignment = hit_alignment(specs)
    # A block is given back only once the last possible hit, which ends at a multiple of the alignment, does not need it
    # either: to the managers it is as if what lies behind that were in flight.
    behind_hit = [alignment - 1 if alignment != spec.block_size else 0 for spec in specs]
    for group_id in drafter_groups:
        behind_hit[group_id] += specs[group_id].block_size
    return [
        manager.max_blocks_per_request(spec, num_tokens, max_tokens_in_flight + num_behind)
        for manager, spec, num_behind in zip(managers, specs, behind_hit, strict=True)
    ]


@dataclass(frozen=True)
class RequestCost:
    """What one request takes at most, as the managers themselves count it.

    Args:
        groups: The KV-cache groups.
        managers: Each group's manager class.
        max_tokens_in_flight: New tokens that a request may have in a step.
    """

    groups: tuple[KVCacheGroup, ...]
    managers: tuple[type[SingleTypeKVCacheManager], ...]
    max_tokens_in_flight: int

    def num_blocks(self, max_model_len: int) -> int:
        """Return the most blocks that a request of up to `max_model_len` tokens holds at a time."""
        return sum(self.num_blocks_by_group(max_model_len))

    def num_blocks_by_group(self, max_model_len: int) -> list[int]:
        """Return the same for each group."""
        specs = [group.spec for group in self.groups]
        return most_blocks_by_group(self.managers, specs, max_model_len, self.max_tokens_in_flight)

    def num_bytes(self, max_model_len: int) -> int:
        """Return the bytes of those blocks."""
        return self.num_blocks(max_model_len) * bytes_per_block(self.groups)

    def is_bounded_by_group(self) -> list[bool]:
        """Say of each group whether what a request holds there stops to grow, for its blocks are given back."""
        longer = self.num_blocks_by_group(2 * _ENDLESS_REQUEST)
        return [most == least for most, least in zip(longer, self.num_blocks_by_group(_ENDLESS_REQUEST), strict=True)]

    def ways_to_need_less(self, longest_that_fits: int) -> str:
        """Return settings with which a request takes less, as words of a sentence.

        Args:
            longest_that_fits: Tokens in the longest request that would fit as it is; 0 for none.
        """
        shorter = f"max_model_len={longest_that_fits} or max_model_len='auto'" if longest_that_fits else "block_size"
        if not any(self.is_bounded_by_group()):
            return shorter
        return f"{shorter}, lower max_num_batched_tokens (what is given back on the way is held for a step at least)"

    def idle_share(self, num_tokens: int) -> float:
        """Return which share of what a request of `num_tokens` tokens holds at most lies idle."""
        idle_bytes = sum(
            num_blocks * padding_of(group, self.groups).num_bytes
            for group, num_blocks in zip(self.groups, self.num_blocks_by_group(num_tokens), strict=True)
        )
        return idle_bytes / self.num_bytes(num_tokens)

    def longest_request(self, num_usable_blocks: int, limit: int) -> int:
        """Return the longest request, in tokens up to `limit`, that `num_usable_blocks` blocks hold; 0 for none."""
        if self.num_blocks(SHORTEST_REQUEST) > num_usable_blocks:
            return 0
        fits, too_long = SHORTEST_REQUEST, limit + 1
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self.num_blocks(middle) <= num_usable_blocks:
                fits = middle
            else:
                too_long = middle
        return fits


def padding_warning(cost: RequestCost, num_tokens: int) -> str | None:
    """Say what of the KV cache lies idle while requests of `num_tokens` tokens hold it; None where it is little."""
    share = cost.idle_share(num_tokens)
    if share < WORTH_A_WARNING:
        return None
    reasons: list[str] = []
    slots, largest = num_slots(cost.groups), page_bytes(cost.groups)
    for group in cost.groups:
        padding, kind = padding_of(group, cost.groups), group.spec.kind
        if padding.num_slots:
            reasons.append(f"a group of {kind} has {counted(len(group.layers), 'layer')} for {slots} slots")
        if padding.bytes_per_page:
            reasons.append(f"pages of {kind} have {group.spec.page_bytes} bytes of {largest}")
    return (
        f"{share:.1%} of the KV cache that a request of {num_tokens} tokens holds lies idle, for a block is as large "
        f"as the largest group needs it: {', '.join(dict.fromkeys(reasons))}. `octavo plan` shows each group, and what "
        "disable_hybrid_kv_cache_manager would take instead."
    )


def num_blocks_from_memory(available_bytes: int, cost: RequestCost, max_model_len: int) -> int:
    """Return how many blocks fit, and make sure that one request of `max_model_len` tokens does.

    Raises:
        NotEnoughMemoryError: It does not. The message has the bytes needed, the bytes there, and what would fit.
    """
    # More may be in use than was to be used; nothing is there then.
    available_bytes = max(available_bytes, 0)
    block_bytes = bytes_per_block(cost.groups)
    num_blocks = num_blocks_in(available_bytes, cost.groups)
    # One block is the null block, which holds nothing.
    if cost.num_blocks(max_model_len) <= num_blocks - 1:
        return num_blocks
    needed = cost.num_bytes(max_model_len) + block_bytes
    fits = cost.longest_request(num_blocks - 1, max_model_len)
    way_out = f"{'Set' if fits else 'Lower'} {cost.ways_to_need_less(fits)}"
    raise NotEnoughMemoryError(
        f"One request of max_model_len={max_model_len} tokens needs {needed} bytes of KV cache "
        f"({format_bytes(needed)}, one spare block of {block_bytes} bytes included), and {available_bytes} "
        f"bytes ({format_bytes(available_bytes)}) are there, which hold requests of up to {fits} tokens. "
        f"{way_out}, raise kv_cache_memory_bytes, gpu_memory_utilization or cpu_memory_share, or free memory.",
        max_model_len_that_fits=fits,
    )


def format_bytes(num_bytes: int) -> str:
    """Return a size as people read it, such as "1.50 GiB"."""
    if abs(num_bytes) < 1024:
        return "1 byte" if num_bytes == 1 else f"{num_bytes} bytes"
    size = num_bytes / 1024
    for unit in ("KiB", "MiB", "GiB"):
        # Rounded first, for 1023.999 is shown as 1024.00.
        if abs(round(size, 2)) < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def counted(number: int, noun: str) -> str:
    """Return a number of things: "1 block", "2 blocks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
