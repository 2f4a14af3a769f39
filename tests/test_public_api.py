"""The names that scripts rely on, and what it costs to import them."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

import octavo
import octavo.core

PACKAGE = Path(octavo.__file__).parent
# Of processor time, on a machine that may be slow: importing torch alone takes several times as much.
MOST_SECONDS = 0.5

PUBLIC_NAMES = (
    "LLM",
    "SamplingParams",
    "EngineConfig",
    "CacheConfig",
    "SchedulerConfig",
    "PluginChoice",
    "RequestOutput",
    "CompletionOutput",
    "TokenLogprobs",
)
CORE_NAMES = ("EngineCore", "Scheduler", "KVCacheManager", "BlockPool", "KVCacheCoordinator")
CONTRACTS = (
    "AttentionBackend",
    "SingleTypeKVCacheManager",
    "RequestQueue",
    "HashFunction",
    "Model",
    "KVCacheSpec",
    "CONTRACT_VERSION",
)


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_octavo_has_the_name(name: str) -> None:
    assert name in octavo.__all__
    assert name in dir(octavo)
    assert inspect.isclass(getattr(octavo, name))


def test_what_marks_an_observers_functions_is_a_name_too() -> None:
    assert "hookimpl" in octavo.__all__
    assert octavo.hookimpl is importlib.import_module("octavo.plugins.hookspecs").hookimpl


@pytest.mark.parametrize("name", CORE_NAMES)
def test_core_has_the_name(name: str) -> None:
    assert name in octavo.core.__all__
    assert inspect.isclass(getattr(octavo.core, name))


@pytest.mark.parametrize("name", CONTRACTS)
def test_the_contracts_are_in_one_place(name: str) -> None:
    interfaces = importlib.import_module("octavo.core.interfaces")
    assert name in interfaces.__all__
    assert hasattr(interfaces, name)


@pytest.mark.parametrize("module", [octavo, octavo.core])
def test_a_name_that_does_not_exist_is_an_attribute_error(module: object) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LMM'"):
        module.LMM  # type: ignore[attr-defined]  # noqa: B018


def test_the_version_is_the_packages() -> None:
    assert octavo.__version__ == importlib.metadata.version("octavo")


def test_what_the_commands_install_is_pinned() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["demo"], *extras["test"], *extras["docs"], *extras["xxhash"]]
    names = {re.split(r"[\[<>=~ ]", requirement)[0] for requirement in wanted}
    constraints = (PACKAGE.parent / "constraints.txt").read_text()
    pinned = set(re.findall(r"^([\w.-]+)==[\w.]+$", constraints, re.MULTILINE))
    assert sorted(names - pinned) == []


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize(
    ("method", "positional", "keyword_only"),
    [
        ("generate", ["prompts", "sampling_params"], {"use_tqdm": True}),
        ("chat", ["messages", "sampling_params"], {"use_tqdm": True}),
        ("stream", ["prompt", "sampling_params"], {}),
        ("reset_prefix_cache", [], {"reset_running_requests": False}),
        ("stats", [], {}),
        ("shutdown", [], {}),
    ],
)
def test_llm_takes_what_scripts_pass(method: str, positional: list[str], keyword_only: dict[str, object]) -> None:
    parameters = list(inspect.signature(getattr(octavo.LLM, method)).parameters.values())[1:]
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == keyword_only
    if "sampling_params" in positional:
        assert inspect.signature(getattr(octavo.LLM, method)).parameters["sampling_params"].default is None


def test_an_llm_needs_no_argument_and_is_a_context_manager() -> None:
    parameters = inspect.signature(octavo.LLM).parameters
    assert parameters["model"].default is None
    assert hasattr(octavo.LLM, "__enter__")
    assert hasattr(octavo.LLM, "__exit__")


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("dtype", "auto"),
        ("max_model_len", "auto"),
        ("block_size", 16),
        ("num_kv_blocks", None),
        ("kv_cache_memory_bytes", None),
        ("gpu_memory_utilization", 0.9),
        ("max_num_seqs", 64),
        ("max_num_batched_tokens", 2048),
        ("enable_prefix_caching", True),
        ("enable_chunked_prefill", True),
        ("attention_backend", octavo.PluginChoice("auto")),
        ("attention_backends", {}),
        ("model_impl", octavo.PluginChoice("auto")),
        ("request_queue", octavo.PluginChoice("fcfs")),
        ("hash_function", octavo.PluginChoice("sha256")),
        ("hooks", ()),
        ("kv_cache_dtype", "auto"),
        ("seed", 0),
    ],
)
def test_a_setting_has_its_name_and_default(name: str, default: object) -> None:
    config = octavo.EngineConfig()
    section = importlib.import_module("octavo.config").field_sections()[name]
    assert getattr(getattr(config, section) if section else config, name) == default


@pytest.mark.parametrize(
    "name",
    [
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
        *("ignore_eos", "logprobs", "skip_reading_prefix_cache", "include_stop_str_in_output", "skip_special_tokens"),
        "detokenize",
    ],
)
def test_a_sampling_parameter_has_its_name(name: str) -> None:
    assert name in inspect.signature(octavo.SamplingParams).parameters


def test_every_public_module_class_and_function_has_a_docstring() -> None:
    assert [name for path in sorted(PACKAGE.rglob("*.py")) for name in without_docstring(path)] == []


def test_every_public_method_of_llm_has_a_docstring() -> None:
    methods = inspect.getmembers(octavo.LLM, inspect.isfunction)
    assert [name for name, method in methods if not name.startswith("_") and not method.__doc__] == []


def without_docstring(path: Path) -> list[str]:
    """Return what a module defines at its top, is public, and has no docstring."""
    tree = ast.parse(path.read_text())
    shown = path.relative_to(PACKAGE.parent)
    missing = [] if ast.get_docstring(tree) else [str(shown)]
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            is_public = not node.name.startswith("_")
            if is_public and not ast.get_docstring(node):
                missing.append(f"{shown}:{node.lineno}: {node.name}")
    return missing


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import octavo"],
        ["-c", "import sys; from octavo.cli.main import main; sys.argv = ['octavo', '--version']; main()"],
        ["-c", "import octavo.core.scheduler, octavo.core.kv_cache_manager, octavo.kv_managers.full_attention"],
        ["-m", "octavo", "plugins"],
    ],
    ids=["import octavo", "octavo --version", "the core without its runner", "octavo plugins"],
)
def test_it_starts_at_once(arguments: list[str]) -> None:
    assert min(processor_seconds(arguments) for _ in range(3)) < MOST_SECONDS


@pytest.mark.parametrize("code", ["import octavo; dir(octavo)", "import octavo.core; octavo.core.Scheduler"])
def test_importing_it_imports_no_torch(code: str) -> None:
    check = f"{code}; import sys; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_the_version_flag_imports_next_to_nothing() -> None:
    code = (
        "import sys; from octavo.cli.main import main; sys.argv = ['octavo', '--version']; main(); "
        "print([name for name in ('torch', 'typer', 'pydantic', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == f"octavo {octavo.__version__}\n[]\n"


def processor_seconds(arguments: Sequence[str]) -> float:
    """Return the processor time that a Python command takes: others that compete for the machine do not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
