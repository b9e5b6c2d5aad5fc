"""A server of a few methods, and a client that writes its own frames."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import hpack

from tritium.frontends.http2 import wire
from tritium.frontends.http2.listener import Http2Server

HEAD = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/t.T/Echo"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
]


class Methods:
    """What the server of these tests serves."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.seen: list[Any] = []

    async def echo(self, message: bytes, context: Any) -> bytes:
        self.seen.append(context.invocation_metadata())
        return message

    async def slow(self, message: bytes, context: Any) -> bytes:
        try:
            await asyncio.sleep(float(message or b"30"))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return message

    async def refuse(self, message: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.ABORTED, "no ☹", (("why", "so"),))
        return b""

    async def broken(self, message: bytes, context: Any) -> bytes:
        raise RuntimeError("inside")

    async def pour(self, message: bytes, context: Any) -> None:
        for _ in range(int(message)):
            await context.write(b"x" * 10_000)

    async def each(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message

    async def count(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        return str([len(message) async for message in messages]).encode()

    def handlers(self) -> Any:
        unary = grpc.unary_unary_rpc_method_handler
        methods = {
            "Echo": unary(self.echo),
            "Slow": unary(self.slow),
            "Refuse": unary(self.refuse),
            "Broken": unary(self.broken),
            "Pour": grpc.unary_stream_rpc_method_handler(self.pour),
            "Each": grpc.stream_stream_rpc_method_handler(self.each),
            "Count": grpc.stream_unary_rpc_method_handler(self.count),
        }
        return grpc.method_handlers_generic_handler("t.T", methods)


class Raw:
    """A client that writes frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.encoder, self.decoder = hpack.Encoder(), hpack.Decoder()
        self.settings: dict[int, int] = {}

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    def head(self, stream: int, *more: Any, path: bytes = b"/t.T/Echo", flags: int = wire.END_HEADERS) -> bytes:
        headers = [(k, path if k == b":path" else v) for k, v in HEAD]
        return wire.frame(wire.HEADERS, flags, stream, self.encoder.encode([*headers, *more]))

    @staticmethod
    def data(stream: int, message: bytes, flags: int = wire.END_STREAM, flag: int = 0) -> bytes:
        return wire.frame(wire.DATA, flags, stream, bytes((flag,)) + len(message).to_bytes(4, "big") + message)

    async def frame(self) -> tuple[int, int, int, bytes]:
        async with asyncio.timeout(5):
            high, low, kind, flags, stream = wire.FRAME_HEAD.unpack(await self.reader.readexactly(9))
            return kind, flags, stream, await self.reader.readexactly(high << 8 | low)

    async def until(self, wanted: int) -> tuple[int, int, int, bytes]:
        while (found := await self.frame())[0] != wanted:
            if found[0] == wire.HEADERS:
                self.decoder.decode(found[3])
        return found

    async def answer(self, stream: int) -> tuple[bytes, dict[str, str]]:
        """What comes of a call: its data and its trailers."""
        data = b""
        while True:
            kind, flags, number, payload = await self.frame()
            headers = dict(self.decoder.decode(payload)) if kind == wire.HEADERS else {}
            if number != stream:
                continue
            if kind == wire.DATA:
                data += payload
            if kind in (wire.HEADERS, wire.DATA) and flags & wire.END_STREAM:
                return data, headers
            assert kind != wire.RST_STREAM

    async def gone(self) -> int:
        """The code of the GOAWAY that ends the connection."""
        payload = (await self.until(wire.GOAWAY))[3]
        async with asyncio.timeout(5):
            while await self.reader.read(65536):
                pass
        return int.from_bytes(payload[4:8], "big")


class World:
    def __init__(self) -> None:
        self.methods = Methods()
        self.port = 0
        self.server: Http2Server
        self._clients: list[Raw] = []

    async def begin(self, **options: int) -> None:
        given = {"grpc." + name.replace("__", "."): value for name, value in options.items()}
        self.server = Http2Server({"grpc.max_receive_message_length": 1 << 20, **given})
        self.server.add_generic_rpc_handlers((self.methods.handlers(),))
        self.port = await self.server.start("127.0.0.1", 0)

    async def raw(self, settings: dict[int, int] | None = None) -> Raw:
        made = Raw(*await asyncio.open_connection("127.0.0.1", self.port))
        made.send(wire.PREFACE, wire.settings(settings or {}))
        self.keep(made)
        made.settings = dict(struct.iter_unpack(">HI", (await made.frame())[3]))
        return made

    def keep(self, client: Raw) -> None:
        self._clients.append(client)

    async def end(self) -> None:
        await self.server.stop(0)
        for client in self._clients:
            client.writer.close()
        await asyncio.gather(*(c.writer.wait_closed() for c in self._clients), return_exceptions=True)

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
