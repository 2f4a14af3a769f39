"""The search through a backend's options: one at a time, and only what gains something is kept."""

from typing import ClassVar

import pytest
from gpu_check import tune
from gpu_check.clocks import Clock
from gpu_check.shapes import decode_shapes, prefill_shapes
from gpu_check.sizes import SMALL
from pydantic import BaseModel

from octavo.plugins.families import ATTENTION_BACKENDS
from octavo.plugins.registry import scan
from octavo.testing import installed

DECODE = decode_shapes(SMALL, "cpu")[0]
PREFILL = prefill_shapes(SMALL, "cpu")[0]


class Options(BaseModel):
    tile_keys: int | None = None
    num_warps: int | None = None
    splits: int | None = None


class Counting(Clock):
    """A clock on which the backend says itself how long it takes."""

    def seconds(self, work):
        work()
        return Tunable.seconds

    def wait(self):
        pass


class Tunable(scan().load(ATTENTION_BACKENDS, "torch_sdpa")):
    """Fast with tiles of 64 and 8 warps together; cannot do tiles of 128; slow with splits."""

    contract_version = 1
    Options: ClassVar[type[BaseModel]] = Options
    seconds: ClassVar[float] = 0.0

    def __init__(self, spec, options):
        super().__init__(spec)
        self.options = options

    def attend(self, *args, **kwargs):
        tile, warps, splits = self.options.tile_keys, self.options.num_warps, self.options.splits
        if tile == 128:
            raise RuntimeError("out of shared memory")
        gain = 0.2 * (tile == 64) + 0.2 * (tile == 64 and warps == 8) + 0.005 * (warps == 4)
        Tunable.seconds = 1.0 - gain + 0.1 * (splits or 0)
        return super().attend(*args, **kwargs)


@pytest.fixture(autouse=True)
def tunable(monkeypatch):
    monkeypatch.setattr(tune, "TUNED_BACKEND", "tunable")
    with installed({"octavo.attention_backends": {"tunable": Tunable}}):
        yield


def test_the_best_options_of_a_shape_are_told(told):
    tune.tune_shape(DECODE, Counting(), 3, {"copy_bytes_per_s": 1e6}, 60.0, [])
    *not_run, line = told()
    assert line.status == "measured"
    assert line.figures["options"] == {"tile_keys": 64, "num_warps": 8}
    assert line.figures["seconds"] == pytest.approx(0.6)
    assert line.figures["untuned_seconds"] == 1.0
    assert line.figures["share_of_copy_bytes_per_s"] == pytest.approx(DECODE.read_bytes / 0.6 / 1e6)
    assert line.text.startswith("num_warps=8, tile_keys=64: 600.000 ms, 1.67 times as fast as untuned; ")
    assert line.text.endswith("; the backend has no option num_stages")
    # What was asked for and does not work is no fault of the backend's.
    assert [(other.what, other.status, other.text) for other in not_run] == [
        (f"{DECODE.name}, tile_keys=128", "not run", "RuntimeError: out of shared memory")
    ]


def test_splits_are_for_decode_rows(told):
    tune.tune_shape(PREFILL, Counting(), 3, {}, 60.0, [])
    assert not any("splits" in name for name in told()[-1].figures["tried"])
    assert "splits" in tune.options_for(DECODE, ["splits", "num_warps"])
    assert tune.options_for(PREFILL, ["splits", "num_warps"]) == ["num_warps"]


def test_a_setting_that_a_process_ended_over_is_left_out(told):
    tune.tune_shape(DECODE, Counting(), 3, {}, 60.0, ["tile_keys=64"])
    assert told()[-1].figures["options"] == {}


def test_what_does_not_work_untuned_has_failed(told, monkeypatch):
    monkeypatch.setattr(Tunable, "attend", lambda *args, **kwargs: 1 / 0)
    tune.tune_shape(DECODE, Counting(), 3, {}, 60.0, [])
    (line,) = told()
    assert (line.what, line.status) == (f"{DECODE.name}, the backend's own choice", "failed")


def test_when_the_time_is_over_the_best_so_far_is_told(told):
    tune.tune_shape(DECODE, Counting(), 3, {}, 0.0, [])
    (line,) = told()
    assert line.figures["options"] == {}
    # Six numbers of splits, four tiles, three numbers of warps.
    assert "; 1 settings in 0 s; no time was left for 13 more; " in line.text


def test_shapes_share_the_time():
    cases = tune.cases_of(SMALL, "cpu", {}, 100.0)
    assert next(iter(cases)) == DECODE.name
    assert {case.args[-1] for case in cases.values()} == {80.0 / len(cases)}
