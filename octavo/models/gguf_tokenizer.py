"""Builds the tokenizer that a GGUF file's metadata describe.

A GGUF has the vocabulary, the merges or scores, and the name of a pre-tokenizer that llama.cpp knows; the rest of what
a tokenizer.json would say is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from octavo.errors import CheckpointError
from octavo.models.tokenizer import TextTokenizer, add_around_every_text

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before merging.

    Attributes:
        build: Makes the pre-tokenizer.
        normalizer: Applied before it.
        ignore_merges: Whether a whole piece that is in the vocabulary is taken, however merges would build it.
        add_bos: What holds where the file does not say.
    """

    build: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        cut = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


MAX_TOKEN_CHARS = 4096

_LLAMA3 = _PreTokenizer(_split(_LLAMA3_SPLIT), ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer(_split(_QWEN2_SPLIT), normalizer=normalizers.NFC)
PRE_TOKENIZERS = {
    "smollm": _PreTokenizer(_smollm),
    "gpt-2": _PreTokenizer(_gpt2),
    "default": _PreTokenizer(_gpt2),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def tokenizer_from_gguf(path: Path, metadata: Mapping[str, Any]) -> TextTokenizer:
    """Build the tokenizer of a GGUF file.

    Args:
        path: For error messages.
        metadata: As `GGUFFile` reads it.

    Raises:
        CheckpointError: There is none, it is of an unknown kind, or its parts do not fit together.
    """
    reader = _TokenizerReader(path, metadata)
    build = {"gpt2": _byte_level_backend, "llama": _sentencepiece_backend}.get(reader.kind)
    if build is None:
        raise CheckpointError(
            f"{path} has {f'a tokenizer of the kind {reader.kind!r}' if reader.kind else 'no tokenizer'}. GGUF files "
            "with one of 'gpt2' (byte-level BPE) or 'llama' (SentencePiece BPE) can be read."
        )
    try:
        backend = build(reader)
        backend.add_special_tokens(reader.added_tokens(_CONTROL) + reader.added_tokens(_UNKNOWN))
        backend.add_tokens(reader.added_tokens(_USER_DEFINED))
    except CheckpointError:
        raise
    # The library raises bare exceptions, here for merges whose parts are not in the vocabulary.
    except Exception as error:
        raise CheckpointError(f"{path} has a tokenizer whose parts do not fit together: {error}.") from error
    special_tokens = reader.special_tokens()
    add_around_every_text(
        backend,
        before=special_tokens.get("bos_token") if reader.flag("add_bos_token", reader.adds_bos_by_default) else None,
        after=special_tokens.get("eos_token") if reader.flag("add_eos_token", False) else None,
    )
    template = metadata.get("tokenizer.chat_template")
    return TextTokenizer(
        backend, chat_template=template if isinstance(template, str) else None, special_tokens=special_tokens
    )


class _TokenizerReader:
    """The metadata under `tokenizer.ggml`, checked as they are read."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self._metadata = metadata
        self.kind = str(metadata.get("tokenizer.ggml.model", ""))

    @property
    def pre_tokenizer(self) -> _PreTokenizer:
        name = self._metadata.get("tokenizer.ggml.pre", "default")
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            raise CheckpointError(
                f"{self.path} names the pre-tokenizer {name!r} (tokenizer.ggml.pre), which is not known. Known: "
                f"{', '.join(PRE_TOKENIZERS)}. The model may run from a folder with tokenizer.json."
            )
        return PRE_TOKENIZERS[name]

    @property
    def adds_bos_by_default(self) -> bool:
        return self.kind == "llama" or self.pre_tokenizer.add_bos

    def strings(self, name: str) -> list[str]:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"{self.path} has no list of strings as tokenizer.ggml.{name}, which its kind needs.")
        return value

    def numbers(self, name: str, count: int) -> list[float]:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise CheckpointError(f"{self.path} has to give {count} numbers as tokenizer.ggml.{name}, one a token.")
        return list(value.tolist())

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path} gives {value!r} as tokenizer.ggml.{name}; it has to be true or false.")
        return value

    def added_tokens(self, token_type: int) -> list[tokenizers.AddedToken]:
        """Return the tokens of a type, to be matched whole in the text. User-defined ones are no special tokens."""
        if "tokenizer.ggml.token_type" not in self._metadata:
            return []
        tokens = self.strings("tokens")
        return [
            tokenizers.AddedToken(token, normalized=False, special=token_type != _USER_DEFINED)
            for token, type_of_token in zip(tokens, self.numbers("token_type", len(tokens)), strict=True)
            if type_of_token == token_type and token
        ]

    def special_tokens(self) -> dict[str, str]:
        """Return the tokens that templates call bos_token and so on."""
        tokens = self.strings("tokens")
        keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        named: dict[str, str] = {}
        for name, key in keys.items():
            token_id = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
            if token_id is None:
                continue
            if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
                raise CheckpointError(
                    f"{self.path} gives {token_id!r} as {key}_token_id, and its vocabulary has {len(tokens)} tokens."
                )
            named[name] = tokens[token_id]
        return named


def _byte_level_backend(reader: _TokenizerReader) -> tokenizers.Tokenizer:
    pre_tokenizer = reader.pre_tokenizer
    merges = [_pair(reader.path, merge) for merge in reader.strings("merges")]
    vocabulary = {token: index for index, token in enumerate(reader.strings("tokens"))}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre_tokenizer.ignore_merges)
    )
    if pre_tokenizer.normalizer is not None:
        backend.normalizer = pre_tokenizer.normalizer()
    backend.pre_tokenizer = pre_tokenizer.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(path: Path, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise CheckpointError(f"{path} has the merge {merge!r}, which is not a pair of tokens.")
    return left, right


def _sentencepiece_backend(reader: _TokenizerReader) -> tokenizers.Tokenizer:
    tokens = reader.strings("tokens")
    merges = _merges_from_scores(tokens, reader.numbers("scores", len(tokens)))
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token=reader.special_tokens().get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_underline: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    to_text: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if reader.flag("add_space_prefix", True):
        # As llama.cpp does, also after a special token.
        to_underline.insert(0, normalizers.Prepend("▁"))
        to_text.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(to_underline)
    backend.decoder = decoders.Sequence(to_text)
    return backend


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges that a SentencePiece vocabulary implies.

    SentencePiece joins the two neighbours whose union has the best score; so every way to cut a token into two tokens
    is a merge, and the better its score, the earlier.
    """
    index_of = {token: index for index, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if len(token) > MAX_TOKEN_CHARS:
            # Looking at all its cuts takes quadratic time; as a token of a real vocabulary it does not occur.
            raise ValueError(f"a token has {len(token)} characters, more than {MAX_TOKEN_CHARS}")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in index_of and right in index_of:
                ranked.append((-score, index_of[left], index_of[right], left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]
