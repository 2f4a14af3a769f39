"""The whole script on a CPU: its parts, its time, its exit status, and what it says where something is missing."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_check import main as script
from gpu_check import needs

ROOT = Path(__file__).parents[3]


def run(*words, timeout=200):
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def statuses(path, part):
    return {line["what"]: line["status"] for line in json.loads(path.read_text())["lines"] if line["part"] == part}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence():
    result = run()
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr in (
        f"{reason} Without a GPU, --device cpu --small looks at the script itself, "
        "and --compile-only compiles the Triton kernels.\n"
        for reason in (
            f"gpu_check needs a CUDA build of torch, and {torch.__version__} is none.",
            "gpu_check needs an NVIDIA GPU, and torch sees none.",
        )
    )


def test_the_file_is_written_anew_after_each_part(tmp_path, monkeypatch):
    file = tmp_path / "out.json"
    held = []

    class Watched(script.Run):
        def run_part(self, part):
            held.append(json.loads(file.read_text()) if file.exists() else None)
            super().run_part(part)

    monkeypatch.setattr(script, "Run", Watched)
    # The processes find no time, and say so.
    words = ["--device", "cpu", "--small", "--budget", "8.01", "--parts", "limits,decode,prefill", "--json", str(file)]
    assert script.main(words) == 0
    assert held[0] is None
    assert [left["parts_done"] for left in held[1:]] == [["limits"], ["limits", "decode"]]
    assert [line["part"] for line in held[1]["lines"]] == ["limits"]
    last = json.loads(file.read_text())
    assert last["parts_done"] == last["parts"] == ["limits", "decode", "prefill"]
    assert (last["budget_seconds"], last["exit_status"]) == (8.01, 0)


def test_it_ends_quietly_where_nobody_reads_on():
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check"), "--device", "cpu", "--small", "--parts", "limits"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.slow
def test_environment_limits_and_decode_on_a_cpu(tmp_path):
    file = tmp_path / "out.json"
    words = ["--device", "cpu", "--small", "--backends", "torch_sdpa", "--json", str(file)]
    result = run(*words, "--parts", "decode,limits,environment")
    assert result.returncode == 0, result.stdout + result.stderr
    held = json.loads(file.read_text())
    assert held["parts"] == ["environment", "limits", "decode"]
    assert held["versions"]["torch"] == torch.__version__
    assert statuses(file, "limits") == {
        "memory, copy of 1 MiB": "measured",
        "memory, read of 1 MiB": "measured",
        "matrices, bfloat16, 64 x 64": "measured",
    }
    decode = statuses(file, "decode")
    assert decode["2 x 40, 4/2 heads of 16, bfloat16, torch_sdpa"] == "measured"
    assert decode["2 x 40, MLA, 4 heads of 24/16, bfloat16, torch_sdpa"] == "measured"
    assert decode["2 x 40, 4/2 heads of 16, bfloat16, torch varlen_attn, paged"] == "not run"
    first = next(line for line in held["lines"] if line["part"] == "decode" and line["status"] == "measured")
    copy = next(line["figures"]["copy_bytes_per_s"] for line in held["lines"] if "copy" in line["what"])
    # The limits reach the later parts.
    share = first["figures"]["bytes"] / first["figures"]["seconds"] / copy
    assert first["figures"]["share_of_copy_bytes_per_s"] == pytest.approx(share)
    # Each line as it came, then all of them as a table.
    assert result.stdout.count("memory, copy of 1 MiB") == 2
    assert "\npart         what " in result.stdout
    assert result.stdout.splitlines()[-1].endswith("no target was looked at.")


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_with_the_interpreter(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    file = tmp_path / "out.json"
    result = run("--device", "cpu", "--small", "--budget", "280", "--json", str(file), timeout=290)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = json.loads(file.read_text())["lines"]
    assert {line["part"] for line in lines} == set(script.SHARES)
    measured = {line["what"] for line in lines if line["status"] in ("measured", "passed")}
    assert {"triton, bfloat16", "triton, bfloat16, eager"} <= measured
    assert any(what.endswith("bfloat16, triton") for what in measured)


@pytest.mark.slow
def test_wrong_and_raising_backends_fail_the_run(site, tmp_path):
    file = tmp_path / "out.json"
    words = [
        "--device",
        "cpu",
        "--small",
        "--backends",
        "crooked,raising,torch_sdpa,broken",
        "--parts",
        "environment,prefill",
    ]
    result = run(*words, "--json", str(file))
    assert result.returncode == json.loads(file.read_text())["exit_status"] == 1
    prefill = statuses(file, "prefill")
    shape = "1 x 48, 4/2 heads of 16, bfloat16"
    assert prefill[f"{shape}, crooked"] == prefill[f"{shape}, raising"] == "failed"
    assert prefill[f"{shape}, torch_sdpa"] == "measured"
    # What cannot be loaded is said once, and not asked again.
    assert statuses(file, "environment")["backend broken"] == "failed"
    assert prefill["broken, all of it"] == "not run"
    assert f"{shape}, broken" not in prefill


@pytest.mark.slow
def test_a_backend_that_hangs_does_not_take_more_time_than_there_is(site, tmp_path):
    file = tmp_path / "out.json"
    words = ["--device", "cpu", "--small", "--backends", "hanging", "--parts", "decode", "--budget", "18"]
    begun = time.monotonic()
    result = run(*words, "--json", str(file))
    assert time.monotonic() - begun < 25
    assert result.returncode == 0
    decode = [line for line in json.loads(file.read_text())["lines"] if line["part"] == "decode"]
    assert decode[0]["text"] == "the time of the part ended in it, at hanging"
    assert {line["text"] for line in decode[1:]} == {"no time was left"}
    assert len(decode) == 7


def test_a_part_whose_packages_are_missing_names_them(monkeypatch, capsys):
    found = needs.importlib.util.find_spec
    monkeypatch.setattr(
        needs.importlib.util, "find_spec", lambda name: None if name in ("gguf", "pytest") else found(name)
    )
    assert script.main(["--device", "cpu", "--small", "--parts", "suite,engine"]) == 0
    printed = capsys.readouterr().out
    assert "suite: all of it: not run: not installed: pytest\n" in printed
    assert "engine: all of it: not run: not installed: gguf\n" in printed


def test_without_torch_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(needs.importlib.util, "find_spec", lambda name: None)
    assert script.main(["--device", "cpu"]) == 2
    assert capsys.readouterr().err == "gpu_check needs torch, with CUDA, and it is not installed.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--parts", "limits,speed"],
            "--parts has speed; parts are environment, limits, suite, engine, decode, prefill",
        ),
        (["--budget", "5"], "--budget is 5; it must be more than 8 seconds"),
        (["--tests", "0"], "--tests is 0; it must be at least 1"),
        (["--device", "tpu"], "--device is tpu; it must be cpu, cuda, or cuda:N with the number of a GPU"),
        (["--device", "cuda:x"], "--device is cuda:x; it must be cpu, cuda, or cuda:N with the number of a GPU"),
        (
            ["--json", "/nonexistent/x.json"],
            "--json is /nonexistent/x.json, which cannot be written: No such file or directory",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        script.parse(words)
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"gpu_check: error: {message}".replace(
        "gpu_check", "scripts/gpu_check"
    )


def test_an_unknown_backend_is_refused_with_those_that_are_there(capsys):
    with pytest.raises(SystemExit):
        script.parse(["--backends", "triton,trion+splits=2,flash"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "scripts/gpu_check: error: --backends has trion+splits=2, flash; "
        "attention backends are torch_sdpa, triton, flash_attn"
    )


def test_backends_of_other_packages_are_known_with_options_and_a_package_before_them(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    backends = ("crooked", "odd:crooked", "octavo:triton+splits=2")
    assert script.parse(["--backends", ",".join(backends)]).backends == backends


def test_looking_whether_the_file_can_be_written_leaves_it_as_it_was(tmp_path):
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("before")
    for file in (new, old):
        assert script.parse(["--json", str(file)]).json_file == file
    assert (new.exists(), old.read_text()) == (False, "before")


def test_parts_run_in_their_order_and_tuning_takes_the_place_of_the_rest():
    assert script.parse(["--parts", "decode,limits"]).parts == ("limits", "decode")
    assert script.parse([]).parts == ("environment", "limits", "suite", "engine", "decode", "prefill")
    assert script.parse(["--tune"]).parts == ("environment", "limits", "tune")
    assert script.parse(["--tune", "--parts", "limits"]).parts == ("limits", "tune")
    assert script.parse(["--small"]).num_tests == 12
    assert script.parse(["--small", "--tests", "3"]).num_tests == 3
    assert script.parse([]).num_tests is None


def test_four_minutes_are_four_minutes():
    assert script.parse([]).budget_seconds == 240
    # Of it, every part gets what a process takes to import torch where that was never read from the disk.
    for_parts = 240 - script.RESERVED_SECONDS
    assert min(script.SHARES.values()) / sum(script.SHARES.values()) * for_parts >= 14


def test_a_gpu_without_a_number_is_the_first_one():
    assert script.parse([]).device == script.parse(["--device", "cuda"]).device == "cuda:0"
    assert script.parse(["--device", "cuda:1"]).device == "cuda:1"


@pytest.mark.parametrize("name", ["tune", "compile"])
def test_what_runs_alone_needs_packages_and_has_a_share_of_the_time(name):
    assert needs.PACKAGES[name]
    assert script.ALONE[name] <= 240 - script.RESERVED_SECONDS


@pytest.mark.parametrize("part", ["tune", "limits"])
def test_a_part_imports_no_package_that_it_does_not_name(part):
    """Of those that a bare machine lacks. The module of `tune` imports those of decode and prefill."""
    lacking = {"pytest", "transformers", "tokenizers", "gguf", "psutil", "pluggy", "jinja2", "typer", "rich", "triton"}
    unnamed = (lacking | {"pydantic", "importlib_metadata"}) - set(needs.PACKAGES[part])
    code = f"import sys, gpu_check.{part}; print(*sorted(set(sys.modules) & {unnamed!r}))"
    environment = needs.environment_with([ROOT, ROOT / "benchmarks"], {})
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
