"""Token ids to text, a few at a time, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from octavo.core.interfaces.model import Tokenizer

REPLACEMENT: Final = "\ufffd"

# A UTF-8 character has at most 4 bytes, so what may still become one is at most 3 bytes, each of them possibly a token
# and, to tokenizers that replace byte by byte, a U+FFFD of its own.
MAX_HELD_CHARS: Final = 3

# A window that can be cut where all of its text was shown is kept short; the rest is context for the next token.
WINDOW_IDS: Final = 8
CONTEXT_IDS: Final = 4

# Tokens may meet in the middle of characters for long ("\x80\xf0\x9f\x98" over and over), so a long window is cut
# anywhere: UTF-8 is back in step after 4 bytes, and what is held comes from 9 bytes at most.
MAX_WINDOW_IDS: Final = 32
MAX_CONTEXT_IDS: Final = 16


class IncrementalDetokenizer:
    """Decodes one request's tokens as they come.

    All text that `add` and `finish` return, joined, is `tokenizer.decode` of all ids, however the ids were split over
    calls. The tokenizer must be one whose text only grows: decoding more ids keeps the complete characters that fewer
    ids gave, as byte-level BPE and SentencePiece do. Where it does not (the `ByteFallback` decoder of Hugging Face
    replaces a whole run of byte tokens when one of them is bad), the characters that were shown stay.

    Only the ids of a small window are decoded for each token:

        [ context, all shown | newer ids, of which up to 3 U+FFFD are held ]

    The context is there because tokenizers drop the space at the start of what they decode.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._window_text = ""
        # The start of the window's text, up to where it was returned.
        self._shown = ""
        # How many ids of the window were there, each time that all of its text was shown.
        self._settled: list[int] = []

    def add(self, token_ids: Iterable[int]) -> str:
        """Return the text that became safe to show; U+FFFD at its end only where more than 3 stand in a row."""
        return "".join([self._add_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return the text that was held, as no more ids will come, and start afresh."""
        held = self._window_text[len(self._shown) :]
        self._window, self._window_text, self._shown, self._settled = [], "", "", []
        return held

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _add_one(self, token_id: int) -> str:
        text = self._decode([*self._window, token_id])
        if text == self._window_text and not self._decode([token_id, token_id]):
            # A skipped special token. Any number of them may come, and as context they would let the next space be
            # dropped. Twice, because a space alone decodes to nothing where leading spaces are dropped.
            return ""
        self._window.append(token_id)
        if self._settled and not text.startswith(self._shown):
            text = self._let_go_of_what_was_shown()
        self._window_text = text
        new_text = text[len(self._shown) :]
        num_held = min(MAX_HELD_CHARS, len(new_text) - len(new_text.rstrip(REPLACEMENT)))
        safe_text = new_text[: len(new_text) - num_held]
        self._shown = text[: len(text) - num_held]
        if num_held == 0:
            self._settled.append(len(self._window))
        return safe_text + self._shorten_window()

    def _let_go_of_what_was_shown(self) -> str:
        # The newest id begins a character in a run of byte tokens, and the tokenizer took back the run's earlier
        # characters. No context is needed: a byte above 127 is not a space that could be dropped.
        del self._window[: self._settled[-1]]
        self._settled, self._shown = [], ""
        return self._decode(self._window)

    def _shorten_window(self) -> str:
        """Forget old ids; return text that had to be released for that."""
        num_ids = len(self._window)
        if num_ids <= WINDOW_IDS:
            return ""
        cut = next((at for at in self._settled if num_ids - WINDOW_IDS <= at <= num_ids - CONTEXT_IDS), None)
        if cut is None:
            if num_ids <= MAX_WINDOW_IDS:
                return ""
            cut = num_ids - MAX_CONTEXT_IDS
        held = self._window_text[len(self._shown) :]
        del self._window[:cut]
        self._settled = [at - cut for at in self._settled if at > cut]
        self._window_text = self._decode(self._window)
        if self._window_text.endswith(held):
            self._shown = self._window_text[: len(self._window_text) - len(held)]
            return ""
        # Only a tokenizer that replaces whole runs gets here, after 32 byte tokens that make no text.
        self._shown = self._window_text
        return held
