"""Things that break while requests run: engines killed or stopped, signals, clients that leave.

A request ends well, or with an error that says what happened; it never hangs, and it never leaves anything behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.calls import CALLS, Ask, Running, ask_once, until
from tests.e2e.live import LiveServer
from tests.tiny import make_checkpoint

LONG = 4000
LOST = "the engine was lost while it answered"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can go on for 4096 tokens, which takes it some seconds."""
    folder = tmp_path_factory.mktemp("long") / "model"
    return make_checkpoint(folder, max_position_embeddings=4096, num_hidden_layers=6)


def make_server(checkpoint: Path, folder: Path) -> LiveServer:
    # A row for each kind of call: what comes on top of those waits.
    arguments = [str(checkpoint), "--served-model-name=tiny", "--dtype=float32", f"--max-rows={len(CALLS)}"]
    return LiveServer([*arguments, "--threads=1"], folder / "log")


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with make_server(checkpoint, tmp_path_factory.mktemp("server")) as live:
        yield live


@pytest.fixture
def mortal(checkpoint: Path, tmp_path: Path) -> Iterator[LiveServer]:
    """A server for one test, which ends it."""
    live = make_server(checkpoint, tmp_path).start()
    assert live.process is not None
    yield live
    live.process.kill()
    live.process.wait()


def state(server: LiveServer) -> tuple[float, float, float]:
    """Requests running and waiting, and the share of the KV cache in use."""
    found = dict(line.split() for line in httpx.get(server.metrics).text.splitlines() if "tritium_" in line[:8])
    label = '{model="tiny",version="1"}'
    names = ("tritium_requests_running", "tritium_requests_waiting", "tritium_kv_cache_usage_ratio")
    running, waiting, usage = (float(found[name + label]) for name in names)
    return running, waiting, usage


def reason(server: LiveServer) -> tuple[int, str]:
    answer = httpx.get(f"{server.url}/ready", timeout=10)
    return answer.status_code, answer.json().get("reason", "")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def start_all(server: LiveServer, max_tokens: int) -> list[Running]:
    """One request of each kind; returns when all of them generate."""
    begun = [Running(kind, server, Ask(prompt=f"{kind}!", max_tokens=max_tokens)) for kind in CALLS]
    await until(lambda: state(server)[0] == len(CALLS), "all requests run")
    for one in begun:
        if "stream" in one.kind:
            await asyncio.wait_for(one.outcome.first.wait(), 30)
    await asyncio.sleep(0.1)
    return begun


async def watch_outage(server: LiveServer) -> list[tuple[int, int, str]]:
    """The distinct (status of /v2/health/ready, status of /ready, reason) from not ready to ready."""
    found: list[tuple[int, int, str]] = []
    async with httpx.AsyncClient(timeout=10) as client:
        while not found or found[-1][0] != 200:
            health = (await client.get(f"{server.url}/v2/health/ready")).status_code
            answer = await client.get(f"{server.url}/ready")
            one = (health, answer.status_code, answer.json().get("reason", ""))
            if one not in found and (found or health != 200) and (health == 200) == (answer.status_code == 200):
                found.append(one)
            await asyncio.sleep(0.02)
    return found


# -- the engine is killed -------------------------------------------------------------------------------------


async def test_engine_killed(server: LiveServer) -> None:
    """What had begun to answer ends with an error at once; what waited is answered by the next engine."""
    expected = {kind: (await ask_once(kind, server, Ask(prompt=f"{kind}?"))).text for kind in CALLS}
    assert server.process is not None
    files = len(os.listdir(f"/proc/{server.process.pid}/fd"))
    (engine,) = server.engine_pids()
    running = await start_all(server, LONG)
    waiting = [Running(kind, server, Ask(prompt=f"{kind}?")) for kind in CALLS for _ in range(2)]
    await until(lambda: state(server)[1] == len(waiting), "the others wait")
    outage = asyncio.create_task(watch_outage(server))
    os.kill(engine, signal.SIGKILL)
    killed = time.monotonic()
    for one in running:
        outcome = await one.end(10)
        assert (outcome.done, LOST in outcome.error) == (False, True), (one.kind, outcome)
        assert outcome.ended - killed < 5
        if outcome.pieces == 0:
            assert outcome.status in (503, "StatusCode.UNAVAILABLE"), (one.kind, outcome)
    for one in waiting:
        outcome = await one.end(60)
        assert (outcome.done, outcome.error, outcome.text) == (True, "", expected[one.kind]), (one.kind, outcome)
    seen = await asyncio.wait_for(outage, 60)
    assert [(health, ready) for health, ready, _ in seen[:-1]] == [(400, 503)] * (len(seen) - 1)
    assert all("engine" in why for _, _, why in seen[:-1]), seen
    assert seen[-1] == (200, 200, "")
    assert server.process.poll() is None
    assert server.engine_pids() != [engine] and len(server.engine_pids()) == 1
    await until(lambda: state(server) == (0, 0, 0), "nothing is left")
    assert len(os.listdir(f"/proc/{server.process.pid}/fd")) <= files + 2
    assert "Traceback" not in server.output()


async def test_engine_killed_while_idle(server: LiveServer) -> None:
    (engine,) = server.engine_pids()
    outage = asyncio.create_task(watch_outage(server))
    os.kill(engine, signal.SIGKILL)
    during = [Running(kind, server, Ask()) for kind in CALLS]
    for one in during:
        outcome = await one.end(60)
        assert outcome.done, (one.kind, outcome)
    assert (await asyncio.wait_for(outage, 60))[-1] == (200, 200, "")


# -- the engine is stopped ------------------------------------------------------------------------------------


async def test_engine_stopped_for_a_while(server: LiveServer) -> None:
    """Readiness is progress: it goes when the step loop stands still, and comes back with it."""
    (engine,) = server.engine_pids()
    stream = Running("v1_stream", server, Ask(max_tokens=1500))
    await asyncio.wait_for(stream.outcome.first.wait(), 30)
    os.kill(engine, signal.SIGSTOP)
    try:
        took = await until(lambda: not server.ready(), "not ready", 12)
        assert 3 < took < 9
        status, why = reason(server)
        assert status == 503 and "stalled" in why
        assert httpx.get(f"{server.url}/v2/health/live").status_code == 200
    finally:
        os.kill(engine, signal.SIGCONT)
    assert await until(server.ready, "ready again", 10) < 3
    outcome = await stream.end(120)
    assert (outcome.done, outcome.error) == (True, "")
    assert server.engine_pids() == [engine]


@pytest.mark.slow
async def test_engine_stopped_for_good(server: LiveServer) -> None:
    """An idle engine that hangs is found too, killed, and started again."""
    (engine,) = server.engine_pids()
    os.kill(engine, signal.SIGSTOP)
    await until(lambda: not server.ready(), "not ready", 12)
    late = Running("v1_whole", server, Ask())
    await until(lambda: not alive(engine), "killed", 25)
    assert (await late.end(60)).done
    await until(server.ready, "ready again")


# -- signals --------------------------------------------------------------------------------------------------


async def test_sigterm_drains(mortal: LiveServer) -> None:
    """What runs is finished, what comes is refused; then it ends with 0 and leaves no process and no port."""
    server, process = mortal, mortal.process
    assert process is not None
    engines = server.engine_pids()
    running = await start_all(server, 1200)
    process.send_signal(signal.SIGTERM)
    await until(lambda: not server.ready(), "not ready", 5)
    assert reason(server) == (503, "the server is draining")
    for kind in CALLS:
        refused = await ask_once(kind, server, Ask())
        wanted = {"grpc_infer": "StatusCode.UNAVAILABLE", "grpc_stream": "OK"}.get(kind, 503)
        assert (refused.status, refused.done) == (wanted, False), (kind, refused)
        assert "draining" in refused.error, (kind, refused)
        if wanted == 503:
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
    assert process.poll() is None, "the requests were meant to outlast the refusals"
    for one in running:
        outcome = await one.end()
        assert (outcome.done, outcome.error) == (True, ""), (one.kind, outcome)
    assert await asyncio.to_thread(process.wait, 20) == 0, server.output()
    assert not any(alive(pid) for pid in engines)
    for port in (server.http_port, server.grpc_port, server.metrics_port):
        socket.create_server(("127.0.0.1", port)).close()
    assert "Traceback" not in server.output()


async def test_second_sigterm_hurries(mortal: LiveServer) -> None:
    server, process = mortal, mortal.process
    assert process is not None
    engines = server.engine_pids()
    running = await start_all(server, LONG)
    process.send_signal(signal.SIGTERM)
    await until(lambda: not server.ready(), "not ready", 5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    hurried = time.monotonic()
    assert await asyncio.to_thread(process.wait, 20) == 0, server.output()
    assert time.monotonic() - hurried < 8
    for one in running:
        outcome = await one.end(5)
        assert (outcome.done, "shutting down" in outcome.error) == (False, True), (one.kind, outcome)
    assert not any(alive(pid) for pid in engines)
    assert "Traceback" not in server.output()


async def test_killed_front_end_takes_its_engine_along(mortal: LiveServer) -> None:
    server, process = mortal, mortal.process
    assert process is not None
    (engine,) = server.engine_pids()
    command = Path(f"/proc/{engine}/cmdline").read_text().split("\0")
    folder = Path(command[command.index("--address") + 1].removeprefix("ipc://")).parent
    stream = Running("v1_stream", server, Ask(max_tokens=LONG))
    await asyncio.wait_for(stream.outcome.first.wait(), 30)
    process.kill()
    assert await until(lambda: not alive(engine), "the engine is gone", 10) < 2
    assert "connection" in (await stream.end(10)).error
    assert folder.name.startswith("tritium-") and not folder.exists()


# -- clients leave --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CALLS)
async def test_client_leaves(server: LiveServer, kind: str) -> None:
    """Its blocks are free within a step or two, also when the answer was not to be streamed."""
    leaving = [Running(kind, server, Ask(prompt=f"{n}", max_tokens=LONG)) for n in range(3)]
    await until(lambda: state(server)[0] == 3 and state(server)[2] > 0, "three run")
    await asyncio.gather(*(one.leave() for one in leaving))
    assert await until(lambda: state(server) == (0, 0, 0), "all is free", 10) < 2
    outcome = await ask_once(kind, server, Ask())
    assert outcome.done


async def test_clients_leave_the_queue(server: LiveServer) -> None:
    """Those who wait for a row go without having run."""
    holding = [Running("v1_stream", server, Ask(prompt=f"{n}", max_tokens=LONG)) for n in range(len(CALLS))]
    await until(lambda: state(server)[0] == len(CALLS), "all rows are taken")
    waiting = [Running(kind, server, Ask(max_tokens=LONG)) for kind in CALLS]
    await until(lambda: state(server)[1] == len(waiting), "they wait")
    await asyncio.gather(*(one.leave() for one in waiting))
    assert await until(lambda: state(server)[1] == 0, "nobody waits", 10) < 2
    assert state(server)[0] == len(CALLS)
    await asyncio.gather(*(one.leave() for one in holding))
    assert await until(lambda: state(server) == (0, 0, 0), "all is free", 10) < 2
