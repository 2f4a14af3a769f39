"""Who holds which blocks and what can be found, in plain Python. Read this first, then `reference.py`.

    pool ──► cache: tables of requests ──► engine: who gets which tokens in a step

Lists and dictionaries, and nothing is kept that can be found out again. A block is found by what stands in it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

NULL = 0


class ReferencePool:
    """Blocks 1 .. num_blocks - 1. Block 0, the null block, stands in tables where no block is."""

    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        self.caching = caching
        # The first is handed out next.
        self.free = list(range(1, num_blocks))
        self.references = dict.fromkeys(self.free, 0)
        # What stands in a block that can be found, the one registered first in front. Several may hold the same.
        self.content: dict[int, Hashable] = {}
        self.num_evictions = 0

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks. What stood in them can no longer be found."""
        if count > len(self.free):
            raise ValueError(f"{count} blocks of {len(self.free)}")
        blocks, self.free = self.free[:count], self.free[count:]
        self.num_evictions += sum(block in self.content for block in blocks)
        self.unregister(blocks)
        self.references.update(dict.fromkeys(blocks, 1))
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Let one more request hold each block."""
        for block in real_blocks(blocks):
            if block in self.free:
                self.free.remove(block)
            self.references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Let one request fewer hold each block, the one that is to be reused first in front.

        Those that can be found go behind all that are free, the others before them.
        """
        released = []
        for block in real_blocks(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                released.append(block)
        findable = [block for block in released if block in self.content]
        self.free = [block for block in released if block not in findable] + self.free + findable

    def register(self, block: int, content: Hashable) -> None:
        """Make a full block findable."""
        if self.caching:
            self.content[block] = content

    def unregister(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable."""
        for block in blocks:
            self.content.pop(block, None)

    def forget(self, blocks: list[int]) -> None:
        """Make blocks unfindable; those that are free are reused next."""
        self.unregister(blocks)
        free = [block for block in blocks if block in self.free]
        self.free = free + [block for block in self.free if block not in free]

    def find(self, content: Hashable) -> int | None:
        """Return the block that was registered first of those with this content."""
        return next((block for block, found in self.content.items() if found == content), None)


class FullAttention:
    """What one kind of attention needs of the cache. Another kind answers these questions otherwise."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many table entries so many tokens take."""
        return -(-num_tokens // self.block_size)

    def unread_blocks(self, num_computed: int) -> range:
        """Return the table entries that no token after the first `num_computed` reads."""
        return range(0)

    def longest_prefix(self, is_cached: Sequence[bool]) -> int:
        """Return how many blocks need not be computed, of those that may be found in the cache or not."""
        return [*is_cached, False].index(False)

    def most_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a request of so many tokens holds at a time at most."""
        return self.blocks_for(num_tokens)


@dataclass(eq=False)
class ReferenceRequest:
    """A request: what is asked for, then how far it is.

    Attributes:
        tokens: The prompt, then what was generated.
        max_tokens: Tokens to generate at most.
        eos_ids: Tokens that end it.
        stop_ids: Tokens that end it and are named as the reason.
        arrival: Its place in the order of arrival.
        max_total_tokens: It ends when it has so many.
        computed: Tokens whose keys and values are in its blocks, or will be after this step.
        table: Its blocks.
        num_sealed: Entries at the front of the table that are registered.
        num_final: Those of them that were before this step. The others are dropped if the step does not come about.
        num_cached: Tokens that the cache had when it was first admitted; None before.
        num_lost: Tokens that were computed when it last lost its blocks.
    """

    request_id: str
    tokens: list[int]
    max_tokens: int
    priority: int = 0
    salt: str | None = None
    skips_reading: bool = False
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    arrival: int = 0
    max_total_tokens: int = 0
    computed: int = 0
    table: list[int] = field(default_factory=list)
    num_sealed: int = 0
    num_final: int = 0
    num_cached: int | None = None
    num_lost: int = 0
    num_preemptions: int = 0

    @property
    def behind(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.computed


class ReferenceCache:
    """The tables of the requests, over a pool."""

    def __init__(self, pool: ReferencePool, attention: FullAttention) -> None:
        self.pool = pool
        self.attention = attention

    def contents(self, request: ReferenceRequest) -> list[Hashable]:
        """Return what stands in the full blocks of a request: all tokens up to their end, and the salt."""
        size = self.attention.block_size
        return [(request.salt, tuple(request.tokens[:end])) for end in range(size, len(request.tokens) + 1, size)]

    def find_hit(self, request: ReferenceRequest) -> list[int]:
        """Return the first entries of a table that need not be computed. The last token always is."""
        if request.skips_reading:
            return []
        size = self.attention.block_size
        found = [self.pool.find(content) for content in self.contents(request)[: (len(request.tokens) - 1) // size]]
        num_blocks = self.attention.longest_prefix([block is not None for block in found])
        unread = self.attention.unread_blocks(num_blocks * size)
        return [NULL if index in unread else found[index] or NULL for index in range(num_blocks)]

    def num_lacking(self, request: ReferenceRequest, num_tokens: int) -> int:
        """Return how many blocks a request has to be given for so many tokens."""
        return max(self.attention.blocks_for(num_tokens) - len(request.table), 0)

    def num_owed(self, request: ReferenceRequest) -> int:
        """Return how many blocks more a running request takes for all its tokens."""
        num_tokens = len(request.tokens)
        can_grow_by = self.attention.most_blocks(num_tokens) - len(real_blocks(request.table))
        return max(min(self.num_lacking(request, num_tokens), can_grow_by), 0)

    def num_behind(self, request: ReferenceRequest, num_shared: int) -> int:
        """Return the most blocks that a waiting request takes behind so many that it shares."""
        num_tokens = len(request.tokens)
        return min(self.attention.blocks_for(num_tokens) - num_shared, self.attention.most_blocks(num_tokens))

    def num_needed(self, request: ReferenceRequest, hit: list[int], held: set[int]) -> int:
        """Return how many free blocks a waiting request takes for all its tokens, if those of `held` are not free."""
        num_new = self.num_lacking(request, len(request.tokens)) - len(hit)
        num_adopted = len([block for block in real_blocks(hit) if block not in held])
        return min(num_new + num_adopted, self.attention.most_blocks(len(request.tokens)))

    def adopt(self, request: ReferenceRequest, hit: list[int]) -> None:
        """Let a request begin with the blocks that were found for it."""
        self.pool.touch(hit)
        request.table = list(hit)
        request.computed = len(hit) * self.attention.block_size
        request.num_sealed = request.num_final = len(hit)

    def drop_unread(self, request: ReferenceRequest, num_computed: int, num_new: int) -> None:
        """Give back what a step's new tokens will not read, the last block first; null entries take their places.

        It is looked at when a block is begun or filled. `num_computed` leaves out what the step has planned before.
        """
        size = self.attention.block_size
        if num_computed % size and num_computed // size == (num_computed + num_new) // size:
            return
        unread = [i for i in self.attention.unread_blocks(num_computed) if i < len(request.table)]
        self.pool.give_back([request.table[index] for index in reversed(unread)])
        for index in unread:
            request.table[index] = NULL

    def extend(self, request: ReferenceRequest, num_new: int) -> None:
        """Give a request the blocks for new tokens, and register those that the tokens fill."""
        request.computed += num_new
        request.table += self.pool.allocate(self.num_lacking(request, request.computed))
        num_full = request.computed // self.attention.block_size
        for index, content in enumerate(self.contents(request)[:num_full]):
            if index >= request.num_sealed and request.table[index] != NULL:
                self.pool.register(request.table[index], content)
        request.num_sealed = max(request.num_sealed, num_full)

    def drop_keys(self, request: ReferenceRequest, first: int) -> None:
        """Make the entries of a request's table from `first` on unfindable."""
        self.pool.unregister(real_blocks(request.table[first : request.num_sealed]))
        request.num_sealed = min(request.num_sealed, first)

    def drop_recycled(self, request: ReferenceRequest) -> None:
        """Make what the request wrote to blocks that it no longer holds unfindable, whoever wrote the same."""
        recycled = [
            content
            for entry, content in zip(request.table[: request.num_sealed], self.contents(request), strict=False)
            if entry == NULL
        ]
        found = self.pool.content.items()
        self.pool.forget([block for content in recycled for block, other in found if other == content])

    def release(self, request: ReferenceRequest) -> None:
        """Give all blocks of a request back, the last one first, and forget what this step was to write."""
        self.drop_keys(request, request.num_final)
        self.pool.give_back(reversed(request.table))
        request.table = []
        request.computed = request.num_sealed = request.num_final = 0


def real_blocks(blocks: Iterable[int]) -> list[int]:
    """Return the blocks without the null entries."""
    return [block for block in blocks if block != NULL]
