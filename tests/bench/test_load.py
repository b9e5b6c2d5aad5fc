"""The load generator against a server that is ten lines of asyncio: what it sends, counts and reports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tritium.bench import Item, load
from tritium.errors import TritiumError

Answer = Callable[[str, Any, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[load.Target]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-le"))
        body = json.loads(await reader.readexactly(length) or b"null")
        try:
            await answer(head.splitlines()[0], body, writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield load.Target.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def plain(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(body)) + body)


async def stream(writer: asyncio.StreamWriter, chunks: list[Any], pause_s: float = 0.01) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for chunk in [*chunks, "[DONE]"]:
        text = chunk if isinstance(chunk, str) else json.dumps(chunk)
        data = f"data: {text}\n\n".encode()
        # In two writes: an event may be cut anywhere.
        for part in (data[:5], data[5:]):
            writer.write(b"%x\r\n" % len(part) + part + b"\r\n")
        await writer.drain()
        await asyncio.sleep(pause_s)
    writer.write(b"0\r\n\r\n")


@pytest.mark.parametrize("with_usage", [True, False])
async def test_streamed(with_usage: bool) -> None:
    seen: list[Any] = []

    async def answer(line: str, body: Any, writer: asyncio.StreamWriter) -> None:
        seen.append((line, body))
        chunks: list[Any] = [{"choices": [{"text": "x"}]} for _ in range(3)]
        if with_usage:
            for number, chunk in enumerate(chunks, start=1):
                chunk["usage"] = {"completion_tokens": 2 * number}
        else:
            chunks.append({"choices": [], "usage": {"completion_tokens": 6}})
        await stream(writer, chunks)

    async with serving(answer) as target:
        sample = await load.complete(target, "m", Item([1, 2, 3], 6), salt="s")
    assert sample.error == ""
    assert (sample.prompt_tokens, sample.output_tokens) == (3, 6)
    assert sample.first_token_s < sample.token_times_s[-1][0] <= sample.elapsed_s
    assert sum(count for _, count in sample.token_times_s) == 6
    line, body = seen[0]
    assert line == "POST /v1/completions HTTP/1.1"
    assert body["prompt"] == [1, 2, 3]
    assert body["ignore_eos"] is True
    assert body["cache_salt"] == "s"
    assert body["max_tokens"] == 6


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([{"choices": [{}]}], "1 tokens came instead of 2"),
        ([{"choices": [{}]}, {"error": {"message": "lost"}}], "lost"),
        (["{"], "JSONDecodeError"),
    ],
)
async def test_bad_streams(chunks: list[Any], said: str) -> None:
    async def answer(line: str, body: Any, writer: asyncio.StreamWriter) -> None:
        await stream(writer, chunks)

    async with serving(answer) as target:
        assert said in (await load.complete(target, "m", Item([1], 2))).error


async def test_refusals_and_broken_connections() -> None:
    async def refuses(line: str, body: Any, writer: asyncio.StreamWriter) -> None:
        plain(writer, 503, b'{"error": "full"}')

    async def leaves(line: str, body: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    async with serving(refuses) as target:
        assert "HTTP 503" in (await load.complete(target, "m", Item([1], 2))).error
    async with serving(leaves) as target:
        assert "RemoteProtocolError" in (await load.complete(target, "m", Item([1], 2))).error
    assert "ConnectionRefusedError" in (await load.complete(target, "m", Item([1], 2))).error


async def test_concurrency_and_order() -> None:
    running = most = 0

    async def answer(line: str, body: Any, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await stream(writer, [{"choices": [{}]}], pause_s=0.02)
        running -= 1

    done: list[tuple[int, int]] = []
    items = [Item([1] * (n + 1), 1) for n in range(6)]
    async with serving(answer) as target:
        samples, duration = await load.run(
            target, "m", items, max_concurrency=2, progress=lambda at, of: done.append((at, of))
        )
    assert most == 2
    assert [s.prompt_tokens for s in samples] == [1, 2, 3, 4, 5, 6]
    assert done == [(n, 6) for n in range(7)]
    assert duration >= 3 * 0.04


async def test_served_model() -> None:
    async def models(line: str, body: Any, writer: asyncio.StreamWriter) -> None:
        plain(writer, 200, b'{"data": [{"id": "tiny"}]}')

    async def nothing(line: str, body: Any, writer: asyncio.StreamWriter) -> None:
        plain(writer, 404, b"{}")

    async with serving(models) as target:
        assert await load.served_model(target) == "tiny"
    async with serving(nothing) as target:
        with pytest.raises(TritiumError, match="does not answer GET /v1/models"):
            await load.served_model(target)
    with pytest.raises(TritiumError, match="does not answer GET /v1/models"):
        await load.served_model(target)


def test_addresses() -> None:
    assert load.Target.parse("localhost:8000") == load.Target("localhost", 8000, "", False)
    assert load.Target.parse("https://h/p/v1/") == load.Target("h", 443, "/p", True)
    for wrong in ("ftp://x", "http://", "http://h:port"):
        with pytest.raises(TritiumError, match="expected http://host:port"):
            load.Target.parse(wrong)
