"""Fingerprints of a model's folder: by names, sizes and times, nothing is read.

One of all its files tells whether anything has changed; one for each version, without the files that hold settings,
whether what a load reads has.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tritium.errors import Code, TritiumError

CONFIG_FILE = "config.pbtxt"
# Where ``--model-config-name`` looks, below the folder of a model.
CONFIGS_FOLDER = "configs"
TRITON_CONFIG_FILE = "triton_config.json"
WARMUP_FOLDER = "warmup"
# What Python writes beside a ``model.py``, at times that say nothing of the model.
_BYTECODE = "__pycache__"
# So many files of a model are looked at, at most.
MAX_FILES = 100_000
# Files below this size are told apart by what they hold.
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class File:
    """One file of a model.

    Attributes:
        path: below the folder of the model.
        stamp: differs when it was written to.
    """

    path: str
    size: int
    stamp: int

    @property
    def parts(self) -> list[str]:
        """Of its path."""
        return self.path.split(os.sep)


def files_of(folder: Path) -> list[File]:
    """All files below a folder, in order of their paths; hidden ones too. Links to folders are followed.

    Raises:
        TritiumError: INTERNAL when there are too many.
    """
    found: list[File] = []
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        # A link to a folder above it would never end.
        folders[:] = [] if real in seen else [name for name in folders if name != _BYTECODE]
        seen.add(real)
        for name in files:
            if len(found) == MAX_FILES:
                raise TritiumError(Code.INTERNAL, f"the folder of '{folder.name}' holds more than {MAX_FILES} files")
            path = os.path.join(place, name)
            try:
                facts = os.stat(path)
            except OSError:
                continue
            found.append(File(os.path.relpath(path, folder), facts.st_size, facts.st_mtime_ns))
    return sorted(found, key=lambda file: file.path)


def newest(folder: Path) -> float:
    """When something last came or went in a folder, or was written to, in seconds since the epoch; 0 for no folder."""
    times = [0.0]
    for place, _, files in os.walk(folder):
        for name in ("", *files):
            with suppress(OSError):
                times.append(os.stat(os.path.join(place, name)).st_mtime)
    return max(times)


def digest(files: Iterable[File]) -> str:
    """A text that differs when one of the files has changed, or has come or gone."""
    state = hashlib.blake2b(digest_size=16)
    for file in files:
        state.update(os.fsencode(file.path))
        state.update(f"\0{file.size}\0{file.stamp}\0".encode())
    return state.hexdigest()


def content(folder: Path, files: Iterable[File]) -> str:
    """A text that differs when one of the files holds something else; files of a MiB and more are not read.

    Those count by size and time, so that two machines agree on them only where the copy has kept the times.
    """
    state = hashlib.blake2b(digest_size=16)
    for file in files:
        state.update(os.fsencode(file.path) + b"\0")
        if file.size < READ_BYTES:
            with suppress(OSError):
                state.update((folder / file.path).read_bytes()[:READ_BYTES])
        else:
            state.update(str(file.stamp).encode())
        state.update(f"\0{file.size}\0".encode())
    return state.hexdigest()


def loaded_by(files: Iterable[File], version: int, labels: Collection[str] = ()) -> list[File]:
    """The files that a load of one version reads, apart from those that hold settings.

    Args:
        labels: files with names of classes.
    """
    kept: list[File] = []
    for file in files:
        first, *rest = file.parts
        if not rest:
            if first not in (CONFIG_FILE, TRITON_CONFIG_FILE) and first not in labels:
                kept.append(file)
        elif first == str(version):
            if rest != [TRITON_CONFIG_FILE]:
                kept.append(file)
        elif first not in (CONFIGS_FOLDER, WARMUP_FOLDER) and not first.isdecimal() and file.path not in labels:
            kept.append(file)
    return kept
