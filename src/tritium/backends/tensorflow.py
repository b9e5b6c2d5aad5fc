"""``tensorflow``: SavedModels (model.savedmodel), through TensorFlow's Python package, in a process of their own.

Options as in Triton's TensorFlow backend (github.com/triton-inference-server/tensorflow_backend, README).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tritium.backends.runtime import RuntimeBackend, installed, require
from tritium.backends.signature import ModelTensor, Signature
from tritium.errors import TritiumError, invalid
from tritium.types import DType, Tensor

# TensorFlow's names of element types.
TYPES = {
    "bool": DType.BOOL,
    "uint8": DType.UINT8,
    "uint16": DType.UINT16,
    "uint32": DType.UINT32,
    "uint64": DType.UINT64,
    "int8": DType.INT8,
    "int16": DType.INT16,
    "int32": DType.INT32,
    "int64": DType.INT64,
    "float16": DType.FP16,
    "float32": DType.FP32,
    "float64": DType.FP64,
    "bfloat16": DType.BF16,
    "string": DType.BYTES,
}
TAG, SIGNATURE = "serve", "serving_default"


class TensorFlowBackend(RuntimeBackend):
    """One signature of a SavedModel."""

    name = "tensorflow"
    platform = "tensorflow_savedmodel"
    files = ("model.savedmodel",)

    _tensorflow: Any = None
    _model: Any = None
    _function: Any = None

    @classmethod
    def uses_gpu(cls) -> bool:
        """With the package that can use GPUs."""
        return installed("tensorflow")

    def open(self, path: Path, config: Mapping[str, Any]) -> Signature:
        """Loads the model and picks the signature."""
        # Read by TensorFlow's native code when it is loaded; without it each start prints a page.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        self._tensorflow = tf = require("tensorflow", self.name, "tensorflow-cpu")
        if not path.is_dir():
            raise invalid(
                f"'{path.name}' of model '{self.options.model}' is a file, expected the folder of a SavedModel"
            )
        self._set_switches()
        self._model = tf.saved_model.load(str(path), tags=[self.options.text("TF_GRAPH_TAG", TAG)])
        self._function = self._pick(self._model.signatures)
        positional, named = self._function.structured_input_signature
        if positional:
            raise invalid(
                f"the signature of model '{self.options.model}' has inputs without a name", param="TF_SIGNATURE_DEF"
            )
        return Signature(
            tuple(_described(name, named[name]) for name in sorted(named)),
            tuple(_described(name, spec) for name, spec in sorted(self._function.structured_outputs.items())),
        )

    def close(self) -> None:
        """Drops the model; what TensorFlow keeps goes with the process."""
        self._model = self._function = None

    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """Calls the signature."""
        found = self._function(**{name: self._incoming(tensor) for name, tensor in inputs.items()})
        return {name: self._outgoing(name, found[name]) for name in outputs}

    # -- options --------------------------------------------------------------------------------------------

    def _set_switches(self) -> None:
        """The options that TensorFlow has switches for; the process has no other model in it."""
        wishes, tf = self.options, self._tensorflow
        if self.context.kind == "cpu":
            tf.config.set_visible_devices([], "GPU")
        elif self.context.kind == "gpu":
            self._choose_gpu()
        for key, switch in (
            ("TF_NUM_INTRA_THREADS", tf.config.threading.set_intra_op_parallelism_threads),
            ("TF_NUM_INTER_THREADS", tf.config.threading.set_inter_op_parallelism_threads),
        ):
            count = wishes.number(key)
            if count:
                switch(count)
        level = wishes.graph_level()
        if level:
            tf.config.optimizer.set_jit("autoclustering" if level > 0 else False)
        if self.context.kind != "gpu":
            return
        for one in wishes.accelerators("gpu"):
            if one.name != "auto_mixed_precision":
                raise _unavailable(wishes.model, one.name)
            tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})

    def _choose_gpu(self) -> None:
        gpus = self._tensorflow.config.list_physical_devices("GPU")
        if self.context.device_id >= len(gpus):
            raise invalid(
                f"instance_group of model '{self.options.model}' has KIND_GPU, but the installed TensorFlow sees "
                f"{len(gpus)} GPUs: use KIND_CPU or install tensorflow[and-cuda]",
                param="kind",
            )
        gpu = gpus[self.context.device_id]
        self._tensorflow.config.set_visible_devices([gpu], "GPU")
        self._tensorflow.config.experimental.set_memory_growth(gpu, True)

    def _pick(self, signatures: Mapping[str, Any]) -> Any:
        wanted = self.options.text("TF_SIGNATURE_DEF") or (SIGNATURE if SIGNATURE in signatures else "")
        name = wanted or next(iter(signatures), "")
        if name not in signatures:
            raise invalid(
                f"model '{self.options.model}' has the signatures {', '.join(sorted(signatures)) or 'none'}, expected "
                f"{wanted or 'at least one'}",
                param="TF_SIGNATURE_DEF",
            )
        return signatures[name]

    # -- tensors --------------------------------------------------------------------------------------------

    def _incoming(self, tensor: Tensor) -> Any:
        value = self._tensorflow.constant(tensor.numpy())
        return self._tensorflow.bitcast(value, self._tensorflow.bfloat16) if tensor.dtype is DType.BF16 else value

    def _outgoing(self, name: str, value: Any) -> Tensor:
        array = value.numpy()
        if value.dtype == self._tensorflow.bfloat16:
            return Tensor.from_numpy(name, np.asarray(array).view(np.uint16), DType.BF16)
        return Tensor.from_numpy(name, np.asarray(array, dtype=np.object_ if isinstance(array, bytes) else None))


def _described(name: str, spec: Any) -> ModelTensor:
    shape = None if spec.shape.rank is None else tuple(-1 if size is None else size for size in spec.shape)
    return ModelTensor(name, TYPES.get(spec.dtype.name), shape, kind=spec.dtype.name)


def _unavailable(model: str, name: str) -> TritiumError:
    return invalid(
        f"gpu_execution_accelerator '{name}' of model '{model}' is not there, expected auto_mixed_precision: today's "
        "TensorFlow has no other one",
        param="optimization",
    )
