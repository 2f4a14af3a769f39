"""The Triton kernels compiled for GPUs that are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_check import compile_only
from gpu_check import main as script

ROOT = Path(__file__).parents[3]
CASES = compile_only.cases_of()


def test_every_layer_is_compiled_for_three_generations():
    assert list(CASES)[:3] == [f"bfloat16, compute capability {capability}" for capability in ("8.0", "9.0", "10.0")]
    assert "MLA, compute capability 9.0" in CASES
    assert len(CASES) == 3 * len({name.partition(",")[0] for name in CASES})


def test_a_kernel_is_described_by_what_it_takes():
    kernel = {"kernel": "some_kernel", "is_decode": True, "registers": 96, "shared_bytes": 38 * 1024 + 10}
    assert compile_only.described({**kernel, "spilled_bytes": 0}) == (
        "some_kernel of decode rows (96 registers, 38 KiB shared)"
    )
    assert compile_only.described({**kernel, "is_decode": None, "spilled_bytes": 64}) == (
        "some_kernel (96 registers, 38 KiB shared, 64 bytes spilled)"
    )


def test_compiling_runs_alone_and_asks_for_no_gpu():
    arguments = script.parse(["--compile-only"])
    assert (arguments.parts, arguments.device) == (("compile",), "cpu")


@pytest.mark.slow
def test_kernels_compile_where_the_interpreter_is_asked_for(tmp_path):
    """A process either interprets kernels or compiles them; the variable for the one must not reach the other."""
    file = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check"), "--compile-only", "--budget", "100"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [*command, "--json", str(file)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = {line["what"]: line for line in json.loads(file.read_text())["lines"]}
    assert lines["bfloat16, compute capability 9.0"]["status"] == "passed"
    assert "attention_kernel of decode rows" in lines["bfloat16, compute capability 9.0"]["text"]
    # 8.9 is the first with such numbers.
    fp8 = lines["fp8_e4m3, compute capability 8.0"]
    assert (fp8["status"], "8.9" in fp8["text"]) == ("not run", True)
