"""Names become classes, and what cannot is said in full sentences."""

import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from octavo.core.interfaces import CONTRACT_VERSION
from octavo.errors import NotInstalled, PluginBroken, PluginConflict, PluginContractError, PluginError, PluginNotFound
from octavo.plugins.families import ATTENTION_BACKENDS, FAMILIES, HASH_FUNCTIONS, MODELS, REQUEST_QUEUES
from octavo.plugins.registry import Plugin, Registry, scan
from octavo.request_queues import FCFSQueue

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

QUEUE = """
from octavo.request_queues import FCFSQueue

class Queue(FCFSQueue):
    pass
"""


def queue_plugin(name, package="octavo", target="octavo.request_queues:FCFSQueue", version="1.0"):
    return Plugin(REQUEST_QUEUES, name, target, package, version)


def sentence_of(error, call, *args):
    with pytest.raises(error) as caught:
        call(*args)
    assert isinstance(caught.value, PluginError)
    return str(caught.value)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Makes a folder on sys.path into which packages can be put as an installer would."""
    monkeypatch.syspath_prepend(tmp_path)
    imported_before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - imported_before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def install(site, package, entry_points, *, version="1.0", **modules):
    info = site / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    for name, source in modules.items():
        (site / f"{name}.py").write_text(source)
    return info


def load_queue(site, source, name="theirs"):
    """Install a package whose module `their_module` holds `source`; load the queue that it registers."""
    install(site, "their-package", f"[octavo.request_queues]\n{name} = their_module:Queue\n", their_module=source)
    return scan.__wrapped__().load(REQUEST_QUEUES, name)


# -- Octavo's own parts -----------------------------------------------------------------------------------------


def test_octavos_own_parts_are_what_its_package_registers():
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]
    assert {family.group for family in FAMILIES} == set(declared)
    registry = scan()
    for family in FAMILIES:
        found = {plugin.name: plugin.target for plugin in registry.plugins(family) if plugin.is_built_in}
        assert found == declared[family.group], "reinstall with: pip install -e ."


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.group)
def test_each_of_them_loads_and_keeps_its_contract(family):
    built_in = [plugin for plugin in scan().plugins(family) if plugin.is_built_in]
    assert built_in
    for plugin in built_in:
        loaded = scan().load(family, plugin.name)
        assert issubclass(loaded, family.contract)
        assert loaded.contract_version == CONTRACT_VERSION


def test_a_scan_imports_none_of_the_parts():
    targets = {plugin.target.partition(":")[0] for family in FAMILIES for plugin in scan().plugins(family)}
    code = "import sys; from octavo.plugins.registry import scan; scan(); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not targets & set(modules)
    assert "torch" not in modules


def test_one_scan_serves_a_whole_process():
    assert scan() is scan()


# -- what others install ----------------------------------------------------------------------------------------


def test_an_installed_package_adds_its_parts_without_being_imported(site):
    broken = "raise RuntimeError('imported')"
    install(
        site,
        "my-parts",
        "[console_scripts]\nmine = my_parts_module:main\n"
        "[octavo.request_queues]\nmine = my_parts_module:Queue\n"
        "[octavo.hash_functions]\nquick = my_parts_module:Quick\n",
        version="2.5",
        my_parts_module=broken,
    )
    registry = scan.__wrapped__()
    assert registry.find(REQUEST_QUEUES, "mine") == Plugin(
        REQUEST_QUEUES, "mine", "my_parts_module:Queue", "my-parts", "2.5"
    )
    assert registry.find(HASH_FUNCTIONS, "quick").target == "my_parts_module:Quick"
    assert "my_parts_module" not in sys.modules
    assert not registry.find(REQUEST_QUEUES, "mine").is_built_in


def test_loading_imports_the_chosen_part_and_no_other(site):
    install(site, "first-package", "[octavo.request_queues]\nfirst = first_module:Queue\n", first_module=QUEUE)
    install(site, "second-package", "[octavo.request_queues]\nsecond = second_module:Queue\n", second_module=QUEUE)
    loaded = scan.__wrapped__().load(REQUEST_QUEUES, "second")
    assert loaded.__module__ == "second_module"
    assert issubclass(loaded, FCFSQueue)
    assert "first_module" not in sys.modules


def test_a_package_met_twice_is_the_one_that_python_would_import(site, tmp_path, monkeypatch):
    entry = "[octavo.request_queues]\nmine = my_module:Queue\n"
    install(tmp_path / "later", "My_Parts", entry + "gone = my_module:Gone\n", version="1.0")
    install(tmp_path / "earlier", "my-parts", entry, version="2.0")
    monkeypatch.syspath_prepend(tmp_path / "later")
    monkeypatch.syspath_prepend(tmp_path / "earlier")
    registry = scan.__wrapped__()
    assert registry.find(REQUEST_QUEUES, "mine").version == "2.0"
    with pytest.raises(PluginNotFound):
        registry.find(REQUEST_QUEUES, "gone")


@pytest.mark.parametrize("remains", ["no METADATA", "no name", "garbled entry points"])
def test_the_remains_of_a_package_are_passed_over_with_a_warning_and_the_rest_works(site, caplog, remains):
    info = install(site, "stale", "[octavo.request_queues]\nstale = stale_module:Queue\n")
    if remains == "garbled entry points":
        (info / "entry_points.txt").write_text("[octavo.request_queues]\nnothing here\n")
    elif remains == "no name":
        (info / "METADATA").write_text("Metadata-Version: 2.1\n")
    else:
        (info / "METADATA").unlink()
    with caplog.at_level(logging.WARNING):
        registry = scan.__wrapped__()
    assert registry.load(REQUEST_QUEUES, "fcfs") is FCFSQueue
    with pytest.raises(PluginNotFound):
        registry.find(REQUEST_QUEUES, "stale")
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"passing over a package in {site}, whose metadata cannot be read: ")


def test_octavos_own_are_listed_first_then_by_name_and_package():
    plugins = [
        queue_plugin("b", "z"),
        queue_plugin("a", "y"),
        queue_plugin("b", "x"),
        queue_plugin("fcfs"),
        queue_plugin("c"),
    ]
    listed = [(p.name, p.package) for p in Registry(plugins).plugins(REQUEST_QUEUES)]
    assert listed == [("c", "octavo"), ("fcfs", "octavo"), ("a", "y"), ("b", "x"), ("b", "z")]
    assert Registry(plugins).plugins(MODELS) == ()


# -- names ------------------------------------------------------------------------------------------------------


def test_a_misspelt_name_is_met_with_the_closest_and_all_there_are():
    registry = Registry([queue_plugin("fcfs"), queue_plugin("priority"), queue_plugin("mine", "my-parts")])
    assert sentence_of(PluginNotFound, registry.find, REQUEST_QUEUES, "priorty") == (
        "No request queue is called 'priorty'. Did you mean 'priority'? Installed: fcfs, priority, mine."
    )
    assert sentence_of(PluginNotFound, registry.load, REQUEST_QUEUES, "zzz") == (
        "No request queue is called 'zzz'. Installed: fcfs, priority, mine."
    )


def test_names_of_other_families_are_not_suggested():
    assert sentence_of(PluginNotFound, scan().find, ATTENTION_BACKENDS, "fcfs").startswith(
        "No attention backend is called 'fcfs'. Installed: torch_sdpa"
    )


def test_a_name_that_two_packages_register_is_refused_with_both_and_either_can_be_chosen():
    one = queue_plugin("mine", "one", "one_module:Queue", "1.0")
    two = queue_plugin("mine", "two", "two_module:Queue", "2.0")
    registry = Registry([queue_plugin("fcfs"), two, one])
    assert sentence_of(PluginConflict, registry.find, REQUEST_QUEUES, "mine") == (
        "2 packages register the request queue 'mine': mine (one_module:Queue, from one 1.0), "
        "mine (two_module:Queue, from two 2.0). Choose 'one:mine' or 'two:mine'."
    )
    assert registry.find(REQUEST_QUEUES, "one:mine") == one
    assert registry.find(REQUEST_QUEUES, "two:mine") == two
    assert sentence_of(PluginNotFound, registry.find, REQUEST_QUEUES, "three:mine") == (
        "No request queue is called 'three:mine'. Did you mean 'mine'? Installed: fcfs, mine."
    )


@pytest.mark.parametrize("spelling", ["my-parts", "my_parts", "My.Parts"])
def test_a_package_may_be_spelt_as_package_indexes_allow(spelling):
    plugin = queue_plugin("mine", "My_Parts")
    registry = Registry([queue_plugin("fcfs"), plugin, queue_plugin("mine", "other")])
    assert registry.find(REQUEST_QUEUES, f"{spelling}:mine") == plugin


def test_a_built_in_name_stays_octavos_whatever_is_installed_beside_it():
    own, theirs = queue_plugin("fcfs"), queue_plugin("fcfs", "aaa")
    registry = Registry([theirs, own])
    assert registry.find(REQUEST_QUEUES, "fcfs") == own
    assert registry.find(REQUEST_QUEUES, "octavo:fcfs") == own
    assert registry.find(REQUEST_QUEUES, "aaa:fcfs") == theirs


def test_a_checkout_that_is_on_the_path_but_not_installed_says_so():
    sentence = (
        "No request queue of Octavo's own is registered: the package is importable but not installed. "
        "Install it, from a checkout with: pip install -e ."
    )
    assert sentence_of(NotInstalled, Registry([]).find, REQUEST_QUEUES, "fcfs") == sentence
    only_theirs = Registry([queue_plugin("mine", "my-parts")])
    assert sentence_of(NotInstalled, only_theirs.find, REQUEST_QUEUES, "mine") == sentence


# -- what is loaded ---------------------------------------------------------------------------------------------


def test_a_part_whose_import_fails_is_broken_and_the_cause_attached(site):
    sentence = sentence_of(PluginBroken, load_queue, site, "import no_such_module_anywhere")
    assert sentence == (
        "The request queue theirs (their_module:Queue, from their-package 1.0) cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )
    with pytest.raises(PluginBroken) as caught:
        scan.__wrapped__().load(REQUEST_QUEUES, "theirs")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_module_without_the_class_is_broken(site):
    assert sentence_of(PluginBroken, load_queue, site, "x = 1") == (
        "The request queue theirs (their_module:Queue, from their-package 1.0) cannot be imported: "
        "AttributeError: module 'their_module' has no attribute 'Queue'"
    )


@pytest.mark.parametrize("source", ["class Queue: pass", "Queue = 5", "def Queue(): pass"])
def test_a_part_that_is_no_subclass_of_the_contract_is_refused(site, source):
    assert sentence_of(PluginContractError, load_queue, site, source) == (
        "The request queue theirs (their_module:Queue, from their-package 1.0) is not a subclass of "
        "octavo.core.interfaces.request_queue.RequestQueue, which it must be."
    )


def test_a_part_that_lacks_methods_is_refused_with_their_names(site):
    source = (
        "from octavo.core.interfaces import RequestQueue\n"
        "class Queue(RequestQueue):\n"
        "    def add_request(self, request): ...\n"
        "    def pop_request(self): ...\n"
        "    def peek_request(self): ...\n"
        "    def __len__(self): return 0\n"
        "    def __iter__(self): return iter(())\n"
    )
    assert sentence_of(PluginContractError, load_queue, site, source) == (
        "The request queue theirs (their_module:Queue, from their-package 1.0) does not define prepend_request, "
        "remove_request."
    )


@pytest.mark.parametrize("version", [99, CONTRACT_VERSION - 1, None])
def test_a_part_built_for_another_contract_version_is_refused_with_both_numbers(site, version):
    source = QUEUE.replace("pass", f"contract_version = {version}")
    assert sentence_of(PluginContractError, load_queue, site, source) == (
        f"The request queue theirs (their_module:Queue, from their-package 1.0) was built for contract version "
        f"{version}, and this Octavo has version {CONTRACT_VERSION}; install a release of their-package that was "
        "built for it."
    )


def test_a_part_that_keeps_the_contract_loads(site):
    assert load_queue(site, QUEUE)().heeds_priority is False
