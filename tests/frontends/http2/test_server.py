"""The server against a client that writes its own frames, and against gRPC's."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tests.frontends.http2.world import HEAD, Raw, World
from tritium.frontends.http2 import wire
from tritium.frontends.http2.connection import MAX_FRAME, STREAM_WINDOW


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.begin()
    yield made
    await made.end()


async def ask(world: World, method: str, message: bytes = b"hello", **more: Any) -> Any:
    async with world.channel() as channel:
        return await channel.unary_unary("/t.T/" + method)(message, timeout=5, **more)


async def refused(world: World, method: str, message: bytes = b"", timeout: float = 5) -> tuple[Any, Any, Any]:
    async with world.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.T/" + method)(message, timeout=timeout)
    return caught.value.code(), caught.value.details(), dict(caught.value.trailing_metadata())


@pytest.mark.parametrize("size", [0, 1, 16383, 16384, 100_000, (1 << 20) - 1])
async def test_messages_of_all_sizes(world: World, size: int) -> None:
    message = bytes(range(256)) * (size // 256) + b"." * (size % 256)
    assert await ask(world, "Echo", message) == message
    assert await ask(world, "Echo", message, compression=grpc.Compression.Gzip) == message


async def test_metadata(world: World) -> None:
    await ask(world, "Echo", metadata=(("a", "b"), ("c-bin", b"\0\xff")))
    found = dict(world.methods.seen[0])
    assert found["a"] == "b" and found["c-bin"] == b"\0\xff" and "user-agent" in found
    assert not any(name.startswith((":", "grpc-")) or name in ("te", "content-type") for name in found)


async def test_statuses(world: World, caplog: pytest.LogCaptureFixture) -> None:
    assert (await refused(world, "Nothing"))[0] is grpc.StatusCode.UNIMPLEMENTED
    code, text, trailing = await refused(world, "Refuse")
    assert (code, text, trailing["why"]) == (grpc.StatusCode.ABORTED, "no ☹", "so")
    assert (await refused(world, "Broken"))[0] is grpc.StatusCode.UNKNOWN
    assert (await refused(world, "Echo", bytes((1 << 20) + 1)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await refused(world, "Slow", b"9", timeout=0.1))[0] is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_deadline_and_a_client_that_gives_up_cancel(world: World) -> None:
    raw = await world.raw()
    raw.send(raw.head(1, (b"grpc-timeout", b"50m"), path=b"/t.T/Slow"), raw.data(1, b"9"))
    _, trailers = await raw.answer(1)
    assert trailers["grpc-status"] == "4"
    raw.send(raw.head(3, path=b"/t.T/Slow"), raw.data(3, b"9"))
    await asyncio.sleep(0.05)
    raw.send(wire.frame(wire.RST_STREAM, 0, 3, b"\0\0\0\10"))
    raw.send(raw.head(5, path=b"/t.T/Slow"), raw.data(5, b"9"))
    await asyncio.sleep(0.05)
    raw.writer.close()
    async with asyncio.timeout(5):
        while world.methods.cancelled < 3:
            await asyncio.sleep(0.01)


async def test_streams(world: World) -> None:
    async with world.channel() as channel:
        sent = [bytes(n) for n in (1, 0, 100_000, 3)]
        found = [m async for m in channel.stream_stream("/t.T/Each")(iter(sent), timeout=5)]
        assert found == sent
        assert await channel.stream_unary("/t.T/Count")(iter(sent), timeout=5) == b"[1, 0, 100000, 3]"
        poured = [m async for m in channel.unary_stream("/t.T/Pour")(b"200", timeout=10)]
        assert len(poured) == 200
        assert [m async for m in channel.unary_stream("/t.T/Pour")(b"0", timeout=5)] == []


async def test_many_calls_at_a_time(world: World) -> None:
    async with world.channel() as channel:
        call = channel.unary_unary("/t.T/Echo")
        messages = [bytes([n]) * (n * 701) for n in range(200)]
        assert await asyncio.gather(*(call(m, timeout=10) for m in messages)) == messages


async def test_a_client_with_little_room_gets_its_answer_in_pieces(world: World) -> None:
    raw = await world.raw({wire.INITIAL_WINDOW_SIZE: 10, wire.HEADER_TABLE_SIZE: 0})
    raw.decoder.max_allowed_table_size = 0
    raw.send(raw.head(1), raw.data(1, b"0123456789abcdef"))
    first = (await raw.until(wire.DATA))[3]
    assert first == b"\0\0\0\0\x1001234"
    raw.send(wire.frame(wire.WINDOW_UPDATE, 0, 1, b"\0\0\0\3"))
    assert (await raw.until(wire.DATA))[3] == b"567"
    raw.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 100}))
    data, trailers = await raw.answer(1)
    assert data == b"89abcdef" and trailers == {"grpc-status": "0"}


async def test_a_client_that_does_not_read_holds_its_method_up(world: World) -> None:
    raw = await world.raw()
    raw.send(raw.head(1, path=b"/t.T/Pour"), raw.data(1, b"1000"))
    await asyncio.sleep(0.2)
    raw.send(wire.frame(wire.PING, 0, 0, b"12345678"))
    got = 0
    while (found := await raw.frame())[0] != wire.PING:
        got += len(found[3]) if found[0] == wire.DATA else 0
    assert got == 65535
    raw.send(wire.frame(wire.RST_STREAM, 0, 1, b"\0\0\0\10"))


async def test_odd_but_lawful_frames(world: World) -> None:
    raw = await world.raw()
    block = raw.encoder.encode(HEAD)
    padded = bytes((3,)) + b"\0\0\0\0\7" + block[:5] + b"..."
    flags = wire.PADDED | wire.WITH_PRIORITY
    raw.send(
        wire.frame(wire.PRIORITY, 0, 1, b"\0\0\0\0\7"),
        wire.frame(77, 0, 0, b"unknown"),
        wire.frame(wire.HEADERS, flags, 1, padded),
        wire.frame(wire.CONTINUATION, 0, 1, block[5:9]),
        wire.frame(wire.CONTINUATION, wire.END_HEADERS, 1, block[9:]),
        wire.frame(wire.DATA, wire.PADDED, 1, b"\2\0\0\0.."),
        wire.frame(wire.DATA, 0, 1),
        wire.frame(wire.DATA, 0, 1, b"\0\5hel"),
        wire.frame(wire.DATA, wire.PADDED | wire.END_STREAM, 1, b"\0lo"),
    )
    data, trailers = await raw.answer(1)
    assert data == b"\0\0\0\0\5hello" and trailers == {"grpc-status": "0"}
    raw.send(wire.frame(wire.PING, 0, 0, b"12345678"), wire.frame(wire.GOAWAY, 0, 0, bytes(8)))
    assert (await raw.until(wire.PING))[1:] == (wire.ACK, 0, b"12345678")


async def test_every_byte_alone(world: World) -> None:
    raw = Raw(*await asyncio.open_connection("127.0.0.1", world.port))
    world.keep(raw)
    sent = wire.PREFACE + wire.settings({}) + raw.head(1) + raw.data(1, b"hello")
    for byte in sent:
        raw.send(bytes((byte,)))
        await raw.writer.drain()
        await asyncio.sleep(0)
    data, _ = await raw.answer(1)
    assert data == b"\0\0\0\0\5hello"


async def test_what_is_no_call_of_grpc(world: World) -> None:
    raw = await world.raw()
    for number, headers, status in ((1, [(b":method", b"GET"), *HEAD[1:]], "405"), (3, HEAD[:3], "415")):
        flags = wire.END_HEADERS | wire.END_STREAM
        raw.send(wire.frame(wire.HEADERS, flags, number, raw.encoder.encode(headers)))
        assert (await raw.answer(number))[1] == {":status": status}
    raw.send(wire.frame(wire.HEADERS, wire.END_HEADERS, 5, raw.encoder.encode([*HEAD, (b"connection", b"close")])))
    assert (await raw.until(wire.RST_STREAM))[3] == b"\0\0\0\1"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (lambda raw: raw.data(1, b"not gzip", flag=1), "12"),
        (lambda raw: raw.data(1, b"x", flag=2), "13"),
        (lambda raw: wire.frame(wire.DATA, wire.END_STREAM, 1, b"\0\0\0\0\5hel"), "13"),
        (lambda raw: wire.frame(wire.DATA, wire.END_STREAM, 1), "13"),
        (lambda raw: raw.data(1, b"one", 0) + raw.data(1, b"two"), "13"),
    ],
)
async def test_messages_that_are_wrong(world: World, sent: Any, status: str) -> None:
    raw = await world.raw()
    raw.send(raw.head(1), sent(raw))
    assert (await raw.answer(1))[1]["grpc-status"] == status
    raw.send(raw.head(3), raw.data(3, b"fine"))
    assert (await raw.answer(3))[0].endswith(b"fine")


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(bytes(2 << 20)), gzip.compress(b"abc")[:-3]])
async def test_compressed_messages_that_are_wrong(world: World, content: bytes) -> None:
    raw = await world.raw()
    raw.send(raw.head(1, (b"grpc-encoding", b"gzip")), raw.data(1, content, flag=1))
    assert (await raw.answer(1))[1]["grpc-status"] in ("8", "13")


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (lambda raw: wire.frame(wire.DATA, 0, 0, b"x"), wire.PROTOCOL_ERROR),
        (lambda raw: wire.frame(wire.DATA, 0, 9, b"x"), wire.PROTOCOL_ERROR),
        (lambda raw: raw.head(2), wire.PROTOCOL_ERROR),
        (lambda raw: raw.head(5) + raw.head(3), wire.STREAM_CLOSED),
        (lambda raw: raw.head(1) + raw.data(1, b"x") + raw.data(1, b"y"), wire.STREAM_CLOSED),
        (lambda raw: raw.head(1) + raw.head(1), wire.PROTOCOL_ERROR),
        (lambda raw: raw.head(1, flags=0) + raw.data(1, b"x"), wire.PROTOCOL_ERROR),
        (lambda raw: wire.frame(wire.CONTINUATION, 4, 1, b""), wire.PROTOCOL_ERROR),
        (lambda raw: wire.frame(wire.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"), wire.COMPRESSION_ERROR),
        (lambda raw: wire.frame(wire.PUSH_PROMISE, 4, 1, b"\0\0\0\2"), wire.PROTOCOL_ERROR),
        (lambda raw: wire.frame(wire.SETTINGS, 0, 0, b"x"), wire.FRAME_SIZE_ERROR),
        (lambda raw: wire.settings({wire.MAX_FRAME_SIZE: 5}), wire.PROTOCOL_ERROR),
        (lambda raw: wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 31}), wire.FLOW_CONTROL_ERROR),
        (lambda raw: wire.frame(wire.PING, 0, 0, b"x"), wire.FRAME_SIZE_ERROR),
        (lambda raw: wire.frame(wire.WINDOW_UPDATE, 0, 0, bytes(4)), wire.PROTOCOL_ERROR),
        (lambda raw: wire.frame(wire.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), wire.FLOW_CONTROL_ERROR),
        (lambda raw: wire.frame(wire.RST_STREAM, 0, 7, bytes(4)), wire.PROTOCOL_ERROR),
        (lambda raw: wire.frame_head(1 << 20, wire.PING, 0, 0), wire.FRAME_SIZE_ERROR),
        (lambda raw: raw.head(1) + wire.frame_head(MAX_FRAME + 1, wire.DATA, 0, 1), wire.FRAME_SIZE_ERROR),
        (lambda raw: wire.frame(wire.PING, 0, 0, bytes(8)) * 4, wire.ENHANCE_YOUR_CALM),
        (lambda raw: raw.head(3) + wire.frame(wire.DATA, 0, 2, b"x"), wire.PROTOCOL_ERROR),
        (lambda raw: wire.frame(wire.PRIORITY, 0, 0, bytes(5)), wire.PROTOCOL_ERROR),
        (lambda raw: wire.frame(wire.PRIORITY, 0, 1, bytes(4)), wire.FRAME_SIZE_ERROR),
        (lambda raw: wire.frame(wire.GOAWAY, 0, 1, bytes(8)), wire.PROTOCOL_ERROR),
        (lambda raw: wire.frame(wire.GOAWAY, 0, 0, bytes(7)), wire.FRAME_SIZE_ERROR),
        (
            lambda raw: raw.head(1, flags=0) + wire.frame(wire.CONTINUATION, 0, 1, bytes(60_000)) * 2,
            wire.ENHANCE_YOUR_CALM,
        ),
    ],
)
async def test_rules_that_are_broken_end_the_connection(world: World, sent: Any, code: int) -> None:
    raw = await world.raw()
    raw.send(sent(raw))
    assert await raw.gone() == code
    assert await ask(world, "Echo") == b"hello"


async def test_more_than_the_window_of_a_call_ends_the_connection(world: World) -> None:
    raw = await world.raw()
    assert raw.settings[wire.INITIAL_WINDOW_SIZE] == STREAM_WINDOW
    raw.send(raw.head(1, path=b"/t.T/Slow", flags=wire.END_HEADERS))
    raw.send(raw.data(1, bytes(1 << 20), 0))
    # A second message is one too many anyhow; what counts is that the server does not keep it all.
    for _ in range(8):
        raw.send(wire.frame(wire.DATA, 0, 1, bytes(1 << 20)))
    assert (await raw.answer(1))[1]["grpc-status"] == "13"


async def test_limits_on_calls() -> None:
    world = World()
    await world.begin(max_concurrent_streams=2)
    raw = await world.raw()
    for number in (1, 3, 5):
        raw.send(raw.head(number, path=b"/t.T/Slow"), raw.data(number, b"9"))
    _, _, stream, payload = await raw.until(wire.RST_STREAM)
    assert (stream, payload) == (5, b"\0\0\0\7")
    for number in range(7, 60, 2):
        raw.send(raw.head(number, path=b"/t.T/Slow"), raw.data(number, b"9"))
        raw.send(wire.frame(wire.RST_STREAM, 0, 1 if number == 7 else number - 2, b"\0\0\0\10"))
    assert await raw.gone() == wire.ENHANCE_YOUR_CALM
    await world.end()


async def test_a_client_may_give_up_calls_for_ever_but_not_all_at_once() -> None:
    world = World()
    await world.begin(max_concurrent_streams=40)
    raw = await world.raw()
    for number in range(1, 601, 2):
        raw.send(raw.head(number, path=b"/t.T/Slow"), raw.data(number, b"9"))
        raw.send(wire.frame(wire.RST_STREAM, 0, number, b"\0\0\0\10"))
        await asyncio.sleep(0.03)
    raw.send(raw.head(601, path=b"/t.T/Slow"), raw.data(601, b"0"))
    assert (await raw.answer(601))[1] == {"grpc-status": "0"}
    await world.end()


async def test_stopping_lets_calls_finish_and_then_does_not() -> None:
    world = World()
    await world.begin()
    raw, idle = await world.raw(), await world.raw()
    raw.send(raw.head(1, path=b"/t.T/Slow"), raw.data(1, b"0.2"))
    await asyncio.sleep(0.05)
    stopping = asyncio.create_task(world.server.stop(5))
    assert await idle.gone() == wire.NO_ERROR
    data, trailers = await raw.answer(1)
    assert data.endswith(b"0.2") and trailers == {"grpc-status": "0"}
    await stopping
    await world.begin()
    raw = await world.raw()
    raw.send(raw.head(1, path=b"/t.T/Slow"), raw.data(1, b"9"))
    await asyncio.sleep(0.05)
    stopping = asyncio.create_task(world.server.stop(0.05))
    assert (await raw.answer(1))[1]["grpc-status"] == "1"
    await stopping
    assert world.methods.cancelled == 1
    await world.end()


async def test_a_silent_client_is_pinged_and_given_up() -> None:
    world = World()
    await world.begin(keepalive_time_ms=50, keepalive_timeout_ms=50, keepalive_permit_without_calls=1)
    raw = await world.raw()
    assert (await raw.until(wire.PING))[1] == 0
    assert await raw.gone() == wire.NO_ERROR
    raw = await world.raw()
    for _ in range(2):
        payload = (await raw.until(wire.PING))[3]
        raw.send(wire.frame(wire.PING, wire.ACK, 0, payload))
    await asyncio.sleep(0.2)  # twice is what may be asked without sending anything
    raw.send(raw.head(1), raw.data(1, b"hello"))
    assert (await raw.answer(1))[1] == {"grpc-status": "0"}
    await world.end()


async def test_a_connection_has_an_age() -> None:
    world = World()
    await world.begin(max_connection_age_ms=100, max_connection_age_grace_ms=100)
    raw = await world.raw()
    raw.send(raw.head(1, path=b"/t.T/Slow"), raw.data(1, b"9"))
    await raw.until(wire.GOAWAY)
    assert (await raw.answer(1))[1]["grpc-status"] == "1"
    await world.end()
