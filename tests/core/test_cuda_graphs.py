"""Which decode steps are captured and which are replayed, and what a captured step may look at."""

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gather_backend import GatherBackend
from stand_in_graphs import Counting, RerunRecorder, TapeRecorder, capture_a_step
from test_model_runner import SuccessorModel, attention_spec, cache_spec, make_plan

from octavo.core.cuda_graphs import CudaGraphRecorder, capture_sizes, reasons_against, sizes_to_capture
from octavo.core.device_inputs import DeviceInputs
from octavo.core.kv_cache_config import KVCacheConfig, KVCacheGroup
from octavo.core.model_runner import ModelRunner
from octavo.core.static_inputs import StaticInputs, UnreadableArray
from octavo.errors import ConfigError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.deepseek import DeepseekModel
from octavo.models.gemma import GemmaModel
from octavo.models.gpt_oss import GptOssModel
from octavo.models.llama import LlamaModel
from octavo.models.llama4 import Llama4Model
from octavo.testing import tiny_models
from octavo.testing.attention.capture import CaptureFault

BLOCK_SIZE = 4


class CapturableModel(SuccessorModel):
    can_capture = True

    def forward(self, batch):
        self.num_forwards += 1
        hidden = batch.token_ids.float().view(-1, 1, 1)
        # What attention gives is between the smallest and the largest token of the context; here it is added as 0.
        return (hidden + 0 * batch.attention(0, hidden, hidden, hidden)).view(-1, 1)


def make_runner(sizes, *, model=None, backend_class=GatherBackend, recorder=None, width=8):
    backend = backend_class(attention_spec(BLOCK_SIZE))
    config = KVCacheConfig(32, (KVCacheGroup(cache_spec(BLOCK_SIZE), (0,)),))
    model = CapturableModel() if model is None else model
    runner = ModelRunner(model, [backend], config, "cpu", inputs=DeviceInputs([BLOCK_SIZE], "cpu"))
    recorder = Counting(TapeRecorder() if recorder is None else recorder)
    runner.capture_decode_steps(sizes, [width], recorder=recorder)
    return runner, recorder


def decodes(count, *, tokens=None, context=6):
    """Return the plan of decode rows, each with blocks of its own."""
    tokens = range(10, 10 + count) if tokens is None else tokens
    return make_plan([(context - 1, [token], [1 + 2 * row, 2 + 2 * row], True) for row, token in enumerate(tokens)])


# -- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_num_seqs", "wanted", "sizes"),
    [
        (1, None, (1,)),
        (3, None, (1, 2, 3)),
        (8, None, (1, 2, 4, 8)),
        (12, None, (1, 2, 4, 8, 12)),
        (32, None, (1, 2, 4, 8, 16, 24, 32)),
        (64, (16, 1, 5, 16), (1, 5, 16)),
        (8, (16, 1), (1,)),
        (8, (16,), ()),
    ],
)
def test_steps_are_captured_for_few_rows_and_for_multiples_of_eight(max_num_seqs, wanted, sizes):
    assert capture_sizes(max_num_seqs, wanted) == sizes


def test_unless_they_are_named_no_sizes_above_512_are_captured():
    sizes = capture_sizes(4000, None)
    assert sizes[-1] == 512
    assert len(sizes) == 3 + 512 // 8
    assert capture_sizes(4000, (600,)) == (600,)


def test_the_largest_is_recorded_first_so_that_the_others_find_memory_in_its_pool():
    seen = []

    class Watching(RerunRecorder):
        def record(self, step):
            replay = super().record(step)
            seen.append(model.num_rows)
            return replay

    class Model(CapturableModel):
        def forward(self, batch):
            self.num_rows = len(batch.token_ids)
            return super().forward(batch)

    model = Model()
    make_runner([1, 2, 4], model=model, recorder=Watching())
    assert seen == [4, 2, 1]


# -- which steps are replayed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "recorded"), [(1, 2), (2, 1), (3, 0), (4, 0)])
def test_a_step_runs_in_the_smallest_size_that_holds_it(num_rows, recorded):
    runner, recorder = make_runner([1, 2, 4])
    plan = decodes(num_rows)
    assert runner.run(plan).token_ids == [11, 12, 13, 14][:num_rows]
    assert recorder.replays == {recorded: 1}


def test_replays_compute_nothing_in_python_and_give_each_steps_own_tokens():
    runner, _ = make_runner([4])
    num_forwards = runner.model.num_forwards
    for tokens in ([5, 6, 7], [20, 21], [900, 3, 41, 8]):
        assert runner.run(decodes(len(tokens), tokens=tokens)).token_ids == [token + 1 for token in tokens]
    assert runner.model.num_forwards == num_forwards


@pytest.mark.parametrize(
    "plan",
    [
        decodes(5),
        make_plan([(5, [10], [1, 2], True), (0, [20, 21], [3], True)]),
        make_plan([(0, [20, 21, 22], [3], True)]),
        # A table that is wider than those of the captured steps.
        make_plan([(33, [10], list(range(1, 10)), True)]),
    ],
    ids=["too many rows", "mixed", "a prompt", "too long"],
)
def test_every_other_step_runs_as_it_is(plan):
    runner, recorder = make_runner([1, 2, 4])
    num_forwards = runner.model.num_forwards
    assert runner.run(plan).token_ids == [token + 1 for token in last_tokens(plan)]
    assert recorder.replays == {}
    assert runner.model.num_forwards == num_forwards + 1


def last_tokens(plan):
    return plan.token_ids[np.cumsum(plan.num_new_tokens) - 1].tolist()


def test_logits_are_computed_for_the_rows_that_sample_alone():
    runner, _ = make_runner([4])
    entries = [(5, [10], [1, 2], True), (2, [11], [3], False), (6, [12], [5, 6], True)]
    assert runner.run(make_plan(entries)).token_ids == [11, 13]
    runner.fill_kv_cache(make_plan(entries[1:2]))
    assert runner.model.rows_given_to_logits == [[10, 12]]


def test_on_a_cpu_nothing_can_be_captured():
    backend = GatherBackend(attention_spec(BLOCK_SIZE))
    config = KVCacheConfig(8, (KVCacheGroup(cache_spec(BLOCK_SIZE), (0,)),))
    runner = ModelRunner(CapturableModel(), [backend], config, "cpu")
    with pytest.raises(ConfigError, match=r"^Decode steps are captured on a GPU, and this model runs on 'cpu'\.$"):
        runner.capture_decode_steps([1], [8])


def test_a_runner_with_captured_steps_goes_when_nobody_holds_it():
    runner, _ = make_runner([1], recorder=RerunRecorder())
    gone = weakref.ref(runner)
    gc.disable()
    try:
        del runner
        assert gone() is None
    finally:
        gc.enable()


# -- what a captured step may look at -----------------------------------------------------------------------------


class ReadsContextLengths(GatherBackend):
    def plan(self, batch):
        self.longest = int(batch.context_lens_host.max())
        return super().plan(batch)


class WaitsForTheDevice(GatherBackend):
    def plan(self, batch):
        self.longest = int(batch.context_lens.max())
        return super().plan(batch)


def test_a_backend_that_reads_host_arrays_is_named_with_what_it_read():
    with pytest.raises(RuntimeError) as caught:
        make_runner([1, 2], backend_class=ReadsContextLengths)
    assert str(caught.value) == (
        "context_lens_host was read in a step of decode rows that is captured in a CUDA graph, and its numbers are "
        "others in every replay. With can_capture, a backend reads the batch's device tensors, and of its host arrays "
        "the shapes alone."
    )
    assert f"in the attention backend {__name__}.ReadsContextLengths, planning" in caught.value.__notes__


def test_a_step_that_waits_for_the_device_is_refused_and_what_failed_is_said():
    with pytest.raises(CaptureFault, match=r"^aten\.item\.default waits for the device") as caught:
        make_runner([2], backend_class=WaitsForTheDevice)
    assert caught.value.__notes__[-1] == (
        "while a decode step of 2 rows was captured in a CUDA graph; enforce_eager=True runs without"
    )


@pytest.mark.parametrize(
    "read",
    [
        lambda array: array[0],
        lambda array: list(array),
        lambda array: array.tolist(),
        lambda array: array.max(),
        lambda array: np.asarray(array),
        lambda array: np.array(array),
        lambda array: np.maximum(array, 1),
        lambda array: np.max(array),
        lambda array: array + 1,
        lambda array: int(array),
        lambda array: torch.from_numpy(array),
        lambda array: torch.as_tensor(array),
        lambda array: torch.tensor(array),
    ],
)
def test_a_host_array_of_a_captured_step_has_no_numbers(read):
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        read(UnreadableArray("context_lens_host", 3))


def test_it_has_a_shape():
    array = UnreadableArray("block_table_host", 3, 5)
    assert (len(array), array.shape, array.ndim, array.size, array.dtype) == (3, (3, 5), 2, 15, np.int32)


# -- what is in the tensors ---------------------------------------------------------------------------------------


def test_rows_behind_the_entries_are_padding():
    static = StaticInputs(DeviceInputs([4, 16], "cpu"), 6, [5, 3])
    static.fill_for_trial()
    tables = ([[3, 7], [9, 0]], [[2], [8]])
    plan = make_plan([(5, [50], tables[0][0], True), (2, [60], tables[0][1], False)], more_tables=(tables[1],))
    assert static.hold(plan)
    assert static.fill(plan, 4).tolist() == [0]
    step = static.of_size(4)
    assert step.token_ids.tolist() == [50, 60, 0, 0]
    assert step.positions.tolist() == [5, 2, 0, 0]
    assert [batch.slots.tolist() for batch in step.batches.values()] == [[29, 38, -1, -1], [37, 130, -1, -1]]
    for batch, table in zip(step.batches.values(), tables, strict=True):
        assert batch.num_decode_rows == batch.num_rows == batch.num_tokens == 4
        assert batch.query_starts.tolist() == batch.query_starts_host.tolist() == [0, 1, 2, 3, 4]
        assert batch.context_lens.tolist() == [6, 3, 0, 0]
        width = batch.block_table.shape[1]
        wanted = [row + [0] * (width - len(row)) for row in [*table, [], []]]
        assert batch.block_table.tolist() == wanted
        assert batch.block_table_host.shape == (4, width)


def test_a_step_keeps_the_tensors_of_its_size_whatever_is_put_in():
    source = DeviceInputs([4], "cpu")
    static = StaticInputs(source, 4, [3])
    step = static.of_size(2)
    places = [tensor.data_ptr() for tensor in tensors_of(step)]
    for row in (0, 50):
        plan = make_plan([(9, [row + 1], [1, 2, 3], True), (2, [7], [4], True)])
        plan.rows[:] += row
        static.fill(plan, 2)
    assert step.token_ids.tolist() == [51, 7]
    assert step.batches[0].block_table.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert [tensor.data_ptr() for tensor in tensors_of(static.of_size(2))] == places


def tensors_of(step):
    batch = step.batches[0]
    return [step.token_ids, step.positions, batch.query_starts, batch.context_lens, batch.block_table, batch.slots]


# -- torch.cuda ---------------------------------------------------------------------------------------------------


class FakeCuda:
    """Notes, in order, what is asked of `torch.cuda`."""

    def __init__(self, monkeypatch):
        self.said, self.num_pools = [], 0
        for name in ("device", "stream", "current_stream", "Stream", "CUDAGraph", "graph", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.said.append("wait for the device"))

    @contextmanager
    def device(self, device):
        assert device == torch.device("cuda:1")
        yield

    @contextmanager
    def stream(self, stream):
        self.said.append(f"to {stream}")
        yield
        self.said.append(f"from {stream}")

    def current_stream(self):
        return FakeStream(self, "the current stream")

    def Stream(self):
        return FakeStream(self, "the capture stream")

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.said.append("replay"))

    @contextmanager
    def graph(self, cuda_graph, *, pool, stream, capture_error_mode):
        self.said.append(f"capture on {stream} in {pool}, {capture_error_mode}")
        yield
        self.said.append("end of capture")

    def graph_pool_handle(self):
        self.num_pools += 1
        return f"pool {self.num_pools}"


class FakeStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def __str__(self):
        return self.name

    def wait_stream(self, other):
        self.cuda.said.append(f"{self} waits for {other}")


def test_a_step_is_tried_out_before_it_is_captured_and_all_share_one_pool(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    recorder = CudaGraphRecorder("cuda:1")
    one_step = [
        "the capture stream waits for the current stream",
        "to the capture stream",
        "step",
        "step",
        "from the capture stream",
        "the current stream waits for the capture stream",
        "wait for the device",
        "capture on the capture stream in pool 1, thread_local",
        "step",
        "end of capture",
    ]
    replays = [recorder.record(lambda: cuda.said.append("step")) for _ in range(2)]
    assert cuda.said == one_step * 2
    cuda.said.clear()
    for replay in replays:
        replay()
    assert cuda.said == ["replay", "replay"]


# -- models -------------------------------------------------------------------------------------------------------


def test_every_reason_against_capturing_is_given_once():
    class Plain(GatherBackend):
        can_capture = False

    spec = attention_spec(4)
    assert reasons_against(CapturableModel(), [GatherBackend(spec)]) == []
    assert reasons_against(SuccessorModel(), [Plain(spec), GatherBackend(spec), Plain(spec)]) == [
        "the model class SuccessorModel does not set can_capture",
        "the attention backend Plain does not set can_capture",
    ]


def sizes_on(device, model, backend_class=GatherBackend, **settings):
    plain = {"max_num_seqs": 4, "wanted": None, "enforce_eager": False}
    return sizes_to_capture(device, model, [backend_class(attention_spec(4))], **plain | settings)


def test_on_a_gpu_steps_are_captured_without_a_word(caplog):
    caplog.set_level("INFO")
    assert sizes_on("cuda:0", CapturableModel()) == (1, 2, 4)
    assert sizes_on("cuda", CapturableModel(), wanted=(3,)) == (3,)
    assert sizes_on("cpu", SuccessorModel()) == ()
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        (SuccessorModel(), {}, "the model class SuccessorModel does not set can_capture"),
        (SuccessorModel(), {"enforce_eager": True}, "enforce_eager is set"),
        (CapturableModel(), {"wanted": (8, 16)}, "cudagraph_capture_sizes has no size up to max_num_seqs, 4"),
    ],
)
def test_why_a_gpu_runs_without_graphs_is_in_the_log(model, settings, reason, caplog):
    caplog.set_level("INFO")
    assert sizes_on("cuda:0", model, **settings) == ()
    assert caplog.messages == [f"decode steps run without CUDA graphs: {reason}"]


def captured(model_class, folder):
    checkpoint = open_checkpoint(str(folder))
    formats = {"dtype": "float32", "device": "cpu"}
    spec = model_class.spec_from_config(checkpoint.config, block_size=4, kv_dtype="float32", **formats)
    capture_a_step(model_class.from_checkpoint(checkpoint, **formats), spec, TapeRecorder())


@pytest.mark.parametrize(
    ("model_class", "make"),
    [
        (LlamaModel, tiny_models.tiny_llama),
        (LlamaModel, tiny_models.tiny_mistral),
        (LlamaModel, tiny_models.tiny_qwen2),
        (LlamaModel, tiny_models.tiny_qwen3),
        (GemmaModel, tiny_models.tiny_gemma2),
        (GemmaModel, tiny_models.tiny_gemma3),
    ],
)
def test_a_model_that_says_that_it_can_be_captured_waits_for_nothing(model_class, make, tmp_path):
    assert model_class.can_capture
    captured(model_class, make(tmp_path))


@pytest.mark.parametrize(
    ("model_class", "make"),
    [(DeepseekModel, tiny_models.tiny_deepseek_v2), (DeepseekModel, tiny_models.tiny_deepseek_v3)],
)
def test_experts_wait_for_how_many_tokens_each_of_them_has(model_class, make, tmp_path):
    assert not model_class.can_capture
    with pytest.raises(CaptureFault, match=r"^aten\.bincount\.default waits for the device"):
        captured(model_class, make(tmp_path))


def test_the_other_models_of_experts_do_not_say_that_they_can_be_captured():
    assert not GptOssModel.can_capture
    assert not Llama4Model.can_capture
