"""The blocking Python API: prompts in, text out."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import EngineStats
from octavo.core.verdict import ResetResult
from octavo.engine_thread import EngineThread, Mailbox, naming_the_prompt
from octavo.errors import ConfigError, InvalidRequestError
from octavo.prompts import (
    Messages,
    ParsedPrompt,
    Prompt,
    as_conversation_list,
    as_params_list,
    as_prompt_list,
    parse_prompt,
)

if TYPE_CHECKING:
    from rich.progress import Progress

    from octavo.config import EngineConfig
    from octavo.core.interfaces import Tokenizer


class LLM:
    """A model and its engine, in this process.

    The engine runs in a thread of its own. Several threads may use one `LLM`; their requests share batches. No signal
    handler is installed and no global random state is touched.

    Args:
        model: A folder, a .gguf file, or a name on the Hugging Face hub. None is the packaged demo model.
        config: A whole configuration, in place of the other arguments.
        settings: Fields of `EngineConfig` and its sections, flat: `block_size=32, max_num_seqs=8`.

    Attributes:
        config: What was asked for.
        max_model_len: Tokens in the longest request, prompt and output together.
        selection: The parts that were chosen; printed, it says where each choice came from and why it was not another.

    Raises:
        ConfigError, ModelError, PluginError: The engine cannot be made as asked.
    """

    def __init__(self, model: str | None = None, *, config: EngineConfig | None = None, **settings: Any) -> None:
        from octavo.assembly import build_engine
        from octavo.config import EngineConfig

        if config is not None and (model is not None or settings):
            raise ConfigError("Pass either a config or single settings, not both.")
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(
                f"config must be an EngineConfig, not {config!r:.200}; EngineConfig.from_toml reads one from a file."
            )
        for name in settings:
            if name in SamplingParams.__dataclass_fields__ and name not in EngineConfig.model_fields:
                raise ConfigError(f"{name} is no setting of the engine; it belongs in SamplingParams.")
        config = config or EngineConfig.from_flat(model=None if model is None else str(model), **settings)
        self.config = config
        self._engine_thread = EngineThread(lambda: build_engine(config))
        self._engine = self._engine_thread.assembly.engine
        self._tokenizer = self._engine_thread.assembly.tokenizer
        self.max_model_len = self._engine.max_model_len
        self.selection = self._engine_thread.assembly.selection
        # An LLM that is simply dropped, or left to the end of the process, shuts down too.
        weakref.finalize(self, self._engine_thread.stop)

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
            with naming_the_prompt(index, len(listed)):
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
        conversations = as_conversation_list(messages)
        params = as_params_list(sampling_params, len(conversations))
        prompts = []
        for index, conversation in enumerate(conversations):
            with naming_the_prompt(index, len(conversations)):
                prompts.append(ParsedPrompt(None, self._encode_chat(conversation)))
        return self._run(prompts, params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> TextStream:
        """Generate for one prompt, yielding its text piece by piece. Leaving the loop early ends the request.

        Raises:
            InvalidRequestError: The prompt or its parameters cannot be served.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        _check_stream(prompt, params)
        return TextStream(self, Mailbox([parse_prompt(prompt, self._tokenizer)], [params], wants_updates=True))

    def stream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None) -> TextStream:
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
        """Return a snapshot of the engine's counters, taken between two steps."""
        return self._engine_thread.call(self._engine.stats)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> ResetResult:
        """Forget all cached prefixes. The result is true when that was done, and else has the reason.

        Args:
            reset_running_requests: Whether requests that are under way give up what they have computed, and compute
                it anew. Without, the reset is refused while they hold blocks. Needed where weights were changed.
        """
        return self._engine_thread.call(
            lambda: self._engine.reset_prefix_cache(reset_running_requests=reset_running_requests)
        )

    def shutdown(self) -> None:
        """End what is running and let go of the model's memory. Calling it again does nothing."""
        self._engine_thread.stop()

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
        mailbox = Mailbox(prompts, params, wants_updates=False)
        finished: dict[str, RequestOutput] = {}
        try:
            self._engine_thread.submit(mailbox)
            with _progress_bar(len(prompts)) if use_tqdm and prompts else nullcontext() as bar:
                while len(finished) < len(prompts):
                    output = mailbox.next_news()
                    assert isinstance(output, RequestOutput)
                    finished[output.request_id] = output
                    if bar is not None:
                        bar.advance(bar.task_ids[0])
        finally:
            self._engine_thread.close(mailbox)
        return [finished[request_id] for request_id in mailbox.request_ids]


class TextStream(Iterator[str]):
    """The text of one request, piece by piece.

    `close`, and dropping the stream before its end, end the request.

    Attributes:
        output: The whole result, once the text has come to its end; None before.
    """

    def __init__(self, llm: LLM, mailbox: Mailbox) -> None:
        # The engine has to outlive whoever still reads from it.
        self._llm = llm
        self._engine_thread = llm._engine_thread
        self._mailbox = mailbox
        self._is_at_end = False
        self.output: RequestOutput | None = None
        try:
            self._engine_thread.submit(mailbox)
        except BaseException:
            self.close()
            raise

    def __next__(self) -> str:
        while not self._is_at_end:
            try:
                news = self._mailbox.next_news()
            except BaseException:
                self.close()
                raise
            if isinstance(news, RequestOutput):
                self._is_at_end = True
                self.output = news
            elif news.new_text:
                return news.new_text
        raise StopIteration

    def close(self) -> None:
        """End the request, if it has not ended; nothing more comes."""
        self._is_at_end = True
        self._engine_thread.close(self._mailbox)

    def __del__(self) -> None:
        # Where the request was never submitted there is nothing to close.
        if not getattr(self, "_is_at_end", True):
            self.close()


def _check_stream(prompt: Prompt, params: SamplingParams) -> None:
    """Raise InvalidRequestError for what `generate` takes and a stream of one text cannot carry."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"sampling_params must be one SamplingParams, not {params!r:.200}.", parameter="sampling_params"
        )
    if len(as_prompt_list(prompt)) > 1:
        raise InvalidRequestError("A stream takes one prompt; use generate for a list of them.", parameter="prompt")
    if not params.detokenize:
        raise InvalidRequestError(
            "A stream carries text, and detokenize is False; use generate.", parameter="detokenize"
        )
    if params.n != 1:
        raise InvalidRequestError(f"n is {params.n}, and a stream carries one choice; use generate.", parameter="n")


def _progress_bar(num_prompts: int) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Other output of the process, of other threads too, goes where it went before.
    bar = Progress(*columns, console=Console(stderr=True), redirect_stdout=False, redirect_stderr=False)
    bar.add_task("generating", total=num_prompts)
    return bar
