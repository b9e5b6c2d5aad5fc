"""The command lines of Triton's users, on a Python model: ``tritonserver ...`` and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.e2e.live import LiveServer

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() + ADD)]
            )
            for request in requests
        ]
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: -1 }
output { name: "OUT" data_type: TYPE_FP32 dims: -1 }
"""
BODY = {"id": "r1", "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}


def write_model(repository: Path, add: int, version: int = 1) -> None:
    folder = repository / "adder" / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(f"ADD = {add}\n{MODEL}")
    (repository / "adder" / "config.pbtxt").write_text(CONFIG)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    write_model(folder, 1)
    return folder


def test_the_command_line_of_the_article(repository: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    arguments = [f"--model-repository={repository}", "--enable-inflight-batching", "--log-verbose=1", "--log-info=1"]
    arguments += ["--log-warning=1", "--log-error=1", f"--trace-file={trace}", "--trace-level=MAX"]
    with LiveServer(arguments, tmp_path / "log") as server:
        where = f"{server.url}/v2/models/adder/infer"
        answer = httpx.post(where, json=BODY)
        assert answer.json()["outputs"][0]["data"] == [2, 3]
        httpx.post(where, json=BODY)  # one of a thousand is traced, and the first was
        assert httpx.get(f"{server.url}/v2/trace/setting").json() == {
            "trace_level": ["TIMESTAMPS"],
            "trace_rate": "1000",
            "trace_count": "-1",
            "log_frequency": "0",
            "trace_file": str(trace),
            "trace_mode": "triton",
        }
        assert httpx.get(f"{server.url}/v2/logging").json()["log_verbose_level"] == 1
    head, stamps = json.loads(trace.read_text())
    assert head == {"id": 1, "model_name": "adder", "model_version": 1, "request_id": "r1"}
    names = [stamp["name"] for stamp in stamps["timestamps"]]
    assert names[0] == "HTTP_RECV_START" and names[-1] == "HTTP_SEND_END"
    steps = [
        "REQUEST_START",
        "QUEUE_START",
        "COMPUTE_START",
        "COMPUTE_INPUT_END",
        "COMPUTE_OUTPUT_START",
        "COMPUTE_END",
    ]
    assert [name for name in names if name in steps] == steps
    times = [stamp["ns"] for stamp in stamps["timestamps"]]
    assert times == sorted(times)
    said = server.output()
    assert "--trace-level is deprecated, it was taken as --trace-config=level=MAX" in said
    assert "--enable-inflight-batching changes nothing here" in said
    assert "only this machine can connect; --host 0.0.0.0 listens on every address" in said
