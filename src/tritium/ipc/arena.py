"""Tensors between two processes: shared memory without names, of any size, used again and again.

Each end owns the segments that it fills: an anonymous file (memfd) whose descriptor travels once with a message.
The other end maps it and gives it back, by number, when nobody refers to its content any more. Nothing lies in
``/dev/shm`` or under a name that could be guessed, and whatever dies leaves nothing behind.

What came from one process can be handed on to another without a copy (``lend``): that one gets a descriptor for
reading, maps the same memory, and what it writes there is its own. The memory goes back when both are done with it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SMALLEST = 1 << 16
IDLE_BYTES = 1 << 26
KEEP = 2
_DESCRIPTORS = "/proc/self/fd"
_SEALS = 0x2 | 0x4  # F_SEAL_SHRINK | F_SEAL_GROW: no end can make the other read past the end of the file.


class Foreign:
    """A segment of the other end, mapped.

    Attributes:
        private: what is written here stays here, because the other end only lent it.
    """

    __slots__ = ("__weakref__", "address", "fd", "memory", "private")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        size = os.fstat(fd).st_size
        self.private = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        self.memory = mmap.mmap(fd, size, access=mmap.ACCESS_COPY if self.private else mmap.ACCESS_WRITE)
        self.address = _address(np.frombuffer(self.memory, np.uint8))

    def forget(self) -> None:
        """Drops what was written here, so that what the other end wrote since then is seen."""
        if self.private:
            self.memory.madvise(mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        os.close(self.fd)


class _View(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Bytes of a foreign segment; what is made of them leads back to it (``memoryview.obj``)."""

    segment: Foreign | None = None


class Segment:
    """One piece of shared memory that this end fills."""

    __slots__ = ("memory", "number", "size")

    def __init__(self, number: int, size: int, memory: Bytes) -> None:
        self.number = number
        self.size = size
        self.memory = memory


class Arena:
    """The segments of one end: those that it fills and those of the other end that it reads.

    Own segments may be taken and come back in several threads; foreign ones belong to the thread that reads,
    apart from the end of a view's life, which may come in any.

    Args:
        lends: whether foreign memory of other arenas may be handed on as it lies, instead of being copied. Only where
            nobody goes on writing to memory that was sent.

    Attributes:
        fds: descriptors of new segments, in the order of their numbers; the next message must carry them.
        dropped: numbers of own segments that the other end shall unmap; the next message must name them.
        returned: numbers of foreign segments that are free again; the next message must name them.
    """

    def __init__(self, *, lends: bool = False) -> None:
        self._lends = lends and os.path.exists(_DESCRIPTORS)
        self._lent: dict[int, tuple[memoryview, Foreign]] = {}
        self._lent_idle: dict[weakref.ref[Foreign], int] = {}
        self.fds: list[int] = []
        self.dropped: list[int] = []
        self.returned: deque[int] = deque()
        self._lock = threading.Lock()
        self._used: dict[int, Segment] = {}
        self._idle: list[Segment] = []
        self._idle_bytes = 0
        self._next = 0
        self._foreign: dict[int, Foreign] = {}
        self._foreign_next = 0
        self._views: dict[int, weakref.ref[Bytes]] = {}

    # -- own segments ---------------------------------------------------------------------------------------

    def take(self, size: int) -> Segment:
        """A segment of at least ``size`` bytes to write to; it is the other end's once a message has named it."""
        with self._lock:
            best = -1
            for index in range(len(self._idle) - 1, -1, -1):
                if size <= self._idle[index].size and (best < 0 or self._idle[index].size < self._idle[best].size):
                    best = index
            if best >= 0 and self._idle[best].size <= 4 * max(size, SMALLEST):
                segment = self._idle.pop(best)
                self._idle_bytes -= segment.size
            else:
                segment = self._make(size)
            self._used[segment.number] = segment
            return segment

    def _make(self, size: int) -> Segment:
        # Powers of two up to 64 MiB, then multiples of it: what is not touched costs nothing.
        rounded = max(SMALLEST, 1 << (size - 1).bit_length())
        if size > IDLE_BYTES:
            rounded = -(-size // IDLE_BYTES) * IDLE_BYTES
        fd = _anonymous(rounded)
        segment = Segment(self._next, rounded, np.frombuffer(mmap.mmap(fd, rounded), np.uint8))
        self._next += 1
        self.fds.append(fd)
        return segment

    def take_back(self, number: int) -> None:
        """The other end has done with an own segment; the pool keeps at most 64 MiB, but always the last two.

        Raises:
            KeyError: it was not out.
        """
        if number in self._lent:
            self._end_loan(number)
            return
        with self._lock:
            segment = self._used.pop(number)
            self._idle.append(segment)
            self._idle_bytes += segment.size
            while self._idle_bytes > IDLE_BYTES and len(self._idle) > KEEP:
                oldest = self._idle.pop(0)
                self._idle_bytes -= oldest.size
                self.dropped.append(oldest.number)

    # -- loans ----------------------------------------------------------------------------------------------

    def lend(self, data: memoryview) -> tuple[int, int] | None:
        """Makes memory that came from elsewhere readable for the other end, until that end gives it back.

        Returns:
            The number of the segment and where in it ``data`` begins; None when ``data`` lies in no segment of
            another process.
        """
        segment = data.obj.segment if self._lends and isinstance(data.obj, _View) else None
        if segment is None or not data.c_contiguous:
            return None
        number = self._lent_idle.pop(weakref.ref(segment), -1)
        if number < 0:
            self.fds.append(os.open(f"{_DESCRIPTORS}/{segment.fd}", os.O_RDONLY | os.O_CLOEXEC))
            number, self._next = self._next, self._next + 1
        self._lent[number] = data, segment
        return number, _address(np.frombuffer(data, np.uint8)) - segment.address

    def _end_loan(self, number: int) -> None:
        _, segment = self._lent.pop(number)
        key = weakref.ref(segment, self._lender_gone)
        if key in self._lent_idle:
            # It was lent twice at a time.
            self.dropped.append(number)
        else:
            self._lent_idle[key] = number

    def _lender_gone(self, key: weakref.ref[Foreign]) -> None:
        number = self._lent_idle.pop(key, None)
        if number is not None:
            self.dropped.append(number)

    # -- foreign segments -----------------------------------------------------------------------------------

    def receive(self, fd: int) -> None:
        """Maps the next segment of the other end; takes the descriptor over.

        Raises:
            ValueError: it is a file that could still shrink.
        """
        if hasattr(os, "memfd_create") and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            os.close(fd)
            raise ValueError("a segment is not sealed")
        self._foreign[self._foreign_next] = Foreign(fd)
        self._foreign_next += 1

    def drop(self, number: int) -> None:
        """The other end has given a segment up."""
        self._foreign.pop(number)

    def view(self, number: int, size: int, offset: int = 0) -> memoryview:
        """Bytes of a foreign segment, writable; it goes back when no view of them lives any more.

        Raises:
            KeyError: there is no such segment, or it is in use.
            ValueError: it is smaller.
        """
        segment = self._foreign[number]
        if number in self._views:
            raise KeyError(number)
        segment.forget()
        array = np.frombuffer(segment.memory, np.uint8, size, offset).view(_View)
        array.segment = segment
        # Every view of the view holds on to this array, never to the mapping behind it.
        self._views[number] = weakref.ref(array, lambda _: self._end(number))
        return array.data

    def _end(self, number: int) -> None:
        # Runs wherever the last reference dies, so it may do no more than this.
        self._views.pop(number, None)
        self.returned.append(number)

    def close(self) -> None:
        """Closes descriptors that were never sent; mappings go with their last view."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self._used.clear()
        self._idle.clear()
        self._foreign.clear()
        self._lent.clear()


def _address(array: Bytes) -> int:
    return array.__array_interface__["data"][0]


def _anonymous(size: int) -> int:
    """The descriptor of a file of ``size`` zeros that has no name and cannot shrink."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tritium", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd
    with tempfile.TemporaryFile() as file:
        fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
