"""KV-cache groups of every kind for tests of the coordinator, and what a query of each kind reads, by definition."""

from dataclasses import dataclass

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces import ChunkedLocalSpec, FullAttentionSpec, MLASpec, SlidingWindowSpec
from octavo.core.kv_cache_coordinator import hash_unit_of, make_coordinator
from octavo.kv_managers.chunked_local import ChunkedLocalManager
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.kv_managers.mla import MLAManager
from octavo.kv_managers.sliding_window import SlidingWindowManager

NUMBERS = {"num_kv_heads": 1, "head_dim": 1, "dtype": "float32"}
MANAGERS = {
    "full": FullAttentionManager,
    "mla": MLAManager,
    "window": SlidingWindowManager,
    "chunk": ChunkedLocalManager,
}


@dataclass(frozen=True)
class Kind:
    """What the layers of a group keep, and who reads it, from first principles."""

    name: str
    block_size: int
    reach: int = 0
    is_of_drafter: bool = False

    def make(self, pool, group_id, num_rows=2):
        specs = {
            "full": lambda: FullAttentionSpec(self.block_size, **NUMBERS),
            "mla": lambda: MLASpec(self.block_size, latent_dim=1, rope_dim=1, dtype="float32"),
            "window": lambda: SlidingWindowSpec(self.block_size, **NUMBERS, window=self.reach),
            "chunk": lambda: ChunkedLocalSpec(self.block_size, **NUMBERS, chunk=self.reach),
        }
        return MANAGERS[self.name](specs[self.name](), pool, group_id, num_rows)

    def first_token_read(self, position):
        """Return the first token that a query at `position` or any later one reads."""
        if self.name == "window":
            # The token before a query is kept with a window of 1, too, so that a hit rests on something.
            return max(position - max(self.reach, 2) + 1, 0)
        return position - position % self.reach if self.name == "chunk" else 0

    def blocks_read(self, num_tokens):
        """Return the blocks, of those that `num_tokens` tokens fill, that a query behind them reads."""
        tokens = range(self.first_token_read(num_tokens), num_tokens)
        return {token // self.block_size for token in tokens}

    def blocks_for_hit(self, num_tokens):
        """Return the blocks that must be cached for a hit; a drafter reads ahead, into the block behind it."""
        ahead = {num_tokens // self.block_size} if self.is_of_drafter else set()
        return self.blocks_read(num_tokens) | ahead


def full(block_size, **options):
    return Kind("full", block_size, **options)


def window(block_size, reach, **options):
    return Kind("window", block_size, reach, **options)


def make(kinds, num_usable_blocks=400, **options):
    pool = BlockPool(num_usable_blocks + 1)
    managers = [kind.make(pool, group_id) for group_id, kind in enumerate(kinds)]
    drafters = [group_id for group_id, kind in enumerate(kinds) if kind.is_of_drafter]
    return make_coordinator(managers, hash_unit_of(managers), drafters, **options)


def unit_keys(count):
    return [bytes([number]) for number in range(count)]


def cache_where(coordinator, patterns):
    """Let each group's blocks be cached where its pattern says so; return every group's blocks."""
    blocks_by_group = []
    for manager, pattern in zip(coordinator.managers, patterns, strict=True):
        blocks = manager.pool.get_new_blocks(len(pattern))
        units = manager.block_size // coordinator.hash_unit
        cached = [index for index, is_cached in enumerate(pattern) if is_cached]
        keys = [bytes([(index + 1) * units - 1]) for index in cached]
        manager.pool.cache_full_blocks([blocks[index] for index in cached], keys, manager.group_id)
        blocks_by_group.append(blocks)
    for blocks in blocks_by_group:
        coordinator.managers[0].pool.free_blocks(blocks[::-1])
    return blocks_by_group


def random_kind(rng, block_sizes, drafters):
    name = rng.choice(("full", "full", "mla", "window", "window", "chunk"))
    return Kind(name, rng.choice(block_sizes), rng.randint(1, 14), drafters and rng.random() < 0.4)


BLOCK_SIZES = ((1,), (2,), (4,), (1, 2), (2, 4), (2, 3), (4, 6), (1, 3), (3, 6), (2, 4, 8), (2, 3, 6), (4, 8), (6, 8))


def random_mix(rng):
    block_sizes = rng.choice(BLOCK_SIZES)
    return [random_kind(rng, block_sizes, rng.random() < 0.3) for _ in range(rng.randint(1, 4))]
