#!/usr/bin/env python3
"""What the dynamic batcher costs: one batch of 32 identity requests against one request of the same total size.

    python bench/batch_of_32.py [--rounds 15] [--sizes 4096 65536 1048576]

Both go through the server to one instance of the Python backend, in turn. Each figure is the median of the rounds:
the time from the first request to the last answer, and the CPU time of server and instance.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import uvloop

from tritium.serving.server import Server
from tritium.types import InferRequest, Tensor

ROWS = 32
CONFIG = """backend: "python" max_batch_size: 32
input { name: "IN" data_type: TYPE_FP32 dims: -1 } output { name: "OUT" data_type: TYPE_FP32 dims: -1 }
dynamic_batching { preferred_batch_size: 32 max_queue_delay_microseconds: 1000000 }
"""
CODE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests
        ]
"""


def request(rows: int, width: int) -> InferRequest:
    tensor = Tensor.from_numpy("IN", np.ones((rows, width), np.float32))
    return InferRequest("identity", "", "", {"IN": tensor}, [], time.monotonic_ns())


async def timed(server: Server, requests: list[InferRequest], pid: int) -> tuple[float, float]:
    def cpu() -> float:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9 + time.thread_time()

    model = server.model("identity")
    left = len(requests)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answered(answer: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set_result(None)

    used, begun = cpu(), time.perf_counter()
    for one in requests:
        model.submit(one, answered)
    await done
    took = time.perf_counter() - begun
    return took * 1e6, (cpu() - used) * 1e6


async def main(rounds: int, sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "identity" / "1").mkdir(parents=True)
        (Path(folder) / "identity" / "config.pbtxt").write_text(CONFIG)
        (Path(folder) / "identity" / "1" / "model.py").write_text(CODE)
        server = Server([Path(folder)])
        await server.start()
        pid = server.model("identity")._backend._instances[0].pid  # type: ignore[union-attr]
        print("| bytes a request | one of 32 rows, us | 32 of one row, us | ratio | CPU us | CPU ratio |")
        print("| --- | --- | --- | --- | --- | --- |")
        for size in sizes:
            found: list[tuple[float, float, float, float]] = []
            for index in range(rounds + 3):
                whole = await timed(server, [request(ROWS, size // 4)], pid)
                parts = await timed(server, [request(1, size // 4) for _ in range(ROWS)], pid)
                if index >= 3:
                    found.append((*whole, *parts))
            w, wc, p, pc = (statistics.median(column) for column in zip(*found, strict=True))
            print(f"| {size:,} | {w:,.0f} | {p:,.0f} | **{p / w:.2f}** | {wc:,.0f} / {pc:,.0f} | {pc / wc:.2f} |")
        await server.drain(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 65536, 262144, 1 << 20])
    args = parser.parse_args()
    uvloop.run(main(args.rounds, args.sizes))
