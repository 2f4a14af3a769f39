"""Tiny random models of real architectures, made by transformers and saved as its folders.

Their weights are larger than an untrained model's, so that the best token usually stands clear of the second: then two
correct implementations, whose logits differ in the last digits, generate the same tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

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


def _save(folder: Path, config_class: str, model_class: str, seed: int, config: dict[str, Any]) -> Path:
    import transformers

    # The caller's random numbers go on as if nothing had been drawn.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**_COMMON | config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=1.0 if "embed_tokens" in name else 1.5 * parameter.shape[1] ** -0.5)
                elif name.endswith(".bias"):
                    parameter.normal_(std=0.5)
                else:
                    # Norms: away from one, so that leaving one out shows.
                    parameter.uniform_(0.7, 1.3)
    model.save_pretrained(folder, safe_serialization=True)
    return Path(folder)


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
