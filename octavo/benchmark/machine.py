"""What figures were measured on: without it a figure means nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """The processor, and how much of it was used.

    Attributes:
        cpu: The processor's name, as the system gives it.
        num_cpus: Processors that this process may run on.
        num_threads: Threads that torch computes with.
        device: The name of the device that the model ran on; for a CPU the processor's.
        memory_bytes: All memory of the machine.
    """

    cpu: str
    num_cpus: int
    num_threads: int
    device: str
    memory_bytes: int


@dataclass(frozen=True)
class Versions:
    """What ran."""

    octavo: str
    torch: str
    python: str


def describe_machine(device: str) -> Machine:
    """Describe this machine; `device` is the model's, as torch names it."""
    import psutil
    import torch

    cpu = cpu_name()
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu
    return Machine(cpu, num_usable_cpus(), torch.get_num_threads(), name, int(psutil.virtual_memory().total))


def describe_versions() -> Versions:
    """Return the versions that figures depend on."""
    import torch

    from octavo import __version__

    return Versions(__version__, str(torch.__version__), platform.python_version())


def num_usable_cpus() -> int:
    """Return how many processors this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name; where the system does not say, its architecture."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, name = line.partition(":")
        if key.strip() == "model name":
            return name.strip()
    return platform.machine() or "unknown"
