"""A model that says itself whether it is ready (``is_ready`` of the Python backend)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.backends.python_models import ECHO, FLOATS, HEAD
from tests.serving.fakes import write_model
from tests.serving.support import serving, until
from tritium.serving import instances
from tritium.serving.server import Server

CODE = (
    HEAD
    + "import os\n"
    + ECHO
    + """
    def initialize(self, args):
        self.place = os.path.join(args["model_repository"], "..", args["model_instance_name"])

    def is_ready(self):
        if os.path.exists(self.place + ".slow"):
            time.sleep(30)
        if os.path.exists(self.place + ".broken"):
            raise RuntimeError("on purpose")
        return not os.path.exists(self.place + ".down")
"""
)


def pids(server: Server, name: str) -> list[int]:
    backend = server._catalog.find(name, "")._backend
    assert isinstance(backend, instances.Instances)
    return backend.pids()


@pytest.fixture
def folder(repository: Path) -> Path:
    config = f'backend: "python"\n{FLOATS}instance_group {{ count: 2 }}\n'
    (write_model(repository, "demo", config) / "1" / "model.py").write_text(CODE)
    return repository


async def test_one_copy_that_is_not_ready_is_enough(folder: Path):
    async with serving(folder, control="explicit", load_models=["demo"]) as server:
        assert await server.model_healthy("demo") and await server.model_healthy("demo", "1")
        (folder / "demo_0_1.down").touch()
        assert not await server.model_healthy("demo")
        # It is in service nevertheless, and so is the server: only who asks for this model is told.
        assert server.model_ready("demo") and server.ready()
        (folder / "demo_0_1.down").unlink()
        assert await server.model_healthy("demo")
        (folder / "demo_0_0.broken").touch()
        assert not await server.model_healthy("demo")
        (folder / "demo_0_0.broken").unlink()
        assert not await server.model_healthy("demo", "2") and not await server.model_healthy("other")


async def test_a_copy_that_is_started_again_does_not_count_while_another_serves(folder: Path):
    async with serving(folder, control="explicit", load_models=["demo"]) as server:
        before = pids(server, "demo")
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: len(pids(server, "demo")) == 1 or before[0] not in pids(server, "demo"))
        assert await server.model_healthy("demo")


async def test_a_copy_that_does_not_answer_is_not_ready(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(instances, "ASK_S", 0.3)
    async with serving(folder, control="explicit", load_models=["demo"]) as server:
        (folder / "demo_0_0.slow").touch()
        assert not await server.model_healthy("demo")
        for pid in pids(server, "demo"):
            os.kill(pid, signal.SIGKILL)  # it would sleep on while the test ends
