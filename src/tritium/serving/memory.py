"""Whether another load fits beside what runs: memory that is free now, of the machine and of its GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tritium.backends.base import Footprint
from tritium.observability.machine import free_host_bytes
from tritium.observability.tables import size

# Left free of what is free: an estimate is no promise, and the machine goes on working meanwhile.
SPARE = 0.1
# A GPU says what it has free within this time, or it counts as full.
ASK_S = 10.0
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Free:
    """Memory that can be taken now, in bytes; a GPU that is not listed does not tell."""

    host: int
    gpus: Mapping[str, int] = field(default_factory=dict[str, int])


async def free(gpus: Iterable[str] = ()) -> Free:
    """What is free now.

    Args:
        gpus: indices of the devices that matter.
    """
    wanted = sorted(set(gpus))
    found = await asyncio.gather(*(_gpu_free(gpu) for gpu in wanted))
    host = await asyncio.to_thread(free_host_bytes)
    return Free(host, {gpu: have for gpu, have in zip(wanted, found, strict=True) if have is not None})


def total(footprints: Iterable[Footprint]) -> Footprint:
    """The sum of some footprints."""
    host, gpus = 0, dict[str, int]()
    for one in footprints:
        host += one.host
        for gpu, need in one.gpus.items():
            gpus[gpu] = gpus.get(gpu, 0) + need
    return Footprint(host, gpus)


def lack(need: Footprint, have: Free) -> str:
    """What is missing, in words; "" when ``need`` fits into ``have`` with a tenth to spare."""
    if need.host > have.host * (1 - SPARE):
        return f"it is likely to take {size(need.host)} of memory, {size(have.host)} are free"
    for gpu, wanted in sorted(need.gpus.items()):
        there = have.gpus.get(gpu)
        if there is None:
            return f"GPU {gpu} does not tell what it has free"
        if wanted > there * (1 - SPARE):
            return f"it is likely to take {size(wanted)} of GPU {gpu}, {size(there)} are free"
    return ""


def resident_bytes(pid: int) -> int:
    """Memory of a process, pages that it shares with others counted by its share (PSS); 0 when it is gone."""
    with suppress(OSError, ValueError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


async def _gpu_free(gpu: str) -> int | None:
    """Bytes that a GPU has free, as its driver's own tool says; None when it does not."""
    query = ("--query-gpu=memory.free", "--format=csv,noheader,nounits", f"--id={gpu}")
    try:
        process = await asyncio.create_subprocess_exec(
            "nvidia-smi", *query, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(ASK_S):
            said, _ = await process.communicate()
        return int(said.decode().strip()) << 20
    except (TimeoutError, ValueError):
        return None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
