"""How often tensors are copied between models: counted, and seen by where they lie."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.serving.support import serving
from tritium import backends
from tritium.backends import pb_dlpack
from tritium.backends.base import Backend, Timing
from tritium.serving.server import Server
from tritium.types import DType, InferRequest, InferResponse, Tensor

TENSORS = """
max_batch_size: 0
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
HEAD = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\nclass TritonPythonModel:\n"
PLUS = """
    def execute(self, requests):
        return [self.answer(r.inputs()[0].as_numpy()) for r in requests]

    def answer(self, x):
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + np.float32(1))])
"""
# Writes to what it was given before it answers with something new.
SCRIBBLE = """
    def execute(self, requests):
        found = []
        for r in requests:
            x = r.inputs()[0].as_numpy()
            y = x * np.float32(2)
            x[:] = -1
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))
        return found
"""
CALLER = """
    def execute(self, requests):
        found = []
        for r in requests:
            inner = pb_utils.InferenceRequest(
                model_name="plus", requested_output_names=["Y"],
                inputs=[r.inputs()[0]], parameters={"report_copies": True})
            response = inner.exec()
            said = {"inner": response.parameters()}
            found.append(pb_utils.InferenceResponse(response.output_tensors(), parameters=said))
        return found
"""
LARGE = 1 << 18  # a MiB of FP32


class Numpy(Backend):
    """Answers with its input as numpy sees it; remembers where it lies."""

    seen: list[int] = []  # noqa: RUF012

    async def load(self) -> None: ...

    async def unload(self) -> None: ...

    def ready(self) -> bool:
        return True

    async def stream(self, request: InferRequest, timing: Timing) -> AsyncIterator[InferResponse]:
        yield InferResponse("", "", "", [Tensor.from_numpy("Y", self.array(request))])

    def array(self, request: InferRequest) -> Any:
        array = request.inputs["X"].numpy()
        Numpy.seen.append(array.__array_interface__["data"][0])
        return array


class Torch(Numpy):
    """The same as torch sees it, by DLPack in and out."""

    def array(self, request: InferRequest) -> Any:
        tensor = torch.from_dlpack(pb_dlpack.give(super().array(request), DType.FP32))
        return pb_dlpack.take(tensor.__dlpack__())[0]


def write(repository: Path, name: str, config: str, code: str = "") -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    if code:
        (repository / name / "1" / "model.py").write_text(HEAD + code)


def python(repository: Path, name: str, code: str) -> None:
    write(repository, name, f'backend: "python" {TENSORS}', code)


def chain(repository: Path, name: str, *models: str) -> None:
    """An ensemble of these models, one after the other."""
    tensors = ["X", *(f"t{i}" for i in range(len(models) - 1)), "Y"]
    steps = "".join(
        f'step {{ model_name: "{model}" model_version: -1 '
        f'input_map {{ key: "X" value: "{source}" }} output_map {{ key: "Y" value: "{target}" }} }} '
        for model, source, target in zip(models, tensors, tensors[1:], strict=False)
    )
    write(repository, name, f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ {steps} }}')


def ask(model: str, array: Any, report: bool = True) -> InferRequest:
    request = InferRequest(model, "", "", {"X": Tensor.from_numpy("X", array)}, [], time.monotonic_ns())
    if report:
        request.parameters["report_copies"] = True
    return request


async def run(server: Server, model: str, array: Any) -> tuple[InferResponse, int, int]:
    answer = await server.infer(ask(model, array))
    return answer, int(answer.parameters["copies"]), int(answer.parameters["copied_bytes"])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("Numpy", "Torch"):
        monkeypatch.setitem(backends.BACKENDS, name.lower(), f"tests.serving.test_copies:{name}")
    monkeypatch.setattr(Numpy, "seen", [])
    return tmp_path / "models"


async def test_steps_in_this_process_copy_nothing(repository: Path) -> None:
    for name in ("numpy", "torch"):
        write(repository, name, f'backend: "{name}" {TENSORS}')
    chain(repository, "e", "numpy", "torch", "numpy", "torch", "numpy")
    array = np.arange(LARGE, dtype=np.float32)
    async with serving(repository) as server:
        answer, copies, nbytes = await run(server, "e", array)
        assert (copies, nbytes) == (0, 0)
        assert Numpy.seen == [array.ctypes.data] * 5
        assert np.shares_memory(answer.outputs[0].numpy(), array)
        assert "copies" not in (await server.infer(ask("e", array, report=False))).parameters


@pytest.mark.parametrize("size", [LARGE, 100])
async def test_steps_in_processes_map_what_the_one_before_made(repository: Path, size: int) -> None:
    """Each process copies its output once to where others can map it; small tensors travel in the message."""
    for name in ("a", "b", "c"):
        python(repository, name, PLUS)
    chain(repository, "e", "a", "b", "c")
    array = np.arange(size, dtype=np.float32)
    async with serving(repository) as server:
        for _ in range(3):
            answer, copies, nbytes = await run(server, "e", array)
            assert np.array_equal(answer.outputs[0].numpy(), array + 3)
            # In once, and out of each of three; small ones in again each time.
            assert copies == (4 if size == LARGE else 6)
            assert nbytes == copies * array.nbytes
        (answer, copies, _) = await run(server, "a", array)
        assert copies == 2


async def test_a_step_that_writes_to_its_input_changes_no_one_elses(repository: Path) -> None:
    python(repository, "plus", PLUS)
    python(repository, "scribble", SCRIBBLE)
    config = f"""
    platform: "ensemble" {TENSORS} output {{ name: "M" data_type: TYPE_FP32 dims: [ -1 ] }}
    ensemble_scheduling {{
      step {{ model_name: "plus" model_version: -1 input_map {{ key: "X" value: "X" }}
             output_map {{ key: "Y" value: "M" }} }}
      step {{ model_name: "scribble" model_version: -1 input_map {{ key: "X" value: "M" }}
             output_map {{ key: "Y" value: "Y" }} }}
    }}"""
    write(repository, "e", config)
    async with serving(repository) as server:
        for begin in range(4):
            array = np.arange(begin, begin + LARGE, dtype=np.float32)
            answer, copies, _ = await run(server, "e", array)
            found = {tensor.name: tensor.numpy() for tensor in answer.outputs}
            assert np.array_equal(found["M"], array + 1)
            assert np.array_equal(found["Y"], (array + 1) * 2)
            assert copies == 3


async def test_one_tensor_for_many_readers_in_the_same_process_and_in_others(repository: Path) -> None:
    python(repository, "plus", PLUS)
    python(repository, "scribble", SCRIBBLE)
    outputs = "".join(f'output {{ name: "{n}" data_type: TYPE_FP32 dims: [ -1 ] }} ' for n in ("P", "Q", "R"))
    step = (
        'step {{ model_name: "{0}" model_version: -1 input_map {{ key: "X" value: "{1}" }} '
        'output_map {{ key: "Y" value: "{2}" }} }} '
    )
    readers = [("scribble", "m", "P"), ("scribble", "m", "Q"), ("plus", "m", "R"), ("plus", "P", "Y")]
    steps = step.format("plus", "X", "m") + "".join(step.format(*reader) for reader in readers)
    write(repository, "e", f'platform: "ensemble" {TENSORS} {outputs} ensemble_scheduling {{ {steps} }}')
    async with serving(repository) as server:
        for begin in range(5):
            array = np.arange(begin, begin + LARGE, dtype=np.float32)
            answer, copies, _ = await run(server, "e", array)
            found = {tensor.name: tensor.numpy() for tensor in answer.outputs}
            assert np.array_equal(found["P"], (array + 1) * 2) and np.array_equal(found["Q"], found["P"])
            assert np.array_equal(found["R"], array + 2) and np.array_equal(found["Y"], found["P"] + 1)
            assert copies == 6


async def test_a_model_that_calls_another(repository: Path) -> None:
    """Its tensors lie in shared memory already, and so do those of the answer."""
    python(repository, "plus", PLUS)
    python(repository, "caller", CALLER)
    array = np.arange(LARGE, dtype=np.float32)
    async with serving(repository) as server:
        answer, copies, _ = await run(server, "caller", array)
        assert np.array_equal(answer.outputs[0].numpy(), array + 1)
        # In and out of the caller; of its call, out of the caller and out of the other model.
        assert copies == 2
        assert '"copies": 2' in str(answer.parameters["inner"])


async def test_memory_that_was_lent_goes_back(repository: Path) -> None:
    for name in ("a", "b"):
        python(repository, name, PLUS)
    chain(repository, "e", "a", "b")
    array = np.arange(LARGE, dtype=np.float32)
    async with serving(repository) as server:
        for _ in range(5):
            await run(server, "e", array)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for size in range(50):
            answer, _, _ = await run(server, "e", array[: LARGE - size])
            assert answer.outputs[0].numpy()[-1] == LARGE - size + 1
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before + 12
