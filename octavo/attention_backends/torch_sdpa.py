"""The reference attention backend: plain PyTorch, any device, any head size, every ability of `AttentionSpec`.

plan     rows ──► units (torch_sdpa_plan.py)
write    keys and values ──► quantised, if the format is ──► their slots
attend   for each unit: fetch blocks into scratch ──► dense keys and values, dequantised ──► softmax ──► output rows
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention_backends.torch_sdpa_plan import Parts, Plan, Planner, Unit, as_movable, page_shape
from octavo.core.interfaces.attention import AttentionBackend, AttentionBatch, AttentionSpec
from octavo.core.interfaces.kv_cache_spec import KVCacheSpec
from octavo.core.interfaces.kv_format import DTYPE_BYTES, KV_FORMATS, SCALE_BYTES, ScaledPages
from octavo.errors import ConfigError, PluginUnsuitable

# Scores that the explicit softmax holds at a time, in numbers.
EXPLICIT_SCORES = 16 << 20
_KNOWN_FIELDS = frozenset(field.name for field in fields(AttentionSpec))


class TorchSDPABackend(AttentionBackend):
    """Fetches each row's blocks and calls `scaled_dot_product_attention`.

    Soft caps, sinks and the log-sum-exp, which that function does not offer, take a softmax written out in float32.
    """

    contract_version = 1
    can_gather = True

    def __init__(self, spec: AttentionSpec) -> None:
        """Raise PluginUnsuitable when `cannot_serve` names a reason."""
        super().__init__(spec)
        if reasons := self.cannot_serve(spec):
            raise PluginUnsuitable("torch_sdpa cannot serve this attention: " + " ".join(reasons))
        self._device = torch.device(spec.device)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._format = KV_FORMATS[spec.kv_dtype]
        self._is_quantised = self._format.is_quantised
        self._kv_dtype = self._format.torch_dtype
        # CPUs without float16 arithmetic convert it number by number inside the kernel, many times over; converting
        # once up front is some three times as fast, and more accurate.
        needs_float32 = self._device.type == "cpu" and self._dtype == torch.float16
        self._compute_dtype = torch.float32 if needs_float32 else self._dtype
        self._group_size = spec.num_query_heads // spec.num_kv_heads
        self._planner = Planner(spec, self._device)

    @classmethod
    def cannot_serve(cls, spec: AttentionSpec) -> list[str]:
        """Return every reason why this backend cannot serve `spec`, as sentences; an empty list when it can."""
        reasons = []
        for name, served in (("dtype", DTYPE_BYTES), ("kv_dtype", KV_FORMATS)):
            if getattr(spec, name) not in served:
                reasons.append(f"{name} {getattr(spec, name)!r} is not one of {', '.join(served)}.")
        try:
            torch.device(spec.device)
        except RuntimeError:
            reasons.append(f"device {spec.device!r} is not a device that torch knows.")
        if not spec.value_is_key_prefix and spec.head_dim_v != spec.head_dim:
            reasons.append(
                f"head_dim_v {spec.head_dim_v} differs from head_dim {spec.head_dim}, which is served only with "
                "value_is_key_prefix."
            )
        if unknown := [field.name for field in fields(spec) if field.name not in _KNOWN_FIELDS]:
            reasons.append(f"{type(spec).__name__} has {', '.join(unknown)}, which this backend knows nothing of.")
        return reasons

    def kv_cache_shape(self, spec: KVCacheSpec, num_blocks: int) -> tuple[int, ...]:
        """Return [num_blocks, 2, block_size, num_kv_heads, head_dim], or [num_blocks, block_size, head_dim] for MLA.

        The layout follows from `AttentionSpec` alone, so `spec` may be of any class whose page has room for it.
        """
        return (num_blocks, *page_shape(self.spec))

    def bind(self, rows: Tensor, spec: KVCacheSpec) -> Tensor | ScaledPages:
        """View a layer's bytes as `kv_cache_shape` says. Nothing is copied.

        Args:
            rows: One row a block, uint8, any stride that is a multiple of the element size, and of a scale's where
                pages hold scales. [num_blocks, >= spec.page_bytes]
            spec: What the layer keeps.

        Raises:
            ConfigError: The bytes cannot be viewed so.
        """
        shape = self.kv_cache_shape(spec, 1)[1:]
        layout_bytes = self._format.page_bytes(math.prod(shape[:-1]), shape[-1])
        alignment = SCALE_BYTES if self._format.has_page_scales else self._format.element_bytes
        if rows.dtype != torch.uint8 or rows.dim() != 2:
            raise ConfigError(f"torch_sdpa binds a matrix of uint8, not {rows.dim()} dimensions of {rows.dtype}.")
        if spec.block_size != self.spec.block_size:
            raise ConfigError(
                f"The KV-cache spec has blocks of {spec.block_size} tokens and the attention blocks of "
                f"{self.spec.block_size}. Give both the same block_size."
            )
        if spec.page_bytes < layout_bytes or rows.shape[1] < layout_bytes:
            raise ConfigError(
                f"A block of this layer takes {layout_bytes} bytes; the KV-cache spec's page has {spec.page_bytes} "
                f"and the rows have {rows.shape[1]}. Heads, head_dim or dtype of the two specs differ."
            )
        if rows.stride(1) != 1 or rows.stride(0) % alignment or rows.storage_offset() % alignment:
            raise ConfigError(
                f"Rows with strides {rows.stride()} from byte {rows.storage_offset()} on cannot be viewed as "
                f"{self.spec.kv_dtype}. Let them start at multiples of {alignment} bytes, their bytes in a row."
            )
        return self._format.view_pages(rows, shape)

    def plan(self, batch: AttentionBatch) -> Plan:
        """Prepare one step: bucket the decode rows, tile the others, and find what each reads.

        Rows without new tokens, or without context, take part in nothing.
        """
        return self._planner.plan(batch)

    def write(self, key: Tensor, value: Tensor | None, kv_cache: Tensor | ScaledPages, slots: Tensor) -> None:
        """Store the new tokens' keys and values as `kv_dtype` says; a token whose slot is -1 is not stored.

        Args:
            key: [num_tokens, num_kv_heads, head_dim]
            value: [num_tokens, num_kv_heads, head_dim_v]; None with `value_is_key_prefix`.
            kv_cache: What `bind` returned for this layer.
            slots: block * block_size + offset, int64, or -1. [num_tokens]
        """
        if not len(slots):
            return
        all_stored = slots.device.type == "cpu" and int(slots.min()) >= 0
        # Picking the stored tokens would make a GPU wait for their number. Instead a token that is not stored puts
        # back what slot 0 holds, in the null block, which no other token is written to.
        places = slots if all_stored else slots.clamp(min=0)
        index = (torch.div(places, self.spec.block_size, rounding_mode="floor"), places % self.spec.block_size)
        for new, stored in zip((key, value), self._keys_and_values(kv_cache), strict=False):
            if new is None:
                raise ValueError("write got no values, and value_is_key_prefix is off.")
            for part, pages in zip(self._as_stored(new), stored, strict=True):
                if not all_stored:
                    is_stored = (slots >= 0).view(-1, *[1] * (part.dim() - 1))
                    part = torch.where(is_stored, part, pages[index])
                pages.index_put_(index, part)

    def attend(
        self,
        query: Tensor,
        kv_cache: Tensor | ScaledPages,
        plan: Plan,
        *,
        sinks: Tensor | None = None,
        return_lse: bool = False,
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
        shape = (query.shape[0], self.spec.num_query_heads, self.spec.head_dim_v)
        everything_planned = plan.num_planned_tokens == query.shape[0]
        output = query.new_empty(shape) if everything_planned else query.new_zeros(shape)
        lse: Tensor | None = None
        if return_lse:
            lse = query.new_full(shape[:2], -math.inf, dtype=torch.float32)
            if sinks is not None:
                lse.copy_(sinks)
        is_explicit = return_lse or self.spec.sinks or self.spec.soft_cap is not None
        stored = self._keys_and_values(kv_cache)
        for unit in plan.units:
            keys, values = self._fetch(stored, plan.scratch, unit)
            queries = torch.unflatten(query[unit.tokens].to(self._compute_dtype), 1, (-1, self._group_size))
            # Both forms are [batch, heads, num_queries, head_dim]. In a bucket a KV head's queries take the place
            # of positions: grouped heads become plain attention without repeating the keys.
            #   bucket  [num_rows, num_kv_heads, group, head_dim]
            #   tile    [num_kv_heads, group, num_queries, head_dim], the keys repeated by a stride of 0
            if not unit.is_bucket:
                queries = queries.permute(1, 2, 0, 3)
                keys = keys.transpose(0, 1).expand(-1, self._group_size, -1, -1)
                values = values.transpose(0, 1).expand(-1, self._group_size, -1, -1)
            if is_explicit:
                result, unit_lse = self._explicit_softmax(queries, keys, values, unit, sinks)
                if lse is not None:
                    lse[unit.tokens] = _by_token(unit_lse[..., None], unit)[..., 0].to(lse.dtype)
            else:
                result = F.scaled_dot_product_attention(
                    queries, keys, values, attn_mask=unit.mask, is_causal=unit.is_causal, scale=self.spec.scale
                )
                # On a CPU that function answers zeros where all scores are NaN, as if nothing was to be seen. Zeros
                # are rarely the right answer, so that it costs little to ask again.
                if self._device.type == "cpu" and bool((result == 0).all(dim=-1).any()):
                    result, _ = self._explicit_softmax(queries, keys, values, unit, sinks)
            output[unit.tokens] = _by_token(result[..., : self.spec.head_dim_v], unit).to(output.dtype)
        return output if lse is None else (output, lse)

    def gather(self, kv_cache: Tensor | ScaledPages, slots: Tensor) -> Tensor:
        """Copy stored keys out of their pages, dequantised and converted to `dtype`.

        Args:
            kv_cache: What `bind` returned for this layer.
            slots: block * block_size + offset, int64; none is -1. [num_keys]

        Returns:
            [num_keys, head_dim]
        """
        index = (torch.div(slots, self.spec.block_size, rounding_mode="floor"), slots % self.spec.block_size)
        (keys,) = self._keys_and_values(kv_cache)
        return self._as_numbers([pages[index] for pages in keys])[:, 0].to(self._dtype)

    def _keys_and_values(self, kv_cache: Tensor | ScaledPages) -> tuple[Parts, ...]:
        """Return views of the keys, and of the values if they are stored.

        Each of the two is the tensors that it is stored in: numbers or codes, and scales where pages hold any.
        [num_blocks, block_size, num_kv_heads, head_dim] and [num_blocks, block_size, num_kv_heads]
        """
        parts = (kv_cache.codes, kv_cache.scales) if isinstance(kv_cache, ScaledPages) else (kv_cache,)
        if self._is_quantised:
            parts = (as_movable(parts[0]), *parts[1:])
        if self.spec.value_is_key_prefix:
            return (tuple([part.unsqueeze(2) for part in parts]),)
        return tuple(zip(*[part.unbind(1) for part in parts], strict=True))

    def _as_stored(self, vectors: Tensor) -> Parts:
        """Return what is stored of new keys or values, part by part as in `_keys_and_values`."""
        if not self._is_quantised:
            return (vectors.to(self._kv_dtype),)
        codes, scales = self._format.quantise(vectors)
        return (as_movable(codes),) if scales is None else (as_movable(codes), scales)

    def _as_numbers(self, parts: Sequence[Tensor]) -> Tensor:
        """Return what was fetched of keys or values, part by part, as numbers; of a quantised format in float32."""
        if not self._is_quantised:
            return parts[0]
        return self._format.dequantise(parts[0].view(self._kv_dtype), parts[1] if len(parts) > 1 else None)

    def _fetch(self, stored: tuple[Parts, ...], scratch: tuple[Parts, ...], unit: Unit) -> tuple[Tensor, Tensor]:
        """Copy a unit's blocks into scratch and return its keys and values.

        Keys are the values too with `value_is_key_prefix`: the caller cuts the result, because kernels want values as
        wide as keys.

        Returns:
            [num_rows, num_kv_heads, end - first, head_dim] each, in the dtype to compute in.
        """
        num_slots = len(unit.block_ids) * self.spec.block_size
        fetched = []
        for sources, buffers in zip(stored, scratch, strict=True):
            parts = []
            for source, buffer in zip(sources, buffers, strict=True):
                target = buffer[:num_slots]
                by_block = torch.unflatten(target, 0, (-1, self.spec.block_size))
                torch.index_select(source, 0, unit.block_ids, out=by_block)
                if unit.unseen is not None:
                    target.index_fill_(0, unit.unseen, 0)
                parts.append(torch.unflatten(target, 0, (unit.num_rows, -1))[:, unit.first : unit.end])
            fetched.append(self._as_numbers(parts).transpose(1, 2).to(self._compute_dtype))
        return fetched[0], fetched[-1]

    def _explicit_softmax(
        self, queries: Tensor, keys: Tensor, values: Tensor, unit: Unit, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend by the definition, in float32 at least, with soft cap, sinks and log-sum-exp.

        Args:
            queries: [batch, heads, num_queries, head_dim]
            keys: [batch, heads, num_keys, head_dim]
            values: As `keys`.
            sinks: [num_query_heads]

        Returns:
            Output, [batch, heads, num_queries, head_dim], and log-sum-exp, [batch, heads, num_queries].
        """
        precise = torch.promote_types(self._compute_dtype, torch.float32)
        transposed_keys, values = keys.to(precise).transpose(-1, -2), values.to(precise)
        if sinks is not None:
            sinks = sinks.to(precise).view(-1, self._group_size)
            sinks = sinks if unit.is_bucket else sinks[..., None]
        outputs, lses = [], []
        num_keys = keys.shape[2]
        step = max(1, EXPLICIT_SCORES // (queries.shape[0] * queries.shape[1] * num_keys))
        # A bucket is small enough by construction, and its third dimension is heads.
        step = queries.shape[2] if unit.is_bucket else step
        for start in range(0, queries.shape[2], step):
            part = queries[:, :, start : start + step].to(precise)
            scores = part @ transposed_keys * self.spec.scale
            if self.spec.soft_cap is not None:
                scores = torch.tanh(scores / self.spec.soft_cap) * self.spec.soft_cap
            if unit.is_causal:
                is_seen = torch.ones(part.shape[2], num_keys, dtype=torch.bool, device=scores.device).tril(start)
                scores = scores.masked_fill(~is_seen, -math.inf)
            elif unit.mask is not None:
                mask = unit.mask if unit.is_bucket else unit.mask[:, :, start : start + step]
                scores = scores.masked_fill(~mask, -math.inf)
            lse = torch.logsumexp(scores, dim=-1)
            if sinks is not None:
                lse = torch.logaddexp(lse, sinks)
            # A query that sees nothing has a log-sum-exp of -inf; its weights must become 0, not exp(-inf + inf).
            weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
            outputs.append(weights @ values)
            lses.append(lse)
        return torch.cat(outputs, dim=2), torch.cat(lses, dim=2)


def _by_token(result: Tensor, unit: Unit) -> Tensor:
    """Bring a unit's result back to one row per query token. [num_tokens, num_query_heads, width]"""
    if not unit.is_bucket:
        result = result.permute(2, 0, 1, 3)
    return result.flatten(1, 2)
