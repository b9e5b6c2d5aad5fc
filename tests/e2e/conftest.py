"""Servers that the end-to-end tests share: a tiny random model, and the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live import LiveServer
from tests.tiny import make_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of a few thousand parameters."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The tiny model, served under the name ``tiny``."""
    log = tmp_path_factory.mktemp("tiny-server") / "log"
    arguments = [str(tiny_checkpoint), "--dtype=float32", "--served-model-name", "tiny", "org/Tiny"]
    with LiveServer(arguments, log) as server:
        yield server


@pytest.fixture(scope="session")
def smol_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """SmolLM2 in float32, as the reference is."""
    log = tmp_path_factory.mktemp("smol-server") / "log"
    with LiveServer(["smollm2", "--dtype=float32", "--max-length=2048"], log) as server:
        yield server
