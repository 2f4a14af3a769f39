"""An attention backend of plain torch that can be captured: it reads the whole width of the block table, masked."""

import math

import torch

from octavo.core.interfaces import AttentionBackend


class GatherBackend(AttentionBackend):
    """For any rows, by the definition: each token fetches every slot that its row's table names, and masks."""

    contract_version = 1
    can_gather = True
    can_capture = True

    @classmethod
    def cannot_serve(cls, spec):
        reasons = [
            f"{name} is {getattr(spec, name)}." for name in ("chunk", "keep_first", "sinks") if getattr(spec, name)
        ]
        return reasons + [
            f"{name} is not float32." for name in ("dtype", "kv_dtype") if getattr(spec, name) != "float32"
        ]

    def plan(self, batch):
        num_tokens, device = batch.num_tokens, batch.slots.device
        row_of_token = torch.repeat_interleave(batch.query_starts.diff(), output_size=num_tokens)
        ends = batch.query_starts[1:][row_of_token]
        positions = batch.context_lens[row_of_token] - ends + torch.arange(num_tokens, device=device)
        block_size, width = self.spec.block_size, batch.block_table.shape[1]
        keys = torch.arange(width * block_size, device=device)
        blocks = batch.block_table[row_of_token].long()
        seen = keys <= positions[:, None]
        if self.spec.window is not None:
            seen &= keys > positions[:, None] - self.spec.window
        # Entries behind the context are anything.
        blocks = torch.where(seen.view(num_tokens, width, block_size).any(dim=2), blocks, 0)
        return blocks, seen

    def write(self, key, value, kv_cache, slots):
        block_size = self.spec.block_size
        places = slots.clamp(min=0)
        index = (torch.div(places, block_size, rounding_mode="floor"), places % block_size)
        stored = (kv_cache.unsqueeze(2),) if self.spec.value_is_key_prefix else kv_cache.unbind(1)
        for new, cache in zip((key, value), stored, strict=False):
            kept = torch.where((slots >= 0)[:, None, None], new, cache[index])
            cache.index_put_(index, kept)

    def attend(self, query, kv_cache, plan, *, sinks=None, return_lse=False):
        blocks, seen = plan
        spec = self.spec
        if spec.value_is_key_prefix:
            keys = kv_cache[blocks].flatten(1, 2).unsqueeze(2)
            values = keys[..., : spec.head_dim_v]
        else:
            keys, values = (pages[blocks].flatten(1, 2) for pages in kv_cache.unbind(1))
        keys, values = (torch.where(seen[:, :, None, None], part, 0) for part in (keys, values))
        group = spec.num_query_heads // spec.num_kv_heads
        scores = torch.einsum("tkgd,tskd->tkgs", query.unflatten(1, (-1, group)), keys) * spec.scale
        if spec.soft_cap is not None:
            scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        scores = scores.masked_fill(~seen[:, None, None], -math.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
        output = torch.einsum("tkgs,tskd->tkgd", weights, values).flatten(1, 2)
        return (output, lse.flatten(1)) if return_lse else output

    def gather(self, kv_cache, slots):
        return kv_cache.flatten(0, 1)[slots]
