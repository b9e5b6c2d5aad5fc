"""A whole server on a machine with a GPU: an LLM there, and tensors that clients leave in its memory."""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.e2e.live import LiveServer
from tests.tiny import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
REGION = 4096
ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor)]) for tensor in tensors]
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: -1 }
output { name: "OUT" data_type: TYPE_FP32 dims: -1 }
"""


class DeviceRegion:
    """Memory of the first GPU, from the driver itself: torch's allocator shares whole segments."""

    def __init__(self, size: int) -> None:
        torch.cuda.init()
        torch.zeros(1, device="cuda")  # makes the primary context that of this thread
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.address, self.size = ctypes.c_uint64(), size
        assert self.driver.cuMemAlloc_v2(ctypes.byref(self.address), ctypes.c_size_t(size)) == 0
        handle = (ctypes.c_ubyte * 64)()
        assert self.driver.cuIpcGetMemHandle(ctypes.byref(handle), self.address) == 0
        self.handle = bytes(handle)

    def write(self, data: bytes) -> None:
        assert self.driver.cuMemcpyHtoD_v2(self.address, data, ctypes.c_size_t(len(data))) == 0

    def read(self, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        assert self.driver.cuMemcpyDtoH_v2(data, self.address, ctypes.c_size_t(size)) == 0
        return data.raw

    def free(self) -> None:
        assert self.driver.cuMemFree_v2(self.address) == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("gpu-server")
    echo = root / "models" / "echo"
    (echo / "1").mkdir(parents=True)
    (echo / "config.pbtxt").write_text(CONFIG)
    (echo / "1" / "model.py").write_text(ECHO)
    make_checkpoint(root / "models" / "tiny" / "1")
    arguments = [f"--model-repository={root / 'models'}", "--kv-cache-bytes=16777216", "--dtype=float32"]
    with LiveServer(arguments, root / "log", ready_s=240) as live:
        yield live


@pytest.fixture
def regions() -> Iterator[tuple[DeviceRegion, DeviceRegion]]:
    pair = DeviceRegion(REGION), DeviceRegion(REGION)
    yield pair
    for region in pair:
        region.free()


def test_the_model_runs_on_the_gpu(server: LiveServer) -> None:
    assert "cuda" in server.output()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tensors_in_the_memory_of_the_gpu(
    server: LiveServer, regions: tuple[DeviceRegion, DeviceRegion], protocol: str
) -> None:
    library = httpclient if protocol == "http" else grpcclient
    client = library.InferenceServerClient(server.http if protocol == "http" else server.grpc)
    source, target = regions
    values = np.arange(256, dtype=np.float32)
    source.write(values.tobytes())
    for name, region in (("source", source), ("target", target)):
        client.register_cuda_shared_memory(name, base64.b64encode(region.handle), 0, REGION)
    assert (
        len(
            client.get_cuda_shared_memory_status()
            if protocol == "http"
            else client.get_cuda_shared_memory_status(as_json=True)["regions"]
        )
        == 2
    )
    given = library.InferInput("IN", [256], "FP32")
    given.set_shared_memory("source", values.nbytes)
    wanted = library.InferRequestedOutput("OUT")
    wanted.set_shared_memory("target", values.nbytes)
    client.infer("echo", [given], outputs=[wanted])
    assert np.array_equal(np.frombuffer(target.read(values.nbytes), np.float32), values)
    given.set_shared_memory("source", REGION + 4)
    with pytest.raises(InferenceServerException, match="source"):
        client.infer("echo", [given])
    client.unregister_cuda_shared_memory()
    client.close()


def test_token_ids_in_the_memory_of_the_gpu(server: LiveServer, regions: tuple[DeviceRegion, DeviceRegion]) -> None:
    ids = np.array([[5, 6, 7, 8]], np.int32)
    regions[0].write(ids.tobytes())
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.register_cuda_shared_memory("ids", base64.b64encode(regions[0].handle), 0, REGION)
        there, here = (grpcclient.InferInput("input_ids", [1, 4], "INT32") for _ in range(2))
        there.set_shared_memory("ids", ids.nbytes)
        here.set_data_from_numpy(ids)
        greedy = grpcclient.InferInput("temperature", [1, 1], "FP32").set_data_from_numpy(np.zeros((1, 1), np.float32))
        answers = [client.infer("tiny", [tensor, greedy]).as_numpy("output_ids").tolist() for tensor in (there, here)]
        client.unregister_cuda_shared_memory()
    assert answers[0] == answers[1]


def test_a_handle_that_is_none(server: LiveServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="handle"):
            client.register_cuda_shared_memory("bad", base64.b64encode(b"\1" * 64), 0, REGION)
        assert client.is_server_ready()
