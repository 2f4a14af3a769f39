"""Where the `octavo` command starts. Nothing heavy is imported before a command needs it."""

import sys


def main() -> None:
    """Run the command that the arguments name, and exit."""
    arguments = sys.argv[1:]
    if arguments in (["--version"], ["-V"]):
        # Answered before anything is imported; scripts ask for it often.
        from octavo import __version__

        print(f"octavo {__version__}")
        return
    from octavo.cli.app import run

    sys.exit(run(arguments))
