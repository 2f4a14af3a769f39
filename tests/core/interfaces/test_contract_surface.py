"""The contracts stay as they are within one version, so that a package built for it goes on working."""

import difflib

import pytest
from contract_surface import FOLDER, surface, surface_file

from octavo.core import interfaces
from octavo.core.interfaces import AttentionSpec, RequestQueue
from octavo.plugins import hookspecs

COMMAND = "python tests/core/interfaces/contract_surface.py"


def test_the_contracts_are_those_of_their_version():
    file = surface_file()
    kept = file.read_text().splitlines() if file.exists() else []
    diff = "\n".join(difflib.unified_diff(kept, surface().splitlines(), file.name, "the code", n=1, lineterm=""))
    assert not diff, (
        "A package that was built for these contracts would not find what it was built for: raise CONTRACT_VERSION and "
        f"write contract_v<N>.txt with: {COMMAND}\n{diff}"
    )


def test_the_contracts_of_every_earlier_version_are_kept():
    kept = {path.name for path in FOLDER.glob("contract_v*.txt")}
    assert kept == {f"contract_v{version}.txt" for version in range(1, interfaces.CONTRACT_VERSION + 1)}


def added_lines(before):
    return [line[2:].strip() for line in difflib.ndiff(before.splitlines(), surface().splitlines()) if line[0] == "+"]


def test_a_change_of_a_signature_shows(monkeypatch):
    before = surface()

    def add_request(self, request: str, front: bool = False) -> None: ...

    monkeypatch.setattr(RequestQueue, "add_request", add_request)
    assert added_lines(before) == ["abstract def add_request(self, request: str, front: bool = False) -> None"]


def test_a_new_hook_shows(monkeypatch):
    before = surface()

    @hookspecs.hookspec
    def request_paused(request: str) -> None: ...

    monkeypatch.setattr(hookspecs, "request_paused", request_paused, raising=False)
    assert added_lines(before) == ["def request_paused(request: str) -> None"]


@pytest.mark.parametrize("name", ["__post_init__", "_private"])
def test_what_is_private_is_no_part_of_a_contract(monkeypatch, name):
    before = surface()
    monkeypatch.setattr(AttentionSpec, name, lambda self: None, raising=False)
    assert surface() == before


def test_every_contract_is_there():
    for name in interfaces.__all__:
        assert f" {name}" in surface() or f"{name} = " in surface()
