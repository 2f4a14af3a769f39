"""How far a quantised KV cache moves a model's answers from those with keys and values as they are.

    bench = Bench(EngineConfig.from_flat(model="..."))
    exact = bench.runner(bench.dtype)
    reference = exact.logits(token_ids)
    scales = exact.scales("int8", by_head, len(token_ids))
    print(difference(bench.runner("int8", scales).logits(token_ids), reference, token_ids))

All runs are fed the same tokens, whatever they would have generated, so that one early difference does not make all
later ones. Each token's logits depend on the keys and values of all tokens up to it, read back from the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from octavo.config import EngineConfig
from octavo.core.interfaces import ModelSpec
from octavo.core.interfaces.kv_format import KV_FORMATS, ScaledPages
from octavo.core.interfaces.kv_scales import LayerScales
from octavo.core.kv_cache_config import KVCacheConfig, make_groups
from octavo.core.model_runner import ModelRunner
from octavo.core.step_plan import StepPlan
from octavo.plugins.registry import scan
from octavo.selection.select import select

# Some 400 words for models to read.
TEXT = """\
A printer who wanted to make a small book did not begin with small paper. He began with a large sheet, fresh \
from the mould, and printed eight pages on one side of it and eight on the other. Then the sheet was folded \
three times. The first fold made a folio of two leaves, the second a quarto of four, and the third an octavo of \
eight, which is sixteen pages. Whoever laid out the type had to know in advance where each page would come to \
lie, and which way up, since after the folding the fourth page stands beside the fifth, and on the sheet they \
are far apart and on their heads.

Binders kept tables for this. A table said of each page of a book on which sheet it was to be found, on which \
side, and in which corner. With such a table a workshop could print the sheets in any order, keep them in any \
pile, and still sew every book together as it should be. When a sheet was spoilt, one new sheet replaced it, and \
the other pages stayed where they were. Two editions that began alike could even share their first sheets, and \
only the later ones were set anew.

The price of the method was paid in paper. A book of seventeen pages took two sheets, and fifteen pages of the \
second stayed empty. Large sheets were cheaper to print, small ones wasted less, and most workshops settled on a \
size somewhere in the middle and did not change it for a generation. They also learned to write small. A clerk \
who kept accounts on the margins found that a number with three digits was nearly always enough, provided that \
the unit was written once at the head of each column. Where one entry was a thousand times larger than its \
neighbours, the unit had to follow it, and the small entries lost the digits that told them apart; so careful \
clerks gave each line a unit of its own, and paid for it with a little more ink.

In the spring of 1786 a bookseller in Leiden compared both kinds of ledger. He copied four hundred accounts into \
each, added them up, and looked for the largest error. With one unit for the whole page he was wrong by eleven \
guilders; with one for each line, by less than two. The second ledger was four pages longer. He wrote to his \
brother that the pages were worth it, since paper could be bought, and trust could not.
"""
# Tokens of a step: logits of so many are there at a time.
_TOKENS_PER_STEP = 64


class Bench:
    """A loaded model, to run with KV caches in one format after the other.

    Args:
        config: Whose model, dtype, device, block size and attention backend count.
    """

    def __init__(self, config: EngineConfig) -> None:
        selection = select(config, scan())
        needs = selection.needs
        self.dtype = needs.dtype
        self._needs = needs
        self._block_size = config.cache.block_size
        self._backend = selection.groups[0].backend.part
        self._model = needs.model.part.loaded.from_checkpoint(
            needs.checkpoint, dtype=needs.dtype, device=needs.device, **needs.model.part.keywords
        )

    def encode(self, text: str) -> list[int]:
        """Return a text's token ids."""
        return self._needs.checkpoint.tokenizer().encode(text)

    def runner(
        self, kv_dtype: str, scales: Sequence[LayerScales | None] = (), *, num_tokens: int = 1024
    ) -> BenchRunner:
        """Return the model with a KV cache of one format, for a request of up to `num_tokens` tokens."""
        spec: ModelSpec = self._needs.model.part.loaded.spec_from_config(
            self._needs.checkpoint.config,
            dtype=self._needs.dtype,
            device=self._needs.device,
            block_size=self._block_size,
            kv_dtype=kv_dtype,
        )
        groups = make_groups(spec.kv_cache_specs)
        block_sizes = {layer: group.spec.block_size for group in groups for layer in group.layers}
        specs = [
            replace(attention, block_size=block_sizes[layer]) for layer, attention in enumerate(spec.attention_specs)
        ]
        by_spec = {attention: self._backend.create(attention) for attention in dict.fromkeys(specs)}
        blocks_per_group = -(-num_tokens // min(block_sizes.values()))
        layout = KVCacheConfig(1 + len(groups) * blocks_per_group, groups)
        runner = ModelRunner(self._model, [by_spec[of] for of in specs], layout, self._needs.device, scales)
        return BenchRunner(runner, layout, spec, blocks_per_group)


@dataclass(frozen=True)
class BenchRunner:
    """Runs one request, which keeps all its blocks.

    Attributes:
        runner: The model and its KV cache.
        layout: Of that.
        spec: What its layers compute and keep.
        blocks_per_group: Blocks that the request has in each group.
    """

    runner: ModelRunner
    layout: KVCacheConfig
    spec: ModelSpec
    blocks_per_group: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token in all layers, scales included."""
        return sum(group.spec.bytes_per_token * len(group.layers) for group in self.layout.groups)

    def logits(self, token_ids: Sequence[int], first: int = 0) -> Tensor:
        """Feed tokens and return the logits after each, float32, on the CPU. [num_tokens - first, vocab_size]

        Args:
            token_ids: [num_tokens]
            first: Where to begin; those before have been computed.
        """
        with torch.inference_mode():
            return torch.cat(
                [
                    self._step(token_ids, start, min(start + _TOKENS_PER_STEP, len(token_ids)))
                    for start in range(first, len(token_ids), _TOKENS_PER_STEP)
                ]
            )

    def _step(self, token_ids: Sequence[int], start: int, end: int) -> Tensor:
        """Compute some tokens, each as a row of its own: rows may share blocks, and a row has logits of one token."""
        logits = self.runner.logits(self._plan(token_ids, list(range(start, end)), [1] * (end - start)))
        if logits is None:
            raise ValueError("There are no tokens to feed.")
        return logits.float().cpu()

    def fill(self, token_ids: Sequence[int], start: int, end: int) -> None:
        """Compute the tokens [start, end) in one step, as a piece of a prompt. Those before them have been computed."""
        self.runner.fill_kv_cache(self._plan(token_ids, [start], [end - start]))

    def _plan(self, token_ids: Sequence[int], first_positions: list[int], num_new_tokens: list[int]) -> StepPlan:
        """Return a step in which each row computes some tokens of the request."""
        num_rows, start = len(first_positions), first_positions[0]
        return StepPlan(
            request_ids=["bench"] * num_rows,
            arrivals=list(range(num_rows)),
            rows=np.arange(num_rows, dtype=np.int32),
            num_new_tokens=np.array(num_new_tokens, np.int32),
            first_positions=np.array(first_positions, np.int32),
            token_ids=np.array(token_ids[start : start + sum(num_new_tokens)], np.int32),
            samples=np.ones(num_rows, np.bool_),
            num_decode_entries=num_new_tokens.count(1),
            block_tables=tuple(
                np.tile(np.array(self._blocks(group_id), np.int32), (num_rows, 1))
                for group_id in range(len(self.layout.groups))
            ),
            new_rows=[],
        )

    def _blocks(self, group_id: int) -> range:
        first = 1 + group_id * self.blocks_per_group
        return range(first, first + self.blocks_per_group)

    def kept(self, num_tokens: int) -> list[Tensor]:
        """Return what each layer keeps of the first tokens, dequantised, but for scales that are not in the pages.

        The default layout of pages is assumed.

        Returns:
            Keys and values, [2, num_tokens, num_kv_heads, head_dim]; latents, [1, num_tokens, 1, head_dim].
        """
        layers: dict[int, Tensor] = {}
        for group_id, group in enumerate(self.layout.groups):
            for buffer, layer in zip(self.runner.kv_cache_buffers, group.layers, strict=False):
                attention = self.spec.attention_specs[layer]
                kinds = 1 if attention.value_is_key_prefix else 2
                shape = (kinds, group.spec.block_size, attention.num_kv_heads, attention.head_dim)
                kv_format = KV_FORMATS[attention.kv_dtype]
                pages = kv_format.view_pages(buffer[list(self._blocks(group_id))], shape)
                if isinstance(pages, ScaledPages):
                    numbers = kv_format.dequantise(pages.codes, pages.scales)
                else:
                    numbers = kv_format.dequantise(pages, None)
                layers[layer] = numbers.transpose(0, 1).flatten(1, 2)[:, :num_tokens]
        return [layers[layer] for layer in range(len(layers))]

    def scales(self, kv_dtype: str, granularity: Callable[[Tensor], Tensor], num_tokens: int) -> list[LayerScales]:
        """Return scales with which what is kept now just fits into a format, as calibrating a checkpoint makes them.

        Args:
            kv_dtype: The format.
            granularity: `by_tensor` or `by_head`.
            num_tokens: Tokens that were fed.
        """
        largest = KV_FORMATS[kv_dtype].largest
        if largest is None:
            raise ValueError(f"{kv_dtype} is not quantised and has no scales.")
        made = []
        for kept in self.kept(num_tokens):
            scales = [tuple((granularity(of_kind) / largest).tolist()) for of_kind in kept]
            made.append(LayerScales(scales[0], scales[-1]))
        return made


def by_tensor(kept: Tensor) -> Tensor:
    """Return the largest magnitude. [num_tokens, num_kv_heads, head_dim] -> [1]"""
    return kept.abs().amax().reshape(1)


def by_head(kept: Tensor) -> Tensor:
    """Return the largest magnitude of each head. [num_tokens, num_kv_heads, head_dim] -> [num_kv_heads]"""
    return kept.abs().amax(dim=(0, 2))


@dataclass(frozen=True)
class Difference:
    """How far logits are from others, over all tokens fed.

    Attributes:
        largest: The largest |a - b| of two logits.
        mean: The mean of it.
        divergence: Mean KL divergence of the predicted distributions, in nats.
        agreement: Share of tokens after which the best next token is the same.
        perplexity: Of the tokens fed, under the logits in question.
        reference_perplexity: Under the others.
    """

    largest: float
    mean: float
    divergence: float
    agreement: float
    perplexity: float
    reference_perplexity: float


def difference(logits: Tensor, reference: Tensor, token_ids: Sequence[int]) -> Difference:
    """Compare logits with those of an unquantised run, after the same tokens. [num_tokens, vocab_size] each"""
    distances = (logits - reference).abs()
    log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
    following = torch.tensor(token_ids[1:])[:, None]
    return Difference(
        largest=float(distances.max()),
        mean=float(distances.mean()),
        divergence=float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        agreement=float((logits.argmax(-1) == reference.argmax(-1)).float().mean()),
        perplexity=float((-log_q[:-1].gather(1, following).mean()).exp()),
        reference_perplexity=float((-log_p[:-1].gather(1, following).mean()).exp()),
    )
