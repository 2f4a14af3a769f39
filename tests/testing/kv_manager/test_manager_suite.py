"""The suite for KV-cache managers passes what is right, and says what is wrong with the rest."""

import random
import re
import subprocess
import sys

import pytest
from fake_managers import ChunkManager, ChunkSpec, WindowManager, WindowSpec
from mutant_managers import BROKEN_SPECS, MUTANTS
from pydantic import BaseModel

from octavo.errors import PluginNotFound
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.testing import KVCacheManagerSuite
from octavo.testing.conformance import RuleBroken, SuiteMisusedError
from octavo.testing.kv_manager import suite as manager_suite
from octavo.testing.kv_manager.questions import PREFIX_IS_LONGEST, SPECS_ARE_VALUES
from octavo.testing.kv_manager.suite import TRACE_LENGTH

WINDOWS = (WindowSpec(4, 10), WindowSpec(1, 3))


class TestWindow(KVCacheManagerSuite):
    manager = WindowManager
    specs = (*WINDOWS, WindowSpec(4, 8), WindowSpec(2, 5), WindowSpec(3, 1), WindowSpec(16, 40))

    def reads(self, spec, query_position, key_position):
        return key_position > query_position - spec.window


class TestChunk(KVCacheManagerSuite):
    manager = ChunkManager
    specs = (ChunkSpec(4, 8), ChunkSpec(4, 4), ChunkSpec(1, 3), ChunkSpec(2, 10))

    def reads(self, spec, query_position, key_position):
        return key_position >= query_position - query_position % spec.chunk


class DemandingWindowManager(WindowManager):
    """A window of one token reads nothing that is cached; a hit takes a cached block all the same."""

    def longest_prefix(self, is_cached, max_blocks, alignment_blocks):
        for end in range(max_blocks - max_blocks % alignment_blocks, 0, -alignment_blocks):
            if is_cached(end - 1):
                return end
        return 0


class TestDemandingWindow(TestWindow):
    manager = DemandingWindowManager
    specs = (WindowSpec(4, 1),)

    def blocks_needed_for_hit(self, spec, num_blocks):
        return [num_blocks - 1] if num_blocks else []


def failures_of(manager, specs=WINDOWS):
    """Return what each test of the suite fails with, by its name."""
    suite = type("Suite", (TestWindow,), {"manager": manager, "specs": specs, "num_traces": 8})()
    failures = {}
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except RuleBroken as broken:
                failures[name] = broken
    return failures


@pytest.mark.parametrize(("manager", "rule"), [pytest.param(*mutant, id=mutant[0].__name__) for mutant in MUTANTS])
def test_a_fault_is_caught_and_its_rule_is_named(manager, rule, monkeypatch):
    if not getattr(manager, "takes_long", False):
        monkeypatch.setattr(manager_suite, "NUM_SHORT_LIVES", 50)
        monkeypatch.setattr(manager_suite, "LONG_MODEL_LEN", 100)
    failures = failures_of(manager)
    assert rule in {broken.rule for broken in failures.values()}
    for broken in failures.values():
        assert str(broken).startswith(f"Rule broken: {broken.rule}\nFound: ")
        assert "Again: Suite()." in str(broken)


@pytest.mark.parametrize("spec", BROKEN_SPECS, ids=lambda spec: type(spec).__name__)
def test_a_spec_that_is_no_plain_value_is_caught(spec):
    failures = failures_of(WindowManager, specs=(spec,))
    assert failures["test_specs_are_plain_values"].rule == SPECS_ARE_VALUES


def test_a_stricter_rule_has_to_be_stated():
    failures = failures_of(DemandingWindowManager, specs=(WindowSpec(4, 1),))
    assert failures["test_a_prefix_is_as_long_as_the_cached_blocks_support"].rule == PREFIX_IS_LONGEST


def test_a_trace_is_shortened_and_can_be_run_again():
    trace = "test_random_requests_read_what_was_written_for_them"
    mutant = next(manager for manager, _ in MUTANTS if manager.__name__ == "KeepsProvisionalKeys")
    broken = failures_of(mutant)[trace]
    operations = [line for line in broken.context if re.match(r"  \d+\. ", line)]
    assert operations[0].startswith("  1. make a pool of ")
    (heading,) = (line for line in broken.context if line.startswith("After, with seed "))
    num_operations, of = re.search(r", (\d+) of (\d+) operations:$", heading).groups()
    assert 2 <= int(num_operations) <= 20
    assert int(of) == TRACE_LENGTH
    call = broken.context[-1].removeprefix("Again: ")
    suite = type("Suite", (TestWindow,), {"manager": mutant, "specs": WINDOWS})
    with pytest.raises(RuleBroken) as again:
        eval(call, {"Suite": suite})  # noqa: S307
    assert again.value.rule == broken.rule
    # It may be shortened further, by a request that played no part; then the others are counted otherwise.
    assert re.sub(r"\br\d+", "r", again.value.found) == re.sub(r"\br\d+", "r", broken.found)


def test_the_line_for_the_shell_works(tmp_path):
    (tmp_path / "someones_manager.py").write_text(
        "from octavo.core.interfaces import FullAttentionSpec, SingleTypeKVCacheManager\n"
        "from octavo.testing import KVCacheManagerSuite\n"
        "class Leaky(SingleTypeKVCacheManager):\n"
        "    contract_version = 1\n"
        "    serves = FullAttentionSpec\n"
        "    def longest_prefix(self, is_cached, max_blocks, alignment_blocks): return 0\n"
        "    def free(self, row): self.block_table(row)[0:1] = 0; super().free(row)\n"
        "class TestLeaky(KVCacheManagerSuite):\n"
        "    manager = Leaky\n"
    )
    code = "import someones_manager as m; m.TestLeaky().test_random_requests_read_what_was_written_for_them()"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": f"{sys.prefix}/bin"}
    first = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    (line,) = (line for line in first.stderr.splitlines() if line.startswith("Again: "))
    command = line.removeprefix("Again: ")
    assert command.startswith('python -c "import sys; sys.path.insert(0, ')
    # The line finds the module by itself.
    environment = {"PATH": f"{sys.prefix}/bin"}
    again = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment, check=False)
    (rule,) = (line for line in first.stderr.splitlines() if "Rule broken: " in line)
    assert rule in again.stderr


def test_the_same_seed_gives_the_same_trace():
    suite, spec = TestWindow(), WINDOWS[0]
    logs = []
    for _ in range(2):
        world = suite._world(spec, 7)
        for operation in range(50):
            world.do(random.Random(f"7.{operation}"))
        logs.append(world.log)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 50


def test_a_manager_can_be_given_by_name_and_a_wrong_one_is_told():
    suite = type("Suite", (KVCacheManagerSuite,), {"manager": "full_attention"})()
    suite.test_random_requests_read_what_was_written_for_them()
    suite.manager = "ful_attention"
    with pytest.raises(PluginNotFound, match="Did you mean 'full_attention'"):
        suite.test_specs_are_plain_values()
    suite.manager = dict
    with pytest.raises(SuiteMisusedError, match="dict is not a subclass of SingleTypeKVCacheManager"):
        suite.test_specs_are_plain_values()
    suite.manager = WindowManager
    with pytest.raises(SuiteMisusedError, match="has to say in `specs` what to test"):
        suite.test_specs_are_plain_values()
    with pytest.raises(SuiteMisusedError, match=r"KVCacheManagerSuite\.manager is None; it has to be a class"):
        KVCacheManagerSuite().test_specs_are_plain_values()


def test_the_options_of_a_suite_reach_the_manager_and_are_a_misuse_where_it_takes_none():
    made = []

    class Sized(FullAttentionManager):
        class Options(BaseModel):
            size: int = 1

        def __init__(self, *arguments, options):
            made.append(options.size)
            super().__init__(*arguments)

    suite = type("Suite", (KVCacheManagerSuite,), {"manager": Sized, "options": {"size": 3}})()
    suite.test_random_requests_read_what_was_written_for_them()
    assert set(made) == {3}
    suite.manager = FullAttentionManager
    with pytest.raises(SuiteMisusedError) as caught:
        suite.test_random_requests_read_what_was_written_for_them()
    assert str(caught.value) == "Suite.options: The class FullAttentionManager takes no options, and was given 'size'."
