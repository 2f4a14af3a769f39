"""From a plan to what model, backend and sampler are given, and back to tokens."""

import dataclasses

import numpy as np
import pytest
import torch

from octavo.core.batch import StepBatch
from octavo.core.interfaces import AttentionBackend, AttentionSpec, FullAttentionSpec, MLASpec, Model, ModelSpec
from octavo.core.kv_cache_config import KVCacheConfig, KVCacheGroup, make_groups
from octavo.core.model_runner import ModelRunner, allocate_kv_cache
from octavo.core.step_inputs import HostInputs
from octavo.core.step_plan import RowSampling, StepPlan

VOCAB_SIZE = 1000


class SuccessorModel(Model):
    """After token t comes t + 1. Attends in every layer, and adds what attention returned, which is nothing."""

    def __init__(self, num_layers=1):
        self.num_layers = num_layers
        self.rows_given_to_logits = []
        self.positions = []
        self.num_forwards = 0
        self.could_record_gradients = []

    @classmethod
    def spec_from_config(cls, config, *, dtype, device, block_size, kv_dtype):
        spec = FullAttentionSpec(block_size, num_kv_heads=1, head_dim=1, dtype=kv_dtype)
        return ModelSpec(VOCAB_SIZE, 4096, (attention_spec(block_size),), (spec,))

    @classmethod
    def from_checkpoint(cls, checkpoint, *, dtype, device):
        return cls()

    def forward(self, batch):
        self.num_forwards += 1
        self.could_record_gradients.append(torch.is_grad_enabled())
        self.positions.append(batch.positions.tolist())
        hidden = batch.token_ids.float().view(-1, 1, 1)
        for layer in range(self.num_layers):
            hidden = hidden + batch.attention(layer, hidden, hidden, hidden)
        return hidden.view(-1, 1)

    def logits(self, hidden):
        self.rows_given_to_logits.append(hidden.view(-1).tolist())
        return torch.nn.functional.one_hot((hidden.view(-1).long() + 1) % VOCAB_SIZE, VOCAB_SIZE)


class RecordingBackend(AttentionBackend):
    """Remembers what it was told, and attends to nothing."""

    def __init__(self, spec):
        super().__init__(spec)
        self.calls = []
        self.batches = []
        self.slots = []

    @classmethod
    def cannot_serve(cls, spec):
        return []

    def plan(self, batch):
        self.batches.append(batch)
        return f"plan {len(self.batches)}"

    def write(self, key, value, kv_cache, slots):
        self.calls.append(("write", kv_cache.data_ptr()))
        self.slots.append(slots.tolist())

    def attend(self, query, kv_cache, plan, *, sinks=None, return_lse=False):
        self.calls.append(("attend", kv_cache.data_ptr(), plan))
        return torch.zeros_like(query)


def attention_spec(block_size):
    return AttentionSpec(
        num_query_heads=1,
        num_kv_heads=1,
        head_dim=1,
        head_dim_v=1,
        scale=1.0,
        block_size=block_size,
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
    )


def cache_spec(block_size):
    return FullAttentionSpec(block_size, num_kv_heads=1, head_dim=1, dtype="float32")


def make_runner(block_size=16, num_layers=1, num_blocks=128):
    model = SuccessorModel(num_layers)
    backend = RecordingBackend(attention_spec(block_size))
    config = KVCacheConfig(num_blocks, make_groups([cache_spec(block_size)] * num_layers))
    return ModelRunner(model, [backend] * num_layers, config, "cpu"), model, backend


def greedy(row, **settings):
    defaults = {"num_prompt_tokens": 1, "min_tokens": 0, "masked_before_min_tokens": (), "num_logprobs": None}
    fixed = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "choice": 0}
    return RowSampling(row=row, **fixed | defaults | settings)


def make_plan(entries, *, new_rows=None, more_tables=()):
    """Return the plan of entries (first position, new token ids, block table, whether it samples)."""
    num_new = [len(token_ids) for _, token_ids, _, _ in entries]
    return StepPlan(
        request_ids=[f"r{number}" for number in range(len(entries))],
        arrivals=list(range(len(entries))),
        rows=np.arange(len(entries), dtype=np.int32),
        num_new_tokens=np.array(num_new, np.int32),
        first_positions=np.array([first for first, _, _, _ in entries], np.int32),
        token_ids=np.array([token_id for _, token_ids, _, _ in entries for token_id in token_ids], np.int32),
        samples=np.array([samples for _, _, _, samples in entries], np.bool_),
        num_decode_entries=num_new.count(1),
        block_tables=(as_table([table for _, _, table, _ in entries]), *map(as_table, more_tables)),
        new_rows=[greedy(row) for row in range(len(entries))] if new_rows is None else new_rows,
    )


def as_table(rows):
    table = np.zeros((len(rows), max(map(len, rows), default=0)), np.int32)
    for row, blocks in enumerate(rows):
        table[row, : len(blocks)] = blocks
    return table


# -- slots, positions, offsets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "position", "slot"), [([5, 12], 17, 193), ([7, 21, 9], 32, 144), ([5, 12], 0, 80), ([5, 12], 15, 95)]
)
def test_a_token_goes_to_its_blocks_slot(table, position, slot):
    runner, model, backend = make_runner(16)
    runner.run(make_plan([(position, [3], table, True)]))
    assert backend.slots == [[slot]]
    assert model.positions == [[position]]


def test_a_chunk_crosses_from_block_to_block_wherever_they_lie():
    runner, model, backend = make_runner(4)
    runner.run(make_plan([(2, [1, 2, 3, 4, 5, 6, 7], [9, 3, 20], True)]))
    assert backend.slots == [[38, 39, 12, 13, 14, 15, 80]]
    assert model.positions == [[2, 3, 4, 5, 6, 7, 8]]


def test_a_decode_and_a_chunk_are_packed_back_to_back_the_decode_first():
    runner, model, backend = make_runner(16)
    decode_table, chunk_table = range(1, 49), range(60, 76)
    runner.run(make_plan([(754, [500], decode_table, True), (0, range(254), chunk_table, False)]))
    (batch,) = backend.batches
    assert batch.query_starts.tolist() == batch.query_starts_host.tolist() == [0, 1, 255]
    assert batch.context_lens.tolist() == batch.context_lens_host.tolist() == [755, 254]
    assert batch.num_decode_rows == 1
    assert batch.num_rows == 2
    assert batch.num_tokens == 255
    assert batch.block_table.tolist() == batch.block_table_host.tolist()
    assert batch.block_table[1].tolist() == [*chunk_table, *[0] * 32]
    assert model.positions == [[754, *range(254)]]
    assert batch.slots[0] == (1 + 754 // 16) * 16 + 754 % 16
    assert batch.slots[1:].tolist() == [(60 + p // 16) * 16 + p % 16 for p in range(254)]


def test_a_backend_is_given_the_types_that_its_contract_names():
    runner, _, backend = make_runner()
    runner.run(make_plan([(3, [1], [2], True), (0, [1, 2], [3], True)]))
    (batch,) = backend.batches
    assert batch.slots.dtype == torch.int64
    for tensor in (batch.query_starts, batch.context_lens, batch.block_table):
        assert tensor.dtype == torch.int32
    for array in (batch.query_starts_host, batch.context_lens_host, batch.block_table_host):
        assert array.dtype == np.int32


# -- who samples ------------------------------------------------------------------------------------------------


def test_logits_are_computed_for_the_last_token_of_each_entry_that_samples_and_for_no_other():
    runner, model, _ = make_runner(4)
    result = runner.run(
        make_plan(
            [
                (7, [70], [1, 2], True),
                (0, [10, 11, 12], [3], False),
                (4, [20, 21], [4, 5], True),
                (0, [30, 31], [6], True),
            ]
        )
    )
    assert model.rows_given_to_logits == [[70, 21, 31]]
    assert result.token_ids == [71, 22, 32]
    assert result.failed == [False] * 3
    assert result.logprobs == [None] * 3


def test_a_step_in_which_nobody_samples_computes_no_logits():
    runner, model, _ = make_runner(4)
    plan = make_plan([(0, [1, 2, 3], [1], False)])
    result = runner.run(plan)
    assert (result.token_ids, result.failed, result.logprobs) == ([], [], [])
    assert runner.logits(plan) is None
    assert model.num_forwards == 2
    assert model.rows_given_to_logits == []


def test_each_entry_samples_as_its_row_was_told_when_it_changed_hands():
    runner, _, _ = make_runner(4)
    entry = [(0, [10, 11], [1], True), (0, [20], [2], True)]
    asks = [greedy(0), greedy(1, num_logprobs=1)]
    first = runner.run(make_plan(entry, new_rows=asks))
    assert [logprobs is None for logprobs in first.logprobs] == [True, False]
    again = runner.run(make_plan(entry, new_rows=[]))
    assert [logprobs is None for logprobs in again.logprobs] == [True, False]
    changed = runner.run(make_plan(entry, new_rows=[greedy(1)]))
    assert changed.logprobs == [None, None]


def test_rows_that_change_hands_in_an_empty_plan_are_remembered():
    runner, model, _ = make_runner(4)
    empty = runner.run(make_plan([], new_rows=[greedy(0, num_logprobs=0)]))
    assert (empty.token_ids, model.num_forwards) == ([], 0)
    result = runner.run(make_plan([(0, [5], [1], True)], new_rows=[]))
    assert result.logprobs[0].token_id == 6


def test_the_sampler_knows_the_position_that_the_new_token_will_have():
    runner, _, _ = make_runner(4)
    # Of a prompt of 5, the first output stands at position 5; token 8 would stop, and must not before output 1.
    new_rows = [greedy(0, num_prompt_tokens=5, min_tokens=1, masked_before_min_tokens=(8,))]
    last_chunk = make_plan([(3, [6, 7], [1, 2], True)], new_rows=new_rows)
    assert runner.run(last_chunk).token_ids != [8]
    assert runner.run(make_plan([(5, [7], [1, 2], True)], new_rows=[])).token_ids == [8]
    # Resumed after a preemption, in one chunk that ends with output 0: what is sampled now is output 1.
    resumed = make_plan([(3, [5, 6, 7], [1, 2], True)], new_rows=new_rows)
    assert runner.run(resumed).token_ids == [8]


# -- backends that go wrong -------------------------------------------------------------------------------------


def with_backend(**methods):
    """Return a runner of two layers whose backend has other methods."""
    runner, _, backend = make_runner(num_layers=2)
    for name, method in methods.items():
        setattr(backend, name, method)
    return runner


ONE_TOKEN = [(0, [7], [1], True)]
NAMED = "in the attention backend test_model_runner.RecordingBackend"


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (None, "NoneType"),
        ((torch.zeros(1, 1, 1), torch.zeros(1, 1)), "tuple"),
        (torch.zeros(2, 1, 1), "torch.float32 (2, 1, 1)"),
        (torch.zeros(1, 1), "torch.float32 (1, 1)"),
        (torch.zeros(1, 1, 2), "torch.float32 (1, 1, 2)"),
        (torch.zeros(1, 1, 1, dtype=torch.bfloat16), "torch.bfloat16 (1, 1, 1)"),
    ],
)
def test_what_attend_returns_must_be_a_row_for_each_query(answer, got):
    runner = with_backend(attend=lambda *_, **__: answer)
    with pytest.raises(TypeError) as caught:
        runner.run(make_plan(ONE_TOKEN))
    assert str(caught.value) == f"attend returned {got}; it must return torch.float32 (1, 1, 1)"
    assert caught.value.__notes__ == [f"{NAMED}, layer 0"]


@pytest.mark.parametrize("method", ["write", "attend"])
def test_what_a_backend_raises_in_a_layer_says_in_which(method):
    runner = with_backend()
    backend = runner._layers[0].backend
    plain = getattr(backend, method)
    num_calls = 0

    def failing_in_the_second_layer(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise OSError("a kernel failed")
        return plain(*args, **kwargs)

    setattr(backend, method, failing_in_the_second_layer)
    with pytest.raises(OSError, match=r"^a kernel failed") as caught:
        runner.run(make_plan(ONE_TOKEN))
    assert caught.value.__notes__ == [f"{NAMED}, layer 1"]


def test_what_a_backend_raises_when_it_plans_names_it():
    def failing(batch):
        raise OSError("no plan")

    with pytest.raises(OSError, match=r"^no plan") as caught:
        with_backend(plan=failing).run(make_plan(ONE_TOKEN))
    assert caught.value.__notes__ == [f"{NAMED}, planning"]


def test_values_may_be_smaller_than_keys():
    spec = dataclasses.replace(attention_spec(16), head_dim=4, head_dim_v=2)
    backend = RecordingBackend(spec)
    backend.attend = lambda query, *_, **__: torch.zeros(*query.shape[:2], 2)
    config = KVCacheConfig(8, make_groups([FullAttentionSpec(16, num_kv_heads=1, head_dim=4, dtype="float32")]))
    layers = ModelRunner(SuccessorModel(), [backend], config, "cpu")._layers
    batch = StepBatch(HostInputs([16]).make(make_plan(ONE_TOKEN)), layers)
    query, value = torch.zeros(1, 1, 4), torch.zeros(1, 1, 2)
    assert batch.attention(0, query, query, value).shape == (1, 1, 2)


# -- layers -----------------------------------------------------------------------------------------------------


def test_layers_with_equal_specs_share_one_plan_a_step_and_each_has_its_own_memory():
    runner, _, backend = make_runner(num_layers=3)
    runner.run(make_plan([(0, [1, 2], [1], True)]))
    assert len(backend.batches) == 1
    attends = [call for call in backend.calls if call[0] == "attend"]
    assert [plan for _, _, plan in attends] == ["plan 1"] * 3
    assert len({memory for _, memory, _ in attends}) == 3
    runner.run(make_plan([(2, [1], [1], True)]))
    assert len(backend.batches) == 2
    assert [call[2] for call in backend.calls if call[0] == "attend"][3:] == ["plan 2"] * 3


def test_all_rows_write_before_any_row_attends_layer_by_layer():
    runner, _, backend = make_runner(num_layers=2)
    runner.run(make_plan([(0, [1, 2], [1], True), (0, [3, 4], [2], True)]))
    assert [call[0] for call in backend.calls] == ["write", "attend", "write", "attend"]
    assert backend.calls[0][1] == backend.calls[1][1] != backend.calls[2][1]
    assert backend.slots == [[16, 17, 32, 33]] * 2


def test_layers_with_different_specs_have_plans_of_their_own():
    model = SuccessorModel(num_layers=2)
    backends = [RecordingBackend(attention_spec(16)), RecordingBackend(attention_spec(16))]
    config = KVCacheConfig(8, make_groups([cache_spec(16)] * 2))
    ModelRunner(model, backends, config, "cpu").run(make_plan([(0, [1], [1], True)]))
    assert [len(backend.batches) for backend in backends] == [1, 1]


def test_each_group_follows_its_own_block_table_and_block_size():
    model = SuccessorModel(num_layers=3)
    backends = [RecordingBackend(attention_spec(size)) for size in (4, 8, 4)]
    groups = (KVCacheGroup(cache_spec(4), (0, 2)), KVCacheGroup(cache_spec(8), (1,)))
    runner = ModelRunner(model, backends, KVCacheConfig(16, groups), "cpu")
    runner.run(make_plan([(7, [1, 2], [9, 3, 5], True)], more_tables=([[11, 2]],)))
    assert [backend.slots for backend in backends] == [[[15, 20]], [[95, 16]], [[15, 20]]]


def test_groups_share_one_buffer_a_slot_with_rows_for_the_largest_page():
    groups = (KVCacheGroup(cache_spec(4), (0, 2)), KVCacheGroup(cache_spec(8), (1,)))
    buffers = allocate_kv_cache(KVCacheConfig(16, groups), "cpu")
    assert [tuple(buffer.shape) for buffer in buffers] == [(16, cache_spec(8).page_bytes)] * 2
    assert all(buffer.dtype == torch.uint8 and not buffer.any() for buffer in buffers)


def test_layers_in_one_slot_lie_in_the_same_bytes_a_row_for_each_block():
    # Pages of 32, 64 and 48 bytes; the last is no whole part of the largest, so that its rows end with idle bytes.
    odd = FullAttentionSpec(4, num_kv_heads=3, head_dim=1, dtype="bfloat16")
    groups = (KVCacheGroup(cache_spec(4), (0, 2, 5)), KVCacheGroup(cache_spec(8), (1, 4)), KVCacheGroup(odd, (3,)))
    bound = {}

    class BindingBackend(RecordingBackend):
        def bind(self, rows, spec):
            kv_cache = super().bind(rows, spec)
            bound[len(bound)] = kv_cache
            return kv_cache

    bf16 = dataclasses.replace(attention_spec(4), num_query_heads=3, num_kv_heads=3, kv_dtype="bfloat16")
    specs = [attention_spec(4), attention_spec(8), attention_spec(4), bf16, attention_spec(8), attention_spec(4)]
    ModelRunner(SuccessorModel(6), [BindingBackend(spec) for spec in specs], KVCacheConfig(16, groups), "cpu")
    # They are bound group by group, slot by slot.
    caches = dict(zip((0, 2, 5, 1, 4, 3), bound.values(), strict=True))
    assert caches[0].data_ptr() == caches[1].data_ptr() == caches[3].data_ptr()
    assert caches[2].data_ptr() == caches[4].data_ptr()
    assert len({caches[layer].data_ptr() for layer in (0, 2, 5)}) == 3
    row_bytes = {layer: cache.stride(0) * cache.element_size() for layer, cache in caches.items()}
    assert row_bytes == dict.fromkeys(range(6), 64)
    # Block 7 is one group's at a time: what is written as group 1's shows in group 0's layer of the same slot alone.
    caches[4][7] = 1.0
    assert caches[2][7].any()
    assert not any(caches[layer].any() for layer in (0, 1, 3, 5))
    assert not caches[2][6].any()
    assert not caches[2][8].any()


def test_nothing_is_kept_for_gradients():
    runner, model, _ = make_runner()
    runner.run(make_plan([(0, [1], [1], True)]))
    assert model.could_record_gradients == [False]


# -- latents ----------------------------------------------------------------------------------------------------


class LatentModel(SuccessorModel):
    """Attends to latents of five numbers, and one that carries the position, or to keys of four and values of three."""

    key_dim, value_dim = 4, 3

    def forward(self, batch):
        num_tokens = len(batch.token_ids)
        query, latents = torch.zeros(num_tokens, 1, self.key_dim), torch.zeros(num_tokens, 6)
        return batch.latent_attention(0, query, latents, self)[:, 0]

    def absorb(self, query):
        return torch.zeros(len(query), 1, 6)

    def project(self, attended):
        return attended[..., :3]

    def expand(self, latents, heads):
        raise NotImplementedError


class GatheringBackend(RecordingBackend):
    can_gather = True

    def attend(self, query, kv_cache, plan, *, sinks=None, return_lse=False):
        return query[..., :5]

    def gather(self, kv_cache, slots):
        return torch.zeros(len(slots), 2)


def latent_runner(backend_class):
    spec = dataclasses.replace(attention_spec(4), head_dim=6, head_dim_v=5, value_is_key_prefix=True)
    config = KVCacheConfig(64, make_groups([MLASpec(4, latent_dim=5, rope_dim=1, dtype="float32")]))
    backend = backend_class(spec)
    return ModelRunner(LatentModel(), [backend], config, "cpu"), backend


def test_what_gather_returns_is_looked_at():
    runner, _ = latent_runner(GatheringBackend)
    with pytest.raises(TypeError) as error:
        runner.run(make_plan([(0, range(9), [3, 4, 5], False)]))
    assert str(error.value) == "gather returned torch.float32 (9, 2); it must return torch.float32 (9, 6)"
    assert error.value.__notes__ == [f"in the attention backend {__name__}.GatheringBackend, layer 0"]


def test_an_mla_layer_is_planned_for_the_rows_that_are_absorbed():
    class Gathers(GatheringBackend):
        def gather(self, kv_cache, slots):
            self.calls.append(("gather", slots.tolist()))
            return torch.zeros(len(slots), 6)

    class Expands(LatentModel):
        def expand(self, latents, heads):
            return torch.zeros(len(latents), 1, 4), torch.zeros(len(latents), 1, 3)

    runner, backend = latent_runner(Gathers)
    runner.model = Expands()
    runner.run(make_plan([(6, [1], [1, 2], False), (0, range(5), [3, 4], False)]))
    (batch,) = backend.batches
    assert batch.context_lens.tolist() == [7]
    assert batch.slots.tolist() == [10]
    assert [call for call in backend.calls if call[0] == "gather"] == [("gather", [12, 13, 14, 15, 16])]
    assert backend.slots == [[10, 12, 13, 14, 15, 16]]
