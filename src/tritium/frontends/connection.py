"""One HTTP connection: uvicorn's httptools protocol with limits on the head and manners for HTTP/1.0.

uvicorn reads a head of any size and takes any time for it, and answers HTTP/1.0 as if it were 1.1; Triton
answers it in kind, and proxies that speak it do not expect chunks.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tritium.frontends.kserve.call import SPELLINGS

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0
# Requests that one connection may send before the first of them is answered.
MAX_PIPELINED = 256
# Of a body that was answered before it was read (413), this much is thrown away before the connection is closed:
# closing at once would often cost the client the answer.
MAX_DISCARDED_BYTES = 64 << 20

# Of a client that sends no more: how often we look whether it is there, and ask (in looks).
_LOOK_S, _ASK_EVERY = 0.05, 20

_REFUSALS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
}


class Front(Protocol):
    """What stands before a connection and answers some requests itself."""

    @property
    def busy(self) -> bool:
        """Whether answers are to come from it."""
        ...

    def shutdown(self) -> bool:
        """The server ends; whether a request is there, after whose answer the front closes the connection."""
        ...


class Connection(HttpToolsProtocol):
    """A connection whose request heads are bounded in size and time.

    Attributes:
        front: what stands before it; None for nothing.
        between: whether no request has been begun that has not come to its end.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.front: Front | None = None
        self.between = True
        self._lines = (self.server_state.default_headers, b"")
        self._reading_head = True
        self._head_bytes = 0
        self._suspicious = False
        self._discarded_bytes = self._trailer_bytes = 0
        self._refusal = 400
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected; its first request must come in time."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_head_timer()
        super().connection_lost(exc)
        # They refer to us: without this every connection waits for the garbage collector.
        self.front = None
        if self.cycle is not None and self.cycle.response_complete:
            self.cycle = None  # type: ignore[assignment]

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it is gone, or has only closed its half and waits for its answers.

        TCP says the same of both. So it is told that we go on (1xx, which clients that want none ignore, RFC 9110
        section 15.2): from one that is gone, a reset comes back.
        """
        if not self.between or not self._busy or (self.scope and self.scope["http_version"] == "1.0"):
            return False
        self._look(0)
        return True

    @property
    def _busy(self) -> bool:
        cycle = self.cycle
        waits = bool(self.pipeline) or (cycle is not None and not cycle.response_complete)
        return waits or (self.front is not None and self.front.busy)

    def _look(self, times: int) -> None:
        """Looks after a client that sends no more."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif not self._busy:
            self.transport.close()
        else:
            cycle = self.cycle
            begun = cycle is not None and cycle.response_started and not cycle.response_complete
            if times % _ASK_EVERY == 0 and not begun:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(_LOOK_S, self._look, times + 1)

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way here."""
        return self.between and (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    def rest(self) -> None:
        """The front takes the next request, and the time that it may take."""
        self._stop_head_timer()
        self._unset_keepalive_if_required()

    def usual_lines(self) -> bytes:
        """The lines that the head of every answer has."""
        headers, lines = self._lines
        if headers is not self.server_state.default_headers:
            headers = self.server_state.default_headers
            lines = b"".join([b"%b: %b\r\n" % line for line in headers])
            self._lines = (headers, lines)
        return lines

    def shutdown(self) -> None:
        """The server ends: the connection closes, after the answer under way."""
        if self.front is None or not self.front.shutdown():
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Bytes came; a head that does not end within MAX_HEAD_BYTES is refused."""
        if self.transport.is_closing():
            return
        self._suspicious = self._head_bytes + len(data) > MAX_HEAD_BYTES
        super().data_received(data)
        if not self._reading_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refusal = 431
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._spellings: list[bytes] = []
        self.between = False
        self._reading_head = True
        self._discarded_bytes = self._trailer_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_too_slow)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; uvicorn keeps its name in lower case only."""
        if not self._reading_head:
            # A trailer: nobody here wants any, and one must not pass for a header (RFC 9110, section 6.5.1).
            self._trailer_bytes += len(name) + len(value) + 4
            if self._trailer_bytes > MAX_HEAD_BYTES:
                self.transport.close()
                raise ValueError("trailers too large")
            return
        self._spellings.append(name)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole; the application starts."""
        self.scope[SPELLINGS] = self._spellings  # type: ignore[typeddict-unknown-key]
        self._stop_head_timer()
        self._reading_head = False
        self._head_bytes = 0
        if self._suspicious and sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refusal = 431
            raise ValueError("head too large")  # the parser stops, and send_400_response is called
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and codings != [b"chunked"]:
            # Chunks would be read, and what is in them taken for the body itself (RFC 9112, section 6.1).
            self._refusal = 501
            raise ValueError("unknown transfer coding")
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.close()
            raise ValueError("too many pipelined requests")
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.transport = _Http10(self.transport)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        super().on_body(body)
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.close()

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        self.between = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no acceptable request, and closes."""
        self._stop_head_timer()
        if self.transport.is_closing():
            return
        reason = _REFUSALS[self._refusal]
        body = b'{"error":"%s"}' % reason.encode()
        lines = (
            STATUS_LINE[self._refusal],
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body),
            body,
        )
        self.transport.write(b"".join(lines))
        self.transport.close()

    def _head_too_slow(self) -> None:
        self._head_timer = None
        self._refusal = 408
        self.send_400_response("")

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Http10:
    """The transport as an answer to HTTP/1.0 sees it: its version in the status line, no chunks."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._in_body = False
        self._chunked = False

    def write(self, data: bytes) -> None:
        """Writes the head, or one piece of the body (uvicorn writes whole chunks)."""
        if not self._in_body:
            self._in_body = True
            head = b"HTTP/1.0" + data.removeprefix(b"HTTP/1.1")
            self._chunked = b"\r\ntransfer-encoding: chunked\r\n" in head
            data = head.replace(b"\r\ntransfer-encoding: chunked\r\n", b"\r\n", 1)
        elif self._chunked:
            data = self._unchunked(data)
        self._transport.write(data)

    @staticmethod
    def _unchunked(data: bytes) -> bytes:
        parts: list[bytes] = []
        at = 0
        while at < len(data):
            end = data.index(b"\r\n", at)
            size = int(data[at:end], 16)
            parts.append(data[end + 2 : end + 2 + size])
            at = end + 4 + size
        return b"".join(parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
