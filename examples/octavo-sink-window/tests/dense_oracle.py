"""The model again, in float64 and without a cache: the whole text through every layer for each new token."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


class DenseOracle:
    """Greedy generation by the definition.

    Args:
        folder: With config.json and model.safetensors.

    Attributes:
        smallest_margin: By how much the best token's logit exceeded the second's, where that was closest.
    """

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.smallest_margin = float("inf")

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        text = list(prompt)
        for _ in range(num_tokens):
            best = self.logits(text).topk(2)
            self.smallest_margin = min(self.smallest_margin, float(best.values[0] - best.values[1]))
            text.append(int(best.indices[0]))
        return text[len(prompt) :]

    def logits(self, text: list[int]) -> torch.Tensor:
        """Return the scores of the token after the text. [vocab_size]"""
        weights, head_dim = self.weights, self.config["head_dim"]
        position = torch.arange(len(text))
        distance = position[:, None] - position[None, :]
        is_kept = (distance < self.config["window"]) | (position[None, :] < self.config["keep_first"])
        is_seen = (distance >= 0) & is_kept
        hidden = weights["embedding"][text] + weights["positions"][: len(text)]
        for layer in range(self.config["num_layers"]):
            normed = self._norm(hidden, weights[f"{layer}.attention_norm"])
            query, key, value = (
                (normed @ weights[f"{layer}.{name}"].T).view(len(text), -1, head_dim).transpose(0, 1)
                for name in ("query", "key", "value")
            )
            group_size = query.shape[0] // key.shape[0]
            key, value = key.repeat_interleave(group_size, 0), value.repeat_interleave(group_size, 0)
            scores = (query @ key.transpose(1, 2) * head_dim**-0.5).masked_fill(~is_seen, float("-inf"))
            attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(text), -1)
            hidden = hidden + attended @ weights[f"{layer}.output"].T
            inner = self._norm(hidden, weights[f"{layer}.mlp_norm"]) @ weights[f"{layer}.up"].T
            hidden = hidden + torch.nn.functional.silu(inner) @ weights[f"{layer}.down"].T
        return self._norm(hidden[-1], weights["final_norm"]) @ weights["lm_head"].T

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
