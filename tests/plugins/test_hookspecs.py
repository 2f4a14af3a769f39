"""What observers are told of a real engine: each request is added once and finished once, whatever happens."""

import dataclasses
import importlib
import threading

import pytest
from fake_packages import install

from octavo import LLM, SamplingParams
from octavo.core.stats import EngineStats
from octavo.errors import EngineClosedError, InvalidRequestError, StepError

WATCHER = """
import octavo

contract_version = 1
told = []

@octavo.hookimpl
def engine_started(engine): told.append(engine)

@octavo.hookimpl
def request_added(request): told.append(request)

@octavo.hookimpl
def step_finished(step): told.append(step)

@octavo.hookimpl
def request_finished(request): told.append(request)
"""

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


class Watched:
    """An engine and what its observer was told."""

    def __init__(self, llm, told):
        self.llm = llm
        self._told = told

    def told(self, *kinds):
        """Return what was told of the given kinds, behind whatever the engine has still to do."""
        try:
            self.llm.stats()
        except EngineClosedError:
            self.llm.shutdown()
        return [event for event in self._told if not kinds or type(event).__name__ in kinds]

    def ends(self):
        """Return each finished request's id with its choices' reasons, and check that each was added before."""
        open_ids, ends = set(), []
        for event in self.told("RequestAdded", "RequestFinished"):
            if type(event).__name__ == "RequestAdded":
                assert event.request_id not in open_ids
                open_ids.add(event.request_id)
            else:
                open_ids.remove(event.request_id)
                ends.append((event.request_id, [choice.finish_reason for choice in event.choices]))
        assert not open_ids
        return ends


@pytest.fixture
def watch(site, make_llm, tiny_folder):
    install(site, "watch", "[octavo.hooks]\nwatch = watch_module\n", watch_module=WATCHER)

    def make(make=make_llm, **settings):
        llm = make(tiny_folder, hooks="watch", **{"num_kv_blocks": 60, **settings})
        return Watched(llm, importlib.import_module("watch_module").told)

    return make


# -- what is told -----------------------------------------------------------------------------------------------


def test_an_engine_is_told_of_once_before_everything_else(watch, tiny_folder):
    watched = watch(max_model_len=64)
    watched.llm.generate("one", GREEDY, use_tqdm=False)
    started, added, *others = watched.told()
    assert type(started).__name__ == "EngineStarted"
    assert dataclasses.asdict(started) == {
        "model": str(tiny_folder),
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 64,
        "num_kv_blocks": 60,
        # A block of 16 tokens, in 2 layers of 2 heads of 16 numbers, keys and values, in float32.
        "kv_cache_bytes": 60 * 8192,
        "selection": tuple(watched.llm.selection.lines()),
    }
    assert type(added).__name__ == "RequestAdded"
    assert [type(event).__name__ for event in others] == [
        *["StepFinished"] * 4,
        "RequestFinished",
        "StepFinished",
    ]


def test_a_request_is_told_of_with_its_prompt_its_parameters_and_what_came_of_it(watch):
    watched = watch()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, stop_token_ids=[7])
    (output,) = watched.llm.generate({"prompt": "one", "request_id": "mine"}, params, use_tqdm=False)
    (added,) = watched.told("RequestAdded")
    assert (added.request_id, added.prompt_token_ids) == ("mine", tuple(output.prompt_token_ids))
    assert (added.params, added.priority) == (params, 0)
    (finished,) = watched.told("RequestFinished")
    assert finished.request_id == "mine"
    assert finished.num_prompt_tokens == len(output.prompt_token_ids)
    assert (finished.num_cached_tokens, finished.num_preemptions) == (0, 0)
    assert 0 < finished.seconds < 60
    (choice,) = finished.choices
    (expected,) = output.outputs
    assert (choice.index, choice.text, list(choice.token_ids)) == (0, expected.text, expected.token_ids)
    assert (choice.finish_reason, choice.stop_reason) == ("length", expected.stop_reason)


def test_what_the_prefix_cache_had_is_told(watch):
    watched = watch()
    prompt = "a prompt that is longer than two blocks of sixteen"
    for _ in range(2):
        watched.llm.generate(prompt, GREEDY, use_tqdm=False)
    assert [event.num_cached_tokens for event in watched.told("RequestFinished")] == [0, 48]


def test_each_step_is_told_of_with_its_tokens_and_the_counters_after_it(watch):
    watched = watch()
    watched.llm.generate(["one", "two"], GREEDY, use_tqdm=False)
    steps = watched.told("StepFinished")
    assert [step.num_generated_tokens for step in steps] == [2] * 5
    assert all(0 < step.seconds < 60 and type(step.stats) is EngineStats for step in steps)
    assert [step.stats.steps for step in steps] == [1, 2, 3, 4, 5]
    assert [step.stats.running for step in steps] == [2, 2, 2, 2, 0]
    assert steps[-1].stats == watched.llm.stats()


# -- once each, whatever happens --------------------------------------------------------------------------------


def test_choices_of_one_request_are_told_together(watch):
    watched = watch()
    params = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)
    (output,) = watched.llm.generate("one", params, use_tqdm=False)
    assert watched.ends() == [(output.request_id, ["length"] * 3)]
    (added,) = watched.told("RequestAdded")
    assert added.params.n == 3
    (finished,) = watched.told("RequestFinished")
    assert [choice.index for choice in finished.choices] == [0, 1, 2]
    assert [list(c.token_ids) for c in finished.choices] == [choice.token_ids for choice in output.outputs]


def test_a_request_that_a_stop_string_ends_has_stopped_and_was_not_aborted(watch):
    watched = watch()
    params = dataclasses.replace(GREEDY, max_tokens=12)
    (output,) = watched.llm.generate("one", params, use_tqdm=False)
    stop = output.outputs[0].text[3:5]
    params = dataclasses.replace(params, stop=stop)
    (stopped,) = watched.llm.generate("one", params, use_tqdm=False)
    assert [reasons for _, reasons in watched.ends()] == [["length"], ["stop"]]
    choice = watched.told("RequestFinished")[-1].choices[0]
    assert (choice.stop_reason, choice.text) == (stop, stopped.outputs[0].text)


def test_a_stream_that_is_closed_is_told_as_aborted(watch):
    watched = watch()
    stream = watched.llm.stream("one", LONG)
    piece = next(stream)
    stream.close()
    ((_, reasons),) = watched.ends()
    assert reasons == ["abort"]
    assert watched.told("RequestFinished")[0].choices[0].text.startswith(piece)


def test_a_step_that_fails_is_not_told_and_its_request_is_finished_once(watch, monkeypatch):
    watched = watch()

    from octavo.models.llama import LlamaModel

    def broken(*args):
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(LlamaModel, "forward", broken)
    with pytest.raises(StepError):
        watched.llm.generate({"prompt": "one", "request_id": "mine"}, GREEDY, use_tqdm=False)
    assert watched.ends() == [("mine", ["abort"])]
    assert watched.told("StepFinished") == []


def test_an_engine_that_shuts_down_finishes_what_is_under_way(watch):
    watched = watch()
    streams = [watched.llm.stream({"prompt": name, "request_id": name}, LONG) for name in ("one", "two")]
    for stream in streams:
        next(stream)
    watched.llm.shutdown()
    assert sorted(watched.ends()) == [("one", ["abort"]), ("two", ["abort"])]


def test_an_engine_that_dies_finishes_what_is_under_way(watch, monkeypatch):
    watched = watch(make=LLM)

    from octavo.core.scheduler import Scheduler

    def broken(self, plan, result):
        raise ZeroDivisionError("a bug")

    stream = watched.llm.stream({"prompt": "one", "request_id": "mine"}, LONG)
    first = next(stream)
    monkeypatch.setattr(Scheduler, "update_from_output", broken)
    with pytest.raises(EngineClosedError, match="has died"):
        list(stream)
    assert watched.ends() == [("mine", ["error"])]
    assert watched.told("RequestFinished")[0].choices[0].text.startswith(first)


def test_a_request_that_lost_its_blocks_for_a_while_is_finished_once(watch):
    watched = watch(num_kv_blocks=10)
    outputs = watched.llm.generate(["one", "two"], dataclasses.replace(LONG, max_tokens=90), use_tqdm=False)
    assert sorted(watched.ends()) == [(output.request_id, ["length"]) for output in outputs]
    told = {event.request_id: event.num_preemptions for event in watched.told("RequestFinished")}
    assert told == {output.request_id: output.num_preemptions for output in outputs}
    assert sum(told.values()) > 0


@pytest.mark.parametrize("prompts", [[[]], ["one", "two", []], [{"prompt": "a", "request_id": "x"}] * 2])
def test_a_request_that_is_refused_and_those_of_the_same_call_are_not_told(watch, prompts):
    watched = watch()
    with pytest.raises(InvalidRequestError):
        watched.llm.generate(prompts, GREEDY, use_tqdm=False)
    assert watched.told("RequestAdded", "RequestFinished") == []
    watched.llm.generate("one", GREEDY, use_tqdm=False)
    assert len(watched.ends()) == 1


def test_several_threads_are_told_of_one_after_the_other(watch):
    watched = watch()
    threads = [
        threading.Thread(target=watched.llm.generate, args=([str(n)] * 3, GREEDY), kwargs={"use_tqdm": False})
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reasons for _, reasons in watched.ends()] == [["length"]] * 12
