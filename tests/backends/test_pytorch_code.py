"""A file of the backend ``pytorch`` is data: nothing in it runs while it is loaded."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.runtime_models import load_error


class Twice(torch.nn.Module):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a * 2


class Code:
    """What makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._folder,)


def write(path: Path, change: dict[str, bytes], more: str = "") -> None:
    """A sound program, with other content for the files whose names end so, and with one more file."""
    path.parent.mkdir(parents=True)
    sound = io.BytesIO()
    torch.export.save(torch.export.export(Twice(), (torch.ones(2, 3),)), sound)
    with zipfile.ZipFile(sound) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            found = next((content for end, content in change.items() if name.endswith(end)), source.read(name))
            target.writestr(name, found)
        if more:
            target.writestr(f"model/{more}", b"\x7fELF")


@pytest.mark.parametrize("switch", ["", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
async def test_pickled_code_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    if switch:
        monkeypatch.setenv(switch, "1")
    made = io.BytesIO()
    torch.save(Code(tmp_path / "ran"), made)
    write(tmp_path / "repo" / "m" / "1" / "model.pt2", {"sample_inputs/model.pt": made.getvalue()})
    assert "'model.pt2' cannot be loaded by pytorch" in await load_error(tmp_path / "repo", "m")
    assert not (tmp_path / "ran").exists()


async def test_compiled_libraries_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1" / "model.pt2", {}, "data/aotinductor/model/wrapper.so")
    assert "holds libraries compiled by AOTInductor" in await load_error(tmp_path, "m")
