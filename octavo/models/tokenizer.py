"""A tokenizer over the `tokenizers` library, and reading one from a model's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from octavo.errors import CheckpointError, InvalidRequestError
from octavo.models.safetensors_checkpoint import read_json_object

if TYPE_CHECKING:
    from octavo.models.chat_template import ChatTemplate

# Special tokens that templates may write out, by their names in tokenizer_config.json.
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Files that a vocabulary may stand in: SentencePiece's, byte-pair encoding's, WordPiece's, tiktoken's and Mistral's.
_VOCABULARY_SUFFIXES = frozenset({".model", ".vocab", ".tiktoken", ".bpe", ".spm"})
_VOCABULARY_NAMES = ("vocab", "merges", "tekken", "spiece", "sentencepiece", "tokenizer.model")


class TextTokenizer:
    """Text to token ids and back; safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap `backend`, whose post-processor adds what the model wants around every text.

        Args:
            special_tokens: The tokens called "bos_token", "eos_token" and so on, for the chat template.
        """
        self._backend = backend
        # A tokenizer.json may carry the settings of its training; a prompt is never cut or padded in silence.
        backend.no_truncation()
        backend.no_padding()
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})

    @cached_property
    def vocab_size(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. A special token written out in the text is one id.

        Raises:
            InvalidRequestError: `text` is not a str, or holds half of a surrogate pair.
        """
        _check_text(text)
        return self._backend.encode(text, add_special_tokens=True).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        # The backend leaves out ids that it does not know, and takes none that do not fit 32 bits.
        known = [int(token_id) for token_id in token_ids if 0 <= token_id < 1 << 32]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        text = self._compiled_template.render(messages)
        _check_text(text)
        # The template has written all special tokens, BOS included.
        return self._backend.encode(text, add_special_tokens=False).ids

    @cached_property
    def _compiled_template(self) -> ChatTemplate:
        if self._chat_template is None:
            raise InvalidRequestError(
                "The model has no chat template, so it cannot be given a conversation. Write the prompt out as text.",
                parameter="messages",
            )
        from octavo.models.chat_template import ChatTemplate

        return ChatTemplate(self._chat_template, self._special_tokens)


def tokenizer_from_folder(folder: Path) -> TextTokenizer:
    """Read the tokenizer in a model's folder. Code in the folder is never run.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    config_file = folder / "tokenizer_config.json"
    config = read_json_object(config_file) if config_file.is_file() else {}
    special_tokens = _special_tokens(folder, config)
    backend = _backend(folder)
    _add_missing_special_tokens(backend, special_tokens)
    # As in transformers: where the config says what to add, that replaces what tokenizer.json says.
    if "add_bos_token" in config or "add_eos_token" in config:
        add_around_every_text(
            backend,
            before=special_tokens.get("bos_token") if config.get("add_bos_token") else None,
            after=special_tokens.get("eos_token") if config.get("add_eos_token") else None,
        )
    return TextTokenizer(backend, chat_template=_chat_template(folder, config), special_tokens=special_tokens)


def add_around_every_text(backend: tokenizers.Tokenizer, *, before: str | None, after: str | None) -> None:
    """Make `backend` put a token before and one after every text; None puts none."""
    pieces = ["$A", *([after] if after else [])]
    pieces = [before, *pieces] if before else pieces
    ids = [(token, backend.token_to_id(token)) for token in (before, after) if token]
    for token, token_id in ids:
        if token_id is None:
            raise CheckpointError(
                f"The tokenizer is to put {token!r} around every text, and has no such token. Fetch the files again."
            )
    backend.post_processor = TemplateProcessing(single=pieces, pair=[*pieces, "$B"], special_tokens=ids)


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"A prompt is a {type(text).__name__}; it has to be text.", parameter="prompt")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"The prompt holds half of a surrogate pair at character {error.start}, which is not text. Decode it again "
            "from its source.",
            parameter="prompt",
        ) from error


def _backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _converted_backend(folder)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    # The library raises bare exceptions.
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}. Fetch it again.") from error


def _converted_backend(folder: Path) -> tokenizers.Tokenizer:
    """Let transformers convert an older format, such as tokenizer.model."""
    if not any(_may_hold_vocabulary(file) for file in folder.iterdir()):
        # transformers would make a tokenizer of nothing for some models.
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and no file that another tokenizer would be made from, such as "
            "tokenizer.model or vocab.json. Fetch the folder again, or add tokenizer.json."
        )
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        backend = tokenizer.backend_tokenizer
    except Exception as error:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and transformers cannot make one from the other files there: "
            f"{_first_line(error)}. Fetch the folder again, or add tokenizer.json."
        ) from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise CheckpointError(f"{folder} has a tokenizer of a kind that cannot be used. Add tokenizer.json.")
    return backend


def _may_hold_vocabulary(file: Path) -> bool:
    return file.suffix in _VOCABULARY_SUFFIXES or file.name.startswith(_VOCABULARY_NAMES)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(" .:")


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens; tokenizer_config.json has precedence over special_tokens_map.json."""
    map_file = folder / "special_tokens_map.json"
    sources = [read_json_object(map_file) if map_file.is_file() else {}, config]
    tokens: dict[str, str] = {}
    for source in sources:
        for name in SPECIAL_TOKEN_NAMES:
            value = source.get(name)
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def _add_missing_special_tokens(backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
    """Mark named tokens as special where tokenizer.json does not. A token outside the vocabulary gets no id."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for content in special_tokens.values():
        known = added.get(content)
        if backend.token_to_id(content) is not None and not (known and known.special):
            backend.add_special_tokens([tokenizers.AddedToken(content, normalized=False)])


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return chat_template.jinja, else what tokenizer_config.json has: one template, or a list with a default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}. Fetch it again.") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
