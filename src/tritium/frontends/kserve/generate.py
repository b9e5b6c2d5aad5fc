"""The generate extension: one flat JSON object <-> InferRequest and InferResponse.

Keys that name an input become that input, all others become parameters; the same holds for the keys inside
``parameters``. An answer has its outputs as plain keys.
"""

from __future__ import annotations

from math import prod
from typing import Any

import orjson

from tritium.backends.config import ModelConfig, TensorSpec
from tritium.errors import Code, TritiumError, invalid
from tritium.frontends.kserve.json_codec import (
    MAX_ID_LENGTH,
    MAX_PARAMETERS,
    from_json,
    parameter,
    request_tag,
)
from tritium.frontends.kserve.json_text import elements, internal, members, parse, shown, string
from tritium.types import InferRequest, InferResponse, Tensor

NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)


def read(body: bytes, config: ModelConfig, model: str, version: str, arrived_ns: int) -> InferRequest:
    """The request in a body.

    Raises:
        TritiumError: INTERNAL (it is not the JSON expected) or INVALID_ARGUMENT.
    """
    root = members(parse(body))
    request_id = string(root.get("id", ""), "Unable to parse 'id'")
    if len(request_id) > MAX_ID_LENGTH:
        raise invalid(f"'id' has {len(request_id)} characters, expected at most {MAX_ID_LENGTH}", param="id")
    request = InferRequest(model, version, request_id, {}, [], arrived_ns)
    for key, value in root.items():
        if key != "parameters":
            _put(request, config, key, value)
        elif isinstance(value, dict):
            for inner, inner_value in value.items():
                _put(request, config, inner, inner_value)
        else:
            raise internal(
                "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object"
            )
    if len(request.parameters) > MAX_PARAMETERS:
        raise invalid(f"the request has {len(request.parameters)} parameters, expected at most {MAX_PARAMETERS}")
    return request


def _put(request: InferRequest, config: ModelConfig, key: str, value: Any) -> None:
    spec = config.input(key)
    if spec is None:
        request.parameters[key] = parameter(key, value)
        return
    if key in request.inputs:
        raise invalid(f"{request_tag(request.id)}input '{shown(key)}' already exists in request", param=key)
    request.inputs[key] = _tensor(spec, config.max_batch_size > 0, value, request.model)


def _tensor(spec: TensorSpec, batched: bool, value: Any, model: str) -> Tensor:
    """The value as a tensor of the shape that the model wants: open dimensions are filled from the last one."""
    values = value if isinstance(value, list) else [value]
    shape = [-1, *spec.dims] if batched else list(spec.dims)
    fixed = prod(size for size in shape if size >= 0)
    count = _count(values)
    open_size, rest = divmod(count, fixed) if fixed else (0, count)
    for index in range(len(shape) - 1, -1, -1):
        if shape[index] < 0:
            shape[index], open_size = open_size, 1
    if rest or open_size != 1:
        raise invalid(f"The schema can not convert input '{spec.name}' to tensor with proper shape", param=spec.name)
    return from_json(spec.name, spec.dtype, tuple(shape), values, model)


def _count(values: list[Any]) -> int:
    """Elements in nested lists."""
    count = 0
    levels = [iter(values)]
    while levels:
        for item in levels[-1]:
            if type(item) is list:
                levels.append(iter(item))
                break
            count += 1
        else:
            levels.pop()
    return count


def write(response: InferResponse) -> bytes:
    """An answer as one JSON object; outputs of one element are scalars, all others lists.

    Raises:
        TritiumError: the error that the answer is, or an output that JSON cannot carry.
    """
    if response.error is not None:
        raise response.error
    head: dict[str, Any] = {"id": response.id} if response.id else {}
    head |= {"model_name": response.model, "model_version": response.version} | response.parameters
    parts = [orjson.dumps(head)[1:-1]]
    for tensor in response.outputs:
        values = elements(tensor)
        parts.append(orjson.dumps(tensor.name) + b":" + (values[1:-1] if tensor.size == 1 else values))
    return b"{" + b",".join(parts) + b"}"


def status_of(error: TritiumError) -> int:
    """The HTTP status of an error that a model answered with; one without a more telling code is 400 here."""
    return 400 if error.code in (Code.INTERNAL, Code.UNKNOWN) else error.status.v2


def write_error(error: TritiumError) -> bytes:
    """An error as a JSON object."""
    return orjson.dumps({"error": error.message})
