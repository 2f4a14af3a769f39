"""How long after the command the first token of `octavo generate` is on the screen.

    python benchmarks/first_token.py [--runs 5] [-- further arguments of octavo generate]

Prints each run, the median, and what of it a bare `import torch` takes, measured in turn with it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time


def seconds_to_first_output(command: list[str]) -> float:
    """Start a command; return the seconds until it has written something, and let it finish."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not os.read(process.stdout.fileno(), 1):
            raise SystemExit(f"{' '.join(command)} ended without output")
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit status {process.returncode}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("arguments", nargs="*", help="further arguments of octavo generate, after --")
    options = parser.parse_args()
    generate = [sys.executable, "-m", "octavo", "generate", "The capital of France is", "--max-tokens", "4"]
    importing = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    # Once unmeasured, so that the files are in memory.
    seconds_to_first_output([*generate, *options.arguments])
    first_tokens, imports = [], []
    for run in range(options.runs):
        first_tokens.append(seconds_to_first_output([*generate, *options.arguments]))
        imports.append(seconds_to_first_output(importing))
        print(f"run {run}: first token after {first_tokens[-1]:.2f} s, bare import of torch {imports[-1]:.2f} s")
    print(f"median: first token after {statistics.median(first_tokens):.2f} s, ", end="")
    print(f"bare import of torch {statistics.median(imports):.2f} s, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
