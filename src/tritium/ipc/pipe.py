"""Typed messages over an inherited socket pair, with tensors beside them in shared memory (``frames``).

The socket has no name: only the child inherits the other end, and the death of either is seen at once as the end of
the stream.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from tritium.ipc.frames import BrokenPipe, Frames, close_all, send

Received = TypeVar("Received")


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
        self._socket = end
        # Nothing in this process writes to tensors that it hands on, so they may be lent.
        self._frames: Frames[Received] = Frames(end, receives, lends=True)
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
        frames = self._frames
        if frames.plain and not self._waiting:
            data = frames.pack_plain(message)
            if self._gathered is not None:
                self._gathered.append(data)
                return
            try:
                sent = self._socket.send(data)
            except OSError:
                sent = 0  # as below: not now, or never again
            if sent < len(data):
                self._put(data[sent:], [])
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
                sent = send(self._frames.socket, data, fds)
            except BlockingIOError:
                return data, fds
            except OSError:
                # The end of the stream is reported by the reader.
                close_all(fds)
                return None
            close_all(fds)
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

    def shut(self) -> None:
        """Nothing more comes or goes; ``on_end`` follows behind what has arrived already."""
        if not self._closed:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the end up, without ``on_end``."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._frames.socket)
        self._loop.remove_writer(self._frames.socket)
        for _, fds in self._waiting:
            close_all(fds)
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
        self._socket = end
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
        frames = self._frames
        if frames.plain:
            data = frames.pack_plain(message)
            try:
                sent = self._socket.send(data)
                if sent == len(data):
                    return
            except OSError as error:
                raise BrokenPipe(str(error)) from error
            view, fds = memoryview(data)[sent:], list[int]()
        else:
            data, fds = frames.pack(message)
            view = memoryview(data)
        try:
            while view:
                view = view[send(self._frames.socket, view, fds) :]
                close_all(fds)
        except OSError as error:
            raise BrokenPipe(str(error)) from error
        finally:
            close_all(fds)

    def forsake(self) -> None:
        """In a process forked off this one: the pipe is that one's alone."""
        self._closed = True
        self._socket.close()

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
