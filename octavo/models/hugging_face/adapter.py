"""Any causal language model of transformers, its attention replaced by Octavo's.

transformers computes everything but attention, over one row with the new tokens of all requests. See `hook` for how
attention is replaced, `probe` for how a model is looked at before its weights are read, and `check` and `positions` for
what makes sure that nothing else differs.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.model import Checkpoint, ForwardBatch, Model, ModelSpec
from octavo.models.hugging_face import check, hook, host, probe
from octavo.models.hugging_face.hook import PAGED, RECORDING
from octavo.models.hugging_face.positions import check_positions
from octavo.models.hugging_face.probe import AttentionCall, Traits
from octavo.models.kept import kept_by
from octavo.models.linear import linear


class TransformersModel(Model):
    """A causal language model of transformers.

    Two engines in one process share nothing: which step is computed is kept with the model's own modules, and by
    thread.
    """

    contract_version: ClassVar[int] = 1

    def __init__(self, host_model: Any, traits: Traits) -> None:
        """Wrap a model; `from_checkpoint` loads one.

        Args:
            host_model: A causal language model with its weights, set to the `PAGED` attention.
            traits: What its forward consists of.
        """
        for module in host_model.modules():
            if type(module) is nn.Linear:
                # The parameters stay where they are: only the forward is another one.
                module.__class__ = _FewRowsLinear
        self._layers = [_Layer(host_model.get_submodule(call.module_name), call) for call in traits.calls]
        self._slot = hook.bind(host_model)
        self._decoder = host_model.get_submodule(traits.decoder_name)
        self._rows = _GivenRows(self._decoder, traits.decoder_output_class)
        self._head = _with_replaced(host_model, traits.decoder_name, self._rows)

    @classmethod
    def spec_from_config(
        cls, config: Mapping[str, Any], *, dtype: str, device: str, block_size: int, kv_dtype: str
    ) -> ModelSpec:
        traits = _traits(host.host_config(config), dtype)
        attention_specs = tuple(
            AttentionSpec(
                num_query_heads=call.num_query_heads,
                num_kv_heads=call.num_kv_heads,
                head_dim=call.stored_head_dim,
                head_dim_v=call.stored_head_dim,
                scale=call.scale,
                block_size=block_size,
                dtype=call.dtype,
                kv_dtype=kv_dtype,
                device=device,
                window=call.mask.window,
                chunk=call.mask.chunk,
                soft_cap=call.soft_cap,
                sinks=call.sinks,
            )
            for call in traits.calls
        )
        kept = tuple(map(kept_by, attention_specs))
        return ModelSpec(traits.vocab_size, traits.max_position, attention_specs, kept)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, dtype: str, device: str) -> TransformersModel:
        host_config = host.host_config(checkpoint.config)
        traits = _traits(host_config, dtype)
        host_model = host.load(checkpoint, host_config, dtype, device, PAGED)
        model = cls(host_model, traits)
        check.check(model, host_model, traits, dtype=dtype, device=device)
        check_positions(host_model, model._slot, traits, dtype=dtype, device=device)
        return model

    def forward(self, batch: ForwardBatch) -> Tensor:
        token_ids = batch.token_ids[None]
        step = _Step(self._layers, batch)
        with self._slot.answered_by(step):
            # A mask of ones says that nothing is padding; without one, some models look for padding and warn of it.
            output = self._decoder(
                input_ids=token_ids,
                attention_mask=torch.ones_like(token_ids),
                position_ids=batch.positions[None],
                use_cache=False,
            )
        step.check_is_complete()
        rows: Tensor = output if isinstance(output, Tensor) else output[0]
        return rows.reshape(token_ids.shape[1], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        # The model's own forward, over rows that are there already: whatever it does to logits, it does here.
        placeholders = torch.zeros((1, hidden.shape[0]), dtype=torch.long, device=hidden.device)
        with self._rows.given(hidden[None]):
            logits: Tensor = self._head(input_ids=placeholders, use_cache=False).logits
        return logits[0]


@dataclass(frozen=True)
class _Layer:
    """A place in the order of attention calls: the module that makes the call, and what the call is."""

    module: nn.Module
    call: AttentionCall

    def attend(self, batch: ForwardBatch, index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        """Attend over packed tokens. [num_tokens, num_query_heads, head_dim_v]

        Args:
            index: The layer's number in the batch.
            query: [num_tokens, num_query_heads, head_dim]
            key: [num_tokens, num_kv_heads, head_dim]
            value: [num_tokens, num_kv_heads, head_dim_v]
            sinks: [num_query_heads]; read only where the call has sinks.
        """
        sinks = sinks if self.call.sinks else None
        missing_k = self.call.stored_head_dim - self.call.head_dim
        missing_v = self.call.stored_head_dim - self.call.head_dim_v
        if not missing_k and not missing_v:
            return batch.attention(index, query, key, value, sinks=sinks)
        # Zeros in queries and keys add nothing to a score, and a value's zeros come out as zeros.
        query, key, value = F.pad(query, (0, missing_k)), F.pad(key, (0, missing_k)), F.pad(value, (0, missing_v))
        return batch.attention(index, query, key, value, sinks=sinks)[..., : self.call.head_dim_v]


class _Step:
    """Answers a forward's attention calls from a step's batch."""

    def __init__(self, layers: list[_Layer], batch: ForwardBatch) -> None:
        self._layers = layers
        self._batch = batch
        self._num_calls = 0

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        layer = self._num_calls
        self._num_calls += 1
        if layer >= len(self._layers) or self._layers[layer].module is not module or mask is not None:
            raise RuntimeError(
                f"Attention call {layer} of {type(module).__name__} is not the one that was seen when the model was "
                "loaded: its forward takes another way for these tokens, and its keys and values would be mixed up."
            )
        query, key, value = (packed[0].transpose(0, 1) for packed in (query, key, value))
        output = self._layers[layer].attend(self._batch, layer, query, key, value, arguments.get("s_aux"))
        return output[None]

    def check_is_complete(self) -> None:
        if self._num_calls != len(self._layers):
            raise RuntimeError(
                f"The model attended {self._num_calls} times in a step, and {len(self._layers)} times when it was "
                "loaded: its forward took another way for these tokens."
            )


class _FewRowsLinear(nn.Linear):
    """A linear layer whose product is done as Octavo's own models do it."""

    def forward(self, rows: Tensor) -> Tensor:
        return linear(rows.flatten(0, -2), self.weight, self.bias).view(*rows.shape[:-1], self.out_features)


class _GivenRows(nn.Module):
    """Takes the decoder's place in a causal language model, and returns rows that were computed before.

    Args:
        decoder: What it stands for; it has that one's attributes.
        output_class: Of what the decoder returns.
    """

    def __init__(self, decoder: nn.Module, output_class: type[Any]) -> None:
        super().__init__()
        # Not as a part: the decoder has its place in the model already.
        vars(self)["_decoder"] = decoder
        self._output_class = output_class
        self._by_thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_decoder"], name)

    @contextmanager
    def given(self, rows: Tensor) -> Iterator[None]:
        """Return `rows` from the forwards of this thread. [1, num_rows, hidden_size]"""
        self._by_thread.rows = rows
        try:
            yield
        finally:
            del self._by_thread.rows

    def forward(self, *arguments: Any, **named: Any) -> Any:
        rows: Tensor = self._by_thread.rows
        if issubclass(self._output_class, Tensor):
            return rows
        return (rows,) if self._output_class is tuple else self._output_class(last_hidden_state=rows)


def _with_replaced(module: nn.Module, name: str, replacement: nn.Module) -> nn.Module:
    """Return a twin of `module` that shares all parts with it but the one called `name`."""
    twin = copy.copy(module)
    head, _, rest = name.partition(".")
    parts = dict(module._modules)
    part = module.get_submodule(head)
    parts[head] = _with_replaced(part, rest, replacement) if rest else replacement
    vars(twin)["_modules"] = parts
    return twin


def _traits(host_config: Any, dtype: str) -> Traits:
    hook.register()
    host_model = host.build_without_weights(host_config, dtype, RECORDING)
    return probe.record(host_model, host.max_position(host_config))
