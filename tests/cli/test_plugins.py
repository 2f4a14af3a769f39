"""`octavo plugins`: what is installed, and what is wrong with it."""

import json
import subprocess
import sys

import pytest
from fake_packages import BACKEND, QUEUE, install

import octavo
from octavo.cli.app import run
from octavo.core.interfaces import CONTRACT_VERSION
from octavo.plugins.families import FAMILIES
from octavo.plugins.registry import scan

WATCH = "import octavo\ncontract_version = 1\n@octavo.hookimpl\ndef {}(): ...\n"


def table(capsys, *flags, status=0):
    """Return the printed lines of what is not Octavo's own, with single spaces."""
    assert run(["plugins", *flags]) == status
    lines = capsys.readouterr().out.splitlines()
    return [" ".join(line.split()) for line in lines if f" octavo {octavo.__version__} " not in " ".join(line.split())]


def rows(capsys, *flags, status=0):
    """Return the objects of what is not Octavo's own."""
    assert run(["plugins", "--json", *flags]) == status
    return [row for row in json.loads(capsys.readouterr().out) if not row["is_built_in"]]


# -- the list ---------------------------------------------------------------------------------------------------


def test_the_list_has_each_part_of_octavos_own_with_its_family_package_version_and_target(capsys):
    assert run(["plugins"]) == 0
    head, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["FAMILY", "NAME", "PACKAGE", "VERSION", "TARGET"]
    own = [plugin for family in FAMILIES for plugin in scan().plugins(family) if plugin.is_built_in]
    assert [line for line in lines if line[2] == "octavo"] == [
        [plugin.family.name, plugin.name, "octavo", octavo.__version__, plugin.target] for plugin in own
    ]


def test_what_others_installed_is_listed_by_family_and_not_imported(site, capsys):
    broken = "raise RuntimeError('imported')"
    entries = "[octavo.request_queues]\nshortest = their_module:Queue\n[octavo.hooks]\nmetrics = their_module\n"
    install(site, "their-package", entries, version="2.5", their_module=broken)
    assert table(capsys) == [
        "FAMILY NAME PACKAGE VERSION TARGET",
        "request_queues shortest their-package 2.5 their_module:Queue",
        "hooks metrics their-package 2.5 their_module",
    ]
    assert "their_module" not in sys.modules


def test_the_columns_are_as_wide_as_their_longest_entry(site, capsys):
    entries = "[octavo.request_queues]\na_queue_with_a_long_name = their_module:Queue\n"
    install(site, "their-package", entries)
    assert run(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    packages = [line.split()[2] for line in lines]
    assert len({line.index(f" {package} ") for line, package in zip(lines, packages, strict=True)}) == 1
    assert any("  a_queue_with_a_long_name  their-package  " in line for line in lines)


def test_a_program_gets_every_field(site, capsys):
    install(site, "their-package", "[octavo.hooks]\nmetrics = their_module\n", version="2.5")
    assert rows(capsys) == [
        {
            "family": "hooks",
            "name": "metrics",
            "package": "their-package",
            "version": "2.5",
            "target": "their_module",
            "location": str(site),
            "is_built_in": False,
        }
    ]


def test_a_list_takes_nothing_heavy(site):
    install(site, "their-package", "[octavo.request_queues]\nmine = their_module:Queue\n", their_module=QUEUE)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "class Nothing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'numpy', 'transformers', 'their_module'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}')\n"
        "sys.meta_path.insert(0, Nothing())\n"
        "sys.argv = ['octavo', 'plugins']\n"
        "from octavo.cli.main import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert "their_module:Queue" in result.stdout
    assert result.returncode == 0


# -- the check --------------------------------------------------------------------------------------------------


def faults(capsys, status=1):
    return {row["name"]: row["fault"] for row in rows(capsys, "--check", status=status)}


def test_parts_without_a_fault_are_said_to_be_well(site, capsys):
    options = (
        "\n    class Options(BaseModel):\n        k: int\n    def __init__(self, *, options): super().__init__()\n"
    )
    install(
        site,
        "their-package",
        "[octavo.request_queues]\nmine = good_module:Queue\nchoosy = choosy_module:Queue\n"
        "[octavo.hooks]\nmetrics = watch_module\n",
        good_module=QUEUE,
        choosy_module=f"from pydantic import BaseModel\n{QUEUE}{options}",
        watch_module=WATCH.format("engine_started"),
    )
    assert faults(capsys, status=0) == {"mine": None, "choosy": None, "metrics": None}
    lines = table(capsys, "--check")
    assert lines == [
        "FAMILY NAME PACKAGE VERSION TARGET",
        "ok request_queues choosy their-package 1.0 choosy_module:Queue",
        "ok request_queues mine their-package 1.0 good_module:Queue",
        "ok hooks metrics their-package 1.0 watch_module",
    ]


def test_octavos_own_parts_are_well(capsys):
    assert run(["plugins", "--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[1:]} == {"ok"}


FAULTS = {
    "broken": (
        "raise OSError('no driver')",
        "The request queue broken (broken_module:Queue, from broken-package 1.0) cannot be imported: OSError: no "
        "driver",
    ),
    "old": (
        QUEUE.replace("= 1", "= 99"),
        "The request queue old (old_module:Queue, from old-package 1.0) was built for contract version 99, and this "
        f"Octavo has version {CONTRACT_VERSION}; install an Octavo that has it.",
    ),
    "odd": (
        "class Queue: ...",
        "The request queue odd (odd_module:Queue, from odd-package 1.0) is not a subclass of "
        "octavo.core.interfaces.request_queue.RequestQueue, which it must be.",
    ),
    "dicty": (
        f"{QUEUE}\n    Options = dict\n",
        "The request queue dicty (dicty_module:Queue, from dicty-package 1.0) has Options that are not a pydantic "
        "model.",
    ),
    "module": (
        "Queue = __import__('json')",
        "The request queue module (module_module:Queue, from module-package 1.0) is of type module, and must be a "
        "subclass of octavo.core.interfaces.request_queue.RequestQueue; its entry point must name the class: "
        "module:Class.",
    ),
    "wordy": (
        QUEUE.replace("= 1", "= '1'"),
        "The request queue wordy (wordy_module:Queue, from wordy-package 1.0) says contract_version = '1', of type "
        "str; it must be a whole number, such as 1.",
    ),
    "closed": (
        f"from pydantic import BaseModel\n{QUEUE}\n    class Options(BaseModel): pass\n",
        "The request queue closed (closed_module:Queue, from closed-package 1.0) inherits __init__(), which cannot be "
        "called as __init__(options=...): got an unexpected keyword argument 'options'.",
    ),
    "needy": (
        f"{QUEUE}\n    def __init__(self, size): super().__init__()\n",
        "The request queue needy (needy_module:Queue, from needy-package 1.0) defines __init__(size), which cannot be "
        "called as __init__(): missing a required argument: 'size'.",
    ),
    "fcfs": (
        QUEUE,
        "The request queue fcfs (fcfs_module:Queue, from fcfs-package 1.0) uses a name that is reserved for Octavo's "
        "own. It is reached as 'fcfs-package:fcfs' alone; its authors should choose another name.",
    ),
}


def test_each_fault_is_said_in_full_and_the_status_is_1(site, capsys):
    for name, (source, _) in FAULTS.items():
        entries = f"[octavo.request_queues]\n{name} = {name}_module:Queue\n"
        install(site, f"{name}-package", entries, **{f"{name}_module": source})
    expected = {name: sentence for name, (_, sentence) in FAULTS.items()}
    assert faults(capsys) == expected
    lines = table(capsys, "--check", status=1)
    for name, sentence in expected.items():
        place = lines.index(f"FAULT request_queues {name} {name}-package 1.0 {name}_module:Queue")
        assert lines[place + 1] == sentence


def test_an_observer_is_checked_as_an_engine_would(site, capsys):
    sources = {
        "misspelt": WATCH.format("request_aded"),
        "raising": (
            "import octavo\nfrom octavo.errors import ConfigError\n"
            "class Watch:\n    contract_version = 1\n    def __init__(self): raise ConfigError('No port is free.')\n"
        ),
    }
    for name, source in sources.items():
        target = f"{name}_module:Watch" if "class Watch" in source else f"{name}_module"
        install(site, f"{name}-package", f"[octavo.hooks]\n{name} = {target}\n", **{f"{name}_module": source})
    assert faults(capsys) == {
        "misspelt": (
            "The observer misspelt (misspelt_module, from misspelt-package 1.0) implements a hook called "
            "'request_aded', which Octavo does not have. Did you mean 'request_added'? Hooks: engine_started, "
            "request_added, step_finished, request_finished, register_routes."
        ),
        "raising": "No port is free.",
    }


def test_two_packages_of_one_name_are_both_at_fault(site, capsys):
    for package in ("one", "two"):
        entries = f"[octavo.attention_backends]\nmine = {package}_module:Backend\n"
        install(site, package, entries, **{f"{package}_module": BACKEND})
    assert [row["fault"] for row in rows(capsys, "--check", status=1)] == [
        "The attention backend mine (one_module:Backend, from one 1.0) shares its name with mine (two_module:Backend, "
        "from two 1.0). It is reached as 'one:mine' alone.",
        "The attention backend mine (two_module:Backend, from two 1.0) shares its name with mine (one_module:Backend, "
        "from one 1.0). It is reached as 'two:mine' alone.",
    ]


def test_a_name_with_a_colon_is_a_fault(site, capsys):
    install(site, "their-package", "[octavo.request_queues]\nmy:queue = their_module:Queue\n", their_module=QUEUE)
    assert faults(capsys) == {
        "my:queue": (
            "The request queue my:queue (their_module:Queue, from their-package 1.0) uses a name that not every "
            "setting can carry: 'auto' lets Octavo choose, a colon stands behind a package's name, and commas, spaces "
            "and brackets are a flag's own. Its authors must choose another name, of letters, digits, '_', '-' and '.'."
        )
    }


def test_what_is_registered_under_a_group_that_is_none_is_a_fault_without_a_family(site, capsys):
    entries = "[octavo.hook]\nmetrics = good_module\n[octavo.request_queues]\nmine = good_module:Queue\n"
    install(site, "their-package", entries, version="2.5", good_module=QUEUE)
    sentence = (
        "their-package 2.5 registers 'metrics' under 'octavo.hook', which is no group of this Octavo's, so it is never "
        "found. Did its authors mean 'octavo.hooks'?"
    )
    assert table(capsys, "--check", status=1) == [
        "FAMILY NAME PACKAGE VERSION TARGET",
        "ok request_queues mine their-package 2.5 good_module:Queue",
        f"FAULT {sentence}",
    ]
    assert [row for row in rows(capsys, "--check", status=1) if row["fault"]] == [
        {
            "family": None,
            "name": "metrics",
            "package": "their-package",
            "version": "2.5",
            "target": None,
            "location": None,
            "is_built_in": False,
            "fault": sentence,
        }
    ]


def test_without_a_check_nothing_is_said_of_groups_that_are_none(site, capsys, caplog):
    install(site, "their-package", "[octavo.hook]\nmetrics = their_module\n")
    with caplog.at_level("DEBUG"):
        assert table(capsys) == ["FAMILY NAME PACKAGE VERSION TARGET"]
        assert rows(capsys) == []
    assert caplog.records == []


# -- one package ------------------------------------------------------------------------------------------------


def test_one_package_is_listed_and_checked_alone(site, capsys):
    install(site, "my-parts", "[octavo.request_queues]\nmine = my_module:Queue\n", my_module=QUEUE)
    install(
        site, "broken-parts", "[octavo.request_queues]\nbroken = broken_module:Queue\n", broken_module="raise OSError"
    )
    install(site, "lost-parts", "[octavo.request_queue]\nlost = lost_module:Queue\n")
    scan.cache_clear()
    assert table(capsys, "--check", "My_Parts")[1:] == ["ok request_queues mine my-parts 1.0 my_module:Queue"]
    assert [row["name"] for row in rows(capsys, "my-parts")] == ["mine"]
    assert [row["name"] for row in rows(capsys, "--check", "broken-parts", status=1)] == ["broken"]
    assert [row["family"] for row in rows(capsys, "--check", "lost-parts", status=1)] == [None]


def test_a_package_that_registers_nothing_is_named(site, capsys):
    assert run(["plugins", "nothing"]) == 2
    assert capsys.readouterr().err == (
        "octavo: No package called 'nothing' is installed that registers a part of Octavo's.\n"
    )


# -- packages that misbehave ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (f"print('hello')\n{QUEUE}", None),
        ("raise GeneratorExit", "GeneratorExit"),
        ("import asyncio\nraise asyncio.CancelledError", "CancelledError"),
        (
            "class Odd(BaseException):\n    def __str__(self): raise ValueError\nraise Odd",
            "Odd: (its message cannot be made)",
        ),
        ("import sys\nsys.exit('no gpu')", "SystemExit: no gpu"),
    ],
)
def test_the_list_is_whole_and_its_json_is_json_whatever_a_package_does_when_it_is_imported(
    site, capsys, source, cause
):
    install(site, "their-package", "[octavo.request_queues]\ntheirs = their_module:Queue\n", their_module=source)
    scan.cache_clear()
    assert run(["plugins", "--check", "--json"]) == (0 if cause is None else 1)
    found = {row["name"]: row["fault"] for row in json.loads(capsys.readouterr().out)}
    assert {"fcfs", "torch_sdpa", "theirs"} <= found.keys()
    if cause is None:
        assert found["theirs"] is None
    else:
        assert found["theirs"] == (
            f"The request queue theirs (their_module:Queue, from their-package 1.0) cannot be imported: {cause}"
        )
