"""What the machine can do at most, and what of it a model's weights leave to one stream."""

from dataclasses import dataclass

import pytest
import torch

from octavo import LLM
from octavo.benchmark.limits import MachineLimits, measure_limits, weight_bytes_per_token
from octavo.models.checkpoint import open_checkpoint
from octavo.models.llama import LlamaModel
from octavo.testing import tiny_models

# The tiny Llama's: in each of two layers q and o, k and v, the MLP's three, and two norms; then the norm and the head.
TINY_WEIGHTS = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 512 * 64


def test_the_limits_are_rates_of_this_machine():
    limits = measure_limits("bfloat16", num_read_bytes=1 << 20, num_matrix_rows=64)
    assert (limits.dtype, limits.num_threads) == ("bfloat16", torch.get_num_threads())
    # From the slowest machine that could run this to well past the fastest there is.
    assert 1e7 < limits.read_bytes_per_s < 1e14
    assert 1e6 < limits.matmul_flop_per_s < 1e17


@pytest.mark.parametrize(("work", "rate"), [("sum", "read_bytes_per_s"), ("__matmul__", "matmul_flop_per_s")])
def test_the_best_of_several_tries_counts(monkeypatch, work, rate):
    now, seconds = [0.0], iter([9.0, 5.0, 2.0, 4.0, 8.0, 8.0, 8.0])

    def slow(*arguments):
        now[0] += next(seconds)

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.Tensor, "sum", lambda tensor: now.__setitem__(0, now[0] + 1.0))
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda left, right: now.__setitem__(0, now[0] + 1.0))
    monkeypatch.setattr(torch.Tensor, work, slow)
    limits = measure_limits("float32", num_read_bytes=800, num_matrix_rows=10)
    assert getattr(limits, rate) == {"read_bytes_per_s": 800, "matmul_flop_per_s": 2000}[rate] / 2.0


def test_a_stream_reads_its_weights_once_a_token():
    assert MachineLimits(2e10, 4e11, "bfloat16", 2).tokens_per_s(250_000_000) == 80.0


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_a_token_reads_all_weights_but_an_embedding_that_is_not_the_head(tmp_path, is_tied, dtype, num_bytes):
    folder = tiny_models.tiny_llama(tmp_path, tie_word_embeddings=is_tied)
    model = LlamaModel.from_checkpoint(open_checkpoint(str(folder)), dtype=dtype, device="cpu")
    found = weight_bytes_per_token(model, 512)
    # The frequencies of the rotary embedding are a few numbers more.
    assert 0 <= found - TINY_WEIGHTS * num_bytes <= 256


def test_a_model_that_runs_through_transformers_is_counted_too(tmp_path):
    folder = tiny_models.tiny_llama(tmp_path)
    with LLM(str(folder), model_impl="transformers", num_kv_blocks=8) as llm:
        model = llm.selection.needs.model.part.loaded.from_checkpoint(
            llm.selection.needs.checkpoint, dtype="float32", device="cpu"
        )
    found = weight_bytes_per_token(model, 512)
    assert 0 <= found - TINY_WEIGHTS * 4 <= 256


@dataclass
class Layer:
    weight: torch.Tensor
    parts: tuple[torch.Tensor, ...]


class Holder:
    def __init__(self, **held):
        self.__dict__.update(held)


def test_tensors_that_share_memory_count_once():
    stacked = torch.zeros(8, 4)
    model = Holder(layers=[Layer(stacked, (stacked[:4], stacked[4:]))], again=stacked, itself=None)
    model.itself = model
    assert weight_bytes_per_token(model, 100) == stacked.nbytes


def test_a_part_of_a_larger_buffer_counts_as_what_it_is():
    buffer = torch.zeros(1000)
    model = Holder(weight=buffer[:16].view(4, 4), bias=buffer[16:20])
    assert weight_bytes_per_token(model, 100) == 80


def test_of_tables_by_id_the_largest_counts():
    model = Holder(embedding=torch.zeros(100, 4), head=torch.zeros(100, 8), other=torch.zeros(3))
    assert weight_bytes_per_token(model, 100) == 100 * 8 * 4 + 12
