"""Parts for the length of a test, as if a package that registers them had been installed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from octavo.plugins.registry import scan


@contextmanager
def installed(
    parts: Mapping[str, Mapping[str, Any]], *, package: str = "on-trial", version: str = "0.0.0"
) -> Iterator[None]:
    """Register parts under a package of their own while the block runs.

    They are found as all parts are: through the metadata of an installed package, which is written to a temporary
    folder on `sys.path`. Engines that were made in the block keep what they use. Not for several threads at once.

    Args:
        parts: Classes, or an observer's module, by entry-point group and name:
            {"octavo.request_queues": {"shortest": ShortestFirst}}
        package: What the package is called, as in "package:name".
        version: Its version.
    """
    module = ModuleType(f"octavo_testing_{package.replace('-', '_').replace('.', '_')}")
    if module.__name__ in sys.modules:
        raise ValueError(f"A package called {package!r} is on trial already; give this one another name.")
    lines = []
    for group, members in parts.items():
        lines.append(f"[{group}]")
        for name, part in members.items():
            # Its own name where it has one, so that messages say something to its author.
            attribute = getattr(part, "__name__", name).rpartition(".")[2]
            attribute += "_" * sum(taken.startswith(attribute) for taken in vars(module))
            setattr(module, attribute, part)
            lines.append(f"{name} = {module.__name__}:{attribute}")
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n", encoding="utf-8"
        )
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        sys.modules[module.__name__] = module
        sys.path.append(folder)
        scan.cache_clear()
        try:
            yield
        finally:
            del sys.modules[module.__name__]
            sys.path.remove(folder)
            scan.cache_clear()
