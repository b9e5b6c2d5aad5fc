"""SIGHUP and ``POST /reload`` while clients run: every request ends once, with the right answer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as grpcclient

from tests.e2e.calls import until
from tests.e2e.live import LiveServer
from tests.e2e.test_tritonserver import BODY, CONFIG, write_model

CLIENTS = 8


class Load:
    """Clients that ask for 1 + ``ADD``, again and again; ``seen`` holds what came, in order, for each of them."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._done = asyncio.Event()
        self.seen: list[list[float]] = [[] for _ in range(CLIENTS)]
        self.failed: list[str] = []
        kinds = (self._http, self._grpc)
        self._tasks = [asyncio.create_task(kinds[n % 2](self.seen[n])) for n in range(CLIENTS)]

    async def _http(self, seen: list[float]) -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            while not self._done.is_set():
                answer = await client.post(f"{self._server.url}/v2/models/adder/infer", json=BODY)
                if answer.status_code == 200:
                    seen.append(answer.json()["outputs"][0]["data"][0])
                else:
                    self.failed.append(answer.text)

    async def _grpc(self, seen: list[float]) -> None:
        tensor = grpcclient.InferInput("IN", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.array([[1, 2]], np.float32))
        async with grpcclient.InferenceServerClient(self._server.grpc) as client:
            while not self._done.is_set():
                try:
                    answer: Any = await client.infer("adder", [tensor])
                    seen.append(float(answer.as_numpy("OUT")[0, 0]))
                except Exception as error:
                    self.failed.append(str(error))

    async def all_see(self, value: float) -> None:
        await until(lambda: all(seen and seen[-1] == value for seen in self.seen), f"all clients see {value}")

    async def end(self) -> None:
        self._done.set()
        await asyncio.gather(*self._tasks)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    write_model(folder, 1)
    return folder


def hang_up(server: LiveServer) -> None:
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGHUP)


async def reload(server: LiveServer) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{server.url}/reload")
    assert answer.status_code == 200
    return answer.json()


async def test_reload_under_load(repository: Path, tmp_path: Path) -> None:
    with LiveServer([f"--model-repository={repository}"], tmp_path / "log") as server:
        load = Load(server)
        try:
            await load.all_see(2)
            # Another model by SIGHUP, then by the route, then as another version.
            write_model(repository, 10)
            hang_up(server)
            await load.all_see(11)
            write_model(repository, 100)
            assert (await reload(server))["loaded"] == ["adder"]
            await load.all_see(101)
            write_model(repository, 1000, version=2)
            hang_up(server)
            hang_up(server)  # they share one rescan
            await load.all_see(1001)
            assert "settings applied" not in server.output()
            # Settings only, on the live model.
            (repository / "adder" / "config.pbtxt").write_text(
                CONFIG + "dynamic_batching { max_queue_delay_microseconds: 2000 preferred_batch_size: [ 4, 8 ] }"
            )
            loads = server.output().count("model is loaded")
            assert (await reload(server))["loaded"] == ["adder"]
            assert "settings applied, weights kept" in server.output()
            assert server.output().count("model is loaded") == loads
            # What cannot be loaded leaves the old one serving.
            (repository / "adder" / "2" / "model.py").write_text("no python at all\n")
            assert "adder" in (await reload(server))["failed"]
            hang_up(server)
            await until(lambda: server.output().count("model cannot be loaded") == 2, "it is tried again")
            await load.all_see(1001)
        finally:
            await load.end()
        assert not load.failed
        for seen in load.seen:
            assert seen == sorted(seen) and set(seen) == {2, 11, 101, 1001}
