"""One request over each protocol, told in one way: what came, how it ended, and how long that took."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import InferenceServerException

from tests.e2e.live import LiveServer

PROMPT = "The quick brown fox"


@dataclass
class Outcome:
    """What a client saw.

    Attributes:
        status: HTTP status, or the gRPC status name; "OK" when a call went well.
        pieces: events or answers with content.
        text: all of the content.
        done: the answer is whole: it ended as its protocol ends an answer.
        error: message of the error that ended it.
        headers: of the HTTP answer.
        first: set when the first piece is there.
        ended: ``time.monotonic()`` of the end.
    """

    status: int | str = ""
    pieces: int = 0
    text: str = ""
    done: bool = False
    error: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    ended: float = 0.0

    def add(self, text: str) -> None:
        """One more piece."""
        self.pieces += 1
        self.text += text
        self.first.set()


@dataclass(frozen=True)
class Ask:
    """A greedy request that does not end before ``max_tokens``."""

    model: str = "tiny"
    prompt: str = PROMPT
    max_tokens: int = 8

    def v1(self, *, stream: bool) -> dict[str, Any]:
        """As a body of /v1/completions."""
        return {
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }

    def tensors(self, *, stream: bool) -> dict[str, tuple[str, Any]]:
        """As (datatype, value) by name."""
        return {
            "text_input": ("BYTES", self.prompt),
            "max_tokens": ("INT32", self.max_tokens),
            "temperature": ("FP32", 0.0),
            "ignore_eos": ("BOOL", True),
            "stream": ("BOOL", stream),
        }


Call = Callable[[LiveServer, Ask, Outcome], Awaitable[None]]


async def v1_whole(server: LiveServer, ask: Ask, outcome: Outcome) -> None:
    """/v1/completions in one answer."""
    body = await _post(server, "/v1/completions", ask.v1(stream=False), outcome)
    if outcome.status == 200:
        outcome.add(body["choices"][0]["text"])
        outcome.done = body["usage"]["completion_tokens"] == ask.max_tokens
    else:
        outcome.error = body["error"]["message"]
        assert body["error"]["type"]


async def v2_infer(server: LiveServer, ask: Ask, outcome: Outcome) -> None:
    """/v2 infer in JSON."""
    inputs = [
        {"name": name, "datatype": datatype, "shape": [1, 1], "data": [value]}
        for name, (datatype, value) in ask.tensors(stream=False).items()
    ]
    body = await _post(server, f"/v2/models/{ask.model}/infer", {"inputs": inputs}, outcome)
    outcome.error = body.get("error", "")
    if outcome.status == 200:
        outcome.add(body["outputs"][0]["data"][0])
        outcome.done = True


async def v1_stream(server: LiveServer, ask: Ask, outcome: Outcome) -> None:
    """/v1/completions as events."""
    async for event in _events(server, "/v1/completions", ask.v1(stream=True), outcome):
        if event is None:
            outcome.done = True
        elif "error" in event:
            assert event["error"]["type"]
            outcome.error = event["error"]["message"]
        else:
            outcome.add(event["choices"][0]["text"])


async def v2_generate_stream(server: LiveServer, ask: Ask, outcome: Outcome) -> None:
    """/v2 generate_stream; whole when as many events came as tokens were asked for."""
    body = {name: value for name, (_, value) in ask.tensors(stream=True).items()}
    async for event in _events(server, f"/v2/models/{ask.model}/generate_stream", body, outcome):
        assert event is not None
        if "error" in event:
            outcome.error = event["error"]
        else:
            outcome.add(event["text_output"])
    outcome.done = outcome.status == 200 and not outcome.error


async def grpc_infer(server: LiveServer, ask: Ask, outcome: Outcome) -> None:
    """ModelInfer."""
    async with grpcclient.InferenceServerClient(server.grpc) as client:
        try:
            result = await client.infer(ask.model, grpc_inputs(ask, stream=False))
        except InferenceServerException as error:
            outcome.status, outcome.error = str(error.status()), error.message()
            return
        outcome.add(result.as_numpy("text_output")[0, 0].decode())
        outcome.status, outcome.done = "OK", True


async def grpc_stream(server: LiveServer, ask: Ask, outcome: Outcome) -> None:
    """ModelStreamInfer with one request, its errors inside the stream as Triton has them."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": ask.model, "inputs": grpc_inputs(ask, stream=True)}

    async with grpcclient.InferenceServerClient(server.grpc) as client:
        answers = client.stream_infer(requests())
        try:
            async for result, error in answers:
                if error is not None:
                    outcome.error = error.message()
                else:
                    outcome.add(result.as_numpy("text_output")[0, 0].decode())
                    final = result.get_response().parameters["triton_final_response"].bool_param
                    outcome.done = outcome.done or final
        except InferenceServerException as error:
            outcome.status, outcome.error = str(error.status()), error.message()
            return
        finally:
            answers.cancel()
        outcome.status = "OK"


CALLS: dict[str, Call] = {
    call.__name__: call for call in (v1_stream, v1_whole, v2_infer, v2_generate_stream, grpc_infer, grpc_stream)
}


def grpc_inputs(ask: Ask, *, stream: bool) -> list[Any]:
    """The request's tensors for tritonclient."""
    found = []
    for name, (datatype, value) in ask.tensors(stream=stream).items():
        kind: Any = {"BYTES": object, "INT32": np.int32, "FP32": np.float32, "BOOL": bool}[datatype]
        tensor = grpcclient.InferInput(name, [1, 1], datatype)
        tensor.set_data_from_numpy(np.array([[value]], dtype=kind))
        found.append(tensor)
    return found


class Running:
    """A request on its way."""

    def __init__(self, kind: str, server: LiveServer, ask: Ask) -> None:
        self.kind = kind
        self.ask = ask
        self.outcome = Outcome()
        self._task = asyncio.create_task(self._run(server))

    async def _run(self, server: LiveServer) -> None:
        try:
            await CALLS[self.kind](server, self.ask, self.outcome)
        except httpx.TransportError as error:
            self.outcome.error = f"connection: {type(error).__name__}"
        finally:
            self.outcome.ended = time.monotonic()

    async def end(self, timeout_s: float = 60) -> Outcome:
        """Waits for its end, which must come."""
        try:
            await asyncio.wait_for(asyncio.shield(self._task), timeout_s)
        except TimeoutError:
            raise AssertionError(f"{self.kind} hangs: {self.outcome}") from None
        return self.outcome

    async def leave(self) -> None:
        """The client goes away."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def ask_once(kind: str, server: LiveServer, ask: Ask, timeout_s: float = 60) -> Outcome:
    """Sends a request and waits for its end."""
    return await Running(kind, server, ask).end(timeout_s)


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 30) -> float:
    """Waits until ``condition``, which may block, holds; how many seconds that took."""
    begun = time.monotonic()
    while not await asyncio.to_thread(condition):
        if time.monotonic() > begun + timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        await asyncio.sleep(0.01)
    return time.monotonic() - begun


async def _post(server: LiveServer, path: str, body: Any, outcome: Outcome) -> Any:
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(server.url + path, json=body)
    outcome.status, outcome.headers = answer.status_code, dict(answer.headers)
    return answer.json()


async def _events(server: LiveServer, path: str, body: Any, outcome: Outcome) -> AsyncIterator[Any]:
    """The events of a stream, None for [DONE]; the only event of a refusal is its body."""
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", server.url + path, json=body) as answer,
    ):
        outcome.status, outcome.headers = answer.status_code, dict(answer.headers)
        if answer.status_code != 200:
            text = (await answer.aread()).decode().removeprefix("data: ")
            yield json.loads(text)
            return
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield None if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
