"""Models of tensor runtimes behind a real server, asked by Triton's own clients over HTTP and gRPC."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.backends.runtime_models import config, io, linear, write_linear, write_onnx, write_script
from tests.backends.test_pytorch import Pair
from tests.e2e.live import LiveServer

X = np.arange(8, dtype=np.float32).reshape(2, 4)
SEQUENCE = f"""
backend: "onnxruntime" max_batch_size: 4 input {io("X", "INT32", "1")} output {io("Y", "INT32", "1")}
sequence_batching {{ state {{ input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: 1 }} }}
"""
ENSEMBLE = f"""
platform: "ensemble" max_batch_size: 4 input {io("IN", "FP32", "4")} output {io("OUT", "FP32", "3")}
ensemble_scheduling {{
  step {{ model_name: "onnx" input_map {{ key: "X" value: "IN" }} output_map {{ key: "Y" value: "mid" }} }}
  step {{ model_name: "torch" input_map [ {{ key: "a" value: "mid" }}, {{ key: "b" value: "mid" }} ]
    output_map {{ key: "OUTPUT__0" value: "OUT" }} }} }}
"""


def write_repository(folder: Path) -> None:
    write_linear(folder / "onnx" / "1" / "model.onnx")
    config(folder / "onnx", 'platform: "onnxruntime_onnx"')
    write_linear(folder / "vino" / "1" / "model.onnx")
    config(folder / "vino", 'backend: "openvino" instance_group { count: 2 kind: KIND_CPU }')
    write_script(folder / "torch" / "1" / "model.pt", Pair())
    tensors = "".join(f"input {io(name, 'FP32', '-1')} " for name in "ab")
    config(
        folder / "torch",
        f'platform: "pytorch_libtorch" max_batch_size: 4 {tensors} output {io("OUTPUT__0", "FP32", "-1")}',
    )
    write_onnx(
        folder / "sum" / "1" / "model.onnx",
        [("Add", ["X", "S"], ["Y"]), ("Identity", ["Y"], ["T"])],
        {"X": ("INT32", ["N", 1]), "S": ("INT32", ["N", 1])},
        {"Y": ("INT32", ["N", 1]), "T": ("INT32", ["N", 1])},
    )
    config(folder / "sum", SEQUENCE)
    write_onnx(
        folder / "text" / "1" / "model.onnx",
        [("Identity", ["X"], ["Y"])],
        {"X": ("STRING", ["N", 1])},
        {"Y": ("STRING", ["N", 1])},
    )
    (folder / "both" / "1").mkdir(parents=True)
    config(folder / "both", ENSEMBLE)
    (folder / "broken" / "1").mkdir(parents=True)
    (folder / "broken" / "1" / "model.onnx").write_bytes(b"no model")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("backends")
    write_repository(folder / "models")
    arguments = [f"--model-repository={folder / 'models'}", "--model-control-mode=explicit", "--strict-readiness=false"]
    arguments += [f"--load-model={name}" for name in ("onnx", "torch", "sum", "text", "both")]
    with LiveServer(arguments, folder / "log", ready_s=300) as live:
        yield live


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: LiveServer) -> Iterator[Any]:
    module: ModuleType = getattr(tritonclient, request.param)
    with module.InferenceServerClient(getattr(server, request.param)) as made:
        made.kind = module
        yield made


def ask(
    client: Any, model: str, outputs: tuple[str, ...] = (), options: dict[str, Any] | None = None, **arrays: Any
) -> Any:
    inputs = []
    for name, array in arrays.items():
        inputs.append(client.kind.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    wanted = [client.kind.InferRequestedOutput(name) for name in outputs]
    return client.infer(model, inputs, outputs=wanted or None, **(options or {}))


def test_results(client: Any) -> None:
    found = ask(client, "onnx", X=X)
    assert np.allclose(found.as_numpy("Y"), linear(X)) and np.allclose(found.as_numpy("S"), X.sum(1, keepdims=True))
    assert ask(client, "onnx", ("S",), X=X).as_numpy("Y") is None
    assert np.array_equal(ask(client, "torch", a=X, b=X).as_numpy("OUTPUT__0"), 2 * X)
    assert np.allclose(ask(client, "both", IN=X).as_numpy("OUT"), 2 * linear(X))
    texts = np.array([["é".encode()], [b""]], np.object_)
    assert ask(client, "text", X=texts).as_numpy("Y").tolist() == texts.tolist()


def test_a_sequence(client: Any) -> None:
    seen: list[int] = []
    for step in range(4):
        flags = {"sequence_id": 5, "sequence_start": step == 0, "sequence_end": step == 3}
        found = ask(client, "sum", options=flags, X=np.array([[step + 1]], np.int32))
        assert found.as_numpy("T") is None
        seen.append(int(found.as_numpy("Y")[0, 0]))
    assert seen == [1, 3, 6, 10]


def test_metadata_and_configuration(client: Any) -> None:
    more = {} if client.kind is tritonclient.http else {"as_json": True}
    found = client.get_model_metadata("onnx", **more)
    assert found["platform"] == "onnxruntime_onnx"
    assert [[int(size) for size in one["shape"]] for one in found["inputs"]] == [[-1, 4]]
    made = client.get_model_config("onnx", **more)
    made = made.get("config", made)
    assert made["backend"] == "onnxruntime" and made["max_batch_size"] == 4


def test_errors_leave_the_server_running(client: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"unexpected shape for input 'X' for model 'onnx'"):
        ask(client, "onnx", X=np.zeros((1, 5), np.float32))
    with pytest.raises(InferenceServerException, match="data-type is 'INT32', but model 'onnx' expects 'FP32'"):
        ask(client, "onnx", X=np.zeros((1, 4), np.int32))
    with pytest.raises(InferenceServerException, match="pytorch cannot run model 'torch'"):
        ask(client, "torch", a=X, b=X[:, :3])
    with pytest.raises(InferenceServerException, match=r"'model\.onnx' cannot be loaded by onnxruntime"):
        client.load_model("broken")
    assert client.is_server_live()
    test_results(client)


def test_load_with_a_file_in_the_request_and_unload(client: Any, tmp_path: Path) -> None:
    client.load_model("vino")
    assert np.allclose(ask(client, "vino", X=X).as_numpy("Y"), linear(X))
    client.unload_model("vino")
    content = write_linear(tmp_path / "model.onnx").read_bytes()
    client.load_model("sent", config='{"backend": "onnxruntime"}', files={"file:1/model.onnx": content})
    assert np.allclose(ask(client, "sent", X=X).as_numpy("Y"), linear(X))
    client.unload_model("sent")


def test_many_at_once_share_executions(server: LiveServer) -> None:
    found: queue.Queue[Any] = queue.Queue()
    inputs = tritonclient.grpc.InferInput("X", X.shape, "FP32")
    inputs.set_data_from_numpy(X)
    before = {name: server.metric(name, model="onnx") for name in ("nv_inference_count", "nv_inference_exec_count")}
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        for _ in range(200):
            client.async_infer("onnx", [inputs], lambda result, error: found.put(error or result))
        for _ in range(200):
            assert np.allclose(found.get(timeout=60).as_numpy("Y"), linear(X))
    count, executions = (server.metric(name, model="onnx") - was for name, was in before.items())
    assert count == 400 and executions <= 200


def test_generate_is_refused_in_words(server: LiveServer) -> None:
    answer = httpx.post(f"{server.url}/v2/models/onnx/generate", json={"X": [1, 2, 3]}, timeout=30)
    assert answer.status_code == 400 and "error" in answer.json()
