"""From what the engine returns to what callers read: text, stop strings, and choices gathered into requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.interfaces.model import Tokenizer
from octavo.core.outputs import CompletionOutput, EngineOutput, FinishReason, RequestOutput, TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.detokenizer import IncrementalDetokenizer
from octavo.errors import InvalidRequestError
from octavo.stop_strings import StopMatch, StopStringMatcher

logger = logging.getLogger(__name__)

DETOKENIZER_FAILED = "detokenizer_failed"


@dataclass(frozen=True)
class RequestUpdate:
    """What one step added to one choice. A choice's updates, joined, are its final output.

    Attributes:
        request_id: The caller's id.
        index: Which of the n choices.
        new_text: Text to append; what may yet become part of a character or of a stop string is not in it.
        new_token_ids: Ids to append. Text can lag behind them.
        new_logprobs: One a new id when asked for, else None.
        finish_reason: As in `CompletionOutput`; not None in the choice's last update only.
        stop_reason: As in `CompletionOutput`.
        num_cached_tokens: Prompt tokens that the prefix cache saved from being computed for this choice.
    """

    request_id: str
    index: int
    new_text: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_cached_tokens: int


@dataclass
class ProcessedStep:
    """What one step means to callers. All of it is theirs to keep: later steps change none of it.

    Attributes:
        updates: One for each choice with news, in the engine's order.
        finished: Requests whose last choice ended in this step.
        core_ids_to_abort: Core requests that a stop string ended and the engine still runs. The caller must abort
            them in the engine.
    """

    updates: list[RequestUpdate] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)
    core_ids_to_abort: list[str] = field(default_factory=list)


class OutputProcessor:
    """Follows every request from `add_request` to its last output.

    The engine knows core requests: one for each choice. This class makes their ids, and gathers their outputs.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        self._choices: dict[str, _Choice] = {}
        # Core requests that a stop string ended here and whose end the engine has not reported yet. Their ids are not
        # given out again until then, or a late entry would reach the wrong request.
        self._ending_core_ids: set[str] = set()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def live_request_ids(self) -> frozenset[str]:
        """Requests whose last output has not been made yet."""
        return frozenset(self._requests)

    @property
    def live_core_ids(self) -> frozenset[str]:
        """Core requests whose end the engine has still to report, those that a stop string ended included."""
        return frozenset(self._choices) | self._ending_core_ids

    def add_request(
        self, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> list[str]:
        """Register a request before the engine gets it.

        Returns:
            The core requests' ids, by choice: the request's own id, or with n > 1 "id#0", "id#1" and so on. Each gets a
            suffix while the engine has still to end a core request of that name.

        Raises:
            InvalidRequestError: The id is in use, or text is wanted and there is no tokenizer. Nothing was registered.
        """
        if request_id in self._requests:
            raise InvalidRequestError(
                f"The request id {request_id!r} is in use; wait for that request to finish, or take another id.",
                parameter="request_id",
            )
        if params.detokenize and self._tokenizer is None:
            raise InvalidRequestError(
                "The model has no tokenizer to make text with; set detokenize=False.", parameter="detokenize"
            )
        names = _names(request_id, params.n)
        for name in names:
            if name in self._choices or (name != request_id and name in self._requests):
                raise InvalidRequestError(
                    f"The request id {request_id!r} would share the internal id {name!r} with a request that is under "
                    "way; take another id.",
                    parameter="request_id",
                )
        core_ids = [self._free_core_id(name) for name in names]
        choices = [_Choice(index, params, self._tokenizer) for index in range(params.n)]
        request = _Request(request_id, prompt, list(prompt_token_ids), dict(zip(core_ids, choices, strict=True)))
        self._requests[request_id] = request
        for core_id, choice in request.choices.items():
            choice.request = request
            self._choices[core_id] = choice
        return core_ids

    def process(self, engine_output: EngineOutput) -> ProcessedStep:
        """Take in one step. Entries of requests that are not, or no longer, known are ignored."""
        step = ProcessedStep()
        for entry, core_id in enumerate(engine_output.request_ids):
            finish_reason = engine_output.finish_reasons[entry]
            choice = self._choices.get(core_id)
            if choice is None:
                if finish_reason is not None:
                    self._ending_core_ids.discard(core_id)
                continue
            choice.num_cached_tokens = engine_output.num_cached_tokens[entry]
            choice.num_preemptions = engine_output.num_preemptions[entry]
            token_ids, logprobs = engine_output.token_ids_of(entry), engine_output.logprobs[entry]
            try:
                if finish_reason is None:
                    new_text = choice.add(token_ids, logprobs)
                else:
                    new_text = choice.add_last(token_ids, logprobs, finish_reason, engine_output.stop_reasons[entry])
            # A tokenizer is somebody else's code; what it trips over in one answer is not the others' business.
            except Exception:
                logger.exception("the text of %s cannot be made", core_id)
                new_text = choice.fail()
            update = choice.take_update(new_text)
            if update is not None:
                step.updates.append(update)
            if choice.finish_reason is None:
                continue
            del self._choices[core_id]
            if finish_reason is None:
                self._ending_core_ids.add(core_id)
                step.core_ids_to_abort.append(core_id)
            if choice.request.is_finished:
                del self._requests[choice.request.request_id]
                step.finished.append(choice.request.output())
        return step

    def output_of(self, request_id: str) -> RequestOutput | None:
        """Return all that came of a live request so far, as a copy; None when there is no such request."""
        request = self._requests.get(request_id)
        return None if request is None else request.output()

    def abort(self, request_id: str) -> list[str]:
        """Return the core requests that the engine must abort for the caller's request to end.

        Nothing changes here yet: the last output comes with the engine's entries for them. Empty for a request that
        is not live.
        """
        request = self._requests.get(request_id)
        if request is None:
            return []
        return [core_id for core_id, choice in request.choices.items() if choice.finish_reason is None]

    def discard(self, request_id: str) -> list[str]:
        """Forget a request that could not be started after all; return its core ids, for the engine to abort."""
        request = self._requests.pop(request_id)
        for core_id in request.choices:
            del self._choices[core_id]
        return list(request.choices)

    def request_id_of(self, core_id: str) -> str:
        """Return the caller's id of a live core request."""
        return self._choices[core_id].request.request_id

    def is_free(self, request_id: str, num_choices: int) -> bool:
        """Say whether a request of that id and so many choices could be added."""
        names = _names(request_id, num_choices)
        return request_id not in self._requests and not any(map(self._is_taken, names))

    def _free_core_id(self, name: str) -> str:
        core_id, attempt = name, 0
        while core_id in self._ending_core_ids or (attempt > 0 and self._is_taken(core_id)):
            attempt += 1
            core_id = f"{name}~{attempt}"
        return core_id

    def _is_taken(self, core_id: str) -> bool:
        return core_id in self._choices or core_id in self._requests


@dataclass
class _Request:
    """A caller's request, with its choices by core id, in order."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: dict[str, _Choice]

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices.values())

    def output(self) -> RequestOutput:
        choices = list(self.choices.values())
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            num_cached_tokens=choices[0].num_cached_tokens,
            num_preemptions=sum(choice.num_preemptions for choice in choices),
            finished=self.is_finished,
            outputs=[choice.output() for choice in choices],
        )


class _Choice:
    """One choice under way.

        token ids   [ taken in updates | not yet, cut at a match ]
        text        [ returned         | held by the matcher | held by the detokenizer ]

    Ids are taken up to the token that completed a stop string, even while it is open which stop string it will be, so
    that no id is ever handed out that the final output lacks.
    """

    request: _Request

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self._params = params
        self._detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize and tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopStringMatcher(params.stop_strings) if params.stop_strings else None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._text_pieces: list[str] = []
        self._num_taken = 0
        self._seen_match: StopMatch | None = None
        self._num_tokens_at_match = 0

    def add(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> str:
        """Take in tokens, up to the one that makes a stop string certain; return the text that may be shown."""
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.extend(logprobs)
        shown = []
        for token_id in token_ids:
            self._token_ids.append(token_id)
            if self._detokenizer is not None:
                shown.append(self._match(self._detokenizer.add([token_id])))
            if self.finish_reason is not None:
                break
        return self._keep("".join(shown))

    def add_last(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish_reason: FinishReason,
        stop_reason: int | str | None,
    ) -> str:
        """Take in the last tokens and end, for the reason given or an earlier stop string; return the text left."""
        num_silent = 1 if token_ids and finish_reason == "stop" and self._leaves_out_text_of(stop_reason) else 0
        shown = self.add(token_ids[: len(token_ids) - num_silent], logprobs)
        if self.finish_reason is not None:
            return shown
        rest = ""
        if self._detokenizer is not None:
            rest = self._match(self._detokenizer.finish())
        if self._matcher is not None and self.finish_reason is None:
            rest += self._matcher.finish()
            rest += self._end_at_match()
        if self.finish_reason is None:
            self._token_ids.extend(token_ids[len(token_ids) - num_silent :])
            self.finish_reason, self.stop_reason = finish_reason, stop_reason
        return shown + self._keep(rest)

    def fail(self) -> str:
        """End because no more text can be made; return the text left, which is none."""
        self.finish_reason, self.stop_reason = "error", DETOKENIZER_FAILED
        return ""

    def take_update(self, new_text: str) -> RequestUpdate | None:
        """Return what is new since the last update; None when nothing is."""
        end = len(self._token_ids)
        if self._matcher is not None and self._matcher.pending is not None:
            end = self._num_tokens_at_match
        start, self._num_taken = self._num_taken, end
        if start == end and not new_text and self.finish_reason is None:
            return None
        return RequestUpdate(
            request_id=self.request.request_id,
            index=self.index,
            new_text=new_text,
            new_token_ids=self._token_ids[start:end],
            new_logprobs=None if self._logprobs is None else self._logprobs[start:end],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_cached_tokens=self.num_cached_tokens,
        )

    def output(self) -> CompletionOutput:
        """Return a copy of what the updates so far add up to."""
        logprobs = None if self._logprobs is None else self._logprobs[: self._num_taken]
        return CompletionOutput(
            index=self.index,
            text="".join(self._text_pieces),
            token_ids=self._token_ids[: self._num_taken],
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum((entry.logprob for entry in logprobs), 0.0),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _leaves_out_text_of(self, stop_reason: int | str | None) -> bool:
        # End of sequence has no stop reason. Its id is not in every tokenizer's list of special tokens.
        if stop_reason is None:
            return self._params.skip_special_tokens
        return not self._params.include_stop_str_in_output

    def _match(self, text: str) -> str:
        # The text of the first `min_tokens` tokens is never looked at, not even as the beginning of a stop string.
        if self._matcher is None or len(self._token_ids) <= self._params.min_tokens:
            return text
        shown = self._matcher.add(text)
        match = self._matcher.match or self._matcher.pending
        if match != self._seen_match:
            self._seen_match, self._num_tokens_at_match = match, len(self._token_ids)
        return shown + self._end_at_match()

    def _end_at_match(self) -> str:
        """End if a stop string is certain; return as much of it as belongs to the text."""
        match = None if self._matcher is None else self._matcher.match
        if match is None:
            return ""
        self.finish_reason, self.stop_reason = "stop", match.string
        # Log-probabilities are handed out for as many tokens as there are.
        del self._token_ids[self._num_tokens_at_match :]
        return match.string if self._params.include_stop_str_in_output else ""

    def _keep(self, text: str) -> str:
        if text:
            self._text_pieces.append(text)
        return text


def _names(request_id: str, num_choices: int) -> list[str]:
    """Return what the core requests of a request are called, by choice."""
    return [request_id] if num_choices == 1 else [f"{request_id}#{index}" for index in range(num_choices)]
