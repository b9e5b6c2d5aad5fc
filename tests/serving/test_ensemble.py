from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.executors import collect, config_of, request, stats
from tests.serving.support import refused, until
from tritium.backends.base import LoadContext, Timing
from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError
from tritium.serving.ensemble import MAX_UNREAD, EnsembleRunner
from tritium.types import InferRequest, InferResponse, RequestedOutput, SequenceRef, Tensor

HEAD = """
platform: "ensemble" max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
MODELS = {
    "plus": 'backend: "x" max_batch_size: 4 input { name: "A" data_type: TYPE_FP32 dims: [ -1 ] } '
    'output { name: "B" data_type: TYPE_FP32 dims: [ -1 ] }',
    "add": 'backend: "x" max_batch_size: 4 input { name: "A" data_type: TYPE_FP32 dims: [ -1 ] } '
    'input { name: "C" data_type: TYPE_FP32 dims: [ -1 ] optional: true } '
    'output { name: "B" data_type: TYPE_FP32 dims: [ -1 ] }',
    "many": 'backend: "x" max_batch_size: 4 input { name: "A" data_type: TYPE_FP32 dims: [ -1 ] } '
    'output { name: "B" data_type: TYPE_FP32 dims: [ -1 ] } model_transaction_policy { decoupled: true }',
    "whole": 'backend: "x" max_batch_size: 4 input { name: "A" data_type: TYPE_INT32 dims: [ -1 ] } '
    'output { name: "B" data_type: TYPE_INT32 dims: [ 2 ] }',
    "small": 'backend: "x" max_batch_size: 2 input { name: "A" data_type: TYPE_FP32 dims: [ -1 ] } '
    'output { name: "B" data_type: TYPE_FP32 dims: [ -1 ] }',
    "two": 'backend: "x" max_batch_size: 4 input { name: "A" data_type: TYPE_FP32 dims: [ 2 ] } '
    'output { name: "B" data_type: TYPE_FP32 dims: [ 2 ] }',
}


def step(model: str, inputs: dict[str, str], outputs: dict[str, str], version: int = -1) -> str:
    maps = "".join(f'input_map {{ key: "{k}" value: "{v}" }} ' for k, v in inputs.items())
    maps += "".join(f'output_map {{ key: "{k}" value: "{v}" }} ' for k, v in outputs.items())
    return f'step {{ model_name: "{model}" model_version: {version} {maps} }}'


def ensemble(*steps: str, head: str = HEAD, more: str = "") -> ModelConfig:
    return config_of(f"{head} ensemble_scheduling {{ {' '.join(steps)} {more} }}", "e")


def find(name: str, version: int) -> ModelConfig:
    return config_of(MODELS[name], name)


class World:
    """The models of ``MODELS``: plus adds one; add adds its inputs; many answers 0, 1, 2, ... times its input."""

    def __init__(self) -> None:
        self.seen: list[InferRequest] = []
        self.closed = 0
        self.running = 0
        self.most = 0
        self.wait: Callable[[InferRequest], Awaitable[None]] | None = None
        self.fail: TritiumError | None = None
        self.count = 3

    async def call(self, one: InferRequest) -> AsyncIterator[InferResponse]:
        self.seen.append(one)
        self.running += 1
        self.most = max(self.most, sum(1 for _ in range(self.running)) if one.model != "many" else 0)
        try:
            if self.wait is not None:
                await self.wait(one)
            if self.fail is not None and one.model == "plus":
                raise self.fail
            given = {name: tensor.numpy() for name, tensor in one.inputs.items()}
            if one.model == "many":
                for n in range(self.count):
                    yield InferResponse("", "", "", [Tensor.from_numpy("B", given["A"] * n)], final=False)
                yield InferResponse("", "", "", empty=True)
                return
            total = sum(given.values()) + (1 if one.model == "plus" else 0)
            yield InferResponse("", "", "", [Tensor.from_numpy("B", np.asarray(total, np.float32))])
        finally:
            self.running -= 1
            self.closed += 1


async def runner(world: World, config: ModelConfig) -> EnsembleRunner:
    made = EnsembleRunner(LoadContext("e", "1", config), find, world.call, stats())
    made.context = replace(made.context, config=await made.complete(config))
    await made.load()
    return made


def ask_for(value: float = 1, **fields: object) -> InferRequest:
    one = request(1, 1, **fields)
    one.inputs = {"X": Tensor.from_numpy("X", np.array([[value]], np.float32))}
    return one


async def values(made: EnsembleRunner, one: InferRequest) -> list[list[float]]:
    return [
        [float(t.numpy()[0][0]) for t in a.outputs] for a in await collect(made.stream(one, Timing())) if not a.empty
    ]


CHAIN = (step("plus", {"A": "X"}, {"B": "m"}), step("plus", {"A": "m"}, {"B": "Y"}))


async def test_a_chain_of_steps():
    world = World()
    made = await runner(world, ensemble(*reversed(CHAIN)))
    timing = Timing()
    more = {"parameters": {"p": 1}, "priority": 2, "timeout_us": 77, "tenant": "t"}
    one = ask_for(5, id="r", sequence=SequenceRef(3, True, False), **more)
    (answer,) = await collect(made.stream(one, timing))
    assert answer.final
    assert answer.outputs[0].numpy().tolist() == [[7]]
    assert answer.parameters == {"sequence_id": 3, "sequence_start": True, "sequence_end": False}
    assert [(r.model, r.version, r.id, r.parameters, r.priority, r.sequence) for r in world.seen] == [
        ("plus", "", "r", {"p": 1}, 2, SequenceRef(3, True, False))
    ] * 2
    assert [(r.timeout_us, r.tenant) for r in world.seen] == [(77, "t")] * 2
    assert timing.queue_ns > 0
    assert made.ready()
    await made.unload()
    assert not made.ready()


async def test_outputs_are_sorted_and_only_what_is_needed_runs():
    head = HEAD + 'output { name: "A2" data_type: TYPE_FP32 dims: [ -1 ] }'
    world = World()
    made = await runner(
        world, ensemble(step("plus", {"A": "X"}, {"B": "Y"}), step("add", {"A": "X"}, {"B": "A2"}, 1), head=head)
    )
    (answer,) = await collect(made.stream(ask_for(3), Timing()))
    assert [(t.name, t.numpy().item()) for t in answer.outputs] == [("A2", 3), ("Y", 4)]
    assert {r.version for r in world.seen} == {"", "1"}
    world.seen.clear()
    one = ask_for(3)
    one.outputs = [RequestedOutput("A2")]
    assert await values(made, one) == [[3]]
    assert [r.model for r in world.seen] == ["add"]


async def test_steps_that_do_not_need_each_other_run_at_the_same_time():
    world, both = World(), asyncio.Barrier(2)

    async def wait(one: InferRequest) -> None:
        if one.model == "plus":
            await both.wait()

    world.wait = wait
    steps = (
        step("plus", {"A": "X"}, {"B": "a"}),
        step("plus", {"A": "X"}, {"B": "b"}),
        step("add", {"A": "a", "C": "b"}, {"B": "Y"}),
    )
    async with asyncio.timeout(5):
        assert await values(await runner(world, ensemble(*steps)), ask_for(1)) == [[4]]


async def test_an_optional_input_may_be_missing():
    head = HEAD + 'input { name: "Z" data_type: TYPE_FP32 dims: [ -1 ] optional: true }'
    world = World()
    made = await runner(world, ensemble(step("add", {"A": "X", "C": "Z"}, {"B": "Y"}), head=head))
    assert await values(made, ask_for(3)) == [[3]]
    one = ask_for(3)
    one.inputs["Z"] = Tensor.from_numpy("Z", np.array([[4]], np.float32))
    assert await values(made, one) == [[7]]


async def test_an_error_of_a_step_names_the_ensemble_and_ends_the_others():
    world, never = World(), asyncio.Event()
    world.fail = TritiumError(Code.UNAVAILABLE, "unlucky", retry_after_s=2)

    async def wait(one: InferRequest) -> None:
        if one.model == "add":
            await never.wait()

    world.wait = wait
    head = HEAD + 'output { name: "V" data_type: TYPE_FP32 dims: [ -1 ] }'
    steps = (step("plus", {"A": "X"}, {"B": "Y"}), step("add", {"A": "X"}, {"B": "V"}))
    made = await runner(world, ensemble(*steps, head=head))
    error = await refused(collect(made.stream(ask_for(), Timing())))
    assert (error.code, error.message, error.retry_after_s) == (Code.UNAVAILABLE, "in ensemble 'e', unlucky", 2)
    assert world.closed == 2


async def test_closing_the_answers_cancels_the_steps():
    world, never = World(), asyncio.Event()
    world.wait = lambda one: never.wait()  # type: ignore[assignment,return-value]
    made = await runner(world, ensemble(*CHAIN))
    task = asyncio.create_task(collect(made.stream(ask_for(), Timing())))
    await until(lambda: world.running == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert world.closed == 1


async def test_a_step_that_leaves_out_an_output():
    async def call(one: InferRequest) -> AsyncIterator[InferResponse]:
        yield InferResponse("", "", "")

    made = EnsembleRunner(LoadContext("e", "1", ensemble(*CHAIN)), find, call, stats())
    await made.complete(ensemble(*CHAIN))
    error = await refused(collect(made.stream(ask_for(), Timing())))
    assert (error.code, "unexpected deadlock" in error.message) == (Code.INTERNAL, True)


async def test_a_step_that_fails_with_something_else_or_answers_twice():
    async def crash(one: InferRequest) -> AsyncIterator[InferResponse]:
        raise ValueError("a secret")
        yield

    async def twice(one: InferRequest) -> AsyncIterator[InferResponse]:
        for _ in range(2):
            yield InferResponse("", "", "", [Tensor.from_numpy("B", np.zeros((1, 1), np.float32))], final=False)

    for call, message in ((crash, "in ensemble 'e', ValueError"), (twice, "gave more than one answer")):
        made = EnsembleRunner(LoadContext("e", "1", ensemble(CHAIN[0].replace('"m"', '"Y"'))), find, call, stats())
        await made.complete(ensemble(CHAIN[0].replace('"m"', '"Y"')))
        error = await refused(collect(made.stream(ask_for(), Timing())))
        assert (error.code, message in error.message) == (Code.INTERNAL, True)


@given(st.integers(0, 6), st.randoms(use_true_random=False))
async def test_answers_of_a_decoupled_step_go_on_one_by_one_in_order(count: int, random: object):
    world = World()
    world.count = count

    async def wait(one: InferRequest) -> None:
        for _ in range(random.randint(0, 4)):  # type: ignore[attr-defined]
            await asyncio.sleep(0)

    world.wait = wait
    steps = (step("many", {"A": "X"}, {"B": "m"}), step("add", {"A": "m", "C": "X"}, {"B": "Y"}))
    made = await runner(world, ensemble(*steps))
    assert made.context.config.decoupled
    answers = await collect(made.stream(ask_for(2), Timing()))
    assert [a.final for a in answers] == [False] * count + [True]
    assert answers[-1].empty
    assert [a.outputs[0].numpy().item() for a in answers[:-1]] == [2 * n + 2 for n in range(count)]


async def test_decoupled_steps_in_a_row_and_side_by_side():
    world = World()
    row = (step("many", {"A": "X"}, {"B": "m"}), step("many", {"A": "m"}, {"B": "Y"}))
    assert await values(await runner(world, ensemble(*row)), ask_for(1)) == [[x] for x in (0, 0, 0, 0, 1, 2, 0, 2, 4)]
    side = (
        step("many", {"A": "X"}, {"B": "a"}),
        step("many", {"A": "X"}, {"B": "b"}),
        step("add", {"A": "a", "C": "b"}, {"B": "Y"}),
    )
    assert await values(await runner(world, ensemble(*side)), ask_for(1)) == [[0], [2], [4]]


async def test_max_inflight_requests_holds_a_fast_producer_back():
    world, made_answers = World(), []
    world.count = 20
    gate = asyncio.Semaphore(0)

    async def wait(one: InferRequest) -> None:
        if one.model == "plus":
            made_answers.append(one)
            await gate.acquire()

    world.wait = wait
    steps = (step("many", {"A": "X"}, {"B": "m"}), step("plus", {"A": "m"}, {"B": "Y"}))
    made = await runner(world, ensemble(*steps, more="max_inflight_requests: 2"))
    task = asyncio.create_task(collect(made.stream(ask_for(1), Timing())))
    for done in range(20):
        await until(lambda done=done: len(made_answers) >= min(20, done + 2))
        await asyncio.sleep(0)
        assert len(made_answers) <= done + 2
        gate.release()
    assert len(await task) == 21


async def test_answers_that_come_while_the_client_reads_are_not_lost():
    world = World()
    world.count = 20
    made = await runner(world, ensemble(step("many", {"A": "X"}, {"B": "Y"})))
    found: list[float] = []
    async for answer in made.stream(ask_for(2), Timing()):
        await asyncio.sleep(0.01 if not found else 0)
        found += [] if answer.empty else [answer.outputs[0].numpy().item()]
    assert found == [2 * n for n in range(20)]


async def test_a_client_that_does_not_read_holds_a_fast_producer_back():
    world = World()
    world.count = 200
    most = 0
    steps = (step("many", {"A": "X"}, {"B": "m"}), step("plus", {"A": "m"}, {"B": "Y"}))
    made = await runner(world, ensemble(*steps))
    count = 0
    async for answer in made.stream(ask_for(2), Timing()):
        await asyncio.sleep(0.002)
        count += not answer.empty
        most = max(most, sum(one.model == "plus" for one in world.seen) - count)
    assert count == 200
    assert MAX_UNREAD / 2 < most < 3 * MAX_UNREAD


async def test_tensors_go_with_their_last_use():
    """An ensemble that answers for long holds no more than what is under way."""
    world, alive = World(), []
    call = world.call
    world.count = 100

    async def watched(one: InferRequest) -> AsyncIterator[InferResponse]:
        async for answer in call(one):
            for tensor in answer.outputs:
                array = np.zeros(1, np.float32)
                alive.append(weakref.ref(array))
                tensor.data = array.view(np.uint8).data
            yield answer

    world.call = watched  # type: ignore[method-assign]
    steps = (step("many", {"A": "X"}, {"B": "m"}), step("add", {"A": "m", "C": "X"}, {"B": "Y"}))
    made = await runner(world, ensemble(*steps))
    most = 0
    async for answer in made.stream(ask_for(2), Timing()):
        del answer
        world.seen.clear()
        await asyncio.sleep(0)
        most = max(most, sum(one() is not None for one in alive))
    assert len(alive) == 200
    assert most < 3 * MAX_UNREAD


async def test_whether_an_ensemble_answers_once():
    llm = MODELS["many"].replace('"x"', '"tritium"')
    models = {**MODELS, "llm": llm}
    for name, once in (("plus", True), ("many", False), ("llm", True)):
        config = ensemble(step(name, {"A": "X"}, {"B": "Y"}))
        made = EnsembleRunner(
            LoadContext("e", "1", config), lambda n, v: config_of(models[n], n), World().call, stats()
        )
        await made.complete(config)
        assert made.answers_once is once


@pytest.mark.parametrize(
    ("steps", "head", "message"),
    [
        ((step("plus", {"A": "b"}, {"B": "a"}), step("plus", {"A": "a"}, {"B": "b"}),
          step("plus", {"A": "X"}, {"B": "Y"})), HEAD, "has a circle: steps of 'plus', 'plus' wait for each other"),
        ((step("plus", {"A": "X"}, {"B": "Z"}),), HEAD, "has output 'Y' that no step writes"),
        ((step("plus", {"A": "none"}, {"B": "m"}), step("plus", {"A": "X"}, {"B": "Y"})), HEAD,
         "nothing writes the tensor 'none' of input 'A'"),
        ((step("plus", {"A": "X"}, {"B": "Y"}), step("plus", {"A": "X"}, {"B": "Y"})), HEAD, "only once"),
        ((step("plus", {"Q": "X"}, {"B": "Y"}),), HEAD, "the model has no input 'Q'"),
        ((step("plus", {"A": "X"}, {"Q": "Y"}),), HEAD, "the model has no output 'Q'"),
        ((step("add", {"C": "X"}, {"B": "Y"}),), HEAD, "input 'A' of the model is not in input_map"),
        ((step("whole", {"A": "X"}, {"B": "Y"}),), HEAD, "inconsistent data type: FP32 in model 'e' ('X'), INT32"),
        ((step("small", {"A": "X"}, {"B": "Y"}),), HEAD, "max_batch_size 4, but the model allows only 2"),
        ((step("two", {"A": "X"}, {"B": "Y"}),), HEAD.replace("-1", "3"), "inconsistent shape: [3] in model 'e'"),
        ((step("plus", {"A": "X"}, {"B": "Y"}),), HEAD.replace("dims: [ -1 ] }", "dims: [ -1 ] optional: true }", 1),
         "input 'X' of the ensemble is optional, but input 'A' of the model is not"),
        ((step("plus", {"A": "X"}, {"B": "Y"}),),
         HEAD + 'input { name: "U" data_type: TYPE_FP32 dims: [ 1 ] }', "has input 'U' that no step reads"),
    ],
)  # fmt: skip
async def test_graphs_that_do_not_go_together(steps: tuple[str, ...], head: str, message: str):
    error = await refused(runner(World(), ensemble(*steps, head=head)))
    assert error.code is Code.INVALID_ARGUMENT
    assert message in error.message
