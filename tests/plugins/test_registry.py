"""What is found among installed packages, what a name stands for, and what is imported when."""

import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fake_packages import QUEUE, fresh_scan, install, install_queue

from octavo.core.interfaces import CONTRACT_VERSION
from octavo.errors import NotInstalled, PluginBroken, PluginConflict, PluginError, PluginNotFound
from octavo.plugins.families import ATTENTION_BACKENDS, FAMILIES, HASH_FUNCTIONS, HOOKS, MODELS, REQUEST_QUEUES
from octavo.plugins.registry import Plugin, Registry, Stray, scan
from octavo.request_queues import FCFSQueue

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
OWN_QUEUES = ", ".join(plugin.name for plugin in scan().plugins(REQUEST_QUEUES) if plugin.is_built_in)
FAMILIES_WITH_PARTS = [family for family in FAMILIES if family is not HOOKS]


def queue_plugin(name, package="octavo", target="octavo.request_queues:FCFSQueue", version="1.0"):
    return Plugin(REQUEST_QUEUES, name, target, package, version)


def sentence_of(error, call, *args):
    with pytest.raises(error) as caught:
        call(*args)
    assert isinstance(caught.value, PluginError)
    return str(caught.value)


# -- Octavo's own parts -----------------------------------------------------------------------------------------


def test_octavos_own_parts_are_what_its_package_registers():
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]
    assert {family.group for family in FAMILIES_WITH_PARTS} == set(declared)
    for family in FAMILIES_WITH_PARTS:
        found = {plugin.name: plugin.target for plugin in scan().plugins(family) if plugin.is_built_in}
        assert found == declared[family.group], "reinstall with: pip install -e ."


def test_octavo_has_no_observer_of_its_own():
    assert not [plugin for plugin in scan().plugins(HOOKS) if plugin.is_built_in]


@pytest.mark.parametrize("family", FAMILIES_WITH_PARTS, ids=lambda family: family.group)
def test_each_of_them_loads_and_keeps_its_contract(family):
    built_in = [plugin for plugin in scan().plugins(family) if plugin.is_built_in]
    assert built_in
    for plugin in built_in:
        loaded = scan().load(family, plugin.name)
        assert issubclass(loaded, family.contract())
        assert vars(loaded)["contract_version"] == CONTRACT_VERSION


def test_a_scan_imports_none_of_the_parts_and_nothing_heavy():
    targets = {plugin.target.partition(":")[0] for family in FAMILIES for plugin in scan().plugins(family)}
    code = "import sys; from octavo.plugins.registry import scan; scan(); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not targets & set(modules)
    assert not {"torch", "numpy", "pydantic"} & set(modules)


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
    registry = fresh_scan()
    assert registry.find(REQUEST_QUEUES, "mine") == Plugin(
        REQUEST_QUEUES, "mine", "my_parts_module:Queue", "my-parts", "2.5", str(site)
    )
    assert registry.find(HASH_FUNCTIONS, "quick").target == "my_parts_module:Quick"
    assert registry.find(HASH_FUNCTIONS, "quick").origin == "my-parts 2.5"
    assert "my_parts_module" not in sys.modules
    assert not registry.find(REQUEST_QUEUES, "mine").is_built_in


def test_loading_imports_the_chosen_part_and_no_other(site):
    install(site, "first-package", "[octavo.request_queues]\nfirst = first_module:Queue\n", first_module=QUEUE)
    install(site, "second-package", "[octavo.request_queues]\nsecond = second_module:Queue\n", second_module=QUEUE)
    loaded = fresh_scan().load(REQUEST_QUEUES, "second")
    assert loaded.__module__ == "second_module"
    assert issubclass(loaded, FCFSQueue)
    assert "first_module" not in sys.modules


def test_a_package_met_twice_is_the_one_that_python_would_import(site, tmp_path, monkeypatch):
    entry = "[octavo.request_queues]\nmine = my_module:Queue\n"
    install(tmp_path / "later", "My_Parts", entry + "gone = my_module:Gone\n", version="1.0")
    install(tmp_path / "earlier", "my-parts", entry, version="2.0")
    monkeypatch.syspath_prepend(tmp_path / "later")
    monkeypatch.syspath_prepend(tmp_path / "earlier")
    registry = fresh_scan()
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
        registry = fresh_scan()
    assert registry.load(REQUEST_QUEUES, "fcfs") is FCFSQueue
    with pytest.raises(PluginNotFound):
        registry.find(REQUEST_QUEUES, "stale")
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"passing over a package in {site}, whose metadata cannot be read: ")


@pytest.mark.parametrize(
    "entry_points", ["[console_scripts]\nnothing here\n", "garbled [\n", "[octavo_tools]\na = b:c\n"]
)
def test_what_packages_register_elsewhere_is_not_even_read(site, caplog, entry_points):
    install(site, "theirs", entry_points)
    with caplog.at_level(logging.WARNING):
        assert fresh_scan().find(REQUEST_QUEUES, "fcfs").is_built_in
    assert caplog.records == []


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
        "No request queue is called 'priorty'. Did you mean 'priority'? Installed: fcfs, priority, mine (my-parts 1.0)."
    )
    assert sentence_of(PluginNotFound, registry.load, REQUEST_QUEUES, "zzz") == (
        "No request queue is called 'zzz'. Installed: fcfs, priority, mine (my-parts 1.0)."
    )
    assert sentence_of(PluginNotFound, registry.load, HOOKS, "zzz") == "No observer is called 'zzz'. Installed: none."


def test_a_suggestion_ignores_case():
    registry = Registry([queue_plugin("fcfs"), queue_plugin("MyQueue", "my-parts")])
    assert sentence_of(PluginNotFound, registry.find, REQUEST_QUEUES, "FCFS") == (
        "No request queue is called 'FCFS'. Did you mean 'fcfs'? Installed: fcfs, MyQueue (my-parts 1.0)."
    )
    assert sentence_of(PluginNotFound, registry.find, REQUEST_QUEUES, "myqueue") == (
        "No request queue is called 'myqueue'. Did you mean 'MyQueue'? Installed: fcfs, MyQueue (my-parts 1.0)."
    )


def test_a_name_of_another_family_is_not_suggested_and_said_to_be_one():
    backend = Plugin(ATTENTION_BACKENDS, "torch_sdpa", "m:Backend", "octavo", "1.0")
    registry = Registry([queue_plugin("fcfs", target="octavo.request_queues:FCFSQueue"), backend])
    assert sentence_of(PluginNotFound, registry.find, ATTENTION_BACKENDS, "fcfs") == (
        "No attention backend is called 'fcfs'. There is a request queue of that name, fcfs "
        "(octavo.request_queues:FCFSQueue, from octavo 1.0). Installed: torch_sdpa."
    )
    assert sentence_of(PluginNotFound, registry.find, ATTENTION_BACKENDS, "fcf") == (
        "No attention backend is called 'fcf'. Installed: torch_sdpa."
    )


def test_a_colon_without_a_package_stands_for_no_name():
    registry = Registry([queue_plugin("fcfs"), queue_plugin("mine", "my-parts")])
    assert sentence_of(PluginNotFound, registry.find, REQUEST_QUEUES, ":mine") == (
        "No request queue is called ':mine'. Did you mean 'mine'? No package '' is installed. Installed: fcfs, mine "
        "(my-parts 1.0)."
    )


@pytest.mark.parametrize("name", ["their:queue", ":queue", "queue:", "a,b", "{a", "a b", ""])
def test_a_name_that_nobody_can_choose_is_a_fault(name):
    plugin = queue_plugin(name, "my-parts", "m:Queue")
    assert Registry([queue_plugin("fcfs"), plugin]).fault_of_name(plugin) == (
        f"The request queue {name} (m:Queue, from my-parts 1.0) uses a name that not every setting can carry: 'auto' "
        "lets Octavo choose, a colon stands behind a package's name, and commas, spaces and brackets are a flag's own. "
        "Its authors must choose another name, of letters, digits, '_', '-' and '.'."
    )


@pytest.mark.parametrize("family", [ATTENTION_BACKENDS, MODELS])
def test_auto_is_no_name_where_octavo_can_choose(family):
    plugin = Plugin(family, "auto", "m:Part", "my-parts", "1.0")
    assert Registry([plugin]).fault_of_name(plugin) == (
        f"The {family.label} auto (m:Part, from my-parts 1.0) uses a name that not every setting can carry: 'auto' "
        "lets Octavo choose, a colon stands behind a package's name, and commas, spaces and brackets are a flag's own. "
        "Its authors must choose another name, of letters, digits, '_', '-' and '.'."
    )
    assert Registry([queue := queue_plugin("auto", "my-parts")]).fault_of_name(queue) is None


# -- groups that are none ---------------------------------------------------------------------------------------

STRAYS = {
    "octavo.attention_backend": "Did its authors mean 'octavo.attention_backends'?",
    "octavo.hook": "Did its authors mean 'octavo.hooks'?",
    "octavo.Request_Queues": "Did its authors mean 'octavo.request_queues'?",
    "octavo.kv_connectors": f"Groups: {', '.join(family.group for family in FAMILIES)}.",
}


@pytest.mark.parametrize("group", STRAYS)
def test_what_is_registered_under_a_group_that_is_none_is_said_where_its_name_is_not_found(site, caplog, group):
    install(site, "lost-parts", f"[{group}]\nlost = lost_module:Lost\n", version="0.3")
    with caplog.at_level(logging.DEBUG):
        registry = fresh_scan()
        assert registry.find(REQUEST_QUEUES, "fcfs").is_built_in
    assert caplog.records == []
    assert [plugin for family in FAMILIES for plugin in registry.plugins(family) if plugin.name == "lost"] == []
    assert registry.strays == (Stray(group, "lost", "lost-parts", "0.3"),)
    sentence = (
        f"lost-parts 0.3 registers 'lost' under '{group}', which is no group of this Octavo's, so it is never found. "
        f"{STRAYS[group]}"
    )
    assert str(registry.strays[0]) == sentence
    assert sentence_of(PluginNotFound, registry.find, REQUEST_QUEUES, "lost") == (
        f"No request queue is called 'lost'. {sentence} Installed: {OWN_QUEUES}."
    )
    assert sentence not in sentence_of(PluginNotFound, registry.find, REQUEST_QUEUES, "other")


def test_a_package_may_register_parts_and_what_is_none(site):
    install(site, "half-lost", "[octavo.hook]\nlost = m\n[octavo.request_queues]\nmine = m:Queue\n[octavo]\na = b\n")
    registry = fresh_scan()
    assert registry.find(REQUEST_QUEUES, "mine").package == "half-lost"
    assert [stray.name for stray in registry.strays] == ["lost"]


def test_a_package_that_is_named_and_not_installed_is_said_to_be_missing(site):
    install_queue(site)
    assert sentence_of(PluginNotFound, fresh_scan().find, REQUEST_QUEUES, "no-such-package:theirs") == (
        "No request queue is called 'no-such-package:theirs'. Did you mean 'theirs'? No package 'no-such-package' is "
        f"installed. Installed: {OWN_QUEUES}, theirs (their-package 1.0)."
    )


def test_a_package_that_is_named_and_registers_nothing_is_said_to_be_where_it_is(site):
    install(site, "stale-parts", "", version="0.9")
    assert sentence_of(PluginNotFound, fresh_scan().find, REQUEST_QUEUES, "stale-parts:mine") == (
        f"No request queue is called 'stale-parts:mine'. stale-parts 0.9 in {site} registers none. Installed: "
        f"{OWN_QUEUES}."
    )


def test_a_package_that_is_named_and_registers_others_has_them_listed_and_says_where_it_is(site):
    entries = "[octavo.request_queues]\nfirst = m:A\nsecond = m:B\n"
    install(site, "more-parts", entries, version="0.9")
    assert sentence_of(PluginNotFound, fresh_scan().find, REQUEST_QUEUES, "more-parts:third") == (
        f"No request queue is called 'more-parts:third'. more-parts 0.9 in {site} registers first, second. Installed: "
        f"{OWN_QUEUES}, first (more-parts 0.9), second (more-parts 0.9)."
    )


def test_the_remains_of_a_package_that_is_named_are_said_to_be_where_they_are(site):
    info = install(site, "stale-parts", "[octavo.request_queues]\nmine = m:A\n", version="0.9")
    (info / "METADATA").unlink()
    assert sentence_of(PluginNotFound, fresh_scan().find, REQUEST_QUEUES, "stale-parts:mine") == (
        "No request queue is called 'stale-parts:mine'. stale-parts, whose metadata cannot be read, in "
        f"{site} registers none. Installed: {OWN_QUEUES}."
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
    assert registry.fault_of_name(one) == (
        "The request queue mine (one_module:Queue, from one 1.0) shares its name with mine (two_module:Queue, from two "
        "2.0). It is reached as 'one:mine' alone."
    )
    assert registry.fault_of_name(queue_plugin("fcfs")) is None


@pytest.mark.parametrize("spelling", ["my-parts", "my_parts", "My.Parts"])
def test_a_package_may_be_spelt_as_package_indexes_allow(spelling):
    plugin = queue_plugin("mine", "My_Parts")
    registry = Registry([queue_plugin("fcfs"), plugin, queue_plugin("mine", "other")])
    assert registry.find(REQUEST_QUEUES, f"{spelling}:mine") == plugin


def test_a_built_in_name_stays_octavos_whatever_is_installed_beside_it(caplog):
    own = queue_plugin("fcfs")
    one, two = queue_plugin("fcfs", "aaa", "a:Queue"), queue_plugin("fcfs", "bbb", "b:Queue")
    registry = Registry([two, one, own])
    with caplog.at_level(logging.WARNING):
        assert registry.find(REQUEST_QUEUES, "fcfs") == own
        assert registry.find(REQUEST_QUEUES, "fcfs") == own
        assert registry.find(REQUEST_QUEUES, "octavo:fcfs") == own
        assert registry.find(REQUEST_QUEUES, "aaa:fcfs") == one
    assert [record.getMessage() for record in caplog.records] == [
        "the request queue 'fcfs' is Octavo's own; fcfs (a:Queue, from aaa 1.0) and fcfs (b:Queue, from bbb 1.0) "
        "cannot take its name, and would be chosen as 'aaa:fcfs' or 'bbb:fcfs'"
    ]
    assert registry.fault_of_name(own) is None
    assert registry.fault_of_name(one) == (
        "The request queue fcfs (a:Queue, from aaa 1.0) uses a name that is reserved for Octavo's own. It is reached "
        "as 'aaa:fcfs' alone; its authors should choose another name."
    )


def test_a_checkout_that_is_on_the_path_but_not_installed_says_so():
    sentence = (
        "No request queue of Octavo's own is registered: the package is importable but not installed. "
        "Install it, from a checkout with: pip install -e ."
    )
    assert sentence_of(NotInstalled, Registry([]).find, REQUEST_QUEUES, "fcfs") == sentence
    only_theirs = Registry([queue_plugin("mine", "my-parts")])
    assert sentence_of(NotInstalled, only_theirs.find, REQUEST_QUEUES, "mine") == sentence


# -- what is imported -------------------------------------------------------------------------------------------


def test_a_part_is_imported_once_a_process_however_often_it_is_loaded(site):
    counting = QUEUE + "\nimport os\nos.environ['TIMES'] = str(int(os.environ['TIMES']) + 1)\n"
    install_queue(site, counting)
    code = (
        "import os; os.environ['TIMES'] = '0'\n"
        "from octavo.plugins.families import REQUEST_QUEUES\n"
        "from octavo.plugins.registry import scan\n"
        "assert scan() is scan()\n"
        "one, two = scan().load(REQUEST_QUEUES, 'theirs'), scan().load(REQUEST_QUEUES, 'their-package:theirs')\n"
        "assert one is two\n"
        "print(os.environ['TIMES'])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "1\n"


def test_a_part_whose_import_fails_is_broken_and_the_cause_attached_and_those_beside_it_work(site):
    install_queue(site, "import no_such_module_anywhere")
    install(site, "good-package", "[octavo.request_queues]\ngood = good_module:Queue\n", good_module=QUEUE)
    registry = fresh_scan()
    with pytest.raises(PluginBroken) as caught:
        registry.load(REQUEST_QUEUES, "theirs")
    assert str(caught.value) == (
        "The request queue theirs (their_module:Queue, from their-package 1.0) cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert registry.load(REQUEST_QUEUES, "good").__module__ == "good_module"
    assert registry.load(REQUEST_QUEUES, "fcfs") is FCFSQueue


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("x = 1", "AttributeError: module 'their_module' has no attribute 'Queue'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def broken(:", "SyntaxError: invalid syntax (their_module.py, line 1)"),
    ],
)
def test_whatever_an_import_fails_with_is_said(site, source, cause):
    install_queue(site, source)
    assert sentence_of(PluginBroken, fresh_scan().load, REQUEST_QUEUES, "theirs") == (
        f"The request queue theirs (their_module:Queue, from their-package 1.0) cannot be imported: {cause}"
    )


def test_a_target_that_names_no_class_and_cannot_be_imported_is_met_with_how_one_is_written(site):
    install(site, "their-package", "[octavo.request_queues]\ntheirs = their_module.Queue\n", their_module=QUEUE)
    assert sentence_of(PluginBroken, fresh_scan().load, REQUEST_QUEUES, "theirs") == (
        "The request queue theirs (their_module.Queue, from their-package 1.0) cannot be imported: "
        "ModuleNotFoundError: No module named 'their_module.Queue'; 'their_module' is not a package. Its entry point "
        "names no class; one is written module:Class"
    )


def test_an_observer_that_cannot_be_imported_may_be_a_module(site):
    install(site, "their-package", "[octavo.hooks]\ntheirs = no_such_module_anywhere\n")
    assert sentence_of(PluginBroken, fresh_scan().load, HOOKS, "theirs") == (
        "The observer theirs (no_such_module_anywhere, from their-package 1.0) cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )


def test_an_import_that_fails_half_way_leaves_nothing_of_its_package_and_can_be_tried_again(site):
    entries = "[octavo.request_queues]\nmine = half_pkg.queues:Queue\n"
    install(
        site,
        "half-package",
        entries,
        half_pkg____init__="",
        half_pkg__helper="MENDED = False",
        half_pkg__queues="import half_other\nfrom half_pkg import helper\n"
        "if not helper.MENDED:\n    raise AssertionError('half-way')\n" + QUEUE,
        half_other="",
    )
    import half_pkg

    registry = fresh_scan()
    for _ in range(2):
        assert sentence_of(PluginBroken, registry.load, REQUEST_QUEUES, "mine") == (
            "The request queue mine (half_pkg.queues:Queue, from half-package 1.0) cannot be imported: "
            "AssertionError: half-way"
        )
        # What was there before stays, and what others own; of the rest not even the package's attribute is left.
        assert sys.modules["half_pkg"] is half_pkg
        assert not [name for name in sys.modules if name.startswith("half_pkg.")]
        assert not hasattr(half_pkg, "helper")
        assert "half_other" in sys.modules
    (site / "half_pkg" / "helper.py").write_text("MENDED = 'a longer file than before'")
    assert registry.load(REQUEST_QUEUES, "mine").__module__ == "half_pkg.queues"


def test_a_package_whose_own_import_fails_is_forgotten_with_all_it_had_imported(site):
    install(
        site,
        "half-package",
        "[octavo.request_queues]\nmine = half_pkg:Queue\n",
        half_pkg____init__="import half_pkg.a\nraise OSError('no')",
        half_pkg__a="",
    )
    assert sentence_of(PluginBroken, fresh_scan().load, REQUEST_QUEUES, "mine") == (
        "The request queue mine (half_pkg:Queue, from half-package 1.0) cannot be imported: OSError: no"
    )
    assert not {"half_pkg", "half_pkg.a"} & set(sys.modules)
    (site / "half_pkg" / "__init__.py").write_text(QUEUE)
    assert fresh_scan().load(REQUEST_QUEUES, "mine").__module__ == "half_pkg"
