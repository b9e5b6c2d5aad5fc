"""What a model's own file says of its tensors, beside what its configuration says: completed by it, checked against it.

The rules for ``max_batch_size`` and the tensors are those of Triton's ONNX Runtime, TensorFlow and TensorRT backends.
A configuration is in the form of ``ModelConfig.to_json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tritium.errors import TritiumError, invalid
from tritium.types import DType

# What Triton gives a model that can take batches and says nothing of them, without ``default-max-batch-size``.
DEFAULT_MAX_BATCH = 4


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One input or output as the model's file has it.

    Attributes:
        dtype: None when the file does not say, or when it is of a kind that no protocol carries.
        shape: sizes with the batch dimension, -1 for any; None when the file does not say.
        optional: an input that may be left out.
        kind: the type in the words of the runtime, for error messages.
    """

    name: str
    dtype: DType | None
    shape: tuple[int, ...] | None
    optional: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Signature:
    """All inputs and outputs of a model.

    Attributes:
        max_batch: the largest batch that the file allows; 0 for no limit.
        complete: whether a configuration can be made of it.
    """

    inputs: tuple[ModelTensor, ...]
    outputs: tuple[ModelTensor, ...]
    max_batch: int = 0
    complete: bool = True

    def takes_batches(self) -> bool:
        """Whether the first dimension of every tensor is open, and so may be a batch."""
        return all(tensor.shape is not None and tensor.shape[:1] == (-1,) for tensor in (*self.inputs, *self.outputs))


@dataclass(frozen=True, slots=True)
class Declared:
    """One tensor that the server gives to a model or expects of it.

    Attributes:
        shape: as the backend sees it, without the batch dimension; None when anything goes.
        shown: how error messages call it.
        flat: the requests of a batch lie one behind the other in one dimension.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...] | None
    shown: str
    optional: bool = False
    flat: bool = False


def dtype_of(name: str) -> DType:
    """The type that a configuration calls so (TYPE_FP32, ...)."""
    return DType.BYTES if name == "TYPE_STRING" else DType.of(name.removeprefix("TYPE_"))


def type_name(dtype: DType) -> str:
    """How a configuration calls a type."""
    return "TYPE_STRING" if dtype is DType.BYTES else f"TYPE_{dtype.value}"


def declared_inputs(config: dict[str, Any]) -> Iterator[Declared]:
    """Every tensor that a request brings or that the server adds: made inputs, controls and state of sequences."""
    for entry in config.get("input", ()):
        shape = _backend_shape(entry)
        flat = bool(entry.get("allow_ragged_batch"))
        yield Declared(
            entry["name"],
            dtype_of(entry["data_type"]),
            None if flat else shape,
            f"input '{entry['name']}'",
            bool(entry.get("optional")),
            flat,
        )
    for made in config.get("batch_input", ()):
        for name in made.get("target_name", ()):
            yield Declared(name, dtype_of(made["data_type"]), None, f"batch input '{name}'", flat=True)
    sequences = config.get("sequence_batching") or {}
    for control in sequences.get("control_input", ()):
        for one in control.get("control", ()):
            dtype = _control_type(one)
            yield Declared(control["name"], dtype, (1,), f"sequence control '{control['name']}'")
    for state in sequences.get("state", ()):
        name = state["input_name"]
        yield Declared(name, dtype_of(state["data_type"]), _ints(state["dims"]), f"state input '{name}'")


def declared_outputs(config: dict[str, Any]) -> Iterator[Declared]:
    """Every tensor that the server expects: declared outputs, then state outputs that are none of them."""
    scattered = {name for made in config.get("batch_output", ()) for name in made.get("target_name", ())}
    seen: set[str] = set()
    for entry in config.get("output", ()):
        name = entry["name"]
        seen.add(name)
        shape = None if name in scattered else _backend_shape(entry)
        yield Declared(name, dtype_of(entry["data_type"]), shape, f"output '{name}'", flat=name in scattered)
    for state in (config.get("sequence_batching") or {}).get("state", ()):
        name = state["output_name"]
        if name not in seen:
            yield Declared(name, dtype_of(state["data_type"]), _ints(state["dims"]), f"state output '{name}'")


def complete(config: dict[str, Any], signature: Signature, default_batch: int) -> None:
    """Fills in the tensors that the configuration leaves out, the batch size, and the batcher that goes with it.

    As in Triton, a configuration that has inputs and outputs stays as it is.

    Raises:
        TritiumError: INVALID_ARGUMENT when the model takes no batches and the configuration wants them, or its file
            does not say enough.
    """
    if config.get("input") and config.get("output"):
        return
    name = config["name"]
    if not signature.complete:
        lacking = "output" if config.get("input") else "input and output" if not config.get("output") else "input"
        raise invalid(
            f"model '{name}' declares no {lacking}, and its file does not say of what type and shape they are: add "
            f"{lacking} to config.pbtxt",
            param=lacking.partition(" ")[0],
        )
    if signature.takes_batches():
        if not config.get("max_batch_size"):
            config["max_batch_size"] = min(default_batch, signature.max_batch) if signature.max_batch else default_batch
        scheduled = any(config.get(key) is not None for key in ("dynamic_batching", "sequence_batching"))
        if config["max_batch_size"] > 1 and not scheduled:
            config["dynamic_batching"] = {}
    elif config.get("max_batch_size"):
        raise invalid(
            f"autofill failed for model '{name}': model does not support batching while non-zero max_batch_size is "
            "specified",
            param="max_batch_size",
        )
    batched = config["max_batch_size"] > 0
    if not config.get("input"):
        taken = {declared.name for declared in declared_inputs(config)}
        config["input"] = [_entry(name, one, batched, "input") for one in signature.inputs if one.name not in taken]
    if not config.get("output"):
        states = {declared.name for declared in declared_outputs(config)}
        config["output"] = [_entry(name, one, batched, "output") for one in signature.outputs if one.name not in states]


def _entry(model: str, tensor: ModelTensor, batched: bool, kind: str) -> dict[str, Any]:
    if tensor.dtype is None or tensor.shape is None:
        what = tensor.kind or "a type that it does not say"
        raise invalid(
            f"{kind} '{tensor.name}' of model '{model}' is of type {what}, expected a tensor of known type and shape",
            param=kind,
        )
    shape = list(tensor.shape[1:] if batched else tensor.shape)
    entry: dict[str, Any] = {"name": tensor.name, "data_type": type_name(tensor.dtype), "dims": shape or [1]}
    if not shape and batched:
        entry["reshape"] = {"shape": []}
    if tensor.optional:
        entry["optional"] = True
    return entry


def check(config: dict[str, Any], signature: Signature) -> None:
    """Checks that the model can be given, and gives, what its configuration declares.

    Raises:
        TritiumError: INVALID_ARGUMENT naming the tensor, what is declared and what the model has.
    """
    name = config["name"]
    batched = config.get("max_batch_size", 0) > 0
    if signature.max_batch and config.get("max_batch_size", 0) > signature.max_batch:
        raise invalid(
            f"unable to load model '{name}', configuration has max_batch_size {config['max_batch_size']}, the model "
            f"takes at most {signature.max_batch}",
            param="max_batch_size",
        )
    inputs = list(declared_inputs(config))
    for declared in inputs:
        _check_tensor(name, declared, signature.inputs, "inputs", batched)
    names = {declared.name for declared in inputs}
    missing = [one.name for one in signature.inputs if not one.optional and one.name not in names]
    if missing:
        raise invalid(
            f"unable to load model '{name}', configuration expects {len(inputs)} inputs, model provides "
            f"{len(signature.inputs)}: it lacks {_quoted(missing)}",
            param="input",
        )
    for declared in declared_outputs(config):
        _check_tensor(name, declared, signature.outputs, "outputs", batched)


def _check_tensor(model: str, declared: Declared, there: Sequence[ModelTensor], kind: str, batched: bool) -> None:
    found = next((one for one in there if one.name == declared.name), None)
    if found is None:
        raise invalid(
            f"unable to load model '{model}', configuration has {declared.shown}, the model has the {kind} "
            f"{_quoted([one.name for one in there])}",
            param=declared.name,
        )
    if found.dtype is None and found.kind:
        raise invalid(
            f"unable to load model '{model}', {declared.shown} is of type {found.kind}, expected a tensor of a type "
            "that the protocol has",
            param=declared.name,
        )
    if found.dtype is not None and found.dtype is not declared.dtype:
        raise invalid(
            f"unable to load model '{model}', configuration expects datatype {type_name(declared.dtype)} for "
            f"{declared.shown}, model provides {type_name(found.dtype)}",
            param=declared.name,
        )
    if found.shape is None or declared.shape is None:
        return
    if not batched and not found.shape and all(size == 1 for size in declared.shape):
        return
    _check_shape(model, declared, found.shape, batched, exact=kind == "inputs")


def _check_shape(model: str, declared: Declared, shape: tuple[int, ...], batched: bool, *, exact: bool) -> None:
    """An input must take every size that is declared; an output need only be able to have the declared one."""
    assert declared.shape is not None
    full = (-1, *declared.shape) if batched else declared.shape
    if batched and shape[:1] != (-1,):
        raise invalid(
            f"unable to load model '{model}', {declared.shown} has shape {list(shape)} in the model: for a "
            "max_batch_size above 0 its first dimension must be -1 there; set max_batch_size to 0 and write all "
            "dimensions into dims",
            param="max_batch_size",
        )
    fits = len(full) == len(shape) and all(
        has == -1 or has == wants or (wants == -1 and not exact) for wants, has in zip(full, shape, strict=True)
    )
    if not fits:
        raise invalid(
            f"unable to load model '{model}', configuration has shape {list(full)} for {declared.shown}"
            f"{' (with its batch dimension)' if batched else ''}, model provides {list(shape)}",
            param=declared.name,
        )


def input_missing(model: str, name: str) -> TritiumError:
    """A request lacks an input that the model cannot do without."""
    return invalid(f"input '{name}' of model '{model}' is missing from the request", param=name)


def _backend_shape(entry: dict[str, Any]) -> tuple[int, ...]:
    reshape = entry.get("reshape")
    return _ints(entry["dims"] if reshape is None else reshape.get("shape", ()))


def _control_type(control: dict[str, Any]) -> DType:
    for values, dtype in (
        ("int32_false_true", DType.INT32),
        ("fp32_false_true", DType.FP32),
        ("bool_false_true", DType.BOOL),
    ):
        if control.get(values):
            return dtype
    return dtype_of(control["data_type"])


def _ints(dims: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(size) for size in dims)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
