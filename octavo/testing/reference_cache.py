"""Who holds which blocks and what can be found, in plain Python. Read this second, then `reference.py`.

    attention: what is read ──► pool ──► cache: tables of requests ──► engine: who gets which tokens in a step

Lists and dictionaries, and nothing is kept that can be found out again. A block is found by what stands in it, and by
the KV-cache group that it was written for.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from operator import add

from octavo.testing.reference_attention import FullAttention

NULL = 0


class ReferencePool:
    """Blocks 1 .. num_blocks - 1. Block 0, the null block, stands in tables where no block is.

    Attributes:
        soon: Free blocks that nobody is likely to find. The first is handed out next.
        late: Free blocks that somebody may find, which are handed out behind those.
    """

    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        self.caching = caching
        self.soon = list(range(1, num_blocks))
        self.late: list[int] = []
        self.references = dict.fromkeys(self.soon, 0)
        # What stands in a block that can be found, the one registered first in front. Several may hold the same.
        self.content: dict[int, Hashable] = {}
        # Of those, the ones that are unlikely to be found.
        self.unlikely: set[int] = set()
        self.num_evictions = 0

    @property
    def free(self) -> list[int]:
        """The free blocks. The first is handed out next."""
        return self.soon + self.late

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks. What stood in them can no longer be found."""
        if count > len(self.free):
            raise ValueError(f"{count} blocks of {len(self.free)}")
        blocks = self.free[:count]
        self.take_out(blocks)
        self.num_evictions += sum(block in self.content for block in blocks)
        self.unregister(blocks)
        self.references.update(dict.fromkeys(blocks, 1))
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Let one more request hold each block. What is found once is likely to be found again."""
        for block in real_blocks(blocks):
            self.take_out([block])
            self.unlikely.discard(block)
            self.references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Let one request fewer hold each block, the one that is to be reused first in front.

        Those that can be found go behind those like them, the others before all that are free.
        """
        released = []
        for block in real_blocks(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                released.append(block)
        lost = [block for block in released if block not in self.content]
        self.soon = lost + self.soon + [block for block in released if block in self.unlikely]
        self.late += [block for block in released if block not in lost and block not in self.unlikely]

    def take_out(self, blocks: list[int]) -> None:
        """Take blocks out of the free ones, as far as they are free."""
        self.soon = [block for block in self.soon if block not in blocks]
        self.late = [block for block in self.late if block not in blocks]

    def register(self, block: int, content: Hashable) -> None:
        """Make a full block findable."""
        if self.caching:
            self.content[block] = content

    def expect_no_hit(self, blocks: Iterable[int]) -> None:
        """Say of blocks that nobody is likely to find them."""
        self.unlikely.update(block for block in blocks if block in self.content)

    def unregister(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable."""
        for block in blocks:
            self.content.pop(block, None)
            self.unlikely.discard(block)

    def forget(self, blocks: list[int]) -> None:
        """Make blocks unfindable; those that are free are reused next."""
        self.unregister(blocks)
        free = [block for block in blocks if block in self.free]
        self.take_out(free)
        self.soon = free + self.soon

    def reset(self) -> None:
        """Make all blocks unfindable. The order of the free ones stays."""
        self.unregister(list(self.content))
        self.soon, self.late = self.free, []

    def find(self, content: Hashable) -> int | None:
        """Return the block that was registered first of those with this content."""
        return next((block for block, found in self.content.items() if found == content), None)


@dataclass(eq=False)
class ReferenceRequest:
    """A request: what is asked for, then how far it is.

    Attributes:
        tokens: The prompt, then what was generated.
        max_tokens: Tokens to generate at most.
        eos_ids: Tokens that end it.
        stop_ids: Tokens that end it and are named as the reason.
        arrival: Its place in the order of arrival.
        num_prompt: Tokens of the prompt.
        max_total_tokens: It ends when it has so many.
        computed: Tokens whose keys and values are in its blocks, or will be after this step.
        tables: Its blocks, by group.
        num_sealed: Entries at the front of each table that are registered.
        num_final: Those of them that were before this step. The others are dropped if the step does not come about.
        findable: Lengths of its beginnings that are likely to be asked for when it has moved on.
        num_adopted: Tokens that it found in the cache when it was last admitted.
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
    num_prompt: int = 0
    max_total_tokens: int = 0
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    num_sealed: list[int] = field(default_factory=list)
    num_final: list[int] = field(default_factory=list)
    findable: set[int] = field(default_factory=set)
    num_adopted: int = 0
    num_cached: int | None = None
    num_lost: int = 0
    num_preemptions: int = 0

    @property
    def behind(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.computed

    @property
    def blocks(self) -> list[int]:
        """All blocks that it holds."""
        return [block for table in self.tables for block in real_blocks(table)]

    @property
    def provisional_blocks(self) -> set[int]:
        """Those that this step fills."""
        sealed = zip(self.tables, self.num_final, self.num_sealed, strict=True)
        return {block for table, first, end in sealed for block in real_blocks(table[first:end])}


@dataclass(frozen=True)
class ReferenceHit:
    """What need not be computed.

    Attributes:
        num_tokens: How many tokens.
        tables: The blocks that they are in, by group, null where no later token reads.
        junction: Tokens that the group which is asked first has. Others have come as far as that.
    """

    num_tokens: int
    tables: list[list[int]]
    junction: int


class ReferenceCache:
    """The tables of the requests, over a pool: one a group, and `attentions[group]` says what is kept in it.

    Args:
        pool: The blocks.
        attentions: By group. A group is a number.
        max_tokens_in_flight: New tokens that a request has in a step at most.
    """

    def __init__(self, pool: ReferencePool, *attentions: FullAttention, max_tokens_in_flight: int = 1 << 30) -> None:
        self.pool = pool
        self.attentions = attentions
        self.max_tokens_in_flight = max_tokens_in_flight
        # A hit is whole blocks of every group.
        self.alignment = math.lcm(*(attention.block_size for attention in attentions))
        self.asked_first = next((group for group, a in enumerate(attentions) if a.shorter_prefixes_hold), 0)

    # -- what is found ------------------------------------------------------------------------------------------

    def aligned(self, num_tokens: int) -> int:
        """Return how many of so many tokens a hit may have."""
        return num_tokens - num_tokens % self.alignment

    def content(self, request: ReferenceRequest, group: int, end: int) -> Hashable:
        """Return what stands in the block of a request that ends at `end`: all tokens up to there, and the salt."""
        return group, request.salt, tuple(request.tokens[:end])

    def contents(self, request: ReferenceRequest, group: int) -> list[Hashable]:
        """Return what stands in each full block of a request."""
        size = self.attentions[group].block_size
        return [self.content(request, group, end) for end in range(size, len(request.tokens) + 1, size)]

    def find_hit(self, request: ReferenceRequest) -> ReferenceHit:
        """Return the longest hit that all groups support. The last token is always computed."""
        if request.skips_reading or not self.pool.caching:
            return ReferenceHit(0, [[] for _ in self.attentions], 0)
        found = [
            [self.pool.find(content) for content in self.contents(request, group)]
            for group in range(len(self.attentions))
        ]

        def is_supported(group: int, num_tokens: int) -> bool:
            attention = self.attentions[group]
            read = found[group][attention.first_read(num_tokens) : num_tokens // attention.block_size]
            return None not in read

        lengths = range(0, len(request.tokens), self.alignment)
        junction = max(length for length in lengths if is_supported(self.asked_first, length))
        num_tokens = max(n for n in lengths if all(is_supported(group, n) for group in range(len(found))))
        tables = [
            [
                NULL if index < attention.first_read(num_tokens) else block or NULL
                for index, block in enumerate(blocks[: num_tokens // attention.block_size])
            ]
            for attention, blocks in zip(self.attentions, found, strict=True)
        ]
        return ReferenceHit(num_tokens, tables, junction)

    def computes_next_for(self, prompt: ReferenceRequest, request: ReferenceRequest) -> bool:
        """Say whether a waiting request begins with what a running one has after its next hit, and the cache lacks."""
        end = self.aligned(prompt.computed) + self.alignment
        if end > len(prompt.tokens) or self.num_shared(prompt, request) < end:
            return False
        return self.pool.find(self.content(request, self.asked_first, end)) is None

    def num_shared(self, prompt: ReferenceRequest, request: ReferenceRequest) -> int:
        """Return how many tokens of a waiting request, that a hit may have, are those of a running one."""
        most = self.aligned(min(len(prompt.tokens), len(request.tokens) - 1)) if prompt.salt == request.salt else 0
        while prompt.tokens[:most] != request.tokens[:most]:
            most -= self.alignment
        return most

    # -- what a request takes -----------------------------------------------------------------------------------

    def most_blocks(self, num_tokens: int) -> list[int]:
        """Return how many blocks of each group a request of so many tokens holds at a time at most."""
        # What is kept for a hit counts as in flight.
        behind_hit = [self.alignment - 1 if self.alignment != a.block_size else 0 for a in self.attentions]
        return [
            attention.most_blocks(num_tokens, self.max_tokens_in_flight + num_behind)
            for attention, num_behind in zip(self.attentions, behind_hit, strict=True)
        ]

    def lacking(self, request: ReferenceRequest, num_tokens: int) -> list[int]:
        """Return how many blocks of each group a running request has to be given for so many tokens."""
        tables = zip(self.attentions, request.tables, strict=True)
        return [max(attention.blocks_for(num_tokens) - len(table), 0) for attention, table in tables]

    def num_owed(self, request: ReferenceRequest) -> int:
        """Return how many blocks more a running request takes for all its tokens."""
        lacking, most = self.lacking(request, len(request.tokens)), self.most_blocks(len(request.tokens))
        # What others hold, too, is not free when it is given back.
        alone = [sum(self.pool.references[block] == 1 for block in real_blocks(table)) for table in request.tables]
        return sum(max(min(lacks, most - held), 0) for lacks, most, held in zip(lacking, most, alone, strict=True))

    def num_behind(self, request: ReferenceRequest, num_shared: int) -> int:
        """Return the most blocks that a waiting request takes behind so many tokens that it shares."""
        num_tokens = len(request.tokens)
        new = [a.blocks_for(num_tokens) - num_shared // a.block_size for a in self.attentions]
        return sum(map(min, new, self.most_blocks(num_tokens)))

    def num_needed(self, request: ReferenceRequest, hit: ReferenceHit, held: set[int]) -> int:
        """Return how many free blocks a waiting request takes for all its tokens, if those of `held` are not free."""
        num_tokens = len(request.tokens)
        new = [a.blocks_for(num_tokens) - len(table) for a, table in zip(self.attentions, hit.tables, strict=True)]
        adopted = [len([block for block in real_blocks(table) if block not in held]) for table in hit.tables]
        return sum(map(min, map(add, new, adopted), self.most_blocks(num_tokens)))

    # -- what changes -------------------------------------------------------------------------------------------

    def adopt(self, request: ReferenceRequest, hit: ReferenceHit) -> None:
        """Let a request begin with what was found for it, and choose what of it stays findable longest."""
        request.tables = [list(table) for table in hit.tables]
        self.pool.touch(request.blocks)
        request.computed = request.num_adopted = hit.num_tokens
        request.num_sealed = [len(table) for table in hit.tables]
        request.num_final = request.num_sealed[:]
        request.findable = {hit.num_tokens, hit.junction, self.aligned(request.num_prompt - 1)}

    def give_back_unread(self, request: ReferenceRequest, num_computed: int) -> None:
        """Give back what neither tokens behind the first `num_computed` nor a hit there read, the last block first.

        Null entries take their places. What no hit reads at the lengths that are to be found is unlikely to be found,
        unless somebody else holds it.
        """
        for attention, table in zip(self.attentions, request.tables, strict=True):
            is_read = {
                index
                for length in request.findable
                for index in range(attention.first_read(length), length // attention.block_size)
            }
            unread = range(len(table))[: attention.first_kept(num_computed, self.alignment)]
            unlikely = [table[index] for index in unread if index not in is_read]
            self.pool.expect_no_hit(block for block in unlikely if self.pool.references.get(block) == 1)
            self.pool.give_back([table[index] for index in reversed(unread)])
            for index in unread:
                table[index] = NULL

    def extend(self, request: ReferenceRequest, num_new: int) -> None:
        """Give a request the blocks for new tokens, and register those that the tokens fill."""
        request.computed += num_new
        for table, num_lacking in zip(request.tables, self.lacking(request, request.computed), strict=True):
            table += self.pool.allocate(num_lacking)
        self.register(request)

    def register(self, request: ReferenceRequest) -> None:
        """Make what is computed of a request findable, as far as a hit may reach."""
        for group, table in enumerate(request.tables):
            size = self.attentions[group].block_size
            num_full = self.aligned(request.computed) // size
            for index in range(request.num_sealed[group], num_full):
                if table[index] != NULL:
                    self.pool.register(table[index], self.content(request, group, (index + 1) * size))
            request.num_sealed[group] = max(request.num_sealed[group], num_full)

    def drop_keys(self, request: ReferenceRequest, first: list[int]) -> None:
        """Make the entries of a request's tables from `first[group]` on unfindable."""
        for group, table in enumerate(request.tables):
            self.pool.unregister(real_blocks(table[first[group] : request.num_sealed[group]]))
            request.num_sealed[group] = min(request.num_sealed[group], first[group])

    def drop_recycled(self, request: ReferenceRequest) -> None:
        """Make what the request wrote to blocks that it no longer holds unfindable, whoever wrote the same."""
        recycled = [
            content
            for group, table in enumerate(request.tables)
            for entry, content in zip(table[: request.num_sealed[group]], self.contents(request, group), strict=False)
            if entry == NULL
        ]
        found = self.pool.content.items()
        self.pool.forget([block for content in recycled for block, other in found if other == content])

    def release(self, request: ReferenceRequest) -> None:
        """Give all blocks of a request back, the last one first, and forget what this step was to write."""
        self.drop_keys(request, request.num_final)
        for table in request.tables:
            self.pool.give_back(reversed(table))
        request.tables, request.num_sealed, request.num_final = [], [], []
        request.computed = 0


def real_blocks(blocks: Iterable[int]) -> list[int]:
    """Return the blocks without the null entries."""
    return [block for block in blocks if block != NULL]
