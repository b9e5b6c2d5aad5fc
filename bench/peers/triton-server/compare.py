#!/usr/bin/env python3
"""Tritium beside the real Triton Inference Server: the same model, the same client, alternately in the same minutes.

    compare.py [--rounds 3] [--seconds 2] [--only REGEX] [--out compare.json]
               [--peer /tmp/peers/triton] [--tritium 'python -m tritium']

Both servers are started here, on free ports, with the echo model of tests/conformance/model_repository (one instance
of the Python backend), and both stay up. Each row is measured --rounds times; within a round the two follow each other
at once, and who is first alternates. The table has the median of the rounds of each, the ratio of the medians
(above 1 is better for throughput, below 1 for the latencies), and the CPU time of the server with its children per
request (user and system, from /proc, over the requests that its own statistics count), which a busy machine disturbs
least. start_real_triton.sh and install_perf_analyzer.sh install what is missing.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import bench

ROOT = bench.HERE.parents[2]
MODEL = "echo_fp32"
SIDES = ("triton", "tritium")
FIGURES = ("per_second", "p50_us", "p99_us", "cpu_us")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Server:
    """One of the two, running."""

    def __init__(self, side, args, repository, log):
        self.http, self.grpc = (f"127.0.0.1:{free_port()}" for _ in range(2))
        ports = {"HTTP_PORT": self.http[10:], "GRPC_PORT": self.grpc[10:], "METRICS_PORT": str(free_port())}
        env = dict(os.environ, TRITON_PEER=str(args.peer), **ports)
        if side == "triton":
            command = [str(bench.HERE / "start_real_triton.sh"), "exec", f"--model-repository={repository}"]
        else:
            env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), env.get("PYTHONPATH", "")])
            command = [*shlex.split(args.tritium), "serve", f"--model-repository={repository}", "--host", "127.0.0.1"]
            for name, port in ports.items():
                command += ["--" + name.lower().replace("_", "-"), port]
        self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        self.pid = self.process.pid

    def wait_ready(self, timeout_s=120):
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{self.http}/v2/models/{MODEL}/ready", timeout=1)
                return
            time.sleep(0.2)
        raise SystemExit(f"a server is not ready; see its log ({self.process.args})")

    def requests(self):
        """Requests that it has answered."""
        text = urllib.request.urlopen(f"http://{self.http}/v2/models/{MODEL}/stats", timeout=30).read()
        return int(json.loads(text)["model_stats"][0]["inference_stats"]["success"]["count"])

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(40)
            self.process.kill()


def measure(server, args, way, size, concurrency):
    """One run of perf_analyzer against one server."""
    place = argparse.Namespace(
        http=server.http, grpc=server.grpc, perf_analyzer=args.perf_analyzer, seconds=args.seconds
    )
    cpu, count = bench.cpu_seconds(server.pid), server.requests()
    found = bench.perf_analyzer(place, MODEL, way, size, concurrency)
    count = server.requests() - count
    found["cpu_us"] = round((bench.cpu_seconds(server.pid) - cpu) / max(count, 1) * 1e6, 1)
    found["requests"] = count
    return found


def run(args, servers):
    """Every row of the plan; by name, what each side gave in each round."""
    plan = [(way, size, c) for size in args.sizes for way in args.ways for c in args.concurrency]
    plan = [row for row in plan if re.search(args.only, "{}/{}/c{}".format(*row))]
    results = {"{}/{}/c{}".format(*row): {side: [] for side in SIDES} for row in plan}
    for number in range(args.rounds):
        for row in plan:
            name = "{}/{}/c{}".format(*row)
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                found = measure(servers[side], args, *row)
                results[name][side].append(found)
                shown = " ".join(f"{key}={found[key]:.0f}" for key in FIGURES)
                print(f"round {number + 1} {name:16} {side:8} {shown}", file=sys.stderr, flush=True)
    return results


def summary(results):
    """Medians of each side and their ratios, by row."""
    rows = {}
    for name, sides in results.items():
        medians = {s: {f: statistics.median(one[f] for one in sides[s]) for f in FIGURES} for s in SIDES}
        ratios = {f: round(medians["tritium"][f] / max(medians["triton"][f], 1e-9), 3) for f in FIGURES}
        rows[name] = {**medians, "ratio": ratios}
    return rows


def table(rows):
    lines = [
        "| row | Triton req/s | Tritium req/s | ratio | p50 ms | p99 ms | p99 ratio | CPU us/request |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        theirs, ours, ratio = row["triton"], row["tritium"], row["ratio"]
        pairs = [f"{theirs[f] / 1e3:.2f} / {ours[f] / 1e3:.2f}" for f in ("p50_us", "p99_us")]
        lines.append(
            f"| {name} | {theirs['per_second']:,.0f} | {ours['per_second']:,.0f} | **{ratio['per_second']:.2f}** | "
            f"{pairs[0]} | {pairs[1]} | {ratio['p99_us']:.2f} | {theirs['cpu_us']:.0f} / {ours['cpu_us']:.0f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=2, help="one of the up to three windows of a run")
    parser.add_argument("--sizes", nargs="+", choices=list(bench.SIZES), default=list(bench.SIZES))
    parser.add_argument("--ways", nargs="+", choices=["http", "grpc"], default=["http", "grpc"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--only", default=".", help="rows to measure, such as http/4B/c8")
    parser.add_argument("--peer", type=Path, default=Path(os.environ.get("TRITON_PEER", "/tmp/peers/triton")))
    parser.add_argument("--perf-analyzer", default="")
    parser.add_argument("--tritium", default=f"{shlex.quote(sys.executable)} -m tritium")
    parser.add_argument("--out", type=Path, default=Path("compare.json"))
    args = parser.parse_args()
    args.perf_analyzer = args.perf_analyzer or str(args.peer / "pa/perf_analyzer")
    env = dict(os.environ, TRITON_PEER=str(args.peer))
    subprocess.run([str(bench.HERE / "start_real_triton.sh"), "install"], env=env, check=True)
    if not Path(args.perf_analyzer).exists():
        subprocess.run(["bash", str(bench.HERE / "install_perf_analyzer.sh")], env=env, check=True)
    with tempfile.TemporaryDirectory(prefix="compare-") as folder, contextlib.ExitStack() as stack:
        repository = Path(folder) / "models"
        shutil.copytree(ROOT / "tests/conformance/model_repository" / MODEL, repository / MODEL)
        servers = {}
        for side in SIDES:
            log = stack.enter_context(open(Path(tempfile.gettempdir()) / f"compare-{side}.log", "w"))
            servers[side] = Server(side, args, repository, log)
            stack.callback(servers[side].stop)
        for server in servers.values():
            server.wait_ready()
        results = run(args, servers)
    rows = summary(results)
    args.out.write_text(json.dumps({"rows": rows, "rounds": results}, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
