"""Who may import whom. The table below is the diagram in docs/architecture.md; the tests read the source.

An import points down, never up, and never sideways within the row of the parts. Imports for types only are free.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "octavo"

# The highest row first. A module belongs to the longest of these names that it begins with.
ROWS: tuple[tuple[str, ...], ...] = (
    ("octavo.cli", "octavo.__main__"),
    ("octavo.server", "octavo.benchmark"),
    (
        "octavo.llm",
        "octavo.async_llm",
        "octavo.engine_thread",
        "octavo.output_processor",
        "octavo.prompts",
        "octavo.detokenizer",
        "octavo.stop_strings",
    ),
    ("octavo.rpc",),
    ("octavo.assembly", "octavo.selection"),
    (
        "octavo.plugins",
        "octavo.core",
        "octavo.models",
        "octavo.attention_backends",
        "octavo.kv_managers",
        "octavo.request_queues",
        "octavo.hash_functions",
    ),
    ("octavo.core.interfaces", "octavo.config", "octavo.errors"),
)
PARTS_ROW = 5
ROW_OF = {part: row for row, parts in enumerate(ROWS) for part in parts}
# May import whatever is below llm; only tests and plugin authors import it.
TESTING = "octavo.testing"
LOWEST_ROW_ABOVE_TESTING = ROW_OF["octavo.llm"]

# What plans steps and keeps blocks is plain Python and numpy.
WITHOUT_TORCH = (
    "octavo.core.admission",
    "octavo.core.block_pool",
    "octavo.core.chunking",
    "octavo.core.content_keys",
    "octavo.core.intake",
    "octavo.core.kv_cache_config",
    "octavo.core.kv_cache_coordinator",
    "octavo.core.kv_cache_manager",
    "octavo.core.kv_cache_plan",
    "octavo.core.outputs",
    "octavo.core.prefix_hash",
    "octavo.core.prefix_verifier",
    "octavo.core.request",
    "octavo.core.request_table",
    "octavo.core.roster",
    "octavo.core.running_pass",
    "octavo.core.sampling_params",
    "octavo.core.scheduled",
    "octavo.core.scheduler",
    "octavo.core.stats",
    "octavo.core.step_builder",
    "octavo.core.step_plan",
    "octavo.core.verdict",
    "octavo.core.waiting_line",
    "octavo.core.watchdog",
    "octavo.hash_functions",
    "octavo.kv_managers",
    "octavo.request_queues",
)
HEAVY = ("torch", "pydantic", "transformers")
# Parts of these that take options, which pydantic checks. They are imported only when they are chosen.
WITH_OPTIONS = ("octavo.request_queues.priority",)

# Reading any of these runs code that is hidden in the data.
CODE_IN_DATA = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})


@dataclass(frozen=True)
class Import:
    """One imported module, and the line that imports it."""

    target: str
    line: int


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in SOURCES.items()}


def imports_of(module: str, tree: ast.AST) -> Iterator[Import]:
    """Yield what `module` imports when it runs, inside functions too."""
    for node in nodes_that_run(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield Import(submodule if submodule in SOURCES else base, node.lineno)
        elif isinstance(node, ast.Call) and called_name(node).rpartition(".")[2] in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield Import(argument.value, node.lineno)


def nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk the tree, leaving out what is under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from nodes_that_run(other)
            continue
        yield child
        yield from nodes_that_run(child)


def absolute(module: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package


def called_name(node: ast.Call) -> str:
    return ast.unparse(node.func) if isinstance(node.func, (ast.Name, ast.Attribute)) else ""


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def part_of(module: str) -> str | None:
    """Return the entry of the table that the module belongs to, None when it has none."""
    return max((part for part in ROW_OF if is_in(module, part)), key=len, default=None)


def fault_of(module: str, target: str) -> str | None:
    """Say what is wrong with an import, None when nothing is."""
    if not is_in(target, "octavo") or target == "octavo":
        # The package itself holds the version and lazy names; it imports nothing.
        return None
    if is_in(target, TESTING):
        return None if is_in(module, TESTING) else "octavo.testing is for tests and plugin authors"
    there = part_of(target)
    if there is None:
        return f"{target} is not in the table"
    if is_in(module, TESTING):
        return None if ROW_OF[there] > LOWEST_ROW_ABOVE_TESTING else "octavo.testing imports what is below llm"
    here = part_of(module)
    if here is None:
        return f"{module} is not in the table" if module != "octavo" else "the package itself imports nothing"
    if ROW_OF[there] < ROW_OF[here]:
        return f"{there} is above {here}"
    if ROW_OF[there] == ROW_OF[here] == PARTS_ROW and there != here:
        return f"{there} and {here} are parts, and parts do not import each other"
    return None


def test_the_table_names_every_module() -> None:
    outside = [name for name in SOURCES if name != "octavo" and not is_in(name, TESTING) and part_of(name) is None]
    assert outside == []


def test_imports_point_down() -> None:
    faults = [
        f"{SOURCES[module].relative_to(ROOT)}:{found.line}: {fault}"
        for module, tree in TREES.items()
        for found in imports_of(module, tree)
        if (fault := fault_of(module, found.target))
    ]
    assert faults == [], "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "target", "is_wrong"),
    [
        ("octavo.core.scheduler", "octavo.plugins.registry", True),
        ("octavo.core.scheduler", "octavo.core.block_pool", False),
        ("octavo.core.interfaces.attention", "octavo.core.block_pool", True),
        ("octavo.kv_managers.full_attention", "octavo.core.interfaces", False),
        ("octavo.kv_managers.full_attention", "octavo.core.block_pool", True),
        ("octavo.models.llama", "octavo.attention_backends.torch_sdpa", True),
        ("octavo.assembly", "octavo.core.scheduler", False),
        ("octavo.assembly", "octavo.llm", True),
        ("octavo.selection", "octavo.plugins.part", False),
        ("octavo.selection", "octavo.llm", True),
        ("octavo.plugins.registry", "octavo.selection", True),
        ("octavo.plugins.hooks", "octavo.core.stats", True),
        ("octavo.llm", "octavo.prompts", False),
        ("octavo.llm", "octavo.cli.app", True),
        ("octavo.benchmark.measure", "octavo.engine_thread", False),
        ("octavo.llm", "octavo.benchmark.workloads", True),
        ("octavo.llm", "octavo.testing.engines", True),
        ("octavo.testing.engines", "octavo.core.scheduler", False),
        ("octavo.testing.engines", "octavo.output_processor", True),
        ("octavo.new_idea", "octavo.errors", True),
        ("octavo.llm", "octavo.new_idea", True),
    ],
)
def test_the_rule_tells_right_from_wrong(module: str, target: str, is_wrong: bool) -> None:
    assert (fault_of(module, target) is not None) == is_wrong


def test_an_import_for_types_is_free_and_its_else_branch_is_not() -> None:
    source = "if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy\ndef f():\n    import json"
    assert [found.target for found in imports_of("octavo.llm", ast.parse(source))] == ["numpy", "json"]


def test_relative_and_dynamic_imports_are_seen() -> None:
    source = "from . import plugins\nfrom .core import scheduler\nimportlib.import_module('octavo.cli')"
    targets = [found.target for found in imports_of("octavo.llm", ast.parse(source))]
    assert targets == ["octavo.plugins", "octavo.core.scheduler", "octavo.cli"]


def test_nobody_imports_an_implementation_by_name() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    implementations = {target.partition(":")[0] for group in groups.values() for target in group.values()}
    assert implementations
    faults = [
        f"{SOURCES[module].relative_to(ROOT)}:{found.line}: {found.target} is reached through its entry point"
        for module, tree in TREES.items()
        if not is_in(module, TESTING)
        for found in imports_of(module, tree)
        if found.target in implementations
    ]
    assert faults == [], "\n".join(faults)


def test_what_plans_steps_never_imports_torch() -> None:
    faults = [
        f"{SOURCES[module].relative_to(ROOT)}:{found.line}: {found.target}"
        for module, tree in TREES.items()
        if any(is_in(module, part) for part in WITHOUT_TORCH)
        for found in imports_of(module, tree)
        if found.target.partition(".")[0] in HEAVY
        if not (found.target == "pydantic" and module in WITH_OPTIONS)
    ]
    assert faults == [], "\n".join(faults)


@pytest.mark.parametrize("module", [*WITHOUT_TORCH, "octavo.kv_managers.full_attention", "octavo.core.interfaces"])
def test_importing_it_loads_neither_torch_nor_pydantic(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {set(HEAVY)!r}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def unsafe_lines(tree: ast.AST, module: str = "octavo.llm") -> Iterator[tuple[int, str]]:
    """Yield what may run code that is hidden in data, and in core what differs from process to process."""
    for found in imports_of(module, tree):
        if found.target.partition(".")[0] in CODE_IN_DATA:
            yield found.line, f"imports {found.target}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = called_name(node)
        if name in ("eval", "exec", "torch.load", "builtins.eval", "builtins.exec"):
            yield node.lineno, f"calls {name}"
        if name == "hash" and is_in(module, "octavo.core"):
            yield node.lineno, "calls hash(), whose value for text and bytes differs from process to process"
        for keyword in node.keywords:
            is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("trust_remote_code", "allow_pickle") and not is_false:
                yield node.lineno, f"passes {keyword.arg}"


def test_nothing_runs_code_that_comes_with_data() -> None:
    faults = [
        f"{SOURCES[module].relative_to(ROOT)}:{line}: {what}"
        for module, tree in TREES.items()
        for line, what in unsafe_lines(tree, module)
    ]
    assert faults == [], "\n".join(faults)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import dumps",
        "def f():\n    import marshal",
        "torch.load(path)",
        "eval(text)",
        "exec(text)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=whatever)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_search_for_unsafe_code_finds_it(source: str) -> None:
    assert list(unsafe_lines(ast.parse(source)))


def test_the_search_for_unsafe_code_lets_the_rest_pass() -> None:
    source = "model.eval()\nf(trust_remote_code=False)\nhash(x)\nimport json"
    assert not list(unsafe_lines(ast.parse(source)))
    assert list(unsafe_lines(ast.parse("hash(x)"), "octavo.core.prefix_hash"))
