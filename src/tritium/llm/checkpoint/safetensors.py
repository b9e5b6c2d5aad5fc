"""Headers of safetensors files, and the folder of them that a Hugging Face checkpoint is.

Format: https://github.com/huggingface/safetensors#format (8 bytes little-endian header size, JSON header, data).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tritium.errors import invalid
from tritium.llm.checkpoint.metadata import INCOMPLETE, TensorInfo, parse_json, read_json

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file, each checked to lie inside it with the size that its shape needs.

    Raises:
        TritiumError: names the file, the tensor and what was expected.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise invalid(
                f"{path.name} is not a whole safetensors file: its header claims {length} bytes, "
                f"expected 2 to {max(2, min(size - 8, MAX_HEADER_BYTES))} (the file has {size})",
                reason=INCOMPLETE,
            )
        header = parse_json(file.read(length), f"the header of {path.name}")
    header.pop("__metadata__", None)
    start = 8 + length
    return {name: _tensor_info(path, name, entry, start, size - start) for name, entry in header.items()}


def _tensor_info(path: Path, name: str, entry: Any, start: int, data_bytes: int) -> TensorInfo:
    where = f"tensor '{name}' in {path.name}"
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise invalid(f"{where} has no dtype, shape and data_offsets") from None
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise invalid(f"{where} has the shape {list(shape)} and data_offsets {[begin, end]}, expected whole numbers")
    if dtype not in DTYPE_BITS:
        raise invalid(f"{where} has dtype {dtype}, expected one of {', '.join(DTYPE_BITS)}")
    needed = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if not begin <= end <= data_bytes:
        text = f"{where} lies at bytes {begin} to {end}, but the file holds only {data_bytes}: it is truncated"
        raise invalid(text, reason=INCOMPLETE)
    if end - begin != needed:
        raise invalid(f"{where} has {end - begin} bytes, expected {needed} for {dtype} {list(shape)}")
    return TensorInfo(dtype, shape, path, start + begin, needed)


def confined(folder: Path, name: object, source: str) -> Path:
    """The file ``name`` of a folder; names that lead out of it are refused (links inside it are the owner's)."""
    if not isinstance(name, str) or not name:
        raise invalid(f"{source} names the shard {name!r}, expected a file name")
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        raise invalid(f"{source} names the shard '{name}', which is outside the checkpoint folder")
    return folder / name


def shards(folder: Path, index: Path) -> dict[Path, set[str]]:
    """Shards that an index names, each with the tensors it should hold."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise invalid(f"{index.name} has no weight_map")
    files: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        files.setdefault(confined(folder, name, index.name), set()).add(tensor)
    for path in files:
        if not path.is_file():
            raise invalid(f"the shard {path.name} is absent, but {index.name} names it", reason=INCOMPLETE)
    return files


def weight_files(folder: Path) -> dict[Path, set[str]]:
    """The safetensors files of a folder and the tensors their index promises; empty when there are none."""
    index = folder / INDEX
    if index.is_file():
        return shards(folder, index)
    if (folder / "model.safetensors").is_file():
        return {folder / "model.safetensors": set()}
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise invalid(f"several safetensors files ({names}) but no {INDEX} that says what they hold")
    return {path: set() for path in files}


def read_tensor_table(files: dict[Path, set[str]]) -> dict[str, TensorInfo]:
    """Merge the headers of the shards; a tensor in two shards, or not where the index says, is refused."""
    table: dict[str, TensorInfo] = {}
    for path, promised in files.items():
        header = read_header(path)
        for name in promised - header.keys():
            raise invalid(f"tensor '{name}' is not in {path.name}, where {INDEX} says it is")
        for name in table.keys() & header.keys():
            raise invalid(f"tensor '{name}' appears twice: in {table[name].file.name} and in {path.name}")
        table |= header
    return table


def stream(table: dict[str, TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the order in which they lie on disk; each is a view of the mapped file."""
    from safetensors import SafetensorError, safe_open

    by_file: dict[Path, list[str]] = {}
    for name in sorted(table, key=lambda name: (table[name].file, table[name].offset)):
        by_file.setdefault(table[name].file, []).append(name)
    for path, names in by_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise invalid(f"{path.name} cannot be read: {error}") from None
