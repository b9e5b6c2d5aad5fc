"""How steps are formed, how requests end, and what is told of them."""

from __future__ import annotations

import sys
import time

import pytest

from tritium.errors import Code, TritiumError
from tritium.llm.config import EngineConfig
from tritium.llm.core.blocks import scope
from tritium.llm.core.scheduler import Scheduler, SchedulerConfig
from tritium.llm.types import FinishReason, RowStep, ScheduledBatch, StepOutput

from .fake_loop import SIZE, Loop, prompt, rows
from .fake_runner import alone, request

both_depths = pytest.mark.parametrize("depth", [1, 2])


@both_depths
def test_one_request_from_prompt_to_end(depth: int):
    loop = Loop(depth=depth)
    assert not loop.scheduler.has_work() and loop.schedule() is None
    assert loop.add("a", prompt(5)) is None
    batch = loop.step()
    assert batch is not None and batch.num_tokens == 5 and batch.copies == [] and batch.freed == []
    assert batch.new[0].tokens == prompt(5) and batch.new[0].num_prompt == 5 and batch.new[0].blocks == []
    assert batch.rows == [RowStep(0, 0, 5, [0, 1], True)]
    loop.drain()
    assert loop.output("a") == alone(prompt(5), 4)
    assert loop.last("a").finish is FinishReason.LENGTH and loop.last("a").stop_reason is None
    assert all(len(delta.tokens) == 1 for delta in loop.deltas["a"])


@both_depths
def test_no_step_is_spent_beyond_the_limit(depth: int):
    loop = Loop(depth=depth)
    loop.add("a", prompt(5), 3)
    loop.drain()
    assert loop.scheduler.stats().steps == 3


def test_long_prompts_are_computed_in_chunks_after_the_rows_that_decode():
    loop = Loop()
    loop.add("a", prompt(3), 20)
    loop.step()
    loop.add("b", prompt(36, 100), 2)
    loop.add("c", prompt(6, 200), 2)
    assert rows(loop.step()) == [(0, 3, 1, True), (1, 0, 15, False)]
    assert rows(loop.step()) == [(0, 4, 1, True), (1, 15, 15, False)]
    assert rows(loop.step()) == [(0, 5, 1, True), (1, 30, 6, True), (2, 0, 6, True)]
    loop.drain()
    assert loop.output("b") == alone(prompt(36, 100), 2)


def test_a_full_budget_leaves_later_chunks_for_the_next_step():
    loop = Loop(max_tokens_per_step=8)
    loop.add("a", prompt(20, 100), 1)
    loop.add("b", prompt(20, 200), 1, priority=-1)
    assert rows(loop.step()) == [(0, 0, 8, False)], "b first"
    assert rows(loop.step()) == [(0, 8, 8, False)]
    assert rows(loop.step()) == [(0, 16, 4, True), (1, 0, 4, False)]
    loop.add("c", prompt(20, 300), 1, priority=-2)
    assert rows(loop.step()) == [(1, 4, 8, False)], "a runs already, c must wait for budget"
    loop.drain()


def test_running_chunks_beyond_the_budget_wait():
    loop = Loop(max_tokens_per_step=8)
    loop.add("a", prompt(6, 100), 2)
    loop.add("b", prompt(20, 200), 2)
    assert rows(loop.step()) == [(0, 0, 6, True), (1, 0, 2, False)]
    assert rows(loop.step()) == [(0, 6, 1, True), (1, 2, 7, False)]
    loop.add("c", prompt(20, 300), 2, priority=-1)
    loop.add("d", prompt(20, 400), 2, priority=-1)
    assert rows(loop.step()) == [(1, 9, 8, False)]
    assert rows(loop.step()) == [(1, 17, 3, True), (0, 0, 5, False)]
    loop.add("e", prompt(30, 500), 2, priority=-2)
    assert rows(loop.step()) == [(1, 20, 1, True), (0, 5, 7, False)]
    assert rows(loop.step()) == [(0, 12, 8, True)]
    loop.drain()


def test_rows_are_stable_and_announced_when_freed():
    loop = Loop()
    loop.add("a", prompt(3, 0), 2)
    loop.add("b", prompt(3, 10), 5)
    loop.step()
    loop.step()
    loop.add("c", prompt(3, 20), 2)
    batch = loop.step()
    assert batch is not None and batch.freed == [0] and batch.new[0].row == 0
    assert rows(batch) == [(1, 4, 1, True), (0, 0, 3, True)]
    loop.drain()


def test_order_is_priority_then_arrival():
    loop = Loop(max_rows=1)
    loop.add("late", prompt(3), 1, arrived_ns=9)
    loop.add("early", prompt(3), 1, arrived_ns=5)
    loop.add("low", prompt(3), 1, arrived_ns=0, priority=1)
    loop.add("tie", prompt(3), 1, arrived_ns=9)
    loop.drain()
    assert list(loop.deltas) == ["early", "late", "tie", "low"]


@both_depths
def test_many_at_once_answer_as_if_alone(depth: int):
    loop = Loop(depth=depth)
    prompts = {f"r{i}": prompt(3 + 5 * i, 10 * (i % 3)) for i in range(9)}
    for name, tokens in prompts.items():
        loop.add(name, tokens, 7)
    loop.drain()
    for name, tokens in prompts.items():
        assert loop.output(name) == alone(tokens, 7)


@both_depths
def test_a_stop_token_ends_and_is_part_of_the_answer(depth: int):
    free = alone(prompt(5), 12)
    stop = free[3]
    loop = Loop(depth=depth)
    loop.add("a", prompt(5), 12, stops=(stop,))
    loop.add("b", prompt(5), 12, stops=(stop,), min_tokens=free.index(stop) + 1)
    loop.drain()
    assert loop.output("a") == alone(prompt(5), 12, stops=(stop,))
    assert loop.last("a").finish is FinishReason.STOP and loop.last("a").stop_reason == stop
    assert loop.output("b") == alone(prompt(5), 12, stops=(stop,), min_tokens=free.index(stop) + 1)
    assert len(loop.output("b")) > len(loop.output("a"))
    assert loop.scheduler.stats().output_tokens == len(loop.output("a")) + len(loop.output("b"))


@pytest.mark.parametrize("max_tokens", [None, 1000, 59])
def test_the_context_is_the_limit(max_tokens: int | None):
    loop = Loop()
    loop.add("a", prompt(5), max_tokens)
    loop.drain()
    assert len(loop.output("a")) == 59 and loop.last("a").finish is FinishReason.LENGTH


def test_without_max_tokens_the_blocks_may_be_the_limit():
    loop = Loop(num_blocks=3)
    loop.add("a", prompt(5), None)
    loop.drain()
    assert len(loop.output("a")) == 3 * SIZE + 1 - 5


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "code", "message"),
    [
        ([], 4, Code.INVALID_ARGUMENT, "the prompt has 0 tokens"),
        (prompt(64), 4, Code.INVALID_ARGUMENT, "the prompt has 64 tokens, expected at most 63: the context holds 64"),
        (prompt(5), 0, Code.INVALID_ARGUMENT, "max_tokens is 0, expected at least 1"),
        (prompt(5), 20, Code.RESOURCE_EXHAUSTED, "need 6 KV blocks, the engine has 5"),
        (prompt(40), None, Code.RESOURCE_EXHAUSTED, "40 prompt tokens and 1 output tokens need 10 KV blocks"),
    ],
)
def test_what_can_never_run_is_refused(tokens: list[int], max_tokens: int | None, code: Code, message: str):
    loop = Loop(num_blocks=5)
    delta = loop.add("a", tokens, max_tokens)
    assert delta is not None and delta.id == "a" and delta.finish is FinishReason.ERROR and delta.tokens == []
    assert delta.error is not None and delta.error.code is code and message in delta.error.message
    assert not loop.scheduler.has_work()


def test_what_just_fits_runs():
    loop = Loop(num_blocks=5)
    assert loop.add("a", prompt(5), 16) is None
    loop.drain()
    assert loop.output("a") == alone(prompt(5), 16)


def test_an_id_in_flight_is_refused_and_free_again_after_the_end():
    loop = Loop()
    loop.add("a", prompt(3))
    delta = loop.add("a", prompt(3))
    assert delta is not None and delta.error is not None and delta.error.code is Code.ALREADY_EXISTS
    loop.drain()
    assert loop.add("a", prompt(3)) is None


@both_depths
def test_bad_logits_end_that_request_only(depth: int):
    loop = Loop(depth=depth)
    loop.add("a", prompt(17))
    loop.add("b", prompt(5, 50))
    loop.schedule()
    loop.update()
    assert loop.scheduler.pool.by_hash
    for _ in range(depth):
        loop.schedule()
    loop.update(bad=(0,))
    loop.drain()
    error = loop.last("a").error
    assert loop.last("a").finish is FinishReason.ERROR and error is not None and error.code is Code.INTERNAL
    assert loop.output("a") == [] and loop.output("b") == alone(prompt(5, 50), 4)
    # Nothing that it wrote is used again.
    loop.add("c", prompt(17))
    loop.drain()
    assert loop.last("c").cached_tokens == 0 and loop.output("c") == alone(prompt(17), 4)


def test_deltas_tell_times_shares_and_logprobs():
    loop = Loop()
    loop.now = 500
    loop.add("a", prompt(3), 2, arrived_ns=100, logprobs=0)
    loop.add("b", prompt(3, 20), 4, arrived_ns=200)
    loop.drain()
    a, b = loop.deltas["a"], loop.deltas["b"]
    assert [delta.queue_ns for delta in a + b] == [400] * 2 + [300] * 4
    assert {delta.first_token_ns for delta in a + b} == {1500}
    assert [delta.exec_share for delta in a] == [0.5, 0.5]
    assert b[-1].exec_share == pytest.approx((0.5 + 0.5 + 1 + 1) / 4)
    assert all(delta.logprobs and delta.logprobs[0].token == delta.tokens[0] for delta in a)
    assert all(delta.logprobs is None for delta in b)


def test_stats():
    loop = Loop()
    loop.add("a", prompt(5), 3)
    loop.add("b", prompt(5, 20), 3)
    before = loop.scheduler.stats()
    assert (before.running, before.waiting, before.blocks_used, before.blocks_total) == (0, 2, 0, 32)
    loop.step()
    during = loop.scheduler.stats()
    assert (during.running, during.waiting, during.blocks_used) == (2, 0, 4)
    loop.drain()
    after = loop.scheduler.stats()
    assert (after.steps, after.step_tokens, after.step_ns) == (3, 14, 3000)
    assert (after.prompt_tokens, after.output_tokens, after.blocks_used) == (10, 6, 0)
    assert before.steps == 0, "a snapshot stays what it was"


def test_updates_come_in_order():
    loop = Loop(depth=2)
    output = StepOutput(1, [[1]], [None], [], 0)
    with pytest.raises(TritiumError, match="expected step None"):
        loop.scheduler.update(ScheduledBatch(1, [], [], [], []), output, 0)
    loop.add("a", prompt(3))
    loop.schedule()
    second = loop.schedule()
    assert second is not None
    with pytest.raises(TritiumError, match="step 2 with output 1 came back, expected step 1"):
        loop.scheduler.update(second, output, 0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_size", 0, "block_size is 0, expected at least 1"),
        ("max_rows", 0, "max_rows is 0, expected at least 1"),
        ("max_length", 1, "max_length is 1, expected at least 2"),
        ("max_waiting", -1, "max_waiting is -1, expected at least 0"),
        ("max_tokens_per_step", 3, "max_tokens_per_step is 3, expected at least max_rows, which is 4"),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: int, message: str):
    with pytest.raises(TritiumError, match=message) as caught:
        Loop(**{name: value})
    assert caught.value.param == name


def test_settings_come_from_the_engine():
    engine = EngineConfig(model="m", max_rows=8, queue_delay_us=7, preferred_rows=(2, 4), prefix_cache=False)
    config = SchedulerConfig.of(engine, 99)
    assert (config.max_rows, config.max_length, config.queue_delay_us) == (8, 99, 7)
    assert config.preferred_rows == (2, 4) and not config.prefix_cache


def test_hash_keys_are_secret_by_default():
    config = SchedulerConfig(block_size=4, max_rows=1, max_tokens_per_step=8, max_length=16)
    found: set[bytes] = set()
    for _ in range(2):
        hashes: list[bytes] = []
        Scheduler(config, 4).pool.extend_hashes(hashes, prompt(4), scope(""))
        found.update(hashes)
    assert len(found) == 2


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer (coverage) costs more than the scheduler")
def test_a_step_of_many_rows_is_cheap():
    num_rows = 256
    config = SchedulerConfig(block_size=16, max_rows=num_rows, max_tokens_per_step=8192, max_length=512)
    scheduler = Scheduler(config, num_rows * 32)
    for i in range(num_rows):
        scheduler.add(request(str(i), prompt(20, i), 400), 0)
    best = 1.0
    for _ in range(40):
        begun = time.perf_counter()
        batch = scheduler.schedule(0)
        spent = time.perf_counter() - begun
        assert batch is not None and len(batch.rows) == num_rows
        output = StepOutput(batch.step, [[1]] * num_rows, [None] * num_rows, [], 0)
        begun = time.perf_counter()
        scheduler.update(batch, output, 0)
        best = min(best, spent + time.perf_counter() - begun)
    assert best < 0.004, f"{best * 1e3:.2f} ms"
