"""Files of a model besides its configuration: those that came with a load request, and the labels of classes."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from tritium.backends.config import ModelConfig
from tritium.errors import invalid
from tritium.serving.config import read_limited

_PREFIX = "tritium-model-"


class Scratch:
    """A folder with the files of a load request, removed with this object.

    Args:
        name: of the model; the folder is called so.
        files: contents by path, which must stay within the folder.

    Raises:
        TritiumError: INVALID_ARGUMENT for a name or a path that would leave the folder.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        if name in ("", ".", "..") or "/" in name or not name.isprintable():
            raise invalid(f"model name '{name[:100]}' cannot be that of a folder", param="name")
        paths = {given: _inside(given) for given in files}
        self._root = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.folder = self._root / name
        try:
            self.folder.mkdir()
            for given, content in files.items():
                target = self.folder / paths[given]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        except OSError as error:
            self.close()
            raise invalid(f"the files of model '{name}' cannot be written: {error.strerror}", param="file") from None

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._root, ignore_errors=True)

    def __del__(self) -> None:
        if hasattr(self, "_root"):
            self.close()


def _inside(given: str) -> PurePosixPath:
    path = PurePosixPath(given)
    parts = path.parts
    if not parts or path.is_absolute() or ".." in parts or not given.isprintable() or len(given) > 1000:
        raise invalid(f"file '{given[:100]}' is not a path below the model's folder", param=f"file:{given[:100]}")
    return path


def keep_labels(config: ModelConfig, before: ModelConfig) -> ModelConfig:
    """A configuration that a backend has made anew out of ``before``, with the labels of that."""
    outputs = tuple(
        dataclasses.replace(spec, labels=old.labels) if (old := before.output(spec.name)) is not None else spec
        for spec in config.outputs
    )
    return dataclasses.replace(config, outputs=outputs)


def label_files(config: ModelConfig) -> set[str]:
    """Paths of the files with names of classes, below the folder of the model."""
    return {output.label_filename for output in config.source.output if output.label_filename}


def with_labels(config: ModelConfig, folder: Path) -> ModelConfig:
    """The configuration with the labels of its outputs.

    Args:
        folder: of the model, where ``label_filename`` lies.

    Raises:
        TritiumError: INVALID_ARGUMENT when a file is missing, too large, no text, or outside of the folder.
    """
    names = {output.name: output.label_filename for output in config.source.output if output.label_filename}
    if not names:
        return config
    outputs = tuple(
        dataclasses.replace(spec, labels=_labels(folder, names[spec.name])) if spec.name in names else spec
        for spec in config.outputs
    )
    return dataclasses.replace(config, outputs=outputs)


def _labels(folder: Path, name: str) -> tuple[str, ...]:
    content = read_limited(folder / _inside(name), f"label_filename '{name}'")
    try:
        return tuple(content.decode().splitlines())
    except UnicodeDecodeError:
        raise invalid(f"label_filename '{name}' is not UTF-8 text", param="label_filename") from None
