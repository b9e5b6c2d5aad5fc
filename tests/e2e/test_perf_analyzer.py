"""Triton's own load generator, unmodified, on an echo model and on a language model.

It runs where ``perf_analyzer`` is on the PATH; bench/peers/triton-server/install_perf_analyzer.sh brings one. What it
measures is not looked at, only that it measures.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live import LiveServer

FOUND = shutil.which("perf_analyzer")
pytestmark = pytest.mark.skipif(FOUND is None, reason="perf_analyzer is not on the PATH")

ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: -1 }
output { name: "OUT" data_type: TYPE_FP32 dims: -1 }
"""
# perf_analyzer refuses shared memory for models with optional inputs; this one has none.
PLAIN_LLM = """
platform: "ensemble"
max_batch_size: 8
input { name: "input_ids" data_type: TYPE_INT32 dims: -1 }
input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 }
output { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] }
ensemble_scheduling {
  step {
    model_name: "tiny" model_version: -1
    input_map { key: "input_ids" value: "input_ids" }
    input_map { key: "max_tokens" value: "max_tokens" }
    output_map { key: "output_ids" value: "output_ids" }
  }
}
"""
IDS = {"input_ids": {"content": [5, 6, 7, 8, 9], "shape": [5]}, "max_tokens": [8]}
SHARED = ("--shared-memory", "system", "--output-shared-memory-size", "65536")


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("perf-analyzer")
    tiny = (
        'backend: "tritium" max_batch_size: 8 model_transaction_policy { decoupled: true } '
        f'parameters {{ key: "model" value {{ string_value: "{tiny_checkpoint}" }} }}'
    )
    # An ensemble of a model that says decoupled would be one too, and HTTP wants a single answer.
    for name, config in (("echo", CONFIG), ("tiny", tiny), ("plain", PLAIN_LLM)):
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "config.pbtxt").write_text(config)
    (folder / "models" / "echo" / "1" / "model.py").write_text(ECHO)
    with LiveServer([f"--model-repository={folder / 'models'}", "--dtype=float32"], folder / "log") as live:
        yield live


def measure(server: LiveServer, tmp_path: Path, model: str, *arguments: str, data: object = None) -> list[str]:
    """Its summary, a line for each load."""
    assert FOUND is not None
    grpc = "grpc" in arguments
    command = [FOUND, "-m", model, "-u", server.grpc if grpc else server.http, "--service-kind", "triton"]
    command += ["--measurement-mode", "count_windows", "--measurement-request-count", "5"]
    command += ["--stability-percentage", "999", "--max-trials", "4", *arguments]
    if data is not None:
        (tmp_path / "data.json").write_text(json.dumps({"data": [data]}))
        command += ["--input-data", str(tmp_path / "data.json")]
    beside = Path(FOUND).resolve().parent / "lib"
    env = {**os.environ, "LD_LIBRARY_PATH": f"{beside}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert "Failed" not in said, said
    return re.findall(r"^(?:Concurrency|Request Rate): .* throughput: [\d.]+ infer/sec", said, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments",
    [
        ("-i", "http"),
        ("-i", "grpc"),
        ("-i", "grpc", "--streaming"),
        ("-i", "http", "--async", "-b", "4"),
        ("-i", "http", *SHARED),
        ("-i", "grpc", *SHARED),
    ],
    ids=" ".join,
)
def test_the_echo_model(server: LiveServer, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    loads = measure(server, tmp_path, "echo", *arguments, "--shape", "IN:16", "--concurrency-range", "1:2")
    assert len(loads) == 2


@pytest.mark.parametrize(
    ("data", "arguments"),
    [
        (IDS | {"stream": [True]}, ("-i", "grpc", "--streaming", "--shape", "input_ids:5")),
        ({"text_input": ["The quick"], "max_tokens": [8], "stream": [True]}, ("-i", "grpc", "--streaming")),
        (IDS, ("-i", "grpc", "--shape", "input_ids:5", "-b", "2")),
        (IDS, ("-i", "http", "--shape", "input_ids:5")),
    ],
    ids=["ids, stream", "text, stream", "ids, a batch", "ids over HTTP"],
)
def test_the_language_model(server: LiveServer, tmp_path: Path, data: object, arguments: tuple[str, ...]) -> None:
    loads = measure(server, tmp_path, "tiny", *arguments, "--concurrency-range", "1:2", data=data)
    assert len(loads) == 2


def test_the_language_model_by_shared_memory(server: LiveServer, tmp_path: Path) -> None:
    arguments = ("-i", "grpc", "--streaming", *SHARED, "--shape", "input_ids:5", "--concurrency-range", "1:2")
    assert len(measure(server, tmp_path, "plain", *arguments, data=IDS)) == 2
