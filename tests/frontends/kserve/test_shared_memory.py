from __future__ import annotations

import base64
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
import tritonclient.utils.shared_memory as memory
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.frontends.kserve.models import Live
from tritium.errors import Code, TritiumError
from tritium.frontends.kserve import shared_memory
from tritium.frontends.kserve.shared_memory import FOLDER, Regions, SystemMemory

pb: Any = service_pb2
PAGE = mmap.PAGESIZE


@pytest.fixture
def key() -> Iterator[str]:
    path = FOLDER / f"tritium-test-{os.getpid()}"
    path.write_bytes(bytes(range(256)) * (2 * PAGE // 256))
    yield "/" + path.name
    path.unlink(missing_ok=True)


def refused(call: Any, *arguments: Any) -> TritiumError:
    with pytest.raises(TritiumError) as caught:
        call(*arguments)
    return caught.value


def test_windows(key: str) -> None:
    regions = Regions()
    regions.register_system("r", key, PAGE, 64)
    window = regions.window("r", 16, 8)
    assert bytes(window.read()) == bytes(range(16, 24))
    window.write("OUT", memoryview(b"abcd"))
    assert (FOLDER / key[1:]).read_bytes()[PAGE + 15 : PAGE + 21] == b"\x0fabcd\x14"
    error = refused(window.write, "OUT", memoryview(b"x" * 9))
    assert error.code is Code.INTERNAL and "(8 bytes) should be at least 9 bytes" in error.message
    for offset, size, words in (
        (64, 1, "Invalid offset for"),
        (60, 5, "Invalid offset + byte size"),
        (-1, 1, "Invalid"),
    ):
        assert words in refused(regions.window, "r", offset, size).message
    assert refused(regions.window, "s", 0, 1).code is Code.NOT_FOUND


def test_a_region_that_was_unregistered_serves_its_requests(key: str) -> None:
    regions = Regions()
    regions.register_system("r", key, 0, 64)
    window = regions.window("r", 0, 4)
    gc.collect()
    opened = len(os.listdir("/proc/self/fd"))
    regions.unregister("system", "r")
    (FOLDER / key[1:]).unlink()
    assert bytes(window.read()) == b"\0\1\2\3"
    del window
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == opened - 1


def test_a_file_that_is_cut_short_is_an_error_and_no_signal(key: str) -> None:
    regions = Regions()
    regions.register_system("r", key, 0, 2 * PAGE)
    os.truncate(FOLDER / key[1:], PAGE)
    window = regions.window("r", PAGE - 8, 16)
    for call in (lambda: window.read(), lambda: window.write("OUT", memoryview(b"x" * 16))):
        assert "has become shorter than the" in refused(call).message
    window.write("OUT", memoryview(b"x" * 8))
    assert os.path.getsize(FOLDER / key[1:]) == PAGE


@pytest.mark.parametrize("name", ["", "/", "/a/b", "/..", "..", "/nothing-here", "/a\0b"])
def test_keys_that_are_no_shared_memory(name: str) -> None:
    assert refused(SystemMemory, name).code is Code.INTERNAL


def test_links_folders_and_pipes_are_not_followed(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe"):
        assert refused(SystemMemory, name).code is Code.INTERNAL
    assert SystemMemory("target").size == 1


def test_registering(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    regions = Regions()
    regions.register_system("r", key, 0, 64)
    assert refused(regions.register_system, "r", key, 0, 64).code is Code.ALREADY_EXISTS
    assert refused(regions.register_cuda, "r", b"", 0, 64).code is Code.ALREADY_EXISTS
    assert "multiple of the page size" in refused(regions.register_system, "s", key, 8, 64).message
    for offset, size in ((0, 0), (0, 2 * PAGE + 1), (1 << 60, 1)):
        assert "do not fit" in refused(regions.register_system, "s", key, offset, size).message
    assert refused(regions.register_cuda, "s", b"abc", 0, 64).code is Code.INVALID_ARGUMENT
    assert [r.name for r in regions.status("system")] == ["r"] and regions.status("cuda") == []
    regions.unregister("cuda")
    regions.unregister("cuda", "r")
    assert refused(regions.status, "cuda", "r").message == "Unable to find cuda shared memory region: 'r'"
    monkeypatch.setattr(shared_memory, "_MAX_REGIONS", 1)
    assert refused(regions.register_system, "s", key, 0, 64).code is Code.RESOURCE_EXHAUSTED
    regions.unregister("system")
    assert regions.status("system") == []


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_with_the_client(live: Live, kind: str) -> None:
    library = http_client if kind == "http" else grpc_client
    url = live.url.removeprefix("http://") if kind == "http" else live.grpc_address
    values = np.array([[1, 2, 3]], np.float32)
    region = memory.create_shared_memory_region("both", f"/tritium-{kind}-{os.getpid()}", 64)
    client = library.InferenceServerClient(url)
    try:
        memory.set_shared_memory_region(region, [values])
        client.register_system_shared_memory("both", f"/tritium-{kind}-{os.getpid()}", 64)
        sent = library.InferInput("IN", [1, 3], "FP32")
        sent.set_shared_memory("both", 12)
        wanted = library.InferRequestedOutput("OUT")
        wanted.set_shared_memory("both", 16, offset=32)
        answer = client.infer("echo", [sent], outputs=[wanted])
        assert answer.get_output("OUT") is not None
        back = memory.get_contents_as_numpy(region, np.float32, [1, 3], offset=32)
        assert back.tolist() == values.tolist()
        wanted.set_shared_memory("both", 4)
        with pytest.raises(InferenceServerException, match="should be at least 12 bytes"):
            client.infer("echo", [sent], outputs=[wanted])
        with pytest.raises(InferenceServerException, match="already in manager"):
            client.register_system_shared_memory("both", f"/tritium-{kind}-{os.getpid()}", 64)
        client.unregister_system_shared_memory("both")
        with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'both'"):
            client.get_system_shared_memory_status("both")
    finally:
        client.unregister_system_shared_memory()
        client.close()
        memory.destroy_shared_memory_region(region)


def test_mixed_with_raw_contents(live: Live, key: str) -> None:
    """Over gRPC, raw contents are there only for the inputs that are not in shared memory."""
    live.shared.regions.register_system("mixed", key, 0, 64)
    request = pb.ModelInferRequest(model_name="types", raw_input_contents=[b"\7"])
    one = request.inputs.add(name="IN_UINT8", datatype="UINT8", shape=[2])
    one.parameters["shared_memory_region"].string_param = "mixed"
    one.parameters["shared_memory_byte_size"].int64_param = 2
    request.inputs.add(name="IN_INT8", datatype="INT8", shape=[1])
    with grpc.insecure_channel(live.grpc_address) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert list(answer.raw_output_contents) == [b"\0\1", b"\7"]
    live.shared.regions.unregister("system")


def test_cuda_without_a_gpu(live: Live) -> None:
    handle = base64.b64encode(bytes(64)).decode()
    body = {"raw_handle": {"b64": handle}, "device_id": 0, "byte_size": 64}
    from tests.frontends.kserve.test_http import call

    status, _, answer = call(live, "POST", "/v2/cudasharedmemory/region/c/register", body)
    assert status == 400 and answer["error"].startswith("failed to register shared memory region: invalid args")
    assert call(live, "GET", "/v2/cudasharedmemory/status")[2] == []
    assert call(live, "POST", "/v2/cudasharedmemory/region/c/unregister")[0] == 200
    assert call(live, "GET", "/v2/cudasharedmemory/register")[0] == 404
