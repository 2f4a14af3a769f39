"""The blocking Python API: prompts in, text out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from octavo.core.kv_cache_manager import ResetResult
from octavo.core.outputs import EngineOutput, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import EngineStats
from octavo.errors import ConfigError, EngineClosedError, InvalidRequestError
from octavo.output_processor import OutputProcessor, RequestUpdate
from octavo.prompts import ParsedPrompt, Prompt, as_params_list, as_prompt_list, parse_prompt

if TYPE_CHECKING:
    from rich.progress import Progress

    from octavo.config import EngineConfig
    from octavo.core.interfaces import Tokenizer

Messages = Sequence[Mapping[str, str]]


class LLM:
    """A model and its engine, in this process.

    Several threads may use one `LLM`: whoever waits for an answer steps the engine for all, so their requests share
    batches. No signal handler is installed and no global random state is touched.

    Args:
        model: A folder, a .gguf file, or a name on the Hugging Face hub. None is the packaged demo model.
        config: A whole configuration, in place of the other arguments.
        settings: Fields of `EngineConfig` and its sections, flat: `block_size=32, max_num_seqs=8`.

    Raises:
        ConfigError, ModelError, PluginError: The engine cannot be made as asked.
    """

    def __init__(self, model: str | None = None, *, config: EngineConfig | None = None, **settings: Any) -> None:
        from octavo.assembly import build_engine
        from octavo.config import EngineConfig

        if config is not None and (model is not None or settings):
            raise ConfigError("Pass either a config or single settings, not both.")
        self.config = config or EngineConfig.from_flat(model=None if model is None else str(model), **settings)
        assembly = build_engine(self.config)
        self._engine = assembly.engine
        self._tokenizer = assembly.tokenizer
        self._processor = OutputProcessor(assembly.tokenizer)
        self.max_model_len = assembly.engine.max_model_len
        self._is_closed = False
        self._numbers = itertools.count()
        # Guards the engine, the processor and the mailboxes. Held for a step at a time, never while text is handed out.
        self._lock = threading.RLock()
        self._mailboxes: dict[str, _Mailbox] = {}

    # -- generation ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for each prompt; return the results in the prompts' order.

        Args:
            prompts: One prompt or a list: text, token ids, or a dict with one of these and `request_id`,
                `cache_salt` or `priority`.
            sampling_params: One for all prompts, or one for each.
            use_tqdm: Whether to show a progress bar on standard error.

        Raises:
            InvalidRequestError: A prompt or its parameters cannot be served. Then none of them was started.
        """
        listed = as_prompt_list(prompts)
        params = as_params_list(sampling_params, len(listed))
        parsed = []
        for index, prompt in enumerate(listed):
            with _naming_the_prompt(index, len(listed)):
                parsed.append(parse_prompt(prompt, self._tokenizer))
        return self._run(parsed, params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; each message is {"role": ..., "content": ...}.

        Raises:
            InvalidRequestError: The messages do not fit the model's chat template, or it has none.
        """
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        params = as_params_list(sampling_params, len(conversations))
        prompts = []
        for index, conversation in enumerate(conversations):
            with _naming_the_prompt(index, len(conversations)):
                prompts.append(ParsedPrompt(None, self._encode_chat(conversation)))  # type: ignore[arg-type]
        return self._run(prompts, params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Generate for one prompt, yielding its text piece by piece. Leaving the loop early ends the request."""
        if sampling_params is not None and sampling_params.n != 1:
            raise InvalidRequestError(
                f"n is {sampling_params.n}, and a stream carries one choice; use generate.", parameter="n"
            )
        (params,) = as_params_list(sampling_params, 1)
        parsed = parse_prompt(prompt, self._tokenizer)
        with self._lock:
            # Here, so that what is wrong is said by this call; the request itself begins with the first piece.
            self._check(parsed, params)
        return self._stream(parsed, params)

    def stream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Answer one conversation, yielding the text piece by piece."""
        return self.stream(self._encode_chat(messages), sampling_params)

    # -- state --------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.

        Raises:
            ConfigError: The model's files have none.
        """
        if self._tokenizer is None:
            raise ConfigError("The model's files have no tokenizer; pass prompts as token ids.")
        return self._tokenizer

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters."""
        with self._lock:
            return self._engine.stats()

    def reset_prefix_cache(self) -> ResetResult:
        """Forget all cached prefixes. The result is true when that was done, and else has the reason."""
        with self._lock:
            return self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """End what is running and let go of the model's memory. Calling it again does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for mailbox in self._mailboxes.values():
                mailbox.is_closed = True
            self._engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- inside -------------------------------------------------------------------------------------------------

    def _encode_chat(self, messages: Messages) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError("The model has no tokenizer, so it cannot chat.", parameter="messages")
        return self._tokenizer.encode_chat(messages)

    def _run(
        self, prompts: Sequence[ParsedPrompt], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        mailbox = self._submit(prompts, params)
        try:
            with _progress_bar(len(prompts)) if use_tqdm and prompts else nullcontext() as bar:
                while mailbox.waits_for_more:
                    num_before = len(mailbox.finished)
                    self._step_for(mailbox)
                    mailbox.updates.clear()
                    if bar is not None:
                        bar.update(bar.task_ids[0], advance=len(mailbox.finished) - num_before)
        finally:
            self._close(mailbox)
        return [mailbox.finished[request_id] for request_id in mailbox.request_ids]

    def _stream(self, prompt: ParsedPrompt, params: SamplingParams) -> Iterator[str]:
        mailbox = self._submit([prompt], [params])
        try:
            while mailbox.waits_for_more or mailbox.updates:
                if not mailbox.updates:
                    self._step_for(mailbox)
                updates, mailbox.updates = mailbox.updates, []
                for update in updates:
                    if update.new_text:
                        yield update.new_text
        finally:
            self._close(mailbox)

    def _submit(self, prompts: Sequence[ParsedPrompt], params: Sequence[SamplingParams]) -> _Mailbox:
        """Check all requests, then add all: a list with a wrong prompt leaves nothing behind."""
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("This LLM was shut down; make a new one.")
            for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
                with _naming_the_prompt(index, len(prompts)):
                    self._check(prompt, sampling)
            mailbox = _Mailbox(self._request_ids(prompts))
            try:
                for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
                    with _naming_the_prompt(index, len(prompts)):
                        self._add(mailbox, mailbox.request_ids[index], prompt, sampling)
            except BaseException:
                self._close(mailbox)
                raise
            return mailbox

    def _check(self, prompt: ParsedPrompt, params: SamplingParams) -> None:
        self._engine.check_request(
            "unnamed" if prompt.request_id is None else prompt.request_id,
            prompt.token_ids,
            params,
            priority=prompt.priority,
            cache_salt=prompt.cache_salt,
        )

    def _add(self, mailbox: _Mailbox, request_id: str, prompt: ParsedPrompt, params: SamplingParams) -> None:
        core_ids = self._processor.add_request(request_id, prompt.text, prompt.token_ids, params)
        mailbox.open_ids.add(request_id)
        self._mailboxes[request_id] = mailbox
        for choice, core_id in enumerate(core_ids):
            self._engine.add_request(
                core_id,
                prompt.token_ids,
                params,
                choice=choice,
                priority=prompt.priority,
                cache_salt=prompt.cache_salt,
            )

    def _request_ids(self, prompts: Sequence[ParsedPrompt]) -> list[str]:
        """Return each prompt's own id, or one that nobody uses."""
        taken = {prompt.request_id for prompt in prompts} | self._mailboxes.keys()
        fresh = (name for name in map("request-{}".format, self._numbers) if name not in taken)
        return [next(fresh) if prompt.request_id is None else prompt.request_id for prompt in prompts]

    def _step_for(self, mailbox: _Mailbox) -> None:
        """Step the engine once, unless another thread has brought news for this mailbox meanwhile."""
        num_news = mailbox.num_news
        with self._lock:
            if mailbox.is_closed:
                raise EngineClosedError("This LLM was shut down while the request was under way.")
            if mailbox.num_news != num_news or not mailbox.waits_for_more:
                return
            self._deliver(self._engine.step())

    def _deliver(self, output: EngineOutput) -> None:
        step = self._processor.process(output)
        for core_id in step.core_ids_to_abort:
            self._engine.abort_request(core_id)
        for update in step.updates:
            self._mailboxes[update.request_id].receive(update)
        for finished in step.finished:
            self._mailboxes.pop(finished.request_id).finish(finished)

    def _close(self, mailbox: _Mailbox) -> None:
        """Abort what the caller no longer waits for, and take the engine's last word on it."""
        with self._lock:
            for request_id in mailbox.open_ids:
                for core_id in self._processor.abort(request_id):
                    self._engine.abort_request(core_id)
            # Also what a stop string ended: whoever comes next finds an engine without leftovers.
            self._deliver(self._engine.take_ended())


class _Mailbox:
    """What has arrived for one call of `generate` or `stream`.

    Attributes:
        request_ids: The call's requests, in the order of its prompts.
        open_ids: Those that have not finished.
        updates: News that nobody has taken yet.
        finished: Final outputs, by request id.
        num_news: Grows with whatever arrives.
        is_closed: Whether the engine was shut down.
    """

    def __init__(self, request_ids: list[str]) -> None:
        self.request_ids = request_ids
        self.open_ids: set[str] = set()
        self.updates: list[RequestUpdate] = []
        self.finished: dict[str, RequestOutput] = {}
        self.num_news = 0
        self.is_closed = False

    @property
    def waits_for_more(self) -> bool:
        return bool(self.open_ids)

    def receive(self, update: RequestUpdate) -> None:
        self.updates.append(update)
        self.num_news += 1

    def finish(self, output: RequestOutput) -> None:
        self.finished[output.request_id] = output
        self.open_ids.discard(output.request_id)
        self.num_news += 1


@contextmanager
def _naming_the_prompt(index: int, num_prompts: int) -> Iterator[None]:
    """Say which prompt of several an error is about."""
    try:
        yield
    except InvalidRequestError as error:
        if num_prompts == 1:
            raise
        raise InvalidRequestError(f"Prompt {index} of {num_prompts}: {error}", parameter=error.parameter) from None


def _progress_bar(num_prompts: int) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    bar.add_task("generating", total=num_prompts)
    return bar
