"""How the KV cache is laid out and how large it is: from what layers keep and the memory there is, to blocks.

    layers ── equal specs ──► groups ── bytes per block ──► number of blocks

Layers with equal specs share block tables and form a KV-cache group. Each layer has a buffer with a row for every
block, so one block id costs a page in every layer of its group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.interfaces.kv_cache_manager import SingleTypeKVCacheManager
from octavo.core.interfaces.kv_cache_spec import KVCacheSpec
from octavo.errors import ConfigError, NotEnoughMemoryError

# Tokens: one of the prompt, and a new one.
SHORTEST_REQUEST = 2


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
    """Sort layers into groups.

    Raises:
        ConfigError: Layers keep different things; they would have to share one pool, which is not supported.
    """
    distinct = list(dict.fromkeys(specs))
    if not distinct:
        raise ConfigError("The model has no attention layer, so there is nothing to keep in a KV cache.")
    if len(distinct) > 1:
        kinds = ", ".join(str(spec) for spec in distinct)
        raise ConfigError(f"The layers keep {len(distinct)} different things ({kinds}); one pool cannot hold them yet.")
    return (KVCacheGroup(distinct[0], tuple(range(len(specs)))),)


def bytes_per_block(groups: Sequence[KVCacheGroup]) -> int:
    """Return the bytes that one block takes: a page in each layer of the group that has most of them."""
    return max(group.spec.page_bytes * len(group.layers) for group in groups)


def num_blocks_in(available_bytes: int, groups: Sequence[KVCacheGroup]) -> int:
    """Return how many blocks fit into `available_bytes`, the null block included."""
    return available_bytes // bytes_per_block(groups)


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
        return sum(
            manager.max_blocks_per_request(group.spec, max_model_len, self.max_tokens_in_flight)
            for group, manager in zip(self.groups, self.managers, strict=True)
        )

    def num_bytes(self, max_model_len: int) -> int:
        """Return the bytes of those blocks."""
        return self.num_blocks(max_model_len) * bytes_per_block(self.groups)

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
    way_out = f"Set max_model_len={fits} or max_model_len='auto'" if fits else "Lower block_size"
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
