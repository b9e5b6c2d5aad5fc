from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.observability.otlp import Collector, Received, collecting
from tritium.errors import Code, TritiumError
from tritium.observability.trace_config import TraceConfig, parse_trace_config
from tritium.observability.tracing import Traces

MODE = "mode=opentelemetry"
PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}


def made(collector: Collector, *more: str) -> Traces:
    return Traces(parse_trace_config([MODE, f"opentelemetry,url={collector.url}", "rate=1", *more]))


def one_request(traces: Traces, headers: dict[str, str] | None = None) -> None:
    """A request to ``outer`` that asks ``inner``."""
    now = time.monotonic_ns()
    trace = traces.begin("outer", "", "r1", headers, now)
    assert trace is not None
    trace.stamp("HTTP_RECV_START", now)
    trace.stamp("HTTP_RECV_END", now + 10)
    child = trace.child("inner", "", "r2")
    child.served("3", now + 20, now + 70, (10, 10, 10))
    trace.stamp("INFER_RESPONSE_COMPLETE", now + 80)
    trace.served("1", now + 15, now + 90, None)
    trace.stamp("HTTP_SEND_START", now + 95)
    trace.stamp("HTTP_SEND_END", now + 100)
    trace.release()


def span(collector: Collector, name: str) -> Received:
    (found,) = [one for one in collector.spans if one.name == name]
    return found


def test_spans_have_the_names_and_attributes_of_triton() -> None:
    with collecting() as collector:
        traces = made(collector, "opentelemetry,resource=service.version=7", "opentelemetry,bsp_schedule_delay=50")
        before_ns = time.time_ns()
        one_request(traces)
        traces.close()
    assert collector.paths == ["/v1/traces"]
    assert collector.tree() == [
        ("InferRequest",),
        ("InferRequest", "outer"),
        ("InferRequest", "outer", "inner"),
        ("InferRequest", "outer", "inner", "compute"),
    ]
    assert len({one.trace_id for one in collector.spans}) == 1
    root, outer, inner = (span(collector, name) for name in ("InferRequest", "outer", "inner"))
    assert (root.resource["service.name"], root.resource["service.version"]) == ("triton-inference-server", "7")
    assert root.parent_id == ""
    assert [name for name, _ in root.events] == ["HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"]
    assert root.begin_ns == root.events[0][1] and root.end_ns == root.events[-1][1] == root.begin_ns + 100
    assert abs(root.begin_ns - before_ns) < 60e9
    assert outer.attributes == {
        "triton.model_name": "outer",
        "triton.model_version": 1,
        "triton.request_id": "r1",
        "triton.trace_id": 1,
        "triton.trace_parent_id": 0,
    }
    assert [name for name, _ in outer.events] == [
        "REQUEST_START",
        "QUEUE_START",
        "INFER_RESPONSE_COMPLETE",
        "REQUEST_END",
    ]
    assert (inner.attributes["triton.trace_parent_id"], inner.attributes["triton.model_version"]) == (1, 3)
    compute = span(collector, "compute")
    names = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
    assert [(name, ns - root.begin_ns) for name, ns in compute.events] == list(
        zip(names, (30, 40, 60, 70), strict=True)
    )


def test_a_clients_trace_is_joined_whatever_the_rate() -> None:
    with collecting() as collector:
        traces = made(collector, "rate=0", "count=0")
        assert traces.begin("m") is None
        assert traces.begin("m", headers={}) is None
        one_request(traces, PARENT)
        traces.close()
    root = span(collector, "InferRequest")
    assert (root.trace_id, root.parent_id) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


def test_a_context_goes_on_to_others() -> None:
    with collecting() as collector:
        traces = made(collector)
        trace = traces.begin("m", headers=PARENT)
        assert trace is not None
        ref = trace.ref()
        context = json.loads(ref.context)
        trace.served("1", 1, 2)
        trace.release()
        traces.close()
    model = span(collector, "m")
    assert ref.id == trace.id
    assert context == {"traceparent": f"00-{model.trace_id}-{model.id}-01"}


def test_a_receiver_that_is_not_there_troubles_nobody() -> None:
    with collecting() as collector:
        pass
    traces = made(collector)
    one_request(traces)
    begun = time.monotonic()
    traces.close()
    assert time.monotonic() - begun < 30


def test_the_level_off_and_settings() -> None:
    with collecting() as collector:
        traces = made(collector, "level=OFF", "opentelemetry,bsp_max_queue_size=4096", "opentelemetry,resource=a=b")
        assert traces.begin("m", headers=PARENT) is None
        assert traces.settings() == {
            "trace_level": ["OFF"],
            "trace_rate": ["1"],
            "trace_count": ["-1"],
            "trace_mode": ["opentelemetry"],
            "url": [f"http://{collector.url}/v1/traces"],
            "resource": ["a=b"],
            "bsp_max_queue_size": ["4096"],
        }
        traces.update({"trace_level": ["TIMESTAMPS"]})
        assert traces.begin("m") is not None
        traces.close()


def test_the_command_line() -> None:
    found = parse_trace_config([MODE, "opentelemetry,url=https://x:1/traces", "rate=0"])
    assert found == TraceConfig(levels=("TIMESTAMPS",), rate=0, mode="opentelemetry", url="https://x:1/traces")
    assert parse_trace_config([MODE]).url == "http://localhost:4318/v1/traces"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("level=TENSORS", "level is TENSORS, expected TIMESTAMPS"),
        ("opentelemetry,resource=x", "resource is 'x', expected KEY=VALUE"),
        ("opentelemetry,bsp_schedule_delay=0", "bsp_schedule_delay is '0', expected a number from 1"),
        ("opentelemetry,compression=gzip", "there is no setting 'opentelemetry,compression', expected url, resource"),
        ("rate=-1", "out of range"),
    ],
)
def test_settings_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(TritiumError, match=why) as caught:
        parse_trace_config([MODE, text])
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_settings_that_do_not_go_together() -> None:
    config = parse_trace_config(
        [MODE, "opentelemetry,bsp_max_queue_size=5", "opentelemetry,bsp_max_export_batch_size=9"]
    )
    with pytest.raises(TritiumError, match="max_export_batch_size must be") as caught:
        Traces(config)
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_without_the_sdk_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tritium.observability.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TritiumError, match=r"pip install 'tritium\[opentelemetry\]'") as caught:
        Traces(parse_trace_config([MODE]))
    assert caught.value.code is Code.UNAVAILABLE


def test_triton_mode_needs_no_sdk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "tritium.observability.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    Traces(TraceConfig(str(tmp_path / "t"), ("TIMESTAMPS",))).close()
