"""Typed messages over an inherited socket pair, with tensors beside them in shared memory.

A frame is a header, the numbers of segments that go back or are given up, and one msgpack message; descriptors
of new segments travel with its first byte. The socket has no name: only the child inherits the other end, and
the death of either is seen at once as the end of the stream.
"""

from __future__ import annotations

import array
import asyncio
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
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
# Plain numbers: the socket module's own are enums, whose every use costs microseconds.
_DONTWAIT, _CTRUNC = int(socket.MSG_DONTWAIT), int(socket.MSG_CTRUNC)


class BrokenPipe(Exception):
    """The other end sent what no sound end sends, or went away."""


class Frames(Generic[Received]):
    """Frames out of bytes and back; one for each end."""

    def __init__(self, end: socket.socket, receives: Any) -> None:
        self.socket = end
        self.arena = Arena()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(receives)
        self._view = memoryview(bytearray(_CHUNK))
        self._chunks = [self._view]
        self._rest = bytearray()
        self._fds: deque[int] = deque()

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
        if self._rest:
            self._rest += data
            return self._frames(self._rest)
        return self._frames(data)

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
                    # A copy of its own: tensors of the message are views of it. (An empty frame is one nil.)
                    found.append(self._decoder.decode(bytearray(view[body : body + length])))
                at = body + length
        except (msgspec.MsgspecError, KeyError, ValueError, IndexError, OSError) as error:
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


class AsyncPipe(Generic[Received]):
    """The end in an event loop.

    Args:
        on_message: called for each message.
        on_end: called once, with the reason, when the other end is gone.
    """

    def __init__(
        self,
        end: socket.socket,
        receives: Any,
        on_message: Callable[[Received], None],
        on_end: Callable[[str], None],
    ) -> None:
        end.setblocking(False)
        self._frames: Frames[Received] = Frames(end, receives)
        self.arena = self._frames.arena
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[memoryview, list[int]]] = deque()
        self._closed = False
        # While messages are handed on, what is sent in answer to them gathers here and leaves in one piece.
        self._gathered: list[bytes] | None = None
        self._loop.add_reader(end, self._read)

    def send(self, message: object) -> None:
        """Hands a message over; never blocks. What cannot be sent any more is lost, and ``on_end`` says so."""
        if self._closed:
            return
        while self._frames.crowded:
            self._send_frame(None)
        self._send_frame(message)

    def _send_frame(self, message: object) -> None:
        data, fds = self._frames.pack(message)
        if self._gathered is not None:
            if not fds:
                self._gathered.append(data)
                return
            # Descriptors belong to the first byte of their own frame.
            self._leave(self._gathered)
        self._put(data, fds)

    def _leave(self, gathered: list[bytes]) -> None:
        if gathered:
            data = b"".join(gathered)
            gathered.clear()
            self._put(data, [])

    def _put(self, data: bytes, fds: list[int]) -> None:
        if self._waiting:
            self._waiting.append((memoryview(data), fds))
            return
        left = self._write(memoryview(data), fds)
        if left is not None:
            self._waiting.append(left)
            self._loop.add_writer(self._frames.socket, self._flush)

    def _write(self, data: memoryview, fds: list[int]) -> tuple[memoryview, list[int]] | None:
        """Sends what fits; what is left, or None."""
        while data:
            try:
                sent = _send(self._frames.socket, data, fds)
            except BlockingIOError:
                return data, fds
            except OSError:
                # The end of the stream is reported by the reader.
                _close_all(fds)
                return None
            _close_all(fds)
            data = data[sent:]
        return None

    def _flush(self) -> None:
        while self._waiting:
            left = self._write(*self._waiting[0])
            if left is not None:
                self._waiting[0] = left
                return
            self._waiting.popleft()
        self._loop.remove_writer(self._frames.socket)

    def _read(self) -> None:
        try:
            messages = self._frames.read()
        except BlockingIOError:
            return
        except BrokenPipe as error:
            self.close()
            self._on_end(str(error))
            return
        if len(messages) == 1:
            self._on_message(messages[0])
        else:
            self._hand_on(messages)
        if self._frames.overdue:
            self.send(None)

    def _hand_on(self, messages: list[Received]) -> None:
        gathered = self._gathered = []
        try:
            for message in messages:
                self._on_message(message)
        finally:
            self._gathered = None
            if not self._closed:
                self._leave(gathered)

    def close(self) -> None:
        """Gives the end up, without ``on_end``."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._frames.socket)
        self._loop.remove_writer(self._frames.socket)
        for _, fds in self._waiting:
            _close_all(fds)
        self._waiting.clear()
        self._frames.close()


class ThreadPipe(Generic[Received]):
    """The end in a process without an event loop, for any number of threads.

    Nobody reads in the background. A thread that waits for something reads for all: it hands every message
    to ``on_message``, until what it waits for has happened; then another waiting thread goes on reading.
    So a process with one thread needs no hand-over at all.
    """

    def __init__(self, end: socket.socket, receives: Any, on_message: Callable[[Received], None]) -> None:
        end.setblocking(True)
        self._frames: Frames[Received] = Frames(end, receives)
        self.arena = self._frames.arena
        self.sending = threading.RLock()
        self._on_message = on_message
        self._changed = threading.Condition(threading.Lock())
        # Held by the thread that reads; how many others wait for what it reads.
        self._reader = threading.Lock()
        self._waiting = 0
        self._closed = False
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._poll.register(self._wake_out, select.POLLIN)

    def send(self, message: object) -> None:
        """Sends a message, waiting while the other end does not read.

        Whoever fills segments for it holds ``sending`` from there on.

        Raises:
            BrokenPipe: the other end is gone.
        """
        with self.sending:
            while self._frames.crowded:
                self._send_frame(None)
            self._send_frame(message)

    def _send_frame(self, message: object) -> None:
        data, fds = self._frames.pack(message)
        view = memoryview(data)
        try:
            while view:
                view = view[_send(self._frames.socket, view, fds) :]
                _close_all(fds)
        except OSError as error:
            raise BrokenPipe(str(error)) from error
        finally:
            _close_all(fds)

    def wait(self, done: Callable[[], bool]) -> None:
        """Returns when ``done()``, which is asked after every message and every ``nudge``.

        Raises:
            BrokenPipe: the other end is gone.
        """
        reader = self._reader
        while not done():
            if self._closed:
                raise BrokenPipe("end of the stream")
            if reader.acquire(False):
                try:
                    # What another thread read before may have been it.
                    if not done():
                        self._read_some(None)
                finally:
                    self._stop_reading()
                continue
            with self._changed:
                self._waiting += 1
                if reader.locked() and not done():
                    self._changed.wait()
                self._waiting -= 1

    def look(self) -> None:
        """Takes in what has arrived already, without waiting; nothing when another thread is reading."""
        if not self._closed and self._reader.acquire(False):
            try:
                self._read_some(0)
            finally:
                self._stop_reading()

    def _stop_reading(self) -> None:
        self._reader.release()
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def nudge(self) -> None:
        """Makes every waiting thread ask its ``done`` again."""
        with self._changed:
            self._changed.notify_all()
        if self._reader.locked():
            # When it is full, it is full of nudges.
            self.poke()

    def poke(self) -> None:
        """``nudge`` without a lock, so that destructors may call it; waiting threads that do not read miss it."""
        with suppress(BlockingIOError):
            os.write(self._wake_in, b"n")

    def _read_some(self, timeout_ms: int | None) -> None:
        try:
            for fd, _ in self._poll.poll(timeout_ms):
                if fd == self._wake_out:
                    os.read(fd, 4096)
                else:
                    for message in self._frames.read():
                        self._on_message(message)
        except BlockingIOError:
            return
        except BrokenPipe:
            self._closed = True
            raise
        if self._frames.overdue:
            self.send(None)


def _send(end: socket.socket, data: memoryview, fds: list[int]) -> int:
    if not fds:
        return end.send(data)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    return end.sendmsg([data], rights)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
