"""Compiles the Triton kernels for GPUs that need not be there: whether they can be built, and what they take.

The test of the kernels' compilation does the same; how is in its folder.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpu_check.environment import layers
from gpu_check.lines import Line
from gpu_check.needs import ROOT
from gpu_check.workers import tell
from octavo.core.interfaces.attention import AttentionSpec

HELPER = ROOT / "tests" / "attention_backends" / "triton" / "compile_kernels.py"
# A100, H100 and H200, B200: https://developer.nvidia.com/cuda-gpus.
CAPABILITIES = ((8, 0), (9, 0), (10, 0))
MULTIPROCESSORS = 132


def cases_of() -> dict[str, Callable[[Sequence[str]], None]]:
    """Return what compiles each layer for each compute capability, by a name."""
    return {
        f"{name}, compute capability {major}.{minor}": partial(compile_layer, name, spec, (major, minor))
        for name, spec in layers("cuda:0")
        for major, minor in CAPABILITIES
    }


def compile_layer(name: str, spec: AttentionSpec, capability: tuple[int, int], without: Sequence[str]) -> None:
    """Compile all kernels of one layer; report what each takes of a multiprocessor."""
    what = f"{name}, compute capability {capability[0]}.{capability[1]}"
    helper = load_helper()
    if reasons := reasons_against(spec, capability, helper.SHARED_KIB[capability] << 10):
        tell(Line("compile", what, "not run", " ".join(reasons)))
        return
    from octavo.attention_backends.triton.options import TritonOptions

    # The tensors are stand-ins for those of a GPU.
    compiled = helper.compile_case(replace(spec, device="cpu"), TritonOptions(), capability)
    tell(Line("compile", what, "passed", ", ".join(map(described, compiled)), {"kernels": compiled}))


def reasons_against(spec: AttentionSpec, capability: tuple[int, int], shared_bytes: int) -> list[str]:
    """Return why such a GPU cannot serve a layer, as the backend would say on it."""
    import triton

    from octavo.attention_backends.triton import availability
    from octavo.attention_backends.triton.heuristics import Device

    device = Device(capability, shared_bytes, MULTIPROCESSORS)
    found = availability.Surroundings(triton.__version__, False, True, 1, device)
    return availability.reasons_against(spec, found)


def load_helper() -> Any:
    """Return the module that compiles kernels."""
    if HELPER.stem not in sys.modules:
        module_spec = importlib.util.spec_from_file_location(HELPER.stem, HELPER)
        if module_spec is None or module_spec.loader is None or not HELPER.exists():
            raise FileNotFoundError(f"{HELPER} is missing; it comes with a checkout.")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[HELPER.stem] = module
        module_spec.loader.exec_module(module)
    return sys.modules[HELPER.stem]


def described(kernel: Mapping[str, Any]) -> str:
    """Return a kernel's name and what it takes."""
    kind = {True: " of decode rows", False: " of prefill rows", None: ""}[kernel["is_decode"]]
    spilled = f", {kernel['spilled_bytes']} bytes spilled" if kernel["spilled_bytes"] else ""
    shared = f"{kernel['shared_bytes'] / 1024:.0f} KiB shared"
    return f"{kernel['kernel']}{kind} ({kernel['registers']} registers, {shared}{spilled})"
