"""Small model.py files, and instances of them, for the tests of the Python backend."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tritium.backends.base import LoadContext
from tritium.observability.metrics import Metrics
from tritium.serving.config import make_config, parse_text
from tritium.serving.instance import Instance, Reply, Services
from tritium.types import DType, InferRequest, InferResponse, RequestedOutput, SequenceRef, Tensor

HEAD = "import json, threading, time\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\n"

ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        return answers
"""
FLOATS = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
DECOUPLED = FLOATS + "model_transaction_policy { decoupled: true }\n"


async def _refuse(*_: Any) -> None:
    raise AssertionError("this model asks for nothing")


async def _no_answers(_: InferRequest) -> AsyncIterator[InferResponse]:
    raise AssertionError("this model calls nobody")
    yield


async def _not_ready(name: str, version: str) -> bool:
    return False


NOTHING = Services(_no_answers, _refuse, _refuse, _not_ready)


def services(**changes: Any) -> Services:
    return replace(NOTHING, **changes)


def write(folder: Path, code: str, config: str = FLOATS, name: str = "demo") -> LoadContext:
    """A model folder, and what a backend is told of it."""
    version = folder / name / "1"
    version.mkdir(parents=True)
    if code:
        (version / "model.py").write_text(HEAD + textwrap.dedent(code))
    text = f'backend: "python"\n{config}'
    (folder / name / "config.pbtxt").write_text(text)
    return LoadContext(
        name,
        "1",
        make_config(parse_text(text.encode(), "config.pbtxt"), name),
        version_folder=version,
        model_folder=folder / name,
    )


@asynccontextmanager
async def running(
    folder: Path, code: str, config: str = FLOATS, given: Services = NOTHING, name: str = "demo"
) -> AsyncIterator[Instance]:
    instance = Instance(write(folder, code, config, name), f"{name}_0", given)
    try:
        await instance.start()
        yield instance
    finally:
        await instance.stop()


def request(*tensors: Tensor, outputs: tuple[str, ...] = (), sequence: SequenceRef | None = None, **more: Any) -> Any:
    named = {tensor.name: tensor for tensor in tensors}
    return InferRequest(
        "demo", "1", more.pop("id", ""), named, [RequestedOutput(o) for o in outputs], 0, sequence=sequence, **more
    )


def floats(*values: float, name: str = "IN") -> Tensor:
    return Tensor.from_numpy(name, np.array(values, dtype=np.float32))


def text(value: str, name: str = "IN") -> Tensor:
    return Tensor.from_strings(name, [value.encode()])


def tensor(name: str, dtype: DType, raw: bytes, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, dtype, shape, memoryview(raw))


async def replies(instance: Instance, *requests: InferRequest) -> list[Reply]:
    await instance.free()
    return [reply async for reply in instance.execute(requests)]


async def answers(instance: Instance, *requests: InferRequest) -> list[InferResponse]:
    found = sorted(await replies(instance, *requests), key=lambda reply: reply.index)
    return [reply.response for reply in found if reply.response is not None]


async def answer(instance: Instance, one: InferRequest) -> InferResponse:
    (found,) = await answers(instance, one)
    assert found.final
    return found


def value(response: InferResponse, name: str = "OUT") -> Any:
    """The content of an output as a list."""
    assert response.error is None, response.error
    return next(t for t in response.outputs if t.name == name).numpy().tolist()


def metrics() -> Metrics:
    return Metrics()
