"""A tokenizer whose every token is known, for tests of what happens to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from octavo.core.interfaces.model import Tokenizer
from octavo.errors import InvalidRequestError


class TableTokenizer(Tokenizer):
    """Decodes by a table of id -> text or bytes; encodes with the longest token that fits.

    Args:
        table: What each id stands for; text stands for its UTF-8.
        special_token_ids: Ids that `decode` skips when asked to, and that `encode` never makes.
    """

    def __init__(self, table: Mapping[int, str | bytes], *, special_token_ids: Iterable[int] = ()) -> None:
        self._bytes_of = {
            token_id: token.encode() if isinstance(token, str) else token for token_id, token in table.items()
        }
        self._special_token_ids = frozenset(special_token_ids)

    @property
    def vocab_size(self) -> int:
        return max(self._bytes_of, default=-1) + 1

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_token_ids

    @property
    def chat_template(self) -> str | None:
        return None

    def encode(self, text: str) -> list[int]:
        rest = text.encode()
        token_ids = []
        while rest:
            fitting = [
                (len(token), -token_id)
                for token_id, token in self._bytes_of.items()
                if token and rest.startswith(token) and token_id not in self._special_token_ids
            ]
            if not fitting:
                raise ValueError(f"No token of the table begins {rest[:20]!r}; add one.")
            length, negative_id = max(fitting)
            token_ids.append(-negative_id)
            rest = rest[length:]
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        skipped = self._special_token_ids if skip_special_tokens else frozenset()
        tokens = [self._bytes_of.get(token_id, b"") for token_id in token_ids if token_id not in skipped]
        return b"".join(tokens).decode("utf-8", errors="replace")

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise InvalidRequestError("A table has no chat template; encode the conversation yourself.", parameter=None)


def byte_tokenizer() -> TableTokenizer:
    """Return a tokenizer with a token for each byte, whose id is the byte."""
    return TableTokenizer({byte: bytes([byte]) for byte in range(256)})


def token_table(*tokens: str | bytes) -> TableTokenizer:
    """Return a tokenizer whose ids 0, 1, 2... are the given tokens."""
    return TableTokenizer(dict(enumerate(tokens)))
