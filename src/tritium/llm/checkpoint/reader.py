"""Find a checkpoint, read its metadata, stream its tensors: one door for all kinds of file."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritium.errors import Code, TritiumError, invalid
from tritium.llm.checkpoint import gguf, safetensors, unpickle
from tritium.llm.checkpoint.metadata import (
    INCOMPLETE,
    Kind,
    Metadata,
    TensorInfo,
    read_json,
    read_optional,
    tokenizer_files,
)

if TYPE_CHECKING:
    import torch


class Checkpoint:
    """An opened checkpoint.

    Attributes:
        path: the Hugging Face folder or the GGUF file.
        kind: of its files.
        metadata: everything but the numbers; its table of tensors is complete for every kind.
    """

    def __init__(self, metadata: Metadata, temporary: Path | None = None) -> None:
        self.metadata = metadata
        if temporary is not None:  # the safetensors form of .bin shards
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)

    @property
    def path(self) -> Path:
        """The Hugging Face folder or the GGUF file."""
        return self.metadata.path

    @property
    def kind(self) -> Kind:
        """Kind of the files."""
        return self.metadata.kind

    def tensors(self, only: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor, dict[str, Any] | None]]:
        """Every tensor once (or only those named): name, values, and how they are quantized (None: not at all).

        Names are those of the file. Quantized GGUF tensors are uint8 bytes with ``{"type", "shape"}``, for
        ``formats.gguf.dequantize``. One tensor at a time is in memory.
        """
        table = self.metadata.tensors
        if only is not None:
            table = {name: info for name, info in table.items() if name in only}
        if self.kind == "gguf":
            yield from gguf.stream(table)
            return
        for name, tensor in safetensors.stream(table):
            yield name, tensor, None


def open_checkpoint(path: Path, *, allow_bin: bool = False) -> Checkpoint:
    """Open a Hugging Face folder or a GGUF file.

    Args:
        path: of the folder or the file.
        allow_bin: also read pickled ``.bin`` shards, in a child process. Their safetensors form lies in the
            temporary folder (``TMPDIR``) while the checkpoint is open.

    Raises:
        TritiumError: nothing usable there; the message names the file.
    """
    metadata = read_metadata(path)
    if metadata.kind != "bin":
        return Checkpoint(metadata)
    files = unpickle.weight_files(metadata.path)
    if not allow_bin:
        raise unpickle.refusal(files)
    folder = Path(tempfile.mkdtemp(prefix="tritium-bin-"))
    opened = Checkpoint(metadata, folder)  # from here on the folder goes when this does, also by an error
    targets = {folder / f"{file.name}.safetensors": file for file in files}
    for target, source in targets.items():
        unpickle.to_safetensors(source, target)
    opened.metadata = replace(metadata, tensors=safetensors.read_tensor_table({target: set() for target in targets}))
    return opened


def read_metadata(path: Path) -> Metadata:
    """Metadata of a Hugging Face folder, a GGUF file, or a folder with one of them; without torch.

    Raises:
        TritiumError: the path is absent, holds no checkpoint, or one that is damaged.
    """
    if path.is_dir():
        return _read_folder(path) if _is_checkpoint(path) else _read_found(path)
    if not path.exists():
        raise TritiumError(Code.NOT_FOUND, f"the checkpoint '{path}' does not exist", param="model")
    return _read_gguf(path)


def incomplete(folder: Path) -> str:
    """What a folder's checkpoints still lack by their own word (sizes in headers, shards in an index); "" for nothing.

    Only this is looked at: what is wrong in another way is for the load to say. Looks one level down too.
    """
    for place in (folder, *(entry for entry in sorted(folder.iterdir()) if entry.is_dir())):
        for path in sorted(place.iterdir()):
            try:
                if path.name == safetensors.INDEX:
                    safetensors.shards(place, path)
                elif path.suffix == ".safetensors":
                    safetensors.read_header(path)
                elif path.suffix == ".gguf":
                    gguf.read_gguf(path)
            except TritiumError as error:
                if error.reason == INCOMPLETE:
                    return error.message
            except OSError as error:
                return f"{path.name} cannot be read: {error.strerror}"
    return ""


def find_checkpoint(folder: Path) -> Path:
    """The only checkpoint in a folder: the folder itself, a folder in it, or a GGUF file in it.

    Raises:
        TritiumError: there is none, or more than one (all are named).
    """
    inner = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [folder] if _is_checkpoint(folder) else [path for path in inner if _is_checkpoint(path)]
    found += [path for path in inner if path.is_file() and path.suffix == ".gguf"]
    if not found:
        raise TritiumError(
            Code.NOT_FOUND,
            f"no checkpoint in '{folder.name}': expected config.json with safetensors files, or one GGUF file",
            param="model",
        )
    if len(found) > 1:
        names = ", ".join("its own safetensors files" if path == folder else f"'{path.name}'" for path in found)
        raise invalid(f"more than one checkpoint in '{folder.name}': {names}; name the one to serve", param="model")
    return found[0]


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(
        next(folder.glob(pattern), None) for pattern in ("*.safetensors", safetensors.INDEX, "pytorch_model*.bin*")
    )


def _read_found(folder: Path) -> Metadata:
    try:
        return read_metadata(find_checkpoint(folder))
    except TritiumError as error:
        stray = next((path.name for path in folder.glob("*.safetensors")), None)
        if error.code is Code.NOT_FOUND and stray:
            raise invalid(f"'{folder.name}' holds {stray} but no config.json", param="model") from None
        raise


def _read_folder(folder: Path) -> Metadata:
    files = safetensors.weight_files(folder)
    tensors: dict[str, TensorInfo] = {}
    kind: Kind = "safetensors"
    if files:
        tensors = safetensors.read_tensor_table(files)
    elif unpickle.weight_files(folder):
        kind = "bin"
    else:
        raise invalid(f"'{folder.name}' has .bin files, but neither {unpickle.SINGLE} nor {unpickle.INDEX}")
    return Metadata(
        path=folder,
        kind=kind,
        config=read_json(folder / "config.json"),
        generation_config=read_optional(folder / "generation_config.json"),
        tokenizer=tokenizer_files(folder),
        tensors=tensors,
    )


def _read_gguf(path: Path) -> Metadata:
    values, tensors = gguf.read_gguf(path)
    tokenizer = {key: value for key, value in values.items() if key.startswith("tokenizer.")}
    template = tokenizer.get("tokenizer.chat_template")
    return Metadata(
        path=path,
        kind="gguf",
        config={key: value for key, value in values.items() if key not in tokenizer},
        generation_config={},
        tokenizer={
            "gguf": tokenizer,
            "tokenizer_config": {},
            "chat_template": template if isinstance(template, str) else None,
            "special_tokens_map": {},
            "added_tokens": {},
        },
        tensors=tensors,
    )
