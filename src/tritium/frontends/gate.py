"""Gate: where the bytes of an HTTP connection arrive; a known kind of request is answered right here.

It stands before ``Connection`` and looks at requests only while that one is between two of them. A request for
``infer`` that ``kserve.short`` knows how to answer never comes to the parser or to ASGI; every other byte is
handed on. Bodies are received where their tensors stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tritium.errors import Code, TritiumError
from tritium.frontends.asgi import too_slow
from tritium.frontends.connection import Connection
from tritium.frontends.kserve.short import Head, Pending, ShortInfer, write, write_refusal
from tritium.observability import logs
from tritium.types import InferResponse

_log = logs.get(__name__)

# Where bytes arrive that belong to no body yet; one for all connections, as each takes them out at once.
_SCRATCH = bytearray(256 << 10)
_VIEW = memoryview(_SCRATCH)
# Beyond this many bytes of later requests, a client that does not wait for its answers is not read.
_MAX_EARLY_BYTES = 64 << 10
# Answers above this are not joined into one piece before they are sent.
_JOIN_BYTES = 16 << 10
_END = b"\r\n\r\n"


class Gate(asyncio.BufferedProtocol):
    """One connection.

    Args:
        short: what answers requests here.
        body_timeout_s: how long nothing of a body may come.
        more: for the ``Connection`` behind it.
    """

    def __init__(self, short: ShortInfer, body_timeout_s: float, **more: Any) -> None:
        self._short = short
        self._body_timeout_s = body_timeout_s
        self._behind = Connection(**more)
        self._behind.front = self
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        # Of the request that is being received: its head, its body and how much of that is there.
        self._head: Head | None = None
        self._raw_head = b""
        self._body: memoryview = _VIEW[:0]
        self._filled = 0
        # Of the request that runs.
        self._running = False
        self._cancel: Callable[[], None] | None = None
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._closing = self._blocked = False
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # -- the transport's calls --------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """A client connected."""
        self._transport = transport
        self._behind.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and with it the interest in an answer."""
        self._stop_timer()
        self._running = False
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()
        self._behind.connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; whether it may still want answers."""
        return self._head is None and self._behind.eof_received()

    @property
    def busy(self) -> bool:
        """Whether answers are to come from here."""
        return self._running or bool(self._early)

    def pause_writing(self) -> None:
        """The client does not read its answers: no further requests of it are looked at."""
        self._blocked = True
        self._behind.pause_writing()

    def resume_writing(self) -> None:
        """It reads again."""
        self._blocked = False
        self._behind.resume_writing()
        if self._early and not self._running:
            self._go_on()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: into the body that is being received, or to the place for all."""
        return _VIEW if self._head is None else self._body[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        head = self._head
        if head is not None:
            self._filled += nbytes
            if self._filled == head.length:
                self._serve(head)
            else:
                self._since = self._loop.time()
            return
        if self._running or self._blocked or self._early:
            self._keep(bytes(_VIEW[:nbytes]))
            return
        if not self._short.closed and self._behind.quiet:
            end = _SCRATCH.find(_END, 0, nbytes) + 4
            if end > 3 and self._begin(bytes(_VIEW[:end]), _VIEW[end:nbytes]):
                return
        self._hand_on(bytes(_VIEW[:nbytes]))

    # -- requests ---------------------------------------------------------------------------------------------

    def _begin(self, raw_head: bytes, rest: memoryview) -> bool:
        """A request of which the head has come, and perhaps more; whether it is taken here."""
        head = self._short.head(raw_head)
        if head is None:
            return False
        self._behind.rest()
        length, come = head.length, len(rest)
        if come > length:
            self._keep(bytes(rest[length:]))
            rest, come = rest[:length], length
        self._raw_head = raw_head
        if come == length:
            self._body = memoryview(bytes(rest))
            self._serve(head)
            return True
        self._body = np.empty(length, np.uint8).data
        self._body[:come] = rest
        self._head, self._filled = head, come
        self._watch()
        return True

    def _serve(self, head: Head) -> None:
        """Starts a request that is whole."""
        self._head, self._filled = None, 0
        body, self._body = self._body, _VIEW[:0]
        self._running = True
        try:
            cancel = self._short.submit(head, body, self._done)
        except TritiumError:
            cancel = None
        if cancel is None:
            # The long way also says what is wrong with it, if anything is.
            self._running = False
            self._hand_on(self._raw_head + bytes(body))
            self._go_on()
        elif self._running:
            self._cancel = cancel

    def _done(self, pending: Pending, answer: InferResponse | TritiumError) -> None:
        """The answer has come."""
        if not self._running:
            return
        self._running = False
        self._cancel = None
        try:
            status, head, parts = write(pending, answer)
        except Exception as error:
            _log.error("an answer cannot be written", error=error, exc_info=error)
            status, head, parts = write_refusal(TritiumError(Code.INTERNAL, "internal error"))
        self._send(status, head, parts)
        if self._closing:
            self._transport.close()
            return
        self._watch()
        if self._early:
            self._loop.call_soon(self._go_on)

    def _send(self, status: int, head: bytes, parts: list[bytes | memoryview]) -> None:
        """Writes an answer."""
        self._behind.server_state.total_requests += 1
        if self._closing and b"\r\nconnection: close\r\n" not in head:
            head = head[:-2] + b"connection: close\r\n\r\n"
        front = STATUS_LINE[status] + self._behind.usual_lines()
        if len(parts) > 1 and len(parts[-1]) > _JOIN_BYTES:
            self._transport.writelines([front + head, *parts])
        else:
            self._transport.write(b"".join([front, head, *parts]))

    def _hand_on(self, data: bytes) -> None:
        """The rest of the work, and the timeouts, are those of the connection behind."""
        self._stop_timer()
        self._behind.data_received(data)

    def _keep(self, data: bytes) -> None:
        """Bytes of later requests wait."""
        self._early.append(data)
        self._early_bytes += len(data)
        if self._early_bytes > _MAX_EARLY_BYTES:
            self._transport.pause_reading()

    def _go_on(self) -> None:
        """Takes up what came early."""
        if self._running or self._blocked or not self._early or self._transport.is_closing():
            return
        data = b"".join(self._early)
        self._early.clear()
        if self._early_bytes > _MAX_EARLY_BYTES:
            self._transport.resume_reading()
        self._early_bytes = 0
        if self._behind.quiet:
            end = data.find(_END) + 4
            if end > 3 and self._begin(data[:end], memoryview(data)[end:]):
                return
        self._hand_on(data)

    # -- ends -------------------------------------------------------------------------------------------------

    def shutdown(self) -> bool:
        """The server ends: whether there is a request here, after whose answer the connection closes."""
        self._closing = True
        return self._running or self._head is not None

    def _watch(self) -> None:
        """From now on the client must send something in time."""
        self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(min(self._limit_s(), self._body_timeout_s), self._look)

    def _limit_s(self) -> float:
        return self._behind.timeout_keep_alive if self._head is None else self._body_timeout_s

    def _look(self) -> None:
        """Ends a connection on which nothing has come for too long. (One timer for many requests.)"""
        self._timer = None
        if self._transport.is_closing():
            return
        left_s = self._limit_s() - (self._loop.time() - self._since)
        if self._running or left_s > 0:
            delay_s = min(left_s if left_s > 0 else self._body_timeout_s, self._body_timeout_s)
            self._timer = self._loop.call_later(delay_s, self._look)
            return
        if self._head is not None:
            status, head, parts = write_refusal(too_slow(self._body_timeout_s))
            self._send(status, head, parts)
        self._transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
