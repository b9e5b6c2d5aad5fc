"""Frames at random: whatever comes, the server says so or answers, forgets the client, and serves the next one."""

from __future__ import annotations

import asyncio
import random
import struct
from typing import Any

import pytest

from tests.frontends.http2.world import HEAD, Raw, World
from tritium.frontends.http2 import wire


def some_frames(rng: random.Random, raw: Raw) -> list[bytes]:
    """A few frames, most of them lawful, some with a random header, payload or cut."""
    made: list[bytes] = []
    for _ in range(rng.randrange(1, 12)):
        stream = rng.choice((0, 1, 1, 3, 3, 5, 2, 7, (1 << 31) - 1, 1 << 31 | 1))
        flags = rng.choice((0, 1, 4, 5, 8, 9, 0x0C, 0x2D, 0xFF))
        path = rng.choice((b"/t.T/Echo", b"/t.T/Each", b"/t.T/Count", b"/t.T/Pour", b"/no/Method"))
        kind = rng.randrange(12)
        if kind == 0:
            block = raw.encoder.encode([(k, path if k == b":path" else v) for k, v in HEAD])
            at = rng.randrange(len(block) + 1)
            made += [
                wire.frame(wire.HEADERS, 0, stream, block[:at]),
                wire.frame(wire.CONTINUATION, 4, stream, block[at:]),
            ]
        elif kind <= 2:
            made.append(raw.head(stream, path=path, flags=rng.choice((4, 5))))
        elif kind <= 5:
            made.append(
                raw.data(
                    stream, rng.randbytes(rng.choice((0, 1, 5, 3000, 70_000))), rng.choice((0, 1)), rng.randrange(3)
                )
            )
        elif kind == 6:
            made.append(wire.settings({rng.randrange(8): rng.choice((0, 1, 16384, (1 << 31) - 1, (1 << 32) - 1))}))
        elif kind == 7:
            made.append(
                wire.frame(wire.WINDOW_UPDATE, 0, stream, struct.pack(">I", rng.choice((0, 1, 9999, (1 << 32) - 1))))
            )
        elif kind == 8:
            made.append(wire.frame(wire.RST_STREAM, 0, stream, bytes(4)))
        else:
            size = rng.choice((0, 1, 4, 5, 6, 8, 12, 300))
            made.append(wire.frame(rng.randrange(12), flags, stream, rng.randbytes(size)))
        if rng.random() < 0.1:
            made[-1] = bytes(rng.randrange(256) if rng.random() < 0.1 else byte for byte in made[-1][:400])
    return made


@pytest.mark.parametrize("seed", range(4))
async def test_frames_at_random(seed: int) -> None:
    world = World()
    await world.begin()
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    rng = random.Random(seed)
    for _ in range(60):
        raw = await world.raw()
        sent = b"".join(some_frames(rng, raw))
        while sent:
            size = rng.choice((1, 9, 100, 1 << 20))
            raw.send(sent[:size])
            sent = sent[size:]
            if rng.random() < 0.05:
                await asyncio.sleep(0)
        await asyncio.sleep(0.002)
        raw.writer.close()
    async with asyncio.timeout(10):
        while world.server._connections or world.server._tasks:
            await asyncio.sleep(0.01)
    assert not wrong
    raw = await world.raw()
    raw.send(raw.head(1), raw.data(1, b"hello"))
    assert (await raw.answer(1))[1] == {"grpc-status": "0"}
    await world.end()
