"""``tritium serve`` and its neighbours as a user runs them, on a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.live import LiveServer
from tritium.bench import Item, engine, load, report
from tritium.launch import Signals
from tritium.llm.config import EngineConfig
from tritium.llm.runner.ranks import physical_cores


def tritium(*argv: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tritium", *argv], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_banner(tiny_server: LiveServer) -> None:
    deadline = time.monotonic() + 10
    while "curl" not in (shown := tiny_server.output()) and time.monotonic() < deadline:
        time.sleep(0.05)  # the banner comes right after the server is ready
    assert "serves tiny, ready in" in shown
    assert f"http://127.0.0.1:{tiny_server.http_port}  (/v1 OpenAI, /v2 KServe, /metrics)" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["dtype", "float32", "command", "line", "(--dtype)"] in lines
    assert ["max_rows", "64", "default"] in lines
    # What was left open is shown as it was decided, with who decided it.
    assert ["threads", str(physical_cores()), "machine"] in lines
    assert ["device", "cpu", "machine"] in lines
    assert any(line[0] == "max_length" and line[1].isdecimal() and line[2:] == ["checkpoint"] for line in lines if line)
    assert ["served_model_name", "tiny,", "org/Tiny", "command", "line", "(--served-model-name)"] in lines
    for word in ("weights", "activations", "KV cache", "per token", "margin", "curl http://127.0.0.1"):
        assert word in shown


def test_port_in_use_is_told_before_the_model_loads(tiny_checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name in ("http", "grpc", "metrics"):
            others = [f"--{other}-port=0" for other in ("http", "grpc", "metrics") if other != name]
            done = tritium("serve", str(tiny_checkpoint), f"--{name}-port", port, *others)
            assert done.returncode == 1
            assert f"choose another with --{name}-port" in done.stderr
            assert "loading" not in done.stderr
    done = tritium("serve", str(tiny_checkpoint), "--host", "256.0.0.1")
    assert done.returncode == 1
    assert "cannot listen on 256.0.0.1" in done.stderr


def test_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["StrangeForCausalLM"], "model_type": "strange"}')
    (tmp_path / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    command = ["serve", str(tmp_path), "--served-model-name=m", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    done = tritium(*command)
    assert done.returncode == 1
    assert done.stderr.count("StrangeForCausalLM") == 1 and "Traceback" not in done.stderr
    assert done.stderr.endswith("tritium: error: cannot load m: see above\n")
    # Who does not see the log is told here.
    done = tritium(*command, "--log-error=false")
    assert done.stderr.count("StrangeForCausalLM") == 1 and "cannot load m: version 1: " in done.stderr


async def test_signals() -> None:
    """The first signal ends the service, the second one ends the patience."""
    stop = Signals()
    assert await stop.while_running(asyncio.sleep(0))
    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
    assert not await stop.while_running(asyncio.sleep(60))
    assert stop.first.is_set()
    assert await stop.while_running(asyncio.sleep(0))
    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
    assert not await stop.while_running(asyncio.sleep(60))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


async def test_load_generator_against_the_server(tiny_server: LiveServer) -> None:
    target = load.Target.parse(tiny_server.url)
    assert await load.served_model(target) == "tiny"
    items = [Item(list(range(3, 30)), 12, start_s=0.01 * n) for n in range(8)]
    samples, duration = await load.run(target, "tiny", items, salt="a")
    assert [s.error for s in samples] == [""] * 8
    assert [s.output_tokens for s in samples] == [12] * 8
    result = report.summary(samples, duration)
    assert result["total_output_tokens"] == 96
    assert 0 < result["median_ttft_ms"] < result["median_e2el_ms"]


async def test_offline_measurement(tiny_checkpoint: Path) -> None:
    config = EngineConfig(model=str(tiny_checkpoint), dtype="float32", max_rows=4, max_tokens_per_step=64)
    items = [Item(list(range(3, 40)), 8) for _ in range(6)]
    runs, info = await engine.measure(config, items, runs=2, max_concurrency=3)
    assert info.max_rows == 4
    for samples, duration in runs:
        assert [s.error for s in samples] == [""] * 6
        assert report.summary(samples, duration)["completed"] == 6


def test_generate(tiny_checkpoint: Path) -> None:
    done = tritium("generate", "Once upon", "--model", str(tiny_checkpoint), "--max-tokens", "5", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert "ready in" in done.stderr


@pytest.mark.slow
def test_soak(tiny_checkpoint: Path) -> None:
    """Twenty seconds of it all; `make soak` is the long one."""
    command = [sys.executable, "-m", "scripts.soak", "--seconds", "20", "--model", str(tiny_checkpoint)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*command, "--dtype=float32"], capture_output=True, text=True, timeout=300, check=False, cwd=root
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.startswith("soak ok:")
