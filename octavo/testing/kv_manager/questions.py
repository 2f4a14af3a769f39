"""What the conformance suite asks about a manager's class, its specs and the answers to its pure questions."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces import FullAttentionSpec, KVCacheSpec, SingleTypeKVCacheManager
from octavo.plugins.families import KV_MANAGERS
from octavo.testing.conformance import (
    ConformanceSuite,
    RuleBroken,
    SuiteMisusedError,
    check_contract_version,
    reproducible,
)
from octavo.testing.kv_manager.reads import ReadModel, longest_supported
from octavo.testing.kv_manager.rules import BLOCKS_STAY_BOUNDED

SERVES_A_SPEC = "`serves` is the KVCacheSpec subclass that the manager is for, and the specs are of it."
SPECS_ARE_VALUES = "A spec is a plain value: equal where its numbers are equal, hashable, with a kind and a page size."
TABLE_COVERS_TOKENS = "num_blocks_needed has an entry for every block of tokens begun, and never falls."
SKIPPED_IS_NOT_READ = "skipped_blocks names no block that a later query reads."
QUESTIONS_ARE_PURE = "The three questions change nothing: asked again, they answer the same."
ANSWERS_ARE_INTS = "The questions about numbers are answered with plain ints."
BOUND_IS_MONOTONE = "max_blocks_per_request is at least one block, and a longer request or step never lowers it."
QUIET_IS_QUIET = "Up to quiet_until nothing changes: no block fills up, none more is needed, and none less."
PREFIX_IS_LONGEST = "longest_prefix is the largest aligned number of blocks that the cached ones support."
PREFIX_ASKS_WITHIN = "longest_prefix asks only about the blocks below its limit, by number."
SHORTER_PREFIXES_HOLD = (
    "With shorter_prefixes_hold every beginning of a usable prefix is usable, and no block is ever skipped."
)

# All patterns of so many blocks are tried; longer ones at random.
MAX_EXHAUSTIVE_BLOCKS = 7
NUM_RANDOM_PATTERNS = 200
# Lengths of requests, and of their steps, that no trace gets to.
FAR_MODEL_LENS = (1000, 1001, 4096, 10_000, 10_001, 131_072)
FAR_IN_FLIGHT = (1, 2, 100, 512, 8192)


class ManagerQuestions(ConformanceSuite):
    """Asks a manager's questions, and holds the answers to what a query reads.

    Attributes:
        manager: The class, or the name that it is registered under.
        specs: What to test it with: several block sizes, odd ones too; small blocks and windows show more. By default
            some `FullAttentionSpec`s, for a manager that serves them.
        max_model_len: Tokens in the longest text of a test. By default 48, or 16 blocks where that is more; it has to
            be several times what the manager keeps.
    """

    manager: ClassVar[str | type[SingleTypeKVCacheManager]]
    specs: ClassVar[Sequence[KVCacheSpec]] = ()
    max_model_len: ClassVar[int | None] = None

    # -- what the author says -----------------------------------------------------------------------------------

    def reads(self, spec: Any, query_position: int, key_position: int) -> bool:
        """Say whether a query reads the key at a position that is not after its own. By default all of them."""
        return True

    def blocks_needed_for_hit(self, spec: Any, num_blocks: int) -> Iterable[int]:
        """Return which of the first `num_blocks` blocks must be cached for a hit of that length.

        By default those that a later query reads. A manager that demands more says so here, and in its docs.
        """
        return self._model(spec).blocks_read_after(num_blocks * spec.block_size, num_blocks)

    # -- the class and its specs --------------------------------------------------------------------------------

    @reproducible
    def test_the_class_states_its_contract_version_and_what_it_serves(self) -> None:
        manager = self._manager_class()
        check_contract_version(manager, SingleTypeKVCacheManager)
        serves = getattr(manager, "serves", None)
        if not (isinstance(serves, type) and issubclass(serves, KVCacheSpec)):
            raise RuleBroken(SERVES_A_SPEC, f"{manager.__name__}.serves is {serves!r}")
        for spec in self._specs():
            if not isinstance(spec, serves):
                raise RuleBroken(SERVES_A_SPEC, f"it serves {serves.__name__}, and is tested with {spec!r}")

    @reproducible
    def test_specs_are_plain_values(self) -> None:
        for spec in self._specs():
            kind, page_bytes = getattr(spec, "kind", None), spec.page_bytes
            if not isinstance(kind, str) or not kind:
                raise RuleBroken(SPECS_ARE_VALUES, f"the kind of {spec!r} is {kind!r}")
            if type(page_bytes) is not int or page_bytes < 1:
                raise RuleBroken(SPECS_ARE_VALUES, f"the page_bytes of {spec!r} are {page_bytes!r}")
            fields = {field.name for field in dataclasses.fields(spec)}
            stated = {name for name, kind in vars(type(spec)).get("__annotations__", {}).items() if _is_field(kind)}
            if stated - fields:
                raise RuleBroken(
                    SPECS_ARE_VALUES, f"{sorted(stated - fields)} are no fields; {type(spec)} lacks @dataclass"
                )
            twin, larger = copy.copy(spec), dataclasses.replace(spec, block_size=2 * spec.block_size)
            if twin != spec or _hash_of(twin) != _hash_of(spec):
                raise RuleBroken(SPECS_ARE_VALUES, f"{spec!r} and a copy of it differ")
            if larger == spec:
                raise RuleBroken(SPECS_ARE_VALUES, f"{spec!r} equals one with another block_size")

    # -- the three questions ------------------------------------------------------------------------------------

    @reproducible
    def test_the_table_has_an_entry_for_every_block_of_tokens(self) -> None:
        for spec in self._specs():
            manager, before = self._make(spec), 0
            for num_tokens in range(self._max_model_len(spec) + 1):
                num_blocks = _int("num_blocks_needed", manager.num_blocks_needed(num_tokens), spec)
                if num_blocks * spec.block_size < num_tokens or num_blocks < before:
                    raise RuleBroken(
                        TABLE_COVERS_TOKENS,
                        f"num_blocks_needed({num_tokens}) is {num_blocks}, after {before} for a token less; {spec}",
                    )
                if num_blocks != manager.num_blocks_needed(num_tokens):
                    raise RuleBroken(QUESTIONS_ARE_PURE, f"num_blocks_needed({num_tokens}); {spec}")
                before = num_blocks

    @reproducible
    def test_what_is_skipped_is_never_read_again(self) -> None:
        for spec in self._specs():
            manager, model = self._make(spec), self._model(spec)
            for num_tokens in range(self._max_model_len(spec) + 1):
                skipped = manager.skipped_blocks(num_tokens)
                if not isinstance(skipped, range) or skipped.step != 1:
                    raise RuleBroken(
                        SKIPPED_IS_NOT_READ, f"skipped_blocks({num_tokens}) is {skipped}, not a range of step 1; {spec}"
                    )
                if skipped.start < 0:
                    raise RuleBroken(
                        SKIPPED_IS_NOT_READ, f"skipped_blocks({num_tokens}) is {skipped}, from below 0; {spec}"
                    )
                if skipped != manager.skipped_blocks(num_tokens):
                    raise RuleBroken(QUESTIONS_ARE_PURE, f"skipped_blocks({num_tokens}); {spec}")
                # A range may reach past what there is, as the table may be shorter than it.
                for block in skipped[: model.max_num_blocks]:
                    if block < model.max_num_blocks and model.is_read_after(block, num_tokens):
                        query, key = model.example_of_reading(block, num_tokens)
                        raise RuleBroken(
                            SKIPPED_IS_NOT_READ,
                            f"skipped_blocks({num_tokens}) is {skipped}, with block {block}, and the query at position "
                            f"{query} reads position {key}; {spec}",
                        )

    @reproducible
    def test_what_is_not_skipped_fits_into_max_blocks_per_request(self) -> None:
        for spec in self._specs():
            manager, longest = self._make(spec), self._max_model_len(spec)
            for max_model_len in (2, spec.block_size, longest // 2, longest):
                # Steps that begin and end at every place in a block.
                for in_flight in (*range(1, spec.block_size + 2), 3 * spec.block_size, longest):
                    bound = _bound(manager, spec, max_model_len, in_flight)
                    for num_computed in range(max_model_len):
                        _check_held(manager, num_computed, in_flight, max_model_len, bound)

    @reproducible
    def test_what_holds_for_short_requests_holds_far_out(self) -> None:
        for spec in self._specs():
            manager, rng = self._make(spec), random.Random(0)
            for in_flight in FAR_IN_FLIGHT:
                before = 1
                for max_model_len in FAR_MODEL_LENS:
                    bound = _bound(manager, spec, max_model_len, in_flight)
                    if bound < before or _bound(manager, spec, max_model_len, in_flight + 1) < bound:
                        raise RuleBroken(
                            BOUND_IS_MONOTONE,
                            f"{max_model_len} tokens with {in_flight} new ones take {bound} blocks, which is fewer "
                            f"than for a shorter request, or more than with one more new one; {spec}",
                        )
                    before = bound
                    places = (max_model_len - in_flight, max_model_len // 2, rng.randrange(max_model_len))
                    for num_computed in {place + step for place in places for step in range(spec.block_size + 1)}:
                        if not 0 <= num_computed < max_model_len:
                            continue
                        end = min(num_computed + in_flight, max_model_len)
                        entries = manager.num_blocks_needed(end)
                        if entries * spec.block_size < end:
                            raise RuleBroken(TABLE_COVERS_TOKENS, f"num_blocks_needed({end}) is {entries}; {spec}")
                        _check_held(manager, num_computed, in_flight, max_model_len, bound)

    @reproducible
    def test_nothing_changes_while_the_manager_is_not_called(self) -> None:
        for spec in self._specs():
            manager, longest = self._make(spec), self._max_model_len(spec)
            for num_tokens in range(1, longest + 1):
                last = _int("quiet_until", manager.quiet_until(num_tokens), spec)
                if last < num_tokens:
                    raise RuleBroken(QUIET_IS_QUIET, f"quiet_until({num_tokens}) is {last}; {spec}")
                for later in range(num_tokens + 1, min(last, longest) + 1):
                    if (
                        later // spec.block_size != num_tokens // spec.block_size
                        or manager.num_blocks_needed(later) != manager.num_blocks_needed(num_tokens)
                        or manager.skipped_blocks(later) != manager.skipped_blocks(num_tokens)
                    ):
                        raise RuleBroken(
                            QUIET_IS_QUIET,
                            f"quiet_until({num_tokens}) is {last}, and at {later} tokens it is not; {spec}",
                        )

    @reproducible
    def test_a_longer_request_never_takes_fewer_blocks(self) -> None:
        for spec in self._specs():
            manager = self._manager_class()
            for in_flight in (1, spec.block_size, 3 * spec.block_size):
                bounds = [
                    (
                        manager.max_blocks_per_request(spec, max_model_len, in_flight),
                        manager.max_blocks_per_request(spec, max_model_len, in_flight + 1),
                    )
                    for max_model_len in range(1, self._max_model_len(spec) + 1)
                ]
                for length, ((bound, wider), (next_bound, _)) in enumerate(itertools.pairwise(bounds), 1):
                    if bound < 1 or next_bound < bound or wider < bound:
                        raise RuleBroken(
                            BOUND_IS_MONOTONE,
                            f"{length} tokens with {in_flight} new ones take {bound} blocks, with one more new one "
                            f"{wider}, and a token more takes {next_bound}; {spec}",
                        )

    @reproducible
    def test_a_prefix_is_as_long_as_the_cached_blocks_support(self) -> None:
        for spec in self._specs():
            manager, needed = self._make(spec), self._needed_for_hits(spec)
            rng = random.Random(0)
            few = min(MAX_EXHAUSTIVE_BLOCKS, len(needed) - 1)
            for pattern in itertools.product((False, True), repeat=few):
                for max_blocks, alignment in itertools.product(range(few + 1), (1, 2, 3)):
                    _check_prefix(manager, needed, pattern, max_blocks, alignment)
            for _ in range(NUM_RANDOM_PATTERNS):
                density = rng.choice((0.5, 0.8, 0.95, 1.0))
                pattern = tuple(rng.random() < density for _ in range(rng.randint(0, len(needed) - 1)))
                _check_prefix(manager, needed, pattern, rng.randint(0, len(pattern)), rng.randint(1, 4))

    @reproducible
    def test_shorter_prefixes_hold_where_the_class_says_so(self) -> None:
        if not self._manager_class().shorter_prefixes_hold:
            return
        for spec in self._specs():
            manager, needed = self._make(spec), self._needed_for_hits(spec)
            for num_tokens in range(self._max_model_len(spec) + 1):
                if skipped := manager.skipped_blocks(num_tokens):
                    raise RuleBroken(SHORTER_PREFIXES_HOLD, f"skipped_blocks({num_tokens}) is {skipped}; {spec}")
            few = min(MAX_EXHAUSTIVE_BLOCKS, len(needed) - 1)
            for pattern in itertools.product((False, True), repeat=few):
                longest = manager.longest_prefix(pattern.__getitem__, few, 1)
                for length in range(longest):
                    answer = manager.longest_prefix(pattern.__getitem__, length, 1)
                    if answer != length:
                        raise RuleBroken(
                            SHORTER_PREFIXES_HOLD,
                            f"longest_prefix is {longest} and, with max_blocks={length}, {answer}; cached: "
                            f"{_as_bits(pattern)}; {spec}",
                        )

    # -- parts --------------------------------------------------------------------------------------------------

    def _manager_class(self) -> type[SingleTypeKVCacheManager]:
        return self._load(KV_MANAGERS, "manager", SingleTypeKVCacheManager)

    def _make(
        self, spec: KVCacheSpec, pool: BlockPool | None = None, group_id: int = 0, num_rows: int = 2
    ) -> SingleTypeKVCacheManager:
        manager = self._manager_class()
        return manager(spec, pool or BlockPool(2), group_id, num_rows, **self._options_for(manager))

    def _specs(self) -> Sequence[KVCacheSpec]:
        if self.specs:
            return self.specs
        serves = getattr(self._manager_class(), "serves", None)
        if serves is not None and issubclass(FullAttentionSpec, serves):
            block_sizes = (4, 1, 3, 5, 16)
            return tuple(FullAttentionSpec(block_size, 1, 2, "float32") for block_size in block_sizes)
        raise SuiteMisusedError(f"{type(self).__name__} has to say in `specs` what to test {self.manager!r} with.")

    def _max_model_len(self, spec: KVCacheSpec) -> int:
        return self.max_model_len or max(48, 16 * spec.block_size)

    def _model(self, spec: KVCacheSpec) -> ReadModel:
        """Return the consequences of `reads`, worked out once a test."""
        models: dict[KVCacheSpec, ReadModel] = vars(self).setdefault("_models", {})
        if spec not in models:

            def reads(query_position: int, key_position: int) -> bool:
                return bool(self.reads(spec, query_position, key_position))

            models[spec] = ReadModel(reads, spec.block_size, self._max_model_len(spec))
        return models[spec]

    def _needed_for_hits(self, spec: KVCacheSpec) -> list[frozenset[int]]:
        """Return the blocks that must be cached for a hit of 0, 1, 2 ... blocks."""
        num_blocks = self._max_model_len(spec) // spec.block_size
        return [frozenset(self.blocks_needed_for_hit(spec, length)) for length in range(num_blocks + 1)]


def _int(question: str, answer: Any, spec: KVCacheSpec) -> int:
    """Return the answer to a question about a number, if it is one."""
    if type(answer) is not int:
        raise RuleBroken(ANSWERS_ARE_INTS, f"{question} answers {answer!r}, of {type(answer)}; {spec}")
    return answer


def _bound(manager: SingleTypeKVCacheManager, spec: KVCacheSpec, max_model_len: int, in_flight: int) -> int:
    """Return what max_blocks_per_request says, if it is a number of blocks."""
    bound = _int("max_blocks_per_request", manager.max_blocks_per_request(spec, max_model_len, in_flight), spec)
    if bound < 1:
        raise RuleBroken(
            BOUND_IS_MONOTONE, f"max_blocks_per_request(spec, {max_model_len}, {in_flight}) is {bound}; {spec}"
        )
    return bound


def _check_held(
    manager: SingleTypeKVCacheManager, num_computed: int, in_flight: int, max_model_len: int, bound: int
) -> None:
    """Raise when a step of `in_flight` tokens after `num_computed` holds more than `bound` blocks."""
    end = min(num_computed + in_flight, max_model_len)
    entries, skipped = manager.num_blocks_needed(end), manager.skipped_blocks(num_computed)
    num_held = entries - len(range(max(skipped.start, 0), min(skipped.stop, entries)))
    if num_held > bound:
        raise RuleBroken(
            BLOCKS_STAY_BOUNDED,
            f"{num_computed} tokens and {end - num_computed} new ones hold {num_held} blocks; "
            f"max_blocks_per_request(spec, {max_model_len}, {in_flight}) is {bound}; {manager.spec}",
        )


def _check_prefix(
    manager: SingleTypeKVCacheManager,
    needed: Sequence[frozenset[int]],
    pattern: Sequence[bool],
    max_blocks: int,
    alignment: int,
) -> None:
    where = f"max_blocks={max_blocks}, alignment_blocks={alignment}, cached: {_as_bits(pattern)}; {manager.spec}"

    def is_cached(index: int) -> bool:
        if not 0 <= index < max_blocks:
            raise RuleBroken(PREFIX_ASKS_WITHIN, f"it asks about block {index} with {where}")
        return pattern[index]

    answer, wanted = (
        _int("longest_prefix", manager.longest_prefix(is_cached, max_blocks, alignment), manager.spec),
        longest_supported(needed, pattern, max_blocks, alignment),
    )
    if answer != wanted:
        raise RuleBroken(PREFIX_IS_LONGEST, f"it is {answer}, not {wanted}, with {where}")


def _as_bits(pattern: Sequence[bool]) -> str:
    return "".join("x" if is_cached else "." for is_cached in pattern)


def _is_field(annotation: object) -> bool:
    return "ClassVar" not in str(annotation)


def _hash_of(spec: KVCacheSpec) -> int:
    try:
        return hash(spec)
    except TypeError as error:
        raise RuleBroken(
            SPECS_ARE_VALUES, f"{spec!r} cannot be hashed: {error}; write @dataclass(frozen=True)"
        ) from None
