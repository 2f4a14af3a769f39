"""`octavo bench`: what is run, what is shown, and the exit status."""

import json
import os
import re
import sys

import pytest

import octavo
from octavo.benchmark import limits
from octavo.benchmark.limits import MachineLimits
from octavo.benchmark.machine import Machine, Versions, cpu_name
from octavo.benchmark.measure import Measurement, NotRun, Run
from octavo.benchmark.workloads import Workload, custom_workload
from octavo.cli.app import run
from octavo.cli.bench_report import Report, StreamBound, table_lines
from octavo.config import EngineConfig
from octavo.plugins.hookspecs import EngineStarted

CUSTOM = ["--num-prompts", "2", "--input-len", "20", "--output-len", "3", "--num-kv-blocks", "64"]


def bench(capsys, *arguments, status=0):
    """Run the command; return what a program gets, and what stands on standard error."""
    assert run(["bench", *arguments, "--json"]) == status
    shown = capsys.readouterr()
    return json.loads(shown.out), shown.err


# -- what is run --------------------------------------------------------------------------------------------------


def test_a_workload_of_ones_own_is_run_and_its_figures_fit_together(tiny_folder, capsys):
    found, progress = bench(capsys, str(tiny_folder), *CUSTOM)
    (work,) = found["workloads"]
    assert work["name"] == "custom"
    assert (work["num_requests"], work["num_prompt_tokens"], work["num_output_tokens"]) == (2, 40, 6)
    assert work["not_run"] is None
    assert found["num_runs"] == len(work["runs"]) == 3
    seconds = sorted(each["seconds"] for each in work["runs"])
    assert work["seconds"] == seconds[1] > 0
    assert work["requests_per_s"] == 2 / seconds[1]
    assert work["prompt_tokens_per_s"] == 40 / seconds[1]
    assert work["output_tokens_per_s"] == 6 / seconds[1]
    for each in work["runs"]:
        assert len(each["first_token_seconds"]) == len(each["token_seconds"]) == 2
        assert 0 < max(each["first_token_seconds"]) < each["seconds"]
        assert each["steps"] == 3
    first_tokens = [value for each in work["runs"] for value in each["first_token_seconds"]]
    assert work["first_token_seconds"]["p99"] == max(first_tokens)
    assert [line.split(" took ")[0] for line in progress.splitlines()] == [
        f"custom: run {number} of 3" for number in (1, 2, 3)
    ]


def test_what_ran_and_on_what_is_said(tiny_folder, capsys):
    found, _ = bench(capsys, str(tiny_folder), *CUSTOM, "--runs", "1", "--dtype", "bfloat16")
    assert found["versions"]["octavo"] == octavo.__version__
    assert found["machine"]["cpu"] == cpu_name()
    assert found["machine"]["num_cpus"] == len(os.sched_getaffinity(0))
    assert found["engine"]["dtype"] == "bfloat16"
    assert found["engine"]["num_kv_blocks"] == 64
    assert "attention backend" in " ".join(found["engine"]["selection"])
    assert found["settings"]["model"] == str(tiny_folder)
    assert found["settings"]["cache"]["num_kv_blocks"] == 64
    assert found["limits"] is None


def test_a_hash_seed_is_not_shown(tiny_folder, capsys):
    assert run(["bench", str(tiny_folder), *CUSTOM, "--runs", "1", "--hash-seed", "sesame", "--json"]) == 0
    shown = capsys.readouterr()
    assert "sesame" not in shown.out + shown.err


def test_sizes_that_are_left_out_have_defaults(tiny_folder, capsys):
    found, _ = bench(capsys, str(tiny_folder), "--output-len", "2", "--runs", "1", "--num-kv-blocks", "64")
    (work,) = found["workloads"]
    assert (work["num_requests"], work["num_prompt_tokens"], work["num_output_tokens"]) == (1, 128, 2)


def test_the_workload_seed_draws_the_ids(tiny_folder, monkeypatch):
    drawn = []

    def remember(*sizes, **more):
        drawn.append((sizes, more))
        return custom_workload(*sizes, **more)

    monkeypatch.setattr("octavo.benchmark.workloads.custom_workload", remember)
    assert run(["bench", str(tiny_folder), *CUSTOM, "--runs", "1", "--workload-seed", "7"]) == 0
    assert run(["bench", str(tiny_folder), *CUSTOM, "--runs", "1"]) == 0
    assert drawn == [((2, 20, 3), {"vocab_size": 512, "seed": 7}), ((2, 20, 3), {"vocab_size": 512, "seed": 0})]


def test_a_seed_below_zero_is_refused_for_it_would_draw_as_the_one_above(capsys):
    assert run(["bench", "--num-prompts", "2", "--workload-seed", "-1"]) == 2
    assert "Invalid value for '--workload-seed'" in capsys.readouterr().err


def test_named_workloads_are_run_in_the_order_in_which_they_are_named_and_the_custom_one_last(tiny_folder, capsys):
    arguments = ["--workload", "prefix, single,prefix", *CUSTOM, "--runs", "1"]
    found, _ = bench(capsys, str(tiny_folder), *arguments, status=1)
    assert [work["name"] for work in found["workloads"]] == ["prefix", "single", "custom"]


def test_without_any_flag_all_four_are_wanted(tiny_folder, capsys):
    found, _ = bench(capsys, str(tiny_folder), "--num-kv-blocks", "64", status=1)
    assert [work["name"] for work in found["workloads"]] == ["single", "batch", "prefix", "long"]


def test_a_workload_that_cannot_be_run_says_why_and_the_status_is_1(tiny_folder, capsys):
    arguments = [str(tiny_folder), "--workload", "single,long", *CUSTOM, "--runs", "1"]
    assert run(["bench", *arguments]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert (
        "single was not run: Token id 25347 at position 0 of the prompt is not in the vocabulary; ids are whole "
        "numbers from 0 to 511." in lines
    )
    assert (
        "long was not run: its longest request takes 4160 tokens, and max_model_len is 512; this model's positions go "
        "up to 512." in lines
    )
    (seconds,) = (line.split() for line in lines if line.startswith("seconds, median"))
    assert seconds[2:6] == ["not", "run", "not", "run"]
    # So little work may take less than a hundredth.
    assert re.fullmatch(r"\d+\.\d\d", seconds[6])


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workload", "quick"], "There is no workload called 'quick'. There are: single, batch, prefix, long."),
        (["--workload", ""], "There is no workload called ''. There are: single, batch, prefix, long."),
        (
            ["--workload", "single", "--workload-seed", "3"],
            "--workload-seed draws the token ids of a workload of your own, and none is given; make one with "
            "--num-prompts, --input-len or --output-len, or leave the seed out.",
        ),
        (["MODEL", "--model", "other"], "The model is named twice: 'MODEL' and 'other'."),
        (
            ["--plot", "/nowhere/a.png"],
            "The picture '/nowhere/a.png' cannot be written: there is no folder '/nowhere'.",
        ),
    ],
)
def test_what_is_wrong_is_one_line_before_any_model_is_read(monkeypatch, capsys, arguments, sentence):
    monkeypatch.setattr("octavo.assembly.build_engine", None)
    assert run(["bench", *arguments]) == 2
    assert capsys.readouterr() == ("", f"octavo: {sentence}\n")


@pytest.mark.parametrize("flag", ["--runs", "--num-prompts", "--input-len", "--output-len"])
def test_counts_begin_at_one(capsys, flag):
    assert run(["bench", flag, "0"]) == 2
    assert f"Invalid value for '{flag}'" in capsys.readouterr().err


def test_without_matplotlib_a_plot_is_refused_with_the_extra_that_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(["bench", "--plot", str(tmp_path / "a.png")]) == 2
    assert capsys.readouterr().err == "octavo: --plot needs matplotlib; install it with: pip install 'octavo[plot]'\n"


# -- what else can be had -----------------------------------------------------------------------------------------


def test_the_figures_are_drawn_when_a_file_is_named(tiny_folder, tmp_path, capsys):
    path = tmp_path / "figures.png"
    assert run(["bench", str(tiny_folder), *CUSTOM, "--runs", "1", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def quick_limits(monkeypatch):
    """Measures the machine's limits on less memory and smaller matrices than a user's."""
    real = limits.measure_limits

    def quick(dtype, device):
        return real(dtype, device, num_read_bytes=1 << 20, num_matrix_rows=64)

    monkeypatch.setattr("octavo.benchmark.limits.measure_limits", quick)


def test_the_limits_are_shown_when_they_are_asked_for(tiny_folder, capsys, quick_limits):
    arguments = [str(tiny_folder), *CUSTOM, "--runs", "1", "--dtype", "bfloat16", "--limits"]
    found, _ = bench(capsys, *arguments)
    bound = found["limits"]
    assert bound["dtype"] == "bfloat16"
    # The tiny model's 106,816 weights, and a few frequencies.
    assert 0 <= bound["weight_bytes"] - 2 * 106_816 <= 256
    assert bound["tokens_per_s"] == bound["read_bytes_per_s"] / bound["weight_bytes"]
    assert bound["matmul_flop_per_s"] > 0
    assert run(["bench", *arguments]) == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].startswith("memory read ")
    assert last[1].startswith("a token reads 0.2 MB of weights: one stream cannot exceed ")


# -- the table ----------------------------------------------------------------------------------------------------


def measured(name, *runs):
    return Measurement(Workload(name, ([1] * 100, [2] * 28), 64), runs)


def report(*results, bound=None, num_runs=2, num_threads=2):
    started = EngineStarted("some/model", "cpu", "float32", 8192, 100, 1 << 30, ())
    machine = Machine("Some Processor", 2, num_threads, "Some Processor", 1 << 34)
    return Report(EngineConfig(), started, Versions("0.1", "2.13", "3.11"), machine, num_runs, results, bound)


def test_the_table_has_a_column_for_each_workload():
    results = [
        measured("single", Run(2.0, [0.25, 0.5], [0.02, 0.03], 0, 0, 0, 70), Run(4.0, [0.3, 0.35], [], 16, 0, 3, 70)),
        NotRun(Workload("long", ([5] * 4096,), 64), "there is no room"),
    ]
    bound = StreamBound(MachineLimits(2e10, 4e11, "float32", 2), 538_000_000)
    assert table_lines(report(*results, bound=bound)) == [
        "some/model on cpu in float32, octavo 0.1, torch 2.13, Python 3.11",
        "Some Processor, 2 processors, 2 threads",
        "",
        "                             single       long",
        "requests                          2          1",
        "prompt tokens                   128       4096",
        "output tokens                   128         64",
        "seconds, run 1                 2.00          -",
        "seconds, run 2                 4.00          -",
        "seconds, median                3.00    not run",
        "requests/s                     0.67          -",
        "prompt tokens/s                42.7          -",
        "output tokens/s                42.7          -",
        "first token, median, ms       325.0          -",
        "first token, p99, ms          500.0          -",
        "per token, median, ms          25.0          -",
        "per token, p99, ms             30.0          -",
        "prefix hit tokens                 0          -",
        "preemptions                       0          -",
        "",
        "long was not run: there is no room.",
        "",
        "memory read 20.0 GB/s; matrix product in float32 400 GFLOP/s",
        "a token reads 538.0 MB of weights: one stream cannot exceed 37.2 tokens/s",
    ]


def test_one_thread_is_one_thread():
    lines = table_lines(report(measured("single", Run(2.0, [0.25], [], 0, 0, 0, 70)), num_runs=1, num_threads=1))
    assert lines[1] == "Some Processor, 2 processors, 1 thread"


def test_five_workloads_fit_into_80_columns_with_large_numbers():
    large = Run(98765.43, [98765.432], [98765.432], 1_000_000_000, 0, 1_000_000, 1)
    results = [measured(name, large) for name in ("single", "batch", "prefix", "long", "custom")]
    lines = table_lines(report(*results, num_runs=1))
    assert max(map(len, lines)) <= 80
    assert len({len(line) for line in lines[3:]}) == 1
    assert all(len(line.split()) >= 6 for line in lines[4:])
