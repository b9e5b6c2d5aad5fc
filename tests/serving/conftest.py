from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.fakes import Echo, Text
from tritium.backends import BACKENDS, PLATFORMS


@pytest.fixture(autouse=True)
def fake_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(BACKENDS, "echo", "tests.serving.fakes:Echo")
    monkeypatch.setitem(BACKENDS, "text", "tests.serving.fakes:Text")
    monkeypatch.setitem(BACKENDS, "absent", "tests.serving.no_such_module:Nothing")
    monkeypatch.setitem(PLATFORMS, "echo_platform", "echo")
    Echo.made, Text.made, Echo.load_gate = [], [], None
    yield


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder
