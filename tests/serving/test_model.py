from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress

import pytest

from tests.serving.fakes import ECHO, Echo, Text, request, sequence
from tests.serving.test_config import made
from tritium.backends.base import LoadContext
from tritium.errors import Code, TritiumError
from tritium.observability.metrics import Metrics
from tritium.serving.model import Model, State
from tritium.types import InferRequest


async def loaded(text: str = ECHO, name: str = "echo", metrics: Metrics | None = None) -> Model:
    model = Model(LoadContext(name, "1", made(text, name)), metrics)
    await model.load()
    model.open()
    return model


async def failing(text: str) -> tuple[Model, TritiumError]:
    model = Model(LoadContext("echo", "1", made(text, "echo")))
    with pytest.raises(TritiumError) as caught:
        await model.load()
    return model, caught.value


async def code_of(model: Model, asked: InferRequest) -> Code:
    with pytest.raises(TritiumError) as caught:
        await model.infer(asked)
    return caught.value.code


async def test_a_life():
    model = Model(LoadContext("echo", "1", made(ECHO, "echo")))
    assert model.state is State.LOADING and not model.ready() and model.created_s == 0
    assert await code_of(model, request()) is Code.NOT_FOUND
    with pytest.raises(TritiumError):
        model.open()
    await model.load()
    assert not model.ready()
    model.open()
    assert model.ready() and abs(model.created_s - time.time()) < 5
    answer = await model.infer(request(id="a", rows=2))
    assert (answer.model, answer.version, answer.id) == ("echo", "1", "a")
    assert answer.outputs[0].shape == (2, 2)
    Echo.made[0].up = False
    assert not model.ready() and model.reason == "asleep"
    await model.unload()
    await model.unload()
    assert model.unloaded and model.reason == "unloaded" and Echo.made[0].unloads == 1
    assert await code_of(model, request()) is Code.NOT_FOUND


async def test_a_backend_completes_the_configuration():
    model = await loaded('backend: "echo" input { name: "IN" data_type: TYPE_FP32 dims: -1 }')
    assert model.config.outputs[0].name == "OUT"
    assert model.config.to_json()["output"][0]["name"] == "OUT"


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        (
            'parameters { key: "fail" value { string_value: "all" } }',
            Code.INTERNAL,
            "Internal: load refuses on purpose",
        ),
        ('parameters { key: "crash" value { } }', Code.INTERNAL, "Internal: model 'echo' failed to load: RuntimeError"),
    ],
)
async def test_loads_that_fail(text: str, code: Code, reason: str):
    model, error = await failing(ECHO + text)
    assert (error.code, model.state, model.reason) == (code, State.UNAVAILABLE, reason)
    assert Echo.made[0].unloads == 1
    await model.unload()
    assert model.reason == reason and not model.unloaded


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ('backend: "nope"', Code.INVALID_ARGUMENT, "unable to find backend library for backend 'nope'"),
        ('platform: "nope"', Code.INVALID_ARGUMENT, "unable to find backend library for backend 'nope'"),
        ("", Code.INVALID_ARGUMENT, "must specify 'backend' or 'platform' for 'echo'"),
        ('backend: "absent"', Code.UNAVAILABLE, "backend 'absent' cannot be used here"),
    ],
)
async def test_backends_that_are_not_there(text: str, code: Code, words: str):
    model, error = await failing(text)
    assert error.code is code and words in error.message and words in model.reason


async def test_backend_wins_over_platform():
    assert (await loaded(ECHO + 'platform: "nope"')).ready()
    assert (await loaded('platform: "echo_platform"')).ready()


async def test_fields_without_effect_are_told(caplog: pytest.LogCaptureFixture):
    await loaded(ECHO)
    assert not caplog.records
    await loaded(ECHO + 'runtime: "x"')
    assert [record.message for record in caplog.records] == ["fields of the configuration have no effect here"]


async def test_a_load_that_is_given_up():
    Echo.load_gate = asyncio.Event()
    model = Model(LoadContext("echo", "1", made(ECHO, "echo")))
    task = asyncio.create_task(model.load())
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert model.state is State.UNAVAILABLE and model.reason == "Cancelled: the load was given up"
    assert Echo.made[0].unloads == 1


async def test_errors_reach_the_client_once():
    model = await loaded()
    assert await code_of(model, request(error="NOT_FOUND")) is Code.NOT_FOUND
    assert await code_of(model, request(error_answer=1)) is Code.UNKNOWN
    assert await code_of(model, request(endless=1)) is Code.INTERNAL
    assert await code_of(model, request(answers=0)) is Code.INTERNAL
    with pytest.raises(TritiumError, match=r"model 'echo' failed to answer: ValueError$"):
        await model.infer(request(crash=1))
    assert Echo.made[0].closed == 5
    assert model.running == 0


async def test_one_answer_and_only_one():
    model = await loaded()
    answer = await model.infer(request(endless=1, empty_final=1))
    assert not answer.final
    assert await code_of(model, request(answers=2)) is Code.INVALID_ARGUMENT
    assert await code_of(model, request(answers=0, empty_final=1)) is Code.INTERNAL


async def test_nothing_follows_the_final_answer():
    model = await loaded()
    async with aclosing(model.stream(request(answers=3, empty_final=1))) as answers:
        found = [answer.final async for answer in answers]
    assert found == [False, False, True]


async def test_decoupled_models_answer_streams_only():
    model = await loaded(ECHO + "model_transaction_policy { decoupled: true }")
    with pytest.raises(TritiumError, match="decoupled transaction policy") as caught:
        await model.infer(request())
    assert caught.value.code is Code.UNIMPLEMENTED
    text = await loaded('backend: "text" model_transaction_policy { decoupled: true }', "text")
    asked = request("text")
    asked.inputs, asked.outputs = {}, []
    assert (await text.infer(asked)).model == "text"


async def test_the_queue_policy_bounds_the_wait():
    model = await loaded(
        ECHO
        + "dynamic_batching { default_queue_policy { default_timeout_microseconds: 9 allow_timeout_override: true } }"
    )
    for asked_us, wait_us in ((4, 4), (40, 9), (0, 9)):
        asked = request()
        asked.timeout_us = asked_us
        await model.infer(asked)
        assert Echo.made[0].seen[-1].timeout_us == wait_us


async def test_counters():
    metrics = Metrics()
    model = await loaded(metrics=metrics)
    await model.infer(request(rows=3))
    await model.infer(request())
    stats = model.stats
    assert (stats.inference_count, stats.executions, stats.execution_count) == (4, 1.0, 1)
    assert (stats.success.count, stats.fail.count) == (2, 0)
    assert (stats.queue.count, stats.queue.ns, stats.compute_input.ns, stats.compute_output.ns) == (2, 10, 6, 4)
    assert (
        stats.success.ns == stats.queue.ns + stats.compute_input.ns + stats.compute_infer.ns + stats.compute_output.ns
    )
    assert abs(stats.last_inference_ms - time.time() * 1e3) < 5000
    for code in ("INTERNAL", "CANCELLED", "UNAVAILABLE", "NOT_FOUND"):
        await code_of(model, request(error=code))
    asked = request()
    asked.inputs = {}
    await code_of(model, asked)
    assert stats.fail.count == 4
    page = metrics.render().decode()
    for line in (
        'nv_inference_count{model="echo",version="1"} 4.0',
        'nv_inference_exec_count{model="echo",version="1"} 1.0',
        'nv_inference_request_success{model="echo",version="1"} 2.0',
        *(
            f'nv_inference_request_failure{{model="echo",version="1",reason="{reason}"}} 1.0'
            for reason in ("BACKEND", "CANCELED", "REJECTED", "OTHER")
        ),
    ):
        assert line in page
    assert "tritium_" not in page


async def test_a_client_that_leaves_counts_as_cancelled():
    model = await loaded()
    task = asyncio.create_task(model.infer(request(hang=1)))
    while not model.running:
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    async with aclosing(model.stream(request(answers=2))) as answers:
        await anext(answers)
    async with aclosing(model.stream(request())) as answers:
        await anext(answers)
    assert (model.stats.fail.count, model.stats.success.count, model.running) == (2, 1, 0)
    assert Echo.made[0].closed == 3


async def test_unloading_waits_for_requests_and_ends_them():
    model = await loaded()
    task = asyncio.create_task(model.infer(request(hang=1)))
    while not model.running:
        await asyncio.sleep(0)
    model.retire()
    assert model.state is State.UNLOADING
    assert await code_of(model, request()) is Code.NOT_FOUND
    assert not await model.wait_idle(0.01)
    await model.unload()
    with pytest.raises(TritiumError, match="unloaded meanwhile"):
        await task
    assert await model.wait_idle() and await model.wait_idle(0)


async def test_a_backend_that_fails_to_unload_is_gone_all_the_same():
    model = await loaded(ECHO + 'parameters { key: "stubborn" value { } }')
    await model.unload()
    assert model.unloaded


async def test_sequences():
    metrics = Metrics()
    model = await loaded('backend: "text"', "text", metrics)
    assert model.config.instances[0].device == "cpu"
    async with aclosing(model.generate(sequence(3))) as deltas:
        found = [token async for delta in deltas for token in delta.tokens]
    assert found == [3, 4, 5]
    stats = model.stats
    assert (stats.inference_count, stats.executions, stats.queue.ns, stats.success.count) == (1, 0.25, 7, 1)
    page = metrics.render().decode()
    for line in (
        'tritium_queue_time_seconds_count{model="text",version="1"} 1.0',
        'tritium_time_to_first_token_seconds_count{model="text",version="1"} 1.0',
        'tritium_inter_token_latency_seconds_count{model="text",version="1"} 2.0',
        'tritium_requests_running{model="text",version="1"} 1.0',
        'tritium_kv_cache_usage_ratio{model="text",version="1"} 0.25',
    ):
        assert line in page
    model.retire()
    assert "tritium_" not in metrics.render().decode()


async def test_sequences_that_end_badly():
    model = await loaded('backend: "text"', "text")
    for mode, code in (("error", Code.UNAVAILABLE), ("unfinished", Code.INTERNAL)):
        with pytest.raises(TritiumError) as caught:
            async for _ in model.generate(sequence(1, mode)):
                pass
        assert caught.value.code is code
    async with aclosing(model.generate(sequence(3))) as deltas:
        await anext(deltas)
    assert Text.made[0].aborted == 1
    assert (model.stats.fail.count, model.running) == (3, 0)


async def test_what_is_no_language_model():
    model = await loaded()
    with pytest.raises(TritiumError, match="model 'echo' is not a language model"):
        await anext(model.generate(sequence()))
    await model.unload()
    with pytest.raises(TritiumError, match="no available versions"):
        model.text_backend()
