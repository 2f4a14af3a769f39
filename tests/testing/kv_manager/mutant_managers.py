"""Managers with one fault each, and the rule that it breaks."""

from typing import ClassVar

from fake_managers import WindowManager, WindowSpec

from octavo.core.interfaces import CONTRACT_VERSION, KVCacheSpec, SingleTypeKVCacheManager
from octavo.testing import conformance
from octavo.testing.kv_manager import questions, rules, suite

MUTANTS = []


def breaks(rule):
    def register(manager):
        MUTANTS.append((manager, rule))
        return manager

    return register


# -- the three questions ----------------------------------------------------------------------------------------


@breaks(questions.SKIPPED_IS_NOT_READ)
class DropsABlockTooMany(WindowManager):
    def skipped_blocks(self, num_computed_tokens):
        return range(super().skipped_blocks(num_computed_tokens + 1).stop)


@breaks(questions.SKIPPED_IS_NOT_READ)
class CountsFromTheEnd(WindowManager):
    def skipped_blocks(self, num_computed_tokens):
        return range(-1, super().skipped_blocks(num_computed_tokens).stop)


@breaks(questions.SKIPPED_IS_NOT_READ)
class StartsBelowNothing(WindowManager):
    def skipped_blocks(self, num_computed_tokens):
        return super().skipped_blocks(num_computed_tokens) or range(-1, -1)


@breaks(questions.ANSWERS_ARE_INTS)
class BoundsInFloats(WindowManager):
    @classmethod
    def max_blocks_per_request(cls, spec, max_model_len, max_tokens_in_flight):
        return float(super().max_blocks_per_request(spec, max_model_len, max_tokens_in_flight))


@breaks(questions.BOUND_IS_MONOTONE)
class NeedsLessFarOut(WindowManager):
    @classmethod
    def max_blocks_per_request(cls, spec, max_model_len, max_tokens_in_flight):
        bound = super().max_blocks_per_request(spec, max_model_len, max_tokens_in_flight)
        return bound if max_model_len < 5000 else 1


@breaks(rules.BLOCKS_STAY_BOUNDED)
class BoundsWith500InFlight(WindowManager):
    @classmethod
    def max_blocks_per_request(cls, spec, max_model_len, max_tokens_in_flight):
        return super().max_blocks_per_request(spec, max_model_len, min(max_tokens_in_flight, 500))


@breaks(rules.READS_ARE_THERE)
class CountsTokensIn9Bits(WindowManager):
    """Drops what is still read, in a long request only."""

    takes_long: ClassVar[bool] = True

    def skipped_blocks(self, num_computed_tokens):
        return range(super().skipped_blocks(num_computed_tokens).stop + (num_computed_tokens > 511))


@breaks(rules.REFERENCES_ADD_UP)
class LosesABlockAfterAThousandRequests(WindowManager):
    takes_long: ClassVar[bool] = True
    num_freed = 0

    def free(self, row):
        self.num_freed += 1
        if self.num_freed == 1500:
            self.block_tables[row, 0] = 0
        super().free(row)


@breaks(rules.NOTHING_IS_LEFT)
class FreesEightRowsAtMost(WindowManager):
    def free(self, row):
        super().free(row % 8)


@breaks(rules.BLOCKS_STAY_BOUNDED)
class DropsNothing(WindowManager):
    def skipped_blocks(self, num_computed_tokens):
        return range(0)


@breaks(rules.BLOCKS_STAY_BOUNDED)
class ForgetsThatAStepBeginsInsideABlock(WindowManager):
    @classmethod
    def max_blocks_per_request(cls, spec, max_model_len, max_tokens_in_flight):
        return -(-min(spec.window - 1 + max_tokens_in_flight, max_model_len) // spec.block_size) + 1


@breaks(questions.BOUND_IS_MONOTONE)
class NeedsLessForMore(WindowManager):
    @classmethod
    def max_blocks_per_request(cls, spec, max_model_len, max_tokens_in_flight):
        return super().max_blocks_per_request(spec, max_model_len, max_tokens_in_flight) + (max_model_len == 9)


@breaks(questions.QUIET_IS_QUIET)
class SleepsThroughAFullBlock(WindowManager):
    def quiet_until(self, num_tokens):
        return num_tokens + self.block_size - num_tokens % self.block_size


@breaks(questions.QUIET_IS_QUIET)
class SleepsForATokenTooLong(WindowManager):
    def quiet_until(self, num_tokens):
        return super().quiet_until(num_tokens) + (num_tokens % 5 == 0)


@breaks(questions.QUIET_IS_QUIET)
class WakesUpBeforeItSleeps(WindowManager):
    def quiet_until(self, num_tokens):
        return super().quiet_until(num_tokens) - 2 * (num_tokens % 7 == 0)


@breaks(questions.QUESTIONS_ARE_PURE)
class AnswersByTurns(WindowManager):
    turn = 0

    def skipped_blocks(self, num_computed_tokens):
        self.turn += 1
        return range(super().skipped_blocks(num_computed_tokens).stop * (self.turn % 2))


@breaks(questions.TABLE_COVERS_TOKENS)
class CountsFullBlocksOnly(WindowManager):
    def num_blocks_needed(self, num_tokens):
        return num_tokens // self.block_size


@breaks(questions.PREFIX_IS_LONGEST)
class ContentWithAShorterRun(WindowManager):
    def longest_prefix(self, is_cached, max_blocks, alignment_blocks):
        return next((end for end in range(max_blocks, 0, -1) if end % alignment_blocks == 0 and is_cached(end - 1)), 0)


@breaks(questions.PREFIX_IS_LONGEST)
class LooksFromTheLeftOnly(WindowManager):
    def longest_prefix(self, is_cached, max_blocks, alignment_blocks):
        count = next((block for block in range(max_blocks) if not is_cached(block)), max_blocks)
        return count - count % alignment_blocks


@breaks(questions.PREFIX_IS_LONGEST)
class IgnoresTheAlignment(WindowManager):
    def longest_prefix(self, is_cached, max_blocks, alignment_blocks):
        return super().longest_prefix(is_cached, max_blocks, 1)


@breaks(questions.PREFIX_ASKS_WITHIN)
class AsksPastTheLimit(WindowManager):
    def longest_prefix(self, is_cached, max_blocks, alignment_blocks):
        is_cached(max_blocks)
        return super().longest_prefix(is_cached, max_blocks, alignment_blocks)


@breaks(questions.SHORTER_PREFIXES_HOLD)
class SaysThatNothingIsSkipped(WindowManager):
    shorter_prefixes_hold = True


@breaks(questions.SHORTER_PREFIXES_HOLD)
class SaysThatShorterPrefixesHold(WindowManager):
    """Skips nothing, and needs no more than a window for a hit."""

    shorter_prefixes_hold = True

    def skipped_blocks(self, num_computed_tokens):
        return range(0)


# -- finding and adopting ---------------------------------------------------------------------------------------


@breaks(rules.HIT_IS_WHAT_IS_CACHED)
class NamesWhatNothingReads(WindowManager):
    def find_longest_cache_hit(self, keys, max_num_tokens, alignment_tokens):
        hit = super().find_longest_cache_hit(keys, max_num_tokens, alignment_tokens)
        return [self.pool.get_cached_block(key, self.group_id) or 0 for key in keys[: len(hit)]]


@breaks(rules.HIT_IS_WHAT_IS_CACHED)
class RoundsTheLimitUp(WindowManager):
    def find_longest_cache_hit(self, keys, max_num_tokens, alignment_tokens):
        return super().find_longest_cache_hit(keys, max_num_tokens + self.block_size - 1, alignment_tokens)


@breaks(suite.LOOKING_CHANGES_NOTHING)
class TouchesWhatItFinds(WindowManager):
    def find_longest_cache_hit(self, keys, max_num_tokens, alignment_tokens):
        hit = super().find_longest_cache_hit(keys, max_num_tokens, alignment_tokens)
        self.pool.touch(hit)
        self.pool.free_blocks([block for block in hit if block])
        return hit


@breaks(suite.LOOKING_CHANGES_NOTHING)
class RemembersWhatItFound(WindowManager):
    def find_longest_cache_hit(self, keys, max_num_tokens, alignment_tokens):
        self.found = getattr(self, "found", {})
        question = (tuple(keys), max_num_tokens, alignment_tokens)
        if question not in self.found:
            self.found[question] = super().find_longest_cache_hit(keys, max_num_tokens, alignment_tokens)
        return self.found[question]


@breaks(suite.GROUPS_ARE_APART)
class IsAlwaysGroupZero(WindowManager):
    def __init__(self, spec, pool, group_id, num_rows):
        super().__init__(spec, pool, 0, num_rows)


@breaks(rules.REFERENCES_ADD_UP)
class AdoptsWithoutHolding(WindowManager):
    def allocate_new_computed_blocks(self, row, hit):
        self.pool.touch([block for block in hit if self.pool.is_free(block)])
        self._append(row, hit)
        self.num_cached_blocks[row] = len(hit)


@breaks(rules.FULL_BLOCKS_ARE_REGISTERED)
class RegistersAdoptedBlocksAgain(WindowManager):
    def allocate_new_computed_blocks(self, row, hit):
        super().allocate_new_computed_blocks(row, hit)
        self.num_cached_blocks[row] = 0


# -- allocating -------------------------------------------------------------------------------------------------


@breaks(rules.PREDICTION_IS_EXACT)
class ForgetsThatHitsMayBeFree(WindowManager):
    def get_num_blocks_to_allocate(self, row, num_tokens, hit=()):
        return super().get_num_blocks_to_allocate(row, num_tokens, [0] * len(hit))


@breaks(rules.PREDICTION_IS_EXACT)
class PredictsNoMoreThanTheBound(WindowManager):
    def get_num_blocks_to_allocate(self, row, num_tokens, hit=()):
        return min(super().get_num_blocks_to_allocate(row, num_tokens, hit), self.spec.window // self.block_size)


@breaks(rules.PREDICTION_IS_EXACT)
class TakesABlockAhead(WindowManager):
    def allocate_new_blocks(self, row, num_tokens):
        return super().allocate_new_blocks(row, num_tokens + self.block_size)


@breaks(rules.TABLE_HAS_ITS_LENGTH)
class LeavesItsTableTooLong(WindowManager):
    def _append(self, row, block_ids):
        super()._append(row, block_ids)
        if self.num_blocks[row] < self.block_tables.shape[1]:
            self.block_tables[row, self.num_blocks[row]] = 1


@breaks(rules.ROWS_CAN_BE_ADDED)
class StartsAnewWithMoreRows(WindowManager):
    def reserve_rows(self, num_rows):
        super().reserve_rows(num_rows)
        self.num_blocks = self.num_blocks * 0


@breaks(rules.ROWS_CAN_BE_ADDED)
class HasOnlyItsFirstRows(WindowManager):
    def reserve_rows(self, num_rows):
        pass


@breaks(conformance.RAISES_NOTHING)
class HasShortTables(WindowManager):
    def _append(self, row, block_ids):
        end = self.num_blocks[row] + len(block_ids)
        self.block_tables[row, self.num_blocks[row] : end] = block_ids
        self.num_blocks[row] = end


# -- registering, dropping, giving back -------------------------------------------------------------------------


@breaks(rules.KEYS_ARE_TRUE)
class RegistersUnderTheNeighboursKey(WindowManager):
    def cache_blocks(self, row, keys, num_tokens):
        return super().cache_blocks(
            row, [keys[i ^ 1] if i ^ 1 < len(keys) else key for i, key in enumerate(keys)], num_tokens
        )


@breaks(rules.FULL_BLOCKS_ARE_REGISTERED)
class RegistersOnlyEverySecondBlock(WindowManager):
    def cache_blocks(self, row, keys, num_tokens):
        return super().cache_blocks(row, keys, num_tokens - num_tokens % (2 * self.block_size))


@breaks(rules.KEYS_ARE_TAKEN_OFF)
class KeepsProvisionalKeys(WindowManager):
    def uncache_blocks(self, row, first_block):
        self.num_cached_blocks[row] = min(self.num_cached_blocks[row], first_block)


@breaks(rules.SKIPPED_IS_DROPPED)
class LeavesDroppedBlocksInTheTable(WindowManager):
    def remove_skipped_blocks(self, row, num_computed_tokens):
        table = self.block_table(row).copy()
        super().remove_skipped_blocks(row, num_computed_tokens)
        self.block_table(row)[:] = table


@breaks(rules.DEEPEST_GOES_FIRST)
class DropsFromTheLeft(WindowManager):
    def remove_skipped_blocks(self, row, num_computed_tokens):
        entries = [i for i in self.skipped_blocks(num_computed_tokens) if i < self.num_blocks[row]]
        table = self.block_table(row)
        removed = [int(table[i]) for i in entries if table[i]]
        table[entries] = 0
        self.pool.free_blocks(removed)


@breaks(rules.DEEPEST_GOES_FIRST)
class GivesBackTheFirstBlockFirst(WindowManager):
    def free(self, row):
        self.block_table(row)[:] = self.block_table(row)[::-1].copy()
        super().free(row)


@breaks(rules.NULL_IS_NOT_FREED)
class GivesBackNullEntries(WindowManager):
    def free(self, row):
        self.pool.free_blocks(self.block_table(row)[::-1].tolist())
        self.block_table(row)[:] = 0
        super().free(row)


@breaks(rules.REFERENCES_ADD_UP)
class LosesTheFirstBlock(WindowManager):
    def free(self, row):
        if self.num_blocks[row] > 1:
            self.block_table(row)[0] = 0
        super().free(row)


@breaks(rules.POOL_IS_USED_RIGHT)
class GivesBackTwice(WindowManager):
    def free(self, row):
        self.pool.free_blocks([int(block) for block in self.block_table(row) if block])
        super().free(row)


@breaks(rules.NOTHING_IS_LEFT)
class KeepsCountingRegisteredBlocks(WindowManager):
    def free(self, row):
        count = self.num_cached_blocks[row]
        super().free(row)
        self.num_cached_blocks[row] = count


# -- what the class states --------------------------------------------------------------------------------------


@breaks(conformance.STATES_ITS_VERSION)
class FollowsTheInstalledVersion(WindowManager):
    contract_version = CONTRACT_VERSION


@breaks(conformance.STATES_ITS_VERSION)
class IsFromTheFuture(WindowManager):
    contract_version = 99


@breaks(conformance.STATES_ITS_VERSION)
class StatesNoVersion(SingleTypeKVCacheManager):
    serves: ClassVar[type[KVCacheSpec]] = WindowSpec

    def longest_prefix(self, is_cached, max_blocks, alignment_blocks):
        return 0


@breaks(questions.SERVES_A_SPEC)
class ServesNothing(WindowManager):
    serves = None


# -- specs ------------------------------------------------------------------------------------------------------


class NamelessSpec(WindowSpec):
    kind: ClassVar[str] = ""


class EmptySpec(WindowSpec):
    @property
    def page_bytes(self):
        return 0


class UndecoratedSpec(WindowSpec):
    num_heads: int = 3


class ForgetfulSpec(WindowSpec):
    """Equal to nothing, itself excepted."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


BROKEN_SPECS = [NamelessSpec(4, 10), EmptySpec(4, 10), UndecoratedSpec(4, 10), ForgetfulSpec(4, 10)]
