"""Whether the kernels can serve an attention here: what is installed, what the device can do, what the spec asks."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import metadata

import torch

from octavo.attention_backends.triton.heuristics import INTERPRETER, Device, compute_type, smallest_tile_fits
from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_format import KV_FORMATS

OLDEST_TRITON = (3, 6)
DTYPES = ("float32", "float16", "bfloat16")
KV_DTYPES = (*DTYPES, *(name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantised))
# Compute capabilities from which GPUs have a type's arithmetic or conversions.
BFLOAT16_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)

_KNOWN_FIELDS = frozenset(field.name for field in fields(AttentionSpec))
_KERNELS = "octavo.attention_backends.triton.formats"


@dataclass(frozen=True)
class Surroundings:
    """What is installed, and what is seen of a device.

    Attributes:
        triton_version: Of the installed Triton, such as "3.6.0"; None without one.
        is_interpreted: Whether Triton's interpreter is switched on.
        is_nvidia: Whether torch was built for NVIDIA GPUs or for none, and not for others.
        num_gpus: GPUs that torch sees.
        device: What the rules know of the spec's device; None when there is no such GPU.
        has_compiler: Whether there is a C compiler, with which Triton builds what starts its kernels on a GPU.
    """

    triton_version: str | None
    is_interpreted: bool
    is_nvidia: bool
    num_gpus: int
    device: Device | None
    has_compiler: bool = True


def look_around(device: str) -> Surroundings:
    """Find out what is there. Imports no Triton.

    Args:
        device: As torch names it; any text.
    """
    is_nvidia = torch.version.hip is None
    num_gpus = torch.cuda.device_count()
    return Surroundings(
        _triton_version(),
        _is_interpreted(),
        is_nvidia,
        num_gpus,
        _device(device, num_gpus if is_nvidia else 0),
        _has_compiler(),
    )


def reasons_against(spec: AttentionSpec, found: Surroundings) -> list[str]:
    """Return every reason why the kernels cannot serve `spec`, as sentences."""
    return [
        *_about_triton(found),
        *_about_device(spec, found),
        *_about_numbers(spec, found),
        *_about_sizes(spec, found),
        *_about_the_rest(spec),
    ]


def _about_triton(found: Surroundings) -> Iterator[str]:
    if found.triton_version is None:
        yield "Triton is not installed; a CUDA build of torch brings it along, and pip install triton adds it on Linux."
    elif _numbers(found.triton_version) < OLDEST_TRITON:
        yield (
            f"Triton {found.triton_version} is installed, and the kernels need {_dotted(OLDEST_TRITON)} or newer: "
            f'pip install "triton>={_dotted(OLDEST_TRITON)}", with a torch that goes with it.'
        )


def _about_device(spec: AttentionSpec, found: Surroundings) -> Iterator[str]:
    try:
        kind = torch.device(spec.device).type
    except RuntimeError:
        yield f"device {spec.device!r} is not a device that torch knows."
        return
    if kind == "cpu":
        if not found.is_interpreted:
            yield (
                "device 'cpu' runs Triton's kernels only through its interpreter, which is slow and meant for tests; "
                "set TRITON_INTERPRET=1 before Python starts, or take torch_sdpa."
            )
    elif kind != "cuda":
        yield f"device {spec.device!r} is neither an NVIDIA GPU nor a CPU, and the kernels were made for no other."
    elif not found.is_nvidia:
        yield f"device {spec.device!r} is an AMD GPU, on which the kernels were never tried; take torch_sdpa."
    elif not found.num_gpus:
        yield f"device {spec.device!r} needs an NVIDIA GPU, and torch sees none."
    elif found.device is None:
        yield f"device {spec.device!r} is not there: torch sees {found.num_gpus}, counted from cuda:0."
    elif found.is_interpreted:
        yield (
            f"device {spec.device!r} is a GPU, and TRITON_INTERPRET=1 has the kernels interpreted on the CPU; unset it "
            "before Python starts."
        )
    elif not found.has_compiler:
        yield (
            "Triton needs a C compiler to start kernels, and none is there; install gcc and Python's headers "
            "(python3-dev), or name one in the variable CC."
        )


def _about_numbers(spec: AttentionSpec, found: Surroundings) -> Iterator[str]:
    for name, known in (("dtype", DTYPES), ("kv_dtype", KV_DTYPES)):
        if getattr(spec, name) not in known:
            yield f"{name} {getattr(spec, name)!r} is not one of {', '.join(known)}."
    capability = found.device.capability if found.device is not None else None
    if capability is None:
        return
    for name in ("dtype", "kv_dtype"):
        if getattr(spec, name) == "bfloat16" and capability < BFLOAT16_CAPABILITY:
            yield (
                f"{name} 'bfloat16' needs compute capability {_dotted(BFLOAT16_CAPABILITY)}, and {spec.device} has "
                f"{_dotted(capability)}; take float16."
            )
    if spec.kv_dtype.startswith("fp8_e4m3") and capability < FP8_CAPABILITY:
        yield (
            f"kv_dtype {spec.kv_dtype!r} needs compute capability {_dotted(FP8_CAPABILITY)}, and {spec.device} has "
            f"{_dotted(capability)}; take {spec.kv_dtype.replace('fp8_e4m3', 'int8')}."
        )


def _about_sizes(spec: AttentionSpec, found: Surroundings) -> Iterator[str]:
    if not spec.value_is_key_prefix and spec.head_dim_v != spec.head_dim:
        yield (
            f"head_dim_v {spec.head_dim_v} differs from head_dim {spec.head_dim}, which is served only with "
            "value_is_key_prefix."
        )
    if found.device is None or spec.dtype not in DTYPES or spec.kv_dtype not in KV_DTYPES:
        return
    if not smallest_tile_fits(spec, found.device):
        yield (
            f"head_dim {spec.head_dim} is too large: 16 keys and values of it in {compute_type(spec, found.device)} do "
            f"not fit into the {found.device.shared_bytes >> 10} KiB of shared memory that {spec.device} gives a "
            "program; take torch_sdpa."
        )


def _about_the_rest(spec: AttentionSpec) -> Iterator[str]:
    if unknown := [field.name for field in fields(spec) if field.name not in _KNOWN_FIELDS]:
        yield f"{type(spec).__name__} has {', '.join(unknown)}, which this backend knows nothing of."


def _triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        # Some builds of torch bring it under another name, such as pytorch-triton.
        import triton

        return str(triton.__version__)


def _is_interpreted() -> bool:
    # Settled for good when the kernels are imported; before that, by the variable, as Triton itself reads it.
    if _KERNELS in sys.modules:
        return bool(sys.modules[_KERNELS].INTERPRETED.value)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _has_compiler() -> bool:
    # As triton/runtime/build.py looks for one.
    return "CC" in os.environ or any(map(shutil.which, ("clang", "gcc")))


def _device(name: str, num_gpus: int) -> Device | None:
    try:
        device = torch.device(name)
    except RuntimeError:
        return None
    if device.type == "cpu":
        return INTERPRETER
    if device.type != "cuda" or not num_gpus:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= num_gpus:
        return None
    properties = torch.cuda.get_device_properties(index)
    return Device(
        (properties.major, properties.minor),
        # What a program can have when it asks for it, as Triton does. torch's type stubs do not know it.
        getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        properties.multi_processor_count,
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, two at most. Text stands for 0."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
