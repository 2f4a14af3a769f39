"""`octavo chat`: talk to a model."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.options import with_engine_options
from octavo.cli.outcome import exit_if_broken_off, say_if_broken_off
from octavo.cli.sampling import MaxTokens, MinP, Stop, Temperature, TopK, TopP
from octavo.config import EngineConfig
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError

if TYPE_CHECKING:
    from octavo.llm import TextStream


@with_engine_options
def chat(
    *,
    message: Annotated[str | None, typer.Argument(help="Ask this and exit. Without it, a conversation begins.")] = None,
    config: EngineConfig,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    stop: Stop = None,
) -> None:
    """Talk to the model, one line a turn. /new starts over, /quit and end of file leave."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop=stop
    )
    from octavo.llm import LLM

    with LLM(config=config) as llm:
        conversation = Conversation(llm.stream_chat, params, system)
        if message is not None:
            exit_if_broken_off(conversation.say(message))
            return
        if sys.stdin.isatty():
            print(f"Talking to {config.model or 'the demo model'}. {COMMANDS}", file=sys.stderr)
        while (line := _read_line()) is not None:
            if line == "/new":
                conversation.start_over()
            elif line.startswith("/"):
                print(f"octavo: there is no command {line.split()[0]}. {COMMANDS}", file=sys.stderr)
            elif line:
                conversation.try_to_say(line)


COMMANDS = "/new starts over, /quit leaves."

StreamChat = Callable[[list[dict[str, str]], SamplingParams], "TextStream"]


class Conversation:
    """The messages so far. A turn that fails or is interrupted leaves no trace in them."""

    def __init__(self, stream_chat: StreamChat, params: SamplingParams, system: str | None) -> None:
        self._stream_chat = stream_chat
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def start_over(self) -> None:
        self.messages = list(self._opening)

    def try_to_say(self, text: str) -> None:
        """As `say`, but a turn that is refused or interrupted leaves the conversation as it was before."""
        try:
            say_if_broken_off(self.say(text))
        except InvalidRequestError as error:
            print(f"octavo: {error} /new starts over.", file=sys.stderr)
        except KeyboardInterrupt:
            print("octavo: interrupted; the turn is forgotten", file=sys.stderr)

    def say(self, text: str) -> RequestOutput | None:
        """Send one message and print the answer as it is made; return all that came of it."""
        if not text.strip():
            raise InvalidRequestError("The message is empty.", parameter="messages")
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = []
        stream = self._stream_chat(asked, self._params)
        try:
            for piece in stream:
                answer.append(piece)
                print(piece, end="", flush=True)
        finally:
            if answer:
                print()
        self.messages = [*asked, {"role": "assistant", "content": "".join(answer)}]
        return stream.output


def _read_line() -> str | None:
    """Return what was typed; None to leave."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line == "/quit" else line
