"""Channels between processes, and children that do not outlive their parent."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tritium.ipc import AsyncLink, Link, start_child


class Ping(msgspec.Struct, array_like=True, tag=True):
    number: int


class Pong(msgspec.Struct, array_like=True, tag=True):
    text: str


async def test_messages_cross_both_ways_in_order() -> None:
    here: AsyncLink[Ping] = AsyncLink(Ping)
    there: Link[Pong] = Link(here.address, Pong)
    try:
        assert there.receive(0) is None
        for number in range(100):
            here.send(Pong(str(number)))
        received = [await asyncio.to_thread(there.receive, 2000) for _ in range(100)]
        assert received == [Pong(str(n)) for n in range(100)]
        there.send(Ping(5))
        assert await asyncio.wait_for(here.receive(), 2) == Ping(5)
    finally:
        there.close()
        here.close()


async def test_a_long_temporary_folder_is_avoided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    AsyncLink[Ping](Ping).close()


async def test_the_channel_s_folder_is_private_and_goes_with_it() -> None:
    link: AsyncLink[Ping] = AsyncLink(Ping)
    folder = Path(link.address.removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    link.close()
    assert not folder.exists()


async def test_a_child_gets_its_arguments_and_environment() -> None:
    child = await start_child("platform", [], {"TRITIUM_TEST": "1"})
    assert await child.wait() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel feature is Linux's")
def test_a_child_dies_with_its_parent() -> None:
    child = (
        "import os, time; from tritium.ipc import follow_parent; follow_parent(os.getppid()); "
        "print('up', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess,sys,time; "
        f"c = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE); "
        "c.stdout.readline(); print(c.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def test_an_orphan_does_not_start() -> None:
    code = "from tritium.ipc import follow_parent; follow_parent(1 << 22)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=dict(os.environ)).returncode == 1
