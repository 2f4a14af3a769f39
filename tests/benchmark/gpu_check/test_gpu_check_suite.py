"""The conformance suite in several processes: its order, its counts, and what hangs or is wrong."""

import os
import time

import pytest
from gpu_check.lines import Line
from gpu_check.needs import ROOT, environment_with, register_checkout
from gpu_check.suite import Tally, class_name, order_of, parts_of, run_suite

SUITES = [
    {"backend": backend, "dtype": dtype} for dtype in ("bfloat16", "float32") for backend in ("triton", "torch_sdpa")
]
NUMBERS = "test_output_and_lse_equal_the_definition"


def nodeid(test, ability="", backend="triton", dtype="bfloat16"):
    return f"suite_tests.py::Test_{backend}_{dtype}::{test}" + (f"[{ability}]" if ability else "")


def test_the_most_telling_tests_come_first_and_bfloat16_before_float32():
    wanted = [
        nodeid(NUMBERS, "plain"),
        nodeid(NUMBERS, "plain", "torch_sdpa"),
        nodeid(NUMBERS, "window"),
        nodeid(NUMBERS, "window+sinks", "torch_sdpa"),
        nodeid(NUMBERS, "value_is_key_prefix"),
        nodeid("test_long_rows_have_no_seam", "plain"),
        nodeid(NUMBERS, "int8_cache"),
        nodeid(NUMBERS, "block_size_3"),
        nodeid("test_cannot_serve_changes_nothing"),
        nodeid("test_abilities_work_together", "plain"),
        nodeid(NUMBERS, "plain", dtype="float32"),
        nodeid("test_abilities_work_together", "plain", dtype="float32"),
    ]
    mixed = [*wanted[1::2], *wanted[::2]]
    assert sorted(mixed, key=lambda test: order_of(test, SUITES)) == wanted


def test_a_test_has_a_class_a_name_and_an_ability():
    assert parts_of(nodeid(NUMBERS, "window+sinks")) == ("Test_triton_bfloat16", NUMBERS, "window+sinks")
    assert parts_of(nodeid("test_x")) == ("Test_triton_bfloat16", "test_x", "")


def test_the_options_of_a_backend_are_in_the_name_of_its_class():
    suite = {"backend": "flash_attn+provider=torch_gather", "dtype": "bfloat16"}
    assert class_name(suite) == "Test_flash_attn_provider_torch_gather_bfloat16"


def outcome(test, what, message=""):
    return {"case": test, "outcome": what, "message": message}


def test_outcomes_are_counted_by_backend_and_dtype():
    lines = []
    tally = Tally(SUITES, lines.append)
    tally.add(outcome(nodeid(NUMBERS, "plain"), "passed"))
    tally.add(outcome(nodeid(NUMBERS, "window"), "failed", "wrong by far\nin many lines"))
    tally.add(outcome(nodeid(NUMBERS, "sinks"), "skipped", "no sinks here"))
    tally.add(outcome(nodeid(NUMBERS, "plain", "torch_sdpa"), "passed"))
    tally.add(outcome(nodeid(NUMBERS, "plain", dtype="float32"), "skipped", "no float32 here"))
    left = [nodeid(NUMBERS, "chunk"), nodeid(NUMBERS, "plain", "torch_sdpa", "float32")]
    assert lines == [Line("suite", f"triton, bfloat16, {NUMBERS}[window]", "failed", "wrong by far")]
    assert [(line.what, line.status, line.text) for line in tally.lines(left)] == [
        ("triton, bfloat16", "failed", "1 passed, 1 failed, 1 skipped, 1 not reached"),
        ("torch_sdpa, bfloat16", "passed", "1 passed"),
        ("triton, float32", "not run", "1 skipped; no float32 here"),
        ("torch_sdpa, float32", "not run", "no time was left: 1 not reached"),
    ]


def test_a_test_that_hung_has_failed():
    lines = []
    tally = Tally(SUITES, lines.append)
    tally.add_line(Line("suite", nodeid(NUMBERS, "plain"), "failed", "nothing came of it in 30 s"))
    assert lines == [Line("suite", f"triton, bfloat16, {NUMBERS}[plain]", "failed", "nothing came of it in 30 s")]
    assert tally.lines([])[0].text == "1 failed"


def test_of_many_failures_the_first_are_shown_and_the_rest_is_counted():
    lines = []
    tally = Tally(SUITES, lines.append)
    for number in range(20):
        tally.add(outcome(nodeid(NUMBERS, f"ability_{number}"), "failed", "no"))
    assert len(lines) == 8
    assert tally.lines([])[0].text == "20 failed (12 failures not shown)"


def test_where_no_test_was_chosen_that_is_what_is_said():
    assert Tally(SUITES[:1], print).lines([])[0].text == "none of its tests was among those chosen"


@pytest.fixture
def run(site, tmp_path, monkeypatch):
    """Runs the first tests of the suites of some backends; returns the lines."""
    folders = [register_checkout(tmp_path / "checkout"), ROOT, ROOT / "benchmarks"]
    environment = environment_with(folders, {})

    def run_it(*backends, num_tests, seconds=120.0):
        lines = []
        given = {"part": "suite", "device": "cpu", "backends": list(backends)}
        run_suite(given, environment, time.monotonic() + seconds, lines.append, num_tests)
        return lines

    return run_it


def test_right_and_wrong_backends_are_told_apart(run):
    lines = run("torch_sdpa", "crooked", "raising", num_tests=6)
    summary = {line.what: (line.status, line.figures["passed"], line.figures["failed"]) for line in lines[-6:]}
    assert summary["torch_sdpa, bfloat16"] == ("passed", 2, 0)
    assert summary["crooked, bfloat16"] == ("failed", 0, 2)
    assert summary["raising, bfloat16"] == ("failed", 0, 2)
    shown = {line.what: line.text for line in lines[:-6]}
    assert len(shown) == 4
    assert "differs from attention by its definition" in shown[f"crooked, bfloat16, {NUMBERS}[plain]"]
    assert "out of luck" in shown[f"raising, bfloat16, {NUMBERS}[plain]"]


@pytest.mark.slow
def test_a_backend_that_hangs_costs_its_own_tests(run, monkeypatch):
    monkeypatch.setattr("gpu_check.suite.TEST_SECONDS", 4.0)
    monkeypatch.setattr("gpu_check.suite.num_processes", lambda device: 1)
    lines = run("hanging", "torch_sdpa", num_tests=2)
    assert [(line.what, line.status) for line in lines[:3]] == [
        (f"hanging, bfloat16, {NUMBERS}[plain]", "failed"),
        ("hanging, bfloat16", "failed"),
        ("torch_sdpa, bfloat16", "passed"),
    ]
    assert lines[0].text.startswith("nothing came of it in 4 s; killed by SIGKILL")


@pytest.mark.slow
def test_the_tests_that_the_time_does_not_reach_are_counted(run, monkeypatch):
    monkeypatch.setattr("gpu_check.suite.num_processes", lambda device: 1)
    begun = time.monotonic()
    (line, _) = run("hanging", num_tests=5, seconds=8.0)
    assert time.monotonic() - begun < 20
    assert (line.what, line.status) == ("hanging, bfloat16", "not run")
    assert line.text == "no time was left: 5 not reached"


def test_the_parts_are_those_of_the_checkout(tmp_path):
    folder = register_checkout(tmp_path)
    (info,) = folder.iterdir()
    text = (info / "entry_points.txt").read_text()
    assert "[octavo.attention_backends]\n" in text
    assert "torch_sdpa = octavo.attention_backends.torch_sdpa:TorchSDPABackend\n" in text
    environment = environment_with([folder], {"NAME": "value"})
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(folder)
    assert environment["NAME"] == "value"
