"""Connection: the frames of one client, and the calls in them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Protocol

from tritium.frontends.http2 import wire
from tritium.frontends.http2.call import CANCELLED, Call
from tritium.frontends.http2.care import Care, Limits
from tritium.frontends.http2.opening import MAX_HEADER_LIST_BYTES, HeadReader, Malformed, Opening
from tritium.frontends.http2.sending import Sender
from tritium.frontends.http2.wire import WireError, frame

# Where bytes arrive that belong to no large message; one for all connections, as each takes them out at once.
_VIEW = memoryview(bytearray(256 << 10))
# What a client may send before we say that we have taken it.
STREAM_WINDOW = 4 << 20
CONNECTION_WINDOW = 64 << 20
MAX_FRAME = 4 << 20
# Frames other than DATA, and the header block of a call, have at most so many bytes.
_MAX_CONTROL = 64 << 10
# A header block comes in at most so many frames: empty ones would make it endless.
_MAX_BLOCK_FRAMES = 64
# After an error, a client has so long to read what is said of it.
_LINGER_S = 1.0


class Service(Protocol):
    """What a connection needs of its listener.

    Attributes:
        max_streams: calls at a time.
        max_message_bytes: largest message that is taken.
    """

    max_streams: int
    max_message_bytes: int
    limits: Limits

    def complete(self, opening: Opening) -> None:
        """Fills in what answers a call."""
        ...

    def spawn(self, work: Any) -> asyncio.Task[None]:
        """Runs a coroutine."""
        ...

    def opened(self, connection: Connection) -> None:
        """A client has come."""
        ...

    def closed(self, connection: Connection) -> None:
        """A client has left."""
        ...


class Connection(Sender, asyncio.BufferedProtocol):
    """One client."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self.service = service
        self.loop = asyncio.get_running_loop()
        self._reader = HeadReader()
        # Of a frame that has come in part: its bytes so far, and how many there must be before it is looked at.
        self._rest, self._wanted = bytearray(), 0
        self.greeted = False
        self._last = 0
        # Of the DATA frame that is being received: bytes to come, its call and whether that ends with it.
        self._left = 0
        self._call: Call | None = None
        self._ends = self._direct = False
        # Of a header block that goes on in the next frame: its stream, its flags, what there is of it, and frames.
        self._block: tuple[int, int, bytes, int] | None = None
        self._unacknowledged = 0
        self._care = Care(self, service.limits)
        self._kinds: dict[int, Callable[[int, int, memoryview], None]] = {
            wire.HEADERS: self._headers,
            wire.CONTINUATION: self._continuation,
            wire.RST_STREAM: self._reset,
            wire.SETTINGS: self._settings,
            wire.PING: self._ping,
            wire.WINDOW_UPDATE: self._window_update,
            wire.PRIORITY: wire.check_priority,
            wire.GOAWAY: wire.check_goaway,
            wire.PUSH_PROMISE: self._promise,
        }

    # -- the transport's calls --------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """A client connected."""
        self._transport = transport
        self.service.opened(self)
        ours = {
            wire.MAX_CONCURRENT_STREAMS: self.service.max_streams,
            wire.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            wire.MAX_FRAME_SIZE: MAX_FRAME,
            wire.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST_BYTES,
        }
        more = struct.pack(">I", CONNECTION_WINDOW - 65535)
        self.write(wire.settings(ours) + frame(wire.WINDOW_UPDATE, 0, 0, more))
        self._care.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, and its calls with it."""
        self._care.end()
        for call in list(self.calls.values()):
            call.close()
        self.calls.clear()
        self.service.closed(self)

    def eof_received(self) -> None:
        """The client sends no more: the transport closes itself."""

    def pause_writing(self) -> None:
        """The client does not read."""
        self._blocked = True

    def resume_writing(self) -> None:
        """It reads again."""
        self._blocked = False
        self._unread_bytes = 0
        self._pump()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: into the large message that is being received, or to the place for all."""
        if self._left and not self._rest and self._call is not None and not self._call.over:
            room = self._call.room()
            if room is not None:
                self._direct = True
                return room[: self._left]
        self._direct = False
        return _VIEW

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        self._care.alive = True
        try:
            if self._direct and self._call is not None:
                self._direct = False
                self._took(nbytes)
                self._call.put(nbytes)
                self._ended_data()
                return
            data: memoryview = _VIEW[:nbytes]
            if self._rest:
                # Not put together anew for every byte of a slow client.
                self._rest += data
                if len(self._rest) < self._wanted:
                    return
                data, self._rest = memoryview(self._rest), bytearray()
            self._wanted = 0
            at = self._consume(data)
            if at < len(data):
                self._rest = bytearray(data[at:])
        except WireError as error:
            self.give_up(error.code, str(error))

    # -- frames -----------------------------------------------------------------------------------------------

    def _consume(self, data: memoryview) -> int:
        """Takes frames out of what has come; returns how far it came."""
        at, end = 0, len(data)
        if not self.greeted:
            if bytes(data[:24]) != wire.PREFACE[: min(end, 24)]:
                self._transport.close()
                return end
            if end < 24:
                return 0
            self.greeted = True
            at = 24
        while not self._transport.is_closing():
            if self._left:
                count = min(self._left, end - at)
                if not count:
                    break
                self._data(data[at : at + count])
                at += count
                continue
            if end - at < 9:
                break
            high, low, kind, flags, stream = wire.FRAME_HEAD.unpack_from(data, at)
            length = high << 8 | low
            if kind == wire.DATA and not flags & wire.PADDED:
                at += 9
                if flags & wire.END_STREAM and length <= end - at and self._whole(stream, data[at : at + length]):
                    at += length
                    continue
                self._begin_data(length, flags, stream & 0x7FFFFFFF)
                continue
            if length > (MAX_FRAME if kind == wire.DATA else _MAX_CONTROL):
                raise WireError(wire.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            if end - at < 9 + length:
                self._wanted = 9 + length
                break
            self._frame(kind, flags, stream & 0x7FFFFFFF, data[at + 9 : at + 9 + length])
            at += 9 + length
        return at

    def _whole(self, stream: int, payload: memoryview) -> bool:
        """The usual: all that a client sends on a call comes in one frame; False when it is not that."""
        call = self.calls.get(stream)
        if call is None or self._block is not None or call.crowded or not call.take_only(payload):
            return False
        self._call = None
        self._took(len(payload))
        call.end()
        return True

    def _frame(self, kind: int, flags: int, stream: int, payload: memoryview) -> None:
        if self._block is not None and (kind != wire.CONTINUATION or stream != self._block[0]):
            raise WireError(wire.PROTOCOL_ERROR, "a header block was not ended")
        if kind == wire.DATA:
            inner = wire.unpadded(flags, payload)
            self._took(len(payload) - len(inner))
            self._begin_data(len(inner), flags, stream)
            if inner:
                self._data(inner)
            return
        take = self._kinds.get(kind)
        if take is not None:
            take(flags, stream, payload)

    def _begin_data(self, length: int, flags: int, stream: int) -> None:
        if length > MAX_FRAME:
            raise WireError(wire.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
        if self._block is not None or not stream % 2 or stream > self._last:
            raise WireError(wire.PROTOCOL_ERROR, "DATA where there is no call")
        self._call = self.calls.get(stream)
        if self._call is not None and self._call.ended:
            raise WireError(wire.STREAM_CLOSED, "DATA after the end of a call")
        self._left = length
        self._ends = bool(flags & wire.END_STREAM)
        if not length:
            self._ended_data()

    def _data(self, chunk: memoryview) -> None:
        self._took(len(chunk))
        if self._call is not None:
            self._call.feed(chunk)
        self._ended_data()

    def _took(self, count: int) -> None:
        """Bytes of DATA have come; the client may send as many again, when its call has room for them."""
        self._left = max(0, self._left - count)
        self._unacknowledged += count
        if self._unacknowledged > CONNECTION_WINDOW // 4:
            self.write(frame(wire.WINDOW_UPDATE, 0, 0, struct.pack(">I", self._unacknowledged)))
            self._unacknowledged = 0
        call = self._call
        if call is not None and not call.over:
            call.unacknowledged += count
            if call.unacknowledged > STREAM_WINDOW:
                raise WireError(wire.FLOW_CONTROL_ERROR, "more than the window of a call")
            self.acknowledge(call)

    def acknowledge(self, call: Call) -> None:
        """Lets the client send more on a call, unless what it has sent waits."""
        if call.unacknowledged > STREAM_WINDOW // 4 and not (call.crowded or call.over or call.ended):
            self.write(frame(wire.WINDOW_UPDATE, 0, call.number, struct.pack(">I", call.unacknowledged)))
            call.unacknowledged = 0

    def _ended_data(self) -> None:
        if not self._left and self._ends:
            self._ends = False
            call, self._call = self._call, None
            if call is not None:
                call.end()

    def _headers(self, flags: int, stream: int, payload: memoryview) -> None:
        payload = wire.unpadded(flags, payload)
        if flags & wire.WITH_PRIORITY:
            if len(payload) < 5:
                raise WireError(wire.FRAME_SIZE_ERROR, "HEADERS without their priority")
            payload = payload[5:]
        if flags & wire.END_HEADERS:
            self._opened(stream, flags, bytes(payload))
        else:
            self._block = (stream, flags, bytes(payload), 1)

    def _continuation(self, flags: int, stream: int, payload: memoryview) -> None:
        if self._block is None:
            raise WireError(wire.PROTOCOL_ERROR, "CONTINUATION of nothing")
        _, first, block, frames = self._block
        block += payload
        if len(block) > _MAX_CONTROL or frames >= _MAX_BLOCK_FRAMES:
            raise WireError(wire.ENHANCE_YOUR_CALM, "a header block without end")
        self._block = (stream, first, block, frames + 1)
        if flags & wire.END_HEADERS:
            self._block = None
            self._opened(stream, first, block)

    def _opened(self, number: int, flags: int, block: bytes) -> None:
        """The head of a call has come, or what a client sends behind its messages."""
        call = self.calls.get(number)
        if not number % 2 or (number <= self._last and call is None):
            raise WireError(wire.PROTOCOL_ERROR if not number % 2 else wire.STREAM_CLOSED, f"HEADERS for {number}")
        try:
            opening = self._reader.read(block, self.service.complete)
        except Malformed:
            self._last = max(self._last, number)
            self.write(frame(wire.RST_STREAM, 0, number, struct.pack(">I", wire.PROTOCOL_ERROR)))
            return
        if call is None:
            self._last = number
            if self._leaving or len(self.calls) >= self.service.max_streams:
                self.write(frame(wire.RST_STREAM, 0, number, struct.pack(">I", wire.REFUSED_STREAM)))
                return
            ended = bool(flags & wire.END_STREAM)
            call = self.calls[number] = Call(self, number, opening, self._initial_window, ended=ended)
            call.start()
        elif not flags & wire.END_STREAM:
            raise WireError(wire.PROTOCOL_ERROR, "HEADERS in the middle of a call")
        if flags & wire.END_STREAM and not call.over:
            call.end()

    def _reset(self, flags: int, stream: int, payload: memoryview) -> None:
        if len(payload) != 4 or not stream or stream > self._last:
            raise WireError(wire.PROTOCOL_ERROR if len(payload) == 4 else wire.FRAME_SIZE_ERROR, "RST_STREAM")
        call = self.calls.pop(stream, None)
        if call is not None:
            self._stalled.pop(stream, None)
            call.close()
            self._care.given_up(self.service.max_streams)
            self._emptied()

    def _settings(self, flags: int, stream: int, payload: memoryview) -> None:
        if stream or len(payload) % 6 or (flags & wire.ACK and payload):
            raise WireError(wire.PROTOCOL_ERROR if stream else wire.FRAME_SIZE_ERROR, "SETTINGS")
        if flags & wire.ACK:
            return
        self._care.control(self._blocked)
        self._care.set()
        # First the reply: what is sent behind it follows the new rules.
        self.write(frame(wire.SETTINGS, wire.ACK, 0))
        self._take_settings(dict(struct.iter_unpack(">HI", payload)))

    def _ping(self, flags: int, stream: int, payload: memoryview) -> None:
        if stream or len(payload) != 8:
            raise WireError(wire.PROTOCOL_ERROR if stream else wire.FRAME_SIZE_ERROR, "PING")
        if flags & wire.ACK:
            return
        self._care.control(self._blocked)
        self._care.pinged(bool(self.calls))
        self.write(frame(wire.PING, wire.ACK, 0, bytes(payload)))

    def _window_update(self, flags: int, stream: int, payload: memoryview) -> None:
        if len(payload) != 4:
            raise WireError(wire.FRAME_SIZE_ERROR, "WINDOW_UPDATE")
        more = int.from_bytes(payload, "big") & wire.LARGEST_WINDOW
        if not more or stream > self._last:
            raise WireError(wire.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
        if stream:
            call = self.calls.get(stream)
            if call is not None:
                self._widen(call, more)
            return
        self._window += more
        if self._window > wire.LARGEST_WINDOW:
            raise WireError(wire.FLOW_CONTROL_ERROR, "the window is too large")
        self._pump()

    def _promise(self, flags: int, stream: int, payload: memoryview) -> None:
        raise WireError(wire.PROTOCOL_ERROR, "a client promises nothing")

    # -- ends -------------------------------------------------------------------------------------------------

    def send_ping(self) -> None:
        """Asks the client whether it is there."""
        self.write(frame(wire.PING, 0, 0, b"tritium?"))

    def leave(self) -> None:
        """Takes no new calls, and closes after the last one."""
        if not self._leaving:
            self._leaving = True
            self.write(frame(wire.GOAWAY, 0, 0, struct.pack(">II", self._last, wire.NO_ERROR)))
        self._emptied()

    def give_up(self, code: int, why: str) -> None:
        """Ends the connection, its calls too, and tells the client why."""
        self.write(frame(wire.GOAWAY, 0, 0, struct.pack(">II", self._last, code) + why.encode()))
        for call in list(self.calls.values()):
            call.close()
        self.calls.clear()
        self._transport.close()
        # That waits until the client has read everything, which one that is gone, or hostile, never does.
        self.loop.call_later(_LINGER_S, self._transport.abort)

    def cancel_calls(self) -> None:
        """Ends every call that is left."""
        for call in list(self.calls.values()):
            call.finish(CANCELLED, "the server ends")
        self._transport.close()
