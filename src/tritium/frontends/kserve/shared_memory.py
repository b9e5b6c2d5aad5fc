"""Regions of shared memory that clients register, and the inputs and outputs that lie in them.

A system region is read and written through its file and never mapped: a client that cuts the file short would
end this process with SIGBUS, whereas ``pread`` comes back with less. Reading copies, which also means that a
client cannot change an input while it is being checked.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tritium.errors import Code, TritiumError, invalid
from tritium.frontends.kserve.cuda_memory import CudaMemory
from tritium.frontends.kserve.json_text import shown

Kind = Literal["system", "cuda"]

# Where shm_open looks; its names have no further slash.
FOLDER = Path("/dev/shm")
_MAX_REGIONS = 4096
_END = 1 << 63


class Memory(Protocol):
    """The bytes of a region. ``close`` is called when nobody uses it any more."""

    def read(self, offset: int, size: int) -> memoryview: ...  # noqa: D102

    def write(self, offset: int, data: memoryview) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class SystemMemory:
    """A POSIX shared-memory object.

    Args:
        key: its name, as ``shm_open`` takes it.

    Raises:
        TritiumError: INTERNAL, as Triton answers, when there is none of that name.
    """

    def __init__(self, key: str) -> None:
        name = key.removeprefix("/")
        self._file = -1
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise _cannot_open(key)
        try:
            self._file = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError):
            raise _cannot_open(key) from None
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise _cannot_open(key)

    @property
    def size(self) -> int:
        """How many bytes it has now; a client may change that."""
        return os.fstat(self._file).st_size

    def read(self, offset: int, size: int) -> memoryview:
        """A copy of these bytes; fewer when the object has become shorter."""
        data = bytearray(size)
        at = 0
        while at < size:
            count = os.preadv(self._file, [memoryview(data)[at:]], offset + at)
            if count == 0:
                break
            at += count
        return memoryview(data)[:at]

    def write(self, offset: int, data: memoryview) -> None:
        """Writes these bytes."""
        at = 0
        while at < len(data):
            at += os.pwrite(self._file, data[at:], offset + at)

    def close(self) -> None:
        """Lets go of it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        # Requests under way hold their region, so the last of them, or unregistering, ends here.
        self.close()


def _cannot_open(key: str) -> TritiumError:
    return TritiumError(Code.INTERNAL, f"Unable to open shared memory region: '{shown(key)}'", param="key")


@dataclass(frozen=True, slots=True)
class Region:
    """A registered region.

    Attributes:
        key: of a system region; "" for CUDA.
        offset: where the region begins in its object; 0 for CUDA.
        size: in bytes.
        device: index of the GPU; 0 for system memory.
    """

    name: str
    kind: Kind
    memory: Memory
    size: int
    key: str = ""
    offset: int = 0
    device: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a region that a request names for one tensor."""

    region: Region
    offset: int
    size: int

    def read(self) -> memoryview:
        """The bytes.

        Raises:
            TritiumError: INVALID_ARGUMENT when the client has cut the memory short.
        """
        data = self.region.memory.read(self.region.offset + self.offset, self.size)
        if len(data) != self.size:
            raise self._cut_short()
        return data

    def write(self, output: str, data: memoryview) -> None:
        """Writes an output.

        Raises:
            TritiumError: INTERNAL, as Triton answers, when it does not fit; INVALID_ARGUMENT when the client
                has cut the memory short.
        """
        if len(data) > self.size:
            raise TritiumError(
                Code.INTERNAL,
                f"shared memory size specified with the request for output '{shown(output)}' ({self.size} bytes) "
                f"should be at least {len(data)} bytes to hold the results",
                param=output,
            )
        memory = self.region.memory
        if isinstance(memory, SystemMemory) and memory.size < self.region.offset + self.offset + len(data):
            raise self._cut_short()
        memory.write(self.region.offset + self.offset, data)

    def _cut_short(self) -> TritiumError:
        return invalid(
            f"shared memory region '{shown(self.region.name)}' has become shorter than the {self.region.size} bytes "
            "that it was registered with"
        )


class Regions:
    """The regions that clients have registered, for both protocols."""

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}

    def register_system(self, name: str, key: str, offset: int, size: int) -> None:
        """Takes a part of a POSIX shared-memory object.

        Raises:
            TritiumError: ALREADY_EXISTS; INTERNAL when there is no such object; INVALID_ARGUMENT for an offset
                that no mapping can begin at, or a part that is not there.
        """
        self._refuse_known(name)
        memory = SystemMemory(key)
        if offset % mmap.PAGESIZE:
            raise invalid(
                f"failed to register shared memory region '{shown(name)}': offset is {offset}, expected a multiple of "
                f"the page size, {mmap.PAGESIZE}",
                param="offset",
            )
        if size < 1 or offset + size > memory.size:
            raise invalid(
                f"failed to register shared memory region '{shown(name)}': offset {offset} and byte_size {size} do not "
                f"fit into '{shown(key)}', which has {memory.size} bytes",
                param="byte_size",
            )
        self._regions[name] = Region(name, "system", memory, size, key, offset)

    def register_cuda(self, name: str, handle: bytes, device: int, size: int) -> None:
        """Takes memory of a GPU that another process shares by a CUDA IPC handle.

        Raises:
            TritiumError: ALREADY_EXISTS; INVALID_ARGUMENT when there is no GPU, or the handle is no good.
        """
        self._refuse_known(name)
        memory = CudaMemory(handle, device, size)
        self._regions[name] = Region(name, "cuda", memory, size, device=device)

    def _refuse_known(self, name: str) -> None:
        if name in self._regions:
            raise TritiumError(
                Code.ALREADY_EXISTS, f"shared memory region '{shown(name)}' already in manager", param="name"
            )
        if len(self._regions) >= _MAX_REGIONS:
            raise TritiumError(
                Code.RESOURCE_EXHAUSTED, f"{_MAX_REGIONS} shared memory regions are registered, more are not taken"
            )

    def unregister(self, kind: Kind, name: str = "") -> None:
        """Forgets a region, or all of a kind for ""; requests that use it go on. Unknown names are no error."""
        for region in [r for r in self._regions.values() if r.kind == kind and name in ("", r.name)]:
            del self._regions[region.name]

    def status(self, kind: Kind, name: str = "") -> list[Region]:
        """The regions of a kind, or one of them.

        Raises:
            TritiumError: NOT_FOUND when there is none of that name.
        """
        found = [r for _, r in sorted(self._regions.items()) if r.kind == kind and name in ("", r.name)]
        if name and not found:
            raise TritiumError(Code.NOT_FOUND, f"Unable to find {kind} shared memory region: '{shown(name)}'")
        return found

    def window(self, name: str, offset: int, size: int) -> Window:
        """The part of a region that a request names.

        Raises:
            TritiumError: NOT_FOUND for an unknown name, INVALID_ARGUMENT when the part is not within the region.
        """
        region = self._regions.get(name)
        if region is None:
            raise TritiumError(Code.NOT_FOUND, f"Unable to find shared memory region: '{shown(name)}'")
        if not 0 <= offset < region.size:
            raise invalid(f"Invalid offset for shared memory region: '{shown(name)}'", param="shared_memory_offset")
        if size < 0 or offset + size > region.size:
            raise invalid(
                f"Invalid offset + byte size for shared memory region: '{shown(name)}'", param="shared_memory_byte_size"
            )
        return Window(region, offset, size)
