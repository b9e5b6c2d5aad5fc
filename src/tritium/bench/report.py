"""Figures of a benchmark: the keys of ``vllm bench serve``, a table, JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tritium.bench import Sample

METRICS = ("ttft", "tpot", "itl", "e2el")
TITLES = {
    "ttft": "time to first token, ms",
    "tpot": "time per output token, ms",
    "itl": "inter-token latency, ms",
    "e2el": "end-to-end latency, ms",
}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of the others lie, interpolated linearly, as numpy does."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latencies_ms(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Per metric, all its values in milliseconds.

    ``tpot`` is a request's time after its first token per further token; ``itl`` is each gap between pieces,
    spread evenly over the tokens of a piece that holds more than one.
    """
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for sample in samples:
        found["ttft"].append(1e3 * sample.first_token_s)
        found["e2el"].append(1e3 * sample.elapsed_s)
        if sample.output_tokens > 1:
            rest = sample.token_times_s[-1][0] - sample.first_token_s
            found["tpot"].append(1e3 * rest / (sample.output_tokens - 1))
        for (before, _), (at, count) in zip(sample.token_times_s, sample.token_times_s[1:], strict=False):
            found["itl"] += [1e3 * (at - before) / count] * count
    return found


def summary(samples: Sequence[Sample], duration_s: float) -> dict[str, Any]:
    """One run in the keys of ``vllm bench serve``."""
    good = [sample for sample in samples if not sample.error]
    prompt, output = sum(s.prompt_tokens for s in good), sum(s.output_tokens for s in good)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": output / duration_s,
        "total_token_throughput": (prompt + output) / duration_s,
    }
    for name, values in latencies_ms(good).items():
        result |= {
            f"mean_{name}_ms": statistics.fmean(values) if values else 0.0,
            f"median_{name}_ms": percentile(values, 0.5),
            f"std_{name}_ms": statistics.pstdev(values) if values else 0.0,
            f"p99_{name}_ms": percentile(values, 0.99),
        }
    errors = [sample.error for sample in samples if sample.error]
    if errors:
        result["errors"] = sorted(set(errors))
    return result


def median_run(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median duration, with all durations beside it."""
    ordered = sorted(runs, key=lambda run: run["duration"])
    return {**ordered[(len(ordered) - 1) // 2], "durations": [run["duration"] for run in runs]}


def engine_line(facts: dict[str, Any]) -> str:
    """What the figures depend on besides the machine."""
    parts = [f"{facts['dtype']} on {facts['device']} ({facts['dtype_reason']})"]
    if facts["threads"] is not None:
        parts.append(f"{facts['threads']} thread{'' if facts['threads'] == 1 else 's'}")
    if "kernels" in facts:
        parts += [f"kernels {facts['kernels']}", f"prefix cache {'on' if facts['prefix_cache'] else 'off'}"]
    return ", ".join(parts)


def show(result: dict[str, Any]) -> str:
    """The figures of a run as a text for the terminal."""
    lines = [f"workload {result['workload']}, {result['model_id']}, median of {len(result['durations'])} run(s)"]
    lines.append("  " + (engine_line(result) if "dtype" in result else f"the server at {result['base_url']}"))
    rows = [
        ("requests", f"{result['completed']} completed, {result['failed']} failed"),
        ("tokens", f"{result['total_input_tokens']} in, {result['total_output_tokens']} out"),
        ("duration, s", f"{result['duration']:.2f} (all: {', '.join(f'{d:.2f}' for d in result['durations'])})"),
        ("requests/s", f"{result['request_throughput']:.2f}"),
        ("output tokens/s", f"{result['output_throughput']:.1f}"),
        ("total tokens/s", f"{result['total_token_throughput']:.1f}"),
        *((name.replace("_", " "), f"{value:.1f}") for name, value in result.get("rates", {}).items()),
    ]
    lines += [f"  {name:<28}{value}" for name, value in rows]
    lines.append(f"  {'':<28}{'mean':>10}{'median':>10}{'std':>10}{'p99':>10}")
    for name in METRICS:
        cells = (result[f"{kind}_{name}_ms"] for kind in ("mean", "median", "std", "p99"))
        lines.append(f"  {TITLES[name]:<28}" + "".join(f"{cell:>10.1f}" for cell in cells))
    return "\n".join([*lines, *(f"  failed: {error}" for error in result.get("errors", []))])
