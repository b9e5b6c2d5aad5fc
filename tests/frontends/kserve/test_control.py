from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.frontends.kserve.models import Live, Mirror
from tests.frontends.kserve.test_grpc import code, request
from tests.frontends.kserve.test_http import ECHO, call
from tritium.errors import TritiumError
from tritium.frontends.access import GRPC_PREFIX, Restrictions
from tritium.frontends.kserve.shared import Shared, header_pattern
from tritium.observability.log_settings import LogSettings

pb: Any = service_pb2
HTTP = "shared-memory,logging,model-repository:admin-key=let-me-in"
GRPC = "shared-memory,logging,inference:admin-key=let-me-in"


@pytest.fixture(scope="module")
def guarded(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose operator said something of headers, access and logs."""
    folder = tmp_path_factory.mktemp("guarded")
    root, own = logging.getLogger(), logging.getLogger("tritium")
    before = root.handlers[:], root.level, own.level
    logs = LogSettings("info", "text", str(folder / "log"))
    shared = Shared(
        logs=logs,
        http_headers=header_pattern("--http-header-forward-pattern", "conf-.*|plain"),
        grpc_headers=header_pattern("--grpc-header-forward-pattern", "conf-.*"),
        http_access=Restrictions("--http-restricted-api", [HTTP]),
        grpc_access=Restrictions("--grpc-restricted-protocol", [GRPC], GRPC_PREFIX),
    )
    (folder / "models").mkdir()
    one = Live(folder / "models", shared)  # over the backends that ``live`` has made known
    yield one
    one.stop()
    logs.close()
    root.handlers[:], level, own_level = before
    root.setLevel(level)
    own.setLevel(own_level)


@pytest.fixture
def stub(guarded: Live) -> Iterator[Any]:
    with grpc.insecure_channel(guarded.grpc_address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


ALLOWED = {"admin_key": "let-me-in"}


def test_restricted_over_http(guarded: Live) -> None:
    for path in ("/v2/logging", "/v2/systemsharedmemory/status"):
        status, _, answer = call(guarded, "GET", path)
        assert (status, answer) == (403, {"error": "This API is restricted, expecting header 'admin-key'"})
        assert call(guarded, "GET", path, admin_key="guess")[0] == 403
        assert call(guarded, "GET", path, **ALLOWED)[0] == 200
    assert call(guarded, "POST", "/reload")[0] == 403
    assert call(guarded, "POST", "/reload", **ALLOWED)[0] == 200
    assert call(guarded, "GET", "/v2/trace/setting")[0] == 200
    assert call(guarded, "GET", "/health")[0] == 200


def test_restricted_over_grpc(stub: Any) -> None:
    missing = ("UNAVAILABLE", "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'")
    key = [("triton-grpc-protocol-admin-key", "let-me-in")]
    assert code(stub.LogSettings, pb.LogSettingsRequest()) == missing
    assert code(stub.ModelInfer, request()) == missing
    assert code(lambda message, **more: list(stub.ModelStreamInfer(iter([message]), **more)), request()) == missing
    assert stub.ModelInfer(request(), metadata=key).outputs
    assert stub.ServerLive(pb.ServerLiveRequest()).live
    assert stub.LogSettings(pb.LogSettingsRequest(), metadata=key).settings["log_info"].bool_param


@pytest.mark.parametrize("text", ["", "health", "health:key", "health:=v", "nothing:k=v", ":k=v", "health,health:k=v"])
def test_restrictions_that_cannot_be_read(text: str) -> None:
    with pytest.raises(TritiumError, match="--http-restricted-api"):
        Restrictions("--http-restricted-api", [text])


def test_forwarded_headers(guarded: Live, stub: Any) -> None:
    """The names arrive as the client spelled them, which only HTTP lets it do."""
    Mirror.seen.clear()
    body = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1,1],"data":[1]}],"parameters":{"conf-one":"mine"}}'
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n" % len(body)
    more = b"Conf-Two: b\r\nconf-one: a\r\nPLAIN: c\r\nxconf-3: d\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", guarded.http_port)) as connection:
        connection.sendall(head + more + body)
        assert b"200 OK" in connection.recv(4096)
    assert Mirror.seen[-1].parameters == {"Conf-Two": "b", "conf-one": "a", "PLAIN": "c"}
    metadata = [("triton-grpc-protocol-admin-key", "let-me-in"), ("conf-x", "1"), ("conf-bin", b"\0"), ("other", "2")]
    stub.ModelInfer(request(note="n"), metadata=metadata)
    assert Mirror.seen[-1].parameters == {"conf-x": "1", "note": "n"}
    list(stub.ModelStreamInfer(iter([request()]), metadata=metadata))
    assert Mirror.seen[-1].parameters == {"conf-x": "1"}
    with pytest.raises(TritiumError, match="is not a regular expression"):
        header_pattern("--http-header-forward-pattern", "(")


def test_log_settings(guarded: Live, stub: Any) -> None:
    status, _, found = call(guarded, "POST", "/v2/logging", {"log_info": False, "other": 1}, **ALLOWED)
    assert status == 200 and found["log_info"] is False
    change = pb.LogSettingsRequest()
    change.settings["log_info"].bool_param = True
    change.settings["log_verbose_level"].uint32_param = 0
    change.settings["unknown"].string_param = "x"
    metadata = [("triton-grpc-protocol-admin-key", "let-me-in")]
    answer = stub.LogSettings(change, metadata=metadata)
    assert answer.settings["log_info"].bool_param
    assert answer.settings["log_format"].string_param == "default"
    change.settings["log_info"].string_param = "yes"
    said = ("INVALID_ARGUMENT", "invalid value type for 'log_info', expected bool_param.")
    assert code(stub.LogSettings, change, metadata=metadata) == said
    for body, expected in (({"log_info": 1}, 500), ({"log_file": "x"}, 501), ({"log_format": "xml"}, 503), ([], 200)):
        assert call(guarded, "POST", "/v2/logging", body, **ALLOWED)[0] == expected


def test_trace_settings(live: Live) -> None:
    where = "/v2/models/echo/trace/setting"
    assert call(live, "POST", where, {"trace_rate": "5"})[2]["trace_rate"] == "5"
    assert call(live, "GET", "/v2/trace/setting")[2]["trace_rate"] == "1000"
    assert call(live, "POST", where, {"trace_rate": None})[2]["trace_rate"] == "1000"
    assert call(live, "POST", where, {"trace_level": ["TIMESTAMPS", "TENSORS"]})[2]["trace_level"] == [
        "TIMESTAMPS",
        "TENSORS",
    ]
    assert call(live, "POST", where, {"trace_level": None})[2]["trace_level"] == ["OFF"]
    assert call(live, "POST", where, {"trace_rate": "7"}, Origin="http://elsewhere")[0] == 403
    assert call(live, "GET", "/v2/models/nope/trace/setting")[0] == 400


def test_reload_over_http(live: Live) -> None:
    assert call(live, "POST", "/reload", Origin="http://elsewhere")[0] == 403
    status, _, changes = call(live, "POST", "/reload")
    assert status == 200 and changes == {"loaded": [], "unloaded": [], "failed": {}, "moving": []}


def test_files_in_a_load_request(live: Live) -> None:
    where = "/v2/repository/models/made_up/load"
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    config = json.dumps(
        {"backend": "mirror", "input": [{"name": "IN", **tensor}], "output": [{"name": "OUT", **tensor}]}
    )
    body = {"parameters": {"config": config, "file:1/weights.bin": "AAAA"}}
    assert call(live, "POST", where, body)[0] == 200
    answer = call(live, "POST", "/v2/models/made_up/infer", {"inputs": [{**ECHO["inputs"][0], "shape": [2]}]})
    assert answer[0] == 200
    folder = live.server._model("made_up", "").context.version_folder
    assert folder is not None and Path(folder, "weights.bin").read_bytes() == b"\0\0\0"
    assert call(live, "POST", "/v2/repository/models/made_up/unload")[0] == 200
    for path in ("../x", "/etc/x", ""):
        body = {"parameters": {"config": config, f"file:{path}": "AAAA"}}
        assert call(live, "POST", where, body)[0] == 400
