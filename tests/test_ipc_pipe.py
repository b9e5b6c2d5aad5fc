"""Frames and segments between two ends: sizes, reuse, and ends that talk nonsense or go away."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from tritium.ipc.arena import IDLE_BYTES, SMALLEST, Arena
from tritium.ipc.frames import BrokenPipe
from tritium.ipc.pipe import AsyncPipe, ThreadPipe


class Note(msgspec.Struct, array_like=True, tag=1):
    segment: int
    size: int
    text: str


Message = Note | None


class Ends:
    """A thread's end and an event loop's end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.raw = theirs
        self.got: list[Message] = []
        self.heard: list[Message] = []
        self.ended: list[str] = []
        self.loop_end: AsyncPipe[Message] = AsyncPipe(ours, Message, self.got.append, self.ended.append)
        self.thread_end: ThreadPipe[Message] = ThreadPipe(theirs, Message, self.heard.append)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.got) < count and not self.ended:
                await asyncio.sleep(0.001)


@pytest.fixture
async def ends() -> Iterator[Ends]:  # type: ignore[misc]
    made = Ends()
    yield made  # type: ignore[misc]
    made.loop_end.close()
    made.raw.close()


async def test_messages_of_all_sizes_keep_their_order(ends: Ends) -> None:
    texts = ["x" * size for size in (0, 1, 1 << 20, 10, 1 << 18, 5_000_000, 3)]
    for text in texts:
        ends.loop_end.send(Note(0, 0, text))
    reader = asyncio.to_thread(ends.thread_end.wait, lambda: len(ends.heard) == len(texts))
    await asyncio.wait_for(reader, 10)
    assert [note.text for note in ends.heard if note] == texts
    writer = threading.Thread(target=lambda: [ends.thread_end.send(Note(0, 0, text)) for text in texts])
    writer.start()
    await ends.until(len(texts))
    writer.join()
    assert [note.text for note in ends.got if note] == texts


async def test_segments_are_used_again(ends: Ends) -> None:
    arena, views = ends.thread_end.arena, ends.loop_end.arena
    numbers = []
    for i in range(40):
        segment = arena.take(1 << 20)
        segment.memory[: 1 << 20] = i
        numbers.append(segment.number)
        ends.thread_end.send(Note(segment.number, 1 << 20, ""))
        await ends.until(i + 1)
        note = ends.got[i]
        assert note is not None
        view = views.view(note.segment, note.size)
        array = np.frombuffer(view, np.uint8)[5:]
        del view
        assert int(array.min()) == int(array.max()) == i
        del array
        ends.thread_end.look()
    assert len(set(numbers)) <= 12, "they come back in eights"


async def test_descriptors_that_come_stay_in_this_process(ends: Ends) -> None:
    """A process that is started later would inherit them, and keep the memory alive unseen."""
    segment = ends.thread_end.arena.take(1 << 17)
    ends.thread_end.send(Note(segment.number, 1 << 17, ""))
    await ends.until(1)
    shared = [int(fd) for fd in os.listdir("/proc/self/fd") if "memfd:tritium" in _target(fd)]
    assert shared and not any(os.get_inheritable(fd) for fd in shared)


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


async def test_a_view_lives_as_long_as_anything_that_looks_at_it(ends: Ends) -> None:
    segment = ends.thread_end.arena.take(SMALLEST)
    ends.thread_end.send(Note(segment.number, 8, ""))
    await ends.until(1)
    part = np.frombuffer(ends.loop_end.arena.view(segment.number, 8), np.uint32)[1:].view(np.uint8)
    gc.collect()
    assert not ends.loop_end.arena.returned
    with pytest.raises(KeyError):
        ends.loop_end.arena.view(segment.number, 8)
    del part
    assert list(ends.loop_end.arena.returned) == [segment.number]


def test_the_pool_is_limited() -> None:
    arena = Arena()
    taken = [arena.take(IDLE_BYTES // 4) for _ in range(8)]
    for segment in taken:
        arena.take_back(segment.number)
    assert arena.dropped == [0, 1, 2, 3]
    with pytest.raises(KeyError):
        arena.take_back(0)
    assert arena.take(100).size == SMALLEST, "a large one is not wasted on a small tensor"
    assert arena.take(IDLE_BYTES + 1).size == 2 * IDLE_BYTES
    arena.close()


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<IHHH", 3, 0, 0, 0) + b"abc",
        struct.pack("<IHHH", 1, 1, 0, 0) + b"\xc0",
        struct.pack("<IHHHI", 1, 0, 1, 0, 77) + b"\xc0",
        struct.pack("<IHHHI", 1, 0, 0, 1, 77) + b"\xc0",
    ],
    ids=["no message", "no descriptor", "never taken", "never made"],
)
async def test_nonsense_ends_the_pipe(ends: Ends, frame: bytes) -> None:
    ends.raw.send(frame)
    await ends.until(1)
    assert len(ends.ended) == 1 and not ends.got
    ends.loop_end.send(None)


async def test_a_segment_that_could_shrink_is_refused(ends: Ends) -> None:
    fd = os.memfd_create("loose")
    os.ftruncate(fd, 4096)
    socket.send_fds(ends.raw, [struct.pack("<IHHH", 1, 1, 0, 0) + b"\xc0"], [fd])
    os.close(fd)
    await ends.until(1)
    assert ends.ended == ["ValueError: a segment is not sealed"]


async def test_the_end_of_one_is_seen_by_the_other(ends: Ends) -> None:
    ends.loop_end.close()
    with pytest.raises(BrokenPipe):
        ends.thread_end.wait(lambda: False)
    with pytest.raises(BrokenPipe):
        ends.thread_end.wait(lambda: False)
    with pytest.raises(BrokenPipe):
        ends.thread_end.send(Note(0, 0, "x"))


async def test_every_waiting_thread_is_served(ends: Ends) -> None:
    def wait(number: int) -> None:
        ends.thread_end.wait(lambda: any(note is not None and note.size == number for note in ends.heard))

    waiting = [asyncio.create_task(asyncio.to_thread(wait, number)) for number in range(6)]
    await asyncio.sleep(0.05)
    for number in (3, 1, 5, 0, 2, 4):
        ends.loop_end.send(Note(0, number, ""))
        await asyncio.wait_for(waiting[number], 10)
    happened: list[bool] = []
    nudged = asyncio.create_task(asyncio.to_thread(ends.thread_end.wait, lambda: bool(happened)))
    await asyncio.sleep(0.05)
    happened.append(True)
    ends.thread_end.nudge()
    await asyncio.wait_for(nudged, 10)
