"""Prefixes: found again, never across salts, computed once."""

from __future__ import annotations

import pytest

from .fake_loop import Loop, prompt, rows
from .fake_runner import alone

both_depths = pytest.mark.parametrize("depth", [1, 2])


@both_depths
def test_a_known_prefix_is_not_computed_again(depth: int):
    loop = Loop(depth=depth)
    loop.add("a", prompt(10), 4)
    loop.drain()
    # Output is found too: ten prompt and three output tokens have run, that is three full blocks.
    longer = prompt(10) + loop.output("a") + [40]
    loop.add("b", longer, 4)
    batch = loop.step()
    assert rows(batch) == [(0, 12, 3, True)] and batch is not None and len(batch.new[0].blocks) == 3
    loop.drain()
    assert loop.output("b") == alone(longer, 4)
    assert {delta.cached_tokens for delta in loop.deltas["b"]} == {12}
    stats = loop.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (25, 12, 25)


def test_salts_do_not_share():
    loop = Loop()
    loop.add("a", prompt(10), salt="one", model=1)
    loop.drain()
    loop.add("b", prompt(10), salt="two", model=2)
    loop.add("c", prompt(10), salt="one", model=1)
    loop.drain()
    assert loop.last("b").cached_tokens == 0 and loop.last("c").cached_tokens == 8
    assert loop.output("b") == alone(prompt(10), 4, model=2)


def test_without_prefix_cache_nothing_is_shared_or_counted():
    loop = Loop(prefix_cache=False)
    for name in "ab":
        loop.add(name, prompt(10))
        loop.drain()
        assert loop.last(name).cached_tokens == 0
    loop.add("c", prompt(10))
    loop.add("d", prompt(10))
    loop.drain()
    stats = loop.scheduler.stats()
    assert stats.prefix_queries == stats.prefix_hits == 0
    assert not loop.scheduler.pool.by_hash


@both_depths
def test_a_prefix_shared_in_one_batch_is_computed_once(depth: int):
    loop = Loop(depth=depth)
    shared = prompt(24)
    for i in range(3):
        loop.add(f"r{i}", [*shared, 60 + i], 3)
    loop.add("other", prompt(6, 90), 3)
    # The others stand aside for the first, and not in the way of the last.
    first = loop.schedule()
    assert rows(first) == [(0, 0, 16, False)]
    loop.update()
    second = loop.schedule()
    assert rows(second) == [(0, 16, 9, True), (1, 0, 6, True)]
    assert loop.scheduler.stats().waiting == 2
    loop.update()
    third = loop.schedule()
    assert rows(third)[2:] == [(2, 24, 1, True), (3, 24, 1, True)]
    loop.drain()
    for i in range(3):
        assert loop.output(f"r{i}") == alone([*shared, 60 + i], 3)
    assert [loop.last(f"r{i}").cached_tokens for i in range(3)] == [0, 24, 24]


@pytest.mark.parametrize("how", ["abort", "bad", "abort in flight"])
def test_who_waits_for_a_prefix_goes_on_when_it_will_not_come(how: str):
    loop = Loop(max_tokens_per_step=40)
    loop.add("a", prompt(25))
    loop.add("b", prompt(26))
    loop.schedule()
    assert loop.scheduler.stats().running == 1
    if how == "abort in flight":
        loop.scheduler.abort("a")
    loop.update(bad=(0,) if how == "bad" else ())
    if how == "abort":
        loop.scheduler.abort("a")
    loop.drain()
    assert loop.output("b") == alone(prompt(26), 4)


def test_parked_requests_can_be_aborted_and_expire():
    loop = Loop(depth=2, max_tokens_per_step=40)
    loop.add("a", prompt(30))
    loop.add("b", prompt(31))
    loop.add("c", prompt(32), deadline_ns=500)
    loop.add("d", prompt(33))
    loop.schedule()
    assert loop.scheduler.stats().waiting == 3
    assert loop.scheduler.abort("b")
    loop.now = 500
    loop.schedule()
    assert loop.last("c").error is not None
    assert loop.scheduler.abort("d")
    loop.update()
    loop.drain()
    assert loop.output("a") == alone(prompt(30), 4)


def test_a_higher_priority_too_lets_a_running_prefix_finish():
    loop = Loop()
    loop.add("low", prompt(30), priority=1)
    loop.step()
    loop.add("high", prompt(31), priority=0)
    assert rows(loop.step()) == [(0, 16, 14, True)]
    assert rows(loop.step()) == [(0, 30, 1, True), (1, 28, 3, True)]
    loop.drain()
    assert loop.output("high") == alone(prompt(31), 4) and loop.output("low") == alone(prompt(30), 4)


def test_one_step_looks_at_no_more_waiting_requests_than_rows():
    loop = Loop(max_rows=2)
    for i in range(5):
        loop.add(f"r{i}", [*prompt(20), 50 + i], 2)
    loop.add("other", prompt(3, 90), 2)
    assert rows(loop.step()) == [(0, 0, 16, False)]
    loop.drain()
    assert loop.scheduler.stats().prefix_hits == 4 * 20
    assert {len(loop.output(f"r{i}")) for i in range(5)} == {2}
