"""What finding plugins costs: the scan, the command that lists them, and a step that is observed.

    python benchmarks/plugin_discovery.py [--packages 150] [--runs 9] [--model FOLDER]

The scan looks through made-up packages, of which ten register parts; its target is 30 ms, the first one of a process
included. `octavo plugins` looks through what is installed here; its target is 0.5 s. With --model, steps of that model
are timed with no observer and with one that listens to everything. Prints medians and the range; times are of the clock
on the wall, so let nothing else run.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

REGISTERING = 10
# As long as that of a package with a README of usual size.
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: 1.{}\nRequires-Dist: numpy\n\n" + "A line.\n" * 900
OBSERVER = """
import octavo
contract_version = 1
@octavo.hookimpl
def engine_started(engine): pass
@octavo.hookimpl
def request_added(request): pass
@octavo.hookimpl
def step_finished(step): pass
@octavo.hookimpl
def request_finished(request): pass
"""
# Prints the seconds of the first scan, those of another one, and how many parts were found.
TWO_SCANS = """
import importlib, sys
from time import perf_counter
from octavo.plugins.families import REQUEST_QUEUES
from octavo.plugins.registry import scan
# What else is installed is left out; the standard library stays.
sys.path[:] = [sys.argv[1], *(entry for entry in sys.path if "lib/python" in entry and "-packages" not in entry)]
for _ in range(2):
    scan.cache_clear()
    importlib.invalidate_caches()
    start = perf_counter()
    registry = scan()
    print(perf_counter() - start)
print(len(registry.plugins(REQUEST_QUEUES)))
"""


def write_packages(folder: Path, num_packages: int) -> None:
    """Lay out packages as an installer would; the first ten register a request queue each."""
    for number in range(num_packages):
        info = folder / f"package_{number}-1.{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA.format(f"package-{number}", number))
        group = "octavo.request_queues" if number < REGISTERING else "console_scripts"
        (info / "entry_points.txt").write_text(f"[{group}]\nname_{number} = module_{number}:attribute\n")


def two_scans(folder: Path) -> tuple[float, float]:
    """Return the seconds of the first scan of a process, with what is imported for it, and of another one."""
    command = [sys.executable, "-c", TWO_SCANS, str(folder)]
    first, another, num_found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    if int(num_found) != REGISTERING:
        raise SystemExit(f"the scan found {num_found} plugins of {REGISTERING}")
    return float(first), float(another)


def list_command() -> float:
    """Return the seconds that `octavo plugins` takes from start to end."""
    start = perf_counter()
    subprocess.run([sys.executable, "-m", "octavo", "plugins"], stdout=subprocess.DEVNULL, check=True)
    return perf_counter() - start


def step_timer(model: str, hooks: Sequence[str]) -> Callable[[], float]:
    """Return what times a step of 8 requests, in seconds."""
    from octavo import LLM, SamplingParams

    llm = LLM(model, hooks=hooks, num_kv_blocks=200, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    prompts = [[5 + number] for number in range(8)]

    def seconds_per_step() -> float:
        before, start = llm.stats().steps, perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return (perf_counter() - start) / (llm.stats().steps - before)

    seconds_per_step()
    return seconds_per_step


def show(what: str, seconds: Sequence[float], target_ms: float | None = None) -> None:
    low, middle, high = (1000 * value for value in (min(seconds), statistics.median(seconds), max(seconds)))
    target = "" if target_ms is None else f", target {target_ms:.0f} ms: {'met' if middle <= target_ms else 'MISSED'}"
    print(f"{what}: {middle:.2f} ms (from {low:.2f} to {high:.2f}){target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", type=int, default=150)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--model", help="a folder or .gguf file, to time steps of")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_packages(folder, options.packages)
        packages = f"{options.packages} packages, {REGISTERING} of them with parts"
        first, another = zip(*(two_scans(folder) for _ in range(options.runs)), strict=True)
        show(f"first scan of a process, {packages}", first, 30)
        show("another scan of them, with nothing remembered", another, 30)
        show("octavo plugins, from start to end", [list_command() for _ in range(options.runs)], 500)
        if options.model is None:
            return
        (folder / "observing.py").write_text(OBSERVER)
        observing = folder / "observing-1.0.dist-info"
        observing.mkdir()
        (observing / "METADATA").write_text(METADATA.format("observing", 0))
        (observing / "entry_points.txt").write_text("[octavo.hooks]\nobserving = observing\n")
        sys.path.append(name)
        unobserved, observed = step_timer(options.model, []), step_timer(options.model, ["observing"])
        # In turn, so that whatever else the machine does falls on both.
        pairs = [(unobserved(), observed()) for _ in range(options.runs)]
        show("a step that nobody observes", [seconds for seconds, _ in pairs])
        show("a step that is observed", [seconds for _, seconds in pairs])
        show("the difference", [after - before for before, after in pairs])


if __name__ == "__main__":
    main()
