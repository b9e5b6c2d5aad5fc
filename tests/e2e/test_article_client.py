"""The client code of a well-known article about Triton with TensorRT-LLM, unchanged but for the address."""

import time
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.e2e.live import LiveServer
from tests.tiny import make_checkpoint

LLAMA = """
name: "llama-7b-trtllm"
platform: "tensorrt_llm"
max_batch_size: 8
input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "output_ids" data_type: TYPE_INT32 dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_GPU } ]
"""
BATCHING = "dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 5000 }\n"
QWEN = """
name: "qwen-tensorrt"
backend: "tensorrtllm"
max_batch_size: 64
instance_group [ { count: 1 kind: KIND_GPU } ]
dynamic_batching { max_queue_delay_microseconds: 100 }
"""
TRITON_CONFIG = """{
  "gpt_model_type": "llama", "max_beam_width": 1, "max_output_len": 512, "temperature": 0.7, "top_k": 50
}"""
PROMPT = np.array([[5, 17, 33, 60, 7]], dtype=np.int32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    repository = tmp_path_factory.mktemp("repository")
    for name, text in (("llama-7b-trtllm", LLAMA), ("qwen-tensorrt", QWEN), ("llama-batched", LLAMA + BATCHING)):
        make_checkpoint(repository / name / "1", family="qwen2" if name.startswith("qwen") else "llama")
        (repository / name / "config.pbtxt").write_text(text.replace("llama-7b-trtllm", name))
        if name.startswith("llama"):
            (repository / name / "triton_config.json").write_text(TRITON_CONFIG)
    arguments = [f"--model-repository={repository}", "--model-control-mode=explicit", "--load-model=llama-7b-trtllm"]
    with LiveServer(arguments, tmp_path_factory.mktemp("log") / "log") as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(url=server.grpc) as connection:
        yield connection


def infer(client: grpcclient.InferenceServerClient, model: str, **options: object) -> grpcclient.InferResult:
    tensor = grpcclient.InferInput("input_ids", PROMPT.shape, "INT32")
    tensor.set_data_from_numpy(PROMPT)
    return client.infer(model, inputs=[tensor], **options)


def test_ids_in_ids_out_with_the_request_s_id(client: grpcclient.InferenceServerClient) -> None:
    request_id = str(uuid.uuid4())
    result = infer(client, "llama-7b-trtllm", request_id=request_id)
    output = result.as_numpy("output_ids")
    assert result.get_response().id == request_id
    assert output.dtype == np.int32
    assert output.shape[0] == 1 and output.ndim == 2
    # tensorrtllm includes the prompt, and triton_config.json allows 512 tokens, more than this context holds.
    assert output[0, : PROMPT.shape[1]].tolist() == PROMPT[0].tolist()
    assert output.shape[1] > PROMPT.shape[1]


def test_client_timeout_cancels_the_work(server: LiveServer, client: grpcclient.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        infer(client, "llama-7b-trtllm", client_timeout=0.02)
    deadline = time.monotonic() + 5
    while server.metric("tritium_requests_running", model="llama-7b-trtllm") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.metric("tritium_kv_cache_usage_ratio", model="llama-7b-trtllm") == 0


def test_load_model_then_wait_until_ready(client: grpcclient.InferenceServerClient) -> None:
    for model in ("qwen-tensorrt", "llama-batched"):
        assert not client.is_model_ready(model)
        client.load_model(model)
        while not client.is_model_ready(model):
            time.sleep(0.05)
        states = {m.name: m.state for m in client.get_model_repository_index().models}
        assert states[model] == "READY"
        assert infer(client, model).as_numpy("output_ids").size > 0


def test_without_a_gpu_the_notice_is_clear(server: LiveServer) -> None:
    assert "KIND_GPU, but there is no CUDA device" in server.output()
