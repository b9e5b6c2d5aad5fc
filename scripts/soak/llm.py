"""Traffic for the language model: both protocols, streamed and not, clients that leave, and wrong requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpcclient
from scripts.soak.run import NAME, Run, expect, post

from tritium.bench.load import request


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
        run.problem(f"streamed chat: {response.status} {last}")


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
            run.problem("gRPC infer: no output_ids")


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
