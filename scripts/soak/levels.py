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
        descriptors: but those of shared memory: each end of a segment, and each to which it was lent, has one.
        segments: anonymous shared-memory files that are mapped.
        files: entries of /dev/shm.
    """

    memory: int
    descriptors: int
    segments: int
    files: int
    processes: int

    def growth(self, before: Levels, memory_limit: int) -> list[str]:
        """What has grown beyond what an allocator, a pool or a retried connection may keep."""
        limits = {"memory": memory_limit, "segments": 2 * self.processes, "files": 0, "processes": 0}
        limits["descriptors"] = 16
        return [
            f"{name} grew from {getattr(before, name)} to {getattr(self, name)}"
            for name, limit in limits.items()
            if getattr(self, name) - getattr(before, name) > limit
        ]


def target(pid: int, fd: str) -> str:
    """What a descriptor stands for; "" when it is closed by now."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return ""


def measure(server: int) -> Levels:
    memory = descriptors = 0
    segments: set[str] = set()
    processes = tree(server)
    for pid in processes:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            memory += 1024 * sum(int(n) for n in re.findall(r"^Pss:\s+(\d+)", text, re.M))
            descriptors += sum("/memfd:" not in target(pid, fd) for fd in os.listdir(f"/proc/{pid}/fd"))
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/memfd:" in line:
                    segments.add(line.split()[4])
    return Levels(memory, descriptors, len(segments), len(os.listdir("/dev/shm")), len(processes))


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
