"""A real server in a process of its own, as a user would start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@dataclass
class LiveServer:
    """``tritium serve`` with these arguments; its output is kept for the error message.

    Use it as a context manager: it is ready inside, and has drained and ended with 0 behind.
    """

    arguments: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    ready_s: float = 120
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.http = f"127.0.0.1:{self.http_port}"
        self.grpc = f"127.0.0.1:{self.grpc_port}"
        self.metrics = f"http://127.0.0.1:{self.metrics_port}/metrics"

    def start(self, *, wait: bool = True) -> LiveServer:
        """Starts it and waits until it is ready."""
        ports = [
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
        ]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tritium", "serve", *self.arguments, *ports],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
                start_new_session=True,
            )
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Returns when ``/v2/health/ready`` is 200."""
        deadline = time.monotonic() + self.ready_s
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.output()}")
            if self.ready():
                return
            time.sleep(0.05)
        raise AssertionError(f"the server is not ready:\n{self.output()}")

    def ready(self) -> bool:
        """Whether it answers that it is ready."""
        try:
            return httpx.get(f"{self.url}/v2/health/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self, timeout_s: float = 40) -> int:
        """Sends SIGTERM and gives the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"the server does not end on SIGTERM:\n{self.output()}") from None

    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def engine_pids(self) -> list[int]:
        """Process ids of its engines."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(p) for p in children if b"tritium.llm.engine" in Path(f"/proc/{p}/cmdline").read_bytes()]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        total = 0.0
        for line in httpx.get(self.metrics).text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.split("{")[0] == name and all(f'{k}="{v}"' in sample for k, v in labels.items()):
                total += float(value)
        return total

    def __enter__(self) -> LiveServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        status = self.stop()
        assert status == 0, f"the server ended with {status}:\n{self.output()}"
