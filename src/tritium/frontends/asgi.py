"""What every HTTP front end needs of ASGI: reading a body, sending an answer, noticing a client that leaves.

Plain ASGI and no framework, because the ``infer`` route is called tens of thousands of times a second.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

from tritium.errors import Code, Status, TritiumError

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = b"application/json"
TEXT = b"text/plain"

# A request shorter than this is not watched: nobody would notice, and it saves a task.
_WATCH_AFTER_S = 0.02


class ClientLeft(Exception):
    """Nobody waits for an answer: the connection is closed, or the client has stopped reading."""


class BodyError(TritiumError):
    """A body that HTTP itself has a status for: 413 too large, 408 too slow."""

    def __init__(self, http_status: int, message: str, reason: str) -> None:
        super().__init__(Code.INVALID_ARGUMENT, message, reason=reason)
        self._http_status = http_status

    @property
    def status(self) -> Status:
        """That status on every route."""
        usual = super().status
        return Status(self._http_status, self._http_status, usual.grpc, usual.kind)


def too_large(limit_bytes: int, what: str = "the request body") -> BodyError:
    """The error of a body beyond the limit."""
    return BodyError(413, f"{what} exceeds {limit_bytes} bytes, the limit of this server", "request_too_large")


def too_slow(timeout_s: float) -> BodyError:
    """The error of a body that does not come."""
    return BodyError(408, f"nothing of the request body came for {timeout_s:g} s", "request_timeout")


class BoundedBody:
    """A ``receive`` that refuses a body which is too large, or of which nothing comes for too long."""

    __slots__ = ("_limit_bytes", "_receive", "_size", "_timeout_s", "_whole")

    def __init__(self, receive: Receive, limit_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._size = 0
        self._whole = False

    async def __call__(self) -> Event:
        """The next event.

        Raises:
            BodyError: the body is refused.
        """
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout(self._timeout_s):
                event = await self._receive()
        except TimeoutError:
            raise too_slow(self._timeout_s) from None
        if event["type"] == "http.request":
            self._size += len(event.get("body", b""))
            if self._size > self._limit_bytes:
                raise too_large(self._limit_bytes)
            self._whole = not event.get("more_body", False)
        return event


async def read_body(receive: Receive) -> bytes:
    """The whole body.

    Raises:
        ClientLeft: it will never be whole.
    """
    parts: list[bytes] = []
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientLeft
        body = event.get("body", b"")
        if not event.get("more_body", False):
            if not parts:
                return body
            parts.append(body)
            return b"".join(parts)
        parts.append(body)


async def reply(
    send: Send,
    status: int,
    body: bytes = b"",
    content_type: bytes | None = JSON,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    """Sends a whole answer."""
    lines = [(b"content-length", str(len(body)).encode())]
    if content_type is not None:
        lines.append((b"content-type", content_type))
    if headers:
        lines += headers
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


def error_headers(error: TritiumError) -> list[tuple[bytes, bytes]]:
    """``Retry-After`` where the error says when to come again, ``Connection: close`` where a body does not come."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if error.status.v2 == 408:
        headers.append((b"connection", b"close"))
    return headers


class ClientWatch:
    """Cancels the work inside a ``with`` block when the client leaves; ``gone`` says so after it.

    The body must have been read: all that ``receive`` can give then is the end of the connection.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.gone = False

    def __enter__(self) -> ClientWatch:
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> bool:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self.gone and kind is asyncio.CancelledError and self._task is not None:
            # Cancelled by us and by nobody else: the cancellation ends here.
            return self._task.uncancel() == 0
        return False

    def _begin(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._task is not None:
            self._task.cancel()
