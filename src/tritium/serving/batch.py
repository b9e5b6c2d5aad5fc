"""Several requests as one, and one answer as several; what the server itself adds to a batch.

A batch lies along the first dimension, so joining is joining bytes: nothing is padded and no element is touched.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod

import numpy as np

from tritium.backends.config import ANY, BatchInput, ModelConfig, TensorSpec
from tritium.errors import Code, TritiumError
from tritium.types import Copies, DType, InferRequest, InferResponse, RequestedOutput, Tensor


def rows_of(config: ModelConfig, request: InferRequest) -> int:
    """Inferences in a request that fits the configuration."""
    if config.max_batch_size < 1:
        return 1
    return next((tensor.shape[0] for tensor in request.inputs.values() if tensor.shape), 1)


def shape_rule(config: ModelConfig) -> Callable[[InferRequest], Hashable]:
    """A function that gives equal values for requests that may share a batch.

    They may when they have the same inputs and, apart from the batch dimension, the same shapes of those that
    are neither of fixed size nor ragged.
    """
    free = [spec.name for spec in config.inputs if not spec.ragged and ANY in spec.dims]
    optional = [spec.name for spec in config.inputs if spec.optional]
    if not free and not optional:
        return lambda request: ()
    return lambda request: (
        tuple(request.inputs[name].shape[1:] if name in request.inputs else None for name in free),
        tuple(name in request.inputs for name in optional),
    )


def join(config: ModelConfig, requests: Sequence[InferRequest], rows: Sequence[int]) -> InferRequest:
    """One request with the inputs of all; ragged inputs lie flat one behind the other.

    Args:
        requests: that have equal shapes by ``shape_rule``; their made inputs (``add_inputs``) are in them.
        rows: inferences of each.
    """
    first = requests[0]
    if len(requests) == 1 and not any(spec.ragged for spec in config.inputs):
        return first
    made = {one.target: one for one in config.batch_inputs}
    joined: dict[str, Tensor] = {}
    for name in first.inputs:
        spec = config.input(name)
        parts = [request.inputs[name] for request in requests]
        if name in made:
            joined[name] = _join_made(made[name], parts)
        elif spec is not None and spec.ragged:
            joined[name] = _joined(parts, (sum(part.size for part in parts),))
        else:
            joined[name] = _joined(parts, (sum(rows), *parts[0].shape[1:]))
        _count(requests, name)
    return dataclasses.replace(first, id="", inputs=joined, outputs=_wanted(requests), copies=Copies.of_all(requests))


def _count(requests: Sequence[InferRequest], name: str) -> None:
    """An input was joined: each request's part of it was copied."""
    for request in requests if len(requests) > 1 else ():
        if request.copies is not None:
            request.copies.add(request.inputs[name].data.nbytes)


def _wanted(requests: Sequence[InferRequest]) -> list[RequestedOutput]:
    """The outputs that one of the requests asks for; none, which means all, when one asks for all."""
    if not all(request.outputs for request in requests):
        return []
    return list({output.name: output for request in requests for output in request.outputs}.values())


def _joined(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    data = parts[0].data if len(parts) == 1 else memoryview(b"".join(part.data for part in parts))
    return Tensor(parts[0].name, parts[0].dtype, shape, data)


def split(
    config: ModelConfig, response: InferResponse, requests: Sequence[InferRequest], rows: Sequence[int]
) -> list[InferResponse]:
    """The answer to each request of a joined one, with the outputs that it asked for; an error is the answer to all.

    A model without a batch dimension runs one request at a time, and its answer stays whole.

    Raises:
        TritiumError: INTERNAL when an output does not have the rows of the batch.
    """
    if response.error is not None or response.empty:
        return [dataclasses.replace(response) for _ in requests]
    if config.max_batch_size < 1 and len(requests) == 1:
        return [response]
    sources = {one.target: one.source for one in config.batch_outputs}
    outputs: list[list[Tensor]] = [[] for _ in requests]
    for tensor in response.outputs:
        source = sources.get(tensor.name)
        if source is None:
            parts = _split_rows(config.name, tensor, rows)
        else:
            parts = _scatter(config.name, tensor, [request.inputs[source].shape for request in requests])
        for request, mine, part in zip(requests, outputs, parts, strict=True):
            if not request.outputs or any(output.name == tensor.name for output in request.outputs):
                mine.append(part)
    return [dataclasses.replace(response, outputs=mine, parameters=dict(response.parameters)) for mine in outputs]


def _split_rows(model: str, tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
    total = sum(rows)
    if not tensor.shape or tensor.shape[0] != total:
        raise TritiumError(
            Code.INTERNAL,
            f"output '{tensor.name}' of model '{model}' has shape {list(tensor.shape)}, expected {total} rows, "
            "those of the batch",
        )
    inner = tensor.shape[1:]
    return _cut(tensor, [(count, *inner) for count in rows])


def _scatter(model: str, tensor: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    expected = sum(prod(shape) for shape in shapes)
    if tensor.size != expected:
        raise TritiumError(
            Code.INTERNAL,
            f"output '{tensor.name}' of model '{model}' has {tensor.size} elements, expected {expected}, those of "
            "its source input",
        )
    return _cut(tensor, list(shapes))


def _cut(tensor: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Parts of these shapes, one behind the other; views on the bytes."""
    parts: list[Tensor] = []
    at = 0
    for shape in shapes:
        end = at + prod(shape) * tensor.dtype.size if tensor.dtype.size else _hop(tensor, at, prod(shape))
        parts.append(Tensor(tensor.name, tensor.dtype, shape, tensor.data[at:end]))
        at = end
    return parts


def _hop(tensor: Tensor, at: int, count: int) -> int:
    """Where ``count`` elements of a BYTES tensor end that begin at byte ``at``."""
    for _ in range(count):
        if at + 4 > tensor.data.nbytes:
            raise TritiumError(Code.INTERNAL, f"output '{tensor.name}' ends before its last element")
        (length,) = struct.unpack_from("<I", tensor.data, at)
        at += 4 + length
    return at


def add_inputs(config: ModelConfig, requests: Sequence[InferRequest], rows: Sequence[int]) -> list[InferRequest]:
    """The requests with the inputs that ``batch_input`` asks for, each with its own part of them."""
    if not config.batch_inputs:
        return list(requests)
    extra: list[dict[str, Tensor]] = [{} for _ in requests]
    for made in config.batch_inputs:
        shapes = [request.inputs[made.source].shape if made.source in request.inputs else () for request in requests]
        for mine, values in zip(extra, _made(made, shapes, rows, config.max_batch_size > 0), strict=True):
            mine[made.target] = Tensor.from_numpy(made.target, values.astype(made.dtype.numpy))
    return [
        dataclasses.replace(request, inputs={**request.inputs, **mine})
        for request, mine in zip(requests, extra, strict=True)
    ]


def _made(
    made: BatchInput, shapes: Sequence[tuple[int, ...]], rows: Sequence[int], batched: bool
) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """The part of each request in a made input; see ``BatchInput.Kind`` in Triton's model_config.proto."""
    counts = [prod(shape) if shape else 0 for shape in shapes]
    sums = np.cumsum(counts, dtype=np.int64)
    match made.kind:
        case "BATCH_ELEMENT_COUNT":
            return [np.array([count], np.int64) for count in counts]
        case "BATCH_ACCUMULATED_ELEMENT_COUNT":
            return [sums[i : i + 1] for i in range(len(counts))]
        case "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
            return [np.array([0, sums[0]], np.int64), *(sums[i : i + 1] for i in range(1, len(counts)))]
        case "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
            return [np.zeros(max(counts), np.int64) for _ in counts]
        case _:
            items = [shape[1:] if batched else shape for shape in shapes]
            tables = [np.tile(np.array(item, np.int64), (n, 1)) for item, n in zip(items, rows, strict=True)]
            return [t.reshape(-1) for t in tables] if made.kind == "BATCH_ITEM_SHAPE_FLATTEN" else tables


def _join_made(made: BatchInput, parts: Sequence[Tensor]) -> Tensor:
    if made.kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        return parts[0]
    return _joined(parts, (sum(part.shape[0] for part in parts), *parts[0].shape[1:]))


def reshape_inputs(config: ModelConfig, request: InferRequest) -> InferRequest:
    """The request with inputs in the shape that the backend sees (``reshape``)."""
    changed = _reshaped(config, {spec.name: spec for spec in config.inputs if spec.reshape is not None}, request.inputs)
    return dataclasses.replace(request, inputs={**request.inputs, **changed}) if changed else request


def reshape_outputs(config: ModelConfig, response: InferResponse) -> None:
    """Puts outputs from the shape in which a backend made them (``reshape``) into that of the configuration."""
    specs = {spec.name: spec for spec in config.outputs if spec.reshape is not None}
    if not specs:
        return
    for index, tensor in enumerate(response.outputs):
        spec = specs.get(tensor.name)
        if spec is None or spec.reshape is None:
            continue
        front = tensor.shape[:1] if config.max_batch_size > 0 else ()
        shape = _fill(spec.dims, tensor.shape[len(front) :])
        if prod((*front, *shape)) == tensor.size:
            response.outputs[index] = Tensor(tensor.name, tensor.dtype, (*front, *shape), tensor.data)


def _reshaped(config: ModelConfig, specs: Mapping[str, TensorSpec], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    changed: dict[str, Tensor] = {}
    for name, spec in specs.items():
        tensor = inputs.get(name)
        if tensor is None or spec.reshape is None:
            continue
        front = tensor.shape[:1] if config.max_batch_size > 0 else ()
        shape = (*front, *_fill(spec.reshape, tensor.shape[len(front) :]))
        changed[name] = Tensor(name, tensor.dtype, shape, tensor.data)
    return changed


def _fill(target: Sequence[int], given: Sequence[int]) -> tuple[int, ...]:
    """``target`` with the one open size that makes it as large as ``given``."""
    known = prod(size for size in target if size != ANY)
    open_size = prod(given) // known if known else 0
    return tuple(open_size if size == ANY else size for size in target)


def zeros(name: str, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    """A tensor of zeros; of empty texts for BYTES."""
    size = 4 if dtype.size is None else dtype.size
    return Tensor(name, dtype, shape, memoryview(bytes(prod(shape) * size)))
