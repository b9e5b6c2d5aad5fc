"""Starts ``tritium serve`` with a repository of models for every scheduler and lets 32 clients at it.

They send inference requests over HTTP and gRPC, sequences, streams, completions and chats, leave in the middle and
send wrong requests, while models are loaded, unloaded, reloaded, reconfigured and broken, and a Python instance is
killed every 20 s. Every request must end once, with the right answer; only those inside a killed instance may fail,
with UNAVAILABLE. A canary asks the same greedy question again and again and must hear the same. In the end memory,
descriptors, shared memory and processes must be what they were a quarter into the time. Prints one result line; exit
status 1 when something is wrong.

    python -m scripts.soak --seconds 600 [--model smollm2] [--seed 0] [flags of tritium serve]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.soak import llm, models, tensors
from scripts.soak.levels import Levels, measure, settle
from scripts.soak.run import Run
from scripts.soak.trouble import Trouble, judge_crashes

from tritium.bench.load import Target, request
from tritium.llm.names import find_model

WORKERS = 32
# Growth after the warm-up that counts as a leak: allocators keep a little, a leak grows with the requests.
ALLOWED_GROWTH_BYTES = 64 << 20
KV_CACHE_BYTES = 16 << 20
START_LIMIT_S = 180.0
REQUEST_LIMIT_S = 120.0


async def worker(run: Run, number: int) -> None:
    """A client: one kind of request after the other. One in four asks the language model, at random."""
    async with tensors.Client(run) as client:
        while time.monotonic() < run.deadline and not run.hopeless:
            await run.goes.wait()
            of_text = number % 4 == 0
            kind = run.draw.choice(llm.KINDS if of_text else tensors.KINDS)
            run.busy += 1
            try:
                await asyncio.wait_for(kind(run if of_text else client), REQUEST_LIMIT_S)  # type: ignore[arg-type]
                run.counts[kind.__name__] += 1
            except tensors.Gone:
                run.counts["(gone)"] += 1
            except Exception as error:
                run.problem(f"{kind.__name__}: {type(error).__name__}: {error}")
            finally:
                run.busy -= 1


async def until_ready(run: Run, server: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit:
        if server.poll() is not None:
            raise SystemExit(f"soak: the server ended with {server.returncode}")
        with contextlib.suppress(OSError):
            async with request(run.http, "GET", "/v2/health/ready") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.2)
    raise SystemExit(f"soak: the server was not ready after {START_LIMIT_S:.0f} s")


async def levels(run: Run, trouble: Trouble, server: subprocess.Popen[bytes]) -> Levels:
    """What the server holds while everybody rests."""
    async with trouble.calm(), run.resting():
        await settle(run)
        await asyncio.sleep(1.0)
        return measure(server.pid)


async def traffic(run: Run, trouble: Trouble, server: subprocess.Popen[bytes], seconds: float) -> tuple[Levels, Levels]:
    """Runs it all; the levels at a quarter of the time and at its end."""
    await until_ready(run, server)
    run.deadline = time.monotonic() + seconds
    run.goes.set()
    workers = [asyncio.create_task(worker(run, number)) for number in range(WORKERS)]
    troubles = [asyncio.create_task(work()) for work in (trouble.changes, trouble.kills)]
    try:
        await asyncio.sleep(seconds / 4)
        before = await levels(run, trouble, server)
        # They end at the deadline, with their last answers.
        while time.monotonic() < run.deadline and not run.hopeless and not any(t.done() for t in troubles):
            await asyncio.sleep(0.1)
        after = await levels(run, trouble, server)
        await asyncio.gather(*workers)
    finally:
        for task in troubles:
            task.cancel()
    for ended in await asyncio.gather(*troubles, return_exceptions=True):
        if not isinstance(ended, asyncio.CancelledError):
            run.problem(f"the trouble ended: {ended!r}")
    await llm.canary(run)
    if len(run.canary) != 1:
        run.problem(f"the canary said {len(run.canary)} different things: {sorted(run.canary)[:3]}")
    judge_crashes(run)
    return before, after


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for entry in sockets:
        entry.bind(("127.0.0.1", 0))
    ports = [entry.getsockname()[1] for entry in sockets]
    for entry in sockets:
        entry.close()
    return ports


def command(run: Run, flags: list[str]) -> list[str]:
    http, grpc, metrics = str(run.http.port), str(run.grpc_port), str(free_ports(1)[0])
    found = [sys.executable, "-m", "tritium", "serve", "--model-repository", str(run.folder)]
    found += ["--model-control-mode", "explicit", "--load-model", "*", "--cache-config", "local,size=1048576"]
    found += ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    # The canary is compared whatever runs beside it: that is what --deterministic promises.
    # The system hands out the cache's memory page by page as blocks are first used: a small one is all there soon.
    return [*found, "--deterministic", "--kv-cache-bytes", str(KV_CACHE_BYTES), *flags]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds between killed instances")
    arguments, flags = parser.parse_known_args()
    http, grpc = free_ports(2)
    checkpoint = str(Path(find_model(arguments.model)).absolute())
    with tempfile.TemporaryDirectory(prefix="tritium-soak-") as folder:
        place = Path(folder) / "models"
        run = Run(Target("127.0.0.1", http, "", False), grpc, place, random.Random(arguments.seed))
        models.write_all(place, checkpoint)
        # Two of them at least, also in a short soak.
        trouble = Trouble(run, checkpoint, min(arguments.kill_every, arguments.seconds / 3))
        with tempfile.NamedTemporaryFile(prefix="tritium-soak-", suffix=".log", delete=False) as log:
            server = subprocess.Popen(command(run, flags), stdout=log, stderr=subprocess.STDOUT, env={**os.environ})
            try:
                before, after = asyncio.run(traffic(run, trouble, server, arguments.seconds))
            finally:
                status = stop(server)
    return report(run, before, after, status, arguments.seconds, Path(log.name))


def stop(server: subprocess.Popen[bytes]) -> int:
    server.send_signal(signal.SIGTERM)
    try:
        return server.wait(60)
    except subprocess.TimeoutExpired:
        server.kill()
        return -9


def report(run: Run, before: Levels, after: Levels, status: int, seconds: float, log: Path) -> int:
    """Prints what came of it; the exit status."""
    if status != 0:
        run.problem(f"the server ended with {status}")
    traces = log.read_text(errors="replace").count("Traceback")
    if traces:
        run.problem(f"{traces} tracebacks in the log")
    for text in after.growth(before, ALLOWED_GROWTH_BYTES):
        run.problem(text)
    for problem in run.problems[:20]:
        print(f"soak: {problem}", file=sys.stderr)
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(run.counts.items()))
    killed = sum(run.kills.values())
    total = sum(count for name, count in run.counts.items() if not name.startswith("("))
    memory = (after.memory - before.memory) / 2**20
    print(
        f"soak {'FAILED' if run.problems else 'ok'}: {total} requests in {seconds:.0f} s ({kinds}), {killed} instances "
        f"killed, {sum(run.crashed.values())} requests inside them, memory {memory:+.1f} MiB, descriptors "
        f"{before.descriptors} to {after.descriptors}, shared memory {before.segments} to {after.segments} segments, "
        f"{len(run.problems)} problems" + (f", log {log}" if run.problems else "")
    )
    if not run.problems:
        log.unlink()
    return int(bool(run.problems))


if __name__ == "__main__":
    sys.exit(main())
