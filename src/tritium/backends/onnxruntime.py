"""``onnxruntime``: ONNX models, through ONNX Runtime's Python package.

Options as in Triton's ONNX Runtime backend (github.com/triton-inference-server/onnxruntime_backend, README).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tritium.backends.options import Accelerator
from tritium.backends.runtime import RuntimeBackend, installed, require
from tritium.backends.signature import ModelTensor, Signature
from tritium.errors import TritiumError, invalid
from tritium.types import DType, Tensor

# ONNX Runtime's names of element types; float 8 and 4-bit types have none in the protocol.
TYPES = {
    "tensor(bool)": DType.BOOL,
    "tensor(uint8)": DType.UINT8,
    "tensor(uint16)": DType.UINT16,
    "tensor(uint32)": DType.UINT32,
    "tensor(uint64)": DType.UINT64,
    "tensor(int8)": DType.INT8,
    "tensor(int16)": DType.INT16,
    "tensor(int32)": DType.INT32,
    "tensor(int64)": DType.INT64,
    "tensor(float16)": DType.FP16,
    "tensor(float)": DType.FP32,
    "tensor(double)": DType.FP64,
    "tensor(bfloat16)": DType.BF16,
    "tensor(string)": DType.BYTES,
}
# TensorProto.BFLOAT16, which numpy has no type for.
ONNX_BF16 = 16
# Levels of ``optimization.graph`` as Triton reads them.
LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}
# Options of the TensorRT provider that Triton calls otherwise.
TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
PRECISIONS = {"FP32": {}, "FP16": {"trt_fp16_enable": "1"}, "INT8": {"trt_int8_enable": "1"}}
# Options of the CUDA provider that Triton also takes as parameters of the model.
CUDA_PARAMETERS = ("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream")
CUDA_VALUES = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
}
PACKAGES = {
    "CUDAExecutionProvider": "onnxruntime-gpu",
    "TensorrtExecutionProvider": "onnxruntime-gpu",
    "OpenVINOExecutionProvider": "onnxruntime-openvino",
}

Provider = tuple[str, dict[str, str]]


class OnnxRuntimeBackend(RuntimeBackend):
    """One session."""

    name = "onnxruntime"
    platform = "onnxruntime_onnx"
    files = ("model.onnx",)
    placements = ("thread", "process")

    _session: Any = None
    _runtime: Any = None
    _run_options: Any = None
    _by_value = False

    @classmethod
    def uses_gpu(cls) -> bool:
        """With the package that has CUDA in it."""
        return installed("onnxruntime-gpu")

    def open(self, path: Path, config: Mapping[str, Any]) -> Signature:
        """Makes the session."""
        self._runtime = ort = require("onnxruntime", self.name, "onnxruntime")
        if path.is_dir():
            path = path / self.files[0]
        providers = self._providers()
        options = self._session_options(ort)
        self._session = ort.InferenceSession(str(path), sess_options=options, providers=providers)
        inputs = [_described(node) for node in self._session.get_inputs()]
        inputs += [_described(node, optional=True) for node in self._session.get_overridable_initializers()]
        return Signature(tuple(inputs), tuple(_described(node) for node in self._session.get_outputs()))

    def prepare(self, config: Mapping[str, Any]) -> None:
        """Tensors without a type in numpy go in and out as values of the runtime."""
        declared = (*self._inputs.values(), *self._outputs.values())
        self._by_value = any(one.dtype is DType.BF16 for one in declared)

    def close(self) -> None:
        """Drops the session."""
        self._session = self._run_options = None

    # -- options --------------------------------------------------------------------------------------------

    def _session_options(self, ort: Any) -> Any:
        wishes, options = self.options, ort.SessionOptions()
        # Errors become exceptions; what else it would print has no reader.
        options.log_severity_level = 3
        level = wishes.graph_level()
        if level not in LEVELS:
            raise invalid(
                f"optimization.graph.level of model '{wishes.model}' is {level}, expected one of "
                f"{', '.join(map(str, LEVELS))}",
                param="optimization",
            )
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[level])
        mode = wishes.choice("execution_mode", ("0", "1"))
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if mode == "1" else ort.ExecutionMode.ORT_SEQUENTIAL
        for key, name in (("intra", "intra_op_num_threads"), ("inter", "inter_op_num_threads")):
            key = f"{key}_op_thread_count"
            setattr(options, name, wishes.number(key) or wishes.setting(key, 0))
        for key, name in (("enable_mem_arena", "enable_cpu_mem_arena"), ("enable_mem_pattern", "enable_mem_pattern")):
            value = wishes.flag(key)
            if value is not None:
                setattr(options, name, value)
        key = "session.use_device_allocator_for_initializers"
        if wishes.flag(key):
            options.add_session_config_entry(key, "1")
        self._run_options = ort.RunOptions()
        shrink = wishes.text("memory.enable_memory_arena_shrinkage")
        if shrink:
            self._run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", shrink)
        return options

    def _providers(self) -> list[Provider]:
        """The execution providers, the preferred ones first; those of GPUs only for an instance on one."""
        found: list[Provider] = []
        if self.context.kind == "gpu":
            found = self._gpu_providers()
        for one in self.options.accelerators("cpu"):
            if one.name != "openvino":
                raise _unknown(self.options.model, "cpu", one, "openvino")
            found.append(("OpenVINOExecutionProvider", {"device_type": "CPU", **one.parameters}))
        there = self._runtime.get_available_providers()
        for name, _ in found:
            if name not in there:
                package = PACKAGES[name]
                raise invalid(
                    f"model '{self.options.model}' wants {name}, which the installed onnxruntime does not have: "
                    f"install {package} in its place",
                    param="optimization",
                )
        return [*found, ("CPUExecutionProvider", {})]

    def _gpu_providers(self) -> list[Provider]:
        device = {"device_id": str(self.context.device_id)}
        cuda: dict[str, str] = {}
        for key in CUDA_PARAMETERS:
            value = self.options.text(key)
            if value:
                cuda[key] = CUDA_VALUES.get(key, {}).get(value, value)
        found: list[Provider] = []
        for one in self.options.accelerators("gpu"):
            if one.name == "tensorrt":
                found.append(("TensorrtExecutionProvider", {**device, **self._tensorrt(one)}))
            elif one.name == "cuda":
                cuda.update(one.parameters)
            else:
                raise _unknown(self.options.model, "gpu", one, "tensorrt, cuda")
        return [*found, ("CUDAExecutionProvider", {**device, **cuda})]

    def _tensorrt(self, accelerator: Accelerator) -> dict[str, str]:
        options = {"trt_cuda_graph_enable": "1"} if self.options.cuda_graphs() else {}
        for key, value in accelerator.parameters.items():
            if key == "precision_mode" and value in PRECISIONS:
                options.update(PRECISIONS[value])
            elif key == "precision_mode":
                raise invalid(
                    f"precision_mode of model '{self.options.model}' is '{value}', expected one of "
                    f"{', '.join(PRECISIONS)}",
                    param=key,
                )
            elif key in TENSORRT_NAMES or key.startswith("trt_"):
                options[TENSORRT_NAMES.get(key, key)] = value
            else:
                raise invalid(
                    f"unknown parameter '{key}' of the accelerator tensorrt of model '{self.options.model}'", param=key
                )
        return options

    # -- batches --------------------------------------------------------------------------------------------

    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """Runs the session."""
        if self._by_value:
            values = {name: self._value(tensor) for name, tensor in inputs.items()}
            results = self._session.run_with_ort_values(list(outputs), values, self._run_options)
            return {name: _from_value(name, value) for name, value in zip(outputs, results, strict=True)}
        arrays = {name: _array(tensor) for name, tensor in inputs.items()}
        results = self._session.run(list(outputs), arrays, self._run_options)
        return {name: Tensor.from_numpy(name, array) for name, array in zip(outputs, results, strict=True)}

    def _value(self, tensor: Tensor) -> Any:
        make = self._runtime.OrtValue
        if tensor.dtype is DType.BYTES:
            raise invalid(
                f"input '{tensor.name}' of model '{self.context.model}' is text in a model with BF16 tensors: ONNX "
                "Runtime's Python package takes one or the other",
                param=tensor.name,
            )
        if tensor.dtype is DType.BF16:
            return make.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(tensor.numpy()), ONNX_BF16)
        return make.ortvalue_from_numpy(tensor.numpy())


def _described(node: Any, optional: bool = False) -> ModelTensor:
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape or ())
    return ModelTensor(node.name, TYPES.get(node.type), shape, optional, node.type)


def _array(tensor: Tensor) -> Any:
    """The elements as the runtime takes them: texts have to be UTF-8.

    Raises:
        TritiumError: INVALID_ARGUMENT naming the first element that is not.
    """
    array = tensor.numpy()
    if tensor.dtype is not DType.BYTES:
        return array
    texts = np.empty(array.size, dtype=np.object_)
    for index, content in enumerate(array.reshape(-1)):
        try:
            texts[index] = content.decode()
        except UnicodeDecodeError:
            raise invalid(
                f"element {index} of input '{tensor.name}' is not UTF-8, expected text: the model takes strings",
                param=tensor.name,
            ) from None
    return texts.reshape(array.shape)


def _from_value(name: str, value: Any) -> Tensor:
    if value.data_type() != "tensor(bfloat16)":
        return Tensor.from_numpy(name, value.numpy())
    # There is no numpy array of it; the value owns the memory, so it is copied.
    size = value.tensor_size_in_bytes()
    content = bytearray(ctypes.string_at(value.data_ptr(), size)) if size else bytearray()
    return Tensor(name, DType.BF16, tuple(value.shape()), memoryview(content))


def _unknown(model: str, kind: str, accelerator: Accelerator, known: str) -> TritiumError:
    return invalid(
        f"unknown {kind}_execution_accelerator '{accelerator.name}' is requested for model '{model}', expected {known}",
        param="optimization",
    )
