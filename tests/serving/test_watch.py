from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

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
                await asyncio.sleep(0.001)  # the rescan needs the processor too
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


def checkpoint(folder: Path) -> bytes:
    """A small safetensors file."""
    save_file({"w": np.zeros((64, 64), np.float32)}, folder / "whole.safetensors")
    content = (folder / "whole.safetensors").read_bytes()
    (folder / "whole.safetensors").unlink()
    return content


async def test_a_checkpoint_that_is_still_too_short_is_left_alone(repository: Path, tmp_path: Path):
    """Copying may pause for longer than it takes to look twice."""
    content = checkpoint(tmp_path)
    write_model(repository, "echo", ECHO + ALL)
    async with serving(repository, control="poll", poll_s=1000) as server:
        watcher = server._watcher
        target = write_model(repository, "echo", ECHO + ALL, ("2",)) / "2" / "model.safetensors"
        for length in (4, 40, len(content) - 1):
            target.write_bytes(content[:length])
            for _ in range(3):
                assert (await watcher.look()).moving == ["echo"]
        assert not server.model_ready("echo", "2") and server.model_ready("echo", "1")
        assert (await server.rescan()).moving == ["echo"]
        target.write_bytes(content)
        await watcher.look()
        assert (await watcher.look()).loaded == ["echo"]
        assert server.model_ready("echo", "2")


async def test_what_is_not_whole_at_the_start_is_loaded_later(repository: Path, tmp_path: Path):
    content = checkpoint(tmp_path)
    write_model(repository, "echo")
    write_model(repository, "half")
    index = repository / "half" / "1" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}')
    (repository / "half" / "1" / "a.safetensors").write_bytes(content)
    async with serving(repository, control="poll", poll_s=0.02) as server:
        assert server.ready() and server.model_ready("echo") and not server.model_ready("half")
        assert server.failures() == {}
        (repository / "half" / "1" / "b.safetensors").write_bytes(content)
        await until(lambda: server.model_ready("half"))


async def test_the_start_waits_for_folders_that_are_changing(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "SETTLE_S", 0.2)
    monkeypatch.setattr(watch, "PATIENCE_S", 2.0)
    write_model(repository, "echo")
    write_model(repository, "endless")
    done = asyncio.Event()

    async def copy(name: str, count: float) -> None:
        while count > 0 and not done.is_set():
            touch(repository, name)
            count -= 1
            await asyncio.sleep(0.02)

    copies = [asyncio.create_task(copy("echo", 20)), asyncio.create_task(copy("endless", float("inf")))]
    async with serving(repository, control="poll", poll_s=1000) as server:
        assert copies[0].done()
        assert server.model_ready("echo") and not server.model_ready("endless")
        done.set()
        await asyncio.gather(*copies)
        assert "endless" in (await server.rescan()).loaded


@pytest.mark.parametrize("order", ["forwards", "backwards"])
async def test_a_slow_copy_is_never_loaded_early(repository: Path, tmp_path: Path, order: str):
    """A folder with shards arrives piece by piece while it is polled all the time."""
    content = checkpoint(tmp_path)
    files = {f"{n}.safetensors": content for n in range(3)}
    index = '{"weight_map": {"a": "0.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}'
    files["model.safetensors.index.json"] = index.encode()
    write_model(repository, "echo", ECHO + ALL)
    async with serving(repository, control="poll", poll_s=0.02) as server:
        folder = write_model(repository, "echo", ECHO + ALL, ("2",)) / "2"
        # Only the index tells that there is more to come after a pause, so it comes first.
        names = [*sorted(files, reverse=order == "backwards")]
        names.sort(key=lambda name: not name.endswith(".json"))
        for name in names:
            for at in range(0, len(files[name]), 6000):
                with (folder / name).open("ab") as file:
                    file.write(files[name][at : at + 6000])
                await asyncio.sleep(0.1)
                assert not server.model_ready("echo", "2") or name == names[-1]
        await until(lambda: server.model_ready("echo", "2"))
