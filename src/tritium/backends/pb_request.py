"""``pb_utils``' requests and responses: those that a model gets and gives, and those that it makes itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, cast

from tritium.backends import pb_types
from tritium.backends.base import Send
from tritium.backends.pb_calls import ResponseIterator, async_call, call
from tritium.backends.pb_order import in_order
from tritium.backends.pb_tensor import Tensor
from tritium.backends.pb_types import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    TritonError,
    TritonModelException,
)
from tritium.backends.wire import sendable
from tritium.errors import TritiumError
from tritium.types import NO_TRACE, InferRequest, InferResponse, Parameter, RequestedOutput, SequenceRef, TraceRef


class MemoryType(IntEnum):
    """Where a model would like the answers of another model."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 1


class PreferredMemory:
    """Where a model would like the answers of another model; answers come in CPU memory whatever it says."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = MemoryType(preferred_memory_type)
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request; a request of one's own that is given it (``trace=``) becomes part of it."""

    def __init__(self, ref: TraceRef = NO_TRACE) -> None:
        self.ref = ref

    def get_context(self) -> str | None:
        """The propagation context, a JSON object of headers; None without one."""
        return self.ref.context or None


def checked_parameters(given: Mapping[str, Any] | None) -> dict[str, Parameter]:
    """Parameters of a request or response.

    Raises:
        TritonModelException: a key is no text, or a value neither text, number nor truth value, or one of them has no
            form on the wire.
    """
    for key, value in (given or {}).items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | float | str):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise TritonModelException(f"parameter '{key}' is {value}, expected a number of 64 bits")
        for text in (key, value):
            if isinstance(text, str) and sendable(text) != text:
                raise TritonModelException(f"parameter {key!r} is {value!r}, expected text that UTF-8 has a form for")
    return dict(given or {})


class InferenceResponse:
    """An answer: tensors, or an error."""

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Iterable[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._outputs = list(output_tensors)
        for tensor in self._outputs:
            if not isinstance(cast(object, tensor), Tensor):
                raise TypeError(f"output_tensors holds a {type(tensor).__name__}, expected Tensor objects")
        if error is not None and not isinstance(cast(object, error), TritonError):
            raise TypeError(f"error is a {type(error).__name__}, expected a TritonError")
        self._error = error
        self._parameters = {} if parameters is None else checked_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        """The tensors."""
        return self._outputs

    def has_error(self) -> bool:
        """Whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error; None without one."""
        return self._error

    def parameters(self) -> str:
        """The parameters, in JSON."""
        return json.dumps(self._parameters)

    def typed(self, wanted: frozenset[str], final: bool) -> InferResponse:
        """The server's form of it, without outputs that nobody wants (``wanted`` empty: all are)."""
        if self._error is not None:
            return InferResponse("", "", "", [], self._parameters, pb_types.to_tritium(self._error), final)
        outputs = [t.typed() for t in self._outputs if not wanted or t.name() in wanted]
        return InferResponse("", "", "", outputs, self._parameters, None, final)

    @classmethod
    def received(cls, response: InferResponse) -> InferenceResponse:
        """The answer of another model."""
        made = cls.__new__(cls)
        made._outputs = [Tensor.received(tensor) for tensor in response.outputs]
        made._error = None if response.error is None else pb_types.from_tritium(response.error)
        made._parameters = response.parameters
        return made


class Open:
    """A request of a batch that has no final answer yet; the request and its sender share it.

    Args:
        wanted: names of the outputs that the server has a use for.
        lost: called when nobody is left who could answer.
    """

    __slots__ = ("asked", "closed", "decoupled", "index", "lost", "release", "send", "sent", "wanted")

    def __init__(
        self, index: int, send: Send, decoupled: bool, wanted: frozenset[str], lost: Callable[[Send, int], None]
    ) -> None:
        self.index = index
        self.send = send
        self.decoupled = decoupled
        self.wanted = wanted
        self.lost = lost
        self.closed = False
        self.asked = False
        self.sent = 0
        self.release = TRITONSERVER_REQUEST_RELEASE_ALL

    def __del__(self) -> None:
        if not self.closed:
            self.lost(self.send, self.index)


class InferenceResponseSender:
    """Sends answers to one request, from any thread."""

    __slots__ = ("_open",)

    def __init__(self, request: Open) -> None:
        self._open = request

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Sends an answer; with flag TRITONSERVER_RESPONSE_COMPLETE_FINAL the last one, which may be none.

        Raises:
            TritonModelException: after the last one, or more than one from a model that is not decoupled.
        """
        request = self._open
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(f"Unable to send response. Unsupported flag value: {flags}")
        final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if response is None and not final:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(cast(object, response), InferenceResponse):
            raise TypeError(f"response is a {type(response).__name__}, expected an InferenceResponse")
        if not request.decoupled:
            if response is not None and request.sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if response is None and not request.sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
        if request.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if response is None:
            answer = InferResponse("", "", "", final=True, empty=True)
        else:
            answer = response.typed(request.wanted, final)
        request.closed = final
        request.sent += 1
        request.send(request.index, answer)

    def is_cancelled(self) -> bool:
        """Whether nobody waits for answers any more."""
        return not self._open.closed and self._open.send.cancelled(self._open.index)


class InferenceRequest:
    """A request: to this model, or made by it for another one."""

    __slots__ = ("_flags", "_inputs", "_memory", "_names", "_open", "_request", "_trace")

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int | str = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(cast(object, correlation_id), bool) or not isinstance(cast(object, correlation_id), int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        if not model_name:
            raise TypeError("model_name is missing, expected the name of a model of this server")
        version = "" if int(model_version) == -1 else str(model_version)
        self._inputs: list[Tensor] = list(inputs)
        self._names = list(requested_output_names)
        self._flags = flags
        self._open: Open | None = None
        self._memory = preferred_memory
        self._trace = trace or InferenceTrace()
        sequence = SequenceRef(correlation_id) if correlation_id else None
        checked = checked_parameters(parameters)
        self._request = InferRequest(
            model_name, version, request_id, {}, [], 0, checked, sequence, timeout_us=int(timeout)
        )

    @classmethod
    def received(cls, request: InferRequest, opened: Open, names: Sequence[str]) -> InferenceRequest:
        """A request to this model.

        Args:
            names: the outputs that the model declares.
        """
        made = cls.__new__(cls)
        made._request = request
        made._open = opened
        inputs = request.inputs
        order = in_order(tuple(inputs)) if len(inputs) > 1 else inputs
        made._inputs = [Tensor.received(inputs[name]) for name in order]
        made._names = [output.name for output in request.outputs] if request.outputs else list(names)
        sequence = request.sequence
        made._flags = 0 if sequence is None else sequence.start + 2 * sequence.end
        made._memory = None
        made._trace = InferenceTrace(request.trace_ref)
        return made

    def inputs(self) -> list[Tensor]:
        """The input tensors."""
        return self._inputs

    def request_id(self) -> str:
        """The id that the client gave; "" without one."""
        return self._request.id

    def correlation_id(self) -> int | str:
        """The sequence; 0 without one."""
        return 0 if self._request.sequence is None else self._request.sequence.id

    def flags(self) -> int:
        """TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Sets the flags of a request of one's own."""
        self._flags = flags

    def timeout(self) -> int:
        """In microseconds; 0 without one."""
        return self._request.timeout_us

    def parameters(self) -> str:
        """The parameters, in JSON."""
        return json.dumps(self._request.parameters)

    def requested_output_names(self) -> list[str]:
        """The outputs that are wanted."""
        return self._names

    def model_name(self) -> str:
        """The model."""
        return self._request.model

    def model_version(self) -> str:
        """Its version; "" where the server shall choose."""
        return self._request.version

    def preferred_memory(self) -> PreferredMemory | None:
        """Where the answers are wanted."""
        return self._memory

    def trace(self) -> InferenceTrace:
        """The trace."""
        return self._trace

    def get_response_sender(self) -> InferenceResponseSender:
        """What sends answers to it.

        Raises:
            TritonModelException: this is a request of the model's own.
        """
        if self._open is None:
            raise TritonModelException("a request that a model makes itself has no response sender")
        self._open.asked = True
        return InferenceResponseSender(self._open)

    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._open is not None and not self._open.closed and self._open.send.cancelled(self._open.index)

    def set_release_flags(self, flags: int) -> None:
        """TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: give this request to the model again.

        Raises:
            TritonModelException: an unknown flag, or a request of the model's own.
        """
        known = (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        if self._open is None or flags not in known:
            raise TritonModelException(f"release flags are {flags}, expected 1 (ALL) or 2 (RESCHEDULE)")
        self._open.release = flags

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Sends it and waits; with ``decoupled`` an iterator over the answers."""
        return call(self._outgoing(), decoupled, InferenceResponse.received)

    async def async_exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """``exec`` for a running event loop."""
        return await async_call(self._outgoing(), decoupled, InferenceResponse.received)

    def _outgoing(self) -> InferRequest:
        request = self._request
        if self._open is not None:
            raise TritonModelException("a request that was received cannot be sent, make one of your own")
        start = bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        end = bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
        correlation = self.correlation_id()
        return InferRequest(
            request.model,
            request.version,
            request.id,
            {tensor.name(): tensor.typed() for tensor in self._inputs},
            [RequestedOutput(name) for name in self._names],
            time.monotonic_ns(),
            request.parameters,
            SequenceRef(correlation, start, end) if correlation or start or end else None,
            timeout_us=request.timeout_us,
            trace_ref=self._trace.ref,
        )


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input of that name; None when the request has none."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output of that name; None when the response has none."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def failure(error: TritiumError) -> InferResponse:
    """A final answer that is an error."""
    return InferResponse("", "", "", error=error)
