"""Offline throughput and latency: the workloads on an engine of our own, and process start to first token."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

from tritium.bench import Item, Sample, workload
from tritium.errors import Code, TritiumError
from tritium.llm.checkpoint import read_metadata
from tritium.llm.client import EngineClient
from tritium.llm.config import EngineConfig
from tritium.llm.tokenizer import load_tokenizer
from tritium.llm.types import EngineInfo, GenerateRequest, SamplingParams

Progress = Callable[[int, int], None]
Run = tuple[list[Sample], float]


async def measure(
    config: EngineConfig,
    items: Sequence[Item],
    *,
    runs: int,
    max_concurrency: int = 0,
    progress: Progress = lambda done, total: None,
) -> tuple[list[Run], EngineInfo]:
    """Runs the requests ``runs`` times on one engine, after a short warm-up.

    Each run has a cache salt of its own: prefixes are shared inside a run, never with the run before.

    Args:
        max_concurrency: requests in flight at most; 0 for no limit.
    """
    tokenizer = load_tokenizer(read_metadata(Path(config.model)))
    client = EngineClient(config, tokenizer, name="bench")
    info = await client.start()
    try:
        await run_once(client, [Item(items[0].prompt[:16], 8)] * 2, "warm-up", 0, lambda done, total: None)
        results: list[Run] = []
        for number in range(runs):
            results.append(await run_once(client, items, f"run-{number}", max_concurrency, progress))
        return results, info
    finally:
        await client.stop()


async def run_once(client: EngineClient, items: Sequence[Item], salt: str, limit: int, progress: Progress) -> Run:
    """Sends all requests at their times; the samples in order, and the seconds until the last one ended.

    Args:
        salt: keeps this run from the cached prefixes of others.
        limit: requests in flight at most; 0 for no limit.
    """
    gate = asyncio.Semaphore(limit or len(items))
    progress(0, len(items))
    begun = time.perf_counter()
    done = 0

    async def one(number: int, item: Item) -> Sample:
        nonlocal done
        await asyncio.sleep(max(0.0, begun + item.start_s - time.perf_counter()))
        async with gate:
            sample = await _complete(client, f"{salt}-{number}", item, salt)
        done += 1
        progress(done, len(items))
        return sample

    samples = await asyncio.gather(*(one(number, item) for number, item in enumerate(items)))
    return samples, time.perf_counter() - begun


async def _complete(client: EngineClient, name: str, item: Item, salt: str) -> Sample:
    params = SamplingParams(temperature=0.0, max_tokens=item.output_len, ignore_eos=True)
    request = GenerateRequest(
        id=name, tokens=item.prompt, params=params, arrived_ns=time.monotonic_ns(), cache_salt=salt
    )
    times: list[tuple[float, int]] = []
    count, error, begun = 0, "", time.perf_counter()
    try:
        async with aclosing(client.generate(request)) as deltas:
            async for delta in deltas:
                if delta.tokens:
                    times.append((time.perf_counter() - begun, len(delta.tokens)))
                    count += len(delta.tokens)
    except TritiumError as problem:
        error = problem.message
    if not error and count != item.output_len:
        error = f"{count} tokens came instead of {item.output_len}"
    return Sample(len(item.prompt), count, times, time.perf_counter() - begun, error)


@dataclass(frozen=True, slots=True)
class Start:
    """How a process started.

    Attributes:
        first_token_s: from the start of the process to its first printed token.
        peak_bytes: largest sum, over its processes, of the memory each had at most (``VmHWM``); pages that
            they share count in each.
    """

    first_token_s: float
    peak_bytes: int


def start_to_first_token(model: str, flags: Sequence[str] = ()) -> Start:
    """Workload E: starts ``tritium generate`` and waits for the first character of its answer.

    Args:
        flags: engine flags for it.

    Raises:
        TritiumError: the process ended without one.
    """
    prompt = "The capital of France is"
    assert len(workload("E")) == 1
    command = [sys.executable, "-m", "tritium", "generate", prompt, "--model", model]
    command += ["--max-tokens", "1", "--temperature", "0", *flags]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            first = process.stdout.read(1)
            elapsed = time.perf_counter() - begun
            peak = sum(peak_memory(pid) for pid in tree(process.pid))
            if not first:
                raise TritiumError(Code.INTERNAL, process.stderr.read().decode(errors="replace").strip()[-500:])
            return Start(elapsed, peak)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found, todo = list[int](), [pid]
    while todo:
        found.append(todo.pop())
        with suppress(OSError):
            for task in os.listdir(f"/proc/{found[-1]}/task"):
                todo += [int(c) for c in Path(f"/proc/{found[-1]}/task/{task}/children").read_text().split()]
    return found


def peak_memory(pid: int) -> int:
    """The most memory that a process has had, in bytes; 0 when it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
