"""HTTP bodies of ``infer`` <-> InferRequest and InferResponse: JSON, JSON with binary tensors behind it, raw.

Statuses and texts are those of the recorded Triton server: what cannot be read as the JSON that it expects is
INTERNAL, what can be read and makes no sense is INVALID_ARGUMENT. Whether the tensors fit the model (names,
types, shapes, byte sizes) is for ``serving`` to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import orjson

from tritium.backends.config import ModelConfig
from tritium.errors import TritiumError, invalid
from tritium.frontends.kserve.classify import asked_classes, asked_windows, top_classes
from tritium.frontends.kserve.json_text import (
    array,
    boolean,
    elements,
    internal,
    member,
    members,
    parse,
    shown,
    string,
    unsigned,
)
from tritium.frontends.kserve.shared_memory import Regions, Window
from tritium.types import DType, InferRequest, InferResponse, Parameter, RequestedOutput, SequenceRef, Tensor

MAX_PARAMETERS = 1024
MAX_ID_LENGTH = 4096
_MAX_ELEMENTS = 1 << 62
_INT64_END = 1 << 63
_LENGTH = re.compile(r"[+-]?[0-9]{1,19}").fullmatch
_DTYPES = {dtype.value: dtype for dtype in DType}
_SIGNED = frozenset({DType.INT8, DType.INT16, DType.INT32, DType.INT64})
_UNSIGNED = frozenset({DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64})


class HttpInfer(NamedTuple):
    """A request that was read.

    Attributes:
        binary: whether outputs that the request does not name come as bytes behind the JSON.
    """

    request: InferRequest
    binary: bool


def read(
    body: bytes | memoryview,
    header_length: str | None,
    config: ModelConfig,
    model: str,
    version: str,
    arrived_ns: int,
    regions: Regions | None = None,
) -> HttpInfer:
    """The request in a body, inflated already.

    Args:
        regions: the shared memory that it may name.
        header_length: the header ``Inference-Header-Content-Length``: how many bytes of the body are JSON, the
            rest being tensors; 0 says that all of it is the only input of the model; None that all is JSON.

    Raises:
        TritiumError: INTERNAL (it is not the JSON expected) or INVALID_ARGUMENT.
    """
    size = _header_size(body, header_length)
    if size == 0:
        return HttpInfer(_read_raw(body, config, model, version, arrived_ns), True)
    view = memoryview(body)
    root = parse(view[:size])
    if not isinstance(root, dict):
        root = {}
    request_id = string(root.get("id", ""), "Unable to parse 'id'")
    if len(request_id) > MAX_ID_LENGTH:
        raise invalid(f"'id' has {len(request_id)} characters, expected at most {MAX_ID_LENGTH}", param="id")
    regions = regions or Regions()
    entries = array(member(root, "inputs"), "Unable to parse 'inputs'")
    inputs = _read_inputs(entries, view[size:], model, request_id, regions)
    request = InferRequest(model, version, request_id, inputs, _read_outputs(root, regions), arrived_ns)
    return HttpInfer(request, _read_parameters(root.get("parameters", {}), request))


def _header_size(body: bytes | memoryview, header_length: str | None) -> int:
    if header_length is None:
        return len(body)
    if _LENGTH(header_length) is None:
        raise invalid(f"Unable to parse Inference-Header-Content-Length, got: {shown(header_length)}")
    size = int(header_length)
    if size < 0 or size > len(body):
        raise invalid(f"inference header size should be in range (0, {len(body)}), got: {size}")
    return size


def _read_raw(body: bytes | memoryview, config: ModelConfig, model: str, version: str, arrived_ns: int) -> InferRequest:
    """The whole body is the one input; its shape follows from the configuration and the size."""
    tag = request_tag("")
    if len(config.inputs) != 1:
        raise invalid(
            f"{tag}Raw request must only have 1 input (found 1) to be deduced but got {len(config.inputs)} inputs "
            f"in '{model}' model configuration"
        )
    spec = config.inputs[0]
    shape, data = list(spec.dims), memoryview(body)
    if spec.dtype is DType.BYTES:
        if spec.dims not in ((1,), ()):
            raise invalid(f"{tag}For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
        data = Tensor.from_strings(spec.name, [bytes(body)]).data
    else:
        free = [index for index, size in enumerate(shape) if size < 0]
        if len(free) > 1:
            raise invalid(
                f"{tag}The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
                "variable-sized dimension"
            )
        if free:
            step = spec.dtype.numpy.itemsize
            for size in shape:
                step *= max(size, 1)
            if len(body) % step:
                raise invalid(f"{tag}raw input '{spec.name}' has {len(body)} bytes, expected a multiple of {step}")
            shape[free[0]] = len(body) // step
    if config.max_batch_size > 0:
        shape.insert(0, 1)
    tensor = Tensor(spec.name, spec.dtype, tuple(shape), data)
    return InferRequest(model, version, "", {spec.name: tensor}, [], arrived_ns)


def request_tag(request_id: str) -> str:
    """What Triton writes before the message of a request that it refuses."""
    return f"[request id: {shown(request_id) or '<id_unknown>'}] "


def dtype_of(name: str, tensor: str) -> DType:
    """The type that an input names."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise invalid(f"invalid datatype for input {shown(tensor)}", param=tensor)
    return dtype


def element_count(shape: Iterable[int], tensor: str, model: str) -> int:
    """The number of elements, for a shape that could be addressed."""
    count = 1
    for size in shape:
        count *= size
        if count > _MAX_ELEMENTS:
            raise invalid(f"shape of input '{shown(tensor)}' for model '{model}' has too many elements", param=tensor)
    return count


def _read_inputs(
    entries: list[Any], rest: memoryview, model: str, request_id: str, regions: Regions
) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    at = 0
    for entry in entries:
        name = string(member(entry, "name"), "Unable to parse 'name'")
        dtype = dtype_of(string(member(entry, "datatype"), "Unable to parse 'datatype'"), name)
        sizes = array(member(entry, "shape"), "Unable to parse 'shape'")
        shape = tuple([unsigned(size, "Unable to parse 'shape'") for size in sizes])
        if name in inputs:
            raise invalid(f"{request_tag(request_id)}input '{shown(name)}' already exists in request", param=name)
        size = _binary_size(entry, name, regions)
        if size is None:
            inputs[name] = from_json(name, dtype, shape, entry["data"], model)
            continue
        if isinstance(size, Window):
            element_count(shape, name, model)
            inputs[name] = Tensor(name, dtype, shape, size.read())
            continue
        if at + size > rest.nbytes:
            raise invalid(
                f"unexpected size for input '{shown(name)}', expecting {at + size - rest.nbytes} additional bytes "
                f"for model '{model}'",
                param=name,
            )
        element_count(shape, name, model)
        inputs[name] = Tensor(name, dtype, shape, rest[at : at + size])
        at += size
    if at != rest.nbytes:
        raise invalid(f"unexpected additional input data for model '{model}'")
    return inputs


def _binary_size(entry: dict[str, Any], name: str, regions: Regions) -> int | Window | None:
    """How many of the bytes behind the JSON are this input's, or its shared memory; None for ``data`` in the JSON."""
    parameters = entry.get("parameters")
    given: list[str] = ["'data'"] if "data" in entry else []
    size = None
    if isinstance(parameters, dict):
        if "binary_data_size" in parameters:
            size = unsigned(parameters["binary_data_size"], "Unable to parse 'binary_data_size'")
            given.append("'binary_data_size'")
        if "shared_memory_region" in parameters:
            given.append("'shared_memory_region'")
    if len(given) != 1:
        raise invalid(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But set {' '.join(given) or 'none of them'}",
            param=name,
        )
    if given[0] == "'shared_memory_region'" and isinstance(parameters, dict):
        return _window(parameters, regions)
    return size


def _window(parameters: dict[str, Any], regions: Regions) -> Window:
    """The shared memory that the parameters of a tensor name."""
    name = string(parameters["shared_memory_region"], "Unable to parse 'shared_memory_region'")
    size = unsigned(member(parameters, "shared_memory_byte_size"), "Unable to parse 'shared_memory_byte_size'")
    offset = unsigned(parameters.get("shared_memory_offset", 0), "Unable to parse 'shared_memory_offset'")
    return regions.window(name, offset, size)


def from_json(name: str, dtype: DType, shape: tuple[int, ...], data: Any, model: str) -> Tensor:
    """A tensor of JSON values, nested in any way, of which there must be as many as the shape says.

    Integers that are too large for the type wrap around, as in Triton.

    Raises:
        TritiumError: INTERNAL for values of another kind or number; INVALID_ARGUMENT for FP16 and BF16.
    """
    if dtype in (DType.FP16, DType.BF16):
        raise invalid(
            f"receiving {dtype.value} data via JSON is not supported. Please use the binary data format for input "
            f"{shown(name)}",
            param=name,
        )
    count = element_count(shape, name, model)
    if count == 0:
        return Tensor(name, dtype, shape, memoryview(b""))
    values = _flat(array(data, "Unable to parse 'data'"), count)
    if len(values) != count:
        raise internal("Unable to parse 'data': Shape does not match true shape of 'data' field")
    kinds = set(map(type, values))
    if dtype is DType.BYTES:
        if kinds != {str}:
            raise internal("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
        return Tensor.from_strings(name, [value.encode() for value in values], shape)
    return Tensor(name, dtype, shape, _numbers(values, kinds, dtype).data.cast("B"))


def _flat(data: list[Any], count: int) -> list[Any]:
    """All that is no list in these nested lists; stops past ``count`` elements."""
    if list not in set(map(type, data)):
        return data
    found: list[Any] = []
    levels = [iter(data)]
    while levels and len(found) <= count:
        for item in levels[-1]:
            if type(item) is list:
                levels.append(iter(item))
                break
            found.append(item)
        else:
            levels.pop()
    return found


def _numbers(values: list[Any], kinds: set[type], dtype: DType) -> np.ndarray[Any, Any]:
    if dtype is DType.BOOL:
        if kinds != {bool}:
            raise internal("Unable to parse 'data': attempt to access JSON non-boolean as boolean")
        return np.array(values, dtype=np.bool_)
    if dtype in _SIGNED or dtype in _UNSIGNED:
        wide, word = (np.int64, "signed-integer") if dtype in _SIGNED else (np.uint64, "unsigned-integer")
        try:
            if kinds != {int}:
                raise OverflowError
            return np.array(values, dtype=wide).astype(dtype.numpy, copy=False)
        except OverflowError:
            raise internal(f"Unable to parse 'data': attempt to access JSON non-{word} as {word}") from None
    if not kinds <= {int, float}:
        raise internal("Unable to parse 'data': attempt to access JSON non-number as double")
    with np.errstate(over="ignore"):
        return np.array(values, dtype=np.float64).astype(dtype.numpy, copy=False)


def _read_outputs(root: dict[str, Any], regions: Regions) -> list[RequestedOutput]:
    outputs: list[RequestedOutput] = []
    for entry in array(root.get("outputs", []), "Unable to parse 'outputs'"):
        name = string(member(entry, "name"), "Unable to parse 'name'")
        given = entry.get("parameters")
        if not isinstance(given, dict):
            outputs.append(RequestedOutput(name))
            continue
        window = _window(given, regions) if "shared_memory_region" in given else None
        classes = unsigned(given.get("classification", 0), "Unable to set 'classification'")
        binary = boolean(given.get("binary_data", False), "Unable to parse 'binary_data'")
        outputs.append(RequestedOutput(name, classes, binary, window))
    return outputs


def _read_parameters(given: Any, request: InferRequest) -> bool:
    """Sets what the parameters say; returns whether outputs are binary when nothing else is said."""
    table = members(given, "failed to get request params.: ")
    if len(table) > MAX_PARAMETERS:
        raise invalid(f"'parameters' has {len(table)} keys, expected at most {MAX_PARAMETERS}", param="parameters")
    sequence: SequenceRef | None = None
    binary = False
    for key, value in table.items():
        what = f"Unable to parse '{shown(key)}'"
        if key == "sequence_id":
            found = value if type(value) is int and value >= 0 else string(value, what)
            sequence = replace(sequence or SequenceRef(0), id=found)
        elif key == "sequence_start":
            sequence = replace(sequence or SequenceRef(0), start=boolean(value, what))
        elif key == "sequence_end":
            sequence = replace(sequence or SequenceRef(0), end=boolean(value, what))
        elif key == "priority":
            request.priority = unsigned(value, what)
        elif key == "timeout":
            request.timeout_us = unsigned(value, what)
        elif key == "binary_data_output":
            binary = boolean(value, what)
        elif key.startswith("triton_"):
            raise reserved()
        else:
            request.parameters[key] = parameter(key, value)
    request.sequence = sequence
    return binary


def reserved() -> TritiumError:
    """A custom parameter has a name of Triton's own."""
    return invalid("parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.")


def parameter(key: str, value: Any) -> Parameter:
    """A custom parameter's value; integers beyond 64 bits with sign become doubles."""
    if type(value) is int and value >= _INT64_END:
        return float(value)
    if isinstance(value, bool | int | float | str):
        return value
    raise invalid(
        f"parameter '{shown(key)}' has invalid type. It should be either 'int', 'bool', or 'string'.", param=key
    )


def write(asked: HttpInfer, response: InferResponse, config: ModelConfig) -> tuple[list[bytes | memoryview], int]:
    """The body of an answer in parts, JSON first; outputs that go to shared memory are written there.

    Returns:
        The parts, and the size of the JSON in bytes when tensors follow it, else 0.

    Raises:
        TritiumError: INVALID_ARGUMENT when an output cannot be written as it was asked for; INTERNAL when its
            shared memory is too small.
    """
    classes = asked_classes(asked.request)
    windows = asked_windows(asked.request)
    binary = {output.name: output.binary for output in asked.request.outputs}
    default = asked.binary and not binary
    tails: list[bytes | memoryview] = []
    texts: list[bytes] = []
    for tensor in response.outputs:
        if tensor.name in classes:
            tensor = top_classes(tensor, classes[tensor.name], config)
        start = b'{"name":%b,"datatype":"%b","shape":%b,' % (
            orjson.dumps(tensor.name),
            tensor.dtype.value.encode(),
            orjson.dumps(tensor.shape),
        )
        if tensor.name in windows:
            windows[tensor.name].write(tensor.name, tensor.data)
            texts.append(start[:-1] + b"}")
        elif binary.get(tensor.name, default):
            texts.append(b'%b"parameters":{"binary_data_size":%d}}' % (start, tensor.data.nbytes))
            if tensor.data.nbytes:
                tails.append(tensor.data)
        else:
            texts.append(b'%b"data":%b}' % (start, elements(tensor)))
    head: dict[str, Any] = {"id": response.id} if response.id else {}
    head |= {"model_name": response.model, "model_version": response.version}
    if response.parameters:
        head["parameters"] = response.parameters
    text = b'%b,"outputs":[%b]}' % (orjson.dumps(head)[:-1], b",".join(texts))
    return [text, *tails], len(text) if tails else 0
