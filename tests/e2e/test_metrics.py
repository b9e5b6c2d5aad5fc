"""Metrics of a live server after requests that are known: Triton's counters and the engine's own series."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.live import LiveServer
from tests.tiny import make_checkpoint

LABELS = '{model="tiny",version="1"}'
FAILURES = "nv_inference_request_failure"
COUNTERS = {
    "nv_inference_request_success",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
    "tritium_prefix_cache_queries_tokens_total",
    "tritium_prefix_cache_hits_tokens_total",
    "tritium_preemptions_total",
}
HISTOGRAMS = {
    "tritium_time_to_first_token_seconds",
    "tritium_inter_token_latency_seconds",
    "tritium_queue_time_seconds",
}
MACHINE = {"nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"}
GAUGES = {
    "nv_inference_pending_request_count",
    "tritium_requests_running",
    "tritium_requests_waiting",
    "tritium_kv_cache_usage_ratio",
}
MAX_ROWS, MAX_WAITING = 8, 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of its own, whose counters nobody else moves, whose queue is soon full and whose answers are long."""
    folder = tmp_path_factory.mktemp("metrics")
    checkpoint = make_checkpoint(folder / "model", max_position_embeddings=8192)
    arguments = [str(checkpoint), "--served-model-name=tiny", "--dtype=float32"]
    arguments += [f"--max-rows={MAX_ROWS}", f"--max-waiting={MAX_WAITING}"]
    with LiveServer(arguments, folder / "log") as live:
        yield live


@pytest.fixture
async def client(server: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as one:
        yield one


def samples(server: LiveServer) -> dict[str, float]:
    """Every sample of the page, by its name and labels as they are written."""
    lines = httpx.get(server.metrics).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


class Growth:
    """How much each sample has grown since this was made."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._before = samples(server)
        self._now = self._before

    def look(self) -> Growth:
        self._now = samples(self._server)
        return self

    def __call__(self, name: str, labels: str = LABELS) -> float:
        return self._now[name + labels] - self._before.get(name + labels, 0)

    def failures(self) -> dict[str, float]:
        """By reason; those that did not grow are left out."""
        reasons = ("BACKEND", "CANCELED", "OTHER", "REJECTED")
        grown = {r: self(FAILURES, f'{{model="tiny",version="1",reason="{r}"}}') for r in reasons}
        return {reason: count for reason, count in grown.items() if count}


async def generate(client: httpx.AsyncClient, **values: Any) -> httpx.Response:
    return await client.post("/v2/models/tiny/generate", json={"temperature": 0, "ignore_eos": True, **values})


async def until(server: LiveServer, name: str, value: float) -> None:
    """Waits until a series of the model has that value."""
    async with asyncio.timeout(60):
        while samples(server)[name + LABELS] != value:
            await asyncio.sleep(0.02)


def _of_models(page: str) -> list[str]:
    """The lines that do not change while nobody asks for anything."""
    return [line for line in page.splitlines() if not line.startswith("nv_cpu_")]


async def test_every_series_is_there_from_the_start(server: LiveServer) -> None:
    page = httpx.get(server.metrics)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    kinds = dict(line.split()[2:4] for line in page.text.splitlines() if line.startswith("# TYPE"))
    expected = dict.fromkeys(COUNTERS | {FAILURES}, "counter") | dict.fromkeys(HISTOGRAMS, "histogram")
    assert kinds == expected | dict.fromkeys(GAUGES | MACHINE, "gauge")
    found = samples(server)
    # The token that proves that the engine works is no request: nothing has been counted yet.
    for name in COUNTERS | GAUGES | {f"{name}_count" for name in HISTOGRAMS}:
        assert found[name + LABELS] == 0, name
    for reason in ("BACKEND", "CANCELED", "OTHER", "REJECTED"):
        assert found[f'{FAILURES}{{model="tiny",version="1",reason="{reason}"}}'] == 0
    for name in HISTOGRAMS:
        assert found[f'{name}_bucket{{model="tiny",version="1",le="+Inf"}}'] == 0
    assert _of_models(httpx.get(f"{server.url}/metrics").text) == _of_models(page.text)


async def test_one_after_the_other(server: LiveServer, client: httpx.AsyncClient) -> None:
    grown = Growth(server)
    for _ in range(2):
        assert (await generate(client, text_input="Once upon", max_tokens=10)).status_code == 200
        body = {"model": "tiny", "prompt": "Once upon", "max_tokens": 10, "temperature": 0, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200
    grown.look()
    assert grown("nv_inference_request_success") == 4
    assert grown("nv_inference_count") == 4
    assert grown("nv_inference_exec_count") == pytest.approx(4)  # each ran alone: the mean batch is 1
    assert grown.failures() == {}
    parts = [grown(f"nv_inference_{part}_duration_us") for part in ("queue", "compute_input", "compute_infer")]
    assert min(parts) > 0
    total = grown("nv_inference_request_duration_us")
    assert sum(parts) + grown("nv_inference_compute_output_duration_us") == pytest.approx(total, rel=0.01)
    assert grown("tritium_prefix_cache_queries_tokens_total") == 4 * answer.json()["usage"]["prompt_tokens"]
    assert grown("tritium_time_to_first_token_seconds_count") == 4
    assert grown("tritium_queue_time_seconds_count") == 4
    assert grown("tritium_inter_token_latency_seconds_count") == 4 * 9
    first_token, queue = (grown(f"tritium_{n}_seconds_sum") for n in ("time_to_first_token", "queue_time"))
    assert 0 < queue < first_token < total / 1e6


async def test_a_batch_is_one_request_of_several_inferences(server: LiveServer, client: httpx.AsyncClient) -> None:
    grown = Growth(server)
    rows = [[5, 6, 7], [8, 9, 10], [11, 12, 13], [14, 15, 16]]
    values = {"input_ids": rows, "request_output_len": [[100]] * 4, "temperature": [[0.0]] * 4}
    data = {"input_ids": "INT32", "request_output_len": "INT32", "temperature": "FP32"}
    inputs = [
        {"name": name, "datatype": data[name], "shape": [4, len(value[0])], "data": value}
        for name, value in values.items()
    ]
    inputs.append({"name": "ignore_eos", "datatype": "BOOL", "shape": [4, 1], "data": [True] * 4})
    assert (await client.post("/v2/models/tiny/infer", json={"inputs": inputs})).status_code == 200
    grown.look()
    assert grown("nv_inference_request_success") == 1
    assert grown("nv_inference_count") == 4
    assert 3 < grown("nv_inference_count") / grown("nv_inference_exec_count") <= 4.001


async def test_mean_batch_of_equal_requests(server: LiveServer, client: httpx.AsyncClient) -> None:
    grown = Growth(server)
    answers = await asyncio.gather(*(generate(client, text_input="Once upon", max_tokens=400) for _ in range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["text_output"] for answer in answers}) == 1
    grown.look()
    assert grown("nv_inference_request_success") == grown("nv_inference_count") == 8
    assert 6 < grown("nv_inference_count") / grown("nv_inference_exec_count") <= 8.001
    assert grown("tritium_inter_token_latency_seconds_count") == 8 * 399


async def test_prefix_cache(server: LiveServer, client: httpx.AsyncClient) -> None:
    prompt = [3 + (11 * i * i + 5 * i) % 380 for i in range(150)]
    grown = Growth(server)
    await generate(client, input_ids=prompt, max_tokens=1)
    grown.look()
    assert grown("tritium_prefix_cache_queries_tokens_total") == 150
    assert grown("tritium_prefix_cache_hits_tokens_total") == 0
    await generate(client, input_ids=prompt, max_tokens=1)
    grown.look()
    assert grown("tritium_prefix_cache_queries_tokens_total") == 300
    assert grown("tritium_prefix_cache_hits_tokens_total") == 144  # whole blocks of 16


async def test_levels_refusals_and_clients_that_leave(server: LiveServer, client: httpx.AsyncClient) -> None:
    body = {"text_input": "Once upon", "max_tokens": 8000, "stream": True, "ignore_eos": True}

    async def stay() -> None:
        async with client.stream("POST", "/v2/models/tiny/generate_stream", json=body) as stream:
            async for _ in stream.aiter_raw():
                pass

    grown = Growth(server)
    begun = time.monotonic()
    tasks = [asyncio.create_task(stay()) for _ in range(MAX_ROWS + MAX_WAITING)]
    await until(server, "tritium_requests_waiting", MAX_WAITING)
    found = samples(server)
    assert found["tritium_requests_running" + LABELS] == MAX_ROWS
    assert found["nv_inference_pending_request_count" + LABELS] == MAX_WAITING
    assert 0 < found["tritium_kv_cache_usage_ratio" + LABELS] <= 1
    refused = await generate(client, text_input="Once upon")
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert "Exceeds maximum queue size" in refused.json()["error"]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    assert (await client.post("/v1/chat/completions", json=chat)).status_code == 503
    assert not any(task.done() for task in tasks), f"all ended within {time.monotonic() - begun:.1f} s"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for name in sorted(GAUGES):
        await until(server, name, 0)
    grown.look()
    assert grown.failures() == {"REJECTED": 2, "CANCELED": MAX_ROWS + MAX_WAITING}
    assert grown("nv_inference_request_success") == grown("nv_inference_count") == 0


async def test_requests_that_are_wrong(server: LiveServer, client: httpx.AsyncClient) -> None:
    grown = Growth(server)
    assert (await generate(client, text_input="Once upon", top_p=7)).status_code == 400
    assert (await generate(client, input_ids=[5, 999])).status_code == 400
    assert grown.look().failures() == {"OTHER": 2}
    # What never came as far as the model counts nowhere, as in Triton.
    inputs = [{"name": "strange", "datatype": "INT32", "shape": [1, 1], "data": [1]}]
    assert (await client.post("/v2/models/tiny/infer", json={"inputs": inputs})).status_code == 400
    assert (await client.post("/v2/models/other/generate", json={"text_input": "x"})).status_code == 404
    assert grown.look().failures() == {"OTHER": 2}


async def test_counters_outlive_the_engine(server: LiveServer, client: httpx.AsyncClient) -> None:
    grown, before = Growth(server), samples(server)
    body = {"text_input": "Once upon", "max_tokens": 8000, "stream": True, "ignore_eos": True}
    async with client.stream("POST", "/v2/models/tiny/generate_stream", json=body) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        rest = [line async for line in lines if line]
    assert "the engine was lost while it answered" in rest[-1]
    assert (await generate(client, text_input="Once upon", max_tokens=3)).status_code == 200
    after = samples(server)
    for name, value in after.items():
        if name.split("{")[0] in COUNTERS | {FAILURES}:
            assert value >= before[name], name
    # Nobody refused that request: its backend broke.
    assert grown.look().failures() == {"BACKEND": 1}
    assert all(after[name + LABELS] == 0 for name in GAUGES)
