from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tritium.llm.types import EngineStats
from tritium.observability.metrics import FAILURE_REASONS, TABLE, Metrics, metrics_app


def values(metrics: Metrics) -> dict[str, float]:
    """``name{labels}`` to value, as the conformance runner reads the page."""
    found: dict[str, float] = {}
    for line in metrics.render().decode().splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"([a-z_:]+)(\{.*\})? (\S+)", line).groups()  # type: ignore[union-attr]
            pairs = sorted(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or ""))
            found[f"{name}{{{','.join(f'{k}={v}' for k, v in pairs)}}}"] = float(value)
    return found


def test_a_loaded_model_shows_every_series_at_zero() -> None:
    metrics = Metrics()
    metrics.add_model("echo", "1")
    expected = {f"{f.name}{{model=echo,version=1}}" for f in TABLE if not f.llm and "reason" not in f.labels}
    expected |= {f"nv_inference_request_failure{{model=echo,reason={r},version=1}}" for r in FAILURE_REASONS}
    assert values(metrics) == dict.fromkeys(expected, 0.0)
    assert "tritium_" not in metrics.render().decode()


def test_names_kinds_and_help_are_those_of_the_table() -> None:
    metrics = Metrics()
    metrics.add_model("llm", "1", "llm")
    page = metrics.render().decode()
    assert re.findall(r"^# TYPE (\S+) (\S+)$", page, re.M) == [(f.name, f.kind) for f in TABLE]
    assert re.findall(r"^# HELP (\S+) (.+)$", page, re.M) == [(f.name, f.help) for f in TABLE]
    assert "_created" not in page
    assert len(list(text_string_to_metric_families(page))) == len(TABLE)


def test_events_count() -> None:
    metrics = Metrics()
    one = metrics.add_model("m", "1")
    one.request_success()
    one.request_failure("REJECTED")
    one.inference(3)
    one.execution(0.25)
    one.durations_us(request=10, queue=1, compute_input=2, compute_infer=3, compute_output=4)
    one.pending(2)
    one.pending(-1)
    found = {name: value for name, value in values(metrics).items() if value}
    at = "{model=m,version=1}"
    assert found == {
        f"nv_inference_request_success{at}": 1,
        "nv_inference_request_failure{model=m,reason=REJECTED,version=1}": 1,
        f"nv_inference_count{at}": 3,
        f"nv_inference_exec_count{at}": 0.25,
        f"nv_inference_request_duration_us{at}": 10,
        f"nv_inference_queue_duration_us{at}": 1,
        f"nv_inference_compute_input_duration_us{at}": 2,
        f"nv_inference_compute_infer_duration_us{at}": 3,
        f"nv_inference_compute_output_duration_us{at}": 4,
        f"nv_inference_pending_request_count{at}": 1,
    }


def test_series_stay_after_unload_and_begin_anew_at_reload() -> None:
    metrics = Metrics()
    metrics.add_model("m", "1", "llm").request_success(5)
    metrics.remove_model("m", "1")
    metrics.remove_model("never", "1")
    assert values(metrics)["nv_inference_request_success{model=m,version=1}"] == 5
    assert "tritium_" not in metrics.render().decode()
    metrics.add_model("m", "1", "llm")
    found = values(metrics)
    assert found["nv_inference_request_success{model=m,version=1}"] == 0
    assert found["tritium_requests_running{model=m,version=1}"] == 0


def test_token_times_are_histograms() -> None:
    metrics = Metrics()
    one = metrics.add_model("m", "1", "llm")
    one.observe_first_token(0.03)
    one.observe_inter_token(0.004, 3)
    one.observe_queue(0.0002)
    found = values(metrics)
    assert found["tritium_time_to_first_token_seconds_bucket{le=0.02,model=m,version=1}"] == 0
    assert found["tritium_time_to_first_token_seconds_bucket{le=0.04,model=m,version=1}"] == 1
    assert found["tritium_inter_token_latency_seconds_count{model=m,version=1}"] == 3
    assert found["tritium_inter_token_latency_seconds_sum{model=m,version=1}"] == pytest.approx(0.012)
    assert found["tritium_queue_time_seconds_bucket{le=+Inf,model=m,version=1}"] == 1


@dataclass
class Engine:
    stats: EngineStats | None = None

    def read(self) -> EngineStats | None:
        return self.stats


def test_engines_are_read_with_the_page_and_survive_a_restart() -> None:
    metrics = Metrics()
    one = metrics.add_model("m", "1", "llm")
    engines = [Engine(), Engine()]
    for engine in engines:
        one.watch(engine.read)
    at = "{model=m,version=1}"
    assert values(metrics)[f"tritium_kv_cache_usage_ratio{at}"] == 0
    engines[0].stats = EngineStats(
        running=2, waiting=1, blocks_used=3, blocks_total=4, prefix_queries=100, prefix_hits=60, preemptions=2
    )
    engines[1].stats = EngineStats(running=1, blocks_used=1, blocks_total=4, prefix_queries=10)
    found = values(metrics)
    assert found[f"tritium_requests_running{at}"] == 3
    assert found[f"tritium_requests_waiting{at}"] == 1
    assert found[f"tritium_kv_cache_usage_ratio{at}"] == 0.5
    assert found[f"tritium_prefix_cache_queries_tokens_total{at}"] == 110
    assert found[f"tritium_prefix_cache_hits_tokens_total{at}"] == 60
    assert found[f"tritium_preemptions_total{at}"] == 2
    engines[0].stats = EngineStats(blocks_total=4, prefix_queries=7)
    found = values(metrics)
    assert found[f"tritium_prefix_cache_queries_tokens_total{at}"] == 117
    assert found[f"tritium_requests_running{at}"] == 1


def test_only_language_models_have_engines() -> None:
    one = Metrics().add_model("m", "1")
    with pytest.raises(ValueError, match="kind 'model'"):
        one.watch(lambda: None)


def test_label_values_are_escaped() -> None:
    metrics = Metrics()
    metrics.add_model('a"b\\c\nd', "1")
    assert '{model="a\\"b\\\\c\\nd",version="1"}' in metrics.render().decode()
    families = text_string_to_metric_families(metrics.render().decode())
    assert {sample.labels["model"] for family in families for sample in family.samples} == {'a"b\\c\nd'}


@pytest.mark.parametrize("path", ["/metrics", "/", "/any/thing"])
async def test_any_path_of_the_port_shows_the_page(path: str) -> None:
    metrics = Metrics()
    metrics.add_model("m", "1")
    sent: list[Any] = []

    async def send(event: Any) -> None:
        sent.append(event)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    app = metrics_app(metrics)
    await app({"type": "http", "method": "GET", "path": path}, receive, send)
    assert sent[0]["status"] == 200
    assert dict(sent[0]["headers"])[b"content-type"].startswith(b"text/plain")
    assert sent[1]["body"] == metrics.render()
    sent.clear()
    await app({"type": "http", "method": "HEAD", "path": path}, receive, send)
    assert sent[1]["body"] == b""


async def test_the_port_starts_and_stops() -> None:
    events = iter(["lifespan.startup", "lifespan.shutdown"])
    sent: list[str] = []

    async def send(event: Any) -> None:
        sent.append(event["type"])

    async def receive() -> Any:
        return {"type": next(events)}

    await metrics_app(Metrics())({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
