"""Reading GGUF: values, and every way in which a file can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.core.interfaces.model import Checkpoint
from octavo.errors import CheckpointError
from octavo.models.gguf_file import SUPPORTED_TENSOR_TYPES, GGUFFile

UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9
F32, Q4_0, IQ2_XXS = 0, 2, 16


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(key: str, value_type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", value_type) + value


def tensor_info(name: str, shape: tuple[int, ...], tensor_type: int, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + dimensions + struct.pack("<IQ", tensor_type, offset)


def gguf_bytes(entries: list[bytes], tensors: list[bytes], data: bytes = b"", *, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries + tensors)
    return head + bytes(-len(head) % 32) + data


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


def test_metadata_of_every_type_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -5)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -2_000_000_000)
    writer.add_uint64("a.u64", 1 << 63)
    writer.add_int64("a.i64", -(1 << 62))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "käse 🧀")
    writer.add_array("a.strings", ["", "x", "é"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = dict(GGUFFile(path).metadata)
    numbers = metadata.pop("a.numbers")
    assert metadata == {
        "general.architecture": "llama",
        "a.u8": 200,
        "a.i8": -5,
        "a.u16": 60000,
        "a.i16": -30000,
        "a.u32": 4_000_000_000,
        "a.i32": -2_000_000_000,
        "a.u64": 1 << 63,
        "a.i64": -(1 << 62),
        "a.f32": 0.5,
        "a.f64": 0.1,
        "a.bool": True,
        "a.string": "käse 🧀",
        "a.strings": ["", "x", "é"],
    }
    assert numbers.tolist() == [1, 2, 3]


@pytest.mark.parametrize("version", [2, 3])
def test_both_current_versions_are_read(write: Callable[[bytes], Path], version: int) -> None:
    values = np.arange(6, dtype=np.float32)
    content = gguf_bytes([], [tensor_info("t", (3, 2), F32)], values.tobytes(), version=version)
    assert GGUFFile(write(content)).tensor("t").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def _blocks(type_name: str, num_blocks: int) -> np.ndarray[Any, Any]:
    """Return random blocks of a type, scales included, as bytes. [num_blocks, block_bytes]"""
    kind = gguf.GGMLQuantizationType[type_name]
    random = np.random.default_rng(0)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    values = random.normal(size=(num_blocks, block_size)).astype(np.float32)
    if not type_name.endswith("_K"):
        return gguf.quants.quantize(values, kind).view(np.uint8).reshape(num_blocks, block_bytes)
    # There is no quantiser for these: random bits, with the half-precision scales put in where they belong.
    blocks = random.integers(0, 256, size=(num_blocks, block_bytes), dtype=np.uint8)
    scales = random.normal(size=(num_blocks, 2)).astype(np.float16).view(np.uint8)
    if type_name == "Q6_K":
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks


@pytest.mark.parametrize("type_name", SUPPORTED_TENSOR_TYPES)
def test_every_supported_type_gives_the_values_of_the_gguf_package(type_name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    blocks = _blocks(type_name, 5000 * 2)  # more than are dequantised at a time
    rows = blocks.reshape(5000, -1)
    expected = gguf.quants.dequantize(rows, kind)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("other", np.ones(3, dtype=np.float32))
    writer.add_tensor("weight", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GGUFFile(path).tensor("weight")
    assert tensor.shape == expected.shape
    assert torch.equal(tensor.float(), torch.from_numpy(expected))


def test_the_metadata_of_a_vocabulary_are_those_of_the_gguf_package(demo_checkpoint: Checkpoint) -> None:
    path = demo_checkpoint.path  # type: ignore[attr-defined]
    file = GGUFFile(path)
    reader = gguf.GGUFReader(path)
    assert set(file.metadata) == {key for key in reader.fields if not key.startswith("GGUF.")}
    for key in ("general.name", "llama.context_length", "tokenizer.chat_template", "llama.rope.freq_base"):
        assert file.metadata[key] == reader.fields[key].contents()
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        field = reader.fields[key]
        assert len(file.metadata[key]) == len(field.data)
        assert file.metadata[key][-500:] == [bytes(field.parts[i]).decode() for i in field.data[-500:]]
    assert {(t.name, tuple(reversed(t.shape.tolist())), t.data_offset) for t in reader.tensors} == {
        (t.name, t.shape, t.start) for t in file.tensors.values()
    }


MANY = struct.pack("<Q", 1 << 62)
BROKEN: dict[str, tuple[bytes, str]] = {
    "not GGUF": (b"PK\x03\x04 something else", "does not start with the letters GGUF"),
    "empty": (b"", "does not start with the letters GGUF"),
    "nothing but a magic": (b"GGUF", "truncated or corrupt: the header"),
    "version 1": (gguf_bytes([], [], version=1), "unsupported kind: version 1"),
    "big-endian": (gguf_bytes([], [], version=3 << 24), "unsupported kind: a big-endian file"),
    "a lying count of tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "truncated or corrupt: the list of"),
    "a lying count of metadata": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "truncated or corrupt: the metadata"),
    "a lying key length": (gguf_bytes([MANY + bytes(16)], []), "truncated or corrupt: the metadata"),
    "a lying string length": (gguf_bytes([entry("k", STRING, MANY)], []), "entry 'k' would reach past its end"),
    "a lying array of strings": (
        gguf_bytes([entry("k", ARRAY, struct.pack("<I", STRING) + MANY)], []),
        "entry 'k' would reach past its end",
    ),
    "a lying array of numbers": (
        gguf_bytes([entry("k", ARRAY, struct.pack("<I", UINT8) + MANY)], []),
        "entry 'k' would reach past its end",
    ),
    "a lying array of arrays": (
        gguf_bytes([entry("k", ARRAY, struct.pack("<I", ARRAY) + MANY)], []),
        "entry 'k' would reach past its end",
    ),
    "arrays without end": (
        gguf_bytes([entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 50)], []),
        "entry 'k' has the value type 9",
    ),
    "an unknown value type": (gguf_bytes([entry("k", 77, bytes(8))], []), "entry 'k' has the value type 77"),
    "text that is not UTF-8": (
        gguf_bytes([entry("k", STRING, struct.pack("<Q", 2) + b"\xff\xfe")], []),
        "entry 'k' is not UTF-8",
    ),
    "an alignment of zero": (
        gguf_bytes([entry("general.alignment", UINT32, bytes(4))], []),
        "gives 0 as general.alignment",
    ),
    "too many dimensions": (gguf_bytes([], [tensor_info("t", (1,) * 5, F32)], bytes(4)), "'t' claims 5 dimensions"),
    "a shape beyond the file": (gguf_bytes([], [tensor_info("t", (1 << 40, 1 << 40), F32)]), "truncated: tensor 't'"),
    "an offset beyond the file": (
        gguf_bytes([], [tensor_info("t", (4,), F32, 1 << 50)], bytes(16)),
        "truncated: tensor 't'",
    ),
    "an offset off the grid": (gguf_bytes([], [tensor_info("t", (1,), F32, 4)], bytes(64)), "not a multiple of 32"),
    "a tensor listed twice": (gguf_bytes([], [tensor_info("t", (4,), F32)] * 2, bytes(64)), "'t' is listed twice"),
    "rows that are no whole blocks": (
        gguf_bytes([], [tensor_info("t", (31,), Q4_0)], bytes(64)),
        "rows of 31 numbers, and Q4_0 stores them in blocks of 32",
    ),
    "an unsupported type": (
        gguf_bytes([], [tensor_info("t", (256,), IQ2_XXS)], bytes(66)),
        "'t' in .* has the type IQ2_XXS, .*Supported types: F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K",
    ),
    "an unknown type": (gguf_bytes([], [tensor_info("t", (4,), 999)], bytes(64)), "has the type number 999"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_its_name_and_the_reason(case: str, write: Callable[[bytes], Path]) -> None:
    content, message = BROKEN[case]
    path = write(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_anywhere_is_refused_and_raises_nothing_else(write: Callable[[bytes], Path]) -> None:
    entries = [
        entry("general.name", STRING, string("model")),
        entry("k", ARRAY, struct.pack("<IQ", STRING, 2) + string("a") + string("bc")),
        entry("n", ARRAY, struct.pack("<IQ", UINT32, 2) + bytes(8)),
    ]
    content = gguf_bytes(entries, [tensor_info("t", (4, 2), F32)], bytes(32))
    GGUFFile(write(content))
    for length in range(len(content)):
        with pytest.raises(CheckpointError):
            GGUFFile(write(content[:length]))


def test_a_missing_tensor_is_named(write: Callable[[bytes], Path]) -> None:
    with pytest.raises(CheckpointError, match="has no tensor 'nowhere'"):
        GGUFFile(write(gguf_bytes([], []))).tensor("nowhere")


def test_a_tensor_without_elements_is_empty(write: Callable[[bytes], Path]) -> None:
    assert GGUFFile(write(gguf_bytes([], [tensor_info("t", (0, 3), F32)]))).tensor("t").shape == (3, 0)
