"""The scales of a layer whose pages have none: numbers of the checkpoint, or set by whoever knows better."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerScales:
    """What a layer's keys and values are divided by before they are stored, and multiplied by when they are read.

    Attributes:
        key: One for all KV heads, or one for each.
        value: The same. Where values are a part of the keys (MLA), the keys' scale.
    """

    key: tuple[float, ...]
    value: tuple[float, ...]

    @property
    def changes_nothing(self) -> bool:
        """Whether all of them are 1."""
        return {*self.key, *self.value} == {1.0}
