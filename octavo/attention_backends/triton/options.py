"""What the triton backend can be told. Everything is left to the rules of heuristics.py by default."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TritonOptions(BaseModel):
    """How the kernels are cut and scheduled, where the rules are not to decide."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    splits: int | None = Field(default=None, ge=1, le=1024)
    """Parts that the keys of each decode row are split into. 1 is a single pass."""
    tile_keys: Literal[16, 32, 64, 128, 256] | None = None
    """Keys that a program of the attention takes at a time; fewer where they do not fit into shared memory."""
    num_warps: Literal[1, 2, 4, 8, 16] | None = None
    """Warps of a program of the attention. Switches tuning off."""
    num_stages: int | None = Field(default=None, ge=1, le=8)
    """Key tiles that a program of the attention keeps in flight; fewer where they do not fit. Switches tuning off."""
    tune: bool = True
    """Whether the first large prefill on a GPU times a few numbers of warps and stages, and keeps the fastest. Warps
    can change the last bits of a result, so that without tuning two processes agree to the bit."""
