"""What plugins cost those who use none. The figures are in benchmarks/plugin_discovery.py; the limits here are wide."""

import importlib
import sys
from time import process_time

from fake_packages import fresh_scan, install

from octavo.plugins.families import REQUEST_QUEUES

# Of processor time, on a machine that may be slow. The benchmark's target for the same is 0.03.
MOST_SECONDS = 0.3


def test_a_scan_of_many_packages_is_quick_and_imports_none(site, monkeypatch):
    for number in range(150):
        group = "octavo.request_queues" if number < 10 else "console_scripts"
        install(site, f"package-{number}", f"[{group}]\nname_{number} = no_such_module_{number}:Queue\n")
    monkeypatch.setattr(sys, "path", [str(site), *(entry for entry in sys.path if "-packages" not in entry)])
    importlib.invalidate_caches()
    before = process_time()
    registry = fresh_scan()
    seconds = process_time() - before
    found = [plugin for plugin in registry.plugins(REQUEST_QUEUES) if plugin.package.startswith("package-")]
    assert len(found) == 10
    assert seconds < MOST_SECONDS
