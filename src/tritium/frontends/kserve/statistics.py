"""Counters of a model in the shape of Triton's statistics extension."""

from __future__ import annotations

from typing import Any

from tritium.serving.stats import BatchStats, Duration, ModelStats


def as_json(stats: ModelStats) -> dict[str, Any]:
    """One entry of ``model_stats``, as HTTP shows it (gRPC has the same fields)."""
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
            "cache_hit": _duration(stats.cache_hit),
            "cache_miss": _duration(stats.cache_miss),
        },
        # Triton fills this for backends that report each answer of a decoupled request; its Python backend does not.
        "response_stats": {},
        "batch_stats": [_batch(rows, stats.batches[rows]) for rows in sorted(stats.batches)],
        "memory_usage": [],
    }


def _batch(rows: int, batch: BatchStats) -> dict[str, Any]:
    return {
        "batch_size": rows,
        "compute_input": _duration(batch.compute_input),
        "compute_infer": _duration(batch.compute_infer),
        "compute_output": _duration(batch.compute_output),
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
