from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.executors import request
from tritium.backends.base import Timing
from tritium.backends.config import QueuePolicy
from tritium.errors import Code, TritiumError
from tritium.serving.queue import BatchRule, Job, Order, Phase, Queue
from tritium.types import InferResponse


def job(rows: int = 1, level: int = 0, shape: object = (), timeout_us: int = 0, queued_ns: int = 0) -> Job:
    one = Job(request(timeout_us=timeout_us), Timing(), rows, shape, level)  # type: ignore[arg-type]
    one.queued_ns = queued_ns
    return one


def test_levels_are_served_by_priority_and_each_in_order_of_arrival():
    queue = Queue(levels=3)
    jobs = [job(level=level) for level in (3, 1, 2, 1, 3)]
    for one in jobs:
        queue.push(one, 0)
    assert list(queue) == [jobs[1], jobs[3], jobs[2], jobs[0], jobs[4]]
    assert len(queue) == 5


def test_a_full_level_refuses_and_others_do_not():
    queue = Queue(2, QueuePolicy(max_size=2), {2: QueuePolicy(max_size=1)})
    queue.push(job(level=1), 0)
    queue.push(job(level=1), 0)
    queue.push(job(level=2), 0)
    for level in (1, 2):
        with pytest.raises(TritiumError) as caught:
            queue.push(job(level=level), 0)
        assert caught.value.code is Code.UNAVAILABLE
        assert caught.value.message == "[request id: <id_unknown>] Exceeds maximum queue size"
    assert len(queue) == 3


def test_reject_ends_jobs_whose_wait_is_over():
    queue = Queue(policy=QueuePolicy(timeout_us=10, allow_override=True))
    long, short, longer = job(), job(timeout_us=5), job(timeout_us=50)
    for one in (long, short, longer):
        queue.push(one, 0)
    assert queue.next_expiry() == 5_000
    assert queue.expire(4_999) == []
    assert queue.expire(5_000) == [short]
    # A longer wait than the policy's cannot be asked for.
    assert queue.expire(10_000) == [long, longer]
    assert len(queue) == 0
    assert queue.next_expiry() is None


def test_delay_puts_late_jobs_behind_those_in_time_and_never_ends_them():
    queue = Queue(policy=QueuePolicy(timeout_us=10, delay=True))
    late, fresh = job(), job()
    queue.push(late, 0)
    queue.push(fresh, 9_000)
    assert queue.expire(10_000) == []
    assert list(queue) == [fresh, late]
    queue.remove(late)
    assert list(queue) == [fresh]


def test_jobs_that_run_or_are_gone_do_not_expire():
    queue = Queue(policy=QueuePolicy(timeout_us=10))
    running, gone, taken = job(), job(), job()
    for one in (running, gone, taken):
        queue.push(one, 0)
    running.phase, gone.gone = Phase.RUNNING, True
    queue.remove(taken)
    queue.remove(taken)
    assert queue.expire(20_000) == []


def test_a_job_that_is_put_back_is_the_next_of_its_level():
    queue = Queue()
    first, second = job(), job()
    queue.push(first, 0)
    queue.push(second, 0)
    queue.remove(first)
    queue.put_back(first)
    assert list(queue) == [first, second]


@pytest.mark.parametrize(
    ("rows", "preferred", "delay_ns", "expected"),
    [
        ([1, 1, 1], (), 0, 3),
        ([1, 1, 1, 1, 1, 1], (4,), 0, 4),
        ([1, 1, 1], (4,), 0, 3),
        ([1, 1, 1], (4,), 100, 0),
        ([1, 1, 1, 1], (2, 4), 100, 4),
        ([1, 1, 1], (2, 4), 100, 2),
        ([3, 3, 3], (8,), 100, 2),
        ([8], (4,), 100, 1),
        ([6], (4,), 100, 1),
        ([5, 8], (8,), 100, 1),
    ],
)
def test_when_a_batch_is_made(rows: list[int], preferred: tuple[int, ...], delay_ns: int, expected: int):
    jobs = [job(n) for n in rows]
    chosen, due_ns = BatchRule(8, frozenset(preferred), delay_ns).choose(jobs, 0)
    assert chosen == jobs[:expected]
    assert due_ns == (0 if expected else delay_ns)


def test_the_delay_counts_from_the_oldest_job():
    rule = BatchRule(8, frozenset({8}), 100)
    jobs = [job(queued_ns=50), job(queued_ns=90)]
    assert rule.choose(jobs, 149) == ([], 150)
    assert rule.choose(jobs, 150) == (jobs, 0)


def test_another_shape_ends_a_batch_at_once():
    jobs = [job(shape=1), job(shape=1), job(shape=2)]
    assert BatchRule(8, frozenset({8}), 100).choose(jobs, 0) == (jobs[:2], 0)


def test_without_a_batcher_each_job_is_a_batch():
    jobs = [job(5), job(1)]
    assert BatchRule(0).choose(jobs, 0) == (jobs[:1], 0)
    assert BatchRule(0).choose([], 0) == ([], 0)


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2)), max_size=30),
    st.frozensets(st.integers(1, 8), max_size=3),
    st.integers(0, 3),
)
def test_batches_are_runs_from_the_front_and_never_too_large(
    given_jobs: list[tuple[int, int]], preferred: frozenset[int], delay_ns: int
):
    left = [job(rows, shape=shape) for rows, shape in given_jobs]
    rule = BatchRule(8, preferred, delay_ns)
    now_ns = 0
    while left:
        chosen, due_ns = rule.choose(left, now_ns)
        if not chosen:
            # Never to wait for ever, and never beyond the delay.
            assert now_ns < due_ns <= delay_ns
            now_ns = due_ns
            continue
        assert chosen == left[: len(chosen)]
        assert sum(one.rows for one in chosen) <= 8
        assert len({one.shape for one in chosen}) == 1
        left = left[len(chosen) :]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.randoms(use_true_random=False))
async def test_order_gives_answers_in_the_order_of_requests(counts: list[int], random: object):
    order, given_back = Order(promised=True), []
    jobs = [job() for _ in counts]
    for one in jobs:
        order.add(one)
    events = [(i, n == count) for i, count in enumerate(counts) for n in range(count + 1)]
    pending = {i: [e for e in events if e[0] == i] for i in range(len(counts))}
    while pending:
        index = random.choice(list(pending))  # type: ignore[attr-defined]
        _, final = pending[index].pop(0)
        order.give(jobs[index], InferResponse("", "", "", final=final))
        if final:
            del pending[index]
        ended = [one.phase is Phase.ENDED for one in jobs]
        assert ended == sorted(ended, reverse=True)
    for one in jobs:
        given_back.append([answer.final async for answer in one.answers(lambda _: None)])
    assert [len(x) for x in given_back] == [count + 1 for count in counts]
    assert all(x[-1] and not any(x[:-1]) for x in given_back)


async def test_a_dropped_job_holds_nobody_up():
    order = Order(promised=True)
    first, second = job(), job()
    order.add(first)
    order.add(second)
    order.give(second, InferResponse("", "", ""))
    assert second.phase is Phase.WAITING
    order.drop(first, TritiumError(Code.UNAVAILABLE, "late"))
    assert (first.phase, second.phase) == (Phase.ENDED, Phase.ENDED)
    order.give(second, InferResponse("", "", ""))


async def test_a_job_ends_once_and_says_when_nobody_waits_any_more():
    one, left = job(), []
    one.give(InferResponse("", "", "", final=False))
    answers = one.answers(left.append)
    assert (await anext(answers)).final is False
    waiting = asyncio.create_task(anext(answers))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert left == [one]
    assert one.gone
    one.give(TritiumError(Code.INTERNAL, "x"))
    one.give(InferResponse("", "", ""))
    assert one.phase is Phase.ENDED
