"""What has to be installed for which part, and how a checkout that is not installed is used all the same."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BACKENDS_GROUP = "octavo.attention_backends"

_CONTRACTS = ("torch", "numpy", "pydantic", "importlib_metadata", "pluggy")
# The packages that Python imports, by part.
PACKAGES: dict[str, tuple[str, ...]] = {
    "environment": ("torch",),
    "limits": ("torch",),
    "suite": (*_CONTRACTS, "pytest"),
    # And transformers, for a tiny model, where the packaged one is not installed.
    "engine": (*_CONTRACTS, "tokenizers", "safetensors", "gguf", "psutil"),
    "decode": _CONTRACTS,
    "prefill": _CONTRACTS,
    "tune": _CONTRACTS,
    "compile": (*_CONTRACTS, "triton"),
}


def missing(part: str) -> list[str]:
    """Return the packages that a part needs and that are not installed."""
    return [name for name in PACKAGES[part] if importlib.util.find_spec(name) is None]


def backend_names() -> list[str]:
    """Return the attention backends of this checkout, then those of other installed packages. None is imported."""
    own = project_table()["entry-points"][BACKENDS_GROUP]
    installed = sorted(entry.name for entry in importlib.metadata.entry_points(group=BACKENDS_GROUP))
    return list(dict.fromkeys([*own, *installed]))


def project_table() -> dict[str, Any]:
    """Return [project] of the checkout's pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def register_checkout(folder: Path) -> Path:
    """Write what an installation of this checkout would register into `folder`, and return that.

    Found before anything that is installed, so that the parts are those of the checkout, whether or not it is installed
    and however long ago.
    """
    project = project_table()
    info = folder / f"octavo-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""])
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    return folder


def environment_with(folders: Sequence[Path], variables: dict[str, str]) -> dict[str, str]:
    """Return this process's environment with some folders first on Python's path."""
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([*map(str, folders), *before])}
