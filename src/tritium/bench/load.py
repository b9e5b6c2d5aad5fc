"""Load generator: speaks only the wire (HTTP/1.1, OpenAI's completions with token ids); knows no server code."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

from tritium.bench import Item, Sample
from tritium.errors import Code, TritiumError, invalid

Progress = Callable[[int, int], None]
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Target:
    """A server.

    Attributes:
        path: prefix of its routes.
    """

    host: str
    port: int
    path: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Target:
        """Reads ``http://host:port[/prefix]``.

        Raises:
            TritiumError: it is no such address.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port < 0:
            raise invalid(f"url is {url!r}, expected http://host:port", param="url")
        return cls(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"), parts.scheme == "https")


class Response:
    """An answer whose body is read as it comes."""

    def __init__(self, connection: h11.Connection, reader: asyncio.StreamReader) -> None:
        self._connection = connection
        self._reader = reader
        self.status = 0

    async def _event(self) -> Any:
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            self._connection.receive_data(await self._reader.read(READ_BYTES))
        return event

    async def open(self) -> None:
        """Reads the head."""
        while not isinstance(event := await self._event(), h11.Response):
            pass
        self.status = event.status_code

    async def chunks(self) -> AsyncIterator[bytes]:
        """Pieces of the body."""
        while not isinstance(event := await self._event(), h11.EndOfMessage | h11.ConnectionClosed):
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def events(self) -> AsyncIterator[str]:
        """Data of server-sent events, ``[DONE]`` left out."""
        rest = b""
        async for chunk in self.chunks():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    yield data.decode()


@asynccontextmanager
async def request(target: Target, method: str, path: str, body: Any = None) -> AsyncIterator[Response]:
    """One request on a connection of its own; leaving the block closes it, as a client that goes away does."""
    context = ssl.create_default_context() if target.tls else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context)
    try:
        connection = h11.Connection(our_role=h11.CLIENT)
        data = b"" if body is None else json.dumps(body).encode()
        headers = [("Host", f"{target.host}:{target.port}"), ("Content-Length", str(len(data)))]
        headers += [("Content-Type", "application/json"), ("Connection", "close")]
        head = h11.Request(method=method, target=target.path + path, headers=headers)
        writer.write((connection.send(head) or b"") + (connection.send(h11.Data(data=data)) or b""))
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        response = Response(connection, reader)
        await response.open()
        yield response
    finally:
        writer.close()


async def served_model(target: Target) -> str:
    """The first model that the server names in ``/v1/models``.

    Raises:
        TritiumError: UNAVAILABLE when there is no answer of that form.
    """
    try:
        async with request(target, "GET", "/v1/models") as response:
            answer = json.loads(await response.body())
        return str(answer["data"][0]["id"])
    except (OSError, h11.RemoteProtocolError, ValueError, LookupError, TypeError) as error:
        where = f"http://{target.host}:{target.port}"
        raise TritiumError(Code.UNAVAILABLE, f"{where} does not answer GET /v1/models: {error}", param="url") from None


async def complete(target: Target, model: str, item: Item, salt: str = "") -> Sample:
    """Runs one request, streamed, and times its pieces."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": item.prompt,
        "max_tokens": item.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if salt:
        body["cache_salt"] = salt
    begun = time.perf_counter()
    times: list[tuple[float, int]] = []
    tokens, error = 0, ""
    try:
        async with request(target, "POST", "/v1/completions", body) as response:
            if response.status != 200:
                error = f"HTTP {response.status}: {(await response.body()).decode(errors='replace')[:300]}"
            else:
                async for data in response.events():
                    counted, failed = _read(json.loads(data), tokens)
                    error = error or failed
                    if counted > tokens:
                        times.append((time.perf_counter() - begun, counted - tokens))
                        tokens = counted
    except (OSError, h11.RemoteProtocolError, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    if not error and tokens != item.output_len:
        error = f"{tokens} tokens came instead of {item.output_len}"
    return Sample(len(item.prompt), tokens, times, time.perf_counter() - begun, error)


def _read(chunk: dict[str, Any], tokens: int) -> tuple[int, str]:
    """Tokens so far after this chunk, and the error that it reports.

    A server that does not send its usage with each chunk is counted a token a chunk until the last one tells.
    """
    if "error" in chunk:
        return tokens, str(chunk["error"])
    usage = chunk.get("usage") or {}
    if "completion_tokens" in usage:
        return int(usage["completion_tokens"]), ""
    return tokens + bool(chunk.get("choices")), ""


async def run(
    target: Target,
    model: str,
    items: Sequence[Item],
    *,
    max_concurrency: int = 0,
    salt: str = "",
    progress: Progress = lambda done, total: None,
) -> tuple[list[Sample], float]:
    """Sends all requests at their times; the samples in order, and the seconds until the last one ended.

    Args:
        max_concurrency: requests in flight at most; 0 for no limit.
        salt: keeps this run from the prefix cache of others, where the server knows ``cache_salt``.
    """
    gate = asyncio.Semaphore(max_concurrency or len(items))
    progress(0, len(items))
    begun = time.perf_counter()
    done = 0

    async def one(item: Item) -> Sample:
        nonlocal done
        await asyncio.sleep(max(0.0, begun + item.start_s - time.perf_counter()))
        async with gate:
            sample = await complete(target, model, item, salt)
        done += 1
        progress(done, len(items))
        return sample

    samples = await asyncio.gather(*(one(item) for item in items))
    return samples, time.perf_counter() - begun
