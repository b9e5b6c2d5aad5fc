"""What crosses between the front end and the host process of an instance; see ``backends.host``.

All are arrays on the wire. A tensor lies in the message itself or in a segment of the sender's arena.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tritium.errors import Code, TritiumError
from tritium.ipc.arena import Arena
from tritium.ipc.frames import INLINE_BYTES
from tritium.observability.logs import LogState
from tritium.types import Copies, DType, InferRequest, InferResponse, Parameter, RequestedOutput, SequenceRef, TraceRef
from tritium.types import Tensor as TypedTensor

START, END = 1, 2
NOTHING = memoryview(b"")


class Tensor(msgspec.Struct, array_like=True, gc=False):
    """A tensor: in ``data`` when ``segment`` is -1, else ``size`` bytes from ``offset`` on in that segment."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    data: memoryview
    segment: int
    size: int
    offset: int


class Request(msgspec.Struct, array_like=True, gc=False):
    """An ``InferRequest``; ``correlation`` and ``flags`` (START, END) are its sequence."""

    model: str
    version: str
    id: str
    inputs: list[Tensor]
    outputs: list[str]
    parameters: dict[str, Parameter]
    correlation: int | str
    flags: int
    timeout_us: int
    priority: int
    trace: TraceRef


class Response(msgspec.Struct, array_like=True, gc=False):
    """An ``InferResponse``, or word that a request was rescheduled.

    Attributes:
        error: code and message.
        failed: the model raised it, rather than answered it.
    """

    index: int
    outputs: list[Tensor]
    parameters: dict[str, Parameter]
    error: tuple[str, str] | None
    failed: bool
    final: bool
    empty: bool
    rescheduled: bool


# -- to the host -----------------------------------------------------------------------------------------------


class Setup(msgspec.Struct, array_like=True, tag=1):
    """The first message: which backend for which model; ``config`` is JSON, to be completed when ``complete``.

    With ``auto_complete`` the model itself may add to it.
    """

    backend: str
    model: str
    version: str
    model_folder: str
    version_folder: str
    instance: str
    kind: str
    device_id: int
    settings: dict[str, str]
    auto_complete: bool
    config: str
    complete: bool


class Load(msgspec.Struct, array_like=True, tag=2):
    """Load the model; ``config`` is complete."""

    config: str


class Execute(msgspec.Struct, array_like=True, tag=3):
    """Run a batch."""

    batch: int
    requests: list[Request]


class Cancel(msgspec.Struct, array_like=True, tag=4):
    """Nobody waits for this request any more."""

    batch: int
    index: int


class Answer(msgspec.Struct, array_like=True, tag=5):
    """An answer to a ``Call``."""

    call: int
    response: Response


class Result(msgspec.Struct, array_like=True, tag=6):
    """The answer to an ``Ask``."""

    ask: int
    value: Any
    error: tuple[str, str] | None


class Probe(msgspec.Struct, array_like=True, tag=7):
    """Is the model well?"""

    probe: int


class Stop(msgspec.Struct, array_like=True, tag=8):
    """Unload the model and end."""


class Logging(msgspec.Struct, array_like=True, tag=9):
    """Log like this from now on."""

    state: LogState


ToHost = Setup | Load | Execute | Cancel | Answer | Result | Probe | Stop | Logging | None


# -- from the host ---------------------------------------------------------------------------------------------


class Described(msgspec.Struct, array_like=True, tag=1):
    """The configuration as the backend completed it, in JSON."""

    config: str


class Loaded(msgspec.Struct, array_like=True, tag=2):
    """The model takes batches."""


class Failed(msgspec.Struct, array_like=True, tag=3):
    """The model cannot be completed or loaded; the process ends."""

    code: str
    message: str


class Replies(msgspec.Struct, array_like=True, tag=4):
    """Answers; ``times`` (input, infer, output, in ns) with the last final one and when ``execute`` has returned."""

    batch: int
    responses: list[Response]
    times: tuple[int, int, int] | None
    returned: bool


class Call(msgspec.Struct, array_like=True, tag=5):
    """The model sends a request to a model of the server; it wants one answer unless ``decoupled``."""

    call: int
    request: Request
    decoupled: bool


class HangUp(msgspec.Struct, array_like=True, tag=6):
    """The model wants no further answers to a call."""

    call: int


class Ask(msgspec.Struct, array_like=True, tag=7):
    """The model asks the server for something else: to load a model, for a metric, ..."""

    ask: int
    what: str
    arguments: list[Any]


class Log(msgspec.Struct, array_like=True, tag=8):
    """A line for the server's log."""

    level: str
    message: str


class Change(msgspec.Struct, array_like=True, tag=9):
    """A metric of the model moves."""

    metric: int
    action: str
    value: float


class Health(msgspec.Struct, array_like=True, tag=10):
    """The answer to a probe."""

    probe: int
    well: bool


class Stopped(msgspec.Struct, array_like=True, tag=11):
    """The model is unloaded."""


FromHost = Described | Loaded | Failed | Replies | Call | HangUp | Ask | Log | Change | Health | Stopped | None


# -- conversions -----------------------------------------------------------------------------------------------


def pack_tensor(tensor: TypedTensor, arena: Arena, copies: Copies | None = None) -> Tensor:
    """The wire form; large content is lent where it came from another process, else copied into a segment."""
    data = tensor.data
    size = data.nbytes
    if size > INLINE_BYTES and (loan := arena.lend(data)) is not None:
        return Tensor(tensor.name, tensor.dtype, tensor.shape, NOTHING, loan[0], size, loan[1])
    if copies is not None:
        copies.add(size)
    if size <= INLINE_BYTES:
        return Tensor(tensor.name, tensor.dtype, tensor.shape, data, -1, 0, 0)
    segment = arena.take(size)
    segment.memory[:size] = data if data.format == "B" and data.ndim == 1 else data.cast("B")
    return Tensor(tensor.name, tensor.dtype, tensor.shape, NOTHING, segment.number, size, 0)


def unpack_tensor(tensor: Tensor, arena: Arena) -> TypedTensor:
    """The tensor, over the message or the segment.

    Raises:
        KeyError, ValueError: the other end names a segment that there is not.
    """
    data = tensor.data if tensor.segment < 0 else arena.view(tensor.segment, tensor.size, tensor.offset)
    return TypedTensor(tensor.name, tensor.dtype, tensor.shape, data)


def pack_request(request: InferRequest, arena: Arena) -> Request:
    """The wire form of a request."""
    sequence = request.sequence
    return Request(
        request.model,
        request.version,
        request.id,
        [pack_tensor(tensor, arena, request.copies) for tensor in request.inputs.values()],
        [output.name for output in request.outputs],
        request.parameters,
        0 if sequence is None else sequence.id,
        0 if sequence is None else START * sequence.start + END * sequence.end,
        request.timeout_us,
        request.priority,
        request.trace_ref if request.trace is None else request.trace.ref(),
    )


def unpack_request(request: Request, arena: Arena, arrived_ns: int) -> InferRequest:
    """The request; a correlation id of 0 or "" without flags is none."""
    sequence = None
    if request.correlation or request.flags:
        sequence = SequenceRef(request.correlation, bool(request.flags & START), bool(request.flags & END))
    return InferRequest(
        request.model,
        request.version,
        request.id,
        {tensor.name: unpack_tensor(tensor, arena) for tensor in request.inputs},
        [RequestedOutput(name) for name in request.outputs],
        arrived_ns,
        request.parameters,
        sequence,
        priority=request.priority,
        timeout_us=request.timeout_us,
        trace_ref=request.trace,
    )


def pack_response(index: int, response: InferResponse, arena: Arena, failed: bool = False) -> Response:
    """The wire form of an answer."""
    error = response.error
    return Response(
        index,
        [pack_tensor(tensor, arena) for tensor in response.outputs],
        response.parameters,
        None if error is None else told(error),
        failed,
        response.final,
        response.empty,
        False,
    )


def unpack_response(response: Response, arena: Arena) -> InferResponse:
    """The answer; the server fills in model, version and id."""
    return InferResponse(
        "",
        "",
        "",
        [unpack_tensor(tensor, arena) for tensor in response.outputs],
        response.parameters,
        None if response.error is None else error_of(response.error),
        response.final,
        response.empty,
    )


def rescheduled(index: int) -> Response:
    """Word that a request shall run again."""
    return Response(index, [], {}, None, False, False, True, True)


def told(error: TritiumError) -> tuple[str, str]:
    """An exception as code and message."""
    return error.code.value, sendable(error.message)


def sendable(text: str) -> str:
    """A text that has a form in UTF-8: lone surrogates, as in names of files that are none, are written out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def error_of(error: tuple[str, str]) -> TritiumError:
    """The exception that crossed as code and message."""
    return TritiumError(Code(error[0]), error[1])
