"""What figures were measured on."""

import os
import platform

import psutil
import torch

import octavo
from octavo.benchmark.machine import cpu_name, describe_machine, describe_versions


def test_the_processors_name_is_the_first_that_the_system_gives(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 17\nmodel name\t: A Processor: 2 GHz\nmodel name\t: Another\n")
    assert cpu_name(cpuinfo) == "A Processor: 2 GHz"


def test_a_system_that_gives_no_name_leaves_the_architecture(tmp_path):
    assert cpu_name(tmp_path / "cpuinfo") == platform.machine()


def test_on_a_cpu_the_device_is_the_processor():
    machine = describe_machine("cpu")
    assert machine.device == machine.cpu == cpu_name()
    assert machine.num_cpus == len(os.sched_getaffinity(0))
    assert machine.num_threads == torch.get_num_threads()
    assert machine.memory_bytes == psutil.virtual_memory().total


def test_versions_are_those_that_run():
    versions = describe_versions()
    assert (versions.octavo, versions.torch, versions.python) == (
        octavo.__version__,
        torch.__version__,
        platform.python_version(),
    )
