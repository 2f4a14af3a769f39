"""What the engine returns: columns of a step inside, one object a request outside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]

# Stop reasons that are words.
KV_CACHE_FULL = "kv_cache_full"
NON_FINITE_LOGITS = "non_finite_logits"
STUCK = "stuck"
LOST = "lost"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one generated token.

    Attributes:
        token_id: The token that was chosen.
        logprob: Its log-probability under the model, before temperature and truncation.
        top: The most likely tokens and theirs, likeliest first; as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class EngineOutput:
    """What one step brought, as columns with an entry for each request that has news.

    Attributes:
        request_ids: Whom the entry is about.
        new_token_ids: Ids generated in this step, back to back.
        token_starts: Offsets of the entries' ids in `new_token_ids`. [len(request_ids) + 1]
        finish_reasons: Why the request ended; None while it goes on.
        stop_reasons: The stop token id, or a word such as "kv_cache_full"; None where there is nothing to add.
        logprobs: One a new token for requests that asked, else None.
        num_cached_tokens: Prompt tokens that were not computed, because the prefix cache had them.
        num_preemptions: How often the request has been preempted.
    """

    request_ids: list[str] = field(default_factory=list)
    new_token_ids: list[int] = field(default_factory=list)
    token_starts: list[int] = field(default_factory=lambda: [0])
    finish_reasons: list[FinishReason | None] = field(default_factory=list)
    stop_reasons: list[int | str | None] = field(default_factory=list)
    logprobs: list[list[TokenLogprobs] | None] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)
    num_preemptions: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.request_ids)

    def token_ids_of(self, entry: int) -> list[int]:
        """Return the ids that entry number `entry` brought."""
        return self.new_token_ids[self.token_starts[entry] : self.token_starts[entry + 1]]

    def add_column(
        self,
        request_ids: list[str],
        new_token_ids: list[int],
        logprobs: list[TokenLogprobs | None],
        num_cached_tokens: list[int],
        num_preemptions: list[int],
    ) -> None:
        """Append an entry of one token for each of several requests that go on. Arguments are copied."""
        count, first = len(request_ids), len(self.new_token_ids)
        self.request_ids += request_ids
        self.new_token_ids += new_token_ids
        self.token_starts += range(first + 1, first + count + 1)
        self.finish_reasons += [None] * count
        self.stop_reasons += [None] * count
        self.logprobs += [None if given is None else [given] for given in logprobs]
        self.num_cached_tokens += num_cached_tokens
        self.num_preemptions += num_preemptions

    def add(
        self,
        request_id: str,
        new_token_ids: list[int],
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        num_cached_tokens: int = 0,
        num_preemptions: int = 0,
    ) -> None:
        """Append one entry."""
        self.request_ids.append(request_id)
        self.new_token_ids.extend(new_token_ids)
        self.token_starts.append(len(self.new_token_ids))
        self.finish_reasons.append(finish_reason)
        self.stop_reasons.append(stop_reason)
        self.logprobs.append(logprobs)
        self.num_cached_tokens.append(num_cached_tokens)
        self.num_preemptions.append(num_preemptions)


@dataclass
class CompletionOutput:
    """One choice of a request.

    Attributes:
        index: Which of the n choices.
        text: Text so far; empty with detokenize=False.
        token_ids: Ids so far, the end-of-sequence id included.
        logprobs: One a token when asked for, else None.
        cumulative_logprob: Sum of the tokens' log-probabilities when asked for, else None.
        finish_reason: "stop" (end of sequence, stop id or stop string), "length", "abort" or "error"; None while the
            choice goes on.
        stop_reason: The stop string or stop token id that ended it; "kv_cache_full" with "length", where the request
            filled the KV cache alone; "non_finite_logits", "detokenizer_failed", "stuck" or "lost" with "error"; None
            for end of sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A request and all that came of it.

    Attributes:
        request_id: The caller's id, or one that was made for it.
        prompt: The prompt, when it was given as text.
        prompt_token_ids: The prompt as the model saw it.
        num_cached_tokens: Prompt tokens that the prefix cache saved from being computed, in the first choice.
        num_preemptions: Preemptions of all choices together.
        finished: Whether every choice has ended.
        outputs: The choices, by index.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finished: bool = False
    outputs: list[CompletionOutput] = field(default_factory=list)
