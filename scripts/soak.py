"""Soak: a real server under mixed traffic; nothing may leak, nothing may change its answer.

Starts ``tritium serve``, sends completions, chats (streamed and not), v2 generate, gRPC infer, clients that
leave in the middle, and wrong requests; beside them a canary asks the same greedy question again and again. At
the end the engine must hold no KV block, the canary must have said one thing only, and memory must not grow
after the warm-up. Prints one result line; exit status 1 when something is wrong.

    python scripts/soak.py --seconds 600 [--model smollm2] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpcclient

from tritium.bench.engine import tree
from tritium.bench.load import Target, request

WORKERS = 12
# Growth after the warm-up that counts as a leak: allocators keep a little, a leak grows with the requests.
ALLOWED_GROWTH_BYTES = 64 << 20
KV_CACHE_BYTES = 64 << 20
START_LIMIT_S = 180.0
NAME = "soak"


@dataclass
class Run:
    """What the traffic knows and counts."""

    http: Target
    grpc_port: int
    deadline: float
    draw: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    canary: set[str] = field(default_factory=set)

    def prompt(self) -> str:
        words = ["river", "model", "token", "日本", "naïve", "🙂", "1234", "server", "the", "of"]
        return " ".join(self.draw.choice(words) for _ in range(self.draw.randint(1, 40)))

    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": self.draw.randint(1, 24), "temperature": self.draw.choice([0, 0.7, 1.0]), "top_p": 0.9}


async def post(run: Run, path: str, body: Any) -> tuple[int, bytes]:
    async with request(run.http, "POST", path, body) as response:
        return response.status, await response.body()


async def expect(run: Run, path: str, body: Any, status: int = 200) -> bytes:
    got, answer = await post(run, path, body)
    if got != status:
        run.problems.append(f"{path}: {got} instead of {status}: {answer[:200]!r}")
    return answer


async def completion(run: Run) -> None:
    await expect(run, "/v1/completions", {"model": NAME, "prompt": run.prompt(), **run.sampling()})


async def chat(run: Run) -> None:
    messages = [{"role": "user", "content": run.prompt()}]
    await expect(run, "/v1/chat/completions", {"model": NAME, "messages": messages, **run.sampling()})


async def streamed(run: Run) -> None:
    messages = [{"role": "user", "content": run.prompt()}]
    body = {"model": NAME, "messages": messages, "stream": True, **run.sampling()}
    async with request(run.http, "POST", "/v1/chat/completions", body) as response:
        last = {}
        async for data in response.events():
            last = json.loads(data)
    if response.status != 200 or "error" in last:
        run.problems.append(f"streamed chat: {response.status} {last}")


async def leaves(run: Run) -> None:
    """Goes away after a few pieces, or before the answer begins."""
    body = {"model": NAME, "prompt": run.prompt(), "max_tokens": 200, "ignore_eos": True, "stream": True}
    if run.draw.random() < 0.3:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(post(run, "/v1/completions", {**body, "stream": False}), 0.05)
        return
    async with request(run.http, "POST", "/v1/completions", body) as response:
        count = 0
        async for _ in response.events():
            count += 1
            if count == 3:
                return


async def generate(run: Run) -> None:
    body = {"text_input": run.prompt(), "parameters": {"max_tokens": run.draw.randint(1, 16), "temperature": 0}}
    await expect(run, f"/v2/models/{NAME}/generate", body)


async def grpc_infer(run: Run) -> None:
    ids = np.array([[run.draw.randint(3, 300) for _ in range(run.draw.randint(1, 60))]], dtype=np.int32)
    async with grpcclient.InferenceServerClient(f"127.0.0.1:{run.grpc_port}") as client:
        tensors = [grpcclient.InferInput("input_ids", list(ids.shape), "INT32")]
        tensors[0].set_data_from_numpy(ids)
        count = grpcclient.InferInput("request_output_len", [1, 1], "INT32")
        count.set_data_from_numpy(np.array([[8]], dtype=np.int32))
        answer = await client.infer(NAME, [*tensors, count])
        if answer.as_numpy("output_ids") is None:
            run.problems.append("gRPC infer: no output_ids")


WRONG: list[tuple[str, Any, int]] = [
    ("/v1/completions", {"model": NAME, "prompt": "x", "temperature": -1}, 400),
    ("/v1/completions", {"model": NAME, "prompt": [1 << 30]}, 400),
    ("/v1/completions", {"model": NAME, "prompt": "x", "max_tokens": "many"}, 400),
    ("/v1/completions", {"model": "nobody", "prompt": "x"}, 404),
    ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": "x " * 200000}]}, 400),
    (f"/v2/models/{NAME}/generate", {"text_input": "x", "parameters": {"top_p": 7}}, 400),
    ("/v2/models/nobody/generate", {"text_input": "x"}, 404),
]


async def wrong(run: Run) -> None:
    path, body, status = run.draw.choice(WRONG)
    await expect(run, path, body, status)


async def canary(run: Run) -> None:
    body = {"model": NAME, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = json.loads(await expect(run, "/v1/completions", body))
    run.canary.add(answer["choices"][0]["text"] if "choices" in answer else str(answer))


KINDS: list[Callable[[Run], Awaitable[None]]] = [
    completion,
    chat,
    streamed,
    leaves,
    generate,
    grpc_infer,
    wrong,
    canary,
]


async def worker(run: Run) -> None:
    while time.monotonic() < run.deadline:
        kind = run.draw.choice(KINDS)
        try:
            await asyncio.wait_for(kind(run), 120)
        except Exception as error:
            run.problems.append(f"{kind.__name__}: {type(error).__name__}: {error}")
        run.counts[kind.__name__] += 1
        if len(run.problems) > 20:
            return


def memory(pid: int) -> int:
    """Bytes that the server's processes hold of their own, shared pages counted by their share (PSS)."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += 1024 * sum(int(n) for n in re.findall(r"^Pss:\s+(\d+)", text, re.M))
    return total


async def usage(run: Run) -> float:
    """Share of KV blocks in use, as the metrics say."""
    async with request(run.http, "GET", "/metrics") as response:
        text = (await response.body()).decode()
    found = re.findall(r"^tritium_kv_cache_usage_ratio\{[^}]*\} (\S+)$", text, re.M)
    return sum(map(float, found)) if found else float("nan")


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


async def traffic(run: Run, server: subprocess.Popen[bytes], seconds: float) -> int:
    """Runs the mix; growth of memory in bytes from a quarter of the time to the end."""
    await until_ready(run, server)
    begun = time.monotonic()
    run.deadline = begun + seconds
    workers = [asyncio.create_task(worker(run)) for _ in range(WORKERS)]
    await asyncio.sleep(seconds / 4)
    before = memory(server.pid)
    await asyncio.gather(*workers)
    await canary(run)
    for _ in range(50):
        left = await usage(run)
        if left == 0:
            break
        await asyncio.sleep(0.1)
    else:
        run.problems.append(f"KV blocks are still in use: ratio {left}")
    if len(run.canary) != 1:
        run.problems.append(f"the canary said {len(run.canary)} different things: {sorted(run.canary)[:3]}")
    return memory(server.pid) - before


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for entry in sockets:
        entry.bind(("127.0.0.1", 0))
    ports = [entry.getsockname()[1] for entry in sockets]
    for entry in sockets:
        entry.close()
    return ports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    arguments, flags = parser.parse_known_args()
    http, grpc_port, metrics = free_ports(3)
    command = [sys.executable, "-m", "tritium", "serve", arguments.model, "--served-model-name", NAME]
    command += ["--http-port", str(http), "--grpc-port", str(grpc_port), "--metrics-port", str(metrics)]
    # The canary is compared whatever runs beside it: that is what --deterministic promises.
    # The system hands out the cache's memory page by page as blocks are first used: a small one is all there soon.
    command += ["--deterministic", "--kv-cache-bytes", str(KV_CACHE_BYTES), *flags]
    run = Run(Target("127.0.0.1", http, "", False), grpc_port, 0.0, random.Random(arguments.seed))
    with tempfile.NamedTemporaryFile(prefix="tritium-soak-", suffix=".log", delete=False) as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ})
        try:
            growth = asyncio.run(traffic(run, server, arguments.seconds))
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                status = server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                status = -9
    if status != 0:
        run.problems.append(f"the server ended with {status}")
    if growth > ALLOWED_GROWTH_BYTES:
        run.problems.append(f"memory grew by {growth / 2**20:.0f} MiB after the warm-up")
    for problem in run.problems[:20]:
        print(f"soak: {problem}", file=sys.stderr)
    total = sum(run.counts.values())
    verdict = "FAILED" if run.problems else "ok"
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(run.counts.items()))
    print(
        f"soak {verdict}: {total} requests in {arguments.seconds:.0f} s ({kinds}), memory {growth / 2**20:+.1f} MiB, "
        f"{len(run.problems)} problems" + (f", log {log.name}" if run.problems else "")
    )
    if not run.problems:
        Path(log.name).unlink()
    return int(bool(run.problems))


if __name__ == "__main__":
    sys.exit(main())
