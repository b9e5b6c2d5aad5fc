"""Use of the KV cache: one request mix on contiguous preallocation and on blocks, in equal memory.

No model runs: the real ``Scheduler`` and ``BlockPool`` are driven with made-up tokens, and a step takes the
time that SmolLM2-135M takes on two cores (``STEP_S + TOKEN_S`` per token). Contiguous preallocation is what
servers did before paging: a sequence gets room for the longest possible one when it starts, and keeps it to
its end; batching is continuous there too, so that only the memory differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritium.bench import Item
from tritium.llm.core.scheduler import Scheduler, SchedulerConfig
from tritium.llm.types import GenerateRequest, SamplingParams, StepOutput

STEP_S = 0.0084  # reading 270 MB of BF16 weights at 32 GB/s
TOKEN_S = 0.00086  # 1164 prompt tokens per second
MAX_TOKENS_PER_STEP = 512
MAX_ROWS = 64
POINTS = 12


@dataclass(frozen=True, slots=True)
class Point:
    """One step: its time and length, tokens whose keys and values are kept, and tokens that there is room for."""

    at_s: float
    step_s: float
    used: int
    reserved: int
    rows: int


@dataclass(slots=True)
class Trace:
    """All steps of one way of keeping the cache."""

    name: str
    points: list[Point] = field(default_factory=list[Point])

    @property
    def duration_s(self) -> float:
        """When the last step ended."""
        return self.points[-1].at_s + self.points[-1].step_s

    def mean(self, value: Callable[[Point], float]) -> float:
        """A value's mean over the time in which steps ran."""
        return sum(value(p) * p.step_s for p in self.points) / sum(p.step_s for p in self.points)

    @property
    def use(self) -> float:
        """Used bytes over reserved bytes, both summed over time."""
        return self.mean(lambda p: p.used) / self.mean(lambda p: p.reserved)


def on_blocks(items: Sequence[Item], *, capacity: int, block_size: int, max_length: int) -> Trace:
    """Replays on the engine's own scheduler and pool.

    Args:
        capacity: tokens that the cache has room for.
    """
    # Without the prefix cache: two sequences that share blocks would count their tokens twice.
    config = SchedulerConfig(
        block_size=block_size,
        max_rows=MAX_ROWS,
        max_tokens_per_step=MAX_TOKENS_PER_STEP,
        max_length=max_length,
        prefix_cache=False,
    )
    scheduler = Scheduler(config, capacity // block_size)
    waiting, held, now, trace = list(items), dict[int, int](), 0.0, Trace("blocks")
    while waiting or scheduler.has_work():
        while waiting and waiting[0].start_s <= now:
            item, name = waiting.pop(0), str(len(waiting))
            params = SamplingParams(max_tokens=item.output_len, ignore_eos=True)
            request = GenerateRequest(id=name, tokens=item.prompt, params=params, arrived_ns=int(now * 1e9))
            refusal = scheduler.add(request, int(now * 1e9))
            if refusal is not None and refusal.error is not None:
                raise refusal.error.exception()
        batch = scheduler.schedule(int(now * 1e9))
        if batch is None:
            now = waiting[0].start_s
            continue
        for row in batch.freed:
            del held[row]
        held.update({row.row: row.start + row.count for row in batch.rows})
        step_s = STEP_S + TOKEN_S * batch.num_tokens
        reserved = scheduler.stats().blocks_used * block_size
        trace.points.append(Point(now, step_s, sum(held.values()), reserved, len(held)))
        now += step_s
        sampled = sum(row.sample for row in batch.rows)
        output = StepOutput(batch.step, [[0]] * sampled, [None] * sampled, [], int(step_s * 1e9))
        scheduler.update(batch, output, int(now * 1e9))
    return trace


def contiguous(items: Sequence[Item], *, capacity: int, max_length: int) -> Trace:
    """Replays with room for ``max_length`` tokens per sequence, first come, first served."""
    slots = min(MAX_ROWS, capacity // max_length)
    waiting, running, now, trace = list(items), list[list[int]](), 0.0, Trace("contiguous")
    while waiting or running:
        while waiting and waiting[0].start_s <= now and len(running) < slots:
            item = waiting.pop(0)
            # Computed, prompt, and the length at which it ends: its last token is never computed.
            running.append([0, len(item.prompt), len(item.prompt) + item.output_len - 1])
        if not running:
            now = waiting[0].start_s
            continue
        budget = MAX_TOKENS_PER_STEP
        for seq in sorted(running, key=lambda s: s[0] < s[1]):  # decoding sequences first
            count = min(budget, max(1, seq[1] - seq[0]))
            seq[0] += count
            budget -= count
        step_s = STEP_S + TOKEN_S * (MAX_TOKENS_PER_STEP - budget)
        used = sum(seq[0] for seq in running)
        trace.points.append(Point(now, step_s, used, len(running) * max_length, len(running)))
        now += step_s
        running = [seq for seq in running if seq[0] < seq[2]]
    return trace


def compare(
    items: Sequence[Item], *, bytes_per_token: int, block_size: int = 16, max_length: int = 2048, slots: int = 8
) -> dict[str, Any]:
    """Both replays in the memory of ``slots`` preallocated sequences.

    Args:
        bytes_per_token: of keys and values in all layers.
    """
    capacity = slots * max_length
    traces = [
        contiguous(items, capacity=capacity, max_length=max_length),
        on_blocks(items, capacity=capacity, block_size=block_size, max_length=max_length),
    ]
    return {
        "workload": "kv",
        "num_prompts": len(items),
        "block_size": block_size,
        "max_length": max_length,
        "kv_cache_bytes": capacity * bytes_per_token,
        "kv_bytes_per_token": bytes_per_token,
        **{trace.name: _facts(trace, bytes_per_token) for trace in traces},
    }


def _facts(trace: Trace, width: int) -> dict[str, Any]:
    end = trace.duration_s
    times = [end * (i + 0.5) / POINTS for i in range(POINTS)]
    shown = [next((p for p in reversed(trace.points) if p.at_s <= t), trace.points[0]) for t in times]
    return {
        "used_over_reserved": trace.use,
        "mean_used_bytes": trace.mean(lambda p: p.used) * width,
        "mean_reserved_bytes": trace.mean(lambda p: p.reserved) * width,
        "peak_reserved_bytes": max(p.reserved for p in trace.points) * width,
        "mean_rows": trace.mean(lambda p: p.rows),
        "duration": end,
        "steps": len(trace.points),
        "over_time": [
            {"at_s": t, "used_bytes": p.used * width, "reserved_bytes": p.reserved * width, "rows": p.rows}
            for t, p in zip(times, shown, strict=True)
        ],
    }


def show(result: dict[str, Any]) -> str:
    """The comparison as a text for the terminal."""
    mib = 1 << 20
    lines = [
        f"{result['num_prompts']} requests in a KV cache of {result['kv_cache_bytes'] / mib:.0f} MiB "
        f"({result['kv_bytes_per_token']} bytes per token)"
    ]
    titles = {
        "contiguous": f"contiguous, {result['max_length']} tokens reserved per sequence",
        "blocks": f"blocks of {result['block_size']} tokens",
    }
    for name, title in titles.items():
        facts = result[name]
        lines += ["", title, f"  {'time, s':>8}{'used, MiB':>12}{'reserved, MiB':>15}{'use':>8}{'sequences':>11}"]
        for p in facts["over_time"]:
            use = p["used_bytes"] / p["reserved_bytes"] if p["reserved_bytes"] else 1.0
            used, reserved = p["used_bytes"] / mib, p["reserved_bytes"] / mib
            lines.append(f"  {p['at_s']:>8.2f}{used:>12.1f}{reserved:>15.1f}{use:>8.1%}{p['rows']:>11}")
        lines.append(
            f"  mean over time: {facts['used_over_reserved']:.1%} of what is reserved is used, "
            f"{facts['mean_rows']:.1f} sequences at a time; all done after {facts['duration']:.1f} s (simulated)"
        )
    return "\n".join(lines)
