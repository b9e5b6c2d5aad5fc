"""Traces of a running server at an OpenTelemetry receiver, with the contexts that clients send."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import tritonclient.grpc as grpcclient

from tests.e2e.live import LiveServer
from tests.e2e.test_tritonserver import BODY, write_model
from tests.observability.otlp import collecting

TRACE = "0af7651916cd43dd8448eb211c80319"


def parent(number: int) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}{number}-b7ad6b7169203331-01"}


def test_requests_of_all_protocols_join_their_clients_traces(tmp_path: Path) -> None:
    write_model(tmp_path / "models", 1)
    with collecting() as collector:
        arguments = [f"--model-repository={tmp_path / 'models'}", "--trace-config=mode=opentelemetry"]
        arguments += ["--trace-config=rate=0", f"--trace-config=opentelemetry,url={collector.url}"]
        with LiveServer(arguments, tmp_path / "log") as server:
            where = f"{server.url}/v2/models/adder/infer"
            assert httpx.post(where, json=BODY).status_code == 200
            assert httpx.post(where, json=BODY, headers=parent(1)).status_code == 200
            given = grpcclient.InferInput("IN", [1, 2], "FP32")
            given.set_data_from_numpy(np.ones((1, 2), np.float32))
            with grpcclient.InferenceServerClient(server.grpc) as client:
                client.infer("adder", [given], headers=parent(2))
                answers: list[object] = []
                client.start_stream(lambda result, error: answers.append(error or result), headers=parent(3))
                client.async_stream_infer("adder", [given])
                client.stop_stream()
                assert isinstance(answers[0], grpcclient.InferResult)
            settings = httpx.get(f"{server.url}/v2/trace/setting").json()
            assert (settings["trace_mode"], settings["url"]) == ("opentelemetry", f"http://{collector.url}/v1/traces")
        # It sends what is left before it ends.
        roots = [span for span in collector.spans if span.name == "InferRequest"]
    assert sorted(span.trace_id for span in roots) == [f"{TRACE}{n}" for n in (1, 2, 3)]
    assert {span.parent_id for span in roots} == {"b7ad6b7169203331"}
    assert collector.tree() == sorted(
        3 * [("InferRequest",), ("InferRequest", "adder"), ("InferRequest", "adder", "compute")]
    )
    events = {span.trace_id[-1]: span.events[0][0] for span in roots}
    assert events == {"1": "HTTP_RECV_START", "2": "GRPC_WAITREAD_START", "3": "GRPC_WAITREAD_START"}
