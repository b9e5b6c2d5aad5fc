"""``openvino``: OpenVINO's own format (model.xml, model.bin) and ONNX models, on the CPU.

Parameters as in Triton's OpenVINO backend (github.com/triton-inference-server/openvino_backend, README).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tritium.backends.runtime import RuntimeBackend, require
from tritium.backends.signature import ModelTensor, Signature, declared_inputs
from tritium.errors import invalid
from tritium.types import DType, Tensor

# OpenVINO's names of element types.
TYPES = {
    "boolean": DType.BOOL,
    "u8": DType.UINT8,
    "u16": DType.UINT16,
    "u32": DType.UINT32,
    "u64": DType.UINT64,
    "i8": DType.INT8,
    "i16": DType.INT16,
    "i32": DType.INT32,
    "i64": DType.INT64,
    "f16": DType.FP16,
    "f32": DType.FP32,
    "f64": DType.FP64,
    "bf16": DType.BF16,
}
# Parameters of older versions of Triton's backend, with today's names.
RENAMED = {
    "CPU_THREADS_NUM": "INFERENCE_NUM_THREADS",
    "CPU_THROUGHPUT_STREAMS": "NUM_STREAMS",
    "ENFORCE_BF16": "HINT_BF16",
    "SKIP_DYNAMIC_BATCHSIZE": "SKIP_OV_DYNAMIC_BATCHSIZE",
}
HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")


class OpenVinoBackend(RuntimeBackend):
    """One infer request of a compiled model."""

    name = "openvino"
    files = ("model.xml", "model.onnx")
    placements = ("thread", "process")

    _openvino: Any = None
    _request: Any = None
    _sources: dict[str, int]
    _targets: dict[str, int]
    # Rows that every batch is filled up to, and the batch size that the model itself insists on; 0 for none.
    _pad_to = _fixed = 0

    def open(self, path: Path, config: Mapping[str, Any]) -> Signature:
        """Reads and compiles the model."""
        if self.context.kind == "gpu":
            raise invalid(
                f"instance_group of model '{self.options.model}' has KIND_GPU, expected KIND_CPU: the backend openvino "
                "runs on the CPU",
                param="kind",
            )
        self._openvino = ov = _import()
        core = ov.Core()
        extension = self.options.text("CPU_EXTENSION_PATH")
        if extension:
            core.add_extension(extension)
        model = core.read_model(str(path))
        most = config.get("max_batch_size", 0)
        padding, fixed = self._flag("ENABLE_BATCH_PADDING"), self._flag("SKIP_OV_DYNAMIC_BATCHSIZE")
        if self._flag("RESHAPE_IO_LAYERS"):
            self._reshape(model, config)
        elif most > 0 and not (padding or fixed):
            _open_batch(model)
        self._pad_to = most if padding else 0
        self._fixed = most if padding or fixed else 0
        properties = self._properties()
        self._request = core.compile_model(model, "CPU", properties).create_infer_request()
        compiled = self._request.get_compiled_model()
        self._sources = {_name_of(port, config, "input"): index for index, port in enumerate(compiled.inputs)}
        self._targets = {_name_of(port, config, "output"): index for index, port in enumerate(compiled.outputs)}
        return Signature(
            tuple(self._described(port, config, "input") for port in compiled.inputs),
            tuple(self._described(port, config, "output") for port in compiled.outputs),
        )

    def close(self) -> None:
        """Drops the compiled model."""
        self._request = None

    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """Runs the infer request; what it gives is copied, since the next run writes to the same memory."""
        rows = next((tensor.shape[0] for tensor in inputs.values() if tensor.shape), 0)
        padded = self._pad_to > rows > 0
        given = {
            self._sources[name]: self._value(_padded(tensor, self._pad_to) if padded else tensor)
            for name, tensor in inputs.items()
        }
        self._request.infer(given, share_inputs=True)
        found: dict[str, Tensor] = {}
        for name in outputs:
            result = self._request.get_output_tensor(self._targets[name])
            dtype = TYPES[result.get_element_type().get_type_name()]
            array = np.array(_words(result.data) if dtype is DType.BF16 else result.data)
            found[name] = Tensor.from_numpy(name, array[:rows] if padded else array, dtype)
        return found

    # -- options --------------------------------------------------------------------------------------------

    def _text(self, key: str) -> str:
        """A parameter by today's name, or by an older one."""
        older = [old for old, new in RENAMED.items() if new == key]
        return next((text for name in (key, *older) if (text := self.options.text(name))), "")

    def _flag(self, key: str) -> bool:
        value = self._text(key).upper()
        if value not in ("", "YES", "NO", "TRUE", "FALSE"):
            raise self.options.wrong(key, value, "YES or NO")
        return value in ("YES", "TRUE")

    def _count(self, key: str) -> str:
        value = self._text(key)
        if value and not value.isdecimal():
            raise self.options.wrong(key, value, "a whole number from 0")
        return value

    def _properties(self) -> dict[str, str]:
        # COMPILATION_NUM_THREADS is none of the CPU's properties, and so among those without meaning.
        found = {"INFERENCE_NUM_THREADS": self._count("INFERENCE_NUM_THREADS")}
        found["PERFORMANCE_HINT"] = self.options.choice("PERFORMANCE_HINT", HINTS)
        streams = self._text("NUM_STREAMS").upper()
        if streams and streams not in ("AUTO", "NUMA") and not streams.isdecimal():
            raise self.options.wrong("NUM_STREAMS", streams, "a whole number, AUTO or NUMA")
        found["NUM_STREAMS"] = streams
        if self._flag("HINT_BF16"):
            found["INFERENCE_PRECISION_HINT"] = "bf16"
        pinned = self.options.choice("CPU_BIND_THREAD", ("YES", "NO", "NUMA"))
        if pinned:
            found["ENABLE_CPU_PINNING"] = "NO" if pinned == "NO" else "YES"
        return {key: value for key, value in found.items() if value}

    def _reshape(self, model: Any, config: Mapping[str, Any]) -> None:
        """Gives the inputs the shapes that the configuration declares."""
        front = (-1,) if config.get("max_batch_size", 0) > 0 else ()
        shapes = {one.name: one.shape for one in declared_inputs(dict(config)) if one.shape is not None}
        model.reshape(
            {
                port: self._openvino.PartialShape([*front, *shapes[name]])
                for port in model.inputs
                if (name := _name_of(port, config, "input")) in shapes
            }
        )

    # -- tensors --------------------------------------------------------------------------------------------

    def _described(self, port: Any, config: Mapping[str, Any], kind: str) -> ModelTensor:
        partial = port.get_partial_shape()
        shape = None
        if partial.rank.is_static:
            shape = tuple(size.get_length() if size.is_static else -1 for size in partial)
        if self._fixed and shape and shape[0] == self._fixed:
            # It counts as a batch dimension: either every batch is filled up to that size, or it was asked for.
            shape = (-1, *shape[1:])
        element = port.get_element_type().get_type_name()
        return ModelTensor(_name_of(port, config, kind), TYPES.get(element), shape, kind=element)

    def _value(self, tensor: Tensor) -> Any:
        if tensor.dtype is not DType.BF16:
            return tensor.numpy()
        value = self._openvino.Tensor(self._openvino.Type.bf16, self._openvino.Shape(list(tensor.shape)))
        _words(value.data)[...] = tensor.numpy()
        return value


def _import() -> Any:
    """The package, without the telemetry that it would send home when it is imported."""
    if "openvino" not in sys.modules:
        # This is how Python marks a module that is not to be found; OpenVINO then does without it.
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return require("openvino", OpenVinoBackend.name, "openvino")


def _open_batch(model: Any) -> None:
    """Makes a first dimension of fixed size a batch dimension, where the model can have one."""
    shapes = {port: port.get_partial_shape() for port in model.inputs}
    if any(shape.rank.is_dynamic or not len(shape) for shape in shapes.values()):
        return
    if all(shape[0].is_dynamic for shape in shapes.values()):
        return
    for shape in shapes.values():
        shape[0] = -1
    model.reshape(shapes)


def _name_of(port: Any, config: Mapping[str, Any], kind: str) -> str:
    """The name that the configuration uses for a port, which may have several, or none but its node's."""
    names = sorted(port.get_names())
    declared = {entry["name"] for entry in config.get(kind, ())}
    return next(
        (name for name in names if name in declared), names[0] if names else port.get_node().get_friendly_name()
    )


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with rows of zeros up to ``rows``."""
    array = tensor.numpy()
    full = np.zeros((rows, *array.shape[1:]), dtype=array.dtype)
    full[: array.shape[0]] = array
    return Tensor.from_numpy(tensor.name, full, tensor.dtype)


def _words(array: Any) -> Any:
    """The 16-bit words of BF16 elements, which OpenVINO shows as FP16."""
    return array.view(np.uint16)
