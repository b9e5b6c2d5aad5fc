"""The figures: vLLM's keys, percentiles as numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from tritium.bench import Sample, report, workload


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.99, 1.0])
def test_percentile_is_numpys(count: int, share: float) -> None:
    values = np.random.default_rng(count).normal(size=count).tolist()
    assert report.percentile(values, share) == pytest.approx(np.quantile(values, share))


def test_summary() -> None:
    samples = [
        Sample(10, 3, [(0.1, 1), (0.2, 1), (0.4, 1)], 0.5),
        Sample(20, 5, [(0.3, 1), (0.7, 4)], 0.8),
        Sample(30, 0, [], 0.1, error="HTTP 500"),
    ]
    result = report.summary(samples, 2.0)
    assert result["completed"] == 2
    assert result["failed"] == 1
    assert result["errors"] == ["HTTP 500"]
    assert result["total_input_tokens"] == 30
    assert result["total_output_tokens"] == 8
    assert result["output_throughput"] == 4.0
    assert result["total_token_throughput"] == 19.0
    assert result["request_throughput"] == 1.0
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["mean_tpot_ms"] == pytest.approx((150 + 100) / 2)
    # Gaps: 100, 200, and four tokens that came together after 400.
    assert result["mean_itl_ms"] == pytest.approx((100 + 200 + 4 * 100) / 6)
    assert result["mean_e2el_ms"] == pytest.approx(650)
    for kind in ("mean", "median", "std", "p99"):
        for metric in ("ttft", "tpot", "itl", "e2el"):
            assert f"{kind}_{metric}_ms" in result


def test_median_run_and_table() -> None:
    sample = Sample(4, 2, [(0.1, 1), (0.2, 1)], 0.2)
    runs = [report.summary([sample], duration) for duration in (3.0, 1.0, 2.0)]
    result = {**report.median_run(runs), "workload": "A", "model_id": "m", "rates": {"decode_tokens_per_s": 10.0}}
    result["base_url"] = "http://x:1"
    assert result["duration"] == 2.0
    assert result["durations"] == [3.0, 1.0, 2.0]
    shown = report.show(result)
    assert "decode tokens per s" in shown
    assert "time to first token, ms" in shown
    assert "the server at http://x:1" in shown
    facts = {"dtype": "bfloat16", "dtype_reason": "why", "device": "cpu", "threads": 2, "kernels": "torch"}
    shown = report.show({**result, **facts, "prefix_cache": True})
    assert "\n  bfloat16 on cpu (why), 2 threads, kernels torch, prefix cache on\n" in shown
    assert report.engine_line({**facts, "threads": None, "kernels": "torch", "prefix_cache": False}).endswith("off")


def test_workloads_are_those_that_were_agreed() -> None:
    a, b, c, d, e = (workload(name) for name in ("A", "B", "C", "D", "E"))
    assert [(len(i.prompt), i.output_len) for i in a] == [(128, 128)]
    assert [(len(i.prompt), i.output_len) for i in b] == [(1024, 1)]
    assert (len(c), sum(len(i.prompt) for i in c), sum(i.output_len for i in c)) == (64, 9916, 8991)
    assert all(32 <= len(i.prompt) <= 256 and 32 <= i.output_len <= 256 for i in c)
    assert len({tuple(i.prompt[:512]) for i in d}) == 1
    assert [(len(i.prompt), i.output_len) for i in d] == [(528, 32)] * 32
    assert len(e) == 1


def test_arrivals() -> None:
    assert {item.start_s for item in workload("C")} == {0.0}
    times = [item.start_s for item in workload("C", request_rate=10.0)]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert 3 < times[-1] < 13
    assert times == [item.start_s for item in workload("C", request_rate=10.0)]
