"""Log settings that are changed while the server runs reach the processes of models and of engines."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import numpy as np
import tritonclient.grpc as grpcclient

from tests.e2e.live import LiveServer

MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            pb_utils.Logger.log_verbose(f"verbose {request.request_id()}")
            pb_utils.Logger.log_info(f"told {request.request_id()}")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: -1 }
output { name: "OUT" data_type: TYPE_FP32 dims: -1 }
"""
FOLLOWS = "tritium.engine: logs as the server does from now on"


def test_settings_reach_running_processes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "talker" / "1").mkdir(parents=True)
    (folder / "talker" / "config.pbtxt").write_text(CONFIG)
    (folder / "talker" / "1" / "model.py").write_text(MODEL)
    (folder / "tiny" / "1").mkdir(parents=True)
    (folder / "tiny" / "config.pbtxt").write_text(
        f'backend: "tritium" parameters {{ key: "model" value {{ string_value: "{tiny_checkpoint}" }} }}'
    )
    with LiveServer([f"--model-repository={folder}"], tmp_path / "log") as server:
        client = grpcclient.InferenceServerClient(server.grpc)
        given = grpcclient.InferInput("IN", [1], "FP32")
        given.set_data_from_numpy(np.ones(1, np.float32))

        def ask(name: str) -> list[str]:
            client.infer("talker", [given], request_id=name)
            return [kind for kind in ("verbose", "told") if f"{kind} {name}" in server.output()]

        assert ask("first") == ["told"]
        assert FOLLOWS not in server.output()
        assert httpx.post(f"{server.url}/v2/logging", json={"log_verbose_level": 1}).status_code == 200
        assert ask("second") == ["verbose", "told"]
        deadline = time.monotonic() + 30
        while FOLLOWS not in server.output() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert FOLLOWS in server.output()
        client.update_log_settings({"log_verbose_level": 0, "log_info": False})
        assert ask("third") == []
        client.close()
