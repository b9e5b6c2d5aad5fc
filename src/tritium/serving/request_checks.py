"""Whether a request fits a model's configuration, in the words of Triton.

The texts and their order are those of a recorded Triton 2.51 (conformance groups ``errors_http``,
``errors_grpc``): clients match on them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from math import prod

from tritium.backends.config import ANY, ModelConfig, TensorSpec
from tritium.errors import TritiumError, invalid
from tritium.types import DType, InferRequest, Tensor

_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to "
    "each input shape. If you want to specify the full shape including the batch dim in your input dims config, "
    "try setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def check_request(config: ModelConfig, request: InferRequest) -> int:
    """Checks inputs and requested outputs against the configuration.

    Returns:
        The number of inferences: the batch size, 1 for a model that has no batch dimension.

    Raises:
        TritiumError: INVALID_ARGUMENT, or what ``Tensor.strings`` raises.
    """
    prefix = f"[request id: {request.id or '<id_unknown>'}] "
    for output in request.outputs:
        if config.output(output.name) is None:
            raise invalid(f"unexpected inference output '{output.name}' for model '{config.name}'", param=output.name)
    # Triton walks through a hash map, which hands out the few inputs of a request from the last to the first.
    inputs = list(reversed(request.inputs.values()))
    _check_count(config, inputs, prefix)
    batch = _batch_size(config, inputs, prefix) if config.max_batch_size > 0 else 1
    for tensor in inputs:
        spec = config.input(tensor.name)
        if spec is None:
            raise invalid(f"unexpected inference input '{tensor.name}' for model '{config.name}'", param=tensor.name)
        _check_tensor(config, spec, tensor, prefix)
    if batch == 0:
        raise invalid(f"{prefix}batch size is 0 for model '{config.name}', expected at least 1", param=inputs[0].name)
    return batch


def _check_count(config: ModelConfig, inputs: Sequence[Tensor], prefix: str) -> None:
    """Only the number of inputs counts, as in Triton: a backend must look whether it got those that it needs."""
    required = [spec.name for spec in config.inputs if not spec.optional]
    most, got = len(config.inputs), len(inputs)
    if len(required) <= got <= most:
        return
    names = [tensor.name for tensor in inputs]
    missing = [name for name in required if name not in names]
    expected = f"{most} inputs" if len(required) == most else f"number of inputs between {len(required)} and {most}"
    # The recorded server loses the opening bracket of an empty list.
    lacking = _names(missing) if missing else "]"
    raise invalid(
        f"{prefix}expected {expected} but got {got} inputs for model '{config.name}'. Got input(s) "
        f"{_names(names)}, but missing required input(s) {lacking}. Please provide all required input(s).",
        param=missing[0] if missing else "inputs",
    )


def _batch_size(config: ModelConfig, inputs: Iterable[Tensor], prefix: str) -> int:
    """The first dimension of all inputs; 0 where they say so."""
    batch: int | None = None
    for tensor in inputs:
        if not tensor.shape:
            raise invalid(
                f"{prefix}input '{tensor.name}' has no shape but model requires batch dimension for '{config.name}'",
                param=tensor.name,
            )
        if tensor.shape[0] < 0:
            raise _unspecified(config, tensor, prefix)
        if batch is not None and tensor.shape[0] != batch:
            raise invalid(
                f"{prefix}input '{tensor.name}' batch size does not match other inputs for '{config.name}'",
                param=tensor.name,
            )
        batch = tensor.shape[0]
        if batch > config.max_batch_size:
            raise invalid(
                f"{prefix}inference request batch-size must be <= {config.max_batch_size} for '{config.name}'",
                param=tensor.name,
            )
    return 1 if batch is None else batch


def _unspecified(config: ModelConfig, tensor: Tensor, prefix: str) -> TritiumError:
    return invalid(
        f"{prefix}All input dimensions should be specified for input '{tensor.name}' for model '{config.name}', "
        f"got {_list(tensor.shape)}",
        param=tensor.name,
    )


def _check_tensor(config: ModelConfig, spec: TensorSpec, tensor: Tensor, prefix: str) -> None:
    if tensor.dtype is not spec.dtype:
        raise invalid(
            f"{prefix}inference input '{spec.name}' data-type is '{tensor.dtype.value}', "
            f"but model '{config.name}' expects '{spec.dtype.value}'",
            param=spec.name,
        )
    if any(size < 0 for size in tensor.shape):
        raise _unspecified(config, tensor, prefix)
    batched = config.max_batch_size > 0
    expected = (ANY, *spec.dims) if batched else spec.dims
    if len(expected) != len(tensor.shape) or any(
        want not in (ANY, size) for want, size in zip(expected, tensor.shape, strict=True)
    ):
        raise invalid(
            f"{prefix}unexpected shape for input '{spec.name}' for model '{config.name}'. "
            f"Expected {_list(expected)}, got {_list(tensor.shape)}.{_BATCH_NOTE if batched else ''}",
            param=spec.name,
        )
    _check_bytes(config, tensor, prefix)


def _check_bytes(config: ModelConfig, tensor: Tensor, prefix: str) -> None:
    # A batch of 0 counts as no batch dimension, as recorded: without data its input misses the bytes of one row.
    elements = prod(tensor.shape[1:] if config.max_batch_size > 0 and not tensor.shape[0] else tensor.shape)
    if tensor.dtype is DType.BYTES:
        found = _count_strings(tensor, prefix)
        if found != elements:
            raise invalid(
                f"{prefix}expected {elements} string elements for inference input '{tensor.name}' "
                f"for model '{config.name}', got {found}",
                param=tensor.name,
            )
        return
    expected = elements * tensor.dtype.numpy.itemsize
    if tensor.data.nbytes != expected:
        raise invalid(
            f"{prefix}input byte size mismatch for input '{tensor.name}' for model '{config.name}'. "
            f"Expected {expected}, got {tensor.data.nbytes}",
            param=tensor.name,
        )


def _count_strings(tensor: Tensor, prefix: str) -> int:
    """Elements of a BYTES tensor, by hopping from length to length without copying any."""
    at, end, count = 0, tensor.data.nbytes, 0
    while at < end:
        if end - at < 4:
            raise _broken(tensor, prefix, f"a length of 4 bytes is cut off at byte {at}")
        (length,) = struct.unpack_from("<I", tensor.data, at)
        if length > end - at - 4:
            raise _broken(tensor, prefix, f"an element of {length} bytes at byte {at + 4} runs past the end at {end}")
        at += 4 + length
        count += 1
    return count


def _broken(tensor: Tensor, prefix: str, why: str) -> TritiumError:
    return invalid(f"{prefix}input '{tensor.name}' holds malformed BYTES: {why}", param=tensor.name)


def _names(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _list(shape: Iterable[int]) -> str:
    return "[" + ",".join(str(size) for size in shape) + "]"


def parse_version(version: str) -> int | None:
    """The number of a version as a client writes it; None for "".

    Raises:
        TritiumError: INVALID_ARGUMENT when it is no integer of 64 bits, or negative.
    """
    if not version:
        return None
    digits = version.removeprefix("-")
    if len(digits) < 20 and digits.isascii() and digits.isdecimal() and int(digits) < 1 << 63:
        if int(version) < 0:
            raise invalid(
                f"invalid model version specified '{version}' , version should be an integral value > 0",
                param="version",
            )
        return int(version)
    raise invalid(
        f"failed to get model version from specified version string '{version}' (details: stol), "
        "version should be an integral value > 0",
        param="version",
    )
