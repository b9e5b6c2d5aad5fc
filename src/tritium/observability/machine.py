"""What the machine itself says: use of its processors and of its memory, from ``/proc``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class MachineLevels:
    """Levels of the machine.

    Attributes:
        utilization: share of all processors' time since the last look, 0 to 1.
        memory_total: bytes of memory.
        memory_used: bytes that could not be had at once.
    """

    utilization: float
    memory_total: int
    memory_used: int


class Machine:
    """Reads the levels; each look measures from the one before."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._before = (0, 0)

    def read(self) -> MachineLevels | None:
        """The levels now; None where the kernel does not tell them (other systems than Linux)."""
        try:
            times = [int(word) for word in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
            lines = (self._proc / "meminfo").read_text().splitlines()
            memory = {key: int(rest.split()[0]) * 1024 for key, _, rest in (line.partition(":") for line in lines)}
            total, available = memory["MemTotal"], memory["MemAvailable"]
        except (OSError, ValueError, KeyError, IndexError):
            return None
        # user nice system idle iowait irq softirq steal
        idle, whole = times[3] + times[4], sum(times)
        passed, idled = whole - self._before[0], idle - self._before[1]
        self._before = (whole, idle)
        busy = (passed - idled) / passed if passed > 0 else 0.0
        return MachineLevels(min(1.0, max(0.0, busy)), total, total - available)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Host memory that can be taken now: what the kernel calls available, less where a cgroup has a limit."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    free = kib.get("MemAvailable", kib.get("MemFree", 0)) * 1024
    for group, limit, used in (
        ("sys/fs/cgroup", "memory.max", "memory.current"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        folder = root / group
        try:
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
        except (OSError, ValueError):  # no such cgroup, or "max"
            continue
        free = min(free, left + _reclaimable(folder))
    return max(free, 0)


def _reclaimable(group: Path) -> int:
    """Bytes of files that a cgroup counts as used, but that the kernel drops before anything else."""
    try:
        stat = (group / "memory.stat").read_text()
    except OSError:
        return 0
    counts = dict(line.split(maxsplit=1) for line in stat.splitlines() if " " in line)
    return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
