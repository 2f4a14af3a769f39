"""What one layer keeps in the KV cache, in numbers. Plain data: dtypes are strings, nothing imports torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from octavo.core.interfaces.kv_format import KV_FORMATS


@dataclass(frozen=True)
class KVCacheSpec(ABC):
    """What one layer keeps for each token.

    Layers with equal specs may share block tables, that is, form one KV-cache group.

    Attributes:
        kind: Name of the KV-cache manager that serves this spec unless the config names another.
        block_size: Tokens in a block.
    """

    kind: ClassVar[str]
    block_size: int

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """Bytes that one block takes in one layer, scales included."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token takes in one layer."""
        return self.page_bytes / self.block_size

    def with_block_size(self, block_size: int) -> Self:
        """Return the same with so many tokens in a block."""
        return replace(self, block_size=block_size)

    def without_recycling(self) -> KVCacheSpec:
        """Return what the layer keeps when nothing is given back before the request ends; always right to keep."""
        return self


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Keys and values of every token, kept for as long as the request lives.

    Attributes:
        num_kv_heads: Heads of the keys, and of the values.
        head_dim: Numbers in one key, and in one value.
        dtype: How numbers are stored, a name of KV_FORMATS: "float32", "bfloat16", "fp8_e4m3".
    """

    kind: ClassVar[str] = "full_attention"
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def page_bytes(self) -> int:
        return KV_FORMATS[self.dtype].page_bytes(2 * self.block_size * self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values of the last tokens: a query reads itself and the `window - 1` tokens before it.

    Attributes:
        window: Keys that a query sees, its own included.
    """

    kind: ClassVar[str] = "sliding_window"
    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1, since every query sees itself.")

    def without_recycling(self) -> KVCacheSpec:
        return FullAttentionSpec(self.block_size, self.num_kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True)
class ChunkedLocalSpec(FullAttentionSpec):
    """Keys and values of the chunk under way: a query reads from the start of its own aligned chunk on.

    Attributes:
        chunk: Tokens in a chunk. Chunk i holds the positions [i * chunk, (i + 1) * chunk).
    """

    kind: ClassVar[str] = "chunked_local"
    chunk: int

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}; it must be at least 1, since every query sees itself.")

    def without_recycling(self) -> KVCacheSpec:
        return FullAttentionSpec(self.block_size, self.num_kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True)
class MLASpec(KVCacheSpec):
    """The latent of every token, from which all heads' keys and values follow, and one key of positions for all heads.

    One vector a token, and no factor 2: what is read as the value is the first part of what is read as the key.

    Attributes:
        latent_dim: Numbers in the compressed keys and values (`kv_lora_rank`).
        rope_dim: Numbers in the part of the key that carries the position (`qk_rope_head_dim`).
        dtype: How numbers are stored, a name of KV_FORMATS.
    """

    kind: ClassVar[str] = "mla"
    latent_dim: int
    rope_dim: int
    dtype: str

    @property
    def page_bytes(self) -> int:
        return KV_FORMATS[self.dtype].page_bytes(self.block_size, self.latent_dim + self.rope_dim)
