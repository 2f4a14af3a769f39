"""Flags for how to sample, shared by the commands that generate."""

from typing import Annotated

import typer

_PANEL = "Sampling"

MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.", rich_help_panel=_PANEL)]
MinTokens = Annotated[int, typer.Option(help="Tokens before which nothing ends the text.", rich_help_panel=_PANEL)]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.", rich_help_panel=_PANEL)]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this sum.", rich_help_panel=_PANEL)]
TopK = Annotated[int, typer.Option(help="Keep this many likeliest tokens; 0 keeps all.", rich_help_panel=_PANEL)]
MinP = Annotated[float, typer.Option(help="Keep tokens this fraction as likely as the best.", rich_help_panel=_PANEL)]
Stop = Annotated[list[str] | None, typer.Option(help="A string that ends the text. Repeatable.", rich_help_panel=_PANEL)]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after end of sequence.", rich_help_panel=_PANEL)]
