"""Observers: who is told, in which order, what is said of one that is written wrongly, and that none does harm."""

import importlib
import logging

import pytest
from fake_packages import fresh_scan, install

from octavo import LLM, EngineConfig, PluginChoice, SamplingParams
from octavo.core.engine_core import EngineCore
from octavo.errors import ConfigError, PluginBroken, PluginContractError, PluginNotFound, PluginOptionsError
from octavo.plugins.families import HOOKS
from octavo.plugins.hooks import HOOK_NAMES, Observers
from octavo.plugins.part import choose
from octavo.selection.select import select

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
HOOKS_LISTED = "engine_started, request_added, step_finished, request_finished, register_routes"
SUBJECT = "The observer watch (watch_module, from watch-package 1.0)"

HEAD = "import octavo\ncontract_version = 1\ntold = []\n"
MARKED = "@octavo.hookimpl\ndef {}({}): told.append('{}')\n"
ALL_HOOKS = HEAD + "".join(MARKED.format(name, "", name) for name in HOOK_NAMES)


def install_watch(site, source, name="watch"):
    install(site, f"{name}-package", f"[octavo.hooks]\n{name} = {name}_module\n", **{f"{name}_module": source})


def observers(*choices):
    registry = fresh_scan()
    return Observers([choose(registry, HOOKS, PluginChoice(choice)) for choice in choices])


def refusal(*choices):
    with pytest.raises(PluginContractError) as caught:
        observers(*choices)
    return str(caught.value)


# -- who is told ------------------------------------------------------------------------------------------------


def test_where_nobody_listens_there_is_nothing_to_call(site):
    assert vars(Observers()) == dict.fromkeys(HOOK_NAMES)
    install_watch(site, HEAD + MARKED.format("step_finished", "", "step"))
    telling = observers("watch")
    assert [name for name in HOOK_NAMES if getattr(telling, name) is not None] == ["step_finished"]


def test_an_engine_that_nobody_observes_makes_nothing_to_tell(tiny_folder, make_llm, monkeypatch):
    llm = make_llm(tiny_folder, num_kv_blocks=20)

    def counted(self):
        raise AssertionError("nobody asked")

    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "stats", counted)
        patch.setattr("octavo.engine_thread.RequestAdded", None)
        patch.setattr("octavo.engine_thread.RequestFinished", None)
        patch.setattr("octavo.engine_thread.StepFinished", None)
        assert llm.generate("one", GREEDY, use_tqdm=False)[0].finished


def test_an_observer_is_told_only_where_it_is_listed(site, tiny_folder, make_llm):
    install_watch(site, ALL_HOOKS + "raise RuntimeError('imported')")
    assert make_llm(tiny_folder, num_kv_blocks=20).generate("one", GREEDY, use_tqdm=False)


def test_observers_are_told_in_the_order_of_the_config(site):
    for name in ("first", "second"):
        install_watch(
            site,
            "import octavo, builtins\ncontract_version = 1\n" + "@octavo.hookimpl\n"
            f"def step_finished(step): step.append('{name}')\n",
            name,
        )
    for order in (["first", "second"], ["second", "first"], ["second-package:second", "first-package:first"]):
        told = []
        observers(*order).step_finished(told)
        assert told == [name.rpartition(":")[2] for name in order]


def test_an_observer_takes_the_argument_or_none(site):
    install_watch(site, HEAD + MARKED.format("step_finished", "step", "s") + MARKED.format("request_added", "", "r"))
    telling = observers("watch")
    telling.step_finished("a step")
    telling.request_added("a request")
    assert importlib.import_module("watch_module").told == ["s", "r"]


def test_routes_are_registered_with_the_servers_application(site):
    install_watch(site, HEAD + "@octavo.hookimpl\ndef register_routes(app): app['/metrics'] = 'watch'\n")
    app = {}
    observers("watch").register_routes(app)
    assert app == {"/metrics": "watch"}


def test_an_observer_may_be_a_class_with_options(site):
    source = (
        "import octavo\nfrom pydantic import BaseModel\n"
        "class Watch:\n"
        "    contract_version = 1\n"
        "    class Options(BaseModel):\n        path: str\n"
        "    def __init__(self, *, options): self.path = options.path\n"
        "    @octavo.hookimpl\n    def register_routes(self, app): app.append(self.path)\n"
    )
    install(site, "watch-package", "[octavo.hooks]\nwatch = watch_module:Watch\n", watch_module=source)
    app = []
    registry = fresh_scan()
    Observers([choose(registry, HOOKS, PluginChoice("watch", {"path": "/x"}))]).register_routes(app)
    assert app == ["/x"]
    with pytest.raises(PluginOptionsError) as caught:
        observers("watch")
    assert str(caught.value) == (
        "The option 'path' of the observer watch (watch_module:Watch, from watch-package 1.0) is missing, and has no "
        "default."
    )


def test_a_class_that_cannot_be_made_is_broken(site):
    source = "class Watch:\n    contract_version = 1\n    def __init__(self, host): ...\n"
    install(site, "watch-package", "[octavo.hooks]\nwatch = watch_module:Watch\n", watch_module=source)
    with pytest.raises(PluginBroken) as caught:
        observers("watch")
    assert str(caught.value) == (
        "The observer watch (watch_module:Watch, from watch-package 1.0) raised TypeError when it was made: "
        "Watch.__init__() missing 1 required positional argument: 'host'"
    )


def test_one_observer_twice_is_refused_however_it_is_spelt(site):
    install_watch(site, ALL_HOOKS)
    config = EngineConfig.from_flat(model="anything", hooks=["watch", "watch-package:watch"])
    with pytest.raises(ConfigError) as caught:
        select(config, fresh_scan())
    assert str(caught.value) == (
        "hooks lists the observer watch (watch_module, from watch-package 1.0) twice; it would be told everything "
        "twice."
    )


# -- what is written wrongly ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (
            MARKED.format("request_finshed", "request", "x"),
            "implements a hook called 'request_finshed', which Octavo does not have. Did you mean 'request_finished'? "
            f"Hooks: {HOOKS_LISTED}.",
        ),
        (
            MARKED.format("zzz", "", "x"),
            f"implements a hook called 'zzz', which Octavo does not have. Hooks: {HOOKS_LISTED}.",
        ),
        (
            MARKED.format("request_added", "req", "x"),
            "defines request_added(req), and is given one argument: request_added(request), or request_added() to do "
            "without.",
        ),
        (
            MARKED.format("step_finished", "step, engine", "x"),
            "defines step_finished(step, engine), and is given one argument: step_finished(step), or step_finished() "
            "to do without.",
        ),
        (
            "@octavo.hookimpl(wrapper=True)\ndef step_finished(step): ...\n",
            "defines step_finished as a wrapper, and there is nothing to wrap: observers are only told.",
        ),
        (
            "def step_finished(step): ...\n",
            "defines step_finished without the mark @octavo.hookimpl, so it would never be called.",
        ),
        (
            MARKED.format("engine_started", "", "x") + "def step_finished(step): ...\n",
            "defines step_finished without the mark @octavo.hookimpl, so it would never be called.",
        ),
        (
            "@octavo.hookimpl\nasync def step_finished(step): ...\n",
            "defines step_finished with async, so it would never run.",
        ),
        ("", f"implements no hook. Mark its functions with @octavo.hookimpl. Hooks: {HOOKS_LISTED}."),
    ],
)
def test_an_observer_that_could_not_observe_is_refused(site, source, fault):
    install_watch(site, HEAD + source)
    assert refusal("watch") == f"{SUBJECT} {fault}"


def test_what_an_observer_imports_from_the_specs_is_no_unmarked_hook(site):
    install_watch(
        site, "from octavo.plugins.hookspecs import *\ncontract_version = 1\n@hookimpl\ndef engine_started(): ...\n"
    )
    assert observers("watch").engine_started is not None


def test_a_misspelt_hook_is_said_before_the_model_is_looked_for_and_nobody_is_told_anything(
    site, tiny_folder, monkeypatch
):
    install_watch(site, ALL_HOOKS, "good")
    install_watch(site, HEAD + MARKED.format("request_aded", "request", "x"))
    with pytest.raises(PluginContractError) as caught:
        LLM("no/such/model", hooks=["good", "watch"])
    assert str(caught.value) == (
        f"{SUBJECT} implements a hook called 'request_aded', which Octavo does not have. Did you mean 'request_added'? "
        f"Hooks: {HOOKS_LISTED}."
    )
    assert importlib.import_module("good_module").told == []


def test_a_misspelt_observer_is_named(site):
    install_watch(site, ALL_HOOKS)
    with pytest.raises(PluginNotFound) as caught:
        LLM("no/such/model", hooks="wach")
    assert str(caught.value) == (
        "No observer is called 'wach'. Did you mean 'watch'? Installed: watch (watch-package 1.0)."
    )


def test_an_observer_says_which_contract_version_it_was_built_for(site):
    install_watch(site, ALL_HOOKS.replace("contract_version = 1\n", ""))
    assert refusal("watch") == (
        f"{SUBJECT} does not say which contract version it was built for. This Octavo has version 1; a part that was "
        "built for it says: contract_version = 1"
    )


# -- what observers may do --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", ["ValueError('no')", "SystemExit(1)", "StepError('no', request_ids=[])", "asyncio.CancelledError()"]
)
def test_an_observer_that_raises_ends_nothing_is_reported_once_a_hook_and_the_next_one_is_told(
    site, tiny_folder, make_llm, caplog, error
):
    raising = HEAD + "import asyncio\nfrom octavo.errors import StepError\n"
    raising += "".join(f"@octavo.hookimpl\ndef {name}(): raise {error}\n" for name in HOOK_NAMES)
    install_watch(site, raising, "bad")
    install_watch(site, ALL_HOOKS, "good")
    (expected,) = make_llm(tiny_folder, num_kv_blocks=20).generate("one", GREEDY, use_tqdm=False)
    with caplog.at_level(logging.ERROR):
        llm = make_llm(tiny_folder, num_kv_blocks=20, hooks=["bad", "good"])
        (output,) = llm.generate("one", GREEDY, use_tqdm=False)
        llm.stats()
    assert output == expected
    told = importlib.import_module("good_module").told
    assert told == ["engine_started", "request_added", *["step_finished"] * 4, "request_finished", "step_finished"]
    assert [record.getMessage() for record in caplog.records] == [
        f"the observer bad (bad_module, from bad-package 1.0) raised in {name}; the engine goes on, and further faults "
        "there are not reported"
        for name in ("engine_started", "request_added", "step_finished", "request_finished")
    ]
    assert all(record.exc_info for record in caplog.records)


def test_an_interrupt_is_the_users_and_passes(site):
    install_watch(site, HEAD + "@octavo.hookimpl\ndef register_routes(app): raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        observers("watch").register_routes({})


def test_an_observer_that_changes_what_it_is_given_changes_no_output(site, tiny_folder, make_llm):
    meddling = HEAD + (
        "@octavo.hookimpl\ndef request_added(request):\n"
        "    for name, value in (('max_tokens', 1), ('ignore_eos', False), ('stop', ('a',))):\n"
        "        object.__setattr__(request.params, name, value)\n"
        "    object.__setattr__(request, 'prompt_token_ids', ())\n"
        "    told.append(request)\n"
        "@octavo.hookimpl\ndef step_finished(step): object.__setattr__(step.stats, 'steps', -1)\n"
        "@octavo.hookimpl\ndef request_finished(request):\n"
        "    object.__setattr__(request.choices[0], 'text', 'changed')\n"
        "    told.append(request)\n"
    )
    install_watch(site, meddling)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (expected,) = make_llm(tiny_folder, num_kv_blocks=20).generate("one", params, use_tqdm=False)
    llm = make_llm(tiny_folder, num_kv_blocks=20, hooks="watch")
    (output,) = llm.generate("one", params, use_tqdm=False)
    assert output == expected
    assert params == SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert llm.stats().steps == 8
    assert len(importlib.import_module("watch_module").told) == 2


def test_an_observer_that_calls_the_engine_is_told_so_and_does_not_wait_for_ever(site, tiny_folder, make_llm, caplog):
    asking = HEAD + "llm = None\n@octavo.hookimpl\ndef step_finished(): told.append('step') or llm.stats()\n"
    install_watch(site, asking)
    llm = make_llm(tiny_folder, num_kv_blocks=20, hooks="watch")
    importlib.import_module("watch_module").llm = llm
    (output,) = llm.generate("one", GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    (record,) = caplog.records
    assert str(record.exc_info[1]) == (
        "The engine was called from its own thread, as by an observer, and would wait for itself. Use what the hook "
        "was given, or call from another thread."
    )
