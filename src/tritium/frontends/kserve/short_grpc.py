"""The short way of ``ModelInfer`` over gRPC: from the bytes of a message to those of its answer, without a task.

As for HTTP (``kserve.short``): messages that differ in nothing but their raw tensors are parsed once. Whatever is
not plain is left to ``KserveGrpc``, which answers in the same way; tests/frontends/kserve/test_short.py holds the
two equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError
from tritium.frontends.kserve import pb_codec
from tritium.frontends.kserve.forms import MAX_KEPT, Form, form_of
from tritium.frontends.kserve.pb_codec import GrpcInfer
from tritium.frontends.kserve.shared import Shared
from tritium.frontends.kserve.status import status_of
from tritium.observability import logs
from tritium.types import InferResponse

if TYPE_CHECKING:
    from tritium.serving.server import Server

_log = logs.get(__name__)

Buffer = bytes | memoryview
# Forms whose messages have the same length.
_MAX_ALIKE = 8
_MAX_FRONT_BYTES = 4 << 10


class Caller(Protocol):
    """The call that is answered."""

    def respond(self, parts: Sequence[Buffer]) -> None:
        """Sends the answer."""
        ...

    def finish(self, status: int, message: str = "", trailing: Sequence[tuple[str, str | bytes]] = ()) -> None:
        """Ends it with a status."""
        ...


class _Layout(NamedTuple):
    """How the messages of a form look.

    Attributes:
        front: all bytes before the first raw tensor.
        marks: where each further tensor's tag and length lie, and what they are.
    """

    front: bytes
    marks: tuple[tuple[int, int, bytes], ...]
    form: Form
    model: str
    version: str

    def fits(self, message: memoryview) -> bool:
        """Whether a message of the right length is of this form."""
        return message[: len(self.front)] == self.front and all(
            message[begin:end] == mark for begin, end, mark in self.marks
        )


class ShortGrpc:
    """Answers ``ModelInfer`` for all connections."""

    def __init__(self, server: Server, shared: Shared) -> None:
        self._server = server
        self._regions = shared.regions
        self._layouts: dict[int, list[_Layout]] = {}
        # The operator wants something of metadata.
        self._closed = bool(shared.grpc_access) or shared.grpc_headers is not None

    def __call__(self, message: Buffer, call: Caller) -> Callable[[], None] | None:
        """Starts a request; returns what cancels it, or None when it must take the long way."""
        if self._closed:
            return None
        try:
            return self._submit(memoryview(message), message, call)
        except TritiumError:
            return None  # the long way says why

    def _submit(self, view: memoryview, message: Buffer, call: Caller) -> Callable[[], None] | None:
        arrived_ns = monotonic_ns()
        for layout in self._layouts.get(len(view), ()):
            if layout.fits(view):
                model = self._server.model(layout.model, layout.version)
                form = layout.form
                if form.config is not model.config:
                    break
                if not model.direct or self._server.traces.samples(layout.model):
                    return None
                request = form.request(layout.model, layout.version, view, arrived_ns)
                return model.submit(request, partial(_answer, call, form.asked, form.config, form), form.rows)
        parsed = pb_codec.parse(bytes(message))
        name, version = parsed.fields.model_name, parsed.fields.model_version
        model = self._server.model(name, version)
        if not model.direct or self._server.traces.samples(name):
            return None
        asked = pb_codec.read(parsed, arrived_ns, self._regions)
        self._learn(view, asked, model.config)
        return model.submit(asked.request, partial(_answer, call, asked, model.config, None))

    def _learn(self, view: memoryview, asked: GrpcInfer, config: ModelConfig) -> None:
        """Keeps the form of a message, where it has one."""
        raw = pb_codec.raw_inputs(view)
        if not raw or len(raw) != len(asked.request.inputs) or raw[0][1] > _MAX_FRONT_BYTES:
            return
        form = form_of(asked, config, [begin for _, begin, _ in raw])
        if form is None:
            return
        if len(self._layouts) >= MAX_KEPT:
            self._layouts.clear()
        marks = tuple((tag, begin, bytes(view[tag:begin])) for tag, begin, _ in raw[1:])
        layout = _Layout(bytes(view[: raw[0][1]]), marks, form, asked.request.model, asked.request.version)
        alike = [one for one in self._layouts.get(len(view), ()) if one.front != layout.front or one.marks != marks]
        self._layouts[len(view)] = [layout, *alike[: _MAX_ALIKE - 1]]


def _answer(
    call: Caller, asked: GrpcInfer, config: ModelConfig, form: Form | None, answer: InferResponse | TritiumError
) -> None:
    if isinstance(answer, TritiumError):
        call.finish(*status_of(answer))
        return
    try:
        parts = _write(asked, config, form, answer)
    except TritiumError as error:
        call.finish(*status_of(error))
    except Exception:
        _log.exception("an answer cannot be written", model=answer.model)
        call.finish(*status_of(TritiumError(Code.INTERNAL, "internal error")))
    else:
        call.respond(parts)


def _write(asked: GrpcInfer, config: ModelConfig, form: Form | None, answer: InferResponse) -> list[Any]:
    if form is None or answer.parameters:
        return [pb_codec.write(answer, asked.request, config)]
    key = (answer.version, *[(t.name, t.dtype, t.shape, t.data.nbytes) for t in answer.outputs])
    fronts = form.answers.get(key)
    if fronts is None:
        fronts = pb_codec.fronts(answer)
        form.keep(key, fronts)
    parts: list[Any] = []
    for front, tensor in zip(fronts, answer.outputs, strict=False):
        parts += (front, tensor.data)
    return parts or fronts
