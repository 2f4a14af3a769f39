"""Compiles the kernels of one case for GPUs that need not be there, and prints what each takes, as JSON.

    python compile_kernels.py '{"spec": {...}, "options": {...}, "capabilities": [[8, 0]]}'

Run without TRITON_INTERPRET: a process either interprets kernels or compiles them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.attention_backends.triton.heuristics import Device, shared_bytes
from octavo.attention_backends.triton.options import TritonOptions
from octavo.attention_backends.triton.paged_attention import PagedAttention
from octavo.attention_backends.triton.pages import bind_pages
from octavo.core.interfaces.attention import AttentionSpec
from octavo.testing.attention.oracle import kv_cache_spec_for, make_batch

# Of NVIDIA's tables, "Maximum amount of shared memory per thread block":
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications-technical-specifications-per-compute-capability
SHARED_KIB = {(8, 0): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiler:
    """Takes the place of `start`: compiles a kernel as it would be for such arguments, and notes what it takes."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.compiled: list[dict[str, Any]] = []

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        options = {name: constants.pop(name) for name in [*constants] if name not in kernel.arg_names}
        function = kernel
        if hasattr(kernel, "configs"):
            function = kernel.fn
            options |= {"num_warps": kernel.configs[0].num_warps, "num_stages": kernel.configs[0].num_stages}
        values = {**dict(zip(kernel.arg_names, arguments, strict=False)), **constants}
        is_general = {parameter.name: parameter.do_not_specialize for parameter in function.params}
        signature, fixed, attributes = {}, {}, {}
        for number, name in enumerate(function.arg_names):
            value = values[name]
            if name in constants or value is None or (type(value) is int and value == 1 and not is_general[name]):
                signature[name], fixed[name] = "constexpr", value
                continue
            is_tensor = isinstance(value, torch.Tensor)
            signature[name] = POINTERS[value.dtype] if is_tensor else "fp32" if isinstance(value, float) else "i32"
            if is_tensor or (type(value) is int and value % 16 == 0 and not is_general[name]):
                attributes[(number,)] = [["tt.divisibility", 16]]
        major, minor = self.capability
        source = ASTSource(function, signature, fixed, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
        self.compiled.append(
            {
                "kernel": function.__name__,
                "capability": self.capability,
                "is_decode": constants.get("IS_DECODE"),
                "num_warps": options.get("num_warps"),
                "num_stages": options.get("num_stages"),
                "lines": constants.get("BLOCK_M"),
                "keys": constants.get("BLOCK_N"),
                "shared_bytes": compiled.metadata.shared,
                **resources(compiled.asm["cubin"]),
            }
        )


def resources(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread, and the bytes that it keeps in memory for want of more of them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        answer = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", answer)}
    return {"registers": found["REG"], "spilled_bytes": found["STACK"] + found["LOCAL"]}


def compile_case(spec: AttentionSpec, options: TritonOptions, capability: tuple[int, int]) -> list[dict[str, Any]]:
    """Write, attend from decode rows and from others, and gather where there is one."""
    device = Device(capability, SHARED_KIB[capability] << 10, 132)
    compiler = Compiler(capability)
    attention = PagedAttention(spec, device, options, compiler)
    shape = (spec.block_size, spec.head_dim)
    if not spec.value_is_key_prefix:
        shape = (2, spec.block_size, spec.num_kv_heads, spec.head_dim)
    kept = kv_cache_spec_for(spec)
    pages = bind_pages(torch.zeros((4, kept.page_bytes), dtype=torch.uint8), spec, kept, shape)
    dtype = getattr(torch, spec.dtype)
    # A decode row, and one of 40 tokens.
    batch = make_batch(
        np.array([0, 1, 41], np.int32),
        np.array([20, 40], np.int32),
        np.ones((2, 4096 // spec.block_size), np.int32),
        np.zeros(41, np.int64),
    )
    key = torch.zeros(41, spec.num_kv_heads, spec.head_dim, dtype=dtype)
    query = torch.zeros(41, spec.num_query_heads, spec.head_dim, dtype=dtype)
    sinks = torch.zeros(spec.num_query_heads) if spec.sinks else None
    attention.write(key, None if spec.value_is_key_prefix else key, pages, batch.slots)
    attention.attend(query, pages, attention.plan(batch), sinks, return_lse=True)
    if spec.value_is_key_prefix:
        attention.gather(pages, batch.slots)
    for each in compiler.compiled:
        if each["kernel"] == "attention_kernel":
            tile = attention.decode_tile if each["is_decode"] else attention.prefill_tile
            each["expected_shared_bytes"] = shared_bytes(tile, spec, device)
    return compiler.compiled


def main() -> None:
    asked = json.loads(sys.argv[1])
    spec, options = AttentionSpec(**asked["spec"]), TritonOptions(**asked["options"])
    compiled = [each for c in asked["capabilities"] for each in compile_case(spec, options, (c[0], c[1]))]
    print(json.dumps({"triton": triton.__version__, "compiled": compiled}))


if __name__ == "__main__":
    main()
