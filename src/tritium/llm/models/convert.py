"""Any checkpoint to a Hugging Face safetensors folder: what ``tritium convert`` does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritium.errors import Code, TritiumError, invalid
from tritium.llm.checkpoint import Checkpoint, Metadata, read_metadata, unpickle
from tritium.llm.checkpoint import safetensors as files
from tritium.llm.config import DTypeName, TransformerConfig
from tritium.llm.formats import check_values
from tritium.llm.models.families import (
    FAMILIES,
    GGUF_ROPE_FACTORS,
    MODEL_TYPES,
    STORED_DTYPES,
    resolve,
    stored_name,
    unsupported,
)
from tritium.llm.tokenizer import generation_ids, load_tokenizer, tokenizer_files

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 4 * 2**30
# Everything of a Hugging Face folder that is not weights and may be needed to serve it.
KEPT = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "README*")
# Every way of cutting text into words that tokenizers differ in, and characters without a token.
PROBE = (
    "Hello, WORLD! It's 12345 o'clock;\tdon't\r\n\n  介绍一下 TensorRT-LLM。 １２３ 한국어 नमस्ते "
    "e\u0301 👨\u200d👩\u200d👧 def f(x):\n    return x**2  # ½ ² \u3000 \ue123 "
)


def convert(source: Path, out: Path, *, dtype: DTypeName = "auto") -> list[Path]:
    """Write ``source`` as safetensors with configuration and tokenizer files into the new folder ``out``.

    ``.bin`` shards are unpickled one by one in a child process (``weights_only``). A GGUF file is dequantized; its
    tensors get their Hugging Face names, and its metadata becomes config.json, generation_config.json and the
    tokenizer's files, so that the folder is whole.

    Args:
        dtype: of the written weights; auto keeps the stored one (float16 out of a quantized GGUF, whose scales
            are float16).

    Returns:
        The files written, weights first.

    Raises:
        TritiumError: the source is damaged, holds what these files have no words for, or ``out`` exists and is not
            empty.
    """
    metadata = read_metadata(source)
    config = resolve(metadata)
    if metadata.kind == "gguf" and dtype == "auto":
        quantized = any(info.dtype not in STORED_DTYPES for info in metadata.tensors.values())
        dtype = "float16" if quantized else config.dtype
    if metadata.kind == "gguf" and GGUF_ROPE_FACTORS in metadata.tensors:
        raise invalid(
            f"{metadata.path.name} scales its rotary embedding by the tensor '{GGUF_ROPE_FACTORS}', "
            "for which config.json has no key; serve the GGUF file itself"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TritiumError(Code.ALREADY_EXISTS, f"the output folder '{out.name}' exists and is not empty", param="out")
    partial = out.with_name(out.name + ".partial")  # renamed at the end: a folder with the name is a whole one
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        shards = _write_shards(partial, _tensors(metadata, config, partial, dtype))
        sides = _write_sides(metadata, config, partial, dtype)
        _check_same(config, partial)
        if metadata.kind == "gguf":
            _check_same_tokenizer(metadata, partial)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [out / path.name for path in (*shards, *sides)]


def _check_same(config: TransformerConfig, out: Path) -> None:
    """What was written must mean what was read: config.json has no words for some GGUF files."""
    written = resolve(read_metadata(out))
    head = "lm_head.weight" in read_metadata(out).tensors
    expected = replace(
        config,
        family=written.family,
        dtype=written.dtype,
        quantized=None,
        tied=written.tied if head else True,
        # generation_config.json lists every end of an answer, GGUF's own keys only some.
        eos_token_ids=written.eos_token_ids,
    )
    if written != expected:
        names = [f.name for f in fields(written) if getattr(written, f.name) != getattr(expected, f.name)]
        raise unsupported(f"config.json cannot say this of the {written.family} family: {', '.join(names)}")


def _check_same_tokenizer(source: Metadata, out: Path) -> None:
    """The tokenizer that was written must do what the GGUF file's does."""
    expected, written = load_tokenizer(source), load_tokenizer(read_metadata(out))
    texts = (PROBE, *(expected.token_text(number) for number in range(0, expected.vocab_size, 7)))
    for what, of in {
        "vocab_size": lambda t: t.vocab_size,
        "bos_token_id": lambda t: t.bos_token_id,
        "eos_token_ids": lambda t: t.eos_token_ids,
        "chat_templates": lambda t: t.chat_templates,
        "special tokens": lambda t: [number for number in range(t.vocab_size) if t.is_special(number)],
        "tokens": lambda t: [t.id_to_bytes(number) for number in range(t.vocab_size)],
        "token ids": lambda t: [t.encode(text) for text in texts],
    }.items():
        if of(expected) != of(written):
            raise unsupported(f"the files of a folder cannot say this of the GGUF file's tokenizer: {what}")


def _tensors(
    metadata: Metadata, config: TransformerConfig, folder: Path, dtype: DTypeName
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors under Hugging Face names, in the type asked for."""
    import torch

    source = {"gguf": _from_gguf, "bin": _from_bin, "safetensors": _from_safetensors}[metadata.kind]
    for name, tensor in source(metadata, config, folder):
        if dtype == "auto" or not tensor.is_floating_point():
            yield name, tensor
            continue
        target: torch.dtype = getattr(torch, dtype)
        if problem := check_values(name, tensor, target):
            raise invalid(problem, param="source")
        yield name, tensor.to(target)


def _from_safetensors(
    metadata: Metadata, config: TransformerConfig, folder: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor, _ in Checkpoint(metadata).tensors())


def _from_bin(metadata: Metadata, config: TransformerConfig, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Shard by shard: a shard's safetensors form is deleted once read (tensors still held keep their pages)."""
    seen: dict[str, str] = {}
    for source in unpickle.weight_files(metadata.path):
        target = folder / "unpickled.safetensors"
        unpickle.to_safetensors(source, target)
        for name, tensor in files.stream(files.read_header(target)):
            if name in seen:
                raise invalid(f"tensor '{name}' appears twice: in {seen[name]} and in {source.name}")
            seen[name] = source.name
            yield name, tensor
        target.unlink()


def _from_gguf(metadata: Metadata, config: TransformerConfig, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from tritium.llm.models.load import expected_shapes, plain

    checkpoint = Checkpoint(metadata)
    names = {stored_name(name, gguf=True): stored_name(name, gguf=False) for name in expected_shapes(config)}
    for name, stored, quant in checkpoint.tensors(names):
        yield names[name], plain(config, checkpoint, name, stored, quant)


def _write_shards(out: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Path]:
    """Write shards of at most ``SHARD_BYTES`` (a larger tensor gets its own) and, for several, their index."""
    from safetensors.torch import save_file

    written: list[tuple[Path, list[str]]] = []
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        path = out / f"shard-{len(written):05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(out.stat().st_mode & 0o666)  # the library lets only the owner read it
        written.append((path, list(shard)))
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor.contiguous()
    flush()
    paths = [path.rename(out / _shard_name(n, len(written))) for n, (path, _) in enumerate(written, start=1)]
    if len(paths) > 1:
        weight_map = {name: path.name for path, (_, names) in zip(paths, written, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(path.stat().st_size for path in paths)}, "weight_map": weight_map}
        (out / files.INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
        paths.append(out / files.INDEX)
    return paths


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_sides(metadata: Metadata, config: TransformerConfig, out: Path, dtype: DTypeName) -> list[Path]:
    """Configuration and tokenizer files."""
    if metadata.kind == "gguf":
        return _write_gguf_sides(metadata, replace(config, dtype=dtype), out)
    indices = {files.INDEX, unpickle.INDEX}
    found = sorted({path for pattern in KEPT for path in metadata.path.glob(pattern)})
    sides = [path for path in found if path.is_file() and path.name not in indices]
    for path in sides:
        shutil.copyfile(path, out / path.name)
    if dtype != "auto":
        values = {key: value for key, value in metadata.config.items() if key != "torch_dtype"}
        (out / "config.json").write_text(json.dumps(values | {"dtype": dtype}, indent=2))
    return [out / path.name for path in sides]


def _write_gguf_sides(metadata: Metadata, config: TransformerConfig, out: Path) -> list[Path]:
    ids = generation_ids(metadata.tokenizer["gguf"])
    contents = {
        "config.json": json.dumps(hugging_face_config(config) | ids, indent=2).encode(),
        "generation_config.json": json.dumps(ids, indent=2).encode(),
        **tokenizer_files(metadata.tokenizer["gguf"], config.max_positions),
    }
    for name, content in contents.items():
        (out / name).write_bytes(content)
    return [out / name for name in contents]


def hugging_face_config(config: TransformerConfig) -> dict[str, Any]:
    """The ``config.json`` that ``families.resolve`` reads as this configuration."""
    rope: dict[str, Any] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind != "default":
        rope["factor"] = config.rope.factor
    if config.rope.kind == "llama3":
        rope["low_freq_factor"] = config.rope.low_freq_factor
        rope["high_freq_factor"] = config.rope.high_freq_factor
        rope["original_max_position_embeddings"] = config.rope.original_max_positions
    architecture = MODEL_TYPES[config.family]
    if config.family == "llama" and config.window is not None:
        architecture = "MistralForCausalLM"  # what a llama GGUF with a window is
    activations = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].name,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": activations[config.activation],
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": config.window,
        "dtype": config.dtype,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    if config.window_layers is not None:
        kinds = ("full_attention", "sliding_attention")
        values |= {"use_sliding_window": True, "layer_types": [kinds[windowed] for windowed in config.window_layers]}
    return values
