"""Flags for how to sample, shared by the commands that generate."""

from typing import Annotated

import typer

MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
MinTokens = Annotated[int, typer.Option(help="Tokens before which nothing ends the text.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this sum.")]
TopK = Annotated[int, typer.Option(help="Keep this many likeliest tokens; 0 keeps all.")]
MinP = Annotated[float, typer.Option(help="Keep tokens this fraction as likely as the best.")]
Stop = Annotated[list[str] | None, typer.Option(help="A string that ends the text. Repeatable.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after end of sequence.")]
