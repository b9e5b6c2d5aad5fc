"""The command lines of Triton's users, on a Python model: ``tritonserver ...`` and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
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


def test_reload_under_load(repository: Path, tmp_path: Path) -> None:
    """SIGHUP and ``POST /reload`` take a new version in while requests run; none of them fails."""
    with LiveServer([f"--model-repository={repository}"], tmp_path / "log") as server:
        where = f"{server.url}/v2/models/adder/infer"
        done, failed, seen = threading.Event(), [], set()

        def ask() -> None:
            with httpx.Client() as client:
                while not done.is_set():
                    answer = client.post(where, json=BODY)
                    if answer.status_code == 200:
                        seen.add(answer.json()["outputs"][0]["data"][0])
                    else:
                        failed.append(answer.text)

        clients = [threading.Thread(target=ask) for _ in range(2)]
        for client in clients:
            client.start()
        try:
            write_model(repository, 10, version=2)
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGHUP)
            deadline = time.monotonic() + 30
            while 11 not in seen and time.monotonic() < deadline:
                time.sleep(0.05)
            write_model(repository, 100, version=3)
            changes = httpx.post(f"{server.url}/reload", timeout=30).json()
            assert changes["loaded"] == ["adder"]
            while 101 not in seen and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            done.set()
            for client in clients:
                client.join()
        assert not failed
        assert {2, 11, 101} <= seen
