"""Where FlashAttention's kernels come from, and how each of them is called.

    provider        function                                        pages          soft cap
    torch           torch.nn.attention.varlen.varlen_attn, FA3      of any size    no
    flash_attn_3    flash_attn_interface.flash_attn_with_kvcache    of any size    yes
    flash_attn      flash_attn.flash_attn_varlen_func               256, 512 ...   yes
    torch_gather    torch.nn.attention.varlen.varlen_attn, FA2      none           no

What the functions take is in their sources: torch/nn/attention/varlen.py and _fa3.py of torch 2.13, and of
https://github.com/Dao-AILab/flash-attention the files hopper/flash_attn_interface.py and hopper/flash_api.cpp,
flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.core.interfaces.attention import AttentionSpec

# The first flash-attn with block tables and a soft cap in flash_attn_varlen_func.
OLDEST_FLASH_ATTN = (2, 6)


@dataclass(frozen=True)
class Step:
    """What is the same in all layers of a step.

    Attributes:
        query_starts: Offsets of the rows' new tokens, int32. [num_rows + 1]
        key_starts: Offsets of the rows' keys, as if they lay back to back, int32. [num_rows + 1]
        key_lens: Keys of each row, int32. [num_rows]
        block_table: Block ids by row, int32; None where keys do lie back to back. [num_rows, max_blocks]
        max_queries: No row has more new tokens.
        max_keys: No row has more keys.
        is_causal: False where each row has one query, which sees all keys up to the last.
    """

    query_starts: Tensor
    key_starts: Tensor
    key_lens: Tensor
    block_table: Tensor | None
    max_queries: int
    max_keys: int
    is_causal: bool


class Provider(ABC):
    """One function that computes FlashAttention, and what is needed for it.

    Attributes:
        name: As the option `provider` says it.
        reads_pages: Whether keys are found through a block table. Otherwise they are copied next to each other first.
    """

    name: ClassVar[str]
    reads_pages: ClassVar[bool] = True

    @abstractmethod
    def reasons_against(self, spec: AttentionSpec, capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield every reason why this function cannot serve, as sentences with the way out.

        Args:
            capability: The device's compute capability, such as (9, 0). Without a GPU it is None: then only what the
                attention itself asks for is looked at, and not what is installed.
        """

    @abstractmethod
    def load(self) -> Callable[..., Any]:
        """Import the function. Called once a backend, when there are no reasons against it."""

    @abstractmethod
    def attend(
        self, function: Callable[..., Any], query: Tensor, keys: Tensor, values: Tensor, step: Step, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Call the function.

        Args:
            function: What `load` returned.
            query: [num_tokens, num_query_heads, head_dim]
            keys: [num_blocks, block_size, num_kv_heads, head_dim], or [num_keys, num_kv_heads, head_dim]
            values: As `keys`.

        Returns:
            The output, as `query`, and the natural log-sum-exp as the function has it.
        """


class _TorchProvider(Provider):
    """Through torch.nn.attention.varlen, which calls whatever FlashAttention torch is switched to."""

    def load(self) -> Callable[..., Any]:
        # Imported late: it takes more than a second, for it registers operators.
        varlen = importlib.import_module("torch.nn.attention.varlen")
        accepted = inspect.signature(varlen.varlen_attn).parameters

        def call(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
            # torch 2.11 has no enable_gqa, and groups heads without being told.
            given = {name: value for name, value in keywords.items() if name != "enable_gqa" or name in accepted}
            result: tuple[Tensor, Tensor] = varlen.varlen_attn(
                *arguments, return_aux=varlen.AuxRequest(lse=True), **given
            )
            return result

        return call

    def attend(
        self, function: Callable[..., Any], query: Tensor, keys: Tensor, values: Tensor, step: Step, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        # With a block table lengths alone are given; FlashAttention 3 refuses offsets beside it.
        paging = {} if step.block_table is None else {"seqused_k": step.key_lens, "block_table": step.block_table}
        output, lse = function(
            query,
            keys,
            values,
            step.query_starts,
            step.key_starts if step.block_table is None else None,
            step.max_queries,
            step.max_keys,
            scale=spec.scale,
            # torch takes (-1, 0) for "causal".
            window_size=_window(step, spec, unlimited=(-1, 0)),
            enable_gqa=spec.num_query_heads != spec.num_kv_heads,
            **paging,
        )
        return output, lse

    def _shared_reasons(self, spec: AttentionSpec) -> Iterator[str]:
        if spec.soft_cap is not None:
            yield f"torch's FlashAttention takes no soft cap, and soft_cap is {spec.soft_cap}."


class TorchPaged(_TorchProvider):
    """torch with FlashAttention 3, the only one of its kernels that reads pages."""

    name = "torch"

    def reasons_against(self, spec: AttentionSpec, capability: tuple[int, int] | None) -> Iterator[str]:
        yield from self._shared_reasons(spec)
        if capability is None:
            return
        if not operator_takes("block_table"):
            yield f"torch {torch.__version__} has no FlashAttention with block tables; install torch 2.12 or later."
        elif (active := active_implementation()) != "FA3":
            yield (
                f"torch is switched to {active or 'its own FlashAttention 2'}, which it gives no block tables; install "
                "flash_attn_interface and call torch.nn.attention.activate_flash_attention_impl('FA3'), or give "
                "flash_attn the option provider='torch_gather', with which contexts are copied out of their pages."
            )
        if capability[0] != 9:
            yield (
                "torch's FlashAttention 3 needs compute capability 9.x, and the device has "
                f"{capability[0]}.{capability[1]}."
            )


class TorchGather(_TorchProvider):
    """torch's own FlashAttention 2, over a copy of each context."""

    name = "torch_gather"
    reads_pages = False

    def reasons_against(self, spec: AttentionSpec, capability: tuple[int, int] | None) -> Iterator[str]:
        yield from self._shared_reasons(spec)
        if capability is None:
            return
        varlen = importlib.import_module("torch.nn.attention.varlen")
        if "window_size" not in inspect.signature(varlen.varlen_attn).parameters:
            yield f"torch {torch.__version__} has a varlen_attn without window_size; install torch 2.12 or later."


class FlashAttention3(Provider):
    """The Hopper kernels of the flash-attention project, called directly."""

    name = "flash_attn_3"
    module: ClassVar[str] = "flash_attn_interface"

    def reasons_against(self, spec: AttentionSpec, capability: tuple[int, int] | None) -> Iterator[str]:
        if capability is None:
            return
        if not is_importable(self.module):
            yield f"The module {self.module} (FlashAttention 3) is not installed."
        if capability[0] not in (8, 9):
            yield (
                "FlashAttention 3 needs compute capability 8.x or 9.x, and the device has "
                f"{capability[0]}.{capability[1]}."
            )

    def load(self) -> Callable[..., Any]:
        function: Callable[..., Any] = importlib.import_module(self.module).flash_attn_with_kvcache
        return function

    def attend(
        self, function: Callable[..., Any], query: Tensor, keys: Tensor, values: Tensor, step: Step, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        output, lse, *_ = function(
            query,
            keys,
            values,
            cache_seqlens=step.key_lens,
            page_table=step.block_table,
            cu_seqlens_q=step.query_starts,
            max_seqlen_q=step.max_queries,
            softmax_scale=spec.scale,
            causal=step.is_causal,
            window_size=_window(step, spec, unlimited=(-1, -1)),
            softcap=spec.soft_cap or 0.0,
            return_softmax_lse=True,
        )
        return output, lse


class FlashAttention2(Provider):
    """The package flash-attn."""

    name = "flash_attn"
    module: ClassVar[str] = "flash_attn"
    package: ClassVar[str] = "flash-attn"
    page_multiple: ClassVar[int] = 256

    def reasons_against(self, spec: AttentionSpec, capability: tuple[int, int] | None) -> Iterator[str]:
        if spec.block_size % self.page_multiple:
            yield (
                f"{self.package} reads pages of multiples of {self.page_multiple} tokens, and block_size is "
                f"{spec.block_size}; set block_size={self.page_multiple}."
            )
        if capability is None:
            return
        version = version_of(self.package)
        if version is None:
            yield f"The package {self.package} is not installed; install it with: pip install {self.package}"
        elif tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_FLASH_ATTN:
            yield (
                f"{self.package} {version} is older than {'.'.join(map(str, OLDEST_FLASH_ATTN))}, the first that is "
                "served; upgrade it."
            )

    def load(self) -> Callable[..., Any]:
        function: Callable[..., Any] = importlib.import_module(self.module).flash_attn_varlen_func
        return function

    def attend(
        self, function: Callable[..., Any], query: Tensor, keys: Tensor, values: Tensor, step: Step, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        output, lse, *_ = function(
            query,
            keys,
            values,
            step.query_starts,
            # Beside a block table these give the lengths alone.
            step.key_starts,
            step.max_queries,
            step.max_keys,
            softmax_scale=spec.scale,
            causal=step.is_causal,
            window_size=_window(step, spec, unlimited=(-1, -1)),
            softcap=spec.soft_cap or 0.0,
            return_attn_probs=True,
            block_table=step.block_table,
        )
        return output, lse


# The order in which provider="auto" asks. What copies is never taken by itself: it moves each context three times.
PAGED_PROVIDERS: tuple[Provider, ...] = (TorchPaged(), FlashAttention3(), FlashAttention2())
PROVIDERS = MappingProxyType({provider.name: provider for provider in (*PAGED_PROVIDERS, TorchGather())})


def _window(step: Step, spec: AttentionSpec, *, unlimited: tuple[int, int]) -> tuple[int, int]:
    """Return how many keys before and after itself a query sees, itself not counted; -1 is no limit.

    torch's docstring calls the first number "sliding window of size W"; the kernel, which is the same one, lets a query
    at i see the keys from i - W to i, so W + 1 of them.

    Args:
        unlimited: What stands for "causal" without a window.
    """
    if spec.window is not None:
        return spec.window - 1, 0
    # The last key is the only query's own. Without the bound on the right, kernels pack the heads of a group.
    return unlimited if step.is_causal else (-1, -1)


@functools.cache
def operator_takes(argument: str) -> bool:
    """Whether torch's FlashAttention operator has an argument of that name."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    return any(known.name == argument for known in schema.arguments)


def active_implementation() -> str | None:
    """Return what torch's FlashAttention was replaced by, such as "FA3"; None for its own kernels."""
    active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return None if active is None else str(active)


def version_of(package: str) -> str | None:
    """Return an installed package's version; None where it is not installed.

    Packages are asked for, not modules: other ones put modules of their own under the name flash_attn.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_importable(module: str) -> bool:
    """Whether a module would be found. It is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        # It was imported already, by something that says nothing of where it comes from.
        return True
