"""Foundation types that every protocol and backend shares: tensors and inference requests."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tritium.errors import TritiumError, invalid

if TYPE_CHECKING:
    from tritium.observability.tracing import Trace

Parameter = bool | int | float | str

# Parameter of a request: the answer shall say how often its tensors were copied on their way through the models.
REPORT_COPIES = "report_copies"


class DType(Enum):
    """Element types of the KServe v2 protocol; the value is the name on the wire.

    BF16 is carried as 16-bit words, since numpy has no such type. BYTES has no element size.
    """

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BF16 = "BF16"
    BYTES = "BYTES"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy type of one element; ``object`` for BYTES."""
        return _NUMPY[self]

    @property
    def size(self) -> int | None:
        """Bytes of one element; None for BYTES."""
        return None if self is DType.BYTES else _NUMPY[self].itemsize

    @classmethod
    def of(cls, name: str) -> DType:
        """The type of that wire name.

        Raises:
            TritiumError: INVALID_ARGUMENT when there is no such type.
        """
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(d.value for d in cls)
            raise invalid(f"datatype '{name}' is unknown, expected one of {known}", param="datatype") from None


_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.BOOL: np.dtype(np.bool_),
    DType.UINT8: np.dtype(np.uint8),
    DType.UINT16: np.dtype(np.uint16),
    DType.UINT32: np.dtype(np.uint32),
    DType.UINT64: np.dtype(np.uint64),
    DType.INT8: np.dtype(np.int8),
    DType.INT16: np.dtype(np.int16),
    DType.INT32: np.dtype(np.int32),
    DType.INT64: np.dtype(np.int64),
    DType.FP16: np.dtype(np.float16),
    DType.FP32: np.dtype(np.float32),
    DType.FP64: np.dtype(np.float64),
    DType.BF16: np.dtype(np.uint16),
    DType.BYTES: np.dtype(np.object_),
}
_DTYPE: dict[np.dtype[Any], DType] = {n: d for d, n in _NUMPY.items() if d not in (DType.BF16, DType.BYTES)}


@dataclass(slots=True)
class Tensor:
    """A named, typed buffer in row-major order; never a list of numbers.

    Attributes:
        shape: sizes of the dimensions, batch dimension included.
        data: the little-endian bytes; BYTES keeps the protocol's form, each element a 4-byte
            length and then its bytes, until somebody asks for the strings.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    data: memoryview

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def numpy(self) -> npt.NDArray[Any]:
        """The elements in ``shape``; a view for every type but BYTES, which gives objects of bytes.

        Raises:
            TritiumError: INVALID_ARGUMENT when the bytes do not fit the shape.
        """
        if self.dtype is DType.BYTES:
            array = np.empty(self.size, dtype=np.object_)
            array[:] = self.strings()
            return array.reshape(self.shape)
        expected = self.size * self.dtype.numpy.itemsize
        if self.data.nbytes != expected:
            raise invalid(
                f"input '{self.name}' has {self.data.nbytes} bytes, expected {expected} for shape "
                f"{list(self.shape)} of {self.dtype.value}",
                param=self.name,
            )
        return np.frombuffer(self.data, dtype=self.dtype.numpy).reshape(self.shape)

    def strings(self) -> list[bytes]:
        """The elements of a BYTES tensor, in row-major order.

        Raises:
            TritiumError: INVALID_ARGUMENT when a length runs past the end or the count is not the shape's.
        """
        found: list[bytes] = []
        at, end = 0, self.data.nbytes
        while at < end:
            if at + 4 > end:
                raise self._broken(f"a length of 4 bytes is cut off at byte {at}")
            (length,) = struct.unpack_from("<I", self.data, at)
            at += 4
            if at + length > end:
                raise self._broken(f"an element of {length} bytes at byte {at} runs past the end at {end}")
            found.append(bytes(self.data[at : at + length]))
            at += length
        if len(found) != self.size:
            raise self._broken(f"{len(found)} elements, expected {self.size} for shape {list(self.shape)}")
        return found

    def _broken(self, why: str) -> TritiumError:
        return invalid(f"input '{self.name}' holds malformed BYTES: {why}", param=self.name)

    @classmethod
    def from_numpy(cls, name: str, array: npt.NDArray[Any], dtype: DType | None = None) -> Tensor:
        """A tensor over ``array`` (copied only when it is not contiguous).

        Args:
            array: any numeric array; arrays of objects, bytes or str become BYTES.
            dtype: say BF16 for an array of its 16-bit words; otherwise left out.
        """
        if dtype is None:
            dtype = _DTYPE.get(array.dtype, DType.BYTES)
        if dtype is DType.BYTES:
            return cls.from_strings(name, [_as_bytes(x) for x in array.reshape(-1).tolist()], array.shape)
        if not array.flags.c_contiguous or not array.size:
            array = np.ascontiguousarray(array)
            return cls(name, dtype, tuple(array.shape), array.reshape(-1).view(np.uint8).data)
        return cls(name, dtype, array.shape, array.data.cast("B"))

    @classmethod
    def from_strings(cls, name: str, strings: list[bytes], shape: tuple[int, ...] | None = None) -> Tensor:
        """A BYTES tensor of these elements; ``shape`` defaults to one dimension."""
        packed = b"".join(struct.pack("<I", len(s)) + s for s in strings)
        return cls(name, DType.BYTES, (len(strings),) if shape is None else tuple(shape), memoryview(packed))


def _as_bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


class OutputWindow(Protocol):
    """Shared memory that a client wants an output in, in place of the answer."""

    def write(self, output: str, data: memoryview) -> None:
        """Writes the bytes of the output of that name."""
        ...


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One output that a request asks for.

    Attributes:
        classes: how many top classes to answer instead of the tensor (classification extension); 0 for none.
        binary: whether the client wants the bytes behind the JSON (HTTP only).
        window: the shared memory that it shall go to; None when it comes with the answer.
    """

    name: str
    classes: int = 0
    binary: bool = False
    window: OutputWindow | None = None
    parameters: dict[str, Parameter] = field(default_factory=dict[str, Parameter])


@dataclass(frozen=True, slots=True)
class SequenceRef:
    """Which sequence of a stateful model a request belongs to, and whether it opens or closes it."""

    id: int | str
    start: bool = False
    end: bool = False


class TraceRef(NamedTuple):
    """A trace as another process knows it.

    Attributes:
        id: its number; 0 for none.
        context: the headers of its propagation context as a JSON object; "" where it has none.
    """

    id: int = 0
    context: str = ""


NO_TRACE = TraceRef()


class Copies:
    """How often the server copied tensors of a request to hand them on, from the client's message to the last model.

    Attributes:
        count: copies of a whole tensor.
        nbytes: bytes that they copied.
    """

    __slots__ = ("_parts", "count", "nbytes")

    def __init__(self, parts: Sequence[Copies] = ()) -> None:
        self.count = self.nbytes = 0
        self._parts = parts

    def add(self, nbytes: int) -> None:
        """One more."""
        self.count += 1
        self.nbytes += nbytes
        for part in self._parts:
            part.add(nbytes)

    def parameters(self) -> dict[str, Parameter]:
        """What an answer says of it: ``copies`` and ``copied_bytes``."""
        return {"copies": self.count, "copied_bytes": self.nbytes}

    @classmethod
    def of_all(cls, requests: Iterable[InferRequest]) -> Copies | None:
        """What counts for several requests that were joined; None when none of them asks for it."""
        parts = [request.copies for request in requests if request.copies is not None]
        return cls(parts) if parts else None


@dataclass(slots=True)
class InferRequest:
    """What a client sent, whatever the protocol.

    Attributes:
        version: the version asked for; "" means the model's policy decides.
        priority: 1 is the highest, 0 the default (Triton's direction).
        timeout_us: how long the request may wait in a queue, in microseconds; 0 for the queue's own policy.
        parameters: custom parameters; reserved ones have become fields.
        arrived_ns: ``time.monotonic_ns()`` when the request was read.
        trace: where its steps are written down; None for the most. Whoever makes it releases it, but the trace
            of a request that an ensemble or a model makes (``Trace.child``) is released by the model that answers.
        trace_ref: the same, in a process that has no traces itself.
        copies: where copies of its tensors are counted; None where nobody asked. The steps of an ensemble share it.
    """

    model: str
    version: str
    id: str
    inputs: dict[str, Tensor]
    outputs: list[RequestedOutput]
    arrived_ns: int
    parameters: dict[str, Parameter] = field(default_factory=dict[str, Parameter])
    sequence: SequenceRef | None = None
    tenant: str = "default"
    priority: int = 0
    timeout_us: int = 0
    trace: Trace | None = field(default=None, repr=False, compare=False)
    trace_ref: TraceRef = NO_TRACE
    copies: Copies | None = field(default=None, repr=False, compare=False)


@dataclass(slots=True)
class InferResponse:
    """One answer; a request of a decoupled model may have none or many.

    Attributes:
        final: whether no answer follows. Exactly one answer of a request has it.
        empty: a final answer that carries nothing (decoupled models only).
    """

    model: str
    version: str
    id: str
    outputs: list[Tensor] = field(default_factory=list[Tensor])
    parameters: dict[str, Parameter] = field(default_factory=dict[str, Parameter])
    error: TritiumError | None = None
    final: bool = True
    empty: bool = False
