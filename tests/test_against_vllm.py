"""benchmarks/against_vllm.py, with small stand-ins for the two engines: how they are driven, and what is reported."""

import importlib.util
import sys
from pathlib import Path

import pytest

from octavo.benchmark.workloads import named_workload

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "against_vllm.py"

# A library with the names that both engines share. It answers with the ids from its prompt's first one on, logs on
# standard output and standard error, and notes what it is asked.
STAND_IN = """
import sys, time
from types import SimpleNamespace

__version__ = "1.2.3"
notes = open(__file__ + ".notes", "a", buffering=1)

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, **settings):
        print("loading", settings["model"])
        notes.write(f"made {settings['dtype']} {settings['max_num_seqs']}\\n")

    def reset_prefix_cache(self):
        notes.write("reset\\n")
        return True

    def generate(self, prompts, params, use_tqdm):
        print("generating")
        print("for", len(prompts), file=sys.stderr)
        notes.write(f"{len(prompts)} {len(prompts[0]['prompt_token_ids'])} {vars(params)}\\n")
        time.sleep(SECONDS)
        ids = [[prompt["prompt_token_ids"][0] + DRIFT * number for number in range(params.max_tokens - SHORT)]
               for prompt in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=token_ids)]) for token_ids in ids]
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("against_vllm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["against_vllm"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["against_vllm"]


@pytest.fixture
def start(script, tmp_path):
    """Starts a stand-in in a process of its own."""
    processes = []

    def make(library, *, seconds=0.0, drift=1, short=0, more=""):
        constants = f"\nSECONDS, DRIFT, SHORT = {seconds}, {drift}, {short}\n{more}"
        (tmp_path / f"{library}.py").write_text(STAND_IN + constants)
        process = script.EngineProcess(
            sys.executable,
            library,
            Path("some-model"),
            "bfloat16",
            {"PYTHONPATH": str(tmp_path)},
            tmp_path / f"{library}.log",
        )
        processes.append(process)
        return process

    yield make
    for process in processes:
        process.close()


def notes_of(tmp_path, library):
    return (tmp_path / f"{library}.py.notes").read_text().splitlines()


def test_an_engine_is_warmed_up_and_empties_its_prefix_cache_before_each_run(start, tmp_path):
    engine = start("quick")
    assert (engine.version, engine.dtype) == ("1.2.3", "bfloat16")
    assert engine.seconds_to_first_token > 0
    for _ in range(2):
        run = engine.run([[7, 8, 9], [20]], 3)
        assert run.token_ids == [[7, 8, 9], [20, 21, 22]]
        assert run.seconds >= 0
        assert 0 <= run.share_of_others <= 1
    made, warm_up, *rest = notes_of(tmp_path, "quick")
    assert made == "made bfloat16 64"
    assert warm_up == "1 40 {'temperature': 0, 'max_tokens': 1, 'ignore_eos': True}"
    assert rest == ["reset", "2 3 {'temperature': 0, 'max_tokens': 3, 'ignore_eos': True}"] * 2


def test_what_an_engine_prints_goes_with_its_log(start, tmp_path):
    start("quick").run([[7]], 1)
    log = (tmp_path / "quick.log").read_text()
    assert "loading some-model" in log
    assert "for 1" in log


def test_the_engines_take_turns_and_the_medians_make_the_ratio(script, start, capsys, monkeypatch):
    monkeypatch.setattr(script, "PAUSE_SECONDS", 0.0)
    ours, theirs = start("quick", seconds=0.02), start("slow", seconds=0.08, drift=2)
    found = script.compare(ours, theirs, "single", 3, max_share_of_others=1.0)
    assert len(found.octavo_seconds) == len(found.peer_seconds) == 3
    assert all(seconds >= 0.02 for seconds in found.octavo_seconds)
    assert all(seconds >= 0.08 for seconds in found.peer_seconds)
    assert found.ratio == sorted(found.peer_seconds)[1] / sorted(found.octavo_seconds)[1]
    # The first ids are alike, and with another drift no others.
    assert (found.num_equal_first_tokens, found.num_equal_tokens) == (1, 1)
    assert (found.num_requests, found.num_output_tokens) == (1, 128)
    progress = capsys.readouterr().err.splitlines()
    assert [line.startswith("single: octavo ") for line in progress] == [True] * 3
    table = script.report([found], ours, theirs)
    assert table[0].startswith("quick 1.2.3 in bfloat16, first token ")
    assert table[3].split() == ["medians", "octavo", "slow", "ratio", "same", "tokens"]
    assert table[4].split()[0] == "single"
    assert table[4].split()[-2:] == [f"{found.ratio:.2f}", "1/128"]
    assert max(map(len, table[3:])) <= 80


def test_a_disturbed_pair_does_not_count_and_too_many_of_them_end_the_comparison(script, start, monkeypatch, capsys):
    monkeypatch.setattr(script, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(script, "MAX_TRIES", 2)
    ours, theirs = start("quick"), start("other")
    with pytest.raises(SystemExit) as caught:
        script.compare(ours, theirs, "single", 2, max_share_of_others=-1.0)
    assert str(caught.value) == "single: 4 pairs of runs, and only 0 of them undisturbed"
    assert all(line.endswith(": does not count") for line in capsys.readouterr().err.splitlines())


def test_the_work_of_others_is_told_from_the_engines_own(script, start, monkeypatch):
    # All processors together seem to have been busy for hours; the engine was so for next to none.
    busy = iter([100.0, 9100.0])
    engine = start("quick", seconds=0.3)
    monkeypatch.setattr(script, "busy_seconds", lambda: next(busy))
    assert engine.run([[7]], 1).share_of_others == 1
    busy = iter([100.0, 100.0])
    assert engine.run([[7]], 1).share_of_others == 0


def test_an_answer_that_is_too_short_is_no_result(start):
    engine = start("short", short=1)
    with pytest.raises(SystemExit) as caught:
        engine.run([[7], [8]], 5)
    assert str(caught.value) == "short did not generate 5 tokens for each of 2 prompts"


def test_an_engine_that_ends_shows_the_end_of_its_log(start):
    with pytest.raises(SystemExit) as caught:
        start("broken", more="raise ImportError('no such processor')")
    assert str(caught.value).startswith("broken ended with exit status 1; the end of its log:\nTraceback")
    assert str(caught.value).rstrip().endswith("ImportError: no such processor")


@pytest.mark.parametrize(("ours", "theirs", "count"), [([1, 2, 3], [1, 2, 4], 2), ([1], [2], 0), ([1, 2], [1, 2], 2)])
def test_equal_tokens_are_counted_up_to_the_first_difference(script, ours, theirs, count):
    assert script.num_equal(ours, theirs) == count


def test_the_peers_python_has_to_be_named(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["against_vllm.py"])
    with pytest.raises(SystemExit):
        script.main()
    assert "--peer-python is needed: the Python of an environment that has vllm" in capsys.readouterr().err


@pytest.mark.slow
def test_the_exported_demo_model_answers_as_the_packaged_one(script, tmp_path):
    from octavo import LLM, SamplingParams

    script.export_demo_model(tmp_path)
    assert script.num_weights_per_token(tmp_path) == 134_515_008
    params = SamplingParams(temperature=0, max_tokens=8)
    answers = []
    for model in (None, str(tmp_path)):
        with LLM(model, num_kv_blocks=64) as llm:
            (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
            answers.append(output.outputs[0].text)
    assert answers[0] == answers[1]


def test_weights_that_are_looked_up_are_not_counted(script, tmp_path):
    from octavo.testing import tiny_models

    num_tied = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 512 * 64
    for is_tied in (True, False):
        folder = tmp_path / str(is_tied)
        tiny_models.tiny_llama(folder, tie_word_embeddings=is_tied)
        assert script.num_weights_per_token(folder) == num_tied


def test_the_named_workload_is_what_is_sent(script, start, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "PAUSE_SECONDS", 0.0)
    ours, theirs = start("quick"), start("other")
    script.compare(ours, theirs, "prefix", 1, max_share_of_others=1.0)
    prompts = named_workload("prefix").prompts
    assert notes_of(tmp_path, "quick")[-1].startswith(f"{len(prompts)} {len(prompts[0])} ")
    assert "'max_tokens': 32" in notes_of(tmp_path, "other")[-1]


def test_a_run_waits_for_other_programs_to_end_but_not_for_ever(script, monkeypatch):
    now, naps = [0.0], []
    # The processors' busy seconds at each look: two looks a nap, the third of which is a quiet one.
    busy = iter([0.0, 9.0, 10.0, 19.0, 20.0, 20.0])

    def nap(seconds):
        naps.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(script.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(script.time, "sleep", nap)
    monkeypatch.setattr(script, "busy_seconds", lambda: next(busy))
    script.wait_until_quiet(0.1)
    assert len(naps) == 3
    monkeypatch.setattr(script, "busy_seconds", lambda: 100.0 * now[0])
    script.wait_until_quiet(0.1)
    assert now[0] == pytest.approx(3 * script.PAUSE_SECONDS + script.QUIET_TIMEOUT_SECONDS)
