"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class StopMatch:
    """Where a stop string stands, in characters from the start of the text."""

    string: str
    start: int
    end: int


class StopStringMatcher:
    """Finds the stop string that starts earliest; of several at one start the shortest, which is complete first.

    The answer does not depend on the order of the stop strings or on how the text was cut. With stops "bc" and "abcd",
    "abc" is not decided yet: the text may go on with "d", and "abcd" starts earlier. It is `pending` until then.

    Text is held back only while it may be part of the match: from the earliest place where a stop string has begun.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        # Sorted, a string comes before those that begin with it, and so it is the first to claim a start.
        self._searches = [_Search(string) for string in sorted(set(stop_strings))]
        self._num_chars_seen = 0
        self._held = ""
        self._best: StopMatch | None = None
        self._is_decided = False

    @property
    def match(self) -> StopMatch | None:
        """The match, once nothing that may still come can start earlier."""
        return self._best if self._is_decided else None

    @property
    def pending(self) -> StopMatch | None:
        """A complete match that one with an earlier start may still replace."""
        return None if self._is_decided else self._best

    def add(self, text: str) -> str:
        """Return what may be shown now. After a match that is nothing, whatever is added."""
        if self._is_decided:
            return ""
        for search in self._searches:
            end_in_text = search.advance(text)
            if end_in_text is None:
                continue
            end = self._num_chars_seen + end_in_text
            start = end - len(search.string)
            if self._best is None or start < self._best.start:
                self._best = StopMatch(search.string, start, end)
        self._num_chars_seen += len(text)
        # `num_matched` is the longest beginning, so these are the earliest starts that are still possible.
        open_starts = [self._num_chars_seen - search.num_matched for search in self._searches if search.is_open]
        hold_from = min(open_starts, default=self._num_chars_seen)
        if self._best is not None and hold_from >= self._best.start:
            hold_from = self._best.start
            self._is_decided = True
        return self._release(text, hold_from)

    def finish(self) -> str:
        """Decide, as no more text will come, and return what may be shown now."""
        if self._is_decided:
            return ""
        self._is_decided = True
        return self._release("", self._num_chars_seen if self._best is None else self._best.start)

    def _release(self, new_text: str, hold_from: int) -> str:
        unseen = self._held + new_text
        num_released = len(unseen) - (self._num_chars_seen - hold_from)
        self._held = "" if self._is_decided else unseen[num_released:]
        return unseen[:num_released]


class _Search:
    """Knuth, Morris and Pratt's search for the first place of one string; no character is looked at again."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        self._borders = _border_lengths(string)

    @property
    def is_open(self) -> bool:
        """Whether the text ends with a beginning of the string."""
        return 0 < self.num_matched < len(self.string)

    def advance(self, text: str) -> int | None:
        """Return where in `text` the string is complete, the first time that it is."""
        string, num_matched, position = self.string, self.num_matched, 0
        if num_matched == len(string):
            return None
        while position < len(text):
            if num_matched == 0:
                position = text.find(string[0], position)
                if position < 0:
                    break
            while num_matched and string[num_matched] != text[position]:
                num_matched = self._borders[num_matched - 1]
            if string[num_matched] == text[position]:
                num_matched += 1
            position += 1
            if num_matched == len(string):
                self.num_matched = num_matched
                return position
        self.num_matched = num_matched
        return None


# The choices of a request, and the requests of one application, have the same stop strings.
@lru_cache(maxsize=128)
def _border_lengths(string: str) -> tuple[int, ...]:
    """Return, for each beginning of the string, the length of its longest proper beginning that also ends it."""
    borders = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = borders[length - 1]
        if string[i] == string[length]:
            length += 1
        borders[i] = length
    return tuple(borders)
