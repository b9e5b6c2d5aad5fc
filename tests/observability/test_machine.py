from __future__ import annotations

from pathlib import Path

from tritium.observability.machine import free_host_bytes


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_free_memory(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 2000 kB\nMemFree: 100 kB\nMemAvailable: 1000 kB\nHugePages_Total: 0\n")
    assert free_host_bytes(tmp_path) == 1000 * 1024
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "100000\n")
    assert free_host_bytes(tmp_path) == 1000 * 1024
    write(tmp_path, "sys/fs/cgroup/memory.max", "500000\n")
    assert free_host_bytes(tmp_path) == 400000
    write(tmp_path, "sys/fs/cgroup/memory.stat", "anon 50000\ninactive_file 60000\n")
    assert free_host_bytes(tmp_path) == 460000
