from __future__ import annotations

import json
from pathlib import Path

from tests.serving.fakes import request, write_model
from tests.serving.support import refused, serving
from tritium.observability.tracing import TraceConfig, Traces

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
