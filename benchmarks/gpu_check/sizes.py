"""How large what is measured is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A layer as in Llama 3 8B and Mistral 7B: https://arxiv.org/abs/2407.21783, table 3; https://arxiv.org/abs/2310.06825.
_GROUPED: dict[str, Any] = {"num_query_heads": 32, "num_kv_heads": 8, "head_dim": 128, "head_dim_v": 128}
# A layer of DeepSeek-V3, absorbed: https://arxiv.org/abs/2412.19437, section 4.2.
_LATENT: dict[str, Any] = {"num_query_heads": 128, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512}
_LATENT = {**_LATENT, "value_is_key_prefix": True}
_SMALL_GROUPED: dict[str, Any] = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 16, "head_dim_v": 16}
_SMALL_LATENT: dict[str, Any] = {"num_query_heads": 4, "num_kv_heads": 1, "head_dim": 24, "head_dim_v": 16}
_SMALL_LATENT = {**_SMALL_LATENT, "value_is_key_prefix": True}


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        grouped, latent: Fields of the two layers.
        decode_rows, decode_context: Of the decode batch.
        long_prompt: Tokens of the one prompt.
        prompts, prompt: How many shorter prompts, and their tokens.
        window: Of the layer with a window.
        copy_bytes: Copied, and read, to measure the memory.
        matrix_rows: Of the square matrices.
        rounds: Measurements of each work.
    """

    grouped: Mapping[str, Any]
    latent: Mapping[str, Any]
    decode_rows: int
    decode_context: int
    long_prompt: int
    prompts: int
    prompt: int
    window: int
    copy_bytes: int
    matrix_rows: int
    rounds: int


FULL = Sizes(_GROUPED, _LATENT, 64, 4096, 8192, 8, 2048, 1024, 1 << 30, 8192, 30)
# For a look at the script itself on a CPU, through Triton's interpreter if need be.
SMALL = Sizes(_SMALL_GROUPED, _SMALL_LATENT, 2, 40, 48, 2, 24, 16, 1 << 20, 64, 3)
