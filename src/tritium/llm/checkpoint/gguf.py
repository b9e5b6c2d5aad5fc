"""GGUF files: key-values and the table of tensors, fast and without trusting a size.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the ``gguf`` package takes
seconds for a large vocabulary, since it makes an array object of every string; this one takes milliseconds.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tritium.errors import TritiumError, invalid
from tritium.llm.checkpoint.metadata import INCOMPLETE, TensorInfo

if TYPE_CHECKING:
    import torch

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NESTING = 4
STRING, ARRAY = 8, 9

# GGUF value type -> numpy type, and its struct letter.
SCALARS = {
    0: ("u1", "B"),
    1: ("i1", "b"),
    2: ("<u2", "H"),
    3: ("<i2", "h"),
    4: ("<u4", "I"),
    5: ("<i4", "i"),
    6: ("<f4", "f"),
    7: ("?", "?"),
    10: ("<u8", "Q"),
    11: ("<i8", "q"),
    12: ("<f8", "d"),
}

# ggml type -> (name, elements of a block, bytes of a block).
GGML_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}


class _Cursor:
    """A position in the mapped file; every read is checked against its end."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.name = name
        self.at = 0
        self.what = "the header"

    def need(self, count: int) -> None:
        if count > len(self.data) - self.at:
            raise invalid(
                f"{self.name} is truncated or damaged: {self.what} needs {count} bytes at {self.at}, "
                f"but the file ends at {len(self.data)}",
                reason=INCOMPLETE,
            )

    def scalar(self, letter: str) -> Any:
        size = struct.calcsize("<" + letter)
        self.need(size)
        (value,) = struct.unpack_from("<" + letter, self.data, self.at)
        self.at += size
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self.need(length)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise invalid(f"{self.name}: {self.what} holds a text that is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind][1])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth == MAX_NESTING:
            raise invalid(f"{self.name}: {self.what} has the value type {kind} (nesting {depth}), which is unknown")
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in SCALARS:
            dtype = np.dtype(SCALARS[inner][0])
            self.need(count * dtype.itemsize)
            array = np.frombuffer(self.data, dtype, count, self.at).tolist()
            self.at += count * dtype.itemsize
            return array
        self.need(count * 8)  # each element takes at least its length
        if inner == STRING:
            return self._strings(count)
        return [self.value(inner, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """``string`` in a loop, unrolled by hand: a vocabulary has hundreds of thousands."""
        data, at, end = self.data, self.at, len(self.data)
        unpack = struct.Struct("<Q").unpack_from
        result: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                if at > end:
                    raise struct.error
                result.append(data[start:at].decode("utf-8"))
        except struct.error:
            text = f"{self.name} is truncated or damaged: {self.what} runs past the end of the file"
            raise invalid(text, reason=INCOMPLETE) from None
        except UnicodeDecodeError:
            raise invalid(f"{self.name}: {self.what} holds a text that is not UTF-8") from None
        self.at = at
        return result


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """All key-values, and the tensors by name.

    Raises:
        TritiumError: the file is damaged, or of a version or tensor type that is not supported.
    """
    if path.stat().st_size < 24:
        raise invalid(f"{path.name} is not a GGUF file: it has {path.stat().st_size} bytes", reason=INCOMPLETE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != MAGIC:
            raise invalid(f"{path.name} is not a GGUF file: it starts with {data[:4]!r}, expected {MAGIC!r}")
        cursor = _Cursor(data, path.name)
        cursor.at = 4
        version, num_tensors, num_keys = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
        if version not in VERSIONS:
            raise invalid(f"{path.name} has GGUF version {version}, expected one of {VERSIONS} in little-endian order")
        values = _read_keys(cursor, num_keys)
        if values.get("split.count", 1) > 1:
            raise invalid(f"{path.name} is one part of a split GGUF; merge it first (llama-gguf-split --merge)")
        return values, _read_tensors(cursor, num_tensors, values, path)


def _read_keys(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        cursor.what = "a key"
        key = cursor.string()
        if key in values:
            raise invalid(f"{cursor.name}: the key '{key}' appears twice")
        cursor.what = f"the value of '{key}'"
        values[key] = cursor.value(cursor.scalar("I"))
    return values


def _read_tensors(cursor: _Cursor, count: int, values: dict[str, Any], path: Path) -> dict[str, TensorInfo]:
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise invalid(f"{path.name}: general.alignment is {alignment}, expected a power of two")
    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        cursor.what = "the table of tensors"
        name = cursor.string()
        num_dims = cursor.scalar("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise invalid(f"{path.name}: tensor '{name}' has {num_dims} dimensions, expected 1 to {MAX_DIMS}")
        shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
        entries.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    start = -(-cursor.at // alignment) * alignment
    size = len(cursor.data)
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise invalid(f"{path.name}: tensor '{name}' appears twice")
        tensors[name] = _tensor_info(path, name, shape, kind, start + offset, size)
    return tensors


def _tensor_info(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, size: int) -> TensorInfo:
    where = f"tensor '{name}' in {path.name}"
    if kind not in GGML_TYPES:
        known = ", ".join(entry[0] for entry in GGML_TYPES.values())
        raise invalid(f"{where} has the ggml type {kind}, expected one of {known}")
    dtype, block, block_bytes = GGML_TYPES[kind]
    if shape[-1] % block:
        raise invalid(f"{where} has rows of {shape[-1]} elements, expected a multiple of {block} for {dtype}")
    num_bytes = math.prod(shape) // block * block_bytes
    if offset + num_bytes > size:
        text = f"{where} ends at byte {offset + num_bytes}, but the file ends at {size}: it is truncated"
        raise invalid(text, reason=INCOMPLETE)
    return TensorInfo(dtype, shape, path, offset, num_bytes)


def stream(table: dict[str, TensorInfo]) -> Iterator[tuple[str, torch.Tensor, dict[str, Any] | None]]:
    """Yield the tensors in file order: plain ones as they are, quantized ones as their bytes.

    The bytes come as uint8 [num_bytes] with ``{"type": name, "shape": shape}``; ``formats.gguf`` knows their meaning.
    """
    import torch

    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for name, info in sorted(table.items(), key=lambda item: item[1].offset):
        raw = np.fromfile(info.file, np.uint8, info.num_bytes, offset=info.offset)
        if raw.size != info.num_bytes:
            raise _shrunk(name, info, raw.size)
        tensor = torch.from_numpy(raw)
        if info.dtype in plain:
            yield name, tensor.view(plain[info.dtype]).reshape(info.shape), None
        else:
            yield name, tensor, {"type": info.dtype, "shape": info.shape}


def _shrunk(name: str, info: TensorInfo, size: int) -> TritiumError:
    return invalid(
        f"tensor '{name}' in {info.file.name} has {size} bytes, expected {info.num_bytes}: the file shrank while read"
    )
