"""Counters of a model in the shape of Triton's statistics extension."""

from __future__ import annotations

from typing import Any

from tritium.serving.stats import Duration, ModelStats


def as_json(stats: ModelStats) -> dict[str, Any]:
    """One entry of ``model_stats``, as HTTP shows it (gRPC has the same fields)."""
    # What the response cache counts; Triton shows the fields of models without one too.
    none = _duration(Duration())
    return {
        "name": stats.model,
        "version": stats.version,
        "last_inference": stats.last_inference_ms,
        "inference_count": stats.inference_count,
        "execution_count": stats.execution_count,
        "inference_stats": {
            "success": _duration(stats.success),
            "fail": _duration(stats.fail),
            "queue": _duration(stats.queue),
            "compute_input": _duration(stats.compute_input),
            "compute_infer": _duration(stats.compute_infer),
            "compute_output": _duration(stats.compute_output),
            "cache_hit": none,
            "cache_miss": none,
        },
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
