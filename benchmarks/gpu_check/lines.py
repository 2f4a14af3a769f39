"""What the check says: a line a case as it comes, then one table, a JSON file, and an exit status."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TextIO

Status = Literal["measured", "passed", "failed", "not run"]
STATUSES: tuple[Status, ...] = ("measured", "passed", "failed", "not run")

# Of a line of a result in the table; what is longer goes on below.
TABLE_WIDTH = 100


@dataclass(frozen=True)
class Target:
    """What a figure should reach.

    Attributes:
        wanted: The least that meets it.
        reached: What came out.
        of: What both are a share of, such as "the copy bandwidth".
    """

    wanted: float
    reached: float
    of: str

    @property
    def is_met(self) -> bool:
        return self.reached >= self.wanted

    def __str__(self) -> str:
        return f"{'met' if self.is_met else 'missed'}: {self.reached:.2f} of {self.of}, wanted {self.wanted:g}"


@dataclass(frozen=True)
class Line:
    """What came of one case, or of one contender in a case.

    Attributes:
        part: "limits", "suite", "decode" and the like.
        what: The case, and the backend where there is one.
        status: "measured" has figures, "passed" and "failed" are of a comparison or of something that did not work,
            "not run" comes with the reason.
        text: The figures, the error or the reason, for a reader.
        figures: The figures, for a program.
        target: What a figure should reach, where there is something.
    """

    part: str
    what: str
    status: Status
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    target: Target | None = None

    def as_json(self) -> dict[str, Any]:
        target = None if self.target is None else {**asdict(self.target), "is_met": self.target.is_met}
        return {**asdict(self), "target": target}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Line:
        target = fields.get("target")
        known = None if target is None else Target(target["wanted"], target["reached"], target["of"])
        return cls(**{**fields, "target": known})


class Report:
    """Collects lines, and prints each when it comes.

    Args:
        out: Where to.
    """

    def __init__(self, out: TextIO) -> None:
        self.lines: list[Line] = []
        self._out = out
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the report was begun."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """Print something at once that is no line of the table."""
        print(f"[{self.seconds:6.1f} s] {text}", file=self._out, flush=True)

    def add(self, line: Line) -> None:
        self.lines.append(line)
        self.say(f"{line.part}: {line.what}: {line.status}: {line.text}")
        if line.target is not None:
            self.say(f"    target {line.target}")

    @property
    def exit_status(self) -> int:
        """1 where anything failed; a target that was missed, or a case that was not run, is no failure."""
        return int(any(line.status == "failed" for line in self.lines))

    def print_table(self) -> None:
        rows = [("part", "what", "status", "result", "target")]
        for line in self.lines:
            # Empty cells stand beside the further lines of a result.
            columns = ([line.part], [line.what], [line.status], _wrapped(line.text), [str(line.target or "")])
            rows += zip_longest(*columns, fillvalue="")
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        print("", file=self._out)
        for row in rows:
            text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print(text.rstrip(), file=self._out)
        print(f"\n{self.summary()}", file=self._out, flush=True)

    def summary(self) -> str:
        counts = {status: sum(line.status == status for line in self.lines) for status in STATUSES}
        said = ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "nothing was run"
        targets = [line.target for line in self.lines if line.target is not None]
        met = sum(target.is_met for target in targets)
        about = f"targets: {met} of {len(targets)} met" if targets else "no target was looked at"
        return f"{len(self.lines)} lines in {self.seconds:.0f} s: {said}; {about}."

    def write_json(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write all lines, and what the run was, to a file."""
        held = {
            **about,
            "seconds": round(self.seconds, 3),
            "exit_status": self.exit_status,
            "lines": [line.as_json() for line in self.lines],
        }
        path.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


def first_line(text: str) -> str:
    """Return the first line that says something, for where there is room for one."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def first_sentence(text: str) -> str:
    """Return the first sentence of the first line, where what follows is of no use to a reader."""
    sentence, end, _ = first_line(text).partition(". ")
    return sentence + end.rstrip()


def last_lines(text: str, count: int) -> str:
    """Return the last lines that say something, joined by " | "."""
    said: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(said[-count:])


def rate(per_s: float, unit: str) -> str:
    """Return a rate with a prefix that leaves few digits: 4.05 TB/s."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_s >= factor:
            return f"{per_s / factor:.3g} {prefix}{unit}"
    return f"{per_s:.3g} {unit}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), TABLE_WIDTH) or [""]
