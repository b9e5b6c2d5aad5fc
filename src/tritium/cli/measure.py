"""``tritium bench``: chooses what to measure, shows progress, prints and writes the result."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from tritium.bench import Sample, WorkloadName, engine, kv, load, report, workload
from tritium.cli import options
from tritium.cli.flags import Parsed
from tritium.errors import Code, TritiumError, invalid
from tritium.llm.checkpoint import read_metadata
from tritium.llm.config import EngineConfig
from tritium.llm.models.families import resolve
from tritium.llm.names import find_model
from tritium.llm.types import EngineInfo
from tritium.observability import logs
from tritium.observability.tables import size

KV_ARRIVALS_PER_S = 4.0
BAR = 30


class Bar:
    """Progress of all runs on standard error: a bar where that is a terminal, else a line for each run."""

    def __init__(self, title: str, runs: int) -> None:
        self._title, self._runs, self._run = title, runs, 1
        self._shown = sys.stderr.isatty()
        self._begun = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """So many requests of the current run have ended; 0 at its start."""
        if not done:
            self._begun = time.monotonic()
        if self._shown:
            filled = BAR * done // total
            bar = "#" * filled + "." * (BAR - filled)
            print(
                f"\r{self._title} run {self._run}/{self._runs} [{bar}] {done}/{total}",
                end="",
                file=sys.stderr,
                flush=True,
            )
        if done == total:
            took = f"{time.monotonic() - self._begun:.1f} s"
            said = f"  {took}" if self._shown else f"{self._title} run {self._run}/{self._runs}: {total} done in {took}"
            print(said, file=sys.stderr, flush=True)
            self._run += 1


def bench(parsed: Parsed) -> int:
    """Measures one workload; 1 when a request failed."""
    asked = parsed.get(options.Bench)
    logs.setup("warning", "text")
    if asked.url is not None and asked.workload in ("E", "kv"):
        raise invalid(f"workload {asked.workload} starts its own process: it takes no --url", param="url")
    if asked.workload == "kv":
        result, text = _kv(asked, parsed.get(EngineConfig, model=""))
    elif asked.workload == "E":
        result, text = _start(asked, parsed)
    else:
        result = _workload(asked, parsed)
        text = report.show(result)
    result = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "tritium": metadata.version("tritium"), **result}
    if asked.output is not None:
        Path(asked.output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2) if asked.json else text)
    return int(bool(result.get("failed")))


def _workload(asked: options.Bench, parsed: Parsed) -> dict[str, Any]:
    name: WorkloadName = asked.workload  # pyright: ignore[reportAssignmentType]
    items = workload(name, request_rate=asked.request_rate)
    bar = Bar(f"workload {name}", asked.runs)
    facts: dict[str, Any] = {
        "workload": name,
        "num_prompts": len(items),
        "request_rate": asked.request_rate or "inf",
        "max_concurrency": asked.max_concurrency or None,
    }
    if asked.url is not None:
        typed = parsed.effective["model"].source != "default"
        model, runs = asyncio.run(_server(asked, asked.model if typed else None, items, bar))
        facts |= {"backend": "openai", "base_url": asked.url, "model_id": model}
    else:
        config = parsed.get(EngineConfig, model=str(find_model(asked.model)))
        print(f"loading {asked.model} ...", file=sys.stderr, flush=True)
        runs, info = asyncio.run(
            engine.measure(config, items, runs=asked.runs, max_concurrency=asked.max_concurrency, progress=bar)
        )
        facts |= {"backend": "offline", "model_id": asked.model, **_engine_facts(config, info)}
        facts |= {"kernels": info.kernels, "prefix_cache": config.prefix_cache}
    result = report.median_run([report.summary(samples, duration) for samples, duration in runs])
    if not result["completed"]:
        raise TritiumError(Code.INTERNAL, f"no request was answered: {'; '.join(result['errors'])}")
    return {**facts, **result, "rates": _rates(name, result)}


def _engine_facts(config: EngineConfig, info: EngineInfo) -> dict[str, Any]:
    """What figures of two engines may only be compared by."""
    threads = info.resolved["threads"].value if "threads" in info.resolved else config.threads
    return {"dtype": info.dtype, "dtype_reason": info.dtype_reason, "device": info.device, "threads": threads}


async def _server(
    asked: options.Bench, model: str | None, items: Any, bar: Bar
) -> tuple[str, list[tuple[list[Sample], float]]]:
    target = load.Target.parse(asked.url or "")
    name = model or await load.served_model(target)
    runs: list[tuple[list[Sample], float]] = []
    for number in range(asked.runs):
        salt = f"bench-{time.time_ns()}-{number}"
        runs.append(await load.run(target, name, items, max_concurrency=asked.max_concurrency, salt=salt, progress=bar))
    return name, runs


def _rates(name: WorkloadName, result: dict[str, Any]) -> dict[str, float]:
    """What a workload with one request is about: the speed of its two halves."""
    rates: dict[str, float] = {}
    if name == "A" and result["median_tpot_ms"]:
        rates["decode_tokens_per_s"] = 1e3 / result["median_tpot_ms"]
    if name == "B" and result["median_ttft_ms"]:
        rates["prefill_tokens_per_s"] = 1e3 * result["total_input_tokens"] / result["median_ttft_ms"]
    return rates


def _start(asked: options.Bench, parsed: Parsed) -> tuple[dict[str, Any], str]:
    """Workload E."""
    from tritium.llm.runner.ranks import plan

    chosen = {n: v for n, v in parsed.chosen(EngineConfig).items() if n != "seed"}
    flags = [_flag(name, value) for name, value in chosen.items() if not isinstance(value, tuple)]
    starts: list[engine.Start] = []
    bar = Bar("workload E", asked.runs)
    for _ in range(asked.runs):
        bar(0, 1)
        starts.append(engine.start_to_first_token(asked.model, flags))
        bar(1, 1)
    times = sorted(start.first_token_s for start in starts)
    median, peak = times[len(times) // 2], max(start.peak_bytes for start in starts)
    config = parsed.get(EngineConfig, model=str(find_model(asked.model)))
    facts = _engine_facts(config, plan(config).info)
    result: dict[str, Any] = {
        "workload": "E",
        "model_id": asked.model,
        **facts,
        "completed": len(starts),
        "start_to_first_token_s": median,
        "durations": [start.first_token_s for start in starts],
        "peak_bytes": peak,
    }
    shown = ", ".join(f"{t:.2f}" for t in times)
    lines = [f"workload E, {asked.model}", f"  {report.engine_line(facts)}"]
    lines.append(f"  start to first token {median:.2f} s ({shown}), peak memory {size(peak)}")
    return result, "\n".join(lines)


def _flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"


def _kv(asked: options.Bench, config: EngineConfig) -> tuple[dict[str, Any], str]:
    """Workload kv: the lengths of C, arriving."""
    facts = resolve(read_metadata(find_model(asked.model)))
    per_token = 2 * facts.layers * facts.kv_heads * facts.head_dim * (4 if config.dtype == "float32" else 2)
    rate = asked.request_rate or KV_ARRIVALS_PER_S
    result = kv.compare(
        workload("C", request_rate=rate),
        bytes_per_token=per_token,
        block_size=config.block_size,
        max_length=asked.kv_max_length,
    )
    return {"model_id": asked.model, "request_rate": rate, **result}, kv.show(result)
