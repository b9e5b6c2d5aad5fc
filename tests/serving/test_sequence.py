from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.serving.executors import Executor, Gate, Running, ask, collect, config_of, request, stats, step
from tests.serving.support import refused, until
from tritium.backends.base import Timing
from tritium.backends.config import SequenceBatching
from tritium.errors import Code, TritiumError
from tritium.serving.sequence import SequenceBatcher
from tritium.serving.state import TEXT_ID, Teller
from tritium.types import InferRequest, InferResponse, RequestedOutput, SequenceRef, Tensor

MODEL = """
backend: "x" max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
CONTROLS = """
control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
  { name: "END" control [ { kind: CONTROL_SEQUENCE_END fp32_false_true: [ -1, 2 ] } ] },
  { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } ] },
  { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
]
"""
STATE = """
state [ { input_name: "CARRY" output_name: "NEXT" data_type: TYPE_INT32 dims: [ 1 ]
          initial_state { name: "s" data_type: TYPE_INT32 dims: [ 1 ] %s } } ]
"""


class Sums:
    """Keeps a running sum for each sequence, as a stateful model does; the sums die with the process."""

    def __init__(self) -> None:
        self.sums: dict[int, int] = {}

    async def __call__(self, requests: Sequence[InferRequest], running: Running) -> None:
        await asyncio.sleep(0)
        for index, one in enumerate(requests):
            told = {name: one.inputs[name].numpy().reshape(-1)[0] for name in ("IN", "START", "END", "READY", "ID")}
            total = 0
            if told["READY"]:
                key = int(told["ID"])
                total = int(told["IN"]) + (0 if told["START"] else self.sums[key])
                self.sums[key] = total
                if told["END"] == 2:
                    del self.sums[key]
            running.reply(index, answer(total))


def answer(value: int, name: str = "OUT") -> InferResponse:
    return InferResponse("", "", "", [Tensor.from_numpy(name, np.array([[value]], np.int32))])


def value(answers: list[InferResponse]) -> int:
    return int(answers[0].outputs[0].numpy()[0][0])


async def batcher(
    *executors: Executor, text: str = "direct { }" + CONTROLS, folder: Path | None = None, more: str = ""
) -> SequenceBatcher:
    config = config_of(f"{MODEL} {more} sequence_batching {{ {text} }}")
    assert isinstance(config.batching, SequenceBatching)
    made = SequenceBatcher(config, config.batching, executors, stats(), folder=folder)
    await made.start()
    await asyncio.sleep(0)
    return made


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
async def test_sequences_keep_their_sums(strategy: str):
    made = await batcher(Executor(Sums()), text=strategy + CONTROLS)
    found: list[int] = []
    for id, number, flags in [(1, 5, "s"), (2, 50, "s"), (1, 6, ""), (2, 60, "e"), (1, 7, "e"), (1, 9, "se")]:
        found.append(value(await ask(made, step(id, "s" in flags, "e" in flags, number))))
    assert found == [5, 50, 11, 110, 18, 9]
    assert made.active == 0
    await made.stop()


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (step(5, value=1), "inference request for sequence 5 to model 'm' must specify the START flag on the first"),
        (step(0, True), "must specify a non-zero or non-empty correlation ID"),
        (step("", True), "must specify a non-zero or non-empty correlation ID"),
        (step("red", True), "sequence_id is the text 'red', expected a number"),
        (step(-1, True), "sequence_id is -1, expected a value of UINT64"),
    ],
)
async def test_requests_that_fit_no_sequence(one: InferRequest, message: str):
    made = await batcher(Executor(Sums()))
    error = await refused(ask(made, one))
    assert (error.code, message in error.message) == (Code.INVALID_ARGUMENT, True)
    await made.stop()


async def test_a_request_without_a_sequence_and_one_of_two_rows():
    made = await batcher(Executor(Sums()))
    assert "non-zero or non-empty" in (await refused(ask(made, request()))).message
    assert "must specify batch-size 1" in (await refused(ask(made, step(1, True), 2))).message
    await made.stop()


async def test_direct_keeps_places_and_fills_gaps_with_requests_that_are_not_ready():
    executor = Executor(Sums())
    made = await batcher(executor)
    for id in (1, 2, 3):
        await ask(made, step(id, True, value=id))
    await ask(made, step(3, value=30))
    last = executor.log[-1]
    assert [bool(one.inputs["READY"].numpy().reshape(-1)[0]) for one in last] == [False, False, True]
    assert [int(one.inputs["IN"].numpy().reshape(-1)[0]) for one in last] == [0, 0, 30]
    assert [int(one.inputs["ID"].numpy().reshape(-1)[0]) for one in last] == [0, 0, 3]
    await made.stop()


async def test_direct_waits_for_a_share_of_its_places_but_not_for_ever():
    executor = Executor(Sums())
    text = "direct { max_queue_delay_microseconds: 60000 minimum_slot_utilization: 0.5 }" + CONTROLS
    made = await batcher(executor, text=text)
    began = asyncio.get_running_loop().time()
    await asyncio.gather(ask(made, step(1, True)), ask(made, step(2, True)))
    assert asyncio.get_running_loop().time() - began < 0.05
    assert len(executor.log) == 1
    await ask(made, step(1))
    assert asyncio.get_running_loop().time() - began > 0.05
    await made.stop()


async def test_oldest_puts_different_sequences_together_and_one_sequence_never():
    executor = Executor(gate := Gate())
    made = await batcher(executor, text="oldest { max_candidate_sequences: 4 }")
    first = asyncio.create_task(ask(made, step(9, True)))
    await until(lambda: len(executor.log) == 1)
    tasks = [asyncio.create_task(ask(made, step(id, n == 0, value=n))) for id in (1, 2) for n in range(2)]
    await until(lambda: made.pending == 4)
    gate.open.set()
    await asyncio.gather(first, *tasks)
    assert [[one.id for one in batch] for batch in executor.log[1:]] == [["1/0", "2/0"], ["1/1", "2/1"]]
    await made.stop()


async def test_a_sequence_waits_for_a_slot_with_all_its_requests():
    made = await batcher(Executor(Sums()), text="oldest { max_candidate_sequences: 1 }" + CONTROLS)
    await ask(made, step(1, True, value=1))
    waiting = [asyncio.create_task(ask(made, step(2, n == 0, n == 1, 10))) for n in range(2)]
    await asyncio.sleep(0.01)
    assert made.pending == 2
    assert value(await ask(made, step(1, False, True, 2))) == 3
    assert [value(await task) for task in waiting] == [10, 20]
    await made.stop()


async def test_sequences_spread_over_instances_and_stay_where_they_are():
    executors = [Executor(Sums(), f"m_{i}") for i in range(2)]
    made = await batcher(*executors)
    for n in range(3):
        for id in (1, 2, 3, 4):
            assert value(await ask(made, step(id, n == 0, n == 2, id))) == id * (n + 1)
    seen = [{int(r.inputs["ID"].numpy().item()) for batch in e.log for r in batch} - {0} for e in executors]
    assert seen == [{1, 3}, {2, 4}]
    await made.stop()


async def test_an_idle_sequence_loses_its_slot_and_a_start_begins_anew():
    made = await batcher(Executor(Sums()), text="max_sequence_idle_microseconds: 40000 direct { }" + CONTROLS)
    await ask(made, step(1, True, value=1))
    await until(lambda: made.active == 0)
    assert "START flag" in (await refused(ask(made, step(1)))).message
    assert value(await ask(made, step(1, True, value=7))) == 7
    assert value(await ask(made, step(1, True, value=8))) == 8
    await made.stop()


async def test_a_sequence_that_waits_too_long_for_a_slot_is_told():
    executor = Executor(Gate())
    text = "max_sequence_idle_microseconds: 40000 oldest { max_candidate_sequences: 1 }"
    made = await batcher(executor, text=text)
    first = asyncio.create_task(ask(made, step(1, True)))
    await until(lambda: len(executor.log) == 1)
    error = await refused(ask(made, step(2, True)))
    assert (error.code, error.message) == (
        Code.UNAVAILABLE,
        "timeout of the corresponding sequence has been expired",
    )
    await made.stop()
    assert (await refused(first)).code is Code.UNAVAILABLE
    assert (await refused(ask(made, step(3, True)))).code is Code.UNAVAILABLE


async def test_a_sequence_is_lost_with_the_process_of_its_model():
    executor = Executor(model := Sums())
    made = await batcher(executor)
    await ask(made, step(1, True, value=1))
    executor.kill()
    model.sums.clear()
    for _ in range(2):
        error = await refused(ask(made, step(1, value=2)))
        assert (error.code, "lost with its instance" in error.message) == (Code.UNAVAILABLE, True)
    assert value(await ask(made, step(1, True, value=5))) == 5
    await made.stop()


async def carry(requests: Sequence[InferRequest], running: Running) -> None:
    for index, one in enumerate(requests):
        total = int(one.inputs["CARRY"].numpy().item()) + int(one.inputs["IN"].numpy().item())
        found = answer(total)
        found.outputs.append(answer(total, "NEXT").outputs[0])
        running.reply(index, found)


async def test_implicit_state_is_kept_by_the_server_and_survives_the_process():
    executor = Executor(carry)
    made = await batcher(executor, text="oldest { }" + STATE % "zero_data: true")
    one = step(1, True, value=5)
    one.outputs = [RequestedOutput("OUT")]
    first = await ask(made, one)
    assert [tensor.name for tensor in first[0].outputs] == ["OUT"]
    assert [o.name for o in executor.log[0][0].outputs] == ["OUT", "NEXT"]
    executor.kill()
    assert [value(await ask(made, step(1, value=v))) for v in (6, 7)] == [11, 18]
    assert value(await ask(made, step(1, True, value=1))) == 1
    await made.stop()


async def test_initial_state_from_a_file(tmp_path: Path):
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "begin").write_bytes(np.array([100], np.int32).tobytes())
    made = await batcher(Executor(carry), text="oldest { }" + STATE % 'data_file: "begin"', folder=tmp_path)
    assert value(await ask(made, step(1, True, True, 5))) == 105
    await made.stop()
    for file, message in (("none", "is not in the folder"), ("../begin", "is not in the folder")):
        with pytest.raises(TritiumError, match=message):
            await batcher(Executor(carry), text="oldest { }" + STATE % f'data_file: "{file}"', folder=tmp_path)
    (tmp_path / "initial_state" / "begin").write_bytes(b"1")
    with pytest.raises(TritiumError, match="has 1 bytes, expected 4"):
        await batcher(Executor(carry), text="oldest { }" + STATE % 'data_file: "begin"', folder=tmp_path)


async def test_iterative_requests_run_until_their_model_lets_go():
    left: dict[int, int] = {}
    started: list[bool] = []

    async def model(requests: Sequence[InferRequest], running: Running) -> None:
        for index, one in enumerate(requests):
            assert one.sequence is not None
            key = int(str(one.sequence.id))
            started.append(one.sequence.start)
            left[key] = left.get(key, int(one.inputs["IN"].numpy().item())) - 1
            found = answer(left[key])
            found.final = left[key] == 0
            running.reply(index, found)
            if left[key]:
                running.reschedule(index)
        # What was rescheduled runs again before this execution is over.
        await asyncio.sleep(0.001)

    made = await batcher(
        Executor(model),
        text="iterative_sequence: true oldest { max_candidate_sequences: 4 }",
        more="model_transaction_policy { decoupled: true }",
    )
    one, other = step(1, value=3), step(1, value=2)
    one.sequence = other.sequence = None
    found = await asyncio.gather(ask(made, one), ask(made, other))
    assert [[int(a.outputs[0].numpy().item()) for a in answers] for answers in found] == [[2, 1, 0], [1, 0]]
    assert started.count(True) == 2
    assert made.active == 0
    await made.stop()


async def test_cancelling_a_waiting_request_of_a_sequence():
    executor = Executor(gate := Gate())
    made = await batcher(executor, text="oldest { max_candidate_sequences: 1 }")
    first = asyncio.create_task(ask(made, step(1, True)))
    await until(lambda: len(executor.log) == 1)
    second = asyncio.create_task(ask(made, step(1, value=2)))
    started = asyncio.create_task(ask(made, step(2, True)))
    follower = asyncio.create_task(ask(made, step(2, value=1)))
    await until(lambda: made.pending == 3)
    second.cancel()
    started.cancel()
    # Its model would never learn that it begins.
    assert (await refused(follower)).code is Code.UNAVAILABLE
    gate.open.set()
    await first
    assert value(await ask(made, step(1, False, True, 3))) == 3
    assert [one.id for batch in executor.log for one in batch] == ["1/0", "1/3"]
    await made.stop()


def teller(control: str, more: str = "") -> Teller:
    config = config_of(f"{MODEL} {more} sequence_batching {{ direct {{ }} control_input [ {control} ] }}")
    assert isinstance(config.batching, SequenceBatching)
    return Teller(config, config.batching, None)


@pytest.mark.parametrize("type_name", ["UINT64", "INT64", "UINT32", "INT32"])
def test_ids_in_all_types(type_name: str):
    control = f'{{ name: "ID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{type_name} }} ] }}'
    told = teller(control).inputs(SequenceRef(7), {})["ID"]
    assert (told.dtype.value, told.shape, told.numpy().tolist()) == (type_name, (1, 1), [[7]])
    with pytest.raises(TritiumError, match=f"expected a value of {type_name}"):
        teller(control).inputs(SequenceRef(1 << 70), {})


def test_text_ids_are_refused_as_recorded_unless_they_fill_the_buffer_or_the_model_wants_them_exact():
    control = '{ name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } ] }'
    for id in ("red", 7):
        with pytest.raises(TritiumError, match="unexpected number of string elements 2 for inference input 'ID'"):
            teller(control).inputs(SequenceRef(id), {})
    long = "x" * 128
    assert teller(control).inputs(SequenceRef(long), {})["ID"].strings() == [long.encode()]
    exact = teller(control, f'parameters {{ key: "{TEXT_ID}" value {{ string_value: "exact" }} }}')
    assert exact.inputs(SequenceRef("red"), {})["ID"].strings() == [b"red"]


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 3 preferred_batch_size: 2 }"])
@pytest.mark.parametrize("seed", range(3))
async def test_sequences_never_mix(strategy: str, seed: int):
    """Random sequences on two instances: each sums up its own values, in order, and each request ends once."""
    choose = random.Random(seed)
    executors = [Executor(Sums(), f"m_{i}") for i in range(2)]
    made = await batcher(*executors, text=strategy + CONTROLS)

    async def one(id: int) -> None:
        numbers = [choose.randint(1, 9) for _ in range(choose.randint(1, 6))]
        last = len(numbers) - 1
        streams = [made.stream(step(id, n == 0, n == last, x), Timing()) for n, x in enumerate(numbers)]
        await asyncio.sleep(choose.random() * 0.002)
        found = [value(await collect(stream)) for stream in streams]
        assert found == [sum(numbers[: n + 1]) for n in range(len(numbers))]

    async with asyncio.timeout(10):
        await asyncio.gather(*(one(id) for id in range(1, 31)))
    for executor in executors:
        for batch in executor.log:
            seen = [int(r.inputs["ID"].numpy().item()) for r in batch if r.inputs["READY"].numpy().item()]
            assert len(seen) == len(set(seen)) <= 4
    assert made.active == 0
    await made.stop()
