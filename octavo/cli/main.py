"""Where the `octavo` command starts. Nothing heavy is imported before a command needs it."""

import sys

# What shells expect of a program that was interrupted: 128 + SIGINT.
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command that the arguments name, and exit."""
    arguments = sys.argv[1:]
    if arguments in (["--version"], ["-V"]):
        # Answered before anything is imported; scripts ask for it often.
        from octavo import __version__

        print(f"octavo {__version__}")
        return
    try:
        from octavo.cli.app import run

        sys.exit(run(arguments))
    except KeyboardInterrupt:
        # Before the command line's own handling is there: while it is imported.
        sys.exit(EXIT_INTERRUPTED)
