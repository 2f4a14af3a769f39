"""The commands, put together: how they are found, and how their errors are shown."""

import io
import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from octavo import __version__
from octavo.cli import backends, bench, chat, generate, plan, plugins
from octavo.errors import OctavoError

EXIT_ERROR = 2

app = typer.Typer(
    name="octavo",
    help="A paged-KV inference engine for large language models whose parts are plugins.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: at 80 columns the rich kind cuts long flags short, and takes "[default: 16]" for markup.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("plugins")(plugins.plugins)
app.command("backends")(backends.backends)
app.command("plan")(plan.plan)
app.command("bench")(bench.bench)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what is chosen and why.")] = False,
) -> None:
    """Handle the flags that stand before a command."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s")


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character shows a question mark, and the answer goes on.
            stream.reconfigure(errors="replace")
    try:
        app(args=list(arguments), prog_name="octavo")
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return EXIT_ERROR
    except OSError as error:
        # The disk is full, or the terminal is gone. What is buffered cannot be written any more.
        sys.stdout = None
        print(f"octavo: writing the answer failed: {error}", file=sys.stderr)
        return EXIT_ERROR
    except SystemExit as end:
        # So typer ends, whether the command succeeded, was used wrongly, or was interrupted.
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        print(f"octavo: {end.code}", file=sys.stderr)
        return EXIT_ERROR
    return 0
