"""Sender: the half of a connection that sends: answers, as the client has room for them."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from tritium.frontends.http2 import wire
from tritium.frontends.http2.call import OK, Buffer, Call
from tritium.frontends.http2.care import Care
from tritium.frontends.http2.wire import FLOW_CONTROL_ERROR, WireError, frame, frame_head

# Data goes out in pieces of at most so many bytes, so that calls take turns.
_PIECE = 1 << 20
# Answers above this are not joined into one piece before they are sent.
_JOIN_BYTES = 16 << 10
# What is sent whether the client reads or not (statuses, replies) is kept for one that does not up to so many bytes:
# more than the statuses of all its calls at a time.
_MAX_UNREAD_BYTES = 8 << 20


class Sender:
    """What is sent to one client.

    Attributes:
        calls: by number of their stream.
    """

    _care: Care

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self._transport: Any = None
        self._writer = wire.HeadWriter()
        self._window = 65535
        self._max_frame = 16384
        self._blocked = self._leaving = False
        self._initial_window = 65535
        self._unread_bytes = 0
        # Calls with something to send that have room of their own, and wait for that of the connection.
        self._stalled: OrderedDict[int, Call] = OrderedDict()

    def write(self, data: bytes) -> None:
        """Sends bytes."""
        if not self._transport.is_closing():
            self._transport.write(data)
            self._unread(len(data))

    def _unread(self, count: int) -> None:
        """So many bytes were sent; a client that does not read ends when there are too many of them."""
        if self._blocked:
            self._unread_bytes += count
            if self._unread_bytes > _MAX_UNREAD_BYTES:
                self._transport.abort()
        else:
            self._unread_bytes = 0

    def respond(self, call: Call, parts: Sequence[Buffer]) -> None:
        """The only answer of a call, in parts, and its end; at once where the client has room for it."""
        size = sum(map(len, parts))
        if size + 5 > min(self._window, call.window, self._max_frame, _PIECE * 2) or self._blocked or call.begun:
            self.send(call, parts[0] if len(parts) == 1 else b"".join(parts))
            call.finish(OK)
            return
        self._window -= size + 5
        front, back = self._writer.around(call.number, size)
        self._care.sent()
        if size > _JOIN_BYTES:
            self._transport.writelines([front, *parts, back])
        else:
            self._transport.write(b"".join((front, *parts, back)))
        self._end(call)

    def send(self, call: Call, message: Buffer) -> None:
        """An answer of a call; it leaves as the client has room for it."""
        call.unsent.append(b"\0" + len(message).to_bytes(4, "big"))
        if message:
            call.unsent.append(message)
        call.unsent_bytes += 5 + len(message)
        self._flush(call)

    def finish(self, call: Call) -> None:
        """The status of a call is known."""
        self._flush(call)

    def refuse(self, call: Call, http_status: int) -> None:
        """Answers what is no call of gRPC."""
        block = self._writer.refuse(http_status)
        flags = wire.END_HEADERS | wire.END_STREAM
        self.write(frame(wire.HEADERS, flags, call.number, block))
        self._end(call)

    def _pump(self) -> None:
        """The connection has room again."""
        while self._stalled and self._window > 0 and not self._blocked:
            call = self._stalled.popitem(last=False)[1]
            if not call.over:
                self._flush(call)

    def _take_settings(self, values: dict[int, int]) -> None:
        """What the client wants of what is sent to it; of a setting that is given twice, the later value.

        Raises:
            WireError: a value is not allowed.
        """
        window = values.get(wire.INITIAL_WINDOW_SIZE, self._initial_window)
        size = values.get(wire.MAX_FRAME_SIZE, self._max_frame)
        if window > wire.LARGEST_WINDOW:
            raise WireError(FLOW_CONTROL_ERROR, f"a window of {window}")
        if not 16384 <= size < 1 << 24:
            raise WireError(wire.PROTOCOL_ERROR, f"frames of {size}")
        if values.get(wire.ENABLE_PUSH, 0) > 1:
            raise WireError(wire.PROTOCOL_ERROR, "ENABLE_PUSH")
        self._max_frame = size
        if wire.HEADER_TABLE_SIZE in values:
            self._writer.resize(values[wire.HEADER_TABLE_SIZE])
        more, self._initial_window = window - self._initial_window, window
        if more:
            for call in list(self.calls.values()):
                self._widen(call, more)

    def _widen(self, call: Call, more: int) -> None:
        """The client takes more bytes (or less) on a call.

        Raises:
            WireError: more than a window can be.
        """
        call.window += more
        if call.window > wire.LARGEST_WINDOW:
            raise WireError(FLOW_CONTROL_ERROR, "a window is too large")
        if call.unsent and call.window > 0:
            self._flush(call)

    def _flush(self, call: Call) -> None:
        """Sends what the client has room for."""
        out: list[Buffer] = []
        if call.unsent and not call.begun:
            call.begun = True
            out.append(frame(wire.HEADERS, wire.END_HEADERS, call.number, self._writer.begin()))
        while call.unsent and not self._blocked:
            size = min(call.unsent_bytes, self._window, call.window, self._max_frame, _PIECE)
            if size <= 0:
                break
            self._window -= size
            call.window -= size
            call.unsent_bytes -= size
            out.append(frame_head(size, wire.DATA, 0, call.number))
            out += _take(call, size)
        if call.trailers is not None and not call.unsent:
            out.append(self._trailers(call))
        if out and not self._transport.is_closing():
            self._care.sent()
            self._transport.writelines(out)
            self._unread(sum(map(len, out)))
        if call.trailers is not None and not call.unsent:
            self._end(call)
            return
        if call.unsent and call.window > 0:
            self._stalled[call.number] = call
        call.sent()

    def _trailers(self, call: Call) -> bytes:
        assert call.trailers is not None
        status, message, more = call.trailers
        if status == OK and not more and call.begun:
            block = self._writer.end()
        else:
            block = self._writer.fail(status, message, more, alone=not call.begun)
        return frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, call.number, block)

    def _end(self, call: Call) -> None:
        if not call.ended:
            # It need not send the rest.
            self.write(frame(wire.RST_STREAM, 0, call.number, struct.pack(">I", wire.NO_ERROR)))
        self.calls.pop(call.number, None)
        self._stalled.pop(call.number, None)
        call.close()
        self._emptied()

    def _emptied(self) -> None:
        if self._leaving and not self.calls:
            self._transport.close()


def _take(call: Call, size: int) -> list[Buffer]:
    """The next ``size`` bytes of what waits."""
    out: list[Buffer] = []
    while size:
        part = call.unsent.popleft()
        if len(part) > size:
            view = memoryview(part)
            call.unsent.appendleft(view[size:])
            part = view[:size]
        out.append(part)
        size -= len(part)
    return out
