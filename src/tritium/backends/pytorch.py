"""``pytorch``: TorchScript models (model.pt) and programs of ``torch.export`` (model.pt2), in a process of their own.

Names of tensors and parameters as in Triton's PyTorch backend (github.com/triton-inference-server/pytorch_backend,
README).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tritium.backends.pytorch_call import (
    Argument,
    Call,
    describe_program,
    describe_script,
    holds_libraries,
    is_program,
    positions,
)
from tritium.backends.runtime import RuntimeBackend, is_cpu_build, require
from tritium.backends.signature import Declared, ModelTensor, Signature, declared_inputs, declared_outputs
from tritium.errors import Code, TritiumError, invalid
from tritium.types import DType, Tensor

# What has a meaning for TorchScript, but not for exported programs.
SCRIPT_ONLY = (
    "DISABLE_OPTIMIZED_EXECUTION",
    "ENABLE_JIT_EXECUTOR",
    "ENABLE_JIT_PROFILING",
    "ENABLE_TENSOR_FUSER",
    "optimization.graph",
)
Found = Any  # a torch.Tensor or a list of str


class PyTorchBackend(RuntimeBackend):
    """One module on one device."""

    name = "pytorch"
    platform = "pytorch_libtorch"
    files = ("model.pt", "model.pt2")

    _torch: Any = None
    _run: Callable[..., Any] | None = None
    _device: str | None = "cpu"
    _call: Call
    _inputs_at: dict[str, int]
    _outputs_at: dict[str, int]
    _inference_mode = True
    _clean_cache = False

    @classmethod
    def uses_gpu(cls) -> bool:
        """Unless torch is a build for the CPU."""
        return not is_cpu_build("torch")

    def open(self, path: Path, config: Mapping[str, Any]) -> Signature:
        """Loads the module, and finds the place of each declared tensor in its call."""
        self._torch = torch = require("torch", self.name, "torch")
        self._device = self._find_device()
        self._set_switches()
        with warnings.catch_warnings():
            # Of TorchScript as such, which the owner of the model has chosen.
            warnings.simplefilter("ignore", DeprecationWarning)
            if is_program(path):
                _refuse_code(path)
                program = torch.export.load(str(path))
                if self._device not in (None, "cpu"):
                    program = torch.export.passes.move_to_device_pass(program, self._device)
                self._run, self._call = program.module(), describe_program(program, self.options.model)
                for key in SCRIPT_ONLY:
                    self.options.unused(key)
            else:
                module = torch.jit.load(str(path), map_location=self._device)
                self._call = describe_script(module, self.options.model)
                self._run = self._optimized(module.eval())
        return self._placed(dict(config))

    def close(self) -> None:
        """Drops the module, and the memory that torch keeps for later."""
        self._run = None
        if self._torch is not None and self._device not in (None, "cpu"):
            self._torch.cuda.empty_cache()

    # -- options --------------------------------------------------------------------------------------------

    def _find_device(self) -> str | None:
        """Where the model shall be; None where the file says."""
        if self.context.kind == "model":
            return None
        if self.context.kind == "cpu":
            return "cpu"
        if not self._torch.cuda.is_available():
            raise invalid(
                f"instance_group of model '{self.options.model}' has KIND_GPU, but the installed torch "
                f"{self._torch.__version__} sees no CUDA device: use KIND_CPU or install a build for CUDA",
                param="kind",
            )
        return f"cuda:{self.context.device_id}"

    def _set_switches(self) -> None:
        """The parameters that torch has switches for; the process has no other model in it."""
        wishes, torch = self.options, self._torch
        self._inference_mode = bool(wishes.flag("INFERENCE_MODE", True))
        self._clean_cache = bool(wishes.flag("ENABLE_CACHE_CLEANING"))
        threads = wishes.number("INTRA_OP_THREAD_COUNT")
        if threads:
            torch.set_num_threads(threads)
        threads = wishes.number("INTER_OP_THREAD_COUNT")
        if threads:
            torch.set_num_interop_threads(threads)
        if wishes.flag("DISABLE_CUDNN"):
            torch.backends.cudnn.enabled = False
        if self._device == "cpu":
            self._clean_cache = False
            wishes.unused("ENABLE_CACHE_CLEANING")
            wishes.unused("DISABLE_CUDNN")
        plain = wishes.flag("DISABLE_OPTIMIZED_EXECUTION")
        if plain or wishes.graph_level() < 0:
            torch._C._set_graph_executor_optimize(False)
        for key, switch in (
            ("ENABLE_JIT_EXECUTOR", torch._C._jit_set_profiling_executor),
            ("ENABLE_JIT_PROFILING", torch._C._jit_set_profiling_mode),
            ("ENABLE_TENSOR_FUSER", torch._C._jit_set_texpr_fuser_enabled),
        ):
            value = wishes.flag(key)
            if value is not None:
                switch(value)

    def _optimized(self, module: Any) -> Any:
        """The module, frozen when ``optimization.graph.level`` is above 0."""
        if self.options.graph_level() < 1:
            return module
        return self._torch.jit.optimize_for_inference(self._torch.jit.freeze(module))

    # -- names ----------------------------------------------------------------------------------------------

    def _placed(self, config: dict[str, Any]) -> Signature:
        """Declared names at their places in the call; what has no name in the configuration under the model's own."""
        call, model = self._call, self.options.model
        declared = {"input": list(declared_inputs(config)), "output": list(declared_outputs(config))}
        names, outputs = ([one.name for one in declared[kind]] for kind in ("input", "output"))
        known = call.results or []
        if call.mapping:
            self._inputs_at = {name: index for index, name in enumerate(names)}
            inputs = [ModelTensor(name, None, None) for name in names]
        else:
            self._inputs_at = positions(model, "input", names, call.arguments)
            inputs = _named(self._inputs_at, call.arguments)
        self._outputs_at = positions(model, "output", outputs, known, counted=call.results is not None)
        if call.results is None:
            given = [ModelTensor(name, None, None) for name in outputs]
        else:
            given = _named(self._outputs_at, known)
        for kind, at, there in (("input", self._inputs_at, call.arguments), ("output", self._outputs_at, known)):
            _check_texts(model, kind, declared[kind], at, there)
        if not names and not call.mapping:
            self._inputs_at = {one.name: index for index, one in enumerate(call.arguments)}
        if not outputs:
            self._outputs_at = {one.name: index for index, one in enumerate(known)}
        return Signature(tuple(inputs), tuple(given), complete=call.typed)

    # -- batches --------------------------------------------------------------------------------------------

    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """Calls the module."""
        torch = self._torch
        assert self._run is not None
        with torch.inference_mode(self._inference_mode), torch.no_grad():
            arguments, keywords = self._arguments(inputs)
            given = self._run(*arguments, **keywords)
            results = list(given) if isinstance(given, tuple) else [given]
            found: dict[str, Tensor] = {}
            for name in outputs:
                index = self._outputs_at[name]
                if index >= len(results):
                    raise TritiumError(
                        Code.INTERNAL,
                        f"model '{self.context.model}' gave {len(results)} outputs, expected at least {index + 1}: its "
                        f"configuration declares '{name}'",
                    )
                found[name] = self._outgoing(name, results[index])
        if self._clean_cache:
            torch.cuda.empty_cache()
        return found

    def _arguments(self, inputs: Mapping[str, Tensor]) -> tuple[list[Found], dict[str, Found]]:
        call = self._call
        if call.mapping:
            return [{name: self._incoming(tensor) for name, tensor in inputs.items()}], {}
        values: list[Found] = [argument.default for argument in call.arguments]
        for name, tensor in inputs.items():
            values[self._inputs_at[name]] = self._incoming(tensor)
        named = {a.name: v for a, v in zip(call.arguments, values, strict=True) if a.keyword}
        return [v for a, v in zip(call.arguments, values, strict=True) if not a.keyword], named

    def _incoming(self, tensor: Tensor) -> Found:
        if tensor.dtype is DType.BYTES:
            try:
                return [content.decode() for content in tensor.strings()]
            except UnicodeDecodeError:
                raise invalid(
                    f"input '{tensor.name}' is not UTF-8, expected text: the model takes strings", param=tensor.name
                ) from None
        array = tensor.numpy()
        value = self._torch.from_numpy(array if array.flags.writeable else array.copy())
        if tensor.dtype is DType.BF16:
            value = value.view(self._torch.bfloat16)
        return value if self._device in (None, "cpu") else value.to(self._device)

    def _outgoing(self, name: str, value: Found) -> Tensor:
        torch = self._torch
        texts = [text for text in value if isinstance(text, str)] if isinstance(value, list) else None
        if texts is not None and len(texts) == len(value):
            shape = (len(texts), 1) if self._batched else (len(texts),)
            return Tensor.from_strings(name, [text.encode() for text in texts], shape)
        if not isinstance(value, torch.Tensor):
            raise TritiumError(
                Code.INTERNAL,
                f"output '{name}' of model '{self.context.model}' is a {type(value).__name__}, expected a tensor or a "
                "list of strings",
            )
        tensor: Any = value
        tensor = tensor.detach().to("cpu").contiguous()
        if tensor.dtype is torch.bfloat16:
            return Tensor.from_numpy(name, tensor.view(torch.uint16).numpy(), DType.BF16)
        return Tensor.from_numpy(name, tensor.numpy())


def _refuse_code(path: Path) -> None:
    """Makes torch read a program as data, never as code.

    ``torch.export.load`` first reads weights and examples as data, but what is refused then it reads again as pickles,
    which run anything (the variable outranks that; the process has no other model in it), and it opens compiled
    libraries beside the program, for which there is no use here.

    Raises:
        TritiumError: INVALID_ARGUMENT for a file with such libraries.
    """
    if holds_libraries(path):
        raise invalid(
            f"'{path.name}' holds libraries compiled by AOTInductor, expected a program saved by torch.export.save",
            param="default_model_filename",
        )
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"


def _check_texts(
    model: str, kind: str, declared: Sequence[Declared], at: Mapping[str, int], there: Sequence[Argument]
) -> None:
    """TorchScript tells no types of tensors, but texts are no tensors there."""
    for one in declared:
        index = at[one.name]
        if one.dtype is DType.BYTES and index < len(there) and there[index].dtype is not DType.BYTES:
            raise invalid(
                f"unable to load model '{model}', configuration expects datatype TYPE_STRING for {kind} '{one.name}', "
                "model has a tensor there, expected List[str]",
                param=one.name,
            )


def _named(at: Mapping[str, int], there: Sequence[Argument]) -> list[ModelTensor]:
    """The model's tensors, by the names that the configuration gives them."""
    names = {index: name for name, index in at.items()}
    return [
        ModelTensor(names.get(index, one.name), one.dtype, one.shape, one.optional) for index, one in enumerate(there)
    ]
