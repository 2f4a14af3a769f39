"""Reads GGUF, the single-file format of llama.cpp: header, metadata, tensors.

    magic "GGUF", version | metadata: key, type, value ... | tensors: name, shape, type, offset ... | padding | data

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package has a reader of its own,
which takes seconds over the string arrays of a vocabulary; this one takes a tenth of one. Enums, block sizes and the
dequantisation are that package's.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants

from octavo.errors import CheckpointError

SUPPORTED_TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
# Types that torch has too: their tensors are views of the file, without a copy.
_TORCH_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
# Deeper than anything real; a file must not choose how deep this process recurses.
_MAX_ARRAY_DEPTH = 3
# Enough for numpy to spend its time outside the interpreter, few enough for the temporaries to stay in the cache.
_BLOCKS_AT_A_TIME = 4096

_STRING = int(gguf.GGUFValueType.STRING)
_ARRAY = int(gguf.GGUFValueType.ARRAY)
_BOOL = int(gguf.GGUFValueType.BOOL)
_NUMBER_FORMATS = {
    int(gguf.GGUFValueType.UINT8): "<u1",
    int(gguf.GGUFValueType.INT8): "<i1",
    int(gguf.GGUFValueType.UINT16): "<u2",
    int(gguf.GGUFValueType.INT16): "<i2",
    int(gguf.GGUFValueType.UINT32): "<u4",
    int(gguf.GGUFValueType.INT32): "<i4",
    int(gguf.GGUFValueType.FLOAT32): "<f4",
    _BOOL: "<u1",
    int(gguf.GGUFValueType.UINT64): "<u8",
    int(gguf.GGUFValueType.INT64): "<i8",
    int(gguf.GGUFValueType.FLOAT64): "<f8",
}


@dataclass(frozen=True)
class GGUFTensorInfo:
    """Where one tensor lies.

    Attributes:
        shape: As torch counts: rows first, the contiguous dimension last.
        type_name: One of `SUPPORTED_TENSOR_TYPES`.
        start: First byte, from the start of the file.
        num_bytes: Bytes that the tensor takes in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` by name, and `tensor` for their values.

    Metadata values are Python numbers, bools and strings; arrays of numbers are numpy arrays, arrays of strings lists.

    Raises:
        CheckpointError: The file is not GGUF, is truncated, contradicts itself or holds a tensor of an unsupported
            type. Every length is checked against the file's size before anything is allocated for it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map_file(path)
        reader = _Reader(path, self._data)
        num_tensors, num_entries = _read_header(reader)
        self.metadata = _read_metadata(reader, num_entries)
        self.tensors = _read_tensor_infos(reader, num_tensors, self._alignment())

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise CheckpointError(
                f"{self.path} gives {alignment!r} as general.alignment; GGUF asks for a positive multiple of 8. "
                "Fetch or convert the file again."
            )
        return alignment

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU; safe to call from several threads.

        Quantised types come out as float32. F32, F16 and BF16 come out as they are, as views of the file: writing to
        such a tensor changes neither the file nor anyone else's view of it on disk.

        Raises:
            CheckpointError: The file has no tensor of that name.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}.")
        if 0 in info.shape:
            return torch.empty(info.shape, dtype=_TORCH_TYPES.get(info.type_name, torch.float32))
        if info.type_name in _TORCH_TYPES:
            dtype = _TORCH_TYPES[info.type_name]
            flat = torch.frombuffer(self._data, dtype=dtype, count=info.num_bytes // dtype.itemsize, offset=info.start)
            return flat.view(info.shape)
        block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[info.type_name]][1]
        raw = np.frombuffer(self._data, dtype=np.uint8, count=info.num_bytes, offset=info.start)
        return torch.from_numpy(_dequantize(raw.reshape(-1, block_bytes), info.type_name)).view(info.shape)


def _dequantize(blocks: np.ndarray[Any, Any], type_name: str) -> np.ndarray[Any, Any]:
    """Return the values of quantised blocks, float32. [num_blocks, block_bytes] -> [num_blocks, block_size]

    `gguf.quants.dequantize` would do, four times slower: it goes sixteen rows at a time, and holds the interpreter's
    lock for most of it.
    """
    codec = getattr(quants, type_name)
    values = np.empty((len(blocks), codec.block_size), dtype=np.float32)
    for start in range(0, len(blocks), _BLOCKS_AT_A_TIME):
        stop = start + _BLOCKS_AT_A_TIME
        values[start:stop] = codec.dequantize_blocks(blocks[start:stop])
    return values


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(
                    f"{path} does not start with the letters GGUF, so it is not a GGUF file, whatever its name says. "
                    "Fetch it again, or give the path of a .gguf file."
                )
            # A private mapping is writable memory to torch and numpy, and still never written back.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


class _Reader:
    """Walks the bytes before the tensor data, never past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 4

    def truncated(self, reading: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is truncated or corrupt: {reading} would reach past its end, at {self.size} bytes. "
            "Fetch it again."
        )

    def check(self, num_bytes: int, reading: str) -> None:
        if num_bytes > self.size - self.position:
            raise self.truncated(reading)

    def number(self, value_type: int, reading: str) -> int | float | bool:
        value = self.numbers(value_type, 1, reading)[0].item()
        return bool(value) if value_type == _BOOL else value

    def uint32(self, reading: str) -> int:
        return int(self.number(int(gguf.GGUFValueType.UINT32), reading))

    def uint64(self, reading: str) -> int:
        return int(self.number(int(gguf.GGUFValueType.UINT64), reading))

    def numbers(self, value_type: int, count: int, reading: str) -> np.ndarray[Any, Any]:
        dtype = np.dtype(_NUMBER_FORMATS[value_type])
        self.check(count * dtype.itemsize, reading)
        values = np.frombuffer(self.data, dtype=dtype, count=count, offset=self.position)
        self.position += count * dtype.itemsize
        return values

    def strings(self, count: int, reading: str) -> list[str]:
        # The one loop whose speed shows: a vocabulary is a hundred thousand strings and more.
        self.check(count * 8, reading)
        data, size, position = self.data, self.size, self.position
        read_length = struct.Struct("<Q").unpack_from
        result: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + read_length(data, position)[0]
                if position > size:
                    raise self.truncated(reading)
                result.append(data[start:position].decode())
        except struct.error as error:
            raise self.truncated(reading) from error
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} is corrupt: {reading} is not UTF-8 text. Fetch it again.") from error
        self.position = position
        return result

    def value(self, value_type: int, reading: str, depth: int = 0) -> Any:
        if value_type == _STRING:
            return self.strings(1, reading)[0]
        if value_type in _NUMBER_FORMATS:
            return self.number(value_type, reading)
        if value_type != _ARRAY or depth >= _MAX_ARRAY_DEPTH:
            raise CheckpointError(
                f"{self.path} is corrupt: {reading} has the value type {value_type}, which GGUF does not define here. "
                "Fetch it again."
            )
        item_type = self.uint32(reading)
        count = self.uint64(reading)
        if item_type == _STRING:
            return self.strings(count, reading)
        if item_type in _NUMBER_FORMATS:
            return self.numbers(item_type, count, reading)
        self.check(count * 12, reading)  # an empty array takes 12 bytes
        return [self.value(item_type, reading, depth + 1) for _ in range(count)]


def _read_header(reader: _Reader) -> tuple[int, int]:
    """Return how many tensors and how many metadata entries follow."""
    version = reader.uint32("the header")
    if version not in _SUPPORTED_VERSIONS:
        # A big-endian file shows its version in the upper bytes.
        kind = "a big-endian file" if version and version & 0xFFFF == 0 else f"version {version}"
        raise CheckpointError(
            f"{reader.path} is GGUF of an unsupported kind: {kind}. Little-endian versions "
            f"{' and '.join(map(str, _SUPPORTED_VERSIONS))} can be read; convert the model again with a current "
            "llama.cpp."
        )
    return reader.uint64("the header"), reader.uint64("the header")


def _read_metadata(reader: _Reader, num_entries: int) -> dict[str, Any]:
    reader.check(num_entries * 13, "the metadata")  # a key's length, a type, one byte of value
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = reader.strings(1, "the metadata")[0]
        reading = f"the metadata entry {key!r}"
        metadata[key] = reader.value(reader.uint32(reading), reading)
    return metadata


def _read_tensor_infos(reader: _Reader, num_tensors: int, alignment: int) -> dict[str, GGUFTensorInfo]:
    reader.check(num_tensors * 24, "the list of tensors")  # a name's length, dimensions, type, offset
    entries: list[tuple[str, tuple[int, ...], str, int]] = []
    for _ in range(num_tensors):
        name = reader.strings(1, "the list of tensors")[0]
        reading = f"the entry of tensor {name!r}"
        num_dimensions = reader.uint32(reading)
        if num_dimensions > _MAX_DIMENSIONS:
            raise CheckpointError(
                f"{reader.path} is corrupt: tensor {name!r} claims {num_dimensions} dimensions, and GGUF has at most "
                f"{_MAX_DIMENSIONS}. Fetch it again."
            )
        # GGUF lists the contiguous dimension first.
        shape = tuple(reversed([reader.uint64(reading) for _ in range(num_dimensions)]))
        type_name = _tensor_type_name(reader.path, name, reader.uint32(reading))
        entries.append((name, shape, type_name, reader.uint64(reading)))

    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, GGUFTensorInfo] = {}
    for name, shape, type_name, offset in entries:
        num_bytes = _num_bytes(reader.path, name, shape, type_name)
        start = data_start + offset
        if start + num_bytes > reader.size:
            raise CheckpointError(
                f"{reader.path} is truncated: tensor {name!r} ends at byte {start + num_bytes}, and the file has "
                f"{reader.size}. Fetch it again."
            )
        if offset % alignment or name in tensors:
            raise CheckpointError(
                f"{reader.path} is corrupt: tensor {name!r} is listed twice or at a place that is not a multiple of "
                f"{alignment}. Fetch it again."
            )
        tensors[name] = GGUFTensorInfo(name, shape, type_name, start, num_bytes)
    return tensors


def _tensor_type_name(path: Path, tensor_name: str, type_number: int) -> str:
    try:
        type_name = str(gguf.GGMLQuantizationType(type_number).name)
    except ValueError:
        type_name = f"number {type_number}"
    if type_name not in SUPPORTED_TENSOR_TYPES:
        raise CheckpointError(
            f"Tensor {tensor_name!r} in {path} has the type {type_name}, which cannot be read. Supported types: "
            f"{' '.join(SUPPORTED_TENSOR_TYPES)}. Convert the model to one of them."
        )
    return type_name


def _num_bytes(path: Path, name: str, shape: tuple[int, ...], type_name: str) -> int:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    row_length = shape[-1] if shape else 1
    if row_length % block_size:
        raise CheckpointError(
            f"{path} is corrupt: tensor {name!r} has rows of {row_length} numbers, and {type_name} stores them in "
            f"blocks of {block_size}. Fetch it again."
        )
    num_elements = 1
    for length in shape:
        num_elements *= length  # Python integers: a lying shape does not wrap around
    return int(num_elements // block_size * block_bytes)
