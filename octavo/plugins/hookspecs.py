"""What observers are told, and when.

An observer is a module whose functions are marked with `octavo.hookimpl` and named as those below; each takes the
argument that it wants, or none. It watches: what it returns goes nowhere, and what it is given is a copy.

    engine_started                      once, before the first request
    request_added    ─┐
    step_finished     │ any number      while the request is under way
    request_finished ─┘                 exactly once for each request that was added
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from octavo.core.outputs import FinishReason
    from octavo.core.sampling_params import SamplingParams
    from octavo.core.stats import EngineStats

PROJECT = "octavo"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class EngineStarted:
    """An engine that is ready.

    Attributes:
        model: As it was asked for; None is the demo model.
        device: As torch names it.
        dtype: Of weights and activations, as torch names it.
        max_model_len: Tokens in the longest request.
        num_kv_blocks: Blocks in the pool, the null block included.
        kv_cache_bytes: What they take together.
        selection: Which parts were chosen and why, a line each.
    """

    model: str | None
    device: str
    dtype: str
    max_model_len: int
    num_kv_blocks: int
    kv_cache_bytes: int
    selection: tuple[str, ...]


@dataclass(frozen=True)
class RequestAdded:
    """A request that was checked and put in line.

    Attributes:
        request_id: The caller's id, or one that was made for it.
        prompt_token_ids: The prompt as the model sees it.
        params: How to sample, the number of choices included.
        priority: Lower is served earlier, where the queue heeds priorities.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int


@dataclass(frozen=True)
class StepFinished:
    """A step of the engine.

    Attributes:
        seconds: How long it took, planning included.
        num_generated_tokens: New tokens of all requests together.
        stats: The engine's counters after it.
    """

    seconds: float
    num_generated_tokens: int
    stats: EngineStats


@dataclass(frozen=True)
class FinishedChoice:
    """One choice of a request that has ended.

    Attributes:
        index: Which of the n choices.
        text: What was generated; empty with detokenize=False.
        token_ids: The same as ids, the end-of-sequence id included.
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: The stop string or stop token id that ended it, or a word; see `CompletionOutput`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None


@dataclass(frozen=True)
class RequestFinished:
    """A request that has ended, in whatever way.

    Attributes:
        request_id: As in `RequestAdded`.
        num_prompt_tokens: Tokens of the prompt.
        num_cached_tokens: Those of them that the prefix cache had, in the first choice.
        num_preemptions: Preemptions of all choices together.
        seconds: Since it was added.
        choices: What came of it, by index.
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    seconds: float
    choices: tuple[FinishedChoice, ...]


@hookspec
def engine_started(engine: EngineStarted) -> None:
    """Called once, when an engine is ready and before its first request."""


@hookspec
def request_added(request: RequestAdded) -> None:
    """Called when a request was checked and put in line."""


@hookspec
def step_finished(step: StepFinished) -> None:
    """Called after each step. A step that failed, and was undone, is not reported."""


@hookspec
def request_finished(request: RequestFinished) -> None:
    """Called when all choices of a request have ended: complete, aborted, or failed."""


@hookspec
def register_routes(app: Any) -> None:
    """Called once by an HTTP server, before it listens, with its FastAPI application."""
