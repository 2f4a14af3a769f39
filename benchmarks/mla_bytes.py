"""Bytes that a token takes in the KV cache: of latent attention, and of the same model's full keys and values.

    python benchmarks/mla_bytes.py [--dtype bfloat16] [--block-size 16] [--num-blocks 9]

Three models: a tiny one, whose folder is made here, and two of DeepSeek's with the sizes of their papers. Nothing is
run, and no weight is read. Each number comes twice: from the KV-cache specs, and from buffers that were allocated as an
engine allocates them, of `--num-blocks` blocks. Full keys and values are counted in two ways: as they are, where a key
is wider than a value, and in pages of a full-attention spec, whose values are stored at the size of keys.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.interfaces import FullAttentionSpec, KVCacheSpec
from octavo.core.interfaces.kv_format import DTYPE_BYTES
from octavo.core.kv_cache_config import KVCacheConfig, make_groups
from octavo.core.model_runner import allocate_kv_cache
from octavo.models.checkpoint import open_checkpoint
from octavo.models.deepseek import DeepseekModel
from octavo.testing.tiny_models import tiny_deepseek_v3

# Section 4.2 of the DeepSeek-V3 report, https://arxiv.org/abs/2412.19437.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 131072,
}
# Appendix B of the DeepSeek-V2 report, https://arxiv.org/abs/2405.04434.
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 6,
    "max_position_embeddings": 32768,
}


@dataclass(frozen=True)
class Kept:
    """Bytes a token, in all layers."""

    of_specs: float
    of_buffers: float


def kept(specs: Sequence[KVCacheSpec], num_blocks: int) -> Kept:
    """Add up what the specs say, and what is allocated for them."""
    config = KVCacheConfig(num_blocks, make_groups(specs))
    allocated_bytes = sum(buffer.nbytes for buffer in allocate_kv_cache(config, "cpu"))
    return Kept(sum(spec.bytes_per_token for spec in specs), allocated_bytes / (num_blocks * specs[0].block_size))


def show(name: str, config: dict[str, Any], arguments: argparse.Namespace) -> None:
    spec = DeepseekModel.spec_from_config(
        config, dtype=arguments.dtype, device="cpu", block_size=arguments.block_size, kv_dtype=arguments.dtype
    )
    num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
    key_dim, value_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    latent = kept(spec.kv_cache_specs, arguments.num_blocks)
    page = FullAttentionSpec(arguments.block_size, num_heads, key_dim, arguments.dtype)
    full = kept([page] * num_layers, arguments.num_blocks)
    full_as_it_is = num_layers * num_heads * (key_dim + value_dim) * DTYPE_BYTES[arguments.dtype]
    print(
        f"{name}: {num_layers} layers, {num_heads} heads, keys of {key_dim}, values of {value_dim}, {arguments.dtype}"
    )
    for what, of_specs, of_buffers in (
        ("latent attention", latent.of_specs, f"{latent.of_buffers:14,.0f}"),
        ("full keys and values", full_as_it_is, f"{'':14}"),
        ("full, in pages", full.of_specs, f"{full.of_buffers:14,.0f}"),
    ):
        print(f"  {what:22} {of_specs:14,.0f} {of_buffers} {of_specs / latent.of_specs:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPE_BYTES)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=9, help="blocks to allocate, the null block included")
    arguments = parser.parse_args()
    print(f"{'bytes a token':24} {'of the specs':>14} {'of the buffers':>14} {'times':>8}")
    with tempfile.TemporaryDirectory() as folder:
        show("tiny DeepSeek-V3", dict(open_checkpoint(str(tiny_deepseek_v3(Path(folder)))).config), arguments)
    show("DeepSeek-V2-Lite", DEEPSEEK_V2_LITE, arguments)
    show("DeepSeek-V3", DEEPSEEK_V3, arguments)


if __name__ == "__main__":
    main()
