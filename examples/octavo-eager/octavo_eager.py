"""Full attention in plain PyTorch, one row at a time: the smallest attention backend for Octavo that serves."""

from collections import Counter

import torch

from octavo.core.interfaces import AttentionBackend

# What was called how often, for whoever wants to see that this backend ran.
calls: Counter[str] = Counter()


class EagerBackend(AttentionBackend):
    """Reads each row's keys and values through its block table, and writes the softmax out."""

    contract_version = 1

    @classmethod
    def cannot_serve(cls, spec):
        served = {"window": None, "chunk": None, "soft_cap": None, "sinks": False, "value_is_key_prefix": False}
        kv_dtype = spec.kv_dtype if spec.kv_dtype in ("float32", "bfloat16", "float16", "float64") else None
        asked, served = vars(spec), vars(spec) | served | {"head_dim_v": spec.head_dim, "kv_dtype": kv_dtype}
        return [f"eager does not compute {name}={asked[name]}." for name in asked if asked[name] != served[name]]

    def plan(self, batch):
        return batch

    def write(self, key, value, kv_cache, slots):
        stored = slots >= 0
        block, offset = slots[stored] // self.spec.block_size, slots[stored] % self.spec.block_size
        kv_cache[block, 0, offset] = key[stored].to(kv_cache.dtype)
        kv_cache[block, 1, offset] = value[stored].to(kv_cache.dtype)

    def attend(self, query, kv_cache, plan, *, sinks=None, return_lse=False):
        calls["attend"] += 1
        outputs, lses = [], []
        for row, context_len in enumerate(plan.context_lens_host):
            start, end = plan.query_starts_host[row : row + 2]
            blocks = plan.block_table[row, : -(-context_len // self.spec.block_size)]
            # [2, context_len, num_kv_heads, head_dim], then queries as [num_queries, num_kv_heads, group, head_dim]
            keys, values = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context_len].double()
            queries = query[start:end].double().unflatten(1, (self.spec.num_kv_heads, -1))
            scores = torch.einsum("qhgd,khd->qhgk", queries, keys) * self.spec.scale
            own_position = torch.arange(context_len - (end - start), context_len, device=query.device)
            is_later = torch.arange(context_len, device=query.device) > own_position[:, None]
            scores.masked_fill_(is_later[:, None, None], -torch.inf)
            outputs.append(torch.einsum("qhgk,khd->qhgd", scores.softmax(-1), values).flatten(1, 2))
            lses.append(scores.logsumexp(-1).flatten(1).float())
        output = torch.cat(outputs).to(query.dtype)
        return (output, torch.cat(lses)) if return_lse else output
