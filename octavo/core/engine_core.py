"""The engine: requests as token ids in, new token ids out, one step at a time."""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, NoReturn, Protocol

from octavo.core.outputs import EngineOutput
from octavo.core.prefix_verifier import PrefixVerifier
from octavo.core.request import AdapterKey, Request
from octavo.core.sampling_params import SamplingParams, has_lone_surrogate
from octavo.core.scheduler import Scheduler
from octavo.core.stats import EngineStats
from octavo.core.step_plan import StepPlan, StepResult
from octavo.core.verdict import ResetResult
from octavo.errors import EngineClosedError, InvalidRequestError, StepError, describe_with_place

MAX_CACHE_SALT_CHARS = 1024
MAX_REQUEST_ID_CHARS = 512


class Runner(Protocol):
    """What executes a plan."""

    def run(self, plan: StepPlan) -> StepResult: ...


class EngineCore:
    """Checks requests, and turns the crank: plan, run, take in.

    Args:
        scheduler: Plans the steps.
        runner: Executes them.
        vocab_size: Token ids are below it.
        max_model_len: Tokens in the longest request, prompt and output together.
        eos_token_ids: Ids that end a request unless it ignores them.
        seed: What the seeds of requests without one of their own are derived from.
        accepts_cache_salts: Whether the prefix cache's keys are strong enough to keep tenants apart.
        async_scheduling: Whether a step is planned, in a thread of its own, while the one before it runs.
        prefix_verifier: Compares what requests found in the prefix cache; None trusts it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        accepts_cache_salts: bool = True,
        async_scheduling: bool = False,
        prefix_verifier: PrefixVerifier | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner: Runner | None = runner
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.seed = seed
        self.accepts_cache_salts = accepts_cache_salts
        self._num_arrivals = 0
        self._prefix_verifier = prefix_verifier
        self._planner = ThreadPoolExecutor(1, "octavo-planner") if async_scheduling else None
        # The next plan, where it was made ahead.
        self._ahead: Future[StepPlan] | None = None

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: AdapterKey | None = None,
    ) -> None:
        """Check a request and put it in line.

        Args:
            request_id: Unique among the requests under way.
            prompt_token_ids: At least one id, and fewer than `max_model_len`.
            params: How to sample; its `n` is the caller's business, one call adds one choice.
            choice: Which choice this is.
            priority: Only 0 has a meaning to a queue that does not order by priority.
            cache_salt: Requests share cached prefixes only with requests of the same salt.
            adapter: The name of the adapter that changes the model's weights for this request, and a number that is
                raised whenever weights of that name change. Requests share cached prefixes only with requests of the
                same name and number.

        Raises:
            InvalidRequestError: The request cannot be served as asked. Nothing has changed.
        """
        token_ids = self.check_request(
            request_id, prompt_token_ids, params, priority=priority, cache_salt=cache_salt, adapter=adapter
        )
        self.add_checked_request(
            request_id, token_ids, params, choice=choice, priority=priority, cache_salt=cache_salt, adapter=adapter
        )

    def add_checked_request(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: AdapterKey | None = None,
    ) -> None:
        """Put a request in line whose arguments `check_request` has seen; its ids are what that returned.

        Raises:
            InvalidRequestError: The id is in use. Nothing has changed.
        """
        self._open_runner()
        arrival = self._num_arrivals
        request = Request(
            request_id,
            token_ids,
            params,
            max_model_len=self.max_model_len,
            arrival=arrival,
            choice=choice,
            seed=_derived_seed(self.seed, arrival) if params.seed is None else params.seed,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            eos_token_ids=self.eos_token_ids,
        )
        self.scheduler.add_request(request)
        self._num_arrivals += 1

    def check_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: AdapterKey | None = None,
    ) -> list[int]:
        """Return the prompt's token ids as plain numbers.

        Raises:
            InvalidRequestError: The request cannot be served as asked.
        """
        if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
            raise _invalid("request_id", f"text of 1 to {MAX_REQUEST_ID_CHARS} characters", request_id)
        if not isinstance(params, SamplingParams):
            raise _invalid("params", "a SamplingParams", params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise _invalid("priority", "a whole number", priority)
        if priority and not self.scheduler.waiting.heeds_priority:
            raise InvalidRequestError(
                f"priority is {priority}, and the request queue {type(self.scheduler.waiting).__name__} does not order "
                "by priority; leave it at 0, or choose a queue that does.",
                parameter="priority",
            )
        token_ids = self._checked_prompt(prompt_token_ids)
        self._check_stop_ids(params)
        self._check_salt(cache_salt)
        if adapter is not None and not _is_adapter_key(adapter):
            raise _invalid("adapter", "a name and a whole number", adapter)
        self.scheduler.check_admissible(len(token_ids))
        return token_ids

    def abort_request(self, request_id: str) -> bool:
        """End a request; its last output, with the reason "abort", comes with the next step.

        Returns:
            Whether it was under way. Unknown and finished ids are no error.
        """
        return self.scheduler.abort_request(request_id)

    def has_unfinished_requests(self) -> bool:
        """Say whether a further step has something to compute or to report."""
        return self.scheduler.has_unfinished_requests()

    def step(self) -> EngineOutput:
        """Compute one step and return what it brought.

        An interrupt in the middle may leave the engine in an undefined state; `LLM` steps it in a thread of its own,
        where Python raises none.

        Raises:
            EngineClosedError: After `shutdown`.
            StepError: The model or a backend raised. The step is undone: its requests wait to be computed anew, and
                the caller may step again or abort them.
        """
        runner = self._open_runner()
        plan = self._next_plan()
        if self._prefix_verifier is not None:
            plan = self._verified(plan, self._prefix_verifier)
        self._plan_ahead()
        try:
            result = runner.run(plan)
        except BaseException as cause:
            self._undo(plan, cause)
        self._wait_for_planner()
        return self.scheduler.update_from_output(plan, result)

    def _undo(self, plan: StepPlan, cause: BaseException) -> NoReturn:
        """Undo a step that failed and what was planned after it, and raise a StepError."""
        self._wait_for_planner()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            # Raises what planning raised: then there is nothing to undo that could be trusted.
            ahead.result()
        request_ids = self.scheduler.roll_back(plan)
        if isinstance(cause, KeyboardInterrupt):
            raise cause
        raise StepError(
            f"A step of {plan.num_tokens} tokens failed and was undone: {describe_with_place(cause)}",
            request_ids=request_ids,
        ) from cause

    def _next_plan(self) -> StepPlan:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return self.scheduler.schedule()
        plan = ahead.result()
        if self.scheduler.is_wanted(plan):
            return plan
        # Everybody in it has ended since.
        return self._plan_again(plan)

    def _plan_again(self, plan: StepPlan) -> StepPlan:
        """Undo the latest plan, which was not run, and return another one."""
        self.scheduler.roll_back(plan)
        return self.scheduler.schedule()

    def _verified(self, plan: StepPlan, verifier: PrefixVerifier) -> StepPlan:
        """Return a plan whose requests found in the prefix cache what is right: this one, or one made in its place."""
        while True:
            try:
                is_right = verifier.verify(plan)
            except BaseException as cause:
                self._undo(plan, cause)
            if is_right:
                return plan
            # What was wrong cannot be found any more, so this comes to an end.
            plan = self._plan_again(plan)

    def _plan_ahead(self) -> None:
        """Begin to plan the step after the one that is about to run."""
        if self._planner is not None:
            self._ahead = self._planner.submit(self.scheduler.schedule)

    def _wait_for_planner(self) -> None:
        """Have the scheduler to this thread alone again."""
        if self._ahead is not None:
            wait([self._ahead])

    def take_ended(self) -> EngineOutput:
        """Return the last outputs of aborted requests without waiting for the next step."""
        return self.scheduler.take_ended()

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        stats = self.scheduler.stats()
        if self._prefix_verifier is None:
            return stats
        return replace(stats, **vars(self._prefix_verifier.counters))

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> ResetResult:
        """Forget all cached prefixes, and say what was done; see `Scheduler.reset_prefix_cache`."""
        if reset_running_requests and self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            # Raises what planning raised.
            ahead.result()
        return self.scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def shutdown(self) -> None:
        """Let go of the model and the KV cache. Further calls do nothing."""
        self.runner = None
        if self._planner is not None:
            self._planner.shutdown()

    def _open_runner(self) -> Runner:
        if self.runner is None:
            raise EngineClosedError("The engine was shut down; make a new one.")
        return self.runner

    def _checked_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
        if isinstance(prompt_token_ids, (str, bytes)) or not isinstance(prompt_token_ids, Sequence):
            raise _invalid("prompt_token_ids", "a list of token ids", prompt_token_ids)
        if not prompt_token_ids:
            raise InvalidRequestError("The prompt is empty; it needs at least one token.", parameter="prompt")
        if len(prompt_token_ids) >= self.max_model_len:
            raise InvalidRequestError(
                f"The prompt has {len(prompt_token_ids)} tokens, and max_model_len={self.max_model_len} leaves room "
                f"for prompts of at most {self.max_model_len - 1} and one new token. Shorten it; a longer "
                "max_model_len takes a model and a KV cache that allow it.",
                parameter="prompt",
            )
        token_ids = []
        for position, given in enumerate(prompt_token_ids):
            token_id = _as_id(given, self.vocab_size)
            if token_id is None:
                raise InvalidRequestError(
                    f"Token id {given!r} at position {position} of the prompt is not in the vocabulary; ids are "
                    f"whole numbers from 0 to {self.vocab_size - 1}.",
                    parameter="prompt_token_ids",
                )
            token_ids.append(token_id)
        return token_ids

    def _check_stop_ids(self, params: SamplingParams) -> None:
        for token_id in params.stop_token_ids or ():
            if _as_id(token_id, self.vocab_size) is None:
                raise _invalid("stop_token_ids", f"ids from 0 to {self.vocab_size - 1}", token_id)
        stops = set(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        if params.min_tokens and len(stops) >= self.vocab_size:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, and every token id would stop the request before it; leave some "
                "out of stop_token_ids.",
                parameter="stop_token_ids",
            )

    def _check_salt(self, cache_salt: str | None) -> None:
        if cache_salt is None:
            return
        if not isinstance(cache_salt, str) or not 0 < len(cache_salt) <= MAX_CACHE_SALT_CHARS:
            raise _invalid("cache_salt", f"text of 1 to {MAX_CACHE_SALT_CHARS} characters", cache_salt)
        if has_lone_surrogate(cache_salt):
            raise _invalid("cache_salt", "text without lone surrogates", ascii(cache_salt))
        if not self.accepts_cache_salts:
            raise InvalidRequestError(
                "cache_salt keeps tenants apart, and the configured hash function's collisions can be constructed; "
                "choose hash_function='sha256', or leave the salt out.",
                parameter="cache_salt",
            )


def _as_id(given: Any, vocab_size: int) -> int | None:
    """Return a token id as a plain number; None when it is none of this vocabulary."""
    try:
        token_id = operator.index(given)
    # Also what an object of someone else's raises from its own __index__.
    except Exception:
        return None
    return token_id if 0 <= token_id < vocab_size and not isinstance(given, bool) else None


def _is_adapter_key(given: Any) -> bool:
    match given:
        case (str(name), int(epoch)) if isinstance(given, tuple):
            return bool(name) and not has_lone_surrogate(name) and not isinstance(epoch, bool)
    return False


def _invalid(parameter: str, wanted: str, value: Any) -> InvalidRequestError:
    return InvalidRequestError(f"{parameter} must be {wanted}, not {repr(value)[:200]}.", parameter=parameter)


def _derived_seed(engine_seed: int, arrival: int) -> int:
    digest = hashlib.blake2b(struct.pack("<qq", engine_seed, arrival), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
