"""What happens when blocks run out, and when clients leave."""

from __future__ import annotations

import pytest

from tritium.llm.types import FinishReason

from .fake_loop import Loop, prompt
from .fake_runner import alone

both_depths = pytest.mark.parametrize("depth", [1, 2])


@both_depths
def test_when_blocks_run_out_the_latest_gives_way_and_comes_back(depth: int):
    loop = Loop(num_blocks=8, depth=depth)
    names = {"a": prompt(4, 0), "b": prompt(4, 20), "c": prompt(4, 40)}
    for name, tokens in names.items():
        loop.add(name, tokens, 20)
        loop.now += 1
    loop.drain()
    for name, tokens in names.items():
        assert loop.output(name) == alone(tokens, 20)
    assert loop.last("a").preemptions == 0
    assert loop.last("c").preemptions > 0
    assert loop.scheduler.stats().preemptions == sum(loop.last(name).preemptions for name in names)


def test_a_preempted_sequence_keeps_its_place_its_output_and_what_the_cache_holds():
    loop = Loop(num_blocks=6, max_length=24)
    loop.add("a", prompt(7, 0), 9)
    loop.add("b", prompt(7, 20), 9, arrived_ns=1)
    loop.step()
    loop.add("c", prompt(3, 40), 2, arrived_ns=0)
    while not loop.scheduler.stats().preemptions:
        loop.step()
    written = loop.output("b")
    assert written and loop.scheduler.stats().waiting == 2
    while (batch := loop.step()) is None or not batch.new:
        pass
    new = batch.new[0]
    assert new.tokens == prompt(7, 20) + written, "b comes before c, which arrived earlier"
    assert new.num_prompt == 7 and len(new.blocks) > 0
    hits = loop.scheduler.stats().prefix_hits
    loop.drain()
    assert loop.output("b") == alone(prompt(7, 20), 9) and loop.output("c") == alone(prompt(3, 40), 2)
    assert loop.last("b").cached_tokens == 0 and loop.last("b").preemptions == 1 and hits == 0


def test_the_lowest_priority_gives_way_even_when_it_is_the_one_that_needs_a_block():
    loop = Loop(num_blocks=5, max_length=16)
    loop.add("low", prompt(4, 0), 12, priority=5)
    loop.step()
    loop.add("high", prompt(5, 20), 8)
    loop.drain()
    assert loop.last("high").preemptions == 0 and loop.last("low").preemptions > 0
    assert loop.output("low") == alone(prompt(4, 0), 12)


def test_a_waiting_request_leaves_room_for_those_that_grow():
    loop = Loop(num_blocks=4)
    loop.add("a", prompt(5), 9)
    loop.add("b", prompt(5, 20), 2)
    loop.step()
    assert loop.scheduler.stats().running == 1, "b would take the block that a needs next"
    loop = Loop(num_blocks=4)
    loop.add("a", prompt(5), 2)
    loop.add("b", prompt(5, 20), 2)
    loop.step()
    assert loop.scheduler.stats().running == 2, "a needs no further block"


def test_nobody_is_preempted_for_blocks_that_a_finished_sequence_still_holds():
    loop = Loop(num_blocks=4, depth=2, max_length=16)
    loop.add("a", prompt(3, 0), 12)
    loop.add("b", prompt(7, 20), 2)
    loop.schedule()
    assert loop.scheduler.stats().running == 2
    loop.schedule()
    # a grows into the fourth block in the second step; b is at its limit and holds two until then.
    loop.schedule()
    loop.drain()
    assert loop.scheduler.stats().preemptions == 0


def test_a_preempted_sequence_may_end_with_its_step_in_flight():
    free = alone(prompt(4, 20), 30)
    found = False
    for count in range(1, 12):
        stop = free[count]
        loop = Loop(num_blocks=6, depth=2, max_length=24)
        loop.add("a", prompt(4, 0), 20)
        loop.add("b", prompt(4, 20), 20, stops=(stop,), min_tokens=count)
        loop.drain()
        assert loop.output("b") == alone(prompt(4, 20), 20, stops=(stop,), min_tokens=count)
        found |= loop.last("b").preemptions > 0 and loop.scheduler.stats().preemptions == 1
    assert found


@pytest.mark.parametrize("when", ["in flight", "waiting"])
def test_abort_of_a_preempted_sequence(when: str):
    loop = Loop(num_blocks=6, depth=2, max_length=24)
    loop.add("a", prompt(4, 0), 20)
    loop.add("b", prompt(4, 20), 20)
    while not loop.scheduler.stats().preemptions:
        if len(loop.flights) == 2:
            loop.update()
        loop.schedule()
    assert loop.flights
    if when == "waiting":
        while loop.flights:
            loop.update()
    assert loop.scheduler.abort("b")
    loop.drain()
    assert loop.last("b").finish is FinishReason.ABORT and loop.output("a") == alone(prompt(4, 0), 20)


def test_abort_while_waiting():
    loop = Loop(max_rows=1)
    loop.add("a", prompt(3))
    loop.add("b", prompt(3))
    loop.step()
    assert loop.scheduler.abort("b") and not loop.scheduler.abort("b") and not loop.scheduler.abort("x")
    loop.drain()
    assert loop.last("b").finish is FinishReason.ABORT and loop.last("b").error is None
    assert loop.output("a") == alone(prompt(3), 4)


def test_abort_between_steps_frees_at_once():
    loop = Loop()
    loop.add("a", prompt(30))
    loop.step()
    assert loop.scheduler.abort("a")
    assert loop.scheduler.pool.num_free == 32 and not loop.scheduler.has_work()
    assert loop.schedule() is None
    loop.add("b", prompt(3))
    batch = loop.step()
    assert batch is not None and batch.freed == [0] and batch.new[0].row == 0
    assert loop.last("a").finish is FinishReason.ABORT


@both_depths
def test_abort_in_flight_keeps_blocks_and_row_until_the_update(depth: int):
    loop = Loop(num_blocks=4, depth=depth, max_rows=1)
    loop.add("a", prompt(13), 3)
    for _ in range(depth):
        loop.schedule()
    assert loop.scheduler.abort("a")
    loop.add("a", prompt(13, 50), 3)
    assert loop.scheduler.has_work() and loop.scheduler.pool.num_free == 0
    for _ in range(depth):
        assert loop.schedule() is None
        assert loop.update() == []
    assert loop.scheduler.pool.num_free == 4
    loop.drain()
    assert [token for delta in loop.deltas["a"][1:] for token in delta.tokens] == alone(prompt(13, 50), 3)


def test_a_sequence_found_finished_is_ignored_in_the_step_that_has_it_already():
    tokens = alone(prompt(5), 4)
    loop = Loop(depth=2)
    loop.add("a", prompt(5), 30, stops=(tokens[0],))
    loop.schedule()
    loop.schedule()
    assert loop.update()[0].finish is FinishReason.STOP
    assert loop.scheduler.pool.num_free < 32 and loop.scheduler.has_work()
    assert loop.schedule() is None
    assert loop.update() == []
    assert loop.scheduler.pool.num_free == 32 and not loop.scheduler.has_work()
