from __future__ import annotations

import os
from pathlib import Path

import pytest

from tritium.backends.base import Footprint
from tritium.serving import memory
from tritium.serving.memory import Free, lack, resident_bytes, total

GIB = 1 << 30


def test_what_fits_fits_with_a_tenth_to_spare():
    assert lack(Footprint(), Free(0)) == ""
    assert lack(Footprint(9 * GIB), Free(10 * GIB)) == ""
    assert lack(Footprint(9 * GIB + 1), Free(10 * GIB)) == "it is likely to take 9.00 GiB of memory, 10.00 GiB are free"
    two = Footprint(gpus={"0": GIB, "3": 5 * GIB})
    assert lack(two, Free(0, {"0": 2 * GIB, "3": 6 * GIB})) == ""
    assert lack(two, Free(0, {"0": 2 * GIB, "3": GIB})) == "it is likely to take 5.00 GiB of GPU 3, 1.00 GiB are free"
    assert lack(two, Free(0, {"3": 6 * GIB})) == "GPU 0 does not tell what it has free"


def test_the_sum_of_footprints():
    parts = [Footprint(1, {"0": 2}), Footprint(3, {"0": 4, "1": 5})]
    assert total(parts) == Footprint(4, {"0": 6, "1": 5})
    assert total([]) == Footprint()


def test_the_memory_of_a_process():
    assert resident_bytes(os.getpid()) > 1 << 20
    assert resident_bytes(1 << 30) == 0


@pytest.mark.parametrize(
    ("script", "expected"),
    [("echo 81000", 81000 << 20), ("echo '[N/A]'", None), ("sleep 60", None), (None, None)],
)
async def test_what_a_gpu_has_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, expected: int | None
):
    """Whatever the driver's tool says, or does not say, there is an answer."""
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(memory, "ASK_S", 1.0 if script == "sleep 60" else 30.0)
    found = await memory.free(["0", "0"])
    assert found.host > 0
    assert found.gpus == ({} if expected is None else {"0": expected})
