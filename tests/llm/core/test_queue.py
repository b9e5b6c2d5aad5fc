"""Waiting: limits, deadlines, and collecting arrivals."""

from __future__ import annotations

import pytest

from tritium.errors import Code
from tritium.llm.types import FinishReason

from .fake_loop import Loop, prompt, rows
from .fake_runner import alone

both_depths = pytest.mark.parametrize("depth", [1, 2])


def test_a_full_queue_refuses_and_says_when_to_come_back():
    loop = Loop(max_rows=2, max_waiting=1)
    for name in "abc":
        assert loop.add(name, prompt(3, ord(name))) is None
    delta = loop.add("d", prompt(3))
    assert delta is not None and delta.error is not None
    assert delta.error.code is Code.UNAVAILABLE and delta.error.message == "Exceeds maximum queue size"
    assert delta.error.retry_after_s == 1.0
    loop.step()
    assert loop.add("d", prompt(3)) is not None, "c waits, both rows run"
    loop.drain()
    for name in "abc":
        loop.add(name, prompt(3))
    delta = loop.add("d", prompt(3))
    assert delta is not None and delta.error is not None
    # Four steps of 1000 ns is what a request takes here, and two run at a time.
    assert delta.error.retry_after_s == pytest.approx(2e-6)
    loop.drain()


@pytest.mark.parametrize(("timeout_us", "deadline_ns"), [(2, None), (0, 2000), (9, 2000), (2, 9000)])
def test_a_waiting_request_expires(timeout_us: int, deadline_ns: int | None):
    loop = Loop(max_rows=1, queue_timeout_us=timeout_us)
    loop.add("a", prompt(3), 9)
    loop.step()
    loop.add("b", prompt(3), arrived_ns=0, deadline_ns=deadline_ns)
    loop.now = 1999
    loop.schedule()
    assert "b" not in loop.deltas
    loop.now = 2000
    loop.schedule()
    delta = loop.last("b")
    assert delta.finish is FinishReason.ERROR and delta.error is not None and delta.queue_ns == 2000
    assert delta.error.code is Code.UNAVAILABLE and delta.error.message == "Request timeout expired"
    loop.update()
    loop.drain()
    assert loop.output("a") == alone(prompt(3), 9)


def test_what_ran_once_expires_no_more():
    loop = Loop(num_blocks=6, max_length=24, queue_timeout_us=1)
    loop.add("a", prompt(4, 0), 20)
    loop.add("b", prompt(4, 20), 20)
    loop.drain()
    assert loop.last("b").preemptions > 0 and loop.output("b") == alone(prompt(4, 20), 20)


def test_deadlines_of_those_that_left_do_not_add_up():
    loop = Loop(queue_timeout_us=10**6)
    for i in range(300):
        loop.add(str(i), prompt(3), 1)
        loop.scheduler.abort(str(i))
    assert len(loop.scheduler._queue._deadlines) < 80  # pyright: ignore[reportPrivateUsage]


def test_an_idle_engine_collects_arrivals():
    loop = Loop(queue_delay_us=10)
    assert loop.scheduler.ready_at(0) is None
    loop.add("a", prompt(3), 3)
    assert loop.scheduler.ready_at(0) == 10_000 and loop.schedule() is None and loop.scheduler.has_work()
    loop.now = 4000
    loop.add("b", prompt(3, 20), 3)
    assert loop.scheduler.ready_at(4000) == 10_000 and loop.schedule() is None
    loop.now = 10_000
    assert loop.scheduler.ready_at(loop.now) is None
    assert len(rows(loop.step())) == 2
    # A busy engine never waits.
    loop.add("c", prompt(3, 40), 3)
    assert loop.scheduler.ready_at(loop.now) is None and len(rows(loop.step())) == 3
    loop.drain()
    loop.add("d", prompt(3), 3)
    assert loop.scheduler.ready_at(loop.now) == loop.now + 10_000


@pytest.mark.parametrize(("preferred", "enough"), [((3,), 3), ((), 4), ((9,), 4)])
def test_enough_waiting_requests_end_the_collecting(preferred: tuple[int, ...], enough: int):
    loop = Loop(queue_delay_us=10, preferred_rows=preferred)
    for i in range(enough):
        assert loop.schedule() is None
        loop.add(str(i), prompt(3, 10 * i))
    assert loop.scheduler.ready_at(0) is None
    assert len(rows(loop.step())) == enough


def test_collecting_starts_anew_when_everybody_left():
    loop = Loop(queue_delay_us=10)
    loop.add("a", prompt(3))
    loop.add("b", prompt(3))
    loop.scheduler.abort("a")
    assert loop.scheduler.ready_at(0) == 10_000
    loop.scheduler.abort("b")
    assert loop.scheduler.ready_at(0) is None
    loop.now = 5000
    loop.add("c", prompt(3))
    assert loop.scheduler.ready_at(loop.now) == 15_000


def test_deadlines_hold_while_collecting():
    loop = Loop(queue_delay_us=10, queue_timeout_us=4)
    loop.add("a", prompt(3))
    assert loop.scheduler.ready_at(0) == 4000
    loop.now = 4000
    assert loop.schedule() is None
    assert loop.last("a").error is not None and not loop.scheduler.has_work()
