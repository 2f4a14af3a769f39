"""Tiny random models of real architectures, made by transformers and saved as its folders.

Their weights are larger than an untrained model's, so that the best token usually stands clear of the second: then two
correct implementations, whose logits differ in the last digits, generate the same tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.core.interfaces.kv_scales import LayerScales

# A tiny config: small enough for a test, and with grouped queries, so that mixing up heads shows.
_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# What of it a family takes that names the rest otherwise.
_TOKENS = {key: _COMMON[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}


def tiny_llama(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny Llama in `folder` and return it. `config` replaces values of its config."""
    return _save(folder, "LlamaConfig", "LlamaForCausalLM", seed, config)


def tiny_mistral(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny Mistral in `folder` and return it. Its queries see 16 keys. `config` as in `tiny_llama`."""
    return _save(folder, "MistralConfig", "MistralForCausalLM", seed, {"sliding_window": 16} | config)


def tiny_qwen2(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny Qwen2, which has biases, in `folder` and return it. `config` as in `tiny_llama`."""
    return _save(folder, "Qwen2Config", "Qwen2ForCausalLM", seed, config)


def tiny_qwen3(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny Qwen3, which normalises queries and keys, in `folder` and return it.

    Its heads are wider than hidden_size / num_attention_heads. `config` as in `tiny_llama`.
    """
    return _save(folder, "Qwen3Config", "Qwen3ForCausalLM", seed, {"head_dim": 32} | config)


# -- families that run through transformers -----------------------------------------------------------------------


def tiny_gpt2(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny GPT-2 in `folder` and return it: learned positions, tied embeddings. `config` as in `tiny_llama`."""
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "tie_word_embeddings": True}
    return _save(folder, "GPT2Config", "GPT2LMHeadModel", seed, _TOKENS | shape | config, common={})


def tiny_opt(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny OPT, whose positions start at 2, in `folder` and return it. `config` as in `tiny_llama`."""
    shape = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False}
    return _save(folder, "OPTConfig", "OPTForCausalLM", seed, _TOKENS | shape | config, common={})


def tiny_phi(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny Phi in `folder` and return it: part of a head is rotated, the head has a bias. As `tiny_llama`."""
    return _save(folder, "PhiConfig", "PhiForCausalLM", seed, config)


def tiny_gpt_neox(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny GPT-NeoX, with attention and MLP side by side, in `folder` and return it. As `tiny_llama`."""
    return _save(folder, "GPTNeoXConfig", "GPTNeoXForCausalLM", seed, config)


def tiny_gemma2(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny Gemma 2 in `folder` and return it: soft caps that bend, and a window of 16 in every other layer."""
    shape = {"head_dim": 32, "query_pre_attn_scalar": 16, "sliding_window": 16}
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    return _save(folder, "Gemma2Config", "Gemma2ForCausalLM", seed, shape | caps | config)


def tiny_gpt_oss(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny gpt-oss in `folder` and return it: sinks, experts, and a window of 16 in every other layer."""
    shape = {"head_dim": 16, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return _save(folder, "GptOssConfig", "GptOssForCausalLM", seed, shape | rope | config)


def tiny_mixtral(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny Mixtral of four experts, two a token, in `folder` and return it. `config` as in `tiny_llama`."""
    return _save(folder, "MixtralConfig", "MixtralForCausalLM", seed, {"num_local_experts": 4} | config)


def tiny_olmoe(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny OLMoE of four experts, two a token, in `folder` and return it. `config` as in `tiny_llama`."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    return _save(folder, "OlmoeConfig", "OlmoeForCausalLM", seed, experts | config)


def tiny_cohere(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny Cohere, which scales its logits, in `folder` and return it. `config` as in `tiny_llama`."""
    return _save(folder, "CohereConfig", "CohereForCausalLM", seed, {"logit_scale": 0.5} | config)


def tiny_cohere2(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny Cohere 2 in `folder` and return it: a window of 16 in three layers of four. As `tiny_llama`."""
    shape = {"num_hidden_layers": 4, "sliding_window": 16, "logit_scale": 0.5}
    return _save(folder, "Cohere2Config", "Cohere2ForCausalLM", seed, shape | config)


def tiny_granite(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny Granite, which scales nearly everything, in `folder` and return it. `config` as in `tiny_llama`."""
    scales = {"logits_scaling": 2.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7}
    return _save(folder, "GraniteConfig", "GraniteForCausalLM", seed, scales | config)


def tiny_gemma3(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny Gemma 3 in `folder` and return it: seven layers, of which all but the sixth see a window of 16.

    `config` as in `tiny_llama`.
    """
    shape = {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 16, "sliding_window": 16}
    return _save(folder, "Gemma3TextConfig", "Gemma3ForCausalLM", seed, shape | config)


def _save(
    folder: Path,
    config_class: str,
    model_class: str,
    seed: int,
    config: dict[str, Any],
    *,
    common: dict[str, Any] = _COMMON,
) -> Path:
    import transformers

    # The caller's random numbers go on as if nothing had been drawn.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**common | config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=_spread(name, parameter))
                elif name.endswith("_proj.bias"):
                    parameter.normal_(std=0.5)
                elif name.endswith("bias"):
                    # Of norms and heads: a large one would choose the same token everywhere.
                    parameter.normal_(std=0.1)
                else:
                    # Norms: away from one, so that leaving one out shows.
                    parameter.uniform_(0.7, 1.3)
            for name, buffer in model.named_buffers():
                # Zeros as they are made: without a spread, leaving it out would not show.
                if name.endswith("e_score_correction_bias"):
                    buffer.uniform_(-0.3, 0.3)
    model.save_pretrained(folder, safe_serialization=True)
    return Path(folder)


def _spread(name: str, parameter: torch.Tensor) -> float:
    """Return the standard deviation to give a matrix."""
    if name.endswith(("embed_tokens.weight", "embed_in.weight")):
        return 1.0
    # GPT-2's token embedding is its head too: a large one would repeat the last token for ever.
    if name.endswith(("wte.weight", "wpe.weight", "embed_positions.weight")):
        return 0.1
    # GPT-2 keeps its matrices the other way round; of experts there is a matrix each.
    is_transposed = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    num_inputs = float(parameter.shape[0 if is_transposed else -1])
    return 1.5 / math.sqrt(num_inputs)


def add_byte_tokenizer(folder: Path) -> Path:
    """Give a tiny model a tokenizer, and return its folder.

    Ids 0 to 2 are special (<pad>, <s>, </s>) and ids 3 to 258 are the 256 bytes; larger ids are words of one space and
    a number, so that any id a tiny model comes up with has some text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    byte_chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: token_id for token_id, token in enumerate(["<pad>", "<s>", "</s>", *byte_chars])}
    vocab |= {f"\u0120{number}": number for number in range(len(vocab), _COMMON["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", "<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    settings = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def add_kv_scales(folder: Path, scales: Sequence[LayerScales]) -> Path:
    """Give a model's weights scales for a quantised KV cache, by the names that vLLM reads, and return its folder."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for layer, of_layer in enumerate(scales):
        for name, numbers in (("k_scale", of_layer.key), ("v_scale", of_layer.value)):
            weights[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(numbers)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_llama4(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny Llama 4 in `folder` and return it. `config` as in `tiny_llama`.

    Three layers have chunks of 16 and rope, one has neither; there, queries grow every 8 positions. Every other layer
    has four experts, one a token.
    """
    shape = {"num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 64, "intermediate_size_mlp": 128}
    attention = {"attention_chunk_size": 16, "no_rope_layers": [1, 0, 1, 1], "floor_scale": 8, "attn_scale": 0.5}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    made = shape | attention | experts | {"rope_parameters": rope}
    return _save(folder, "Llama4TextConfig", "Llama4ForCausalLM", seed, made | config)


def tiny_deepseek_v2(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny DeepSeek V2 in `folder` and return it. `config` as in `tiny_llama`.

    Latent attention with a stretched rope; one dense layer, then two with eight experts, two a token out of one of
    their two groups, and with shared ones.
    """
    heads = {"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32}
    heads |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "topk_method": "group_limited_greedy"}
    experts |= {"n_group": 2, "topk_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.0}
    layers = {"num_hidden_layers": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
    rope |= {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
    made = heads | experts | layers | {"rope_parameters": rope, "max_position_embeddings": 256}
    return _save(folder, "DeepseekV2Config", "DeepseekV2ForCausalLM", seed, made | config)


def tiny_deepseek_v3(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a tiny DeepSeek V3, whose keys are wider than its values, in `folder` and return it. As `tiny_llama`."""
    heads = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32}
    heads |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    experts |= {"moe_intermediate_size": 64, "first_k_dense_replace": 1}
    return _save(folder, "DeepseekV3Config", "DeepseekV3ForCausalLM", seed, heads | experts | config)
