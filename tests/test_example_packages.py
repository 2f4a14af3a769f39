"""The example packages, installed as a user would: found, chosen by name in every way there is, and really run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PACKAGES = ("octavo-eager", "octavo-sink-window")

PROMPT = "The capital of France is"


@pytest.fixture(scope="session")
def python_with_examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh virtual environment in which pip has installed the example packages.

    Everything else comes from the environment of the tests: installing torch anew would take minutes.
    """
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    site_packages = Path(run_python(python, "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    outer = sysconfig.get_path("purelib")
    # addsitedir, for it follows the .pth files there, which is how an editable Octavo is found.
    (site_packages / "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    # Copies, since building a package leaves traces in its folder.
    sources = [shutil.copytree(EXAMPLES / name, folder / name) for name in PACKAGES]
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"], sources)
    return python


def run(command: Sequence[str], sources: Sequence[Path]) -> None:
    subprocess.run([*command, "--no-build-isolation", *map(str, sources)], check=True, timeout=120)


def run_python(python: Path, code: str, *, cwd: Path | None = None) -> str:
    """Run code and return what it printed, standard error included."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "TRITON_"))}
    result = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=False, timeout=250, cwd=cwd, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def run_command(python: Path, *arguments: str) -> str:
    """Run the `octavo` command, then print how often the eager backend was called."""
    return run_python(
        python,
        f"from octavo.cli.app import run\nassert run({list(arguments)!r}) == 0\n"
        "import octavo_eager; print('CALLS', octavo_eager.calls['attend'])",
    )


def calls_in(printed: str) -> int:
    return int(printed.rpartition("CALLS ")[2].split()[0])


# -- octavo-eager -----------------------------------------------------------------------------------------------


def test_an_installed_package_is_listed_and_its_parts_are_sound(python_with_examples):
    listed = json.loads(
        run_python(
            python_with_examples,
            "from octavo.cli.app import run; raise SystemExit(run(['plugins', '--check', '--json']))",
        )
    )
    assert {(plugin["family"], plugin["name"]) for plugin in listed if plugin["package"] in PACKAGES} == {
        ("attention_backends", "eager"),
        ("kv_managers", "sink_window"),
        ("models", "sink_window"),
    }
    assert all(plugin["fault"] is None for plugin in listed)


def test_installing_it_changes_nothing_until_it_is_named(python_with_examples, tiny_folder):
    printed = run_command(
        python_with_examples, "--verbose", "generate", "--model", str(tiny_folder), "--max-tokens", "2", PROMPT
    )
    assert calls_in(printed) == 0
    assert "not eager (octavo-eager 0.1.0): 'auto' takes only Octavo's own." in printed


def test_a_program_chooses_it_and_gets_the_same_tokens(python_with_examples, tiny_folder):
    printed = run_python(
        python_with_examples,
        f"""
from octavo import LLM, SamplingParams
params = SamplingParams(max_tokens=12, temperature=0)
prompts = [{PROMPT!r}, "A much longer prompt, " * 6, "x"]
answers = {{}}
for backend in ("torch_sdpa", "eager"):
    with LLM({str(tiny_folder)!r}, attention_backend=backend, num_kv_blocks=60, max_num_batched_tokens=16) as llm:
        answers[backend] = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        print(llm.selection)
        steps = llm.stats().steps
assert answers["eager"] == answers["torch_sdpa"], answers
import octavo_eager
# One call for each of the two layers in each step.
assert octavo_eager.calls["attend"] == 2 * steps > 0, (octavo_eager.calls, steps)
""",
    )
    assert "attention backend of full_attention (layers 0-1): eager (octavo-eager 0.1.0), by argument" in printed


def test_a_flag_chooses_it(python_with_examples, tiny_folder):
    arguments = ("--model", str(tiny_folder), "--max-tokens", "2", PROMPT)
    printed = run_command(
        python_with_examples, "--verbose", "generate", "--attention-backend", "octavo-eager:eager", *arguments
    )
    assert calls_in(printed) == 4
    assert "(layers 0-1): eager (octavo-eager 0.1.0), by flag --attention-backend" in printed


def test_a_config_file_chooses_it(python_with_examples, tiny_folder, tmp_path):
    settings = tmp_path / "settings.toml"
    settings.write_text(f'model = "{tiny_folder}"\nattention_backend = "eager"\n')
    printed = run_command(
        python_with_examples, "--verbose", "generate", "--config", str(settings), "--max-tokens", "2", PROMPT
    )
    assert calls_in(printed) == 4
    assert f"(layers 0-1): eager (octavo-eager 0.1.0), by {settings}" in printed


def test_it_says_what_it_cannot_serve_and_who_could(python_with_examples, tmp_path):
    from octavo.testing import tiny_models

    windowed = tiny_models.tiny_mistral(tmp_path / "windowed")
    printed = run_command(python_with_examples, "backends", str(windowed))
    assert "  torch_sdpa (octavo 0.1.0) serves\n" in printed
    assert "  eager (octavo-eager 0.1.0) cannot serve: eager does not compute window=16.\n" in printed
    refused = run_python(
        python_with_examples,
        f"from octavo.cli.app import run; assert run(['generate', '--model', {str(windowed)!r}, '--attention-backend', "
        "'eager', 'x']) == 2",
    )
    assert refused == (
        "octavo: The attention backend eager (octavo_eager:EagerBackend, from octavo-eager 0.1.0) cannot serve this "
        "model here: eager does not compute window=16. Installed ones that could: torch_sdpa.\n"
    )


def test_it_is_thirty_lines_of_code_at_most():
    lines = (EXAMPLES / "octavo-eager" / "octavo_eager.py").read_text().splitlines()
    left_out = ("#", '"""', "import", "from", "calls")
    body = [line for line in lines if line.strip() and not line.lstrip().startswith(left_out)]
    assert len(body) <= 30


# -- their own tests --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_its_own_tests_pass(python_with_examples, package):
    folder = python_with_examples.parents[2] / package
    code = f"import pytest; raise SystemExit(pytest.main(['-q', '-W', 'error', {str(folder)!r}]))"
    printed = run_python(python_with_examples, code, cwd=folder)
    assert " passed" in printed
    assert " failed" not in printed
