from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tritium.errors import TritiumError
from tritium.observability import series
from tritium.observability.machine import Machine
from tritium.observability.metrics import Metrics, MetricsConfig, check_labels
from tritium.observability.model_metrics import QUANTILES, parse_metrics_config
from tritium.observability.series import Family


def page(metrics: Metrics) -> list[str]:
    return [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]


def test_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family("f", "summary", "help", quantiles=(0.5, 0.99))
    summary = family.summary({"a": "b"})
    assert list(family.lines())[2:] == [
        'f_count{a="b"} 0.0',
        'f_sum{a="b"} 0.0',
        'f{a="b",quantile="0.5"} NaN',
        'f{a="b",quantile="0.99"} NaN',
    ]
    for value in range(1, 101):
        summary.observe(value)
    assert list(family.lines())[3:] == [
        'f_sum{a="b"} 5050.0',
        'f{a="b",quantile="0.5"} 50.0',
        'f{a="b",quantile="0.99"} 99.0',
    ]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + series.WINDOW_S + 1)
    assert list(family.lines())[2:] == [
        'f_count{a="b"} 100.0',
        'f_sum{a="b"} 5050.0',
        'f{a="b",quantile="0.5"} NaN',
        'f{a="b",quantile="0.99"} NaN',
    ]


def test_tags_are_labels_and_go_with_the_model() -> None:
    metrics = Metrics()
    metrics.add_model("m", "1", tags={"team": "red"}).request_success()
    assert 'nv_inference_request_success{model="m",version="1",_team="red"} 1.0' in page(metrics)
    metrics.add_model("m", "1")
    assert not any("_team" in line for line in page(metrics))


def test_latency_families_are_chosen() -> None:
    config = MetricsConfig(counter_latencies=False, summary_latencies=True, histogram_latencies=True)
    metrics = Metrics(config)
    plain = metrics.add_model("p", "1")
    plain.durations_us(request=5, queue=1)
    plain.cache_hit(1)
    plain.first_response(3)
    found = metrics.add_model("m", "1", cached=True, decoupled=True)
    found.durations_us(request=5, queue=1, compute_input=1, compute_infer=2, compute_output=1)
    found.first_response(200)
    found.cache_hit(3)
    found.cache_miss(4)
    lines = page(metrics)
    assert not any("duration_us" in line for line in lines)
    at = '{model="m",version="1"}'
    assert f"nv_inference_request_summary_us_count{at} 1.0" in lines
    assert f"nv_cache_hit_summary_per_model_sum{at} 3.0" in lines
    assert f"nv_cache_num_misses_per_model{at} 1.0" in lines
    assert 'nv_inference_first_response_histogram_ms_bucket{model="m",version="1",le="500.0"} 1.0' in lines
    assert not any(line.startswith(("nv_cache", "nv_inference_first")) and '"p"' in line for line in lines)


def test_levels_of_machine_and_cache(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  10 0 10 80 0 0 0 0 0 0\n")
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 40 kB\n")
    metrics = Metrics(MetricsConfig(interval_s=0), Machine(tmp_path))
    stats: Any = SimpleNamespace(
        entries=1, lookups=3, hits=2, misses=1, evictions=0, lookup_ns=5000, insertion_ns=7000, used_ratio=0.5
    )
    metrics.watch_cache(lambda: stats)
    (tmp_path / "stat").write_text("cpu  40 0 10 150 0 0 0 0 0 0\n")
    lines = page(metrics)
    assert "nv_cpu_utilization 0.3" in lines
    assert "nv_cpu_memory_used_bytes 61440.0" in lines
    assert "nv_cache_lookup_duration 5.0" in lines
    assert "nv_cache_util 0.5" in lines
    assert Machine(tmp_path / "nowhere").read() is None


def test_levels_are_as_old_as_the_interval_says(tmp_path: Path) -> None:
    reads: list[int] = []
    metrics = Metrics(MetricsConfig(interval_s=60))
    stats: Any = SimpleNamespace(
        entries=0, lookups=0, hits=0, misses=0, evictions=0, lookup_ns=0, insertion_ns=0, used_ratio=0
    )
    metrics.watch_cache(lambda: reads.append(1) or stats)
    metrics.render()
    metrics.render()
    assert len(reads) == 1


def test_custom_families() -> None:
    metrics = Metrics()
    family = metrics.custom("apples_total", "counter", "Apples")
    family.value(check_labels({"kind": "red", "at": "x"})).inc(2)
    metrics.custom("apples_total", "counter", "Apples").value({"other": "labels"}).inc()
    assert page(metrics) == ['apples_total{at="x",kind="red"} 2.0', 'apples_total{other="labels"} 1.0']
    for name, kind in (("9", "counter"), ("apples_total", "gauge"), ("nv_inference_count", "counter")):
        with pytest.raises(TritiumError, match="metric family"):
            metrics.custom(name, kind, "Apples")  # type: ignore[arg-type]
    with pytest.raises(TritiumError, match="metric label"):
        check_labels({"a-b": "c"})
    metrics.remove_custom("apples_total")
    assert page(metrics) == []


def test_command_line() -> None:
    texts = ["counter_latencies=false", "summary_latencies=true", "summary_quantiles=0.5:0.05,0.9:0.01"]
    assert parse_metrics_config(texts, 0.5) == MetricsConfig(False, True, (0.5, 0.9), False, 0.5)
    assert parse_metrics_config([]).quantiles == QUANTILES
    for text in ("summary_latencies=maybe", "speed=1", "summary_quantiles=2:0", "summary_quantiles=a", "x"):
        with pytest.raises(TritiumError, match="--metrics-config"):
            parse_metrics_config([text])
