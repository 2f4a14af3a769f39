"""Counters of the scheduler and the KV cache."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. The first four are of the moment; the rest only grow.

    Attributes:
        running: Requests that hold blocks.
        waiting: Requests that do not, preempted ones included.
        free_blocks: Blocks that nobody holds, cached ones included.
        used_blocks: Blocks that somebody holds.
        queried_tokens: Tokens of admitted requests, each request counted once, when it is first admitted.
        hit_tokens: Those of them that the prefix cache had.
        recomputed_tokens: Tokens computed again after a preemption, because the cache no longer had them.
        preemptions: Times that a running request lost its blocks.
        steps: Steps that computed something.
    """

    running: int
    waiting: int
    free_blocks: int
    used_blocks: int
    queried_tokens: int
    hit_tokens: int
    recomputed_tokens: int
    preemptions: int
    steps: int
