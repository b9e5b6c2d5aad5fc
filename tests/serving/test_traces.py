from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from tests.serving.fakes import ECHO, request, write_model
from tests.serving.support import refused, serving
from tritium.observability.trace_config import TraceConfig
from tritium.observability.tracing import Traces
from tritium.types import Tensor

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling {
  step { model_name: "echo" model_version: -1
         input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }
}
"""


async def test_an_ensemble_and_its_step_have_a_trace_each(repository: Path, tmp_path: Path) -> None:
    write_model(repository, "echo")
    write_model(repository, "both", ENSEMBLE)
    file = tmp_path / "trace"
    traces = Traces(TraceConfig(str(file), ("TIMESTAMPS", "TENSORS"), rate=1))
    async with serving(repository, traces=traces) as server:
        for asked in (request("both", id="a"), request("echo", error="INTERNAL")):
            trace = asked.trace = server.traces.begin(asked.model, asked.version, asked.id)
            if asked.model == "both":
                await server.infer(asked)
            else:
                await refused(server.infer(asked))
            assert trace is not None
            trace.release()
    traces.close()
    entries = json.loads(file.read_text())
    heads = [entry for entry in entries if "model_name" in entry]
    assert heads == [
        {"id": 2, "model_name": "echo", "request_id": "a", "parent_id": 1, "model_version": 1},
        {"id": 1, "model_name": "both", "request_id": "a", "model_version": 1},
        {"id": 3, "model_name": "echo", "model_version": 1},
    ]
    activities = [(entry["id"], entry["activity"]) for entry in entries if "activity" in entry]
    assert set(activities) >= {(1, "TENSOR_QUEUE_INPUT"), (2, "TENSOR_BACKEND_OUTPUT"), (3, "TENSOR_QUEUE_INPUT")}
    for entry in entries:
        names = [stamp["name"] for stamp in entry.get("timestamps", ())]
        assert not names or (names.count("REQUEST_START"), names.count("REQUEST_END")) == (1, 1)


CALLER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            said = [self.call(request, model, trace) for model in ("both", "echo") for trace in (True, False)]
        return [pb_utils.InferenceResponse([said[-1]], parameters={"context": str(request.trace().get_context())})]

    def call(self, request, model, traced):
        more = {"trace": request.trace()} if traced else {}
        inner = pb_utils.InferenceRequest(
            model_name=model, request_id=f"{model}-{traced}", requested_output_names=["OUT"],
            inputs=request.inputs(), **more)
        response = inner.exec()
        assert not response.has_error(), response.error().message()
        return response.output_tensors()[0]
"""


async def test_models_that_a_model_calls_are_in_its_trace_when_it_says_so(repository: Path, tmp_path: Path) -> None:
    write_model(repository, "echo")
    write_model(repository, "both", ENSEMBLE)
    write_model(repository, "caller", ECHO.replace('"echo"', '"python"'))
    (repository / "caller" / "1" / "model.py").write_text(CALLER)
    file = tmp_path / "trace"
    traces = Traces(TraceConfig(str(file), ("TIMESTAMPS",), rate=1))
    async with serving(repository, traces=traces) as server:
        asked = request("caller", id="a")
        asked.inputs["IN"] = Tensor.from_numpy("IN", np.zeros((1, 1 << 14), np.float32))
        asked.trace = trace = traces.begin("caller", "", "a")
        answer = await server.infer(asked)
        assert answer.error is None and answer.parameters["context"] == "None"
        assert trace is not None
        trace.release()
        asked = request("caller", id="untraced")
        await server.infer(asked)
    traces.close()
    entries = json.loads(file.read_text())
    heads = {entry["id"]: entry for entry in entries if "model_name" in entry}
    assert [(one["model_name"], one["request_id"], one.get("parent_id")) for _, one in sorted(heads.items())] == [
        ("caller", "a", None),
        ("both", "both-True", 1),
        ("echo", "both-True", 2),
        ("echo", "echo-True", 1),
    ]
    spans = {
        entry["id"]: {stamp["name"]: stamp["ns"] for stamp in entry["timestamps"]}
        for entry in entries
        if "timestamps" in entry
    }
    for number, head in heads.items():
        assert spans[number]["REQUEST_START"] <= spans[number]["REQUEST_END"] <= time.monotonic_ns()
        if "parent_id" in head:
            outer = spans[head["parent_id"]]
            assert outer["REQUEST_START"] <= spans[number]["REQUEST_START"]
            assert spans[number]["REQUEST_END"] <= outer["REQUEST_END"]
