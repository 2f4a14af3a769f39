"""Packages made up on the spot, laid out as an installer would lay them out."""

import importlib
from pathlib import Path

from octavo.plugins.registry import Registry, scan

# What an author writes at least.
QUEUE = """
from octavo.request_queues import FCFSQueue

class Queue(FCFSQueue):
    contract_version = 1
"""

BACKEND = """
from octavo.attention_backends.torch_sdpa import TorchSDPABackend

class Backend(TorchSDPABackend):
    contract_version = 1
"""


def install(site: Path, package: str, entry_points: str, *, version: str = "1.0", **modules: str) -> Path:
    """Put a package into a folder on sys.path; return where its metadata is.

    Args:
        entry_points: The content of its entry_points.txt.
        modules: Sources, by module name; "pkg__a" stands for the module pkg.a, and "pkg____init__" for the package.
    """
    info = site / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    for name, source in modules.items():
        path = site / f"{name.replace('__', '/', 1)}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    importlib.invalidate_caches()
    return info


def install_queue(site: Path, source: str = QUEUE, name: str = "theirs") -> None:
    """Install their-package, whose module `their_module` holds a request queue."""
    install(site, "their-package", f"[octavo.request_queues]\n{name} = their_module:Queue\n", their_module=source)


def fresh_scan() -> Registry:
    """Look through what is installed now, as a new process would."""
    return scan.__wrapped__()
