"""The contracts of a model, and of what it is built from and given.

A model is arithmetic: token ids and positions in, hidden rows out. It keeps no state between steps; keys and values
go through `ForwardBatch.attention`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_cache_spec import KVCacheSpec

if TYPE_CHECKING:
    from torch import Tensor


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """One past the largest id that stands for some text."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out when it skips special tokens."""

    @property
    def chat_template(self) -> str | None:
        """The model's Jinja template for conversations; None when it has none."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with the tokens that the model wants around every text (BOS)."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation, up to where the assistant's answer begins.

        Raises:
            InvalidRequestError: The messages do not fit the template, or the model has none.
        """


class Checkpoint(Protocol):
    """A model's files, whatever their format: a config, tensors by their Hugging Face names, a tokenizer."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of a Hugging Face config.json, or its equivalent from the metadata of another format."""

    @property
    def dtype(self) -> str:
        """The dtype in which the weights are meant to be computed, as torch names it."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation."""

    def tensor_names(self) -> Iterable[str]: ...

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, dequantised, on the CPU. CheckpointError when it is missing or cannot be read."""

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. CheckpointError when there is none."""


class LatentProjection(Protocol):
    """The way between the latents that an MLA layer keeps and its heads' keys and values.

    With K and V the matrices that make a head's key and value of a latent c, both of these are the same attention:

        expanded    scores  query · (K c)             output  sum of weight * (V c)
        absorbed    scores  (Kᵀ query) · c            output  V (sum of weight * c)

    What carries positions is beside all this: the last `rope_dim` numbers of a query and of what is kept of a token,
    which are the last of every head's key too.
    """

    @property
    def key_dim(self) -> int:
        """Numbers in a head's query and key, those for positions included."""

    @property
    def value_dim(self) -> int:
        """Numbers in a head's value."""

    def absorb(self, query: Tensor) -> Tensor:
        """Bring queries to where the latents are.

        Args:
            query: [num_tokens, num_query_heads, key_dim]

        Returns:
            [num_tokens, num_query_heads, latent_dim + rope_dim]
        """

    def project(self, attended: Tensor) -> Tensor:
        """Bring sums of latents to where the values are.

        Args:
            attended: [num_tokens, num_query_heads, latent_dim]

        Returns:
            [num_tokens, num_query_heads, value_dim]
        """

    def expand(self, latents: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Make some heads' keys and values of what is kept.

        Args:
            latents: [num_keys, latent_dim + rope_dim]
            heads: Which of the heads.

        Returns:
            Keys, [num_keys, num_heads, key_dim], and values, [num_keys, num_heads, value_dim].
        """


class ForwardBatch(Protocol):
    """One step, as a model sees it."""

    @property
    def token_ids(self) -> Tensor:
        """int64. [num_tokens]"""

    @property
    def positions(self) -> Tensor:
        """Each token's position in its own request, int64. [num_tokens]"""

    def attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, *, sinks: Tensor | None = None
    ) -> Tensor:
        """Store this layer's keys and values, then attend.

        Args:
            layer: Index into what the model's `attention_specs` returned.
            query: [num_tokens, num_query_heads, head_dim]
            key: [num_tokens, num_kv_heads, head_dim]
            value: [num_tokens, num_kv_heads, head_dim_v]; None when it is a prefix of the key.
            sinks: This layer's sink logits, when its spec has them. [num_query_heads]

        Returns:
            [num_tokens, num_query_heads, head_dim_v]
        """

    def latent_attention(self, layer: int, query: Tensor, latents: Tensor, projection: LatentProjection) -> Tensor:
        """Store what an MLA layer keeps of each token, then attend, whichever way is the cheaper for a row.

        Args:
            layer: Index into what the model's `attention_specs` returned. Its spec describes the attention to latents:
                one KV head of latent_dim + rope_dim numbers, the first latent_dim of them being the value.
            query: [num_tokens, num_query_heads, projection.key_dim]
            latents: The new tokens' normalised latents and rotated position keys. [num_tokens, latent_dim + rope_dim]
            projection: This layer's.

        Returns:
            [num_tokens, num_query_heads, projection.value_dim]
        """


@dataclass(frozen=True)
class ModelSpec:
    """What an engine has to know of a model before its weights are read.

    Attributes:
        vocab_size: Columns of the logits; every token id is below it.
        max_position: Tokens in the longest sequence that the positions of this model are made for.
        attention_specs: Each attention layer's, in the order in which `Model.forward` numbers them.
        kv_cache_specs: What each of them keeps, in the same order.
    """

    vocab_size: int
    max_position: int
    attention_specs: tuple[AttentionSpec, ...]
    kv_cache_specs: tuple[KVCacheSpec, ...]


class Model(ABC):
    """A decoder. Built from a checkpoint, run by the model runner."""

    # Each registered class states these: the contract version it was built for, as a number; and, if it takes options,
    # a pydantic model of them, of which `from_checkpoint` then gets an instance as the keyword argument `options`.
    contract_version: ClassVar[int]
    Options: ClassVar[type[Any] | None] = None
    # Whether `forward` can be captured in a CUDA graph for steps in which every row has one token, and replayed with
    # other numbers in the batch's tensors. Then for such a batch it waits for nothing on the device, brings nothing
    # over from the host, and every shape follows from the number of tokens.
    can_capture: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def spec_from_config(
        cls, config: Mapping[str, Any], *, dtype: str, device: str, block_size: int, kv_dtype: str
    ) -> ModelSpec:
        """Say what the model needs, from its config alone: no weight is read.

        Args:
            config: `Checkpoint.config`.
            dtype: Of weights and activations, as torch names it.
            device: Where the model will run, as torch names it.
            block_size: Tokens in a block of the KV cache.
            kv_dtype: Of stored keys and values.

        Raises:
            UnsupportedModelError: The config asks for something that this class does not compute.
        """

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, dtype: str, device: str) -> Model:
        """Load the weights.

        Raises:
            UnsupportedModelError: The config asks for something that this class does not compute.
            CheckpointError: A tensor is missing, unreadable or of the wrong shape.
        """

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the last layer's hidden rows, before the logits. [num_tokens, hidden_size]"""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the next token for the rows that sample. [num_rows, vocab_size]"""
