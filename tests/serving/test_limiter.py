from __future__ import annotations

import random

import pytest

from tritium.backends.config import Resource
from tritium.errors import TritiumError
from tritium.serving.limiter import EVERY_DEVICE, Allowance, RateLimiter, parse_rate_limit


def nothing() -> None:
    pass


def test_without_limits_everything_runs():
    limiter = RateLimiter()
    members = [limiter.register("m", [Resource("slot", 1)], 1, nothing) for _ in range(3)]
    assert all(member.acquire() for member in members)


def test_a_resource_is_as_large_as_the_largest_need_unless_given():
    limiter = RateLimiter(enabled=True)
    small = [limiter.register("m", [Resource("slot", 1)], 1, nothing) for _ in range(3)]
    limiter.register("big", [Resource("slot", 2)], 1, nothing)
    assert [member.acquire() for member in small] == [True, True, False]


def test_devices_have_their_own_resources_and_share_what_is_shared():
    limiter = RateLimiter(enabled=True, resources={("slot", EVERY_DEVICE): 1})
    own = [limiter.register("m", [Resource("slot", 1)], 1, nothing, device) for device in (0, 1)]
    assert [member.acquire() for member in own] == [True, True]
    limiter = RateLimiter(enabled=True, resources={("slot", EVERY_DEVICE): 1})
    shared = [limiter.register("m", [Resource("slot", 1, shared=True)], 1, nothing, device) for device in (0, 1)]
    assert [member.acquire() for member in shared] == [True, False]


def test_more_than_there_is_cannot_be_had():
    limiter = RateLimiter(enabled=True, resources={("slot", 0): 1})
    with pytest.raises(TritiumError, match='Resource count for "slot" is limited to 1'):
        limiter.register("m", [Resource("slot", 2)], 1, nothing)


def test_a_waiting_instance_whose_work_is_gone_holds_nobody_up():
    limiter = RateLimiter(enabled=True, resources={("slot", EVERY_DEVICE): 1})
    first, second, third = (limiter.register("m", [Resource("slot", 1)], 1, nothing) for _ in range(3))
    assert first.acquire()
    assert not second.acquire()
    first.release()
    assert third.acquire()
    third.release()
    third.close()
    second.close()
    assert first.acquire()


@pytest.mark.parametrize("seed", range(5))
def test_limits_hold_nobody_starves_and_turns_follow_priorities(seed: int):
    choose = random.Random(seed)
    limiter = RateLimiter(enabled=True, resources={("slot", EVERY_DEVICE): 3})
    running: list[Allowance] = []
    members: list[Allowance] = []

    def add(need: int, priority: int) -> None:
        def wake() -> None:
            if member.acquire():
                running.append(member)

        member = limiter.register("m", [Resource("slot", need)], priority, wake)
        members.append(member)

    for need, priority in ((1, 1), (1, 1), (3, 1), (2, 2), (1, 4)):
        add(need, priority)
    for _ in range(3000):
        for member in members:
            if member not in running:
                member.wake()
        assert sum(m.needs["slot", 0] for m in running) <= 3
        assert running, "nobody runs although everybody wants to"
        done = running.pop(choose.randrange(len(running)))
        done.release()
    turns = [member.executions * member.priority for member in members]
    assert max(turns) - min(turns) <= 8


def test_the_options():
    limiter = parse_rate_limit("execution_count", ["slot:1", "gpu:2:1"])
    one = limiter.register("m", [Resource("slot", 1)], 1, nothing)
    assert one.acquire()
    assert not limiter.register("m", [Resource("slot", 1)], 1, nothing).acquire()
    assert parse_rate_limit("off", ["slot:1"]).register("m", [Resource("slot", 5)], 1, nothing).acquire()
    for text in ("slot", ":1", "slot:x", "slot:1:2:3", "slot:-1"):
        with pytest.raises(TritiumError, match="expected NAME:COUNT or NAME:COUNT:DEVICE"):
            parse_rate_limit("off", [text])
