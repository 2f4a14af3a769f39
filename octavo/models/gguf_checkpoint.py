"""A GGUF file as a checkpoint: llama.cpp's names and keys become Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models import gguf_gemma
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_keys import ArchitectureKeys
from octavo.models.unserved import refuse_unserved

if TYPE_CHECKING:
    from octavo.core.interfaces.model import Tokenizer

# GGUF architecture -> Hugging Face model_type. "llama" covers Llama and Mistral.
SUPPORTED_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"} | gguf_gemma.ARCHITECTURES

_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Divisors of the rope frequencies: metadata in the shape of a tensor, which goes into the config.
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFCheckpoint:
    """One GGUF file of a Llama, Mistral, Qwen2, Qwen3, Gemma 2 or Gemma 3 model.

    Raises:
        CheckpointError: The file is broken, or lacks something that the config needs.
        UnsupportedModelError: The architecture is another one, or a key asks for arithmetic that nothing here does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self._architecture = self._check_architecture()
        self._sources = self._map_tensor_names()
        self._config = self._read_config()

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @property
    def dtype(self) -> str:
        """ "bfloat16" or "float16" where all matrices are stored so, else "float32".

        Dequantised values are float32: rounding them further is for the user to choose.
        """
        matrix_types = {info.type_name for info in self._file.tensors.values() if len(info.shape) > 1}
        return {"BF16": "bfloat16", "F16": "float16"}.get("".join(matrix_types), "float32")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return frozenset(self._file.metadata[key] for key in keys if isinstance(self._file.metadata.get(key), int))

    def tensor_names(self) -> Iterable[str]:
        return self._sources.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor by its Hugging Face name, dequantised; safe to call from several threads."""
        source = self._sources.get(name)
        if source is None:
            raise CheckpointError(
                f"{self.path} has no tensor for {name!r}. It holds {len(self._sources)} tensors; a model of its "
                "architecture needs this one, so the file was converted wrongly or cut short."
            )
        tensor = self._file.tensor(source)
        if self._architecture == "llama" and ".self_attn.q_proj." in name:
            return _undo_rope_permutation(tensor, self._config["num_attention_heads"], name)
        if self._architecture == "llama" and ".self_attn.k_proj." in name:
            return _undo_rope_permutation(tensor, self._config["num_key_value_heads"], name)
        if self._is_gemma and name.endswith("norm.weight"):
            return gguf_gemma.undo_norm_shift(tensor)
        return tensor

    def tokenizer(self) -> Tokenizer:
        from octavo.models.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self.path, self._file.metadata)

    @property
    def _is_gemma(self) -> bool:
        return self._architecture in gguf_gemma.ARCHITECTURES

    def _check_architecture(self) -> str:
        architecture = self._file.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in SUPPORTED_ARCHITECTURES:
            refuse_unserved(f"{self.path}", {"model_type": architecture})
            raise UnsupportedModelError(
                f"{self.path} holds a model of the architecture {architecture!r}. GGUF files of these architectures "
                f"can be run: {', '.join(SUPPORTED_ARCHITECTURES)}. Others may run from a folder with config.json and "
                ".safetensors files."
            )
        num_parts = self._file.metadata.get("split.count", 1)
        if not isinstance(num_parts, int) or num_parts > 1:
            raise CheckpointError(
                f"{self.path} is one of {num_parts} parts of a split model. Merge them first, with "
                "`llama-gguf-split --merge FIRST_PART OUTPUT`."
            )
        return architecture

    def _map_tensor_names(self) -> dict[str, str]:
        """Return each tensor's Hugging Face name and the name in the file."""
        modules = _LAYER_MODULES | (gguf_gemma.LAYER_MODULES if self._is_gemma else {})
        sources: dict[str, str] = {}
        unknown: list[str] = []
        for source in self._file.tensors:
            layer_tensor = _LAYER_TENSOR.fullmatch(source)
            if source in _OTHER_TENSORS:
                sources[_OTHER_TENSORS[source]] = source
            elif layer_tensor and layer_tensor[2] in modules:
                layer, module, kind = layer_tensor.groups()
                sources[f"model.layers.{layer}.{modules[module]}.{kind}"] = source
            elif source != _ROPE_FACTORS:
                unknown.append(source)
        if unknown:
            raise UnsupportedModelError(
                f"{self.path} holds {len(unknown)} tensors that its architecture {self._architecture!r} has no place "
                f"for here, {unknown[0]!r} the first: a mixture of experts, or a variant that is not computed."
            )
        return sources

    def _read_config(self) -> dict[str, Any]:
        """Return the equivalent of a Hugging Face config.json."""
        keys = ArchitectureKeys(self.path, self._architecture, self._file.metadata)
        keys.refuse_unknown(gguf_gemma.KEYS if self._is_gemma else ())
        num_heads = keys.integer("attention.head_count")
        hidden_size = keys.integer("embedding_length")
        head_dim = keys.integer("attention.key_length", default=hidden_size // max(num_heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if keys.integer(key, default=head_dim) != head_dim:
                raise UnsupportedModelError(
                    f"{self.path} has heads of {head_dim} numbers and {keys.integer(key)} as {key}; only models that "
                    "use one size for queries, keys, values and rope can be run."
                )
        config: dict[str, Any] = {
            "model_type": SUPPORTED_ARCHITECTURES[self._architecture],
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden_size,
            "intermediate_size": keys.integer("feed_forward_length"),
            "num_hidden_layers": keys.integer("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": keys.integer("attention.head_count_kv", default=num_heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": keys.integer("context_length"),
            "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "lm_head.weight" not in self._sources,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._sources,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self._sources,
            "rope_parameters": self._rope_parameters(keys),
        }
        if self._is_gemma:
            return config | gguf_gemma.config_of_family(self._architecture, keys, config)
        window = keys.integer("attention.sliding_window", default=0)
        if window:
            # GGUF has one window for all layers; in Hugging Face's terms that is a Mistral.
            if self._architecture != "llama":
                raise UnsupportedModelError(
                    f"{self.path} gives a sliding window of {window} for {self._architecture!r}, and not for which "
                    "layers. Use the model's .safetensors files, whose config.json says so."
                )
            config |= {"model_type": "mistral", "sliding_window": window}
        return config

    def _vocab_size(self) -> int:
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(f"{self.path} has no matrix 'token_embd.weight', which every model needs.")
        return embedding.shape[0]

    def _rope_parameters(self, keys: ArchitectureKeys) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", default=10000.0)}
        if _ROPE_FACTORS in self._file.tensors:
            factors = self._file.tensor(_ROPE_FACTORS).float().tolist()
            rope |= {"rope_type": "frequency_factors", "frequency_factors": factors}
        scaling_type = keys.text("rope.scaling.type", default="none")
        if scaling_type == "none":
            return rope
        if scaling_type not in ("linear", "yarn") or _ROPE_FACTORS in self._file.tensors:
            raise UnsupportedModelError(
                f"{self.path} asks for the rope scaling {scaling_type!r}"
                f"{' on top of rope_freqs.weight' if _ROPE_FACTORS in self._file.tensors else ''}. "
                "GGUF files with none, linear, yarn or rope_freqs.weight can be run."
            )
        rope |= {"rope_type": scaling_type, "factor": keys.number("rope.scaling.factor")}
        if scaling_type == "yarn":
            rope["original_max_position_embeddings"] = keys.integer(
                "rope.scaling.original_context_length", default=keys.integer("context_length")
            )
            rope["beta_fast"] = keys.number("rope.scaling.yarn_beta_fast", default=32.0)
            rope["beta_slow"] = keys.number("rope.scaling.yarn_beta_slow", default=1.0)
        for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier"):
            neutral = 1.0 if key.endswith("attn_factor") else 0.0
            if keys.number(key, default=neutral) != neutral:
                raise UnsupportedModelError(
                    f"{self.path} gives {keys.number(key)} as {key}; only {neutral} can be run. Use the model's "
                    ".safetensors files."
                )
        return rope


def _undo_rope_permutation(tensor: torch.Tensor, num_heads: int, name: str) -> torch.Tensor:
    """Put the rows of each head back into Hugging Face's order.

    llama.cpp rotates neighbouring pairs of numbers where Hugging Face rotates the two halves of a head; its converter
    interleaves the halves to make up for it. [num_heads * head_dim, ...]
    """
    if tensor.shape[0] % (2 * num_heads):
        raise CheckpointError(
            f"Tensor {name!r} has {tensor.shape[0]} rows, which do not divide into {num_heads} heads of pairs."
        )
    pairs = tensor.view(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
