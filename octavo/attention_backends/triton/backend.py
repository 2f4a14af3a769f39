"""The triton attention backend: its contract. What it does is in `paged_attention.py`, and the kernels beside it.

Neither Triton nor a GPU is needed to import this module, or to ask `cannot_serve`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from octavo.attention_backends.triton.availability import look_around, reasons_against
from octavo.attention_backends.triton.options import TritonOptions
from octavo.attention_backends.triton.pages import BoundPages, bind_pages
from octavo.core.interfaces.attention import AttentionBackend, AttentionBatch, AttentionSpec
from octavo.core.interfaces.kv_cache_spec import KVCacheSpec
from octavo.errors import PluginUnsuitable

if TYPE_CHECKING:
    from octavo.attention_backends.triton.paged_attention import Plan


class TritonBackend(AttentionBackend):
    """Paged attention in Triton kernels: prefill, decode in one pass or split, all rules and formats of the contract.

    On a CPU the kernels run through Triton's interpreter, which is for tests.
    """

    contract_version = 1
    Options: ClassVar[type[TritonOptions]] = TritonOptions
    can_gather = True
    can_capture = True

    def __init__(self, spec: AttentionSpec, options: TritonOptions | None = None) -> None:
        """Raise PluginUnsuitable when `cannot_serve` names a reason."""
        super().__init__(spec)
        found = look_around(spec.device)
        reasons = reasons_against(spec, found)
        if reasons or found.device is None:
            raise PluginUnsuitable("triton cannot serve this attention: " + " ".join(reasons))
        # Imported here, since it needs Triton.
        from octavo.attention_backends.triton.paged_attention import PagedAttention

        self._attention = PagedAttention(spec, found.device, options or TritonOptions())

    @classmethod
    def cannot_serve(cls, spec: AttentionSpec) -> list[str]:
        """Return every reason why this backend cannot serve `spec`, as sentences; an empty list when it can."""
        return reasons_against(spec, look_around(spec.device))

    def bind(self, rows: Tensor, spec: KVCacheSpec) -> BoundPages:
        """View a layer's bytes as `kv_cache_shape` says. Nothing is copied.

        Args:
            rows: One row a block, uint8, starting at multiples of the element size, and of four bytes where pages hold
                scales. [num_blocks, >= spec.page_bytes]
            spec: What the layer keeps.

        Raises:
            ConfigError: The bytes cannot be viewed so.
        """
        return bind_pages(rows, self.spec, spec, self.kv_cache_shape(spec, 1)[1:])

    def plan(self, batch: AttentionBatch) -> Plan:
        """Cut a step into programs of the kernels.

        Of a batch of decode rows alone, only the shapes count: the kernels read lengths and tables on the device when
        they run, so that a captured step can be replayed with others.
        """
        return self._attention.plan(batch)

    def write(self, key: Tensor, value: Tensor | None, kv_cache: BoundPages, slots: Tensor) -> None:
        """Store the new tokens' keys and values, converted to `kv_dtype` or quantised as `KVFormat.quantise` does.

        Args:
            key: [num_tokens, num_kv_heads, head_dim]
            value: [num_tokens, num_kv_heads, head_dim_v]; None with `value_is_key_prefix`.
            kv_cache: What `bind` returned for this layer.
            slots: block * block_size + offset, int64, or -1 for a token that is not stored. [num_tokens]

        Raises:
            ValueError: Values are missing, or there are some although keys are the values too.
        """
        if (value is None) != self.spec.value_is_key_prefix:
            raise ValueError(
                f"write got {'no' if value is None else 'also'} values, and value_is_key_prefix is "
                f"{'on' if self.spec.value_is_key_prefix else 'off'}."
            )
        self._attention.write(key, value, kv_cache, slots)

    def attend(
        self, query: Tensor, kv_cache: BoundPages, plan: Plan, *, sinks: Tensor | None = None, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each new token to its row's context, itself included.

        A token that sees nothing gets zeros, and the log-sum-exp of its sinks alone (-inf without).

        Args:
            query: New tokens of all rows, back to back. [num_tokens, num_query_heads, head_dim]
            kv_cache: What `bind` returned for this layer.
            plan: What `plan` returned for this step.
            sinks: This layer's sink logits, when the spec says that there are any. [num_query_heads]
            return_lse: Whether to return the log of the softmax's denominator too.

        Returns:
            One row per query row, same order and dtype. [num_tokens, num_query_heads, head_dim_v]
            With `return_lse` also the natural log-sum-exp of the scores, sinks included, float32.
            [num_tokens, num_query_heads]

        Raises:
            ValueError: `sinks` is missing although the spec has sinks, or given although it has none.
        """
        if (sinks is not None) != self.spec.sinks:
            raise ValueError(f"The spec says sinks={self.spec.sinks}, and attend got sinks={sinks is not None}.")
        output, lse = self._attention.attend(query, kv_cache, plan, sinks, return_lse)
        return output if lse is None else (output, lse)

    def gather(self, kv_cache: BoundPages, slots: Tensor) -> Tensor:
        """Copy stored keys out of their pages, converted to `dtype`, dequantised where they are codes.

        Args:
            kv_cache: What `bind` returned for this layer.
            slots: block * block_size + offset, int64; none is -1. [num_keys]

        Returns:
            [num_keys, head_dim]
        """
        return self._attention.gather(kv_cache, slots)
