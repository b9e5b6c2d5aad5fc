"""One engine and its client: streams, aborts, restarts. The engine is real, the model tiny."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint
from tritium.errors import LOST, Code, TritiumError
from tritium.llm.checkpoint import read_metadata
from tritium.llm.client import SPIN_COUNT, EngineClient, thread_settings
from tritium.llm.config import EngineConfig
from tritium.llm.tokenizer import load_tokenizer
from tritium.llm.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client") / "model"
    make_checkpoint(folder, max_position_embeddings=4096)
    return folder


def client_of(checkpoint: Path, **settings: object) -> EngineClient:
    tokenizer = load_tokenizer(read_metadata(checkpoint))
    config = EngineConfig(model=str(checkpoint), dtype="float32", threads=1, **settings)  # type: ignore[arg-type]
    return EngineClient(config, tokenizer, stall_s=1.0)


@pytest.fixture
async def client(checkpoint: Path) -> AsyncIterator[EngineClient]:
    one = client_of(checkpoint)
    await one.start()
    yield one
    await one.stop()


def request(name: str = "r", prompt: int = 8, **params: object) -> GenerateRequest:
    values = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    return GenerateRequest(
        id=name,
        tokens=[(7 * i) % 250 + 5 for i in range(prompt)],
        params=SamplingParams(**values),  # type: ignore[arg-type]
        arrived_ns=time.monotonic_ns(),
    )


async def collect(client: EngineClient, one: GenerateRequest) -> list[TokenDelta]:
    return [delta async for delta in client.generate(one)]


async def test_a_stream_has_tokens_text_and_one_end(client: EngineClient) -> None:
    deltas = await collect(client, request())
    tokens = [token for delta in deltas for token in delta.tokens]
    assert len(tokens) == 12
    assert [d.finish for d in deltas if d.finish] == [FinishReason.LENGTH]
    assert "".join(d.text for d in deltas) == client.tokenizer.decode(tokens)
    assert client.ready() and client.reason() == "" and client.load == 0


async def test_equal_ids_in_flight_are_two_requests(client: EngineClient) -> None:
    first, second = await asyncio.gather(collect(client, request("same")), collect(client, request("same", prompt=9)))
    assert sum(len(d.tokens) for d in first) == sum(len(d.tokens) for d in second) == 12


async def test_a_stop_string_ends_the_request_and_its_work(client: EngineClient) -> None:
    whole = "".join(d.text for d in await collect(client, request(max_tokens=64)))
    stop = whole[10:13]
    deltas = await collect(client, request(max_tokens=2000, stop=[stop]))
    assert "".join(d.text for d in deltas) == whole[: whole.index(stop)]
    assert (deltas[-1].finish, deltas[-1].stop_reason) == (FinishReason.STOP, stop)
    await free_blocks(client)


async def test_leaving_the_stream_frees_the_blocks(client: EngineClient) -> None:
    async with aclosing(client.generate(request(max_tokens=3000))) as deltas:
        async for _ in deltas:
            break
    await free_blocks(client)


async def free_blocks(client: EngineClient) -> None:
    deadline = time.monotonic() + 3
    while (client.stats.blocks_used or client.stats.running) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert (client.stats.blocks_used, client.stats.running, client.load) == (0, 0, 0)


async def test_a_small_cache_bounds_the_context_and_says_so(checkpoint: Path) -> None:
    client = client_of(checkpoint, num_blocks=8)
    info = await client.start()
    try:
        assert info.max_length == 128
        assert any("128" in notice for notice in info.notices)
        deltas = await collect(client, request(prompt=100, max_tokens=100))
        assert (sum(len(d.tokens) for d in deltas), deltas[-1].finish) == (28, FinishReason.LENGTH)
        with pytest.raises(TritiumError, match="200") as caught:
            await collect(client, request(prompt=200))
        assert caught.value.code is Code.INVALID_ARGUMENT
    finally:
        await client.stop()


async def test_a_killed_engine_comes_back_and_loses_nothing_that_had_not_begun(
    client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tritium.client")
    expected = [t for d in await collect(client, request()) for t in d.tokens]
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    waiting = [asyncio.create_task(collect(client, request(f"w{i}"))) for i in range(4)]
    await asyncio.sleep(0.05)
    os.kill(client.pid, signal.SIGKILL)
    for deltas in await asyncio.wait_for(asyncio.gather(*waiting), 60):
        assert [t for d in deltas for t in d.tokens] == expected
    assert client.restarts == 1
    ended, back = caplog.records
    assert (ended.message, back.message) == ("the engine ended, starting it again", "the engine is back")
    said = getattr(back, "fields")  # noqa: B009
    assert (said["engine"], said["requests"], said["pid"]) == ("engine", 4, client.pid)
    assert 0 < said["seconds"] < 60


async def test_what_had_begun_ends_with_a_typed_error(client: EngineClient) -> None:
    with pytest.raises(TritiumError, match="the engine was lost while it answered") as caught:
        async for _ in client.generate(request(max_tokens=4000)):
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
    assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, LOST)
    assert (client.stats.running, client.stats.blocks_used) == (0, 0)


async def test_a_hang_is_seen_and_ended(client: EngineClient) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while client.ready() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert "stalled" in client.reason()
    deadline = time.monotonic() + 60
    while not client.ready() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert client.ready() and client.restarts == 1
    assert len(await collect(client, request())) > 0


async def test_what_cannot_be_sent_fails_alone(client: EngineClient) -> None:
    with pytest.raises(OverflowError):
        await collect(client, request(top_k=2**64))
    assert client.load == 0 and client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    assert sum(len(d.tokens) for d in await asyncio.wait_for(collect(client, request()), 60)) == 12


async def test_a_fault_of_the_supervision_ends_an_engine_and_not_the_supervision(client: EngineClient) -> None:
    def fail(_: object) -> None:
        client.on_stats = None
        raise RuntimeError("a fault of ours")

    client.on_stats = fail
    while not client.restarts:
        await asyncio.sleep(0.01)
    assert sum(len(d.tokens) for d in await asyncio.wait_for(collect(client, request()), 60)) == 12


async def test_a_model_that_cannot_load_says_why(tmp_path: Path, checkpoint: Path) -> None:
    client = client_of(checkpoint)
    client.config = EngineConfig(model=str(tmp_path / "nothing"))
    with pytest.raises(TritiumError, match="nothing"):
        await client.start()


async def test_draining_finishes_what_runs_and_refuses_what_comes(checkpoint: Path) -> None:
    client = client_of(checkpoint)
    await client.start()
    running = asyncio.create_task(collect(client, request(max_tokens=200)))
    await asyncio.sleep(0.05)
    stopping = asyncio.create_task(client.stop(30))
    await asyncio.sleep(0.01)
    with pytest.raises(TritiumError, match="shutting down"):
        await collect(client, request())
    assert sum(len(d.tokens) for d in await running) == 200
    await stopping
    assert client.pid is None


def test_threads_wait_shortly_unless_told_otherwise() -> None:
    assert thread_settings({}) == {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
    assert thread_settings({"GOMP_SPINCOUNT": "7"}) == {}
    assert thread_settings({"OMP_WAIT_POLICY": "active"}) == {}
