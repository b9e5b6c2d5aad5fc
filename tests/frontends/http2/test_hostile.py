"""The server against clients that want to cost it more than they spend (and one that only changes its mind)."""

from __future__ import annotations

import asyncio
import gzip
import struct
import time
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import grpc
import pytest

from tests.frontends.http2.world import World
from tritium.frontends.http2 import wire
from tritium.frontends.http2.connection import MAX_FRAME

CALLS = 1000
ROOM = struct.Struct(">I")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.begin()
    yield made
    await made.end()


async def until(condition: Any, within_s: float = 10) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_client_may_shrink_its_table_between_answers(world: World) -> None:
    def quick(message: bytes, call: Any) -> Any:
        call.respond([message])
        return lambda: None

    world.server._quick["/t.T/Echo"] = quick
    raw = await world.raw()
    for number in (1, 3):
        raw.send(raw.head(number), raw.data(number, b"x"))
        await raw.answer(number)
    raw.send(wire.settings({wire.HEADER_TABLE_SIZE: 0}))
    await raw.until(wire.SETTINGS)
    raw.decoder.max_allowed_table_size = 0
    for number in (5, 7):
        raw.send(raw.head(number), raw.data(number, b"x"))
        assert (await raw.answer(number))[1] == {"grpc-status": "0"}


@pytest.mark.parametrize("frames", ["settings", "one call", "connection"])
async def test_what_a_frame_costs_does_not_grow_with_the_calls_that_wait(world: World, frames: str) -> None:
    raw = await world.raw({wire.INITIAL_WINDOW_SIZE: 0})
    for number in range(1, 2 * CALLS, 2):
        raw.send(raw.head(number), raw.data(number, b"hello"))
    await until(lambda: len(world.methods.seen) == CALLS)
    sent = {
        "settings": wire.frame(wire.SETTINGS, 0, 0, struct.pack(">HI", wire.INITIAL_WINDOW_SIZE, 0) * 10_900),
        "one call": wire.frame(wire.WINDOW_UPDATE, 0, 1999, ROOM.pack(1)) * 5000,
        "connection": wire.frame(wire.WINDOW_UPDATE, 0, 0, ROOM.pack(1)) * 5000,
    }[frames]
    raw.send(sent, wire.frame(wire.PING, 0, 0, bytes(8)))
    begin = time.process_time()
    await raw.until(wire.PING)
    # Each of the frames (or settings) looked at each of the calls before: seconds.
    assert time.process_time() - begin < 0.4


async def test_all_calls_that_wait_go_on_when_there_is_room(world: World) -> None:
    raw = await world.raw({wire.INITIAL_WINDOW_SIZE: 0})
    for number in range(1, 41, 2):
        raw.send(raw.head(number), raw.data(number, bytes(10_000)))
    await until(lambda: len(world.methods.seen) == 20)
    raw.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 20_000}))
    got = 0
    while got < 65535:  # the connection's window
        kind, _, _, payload = await raw.frame()
        got += len(payload) if kind == wire.DATA else 0
    raw.send(wire.frame(wire.WINDOW_UPDATE, 0, 0, ROOM.pack(1 << 20)))
    while got < 20 * 10_005:
        kind, _, _, payload = await raw.frame()
        got += len(payload) if kind == wire.DATA else 0


@pytest.mark.parametrize(
    "values", [{wire.INITIAL_WINDOW_SIZE: (1 << 31) - 1}, {wire.ENABLE_PUSH: 2}, {wire.MAX_FRAME_SIZE: 1 << 24}]
)
async def test_settings_that_cannot_be(world: World, values: dict[int, int]) -> None:
    raw = await world.raw()
    raw.send(raw.head(1, path=b"/t.T/Slow"), wire.frame(wire.WINDOW_UPDATE, 0, 1, ROOM.pack(1 << 20)))
    raw.send(wire.settings(values))
    wrong = wire.FLOW_CONTROL_ERROR if wire.INITIAL_WINDOW_SIZE in values else wire.PROTOCOL_ERROR
    assert await raw.gone() == wrong


@pytest.mark.parametrize(
    "sent",
    [
        lambda raw: wire.settings({}) * 200,
        lambda raw: raw.head(1, flags=0) + wire.frame(wire.CONTINUATION, 0, 1) * 100,
    ],
)
async def test_floods(world: World, sent: Any) -> None:
    raw = await world.raw()
    raw.send(sent(raw))
    assert await raw.gone() == wire.ENHANCE_YOUR_CALM


async def test_a_large_frame_in_small_pieces_is_not_put_together_anew_for_each(world: World) -> None:
    raw = await world.raw()
    body = (MAX_FRAME - 300).to_bytes(4, "big") + bytes(MAX_FRAME - 300)
    padded = wire.frame(wire.DATA, wire.PADDED | wire.END_STREAM, 1, b"\3\0" + body + b"...")
    raw.send(raw.head(1), padded[:-500])
    await asyncio.sleep(0.5)
    begin = time.process_time()
    for byte in padded[-500:]:
        raw.send(bytes((byte,)))
        await asyncio.sleep(0)
    # Larger than messages may be here; that it is said means that the frame has been read.
    assert (await raw.answer(1))[1]["grpc-status"] == "8"
    assert time.process_time() - begin < 0.2


async def test_answers_that_are_not_read_are_not_kept_for_ever(world: World) -> None:
    raw = await world.raw()
    raw.writer.transport.pause_reading()
    connection = next(iter(world.server._connections))
    most = number = 0
    async with asyncio.timeout(60):
        while world.server._connections:
            heads = (raw.head(number + 2 * n + 1, path=b"/no/Method", flags=5) for n in range(500))
            raw.send(*heads)
            number += 1000
            await asyncio.sleep(0)
            most = max(most, connection._transport.get_write_buffer_size())
            assert most < 16 << 20
    assert most > 4 << 20


async def test_calls_end_with_a_client_that_is_silent_and_reads_nothing() -> None:
    world = World()
    await world.begin(keepalive_time_ms=100, keepalive_timeout_ms=100)
    raw = await world.raw({wire.INITIAL_WINDOW_SIZE: (1 << 31) - 1})
    raw.writer.transport.pause_reading()
    raw.send(wire.frame(wire.WINDOW_UPDATE, 0, 0, ROOM.pack(1 << 30)))
    raw.send(raw.head(1, path=b"/t.T/Pour"), raw.data(1, b"100000"))
    raw.send(raw.head(3, path=b"/t.T/Slow"), raw.data(3, b"60"))
    await until(lambda: world.methods.cancelled == 1)
    await until(lambda: not world.server._connections)
    await world.end()


async def test_a_status_message_has_an_end(world: World) -> None:
    async def refuse(message: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "100% é\n" * int(message))
        return b""

    world.methods.echo = refuse  # type: ignore[method-assign]
    world.server._handlers[:] = [world.methods.handlers()]
    raw = await world.raw()
    for number, times in ((1, 3), (3, 10_000), (5, 4_000_000)):
        raw.send(raw.head(number), raw.data(number, str(times).encode()))
        trailers = (await raw.answer(number))[1]
        assert trailers["grpc-status"] == "5" and len(trailers["grpc-message"]) <= wire.MAX_STATUS_BYTES
        text = unquote(trailers["grpc-message"], errors="strict")
        assert ("100% é\n" * times).startswith(text.removesuffix("...")) and text.endswith("...") == (times > 3)


async def test_a_call_may_wait_to_read_and_to_write_at_the_same_time(world: World) -> None:
    read: list[bytes] = []

    async def both(messages: AsyncIterator[bytes], context: Any) -> None:
        async def take() -> None:
            read.extend([message async for message in messages])

        taking = asyncio.create_task(take())
        await asyncio.sleep(0)
        for _ in range(20):
            await context.write(bytes(10_000))
        await taking

    world.methods.each = both  # type: ignore[method-assign,assignment]
    world.server._handlers[:] = [world.methods.handlers()]
    raw = await world.raw({wire.INITIAL_WINDOW_SIZE: 0})
    raw.send(raw.head(1, path=b"/t.T/Each"))
    await asyncio.sleep(0.1)
    raw.send(raw.data(1, b"one", 0))
    await asyncio.sleep(0.05)
    raw.send(raw.data(1, b"two"), wire.frame(wire.WINDOW_UPDATE, 0, 0, ROOM.pack(1 << 20)))
    raw.send(wire.frame(wire.WINDOW_UPDATE, 0, 1, ROOM.pack(1 << 20)))
    assert (await raw.answer(1))[1] == {"grpc-status": "0"}
    assert read == [b"one", b"two"]


async def test_messages_that_wait_are_not_decompressed(world: World) -> None:
    go_on = asyncio.Event()
    largest = 1 << 20

    async def wait(messages: AsyncIterator[bytes], context: Any) -> bytes:
        await go_on.wait()
        return str([len(message) async for message in messages]).encode()

    world.methods.count = wait  # type: ignore[method-assign]
    world.server._handlers[:] = [world.methods.handlers()]
    raw = await world.raw()
    raw.send(raw.head(1, (b"grpc-encoding", b"gzip"), path=b"/t.T/Count"))
    bomb = gzip.compress(bytes(largest))
    tracemalloc.start()
    raw.send(*(raw.data(1, bomb, 0, flag=1) for _ in range(200)))
    await until(lambda: any(len(call._messages) == 200 for c in world.server._connections for call in c.calls.values()))
    assert tracemalloc.get_traced_memory()[0] < 20 * largest
    tracemalloc.stop()
    go_on.set()
    raw.send(raw.data(1, gzip.compress(bytes(largest + 1)), flag=1))
    assert (await raw.answer(1))[1]["grpc-status"] == "8"


async def test_a_client_that_says_a_large_length_gets_no_place_for_it(world: World) -> None:
    world.server.max_message_bytes = 1 << 31
    raw = await world.raw()
    tracemalloc.start()
    for number in range(1, 201, 2):
        raw.send(raw.head(number), wire.frame(wire.DATA, 0, number, b"\0\x7f\xff\xff\xff."))
    raw.send(wire.frame(wire.PING, 0, 0, bytes(8)))
    await raw.until(wire.PING)
    assert tracemalloc.get_traced_memory()[0] < 100 << 20
    tracemalloc.stop()


async def test_bytes_that_wait_hold_the_client_up(world: World) -> None:
    async def wait(messages: AsyncIterator[bytes], context: Any) -> bytes:
        await asyncio.sleep(60)
        return b""

    world.methods.count = wait  # type: ignore[method-assign]
    world.server._handlers[:] = [world.methods.handlers()]
    raw = await world.raw()
    raw.send(raw.head(1, path=b"/t.T/Count"))
    raw.send(*[raw.data(1, bytes(1_000_000), 0)] * 4, wire.frame(wire.PING, 0, 0, bytes(8)))
    granted = 0
    while (found := await raw.frame())[0] != wire.PING:
        granted += int.from_bytes(found[3], "big") if found[0] == wire.WINDOW_UPDATE and found[2] == 1 else 0
    assert granted < 3_000_000


async def test_too_much_metadata_ends_its_call_and_no_other(world: World) -> None:
    raw = await world.raw()
    raw.send(raw.head(1, path=b"/t.T/Slow"), raw.data(1, b"0.3"))
    raw.send(raw.head(3, (b"large", b"x" * 20_000)), raw.data(3, b"x"))
    assert (await raw.answer(3))[1]["grpc-status"] == "8"
    assert (await raw.answer(1))[1] == {"grpc-status": "0"}
    # A bomb: one byte for each copy of what is in the table.
    raw.send(wire.frame(wire.HEADERS, 5, 5, b"\x40\x01a\x7f\x81\x1e" + b"y" * 4000 + b"\xbe" * 50_000))
    assert await raw.gone() == wire.COMPRESSION_ERROR
