"""The FlashAttention backend over stand-ins of its functions, on a CPU and in float32 too. The rest is the same."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import MappingProxyType

import flash_attention_stand_ins as stand_ins
import numpy as np
from torch.nn.attention.varlen import AuxRequest

from octavo.attention_backends.flash_attn import FlashAttentionBackend
from octavo.attention_backends.flash_attn_providers import FlashAttention2, FlashAttention3, TorchGather, TorchPaged
from octavo.core.interfaces.attention import AttentionSpec
from octavo.testing.attention.oracle import PagedCase, make_case

SPEC = AttentionSpec(
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    head_dim_v=16,
    scale=0.3,
    block_size=16,
    dtype="float16",
    kv_dtype="float16",
    device="cuda:0",
)
ON_CPU = replace(SPEC, device="cpu", dtype="float32", kv_dtype="float32")
MIXED = [(1, 20), (1, 33), (6, 26), (5, 5)]


class TorchPagedStandIn(TorchPaged):
    def reasons_against(self, spec, capability):
        yield from self._shared_reasons(spec)

    def load(self):
        return functools.partial(stand_ins.varlen_attn, return_aux=AuxRequest(lse=True))


class TorchGatherStandIn(TorchPagedStandIn):
    name = "torch_gather"
    reads_pages = False


class FlashAttention3StandIn(FlashAttention3):
    def reasons_against(self, spec, capability):
        yield from ()

    def load(self):
        return stand_ins.flash_attn_with_kvcache


class FlashAttention2StandIn(FlashAttention2):
    def reasons_against(self, spec, capability):
        if spec.block_size % self.page_multiple:
            yield f"block_size {spec.block_size} is not a multiple of {self.page_multiple}."

    def load(self):
        return stand_ins.flash_attn_varlen_func


assert TorchGather.reads_pages is TorchGatherStandIn.reads_pages
PROVIDERS = (TorchPagedStandIn(), FlashAttention3StandIn(), FlashAttention2StandIn(), TorchGatherStandIn())


class OnCPU(FlashAttentionBackend):
    """Takes a CPU for a Hopper GPU."""

    contract_version = 1
    dtypes = ("float16", "bfloat16", "float32")
    providers = MappingProxyType({provider.name: provider for provider in PROVIDERS})
    auto_providers = PROVIDERS[:3]

    @classmethod
    def capability_of(cls, device):
        return (9, 0) if device == "cpu" else super().capability_of(device)


class ThroughTorch(OnCPU):
    contract_version = 1
    # The backend itself says it of each object.
    can_capture = True
    auto_providers = PROVIDERS[:1]


class ThroughFlashAttn3(OnCPU):
    contract_version = 1
    # The backend itself says it of each object.
    can_capture = True
    auto_providers = PROVIDERS[1:2]


class ThroughFlashAttn(OnCPU):
    contract_version = 1
    # The backend itself says it of each object.
    can_capture = True
    auto_providers = PROVIDERS[2:3]


class ThroughCopies(OnCPU):
    contract_version = 1
    auto_providers = PROVIDERS[3:]


def case_of(lengths, spec=ON_CPU, **settings) -> PagedCase:
    return make_case(np.random.default_rng(0), spec, lengths, **settings)


def assert_right(backend, case: PagedCase) -> None:
    output, lse = case.run(backend)
    wanted_output, wanted_lse = case.expected()
    np.testing.assert_allclose(output.double().numpy(), wanted_output, rtol=5e-6, atol=5e-6)
    np.testing.assert_allclose(lse.double().numpy(), wanted_lse, rtol=5e-6, atol=5e-6)
