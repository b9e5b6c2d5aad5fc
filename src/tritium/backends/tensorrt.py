"""``tensorrt``: TensorRT engines (model.plan), through the vendor's Python package, in a process of their own.

Written against the documented API of TensorRT 10 (docs.nvidia.com/deeplearning/tensorrt, ICudaEngine,
IExecutionContext) and not run yet: the package wants a GPU. The buffers are torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tritium.backends.runtime import RuntimeBackend, require
from tritium.backends.signature import ModelTensor, Signature
from tritium.errors import Code, TritiumError, invalid
from tritium.types import DType, Tensor

# TensorRT's names of element types, in ours and in torch's. Types of 8 bits and fewer for weights have none.
TYPES = {
    "FLOAT": (DType.FP32, "float32"),
    "HALF": (DType.FP16, "float16"),
    "BF16": (DType.BF16, "bfloat16"),
    "INT8": (DType.INT8, "int8"),
    "UINT8": (DType.UINT8, "uint8"),
    "INT32": (DType.INT32, "int32"),
    "INT64": (DType.INT64, "int64"),
    "BOOL": (DType.BOOL, "bool"),
}
STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED")


class TensorRtBackend(RuntimeBackend):
    """One execution context of an engine, with its first optimization profile."""

    name = "tensorrt"
    platform = "tensorrt_plan"
    files = ("model.plan",)

    _torch: Any = None
    _engine: Any = None
    _context: Any = None
    _stream: Any = None
    _runtime: Any = None

    @classmethod
    def uses_gpu(cls) -> bool:
        """Always: there is nothing else that it runs on."""
        return True

    def open(self, path: Path, config: Mapping[str, Any]) -> Signature:
        """Deserializes the engine."""
        trt = require("tensorrt", self.name, "tensorrt")
        self._torch = torch = require("torch", self.name, "torch")
        if self.context.kind != "gpu" or not torch.cuda.is_available():
            raise invalid(
                f"model '{self.options.model}' is a TensorRT engine, expected instances of KIND_GPU and a torch that "
                "sees a CUDA device",
                param="kind",
            )
        torch.cuda.set_device(self.context.device_id)
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise TritiumError(
                Code.INTERNAL,
                f"'{path.name}' of model '{self.options.model}' is no engine for this GPU and TensorRT "
                f"{trt.__version__}",
            )
        strategy = self.options.choice("execution_context_allocation_strategy", STRATEGIES[:2]) or STRATEGIES[0]
        self._context = self._engine.create_execution_context(getattr(trt.ExecutionContextAllocationStrategy, strategy))
        self._stream = torch.cuda.Stream(self.context.device_id)
        return self._described(trt)

    def close(self) -> None:
        """Drops context and engine."""
        self._context = self._engine = self._runtime = self._stream = None

    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """Runs the context; returns when the outputs are in the host's memory."""
        torch, context = self._torch, self._context
        with torch.cuda.stream(self._stream):
            held: dict[str, Any] = {}
            for name, tensor in inputs.items():
                held[name] = self._incoming(tensor)
                if not context.set_input_shape(name, tensor.shape):
                    raise invalid(
                        f"input '{name}' of model '{self.context.model}' has shape {list(tensor.shape)}, which the "
                        "engine's optimization profile does not have",
                        param=name,
                    )
                context.set_tensor_address(name, held[name].data_ptr())
            for name in self._targets:
                shape = tuple(context.get_tensor_shape(name))
                dtype = getattr(torch, TYPES[self._engine.get_tensor_dtype(name).name][1])
                held[name] = torch.empty(shape, dtype=dtype, device="cuda")
                context.set_tensor_address(name, held[name].data_ptr())
            if not context.execute_async_v3(self._stream.cuda_stream):
                raise TritiumError(Code.INTERNAL, f"TensorRT cannot run model '{self.context.model}'")
            found = {name: held[name].to("cpu") for name in outputs}
        self._stream.synchronize()
        return {name: _outgoing(torch, name, value) for name, value in found.items()}

    def _incoming(self, tensor: Tensor) -> Any:
        array = tensor.numpy()
        value = self._torch.from_numpy(array if array.flags.writeable else array.copy())
        return (value.view(self._torch.bfloat16) if tensor.dtype is DType.BF16 else value).to("cuda")

    def _described(self, trt: Any) -> Signature:
        """The tensors of the engine; the batch is limited by the optimization profile."""
        engine = self._engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        sources = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self._targets = [name for name in names if name not in sources]
        most = 0
        for name in sources:
            shape = tuple(engine.get_tensor_shape(name))
            if shape[:1] == (-1,):
                largest = engine.get_tensor_profile_shape(name, 0)[2][0]
                most = min(most, largest) if most else largest
        return Signature(
            tuple(self._tensor(name) for name in sources), tuple(self._tensor(name) for name in self._targets), most
        )

    def _tensor(self, name: str) -> ModelTensor:
        kind = self._engine.get_tensor_dtype(name).name
        dtype = TYPES.get(kind, (None, ""))[0]
        return ModelTensor(name, dtype, tuple(self._engine.get_tensor_shape(name)), kind=kind)


def _outgoing(torch: Any, name: str, value: Any) -> Tensor:
    if value.dtype is torch.bfloat16:
        return Tensor.from_numpy(name, value.view(torch.uint16).numpy(), DType.BF16)
    return Tensor.from_numpy(name, value.numpy())
