"""Engines whose decode steps are captured give the tokens of those whose steps are not, whatever happens between."""

import random

import pytest
import torch
from stand_in_graphs import Counting, RerunRecorder, TapeRecorder, make_engine

from octavo.assembly import build_engine
from octavo.attention_backends.triton.backend import TritonBackend
from octavo.config import EngineConfig
from octavo.core.model_runner import ModelRunner
from octavo.core.sampling_params import SamplingParams
from octavo.models.deepseek import DeepseekModel
from octavo.models.llama import LlamaModel
from octavo.testing import tiny_models
from octavo.testing.engines import assert_nothing_leaks, collect

MODELS = {
    "llama": (tiny_models.tiny_llama, {}),
    "gemma3": (tiny_models.tiny_gemma3, {}),
    # Latent attention; without experts, which wait for the device.
    "deepseek_v3": (tiny_models.tiny_deepseek_v3, {"first_k_dense_replace": 2}),
}
SIZES = (1, 2, 4, 6)
# Few blocks for eight requests: some have to wait, and some are preempted.
SETTINGS = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 96}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            make, config = MODELS[name]
            made[name] = make(tmp_path_factory.mktemp(name), seed=5, **config)
        return made[name]

    return folder


def run_trace(engine, seed, num_requests=14):
    """Add requests while others run, some with a beginning in common; return what came of each."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 500) for _ in range(30)]
    finished, num_added = {}, 0
    while num_added < num_requests or engine.has_unfinished_requests():
        if num_added < num_requests and rng.random() < 0.5:
            prompt = common[: rng.choice([0, 9, 22, 30])] + [rng.randrange(3, 500) for _ in range(rng.randint(1, 9))]
            params = SamplingParams(
                temperature=rng.choice([0, 0, 0.8]), max_tokens=rng.randint(4, 32), seed=num_added, ignore_eos=True
            )
            engine.add_request(f"request-{num_added}", prompt, params)
            num_added += 1
        collect(finished, engine.step())
    assert_nothing_leaks(engine)
    return {request_id: (record.token_ids, record.num_preemptions) for request_id, record in finished.items()}


def tokens_of(results):
    return {request_id: token_ids for request_id, (token_ids, _) in results.items()}


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
@pytest.mark.parametrize("model", MODELS)
def test_the_tokens_are_those_of_an_engine_without(model, seed, folder_of):
    settings = SETTINGS | {"num_kv_blocks": {"llama": 26, "gemma3": 90, "deepseek_v3": 26}[model]}
    wanted = run_trace(make_engine(folder_of(model), **settings), seed)
    recorder = Counting(TapeRecorder())
    engine = make_engine(folder_of(model), sizes=SIZES, recorder=recorder, **settings)
    assert run_trace(engine, seed) == wanted
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.hit_tokens > 0
    # Several sizes were replayed, with and without padding, and between them steps ran as they are.
    assert recorder.num_recorded == len(SIZES)
    assert len(recorder.replays) >= 3
    assert stats.steps // 4 < recorder.replays.total() < stats.steps - 5


def test_steps_planned_ahead_are_replayed_with_the_tokens_of_the_step_before(folder_of):
    settings = SETTINGS | {"num_kv_blocks": 40}
    wanted = run_trace(make_engine(folder_of("llama"), **settings), 3)
    recorder = Counting(RerunRecorder())
    engine = make_engine(folder_of("llama"), sizes=SIZES, recorder=recorder, async_scheduling=True, **settings)
    # Who is preempted may differ, and what comes of it does not.
    assert tokens_of(run_trace(engine, 3)) == tokens_of(wanted)
    assert recorder.replays.total() > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there is no interpreter")
@pytest.mark.parametrize(
    "model", ["deepseek_v3", *(pytest.param(m, marks=pytest.mark.slow) for m in ("llama", "gemma3"))]
)
def test_tritons_kernels_follow_the_tensors_of_a_captured_step(model, folder_of):
    pytest.importorskip("triton", reason="pip install triton brings it")
    from octavo.core.slot_kernel import fill_slots

    settings = SETTINGS | {"num_kv_blocks": 90}
    wanted = run_trace(make_engine(folder_of(model), **settings), 7, num_requests=3)
    recorder = Counting(RerunRecorder())
    graphs = {"sizes": (1, 3), "recorder": recorder, "backend_class": TritonBackend, "fill_slots": fill_slots}
    assert run_trace(make_engine(folder_of(model), **graphs, **settings), 7, num_requests=3) == wanted
    assert len(recorder.replays) == 2


def test_an_engine_captures_what_its_settings_say_with_tables_for_its_longest_request(folder_of, monkeypatch):
    asked, captured = [], []

    def sizes_to_capture(device, model, backends, **settings):
        asked.append((device, type(model), len(backends), settings))
        return (1, 4)

    monkeypatch.setattr("octavo.core.cuda_graphs.sizes_to_capture", sizes_to_capture)
    monkeypatch.setattr(ModelRunner, "capture_decode_steps", lambda runner, *arguments: captured.append(arguments))
    named = {"cudagraph_capture_sizes": [4, 1], "enforce_eager": True}
    build_engine(
        EngineConfig.from_flat(model=str(folder_of("llama")), device="cpu", num_kv_blocks=40, **named, **SETTINGS)
    )
    settings = {"max_num_seqs": 8, "wanted": (4, 1), "enforce_eager": True}
    assert asked == [("cpu", LlamaModel, 2, settings)]
    assert captured == [((1, 4), [24])]


def test_an_engine_on_a_cpu_captures_nothing(folder_of, monkeypatch):
    monkeypatch.setattr(ModelRunner, "capture_decode_steps", None)
    build_engine(EngineConfig.from_flat(model=str(folder_of("llama")), device="cpu", num_kv_blocks=40, **SETTINGS))


def test_latents_are_absorbed_in_a_replay(folder_of, monkeypatch):
    """Decode rows never take the other way through an MLA layer, which looks at the host's context lengths."""
    assert not DeepseekModel.can_capture
    monkeypatch.setattr("octavo.core.batch.rows_to_expand", None)
    make_engine(folder_of("deepseek_v3"), sizes=(2,), recorder=TapeRecorder(), num_kv_blocks=40, **SETTINGS)
