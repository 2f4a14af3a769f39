"""Runs a model step by step over the engine's own pages, and gives the logits after every token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.attention_backends.torch_sdpa import TorchSDPABackend
from octavo.core.batch import LayerCache, StepBatch
from octavo.core.interfaces import AttentionBackend, Checkpoint, Model, ModelSpec
from octavo.core.kv_cache_config import KVCacheConfig, make_groups
from octavo.core.model_runner import allocate_kv_cache
from octavo.core.step_inputs import HostInputs
from octavo.core.step_plan import StepPlan


class CountingBackend(TorchSDPABackend):
    """Counts the new tokens that it attended for, and the keys that were gathered."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.num_attended = 0
        self.num_gathered = 0

    def attend(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.num_attended += len(query)
        return super().attend(query, *args, **kwargs)

    def gather(self, kv_cache: Tensor, slots: Tensor) -> Tensor:
        self.num_gathered += len(slots)
        return super().gather(kv_cache, slots)


class WithoutGather(CountingBackend):
    """What every backend was before there was a `gather`."""

    can_gather = False


@dataclass
class Request:
    """The tokens of a request that were computed, and its blocks."""

    blocks: list[int]
    num_computed: int = 0


@dataclass
class PagedModel:
    """A model with one KV-cache group, and a cache of blocks of four tokens, given out in an order that is no order."""

    model: Model
    spec: ModelSpec
    backend: AttentionBackend
    block_size: int = 4
    num_blocks: int = 257
    kv_cache_buffers: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        (group,) = make_groups(self.spec.kv_cache_specs)
        self.kv_cache_buffers = allocate_kv_cache(KVCacheConfig(self.num_blocks, (group,)), "cpu")
        self._layers = [
            LayerCache(self.backend, self.backend.bind(buffer, group.spec), 0, self.block_size)
            for buffer in self.kv_cache_buffers
        ]
        # NaN of whoever had the blocks before.
        for buffer in self.kv_cache_buffers:
            buffer.fill_(255)
        self._free = iter((np.random.default_rng(0).permutation(self.num_blocks - 1) + 1).tolist())

    def request(self) -> Request:
        return Request([])

    def step(self, pieces: Sequence[tuple[Request, Sequence[int]]]) -> Tensor:
        """Compute the next tokens of some requests, those of one token first. [num_tokens, vocab_size]"""
        first_positions = [request.num_computed for request, _ in pieces]
        for request, token_ids in pieces:
            request.num_computed += len(token_ids)
            while len(request.blocks) * self.block_size < request.num_computed:
                request.blocks.append(next(self._free))
        table = np.zeros((len(pieces), max(len(request.blocks) for request, _ in pieces)), np.int32)
        for row, (request, _) in enumerate(pieces):
            table[row, : len(request.blocks)] = request.blocks
        num_new_tokens = [len(token_ids) for _, token_ids in pieces]
        plan = StepPlan(
            request_ids=[str(row) for row in range(len(pieces))],
            arrivals=list(range(len(pieces))),
            rows=np.arange(len(pieces), dtype=np.int32),
            num_new_tokens=np.array(num_new_tokens, np.int32),
            first_positions=np.array(first_positions, np.int32),
            token_ids=np.array([token_id for _, token_ids in pieces for token_id in token_ids], np.int32),
            samples=np.ones(len(pieces), np.bool_),
            num_decode_entries=num_new_tokens.count(1),
            block_tables=(table,),
            new_rows=[],
        )
        inputs = HostInputs([self.block_size]).make(plan)
        with torch.inference_mode():
            return self.model.logits(self.model.forward(StepBatch(inputs, self._layers)))

    def in_chunks(self, token_ids: Sequence[int], chunk_size: int) -> Tensor:
        """Compute a new request's tokens, so many a step. [num_tokens, vocab_size]"""
        request = self.request()
        return torch.cat([self.step([(request, chunk)]) for chunk in chunks(token_ids, chunk_size)])


def chunks(token_ids: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    return (token_ids[start : start + size] for start in range(0, len(token_ids), size))


def paged(
    model_class: type[Model],
    checkpoint: Checkpoint,
    backend_class: type[AttentionBackend] = CountingBackend,
    *,
    dtype: str = "float32",
) -> PagedModel:
    """Load a model whose layers all have equal specs, to run on the CPU."""
    where = {"dtype": dtype, "device": "cpu"}
    spec = model_class.spec_from_config(checkpoint.config, block_size=4, kv_dtype=dtype, **where)
    return PagedModel(model_class.from_checkpoint(checkpoint, **where), spec, backend_class(spec.attention_specs[0]))
