"""What one layer keeps in the KV cache, in numbers. Plain data: dtypes are strings, nothing imports torch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

# Bytes of one element, by the name torch gives the dtype.
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


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


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Keys and values of every token, kept for as long as the request lives.

    Attributes:
        num_kv_heads: Heads of the keys, and of the values.
        head_dim: Numbers in one key, and in one value.
        dtype: Element type, as torch names it: "float32", "bfloat16", "float16".
    """

    kind: ClassVar[str] = "full_attention"
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def page_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
