"""A Llama for transformers to know by a name of its own, with one oddity at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel


class OddConfig(transformers.LlamaConfig):
    model_type = "odd"
    oddity: str = "none"


class OddAttention(LlamaAttention):
    """Llama's attention, called in another way."""

    def forward(self, hidden_states: Tensor, *, attention_mask: Tensor | None = None, **arguments: Any) -> Any:
        match self.config.oddity:
            case "computes attention itself":
                return self._itself(hidden_states, arguments["position_embeddings"])
            case "adds a bias to the mask" if attention_mask is not None:
                attention_mask = with_bias(attention_mask)
            case "adds a bias when it is long" if attention_mask is not None and hidden_states.shape[1] > 100:
                attention_mask = with_bias(attention_mask)
            case "takes no mask":
                attention_mask = None
        output, weights = super().forward(hidden_states=hidden_states, attention_mask=attention_mask, **arguments)
        if self.config.oddity == "attends twice":
            output = (
                output + super().forward(hidden_states=hidden_states, attention_mask=attention_mask, **arguments)[0]
            )
        return output, weights

    def _itself(self, hidden_states: Tensor, position_embeddings: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        heads = [projection(hidden_states).view(shape).transpose(1, 2) for projection in (self.q_proj, self.k_proj)]
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        output = F.scaled_dot_product_attention(*heads, value, is_causal=True, enable_gqa=True)
        return self.o_proj(output.transpose(1, 2).flatten(2)), None


def with_bias(mask: Tensor) -> Tensor:
    positions = torch.arange(mask.shape[-1], device=mask.device)
    return mask - 0.1 * (positions[:, None] - positions).abs()


class NoScores(nn.Module):
    """Stands where attention would, and gives each token back as it is."""

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Any:
        return hidden_states, None


class OddMLP(nn.Module):
    """An MLP that does something besides."""

    def __init__(self, mlp: nn.Module, oddity: str) -> None:
        super().__init__()
        self.mlp = mlp
        self.oddity = oddity
        if oddity == "has a convolution":
            self.conv = nn.Conv1d(64, 64, 3, padding=2, groups=64)

    def forward(self, hidden_states: Tensor) -> Tensor:
        output: Tensor = self.mlp(hidden_states)
        match self.oddity:
            case "has a convolution":
                num_tokens = hidden_states.shape[1]
                return output + self.conv(hidden_states.transpose(1, 2))[..., :num_tokens].transpose(1, 2)
            case "shifts tokens":
                return output + F.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return output


class OddModel(LlamaModel):
    config: OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = NoScores() if config.oddity == "has no attention" else OddAttention(config, index)
            layer.mlp = OddMLP(layer.mlp, config.oddity)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **arguments: Any) -> Any:
        if self.config.oddity == "ignores positions":
            position_ids = None
        output = super().forward(input_ids, position_ids=position_ids, **arguments)
        if self.config.oddity == "follows the longest" and position_ids is not None:
            output.last_hidden_state = output.last_hidden_state * (1.5 if position_ids.max() > 100 else 1.0)
        return output


class OddForCausalLM(transformers.LlamaForCausalLM):
    config_class = OddConfig
    config: OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.model = OddModel(config)
        self.post_init()

    def forward(self, input_ids: Tensor, **arguments: Any) -> Any:
        output = super().forward(input_ids, **arguments)
        if self.config.oddity == "looks at ids again":
            output.logits = output.logits + F.one_hot(input_ids, 512) * 9
        return output


@contextmanager
def known_to_transformers() -> Iterator[None]:
    transformers.AutoConfig.register("odd", OddConfig)
    transformers.AutoModelForCausalLM.register(OddConfig, OddForCausalLM)
    try:
        yield
    finally:
        # transformers offers no way back.
        transformers.CONFIG_MAPPING._extra_content.pop("odd")
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(OddConfig)


def save(folder: Path, oddity: str) -> Path:
    """Save a tiny odd model in `folder` and return it."""
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OddForCausalLM(OddConfig(oddity=oddity, **shape))
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=1.0 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder
