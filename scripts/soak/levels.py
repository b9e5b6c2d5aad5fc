"""What a server holds while nobody asks anything: memory, descriptors, shared memory, processes, KV blocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from scripts.soak.run import Run

from tritium.bench.engine import tree
from tritium.bench.load import request


@dataclass(frozen=True)
class Levels:
    """Levels of all processes of a server together.

    Attributes:
        memory: bytes, shared pages counted by their share (PSS).
        segments: anonymous shared-memory files that are mapped.
        mappings: of them, over all processes: each end of a segment has one, and each process that it was lent to.
        files: entries of /dev/shm.
    """

    memory: int
    descriptors: int
    segments: int
    mappings: int
    files: int
    processes: int

    def growth(self, before: Levels, memory_limit: int) -> list[str]:
        """What has grown beyond what an allocator, a pool or a retried connection may keep."""
        limits = {"memory": memory_limit, "segments": 2 * self.processes, "files": 0, "processes": 0}
        # A mapping keeps a descriptor, and who may lend the segment another one: what has none leaks.
        limits["descriptors"] = 16 + 2 * max(0, self.mappings - before.mappings)
        return [
            f"{name} grew from {getattr(before, name)} to {getattr(self, name)}"
            for name, limit in limits.items()
            if getattr(self, name) - getattr(before, name) > limit
        ]


def measure(server: int) -> Levels:
    memory = descriptors = mappings = 0
    segments: set[str] = set()
    processes = tree(server)
    for pid in processes:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            memory += 1024 * sum(int(n) for n in re.findall(r"^Pss:\s+(\d+)", text, re.M))
            descriptors += len(os.listdir(f"/proc/{pid}/fd"))
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/memfd:" in line:
                    segments.add(line.split()[4])
                    mappings += 1
    return Levels(memory, descriptors, len(segments), mappings, len(os.listdir("/dev/shm")), len(processes))


async def settle(run: Run) -> None:
    """Waits until no KV block is in use; a problem when one stays."""
    left = float("nan")
    for _ in range(100):
        async with request(run.http, "GET", "/metrics") as response:
            text = (await response.body()).decode()
        found = re.findall(r"^tritium_kv_cache_usage_ratio\{[^}]*\} (\S+)$", text, re.M)
        left = sum(map(float, found)) if found else float("nan")
        if left == 0:
            return
        await asyncio.sleep(0.1)
    run.problem(f"KV blocks are still in use: ratio {left}")
