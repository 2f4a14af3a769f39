"""The list of faults in scripts/mutants follows the code. Whether they are caught, that script says itself."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MUTANTS = runpy.run_path(str(ROOT / "scripts" / "mutants"))["MUTANTS"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_line_of_each_fault_exists_once_and_its_tests_are_there(mutant):
    assert (ROOT / "octavo" / mutant.path).read_text().count(mutant.before) == 1
    assert mutant.after != mutant.before
    assert (ROOT / mutant.tests).exists()


def test_no_two_faults_have_one_name():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
