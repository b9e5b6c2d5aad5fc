from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.serving.fakes import ECHO, Echo, request, write_model
from tests.serving.support import ALL, FAIL, refused, serving, touch, until
from tritium.errors import Code
from tritium.serving import watch


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SETTLE_S", 0.01)


async def test_poll_follows_the_files(repository: Path) -> None:
    write_model(repository, "echo")
    async with serving(repository, control="poll", poll_s=0.02) as server:
        assert (await refused(server.load("echo"))).code is Code.UNAVAILABLE
        write_model(repository, "new")
        await until(lambda: server.model_ready("new"))
        (repository / "echo" / "2").mkdir()
        await asyncio.sleep(0.1)
        assert not server.model_ready("echo", "2")  # there is nothing in it yet
        (repository / "echo" / "2" / "weights").touch()
        await until(lambda: server.model_ready("echo", "2"))
        assert not server.model_ready("echo", "1")
        shutil.rmtree(repository / "new")
        await until(lambda: not server.model_ready("new"))
        (repository / "echo" / "config.pbtxt").write_text("nonsense")
        await until(lambda: "echo" in server.failures())
        assert server.model_ready("echo", "2")


async def test_a_folder_that_is_being_copied_is_left_alone(repository: Path) -> None:
    """Only what two looks have seen alike is loaded."""
    write_model(repository, "echo", ECHO + ALL)
    async with serving(repository, control="poll", poll_s=1000) as server:
        watcher = server._watcher
        (repository / "echo" / "2").mkdir()
        for _ in range(3):
            touch(repository)
            changes = await watcher.look()
            assert changes.moving == ["echo"] and not changes.loaded
            assert not server.model_ready("echo", "2")
        assert (await watcher.look()).loaded == ["echo"]
        assert server.model_ready("echo", "2")
        assert await watcher.look() == watch.Changes()


async def test_rescan_waits_until_the_folder_is_quiet(repository: Path) -> None:
    write_model(repository, "echo")
    write_model(repository, "bad", FAIL % "none")
    async with serving(repository) as server:
        touch(repository)
        write_model(repository, "bad", FAIL % "all")
        write_model(repository, "new")
        first, second = await asyncio.gather(server.rescan(), server.rescan())
        assert first is second
        assert (sorted(first.loaded), list(first.failed), first.moving) == (["echo", "new"], ["bad"], [])
        assert server.model_ready("bad")  # as it was before
        assert list((await server.rescan()).failed) == ["bad"]  # tried again, since somebody asked
        shutil.rmtree(repository / "new")
        assert (await server.rescan()).unloaded == ["new"]


async def test_rescan_of_an_explicit_server_looks_at_what_is_loaded(repository: Path) -> None:
    for name in ("echo", "other"):
        write_model(repository, name)
    async with serving(repository, control="explicit", load_models=["echo"]) as server:
        touch(repository, "echo")
        touch(repository, "other")
        assert (await server.rescan()).loaded == ["echo"]
        assert not server.model_ready("other")
        shutil.rmtree(repository / "echo")
        assert await server.rescan() == watch.Changes()
        assert server.model_ready("echo")
        await server.drain(0)
        assert (await refused(server.rescan())).code is Code.UNAVAILABLE


async def test_requests_under_way_do_not_notice(repository: Path) -> None:
    write_model(repository, "echo")
    async with serving(repository) as server:
        done = asyncio.Event()

        async def ask() -> int:
            count = 0
            while not done.is_set():
                assert (await server.infer(request("echo"))).error is None
                count += 1
                await asyncio.sleep(0)
            return count

        clients = [asyncio.create_task(ask()) for _ in range(4)]
        for _ in range(3):
            touch(repository)
            assert (await server.rescan()).loaded == ["echo"]
        done.set()
        assert all(count > 0 for count in await asyncio.gather(*clients))
        assert len(Echo.made) == 4


async def test_polling_goes_on_after_an_error(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(repository, control="poll", poll_s=0.01) as server:
        calls: list[int] = []

        async def look() -> None:
            calls.append(1)
            raise RuntimeError("on purpose")

        monkeypatch.setattr(server._watcher, "look", look)
        await until(lambda: len(calls) > 2)
