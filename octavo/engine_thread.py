"""The thread that owns an engine: whatever touches the engine or its output processor happens in it.

    callers ── commands ──► inbox ──► the thread: commands, then a step, and again
            ◄── mailbox ◄────────────┘

Callers never hold a lock and never run engine code. So an interrupt, which Python raises in the main thread only, or
a stream that the garbage collector closes at an arbitrary line, cannot meet the engine in the middle of a step.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from octavo.core.outputs import EngineOutput, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.errors import (
    EngineBusyError,
    EngineClosedError,
    InvalidRequestError,
    PluginBroken,
    StepError,
    describe_with_place,
)
from octavo.output_processor import OutputProcessor, RequestUpdate
from octavo.plugins.hookspecs import FinishedChoice, RequestAdded, RequestFinished, StepFinished
from octavo.prompts import ParsedPrompt

if TYPE_CHECKING:
    from octavo.assembly import Assembly

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long `stop` waits for the step that is under way. A thread that takes longer ends with the process.
STOP_TIMEOUT_SECONDS = 10.0


class Mailbox:
    """Where the news of one call's requests arrive.

    Args:
        prompts: The call's prompts.
        params: One for each.
        wants_updates: Whether each step's text is wanted, or only what is finished.

    Attributes:
        request_ids: The call's requests, in the order of its prompts; filled in by `EngineThread.submit`.
        news: Updates and finished outputs as they come, or an exception, after which nothing comes.
    """

    def __init__(
        self, prompts: Sequence[ParsedPrompt], params: Sequence[SamplingParams], *, wants_updates: bool
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.wants_updates = wants_updates
        self.request_ids: list[str] = []
        self.news: SimpleQueue[RequestUpdate | RequestOutput | Exception] = SimpleQueue()

    def next_news(self) -> RequestUpdate | RequestOutput:
        """Wait for the next piece of news. Raises what went wrong."""
        item = self.news.get()
        if isinstance(item, Exception):
            raise item
        return item


class EngineThread:
    """Makes an engine and runs it for any number of callers.

    The engine is made in its thread too, so that PyTorch computes in no other: with OpenMP each thread that computes
    gets a team of its own, and as soon as all teams together have more threads than there are cores, they wait for
    work asleep instead of awake. Steps of the demo model took 48 ms so, instead of 30.

    Args:
        build: Makes the engine.

    Attributes:
        assembly: The engine and what stands around it. Only this thread may call the engine.

    Raises:
        Exception: Whatever `build` raised.
    """

    assembly: Assembly

    def __init__(self, build: Callable[[], Assembly]) -> None:
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Each request that is under way, and where its news go.
        self._mailboxes: dict[str, Mailbox] = {}
        self._numbers = itertools.count()
        self._has_ended = False
        # When each request was added, where an observer wants to know.
        self._added_at: dict[str, float] = {}
        # Why nothing is served any more, and what it came of; None while all is well.
        self._why_closed: str | None = None
        self._cause: BaseException | None = None
        is_built: Future[None] = Future()
        self._thread = threading.Thread(target=self._start, args=(build, is_built), name="octavo-engine", daemon=True)
        self._thread.start()
        try:
            is_built.result()
        except BaseException:
            # Also an interrupt: then the thread ends as soon as the engine is made.
            self._inbox.put(self._stop)
            raise

    # -- called from any thread ---------------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps; return what it returns, or raise what it raises.

        Raises:
            EngineClosedError: The engine was shut down, or has died.
            EngineBusyError: This is the engine's own thread, in which observers are told.
        """
        if threading.current_thread() is self._thread:
            # It would wait for itself.
            raise EngineBusyError(
                "The engine was called from its own thread, as by an observer, and would wait for itself. Use what the "
                "hook was given, or call from another thread."
            )
        future: Future[T] = Future()

        def command() -> None:
            if self._why_closed is not None:
                future.set_exception(self._closed_error())
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(_as_exception(error))

        self._inbox.put(command)
        if self._has_ended:
            # The thread may not have seen the command, and then nobody else will.
            self._run_commands()
        return future.result()

    def submit(self, mailbox: Mailbox) -> None:
        """Start a call's requests; their news go to the mailbox.

        Raises:
            InvalidRequestError: One of them cannot be served. Then none of them was started.
        """
        self.call(lambda: self._submit(mailbox))

    def close(self, mailbox: Mailbox) -> None:
        """End what a mailbox still waits for. Returns at once; may be called anywhere, finalisers included."""
        self._inbox.put(lambda: self._close(mailbox))

    def stop(self) -> None:
        """End what is under way, let go of the engine's memory, and wait for the thread. May be called again."""
        self._inbox.put(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_TIMEOUT_SECONDS)

    # -- in the thread ------------------------------------------------------------------------------------------

    def _start(self, build: Callable[[], Assembly], is_built: Future[None]) -> None:
        try:
            self.assembly = build()
            self._engine = self.assembly.engine
            self._processor = OutputProcessor(self.assembly.tokenizer)
            self._observers = self.assembly.observers
            if (tell := self._observers.engine_started) is not None:
                tell(self.assembly.started)
        except BaseException as error:
            is_built.set_exception(_as_exception(error))
            return
        is_built.set_result(None)
        self._run()

    def _run(self) -> None:
        try:
            while self._why_closed is None:
                self._run_commands()
                if self._why_closed is None and self._engine.has_unfinished_requests():
                    self._step()
        except BaseException as error:
            # A fault of Octavo's own, or of a part of it: what the engine holds cannot be trusted any more.
            logger.exception("the engine has died")
            what = describe_with_place(error).removesuffix(".")
            self._why_closed = f"The engine has died of a fault: {what}. Make a new one."
            self._cause = error
            for mailbox in set(self._mailboxes.values()):
                mailbox.news.put(self._closed_error())
            self._mailboxes.clear()
            self._tell_of_the_lost()
            self._engine.shutdown()
        finally:
            # Whoever puts a command behind this line sees that it is true.
            self._has_ended = True
            self._run_commands()

    def _run_commands(self) -> None:
        """Run what is in the inbox; where there is nothing else to do, wait for something to come."""
        while True:
            is_open = self._why_closed is None
            is_idle = is_open and not self._engine.has_unfinished_requests()
            try:
                command = self._inbox.get(block=is_idle)
            except Empty:
                return
            command()

    def _step(self) -> None:
        started = perf_counter()
        try:
            output = self._engine.step()
        except StepError as error:
            self._end_one(error)
            return
        seconds = perf_counter() - started
        self._deliver(output)
        if (tell := self._observers.step_finished) is not None:
            tell(StepFinished(seconds, len(output.new_token_ids), self._engine.stats()))

    def _end_one(self, error: StepError) -> None:
        """After a step that raised, end the call whose request came last; the others get another try.

        The engine worked before that request joined, so it is the first to suspect; if it was not the cause, the next
        step fails too, and the next call is ended.
        """
        mailbox = self._mailboxes[self._processor.request_id_of(error.request_ids[-1])]
        # Before what closing it brings, so that the caller meets it first.
        mailbox.news.put(error)
        self._close(mailbox)

    def _submit(self, mailbox: Mailbox) -> None:
        num_prompts = len(mailbox.prompts)
        token_ids = []
        for index, (prompt, params) in enumerate(zip(mailbox.prompts, mailbox.params, strict=True)):
            with naming_the_prompt(index, num_prompts):
                token_ids.append(self._check(prompt, params))
        request_ids = self._request_ids(mailbox)
        try:
            for index, request_id in enumerate(request_ids):
                with naming_the_prompt(index, num_prompts):
                    self._add(mailbox, request_id, mailbox.prompts[index], token_ids[index], mailbox.params[index])
        except BaseException:
            for request_id in mailbox.request_ids:
                del self._mailboxes[request_id]
                for core_id in self._processor.discard(request_id):
                    self._engine.abort_request(core_id)
            self._deliver(self._engine.take_ended())
            raise
        if self._observers.request_finished is not None:
            self._added_at |= dict.fromkeys(request_ids, perf_counter())
        if (tell := self._observers.request_added) is not None:
            for index, request_id in enumerate(request_ids):
                priority = mailbox.prompts[index].priority
                # A copy, for the engine goes on to read the caller's.
                params = copy.copy(mailbox.params[index])
                tell(RequestAdded(request_id, tuple(token_ids[index]), params, priority))

    def _check(self, prompt: ParsedPrompt, params: SamplingParams) -> list[int]:
        return self._engine.check_request(
            "unnamed" if prompt.request_id is None else prompt.request_id,
            prompt.token_ids,
            params,
            priority=prompt.priority,
            cache_salt=prompt.cache_salt,
        )

    def _request_ids(self, mailbox: Mailbox) -> list[str]:
        """Return each prompt's own id, or one that nobody uses."""
        wanted = {prompt.request_id for prompt in mailbox.prompts}
        request_ids = []
        for prompt, params in zip(mailbox.prompts, mailbox.params, strict=True):
            request_id = prompt.request_id
            while request_id is None:
                name = f"request-{next(self._numbers)}"
                if name not in wanted and self._processor.is_free(name, params.n):
                    request_id = name
            request_ids.append(request_id)
        return request_ids

    def _add(
        self, mailbox: Mailbox, request_id: str, prompt: ParsedPrompt, token_ids: list[int], params: SamplingParams
    ) -> None:
        core_ids = self._processor.add_request(request_id, prompt.text, token_ids, params)
        mailbox.request_ids.append(request_id)
        self._mailboxes[request_id] = mailbox
        for choice, core_id in enumerate(core_ids):
            self._engine.add_checked_request(
                core_id, token_ids, params, choice=choice, priority=prompt.priority, cache_salt=prompt.cache_salt
            )

    def _deliver(self, output: EngineOutput) -> None:
        step = self._processor.process(output)
        for core_id in step.core_ids_to_abort:
            self._engine.abort_request(core_id)
        for update in step.updates:
            mailbox = self._mailboxes[update.request_id]
            if mailbox.wants_updates:
                mailbox.news.put(update)
        for finished in step.finished:
            if (tell := self._observers.request_finished) is not None:
                tell(self._as_told(finished))
            self._mailboxes.pop(finished.request_id).news.put(finished)
        if step.core_ids_to_abort:
            # The engine's last word on them, so that nothing is left over when nothing else is under way.
            self._deliver(self._engine.take_ended())

    def _tell_of_the_lost(self) -> None:
        """Tell observers of the requests that the engine's death ended: each that was added is finished once."""
        if (tell := self._observers.request_finished) is not None:
            for request_id in list(self._added_at):
                if (output := self._processor.output_of(request_id)) is not None:
                    tell(self._as_told(output))

    def _as_told(self, output: RequestOutput) -> RequestFinished:
        """Return what observers are told of a finished request: a copy, of which nothing can be changed."""
        return RequestFinished(
            output.request_id,
            num_prompt_tokens=len(output.prompt_token_ids),
            num_cached_tokens=output.num_cached_tokens,
            num_preemptions=output.num_preemptions,
            seconds=perf_counter() - self._added_at.pop(output.request_id),
            choices=tuple(
                FinishedChoice(
                    choice.index,
                    choice.text,
                    tuple(choice.token_ids),
                    # None where the engine died under it.
                    choice.finish_reason or "error",
                    choice.stop_reason,
                )
                for choice in output.outputs
            ),
        )

    def _close(self, mailbox: Mailbox) -> None:
        if self._why_closed is not None:
            return
        for request_id in mailbox.request_ids:
            for core_id in self._processor.abort(request_id):
                self._engine.abort_request(core_id)
        self._deliver(self._engine.take_ended())

    def _stop(self) -> None:
        if self._why_closed is None:
            for mailbox in set(self._mailboxes.values()):
                mailbox.news.put(EngineClosedError("This LLM was shut down while the request was under way."))
                self._close(mailbox)
            self._why_closed = "This LLM was shut down; make a new one."
            self._engine.shutdown()
            # Not at the top: with it comes torch, which has long been loaded when an engine stops.
            from octavo.core.memory import give_back_freed_memory

            give_back_freed_memory()

    def _closed_error(self) -> EngineClosedError:
        error = EngineClosedError(self._why_closed)
        error.__cause__ = self._cause
        return error


def _as_exception(error: BaseException) -> Exception:
    """Return what a caller is given: what ends a program or a task in here is a fault of whatever raised it."""
    if isinstance(error, Exception):
        return error
    broken = PluginBroken(f"A part raised {describe_with_place(error)} in the engine's thread.")
    broken.__cause__ = error
    return broken


@contextmanager
def naming_the_prompt(index: int, num_prompts: int) -> Iterator[None]:
    """Say which prompt of several an error is about."""
    try:
        yield
    except InvalidRequestError as error:
        if num_prompts == 1:
            raise
        raise InvalidRequestError(f"Prompt {index} of {num_prompts}: {error}", parameter=error.parameter) from None
