"""Protobuf messages of ``ModelInfer`` and ``ModelStreamInfer`` <-> InferRequest and InferResponse.

The tensors of large messages never enter protobuf's own memory: going in, they are views on the bytes of the
message, and going out, they are joined behind the encoded rest, so that each is copied once. The layout is
that of the protobuf encoding (protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError, invalid
from tritium.frontends.kserve.classify import asked_classes, asked_windows, top_classes
from tritium.frontends.kserve.json_codec import (
    MAX_ID_LENGTH,
    MAX_PARAMETERS,
    dtype_of,
    element_count,
    request_tag,
    reserved,
)
from tritium.frontends.kserve.json_text import shown
from tritium.frontends.kserve.shared_memory import Regions, Window
from tritium.proto import service_pb2 as pb
from tritium.types import DType, InferRequest, InferResponse, Parameter, RequestedOutput, SequenceRef, Tensor

# Below this many bytes protobuf's own copies cost less than finding the tensors in the message.
_SPLIT_BYTES = 32 << 10
_MAX_RANK = 1024

_RAW_INPUT_TAG = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number << 3 | 2
_RAW_OUTPUT = pb.ModelInferResponse.DESCRIPTOR.fields_by_name["raw_output_contents"].number
_INFER_RESPONSE = pb.ModelStreamInferResponse.DESCRIPTOR.fields_by_name["infer_response"].number

# Field of InferTensorContents -> the name that Triton has for it in errors, the types it may hold, numpy's type.
_CONTENTS: dict[str, tuple[str, tuple[DType, ...], type[np.generic] | None]] = {
    "bool_contents": ("BOOL", (DType.BOOL,), np.bool_),
    "int_contents": ("INT32", (DType.INT8, DType.INT16, DType.INT32), np.int32),
    "int64_contents": ("INT64", (DType.INT64,), np.int64),
    "uint_contents": ("UINT32", (DType.UINT8, DType.UINT16, DType.UINT32), np.uint32),
    "uint64_contents": ("UINT64", (DType.UINT64,), np.uint64),
    "fp32_contents": ("FP32", (DType.FP32,), np.float32),
    "fp64_contents": ("FP64", (DType.FP64,), np.float64),
    "bytes_contents": ("BYTES", (DType.BYTES,), None),
}


class Message(NamedTuple):
    """A ModelInferRequest: what protobuf parsed, and the raw tensors beside it."""

    fields: Any
    raw: list[memoryview]


class GrpcInfer(NamedTuple):
    """A request that was read.

    Attributes:
        empty_final: whether the client wants to see a final answer that carries nothing.
    """

    request: InferRequest
    empty_final: bool


def parse(message: bytes) -> Message:
    """The encoded ModelInferRequest.

    Raises:
        TritiumError: INTERNAL when the bytes are no such message (the status of the recorded server).
    """
    try:
        found = _split(message) if len(message) >= _SPLIT_BYTES else None
        if found is not None:
            rest, raw = found
            return Message(pb.ModelInferRequest.FromString(rest), raw)
        fields = pb.ModelInferRequest.FromString(message)
    except DecodeError as error:
        raise TritiumError(Code.INTERNAL, f"the request is not a ModelInferRequest: {error}") from None
    return Message(fields, [memoryview(content) for content in fields.raw_input_contents])


def _split(message: bytes) -> tuple[bytes, list[memoryview]] | None:
    """The message without its raw tensors, and those as views; None when protobuf itself must say what is wrong."""
    view = memoryview(message)
    parts: list[memoryview] = []
    raw: list[memoryview] = []
    kept = 0
    try:
        for tag, begin, start, end in _fields(message):
            if tag == _RAW_INPUT_TAG:
                raw.append(view[start:end])
                parts.append(view[kept:begin])
                kept = end
    except IndexError:
        return None
    parts.append(view[kept:])
    return b"".join(parts), raw


def raw_inputs(message: memoryview) -> list[tuple[int, int, int]] | None:
    """Where raw tensors lie in a sound message that ends with them: tag, begin and end of each; else None."""
    found: list[tuple[int, int, int]] = []
    try:
        for tag, begin, start, end in _fields(message):
            if tag == _RAW_INPUT_TAG:
                found.append((begin, start, end))
            elif found:
                return None
    except IndexError:
        return None
    return found


def _fields(message: bytes | memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Tag of each field, where it begins, and where what it holds begins and ends (protobuf.dev, "Encoding").

    Raises:
        IndexError: the message ends in the middle of one, or has groups.
    """
    at, size = 0, len(message)
    while at < size:
        begin = at
        tag, at = _varint(message, at)
        kind, start = tag & 7, at
        if kind == 2:
            length, start = _varint(message, at)
            at = start + length
        elif kind == 0:
            at = _varint(message, at)[1]
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise IndexError
        if at > size:
            raise IndexError
        yield tag, begin, start, at


def _varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


def read(message: Message, arrived_ns: int, regions: Regions | None = None) -> GrpcInfer:
    """The request in a message.

    Args:
        regions: the shared memory that it may name.

    Raises:
        TritiumError: INVALID_ARGUMENT naming what is wrong.
    """
    fields = message.fields
    if len(fields.id) > MAX_ID_LENGTH:
        raise invalid(f"id has {len(fields.id)} characters, expected at most {MAX_ID_LENGTH}", param="id")
    request = InferRequest(fields.model_name, fields.model_version, fields.id, {}, [], arrived_ns)
    empty_final = _read_parameters(fields.parameters, request)
    regions = regions or Regions()
    _read_inputs(message, request, regions)
    request.outputs = [_read_output(output, regions) for output in fields.outputs]
    return GrpcInfer(request, empty_final)


def _read_inputs(message: Message, request: InferRequest, regions: Regions) -> None:
    inputs = message.fields.inputs
    if len(message.raw) > len(inputs):
        raise invalid(
            f"{len(message.raw)} raw_input_contents for {len(inputs)} inputs of model '{request.model}', expected at "
            "most one for each",
            param="raw_input_contents",
        )
    in_memory = 0
    for index, entry in enumerate(inputs):
        name, model = entry.name, request.model
        dtype = dtype_of(entry.datatype, name)
        if len(entry.shape) > _MAX_RANK:
            raise invalid(f"input '{shown(name)}' has {len(entry.shape)} dimensions", param=name)
        shape = tuple(entry.shape)
        if shape and min(shape) < 0:
            sizes = ",".join(map(str, shape))
            raise invalid(
                f"{request_tag(request.id)}All input dimensions should be specified for input '{shown(name)}' for "
                f"model '{model}', got [{sizes}]",
                param=name,
            )
        element_count(shape, name, model)
        if name in request.inputs:
            raise invalid(f"{request_tag(request.id)}input '{shown(name)}' already exists in request", param=name)
        if "shared_memory_region" in entry.parameters:
            data = _window(entry.parameters, regions).read()
            in_memory += 1  # raw contents are only there for the others
        elif entry.HasField("contents"):
            if message.raw:
                raise invalid(
                    f"contents field must not be specified when using raw_input_contents for '{shown(name)}' for "
                    f"model '{model}'",
                    param=name,
                )
            data = _typed(entry.contents, name, dtype, model)
        elif index - in_memory < len(message.raw):
            data = message.raw[index - in_memory]
        else:
            raise invalid(
                f"unable to find data for input tensor '{shown(name)}' for model '{model}' in request.", param=name
            )
        request.inputs[name] = Tensor(name, dtype, shape, data)


def _typed(contents: Any, name: str, dtype: DType, model: str) -> memoryview:
    """The bytes of typed contents; integers that are too large for the type wrap around, as in Triton."""
    data = memoryview(b"")
    for field, values in contents.ListFields():
        shown_type, dtypes, kind = _CONTENTS[field.name]
        if dtype not in dtypes:
            raise invalid(
                f"unexpected explicit tensor data for input tensor '{shown(name)}' for model '{model}' of type "
                f"'{shown_type}', expected datatype '{dtype.value}'",
                param=name,
            )
        if kind is None:
            data = Tensor.from_strings(name, list(values)).data
        else:
            data = np.array(values, dtype=kind).astype(dtype.numpy, copy=False).data.cast("B")
    return data


def _window(parameters: Any, regions: Regions) -> Window:
    """The shared memory that the parameters of a tensor name."""
    values: dict[str, Any] = {"shared_memory_offset": 0}
    for key, kind in (("shared_memory_region", str), ("shared_memory_byte_size", int), ("shared_memory_offset", int)):
        if key in parameters:
            values[key] = _value(parameters[key])
        if type(values.get(key)) is not kind:
            expected = "string_param" if kind is str else "int64_param"
            raise invalid(f"invalid value type for '{key}' parameter, expected {expected}.", param=key)
    return regions.window(
        values["shared_memory_region"], values["shared_memory_offset"], values["shared_memory_byte_size"]
    )


def _read_output(entry: Any, regions: Regions) -> RequestedOutput:
    window = _window(entry.parameters, regions) if "shared_memory_region" in entry.parameters else None
    classes = 0
    if "classification" in entry.parameters:
        classes = _value(entry.parameters["classification"])
        if type(classes) is not int:
            raise invalid("invalid value type for 'classification' parameter, expected int64_param")
        if classes < 0:
            raise invalid("invalid value for 'classification', expected value >= 0.")
    return RequestedOutput(entry.name, classes, True, window)


def _value(parameter: Any) -> Parameter | None:
    choice: str | None = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_id(value: object) -> bool:
    return type(value) is int or isinstance(value, str)


# Triton's own parameters: what they may hold, and how it says so.
_RESERVED: dict[str, tuple[Callable[[object], bool], str]] = {
    "sequence_id": (_is_id, "int64_param or string_param."),
    "sequence_start": (_is_bool, "bool_param."),
    "sequence_end": (_is_bool, "bool_param."),
    "priority": (_is_int, "int64_param or uint64_param."),
    "timeout": (_is_int, "int64_param."),
    "triton_enable_empty_final_response": (_is_bool, "bool_param."),
}


def _read_parameters(parameters: Any, request: InferRequest) -> bool:
    """Sets what the parameters say; returns whether empty final answers are wanted."""
    if len(parameters) > MAX_PARAMETERS:
        raise invalid(f"'parameters' has {len(parameters)} keys, expected at most {MAX_PARAMETERS}", param="parameters")
    own: dict[str, Any] = {}
    for key in parameters:
        value = _value(parameters[key])
        if key in _RESERVED:
            fits, expected = _RESERVED[key]
            if not fits(value):
                raise invalid(f"invalid value type for '{key}' parameter, expected {expected}", param=key)
            if type(value) is int and value < 0:
                raise invalid(f"invalid value for '{key}', expected value >= 0.", param=key)
            own[key] = value
        elif key.startswith("triton_"):
            raise reserved()
        elif value is None:
            raise invalid(
                f"invalid value type for '{shown(key)}' parameter, expected bool_param, int64_param, double_param, "
                "or string_param.",
                param=key,
            )
        else:
            request.parameters[key] = value
    request.priority = own.get("priority", 0)
    request.timeout_us = own.get("timeout", 0)
    if any(key.startswith("sequence_") for key in own):
        start, end = own.get("sequence_start", False), own.get("sequence_end", False)
        request.sequence = SequenceRef(own.get("sequence_id", 0), start, end)
    return own.get("triton_enable_empty_final_response", False)


def write(response: InferResponse, request: InferRequest, config: ModelConfig | None) -> bytes:
    """An answer as an encoded ModelInferResponse; outputs that go to shared memory are written there.

    Args:
        config: of the model; needed only where the request asks for classes.

    Raises:
        TritiumError: INVALID_ARGUMENT when an output cannot be written as it was asked for.
    """
    classes = asked_classes(request) if config is not None else {}
    windows = asked_windows(request)
    message = pb.ModelInferResponse(model_name=response.model, model_version=response.version, id=response.id)
    for key, value in response.parameters.items():
        _set(message.parameters[key], value)
    parts: list[bytes | memoryview] = [b""]
    for tensor in response.outputs:
        if tensor.name in classes and config is not None:
            tensor = top_classes(tensor, classes[tensor.name], config)
        message.outputs.add(name=tensor.name, datatype=tensor.dtype.value, shape=tensor.shape)
        if tensor.name in windows:
            windows[tensor.name].write(tensor.name, tensor.data)
            parts.append(_start(_RAW_OUTPUT, 0))  # clients count on one for each output
            continue
        parts += (_start(_RAW_OUTPUT, tensor.data.nbytes), tensor.data)
    parts[0] = message.SerializeToString()
    return b"".join(parts)


def fronts(response: InferResponse) -> list[bytes]:
    """What ``write`` puts before each tensor of an answer without parameters; all of it when there is none."""
    message = pb.ModelInferResponse(model_name=response.model, model_version=response.version, id=response.id)
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.dtype.value, shape=tensor.shape)
    starts = [_start(_RAW_OUTPUT, tensor.data.nbytes) for tensor in response.outputs] or [b""]
    return [message.SerializeToString() + starts[0], *starts[1:]]


def write_stream(answer: bytes, error: str = "") -> bytes:
    """An encoded ModelInferResponse as an encoded ModelStreamInferResponse.

    Args:
        error: the ``error_message``; "" for none.
    """
    front = pb.ModelStreamInferResponse(error_message=error).SerializeToString() if error else b""
    return b"".join((front, _start(_INFER_RESPONSE, len(answer)), answer))


def write_refusal(request_id: str, error: str) -> bytes:
    """An encoded ModelStreamInferResponse for a request that never reached its model: nothing but its id."""
    return write_stream(pb.ModelInferResponse(id=request_id).SerializeToString(), error)


def _start(field: int, size: int) -> bytes:
    """Tag and length before ``size`` bytes of a field."""
    out = bytearray([field << 3 | 2])
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out)


def _set(target: Any, value: Parameter) -> None:
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int):
        if value >= 1 << 63:
            target.uint64_param = value
        else:
            target.int64_param = value
    elif isinstance(value, float):
        target.double_param = value
    else:
        target.string_param = value
