"""Frames: typed messages as bytes on a socket, with tensors beside them in shared memory.

A frame is a header, the numbers of segments that go back or are given up, and one msgpack message; descriptors
of new segments travel with its first byte.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

from tritium.ipc.arena import Arena

Received = TypeVar("Received")

# Below this, copying through the socket is cheaper than a segment.
INLINE_BYTES = 1 << 15
_HEADER = struct.Struct("<IHHH")  # bytes of the message, new segments, returned ones, dropped ones
_CHUNK = 1 << 18
_MAX_FDS = 64
_FDS_SPACE = socket.CMSG_SPACE(_MAX_FDS * 4)
_RETURN_AT = 8
# Plain numbers: the socket module's own are enums, whose every use costs microseconds. Descriptors that come are
# closed in the processes that we start: there they would keep memory alive that nobody can see.
_DONTWAIT, _CTRUNC = int(socket.MSG_DONTWAIT) | int(getattr(socket, "MSG_CMSG_CLOEXEC", 0)), int(socket.MSG_CTRUNC)


class BrokenPipe(Exception):
    """The other end sent what no sound end sends, or went away."""


class Frames(Generic[Received]):
    """Frames out of bytes and back; one for each end."""

    def __init__(self, end: socket.socket, receives: Any, *, lends: bool = False) -> None:
        self.socket = end
        self.arena = Arena(lends=lends)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(receives)
        self._view = memoryview(bytearray(_CHUNK))
        self._chunks = [self._view]
        self._rest = bytearray()
        self._fds: deque[int] = deque()

    @property
    def plain(self) -> bool:
        """Whether nothing but its message is to go into the next frame."""
        arena = self.arena
        return not (arena.fds or arena.returned or arena.dropped)

    def pack_plain(self, message: object) -> bytes:
        """``pack`` where ``plain``."""
        body = self._encoder.encode(message)
        return _HEADER.pack(len(body), 0, 0, 0) + body

    def pack(self, message: object) -> tuple[bytes, list[int]]:
        """A frame and the descriptors to send with it (and to close after that)."""
        arena = self.arena
        body = self._encoder.encode(message)
        fds, arena.fds = arena.fds[:_MAX_FDS], arena.fds[_MAX_FDS:]
        returned = arena.returned
        if not (fds or returned or arena.dropped):
            return _HEADER.pack(len(body), 0, 0, 0) + body, fds
        back = [returned.popleft() for _ in range(min(len(returned), 4096))]
        dropped, arena.dropped = arena.dropped, []
        numbers = struct.pack(f"<{len(back) + len(dropped)}I", *back, *dropped)
        return _HEADER.pack(len(body), len(fds), len(back), len(dropped)) + numbers + body, fds

    def read(self) -> list[Received]:
        """What has arrived, without waiting.

        Raises:
            BlockingIOError: nothing has.
            BrokenPipe: the other end is gone or sends nonsense.
        """
        try:
            count, ancillary, flags, _ = self.socket.recvmsg_into(self._chunks, _FDS_SPACE, _DONTWAIT)
        except BlockingIOError:
            raise
        except OSError as error:
            raise BrokenPipe(str(error)) from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(array.array("i", data[: len(data) // 4 * 4]))
        if not count or flags & _CTRUNC:
            raise BrokenPipe("end of the stream" if not count else "descriptors were lost")
        data = self._view[:count]
        if not self._rest and count > _HEADER.size:
            length, new, back, dropped = _HEADER.unpack_from(data)
            if length == count - _HEADER.size and length > 1 and not (new or back or dropped):
                # The usual: one message and nothing else.
                return [self._decode(data[_HEADER.size :])]
        if self._rest:
            self._rest += data
            return self._frames(self._rest)
        return self._frames(data)

    def _decode(self, body: memoryview) -> Received:
        try:
            # A copy of its own: tensors of the message are views of it.
            return self._decoder.decode(bytearray(body))
        except msgspec.MsgspecError as error:
            raise BrokenPipe(f"{type(error).__name__}: {error}") from error

    def _frames(self, data: bytearray | memoryview) -> list[Received]:
        found: list[Received] = []
        at, end = 0, len(data)
        view = memoryview(data)
        try:
            while end - at >= _HEADER.size:
                length, new, back, dropped = _HEADER.unpack_from(data, at)
                start = at + _HEADER.size
                body = start + 4 * (back + dropped)
                if end < body + length:
                    break
                if new or back or dropped:
                    self._segments(struct.unpack_from(f"<{back + dropped}I", data, start), new, back)
                if length > 1:
                    # (An empty frame is one nil.)
                    found.append(self._decode(view[body : body + length]))
                at = body + length
        except (KeyError, ValueError, IndexError, OSError) as error:
            raise BrokenPipe(f"{type(error).__name__}: {error}") from error
        if at < end or self._rest:
            self._rest = bytearray(view[at:])
        return found

    def _segments(self, numbers: tuple[int, ...], new: int, back: int) -> None:
        for _ in range(new):
            self.arena.receive(self._fds.popleft())
        for number in numbers[:back]:
            self.arena.take_back(number)
        for number in numbers[back:]:
            self.arena.drop(number)

    @property
    def crowded(self) -> bool:
        """Whether there are more new segments than one frame carries: an empty one must go before."""
        return len(self.arena.fds) > _MAX_FDS

    @property
    def overdue(self) -> bool:
        """Whether so many segments wait to go back that a frame of their own is worth it."""
        return len(self.arena.returned) >= _RETURN_AT

    def close(self) -> None:
        """Closes the socket and whatever descriptors lie about."""
        self.socket.close()
        while self._fds:
            os.close(self._fds.popleft())
        self.arena.close()


def send(end: socket.socket, data: memoryview, fds: list[int]) -> int:
    """Sends what fits, with descriptors; how many bytes that was."""
    if not fds:
        return end.send(data)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    return end.sendmsg([data], rights)


def close_all(fds: list[int]) -> None:
    """Closes descriptors and forgets them."""
    for fd in fds:
        os.close(fd)
    fds.clear()
