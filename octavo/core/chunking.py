"""How prompts are cut: which part of what is left of a step's budget a prompt gets."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.request import Request

# While others come behind it, a prompt gets at least this share of a step's budget.
_SMALLEST_SHARE = 8


@dataclass(frozen=True)
class Chunking:
    """The rule by which prompts are cut.

    Attributes:
        max_num_batched_tokens: Tokens that a step computes at most.
        is_enabled: Whether a prompt may be computed over several steps.
        long_prefill_token_threshold: Tokens of one prompt that a step computes at most; 0 sets no limit.
    """

    max_num_batched_tokens: int
    is_enabled: bool = True
    long_prefill_token_threshold: int = 0

    def share(self, request: Request, num_behind: int, rest: int, num_others_behind: int) -> int:
        """Return how many tokens of a prompt to compute; 0 where it must wait.

        Args:
            request: Whose prompt it is.
            num_behind: Tokens that are missing.
            rest: What is left of the budget.
            num_others_behind: Requests that get theirs after this one.
        """
        if self.must_run_whole(request):
            return num_behind if num_behind <= rest else 0
        if not self.is_enabled:
            return min(num_behind, rest)
        limit = rest
        if num_others_behind:
            limit = min(limit, max((rest + 1) // 2, self.max_num_batched_tokens // _SMALLEST_SHARE))
        return min(num_behind, limit, self.most_at_once)

    def must_run_whole(self, request: Request) -> bool:
        """Say whether a request's missing tokens are computed in one step or not at all."""
        # One that was preempted may have outgrown the budget; computing it whole would never be possible.
        return not self.is_enabled and request.num_tokens <= self.max_num_batched_tokens

    @property
    def most_at_once(self) -> int:
        """Tokens of one prompt that a step computes at most."""
        return self.long_prefill_token_threshold or self.max_num_batched_tokens
