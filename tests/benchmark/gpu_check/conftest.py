"""The check's modules are a folder of benchmarks/, which is on no path by itself."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_check.lines import Line  # noqa: E402
from gpu_check.workers import EVENTS_VARIABLE  # noqa: E402


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict]]]:
    """Takes what this process reports as if it were a worker; called, it returns the events so far."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    monkeypatch.setenv(EVENTS_VARIABLE, str(write_end))
    events: list[dict] = []

    def read() -> list[dict]:
        with contextlib.suppress(BlockingIOError):
            events.extend(json.loads(line) for line in os.read(read_end, 1 << 20).splitlines())
        return events

    yield read
    os.close(read_end)
    os.close(write_end)


@pytest.fixture
def told(reported: Callable[[], list[dict]]) -> Callable[[], list[Line]]:
    """Called, it returns the lines that this process told."""
    return lambda: [Line.from_json(event["line"]) for event in reported() if event["event"] == "line"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of processes, with a package that registers attention backends from `odd.py`.

    `crooked` is wrong by a factor, `raising` raises, `hanging` never returns; each in `attend`. `broken` cannot be
    loaded.
    """
    folder = tmp_path / "site"
    info = folder / "odd-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    names = {"crooked": "Crooked", "raising": "Raising", "hanging": "Hanging", "broken": "NotThere"}
    entries = "\n".join(f"{name} = odd:{kind}" for name, kind in names.items())
    (info / "entry_points.txt").write_text(f"[octavo.attention_backends]\n{entries}\n")
    (folder / "odd.py").write_text(ODD_BACKENDS)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


ODD_BACKENDS = """
import time

from octavo.plugins.families import ATTENTION_BACKENDS
from octavo.plugins.registry import scan

Reference = scan().load(ATTENTION_BACKENDS, "torch_sdpa")


class Crooked(Reference):
    contract_version = 1

    def attend(self, *args, **kwargs):
        result = super().attend(*args, **kwargs)
        return (result[0] * 1.2, result[1]) if isinstance(result, tuple) else result * 1.2


class Raising(Reference):
    contract_version = 1

    def attend(self, *args, **kwargs):
        raise RuntimeError("out of luck")


class Hanging(Reference):
    contract_version = 1

    def attend(self, *args, **kwargs):
        time.sleep(1000)
"""
