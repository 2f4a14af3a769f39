"""What FlashAttention's functions cannot serve, which one is called, and where it is found."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace

import flash_attention_stand_ins as stand_ins
import pytest
import torch
from fake_packages import install
from flash_attention_on_cpu import MIXED, ON_CPU, SPEC, OnCPU, ThroughCopies, ThroughTorch, assert_right, case_of

from octavo.attention_backends.flash_attn import FlashAttentionBackend, FlashAttentionOptions
from octavo.attention_backends.flash_attn_providers import FlashAttention2, FlashAttention3, TorchGather, TorchPaged
from octavo.core.interfaces.attention import AttentionSpec
from octavo.errors import PluginUnsuitable

# -- what it cannot serve ---------------------------------------------------------------------------------------


class OnHopper(FlashAttentionBackend):
    """Sees a GPU that is not there, and looks for the real functions."""

    contract_version = 1
    capability = (9, 0)

    @classmethod
    def capability_of(cls, device):
        return cls.capability if device.startswith("cuda") else None


NOT_SWITCHED = (
    "torch is switched to its own FlashAttention 2, which it gives no block tables; install flash_attn_interface and "
    "call torch.nn.attention.activate_flash_attention_impl('FA3'), or give flash_attn the option "
    "provider='torch_gather', with which contexts are copied out of their pages."
)
NO_FA3 = "The module flash_attn_interface (FlashAttention 3) is not installed."
NO_FLASH_ATTN = "The package flash-attn is not installed; install it with: pip install flash-attn"
PAGES = "flash-attn reads pages of multiples of 256 tokens, and block_size is 16; set block_size=256."
NOTHING_INSTALLED = [NOT_SWITCHED, NO_FA3, PAGES, NO_FLASH_ATTN]


def test_on_a_cpu_it_says_so_and_does_not_speak_of_what_is_not_installed():
    spec = replace(SPEC, device="cpu")
    assert FlashAttentionBackend.cannot_serve(spec) == [
        "FlashAttention needs an NVIDIA GPU that torch can use, and the device is 'cpu'."
    ]
    with pytest.raises(PluginUnsuitable) as caught:
        FlashAttentionBackend(spec)
    assert str(caught.value) == (
        "flash_attn cannot serve this attention: FlashAttention needs an NVIDIA GPU that torch can use, and the device "
        "is 'cpu'."
    )


def test_a_torch_for_other_gpus_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert FlashAttentionBackend.cannot_serve(SPEC) == [
        "FlashAttention needs an NVIDIA GPU that this torch, built for ROCm, can use, and the device is 'cuda:0'."
    ]


def test_without_a_function_that_reads_pages_each_is_named_with_what_it_lacks():
    assert OnHopper.cannot_serve(SPEC) == NOTHING_INSTALLED


def test_every_reason_is_given_at_once():
    spec = replace(
        SPEC,
        dtype="float32",
        kv_dtype="fp8_e4m3",
        head_dim=260,
        head_dim_v=128,
        window=9,
        chunk=32,
        keep_first=4,
        soft_cap=30.0,
        sinks=True,
    )
    assert OnHopper.cannot_serve(spec) == [
        "FlashAttention computes in float16 and bfloat16, and dtype is 'float32'; set one of them.",
        "FlashAttention reads keys and values in the queries' dtype, float32, and kv_dtype is 'fp8_e4m3'; set "
        "kv_cache_dtype='auto'.",
        "FlashAttention takes a head_dim of at most 256 that is a multiple of 8, and it is 260.",
        "flash_attn serves values as wide as keys, and head_dim is 260, head_dim_v 128.",
        "FlashAttention keeps queries within no chunk, and chunk is 32.",
        "FlashAttention keeps no first positions in view, and keep_first is 4.",
        "FlashAttention takes no sink logits, and the layers pass some (sinks).",
        "torch's FlashAttention takes no soft cap, and soft_cap is 30.0.",
        *NOTHING_INSTALLED,
    ]


def test_latents_are_not_served():
    latents = replace(SPEC, num_kv_heads=1, head_dim=64, head_dim_v=32, value_is_key_prefix=True)
    assert OnHopper.cannot_serve(latents)[0] == (
        "flash_attn does not serve MLA, where a value is a part of its key (value_is_key_prefix)."
    )


@dataclass(frozen=True)
class Tilted(AttentionSpec):
    tilt: float = 0.5


def test_a_field_that_it_does_not_know_is_a_reason():
    assert OnHopper.cannot_serve(Tilted(**vars(SPEC)))[0] == ("Tilted has tilt, which this backend knows nothing of.")


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(OnHopper, "capability", (7, 5))
    assert OnHopper.cannot_serve(SPEC) == [
        "FlashAttention needs compute capability 8.0 or more, and 'cuda:0' has 7.5.",
        NOT_SWITCHED,
        "torch's FlashAttention 3 needs compute capability 9.x, and the device has 7.5.",
        NO_FA3,
        "FlashAttention 3 needs compute capability 8.x or 9.x, and the device has 7.5.",
        PAGES,
        NO_FLASH_ATTN,
    ]


def test_a_torch_without_block_tables_is_named(monkeypatch):
    monkeypatch.setattr("octavo.attention_backends.flash_attn_providers.operator_takes", lambda argument: False)
    assert OnHopper.cannot_serve(SPEC)[0] == (
        f"torch {torch.__version__} has no FlashAttention with block tables; install torch 2.12 or later."
    )


@pytest.mark.parametrize(("active", "is_served"), [("FA3", True), ("FA4", False), (None, False)])
def test_torch_reads_pages_once_it_is_switched_to_flash_attention_3(monkeypatch, active, is_served):
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active)
    assert (OnHopper.cannot_serve(SPEC) == []) == is_served
    if active == "FA4":
        assert OnHopper.cannot_serve(SPEC)[0].startswith("torch is switched to FA4, which it gives no block tables; ")


def test_asking_never_raises():
    for device in ("cuda", "cuda:7", "abacus:0", "meta", ""):
        assert FlashAttentionBackend.cannot_serve(replace(SPEC, device=device, dtype="float3")) == [
            f"FlashAttention needs an NVIDIA GPU that torch can use, and the device is {device!r}.",
            "FlashAttention computes in float16 and bfloat16, and dtype is 'float3'; set one of them.",
            "FlashAttention reads keys and values in the queries' dtype, float3, and kv_dtype is 'float16'; set "
            "kv_cache_dtype='auto'.",
        ]


# -- who computes it --------------------------------------------------------------------------------------------

STAND_IN = "from flash_attention_stand_ins import *\n"


def install_flash_attn(site, version="2.8.3"):
    install(site, "flash-attn", "", version=version, flash_attn=STAND_IN)


def test_flash_attn_serves_where_it_is_installed_and_pages_are_large_enough(site):
    install_flash_attn(site)
    assert OnHopper.cannot_serve(replace(SPEC, block_size=512)) == []
    assert OnHopper.cannot_serve(SPEC) == [NOT_SWITCHED, NO_FA3, PAGES]
    assert OnHopper.cannot_serve(replace(SPEC, block_size=256, soft_cap=30.0)) == []


def test_an_old_flash_attn_is_refused(site):
    install_flash_attn(site, "2.5.9.post1")
    assert OnHopper.cannot_serve(replace(SPEC, block_size=256)) == [
        NOT_SWITCHED,
        NO_FA3,
        "flash-attn 2.5.9.post1 is older than 2.6, the first that is served; upgrade it.",
    ]


def test_auto_asks_torch_and_then_the_newer_of_the_others(site, monkeypatch):
    spec = replace(SPEC, block_size=256)
    install_flash_attn(site)
    assert OnHopper(spec).provider == "flash_attn"
    install(site, "flash-attn-3", "", flash_attn_interface=STAND_IN)
    assert OnHopper(spec).provider == "flash_attn_3"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert OnHopper(spec).provider == "torch"
    assert OnHopper(replace(spec, soft_cap=30.0)).provider == "flash_attn_3"


def test_a_provider_that_is_named_is_used_or_says_why_not(site):
    install_flash_attn(site)
    for name, reasons in {
        "torch": [NOT_SWITCHED],
        "flash_attn_3": [NO_FA3],
        "flash_attn": [PAGES],
        "torch_gather": [],
    }.items():
        options = FlashAttentionOptions(provider=name)
        assert OnHopper.cannot_serve(SPEC, options) == reasons
        if reasons:
            with pytest.raises(PluginUnsuitable):
                OnHopper(SPEC, options=options)
    assert OnHopper(SPEC, options=FlashAttentionOptions(provider="torch_gather")).provider == "torch_gather"
    assert OnHopper.cannot_serve(replace(SPEC, soft_cap=30.0), FlashAttentionOptions(provider="torch_gather")) == [
        "torch's FlashAttention takes no soft cap, and soft_cap is 30.0."
    ]


def test_steps_can_be_captured_unless_contexts_are_copied():
    assert ThroughTorch(ON_CPU).can_capture
    assert not FlashAttentionBackend.can_capture
    assert not ThroughCopies(ON_CPU).can_capture


def without_gqa(function):
    """As torch 2.11 has it."""

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                    window_size=(-1, -1)):  # fmt: skip
        return function(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
            return_aux=return_aux, scale=scale, window_size=window_size, enable_gqa=True,
        )  # fmt: skip

    return varlen_attn


@pytest.mark.parametrize("change", [lambda function: function, without_gqa], ids=["2.13", "2.11"])
def test_torchs_function_is_called_as_its_version_takes_it(monkeypatch, change):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", change(stand_ins.varlen_attn))

    class Real(OnCPU):
        auto_providers = (TorchGather(),)

    assert Real.cannot_serve(ON_CPU) == []
    for window in (None, 9):
        assert_right(Real(replace(ON_CPU, window=window)), case_of(MIXED, replace(ON_CPU, window=window)))


def test_a_varlen_attn_without_a_window_is_refused(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, is_causal: None)
    assert OnHopper.cannot_serve(SPEC, FlashAttentionOptions(provider="torch_gather")) == [
        f"torch {torch.__version__} has a varlen_attn without window_size; install torch 2.12 or later."
    ]


def test_functions_of_packages_are_found_in_their_modules(site, monkeypatch):
    install_flash_attn(site)
    install(site, "flash-attn-3", "", flash_attn_interface=STAND_IN)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_ins.varlen_attn)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    for provider in (TorchPaged(), FlashAttention3(), FlashAttention2()):

        class Real(OnCPU):
            auto_providers = (provider,)

        spec = replace(ON_CPU, block_size=256)
        assert_right(Real(spec), case_of(MIXED, spec))
    assert importlib.import_module("flash_attn").__file__.startswith(str(site))
