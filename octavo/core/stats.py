"""Counters of the scheduler and the KV cache."""

from dataclasses import dataclass


@dataclass
class Counters:
    """What the scheduler has counted so far; see `EngineStats` for what each one counts."""

    steps: int = 0
    added_requests: int = 0
    ended_requests: int = 0
    prompt_tokens: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    found_tokens: int = 0
    waits_for_step: int = 0
    waits_for_memory: int = 0
    never_fitted: int = 0


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Those up to `waiting_because` are of the moment; the rest only grow.

    Attributes:
        running: Requests that hold blocks.
        waiting: Requests that do not, preempted ones included.
        free_blocks: Blocks that nobody holds, cached ones included.
        used_blocks: Blocks that somebody holds.
        cached_blocks: Blocks that can be found by their content, held or not.
        waiting_because: Why the first of those that wait was not admitted in the latest step; None when nobody waits.
        steps: Steps that computed something.
        added_requests: Requests that were accepted.
        ended_requests: Requests that ended, for whatever reason.
        prompt_tokens: Tokens of requests when they were first admitted.
        queried_tokens: Those of them that were looked up in the prefix cache.
        hit_tokens: Those of them that it had.
        computed_tokens: Tokens that steps computed, repetitions included.
        generated_tokens: Tokens that were sampled.
        preemptions: Times that a running request lost its blocks.
        recomputed_tokens: Tokens computed again after a preemption, because the cache no longer had them.
        found_tokens: Tokens that a resumed request had not computed before and found, because another one had.
        evicted_blocks: Findable blocks that were handed out for other content.
        waits_for_step: Times that a request did not fit before the step was over, for its prefix was being computed.
        waits_for_memory: Times that a request did not fit into the free blocks.
        never_fitted: Times that a request did not fit into the whole KV cache.
        verified_tokens: Tokens of hits that were computed anew and compared; only with `verify_prefix_cache`, as those
            below.
        unverified_tokens: Tokens of hits that could not be compared: there were too few free blocks for it, nothing
            reads them, or the step that computes them was yet to run.
        verification_failures: Hits that differed from what was computed anew, and blocks that were not hit because
            their key stands for other tokens in the cache.
    """

    running: int
    waiting: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    waiting_because: str | None
    steps: int
    added_requests: int
    ended_requests: int
    prompt_tokens: int
    queried_tokens: int
    hit_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    recomputed_tokens: int
    found_tokens: int
    evicted_blocks: int
    waits_for_step: int
    waits_for_memory: int
    never_fitted: int
    verified_tokens: int = 0
    unverified_tokens: int = 0
    verification_failures: int = 0
