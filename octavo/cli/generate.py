"""`octavo generate`: continue a prompt."""

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from octavo.cli.options import with_engine_options
from octavo.cli.outcome import exit_if_broken_off
from octavo.cli.sampling import IgnoreEos, MaxTokens, MinP, MinTokens, Stop, Temperature, TopK, TopP
from octavo.config import EngineConfig
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError


@with_engine_options
def generate(
    *,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input, less a final newline.")],
    config: EngineConfig,
    max_tokens: MaxTokens = 128,
    min_tokens: MinTokens = 0,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON at the end.")] = False,
) -> None:
    """Continue PROMPT and print the text as it is made. Without --model the demo model answers."""
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    text = _read_standard_input() if prompt == "-" else prompt
    # Imported here, after the flags are known to be right.
    from octavo.llm import LLM

    with LLM(config=config) as llm:
        if as_json:
            (output,) = llm.generate(text, params, use_tqdm=False)
            print(json.dumps(asdict(output), ensure_ascii=False))
            exit_if_broken_off(output)
            return
        stream = llm.stream(text, params)
        for piece in stream:
            print(piece, end="", flush=True)
        print()
        exit_if_broken_off(stream.output)


def _read_standard_input() -> str:
    if sys.stdin is None:
        raise InvalidRequestError("There is no standard input to read the prompt from.", parameter="prompt")
    try:
        # The newline that echo and editors put at the end would be part of the prompt.
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"Standard input is not text in {sys.stdin.encoding}: {error}.", parameter="prompt"
        ) from None
