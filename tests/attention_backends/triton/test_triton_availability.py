"""Why the triton backend cannot serve: each reason in full, and all of them at once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
from specs import PLAIN

from octavo.attention_backends.triton.availability import Surroundings, look_around, reasons_against
from octavo.attention_backends.triton.backend import TritonBackend
from octavo.attention_backends.triton.heuristics import INTERPRETER, Device
from octavo.core.interfaces.attention import AttentionSpec

H100 = Device((9, 0), 227 << 10, 132)
CPU_SPEC = replace(PLAIN, device="cpu")
GPU_SPEC = replace(PLAIN, device="cuda:0", dtype="bfloat16", kv_dtype="bfloat16")
ON_CPU = Surroundings("3.9.0", is_interpreted=True, is_nvidia=True, num_gpus=0, device=INTERPRETER)
ON_GPU = Surroundings("3.9.0", is_interpreted=False, is_nvidia=True, num_gpus=1, device=H100)


@pytest.mark.parametrize(
    ("changes", "found", "reason"),
    [
        (
            {},
            replace(ON_GPU, triton_version=None),
            "Triton is not installed; a CUDA build of torch brings it along, and pip install triton adds it on Linux.",
        ),
        (
            {},
            replace(ON_GPU, triton_version="3.5.1"),
            "Triton 3.5.1 is installed, and the kernels need 3.6 or newer: "
            'pip install "triton>=3.6", with a torch that goes with it.',
        ),
        ({"device": "abacus:0"}, ON_GPU, "device 'abacus:0' is not a device that torch knows."),
        (
            {"device": "cpu"},
            replace(ON_CPU, is_interpreted=False),
            "device 'cpu' runs Triton's kernels only through its interpreter, which is slow and meant for tests; set "
            "TRITON_INTERPRET=1 before Python starts, or take torch_sdpa.",
        ),
        (
            {"device": "mps"},
            replace(ON_GPU, device=None),
            "device 'mps' is neither an NVIDIA GPU nor a CPU, and the kernels were made for no other.",
        ),
        (
            {},
            replace(ON_GPU, is_nvidia=False, device=None),
            "device 'cuda:0' is an AMD GPU, on which the kernels were never tried; take torch_sdpa.",
        ),
        (
            {},
            replace(ON_GPU, num_gpus=0, device=None),
            "device 'cuda:0' needs an NVIDIA GPU, and torch sees none.",
        ),
        (
            {"device": "cuda:3"},
            replace(ON_GPU, num_gpus=2, device=None),
            "device 'cuda:3' is not there: torch sees 2, counted from cuda:0.",
        ),
        (
            {},
            replace(ON_GPU, is_interpreted=True),
            "device 'cuda:0' is a GPU, and TRITON_INTERPRET=1 has the kernels interpreted on the CPU; unset it before "
            "Python starts.",
        ),
        (
            {},
            replace(ON_GPU, has_compiler=False),
            "Triton needs a C compiler to start kernels, and none is there; install gcc and Python's headers "
            "(python3-dev), or name one in the variable CC.",
        ),
        ({"dtype": "float64"}, ON_GPU, "dtype 'float64' is not one of float32, float16, bfloat16."),
        (
            {"kv_dtype": "float64"},
            ON_GPU,
            "kv_dtype 'float64' is not one of float32, float16, bfloat16, fp8_e4m3, int8, fp8_e4m3_per_token_head, "
            "int8_per_token_head.",
        ),
        (
            {"dtype": "float16"},
            replace(ON_GPU, device=replace(H100, capability=(7, 5))),
            "kv_dtype 'bfloat16' needs compute capability 8.0, and cuda:0 has 7.5; take float16.",
        ),
        (
            {"kv_dtype": "fp8_e4m3"},
            replace(ON_GPU, device=replace(H100, capability=(8, 6))),
            "kv_dtype 'fp8_e4m3' needs compute capability 8.9, and cuda:0 has 8.6; take int8.",
        ),
        (
            {"kv_dtype": "fp8_e4m3_per_token_head"},
            replace(ON_GPU, device=replace(H100, capability=(8, 0))),
            "kv_dtype 'fp8_e4m3_per_token_head' needs compute capability 8.9, and cuda:0 has 8.0; "
            "take int8_per_token_head.",
        ),
        (
            {"head_dim_v": 8},
            ON_GPU,
            "head_dim_v 8 differs from head_dim 16, which is served only with value_is_key_prefix.",
        ),
        (
            {"head_dim": 4096, "head_dim_v": 4096},
            ON_GPU,
            "head_dim 4096 is too large: 16 keys and values of it in bfloat16 do not fit into the 227 KiB of shared "
            "memory that cuda:0 gives a program; take torch_sdpa.",
        ),
    ],
)
def test_each_reason_is_a_sentence_with_the_way_out(changes: dict[str, Any], found: Surroundings, reason: str) -> None:
    assert reasons_against(replace(GPU_SPEC, **changes), found) == [reason]


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (CPU_SPEC, ON_CPU),
        (GPU_SPEC, ON_GPU),
        (GPU_SPEC, replace(ON_GPU, triton_version="3.6.0")),
        (GPU_SPEC, replace(ON_GPU, triton_version="4.0.0+git1234")),
        (replace(GPU_SPEC, kv_dtype="fp8_e4m3"), replace(ON_GPU, device=Device((8, 9), 99 << 10, 100))),
        (replace(GPU_SPEC, head_dim=512, head_dim_v=512), replace(ON_GPU, device=Device((12, 0), 99 << 10, 100))),
        (
            replace(GPU_SPEC, num_kv_heads=1, head_dim=576, head_dim_v=512, value_is_key_prefix=True),
            replace(ON_GPU, device=Device((8, 9), 99 << 10, 100)),
        ),
    ],
)
def test_what_can_be_served_has_no_reason(spec: AttentionSpec, found: Surroundings) -> None:
    assert reasons_against(spec, found) == []


def test_all_reasons_are_named_at_once() -> None:
    spec = replace(GPU_SPEC, dtype="float64", kv_dtype="int4", head_dim_v=8)
    found = Surroundings(None, is_interpreted=False, is_nvidia=True, num_gpus=0, device=None)
    assert [reason.split()[0] for reason in reasons_against(spec, found)] == [
        "Triton",
        "device",
        "dtype",
        "kv_dtype",
        "head_dim_v",
    ]


def test_what_a_spec_says_beyond_the_contract_is_not_passed_over() -> None:
    @dataclass(frozen=True)
    class StripedSpec(AttentionSpec):
        every: int = 2

    spec = StripedSpec(1, 1, 16, 16, 1.0, 16, "float16", "float16", "cuda:0")
    assert reasons_against(spec, ON_GPU) == ["StripedSpec has every, which this backend knows nothing of."]


def test_looking_around_sees_this_very_place() -> None:
    import torch
    import triton

    found = look_around("cpu")
    assert found.triton_version == triton.__version__
    assert found.is_interpreted == triton.knobs.runtime.interpret
    assert found.num_gpus == torch.cuda.device_count()
    assert found.device == INTERPRETER
    for name in ("abacus:0", "mps", f"cuda:{torch.cuda.device_count()}"):
        assert look_around(name).device is None


ASK = """
import sys
from octavo.attention_backends.triton.backend import TritonBackend
from octavo.core.interfaces.attention import AttentionSpec
spec = AttentionSpec(1, 1, 16, 16, 1.0, 16, "float32", "float32", "cpu")
print(TritonBackend.cannot_serve(spec))
print([name for name in sys.modules if name == "triton" or name.startswith("triton.")])
"""


@pytest.mark.parametrize(
    ("variable", "answer"),
    [
        ("1", []),
        (
            "0",
            [
                "device 'cpu' runs Triton's kernels only through its interpreter, which is slow and meant for tests; "
                "set TRITON_INTERPRET=1 before Python starts, or take torch_sdpa."
            ],
        ),
    ],
)
def test_asking_imports_no_triton_and_heeds_the_variable(variable: str, answer: list[str]) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": variable}
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True, env=environment)
    assert asked.stdout.splitlines() == [str(answer), "[]"]


def test_the_backend_asks_for_its_own_device() -> None:
    assert TritonBackend.cannot_serve(replace(PLAIN, dtype="float64")) == [
        "dtype 'float64' is not one of float32, float16, bfloat16."
    ]
