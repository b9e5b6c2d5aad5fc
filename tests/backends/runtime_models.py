"""Tiny models for the tensor runtimes, made on the spot, and a server around them."""

from __future__ import annotations

import time
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tritium.errors import TritiumError
from tritium.serving.server import Server
from tritium.types import DType, InferRequest, InferResponse, RequestedOutput, SequenceRef, Tensor

Node = tuple[str, Sequence[str], Sequence[str]]
Sized = Mapping[str, tuple[str, Sequence[int | str]]]


def write_onnx(
    path: Path,
    nodes: Sequence[Node],
    inputs: Sized,
    outputs: Sized,
    initial: Mapping[str, Any] | None = None,
    *,
    opset: int = 17,
) -> Path:
    """An ONNX model of these nodes: (operator, inputs, outputs). Types are names of ``TensorProto``."""
    from onnx import TensorProto, helper, numpy_helper, save

    def infos(tensors: Sized) -> list[Any]:
        return [helper.make_tensor_value_info(n, getattr(TensorProto, t), list(d)) for n, (t, d) in tensors.items()]

    graph = helper.make_graph(
        [helper.make_node(kind, list(sources), list(targets)) for kind, sources, targets in nodes],
        "g",
        infos(inputs),
        infos(outputs),
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (initial or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 9
    path.parent.mkdir(parents=True, exist_ok=True)
    save(model, path)
    return path


def write_linear(path: Path, batch: int | str = "N") -> Path:
    """Y = X W + B with X of [batch, 4] and Y of [batch, 3]; and S, the sum of each row of X."""
    return write_onnx(
        path,
        [("MatMul", ["X", "W"], ["P"]), ("Add", ["P", "B"], ["Y"]), ("ReduceSum", ["X", "axes"], ["S"])],
        {"X": ("FLOAT", [batch, 4])},
        {"Y": ("FLOAT", [batch, 3]), "S": ("FLOAT", [batch, 1])},
        {"W": WEIGHT, "B": BIAS, "axes": np.array([1], np.int64)},
    )


WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3) / 8
BIAS = np.array([1, -2, 3], np.float32)


def linear(x: Any) -> Any:
    """What ``write_linear`` computes."""
    return x @ WEIGHT + BIAS


def write_script(path: Path, module: Any) -> Path:
    """A TorchScript file."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(module), path)
    return path


def config(folder: Path, text: str) -> None:
    """The config.pbtxt of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(text)


def io(name: str, kind: str, dims: str, more: str = "") -> str:
    """One input or output of a config.pbtxt."""
    return f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] {more} }}'


def parameter(key: str, value: str) -> str:
    """One parameter of a config.pbtxt."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


@asynccontextmanager
async def serving(repository: Path, **options: Any) -> AsyncIterator[Server]:
    """A server that has loaded what is in a repository, but for what cannot be."""
    server = Server((repository,), **options)
    try:
        await server.start()
        yield server
    finally:
        await server.drain(1)


def ask(model: str, outputs: Sequence[str] = (), sequence: SequenceRef | None = None, **arrays: Any) -> InferRequest:
    """A request with these inputs: arrays, or tensors."""
    inputs = {n: a if isinstance(a, Tensor) else Tensor.from_numpy(n, np.asarray(a)) for n, a in arrays.items()}
    wanted = [RequestedOutput(name) for name in outputs]
    return InferRequest(model, "", "", inputs, wanted, time.monotonic_ns(), sequence=sequence)


def arrays(response: InferResponse) -> dict[str, Any]:
    """The outputs of an answer by name."""
    return {tensor.name: tensor.numpy() for tensor in response.outputs}


async def infer(server: Server, model: str, outputs: Sequence[str] = (), **inputs: Any) -> dict[str, Any]:
    """The outputs for these inputs."""
    return arrays(await server.infer(ask(model, outputs, **inputs)))


async def load_error(repository: Path, name: str, **options: Any) -> str:
    """Why a model cannot be loaded; the server runs on."""
    async with serving(repository, control="explicit", **options) as server:
        try:
            await server.load(name)
        except TritiumError as error:
            assert server.live()
            return error.message
        raise AssertionError(f"{name} was loaded")


def shown(server: Server, model: str) -> dict[str, Any]:
    """The configuration as a client sees it."""
    return server.model_config(model).to_json()


def bf16(name: str, values: Any) -> Tensor:
    """A BF16 tensor of values that need no rounding."""
    words = (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return Tensor.from_numpy(name, words, DType.BF16)


def from_bf16(words: Any) -> Any:
    """The values of BF16 words."""
    return (np.asarray(words).astype(np.uint32) << 16).view(np.float32)
