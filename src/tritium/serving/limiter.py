"""RateLimiter: how many executions may run at the same time over all models, by named resources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tritium.backends.config import Resource
from tritium.errors import invalid

# Stands for all devices in what an operator gave, and for a resource that is shared by all of them.
EVERY_DEVICE = -1
_Key = tuple[str, int]


class Allowance:
    """The right of one instance to execute; made by ``RateLimiter.register``.

    Attributes:
        executions: how often it was acquired; with ``priority`` it decides who comes next.
    """

    def __init__(
        self, limiter: RateLimiter, needs: Mapping[_Key, int], priority: int, wake: Callable[[], None]
    ) -> None:
        self.needs = needs
        self.priority = max(1, priority)
        self.wake = wake
        self.executions = 0
        self._limiter = limiter

    @property
    def turn(self) -> int:
        """The lower, the sooner it is served."""
        return self.executions * self.priority

    def acquire(self) -> bool:
        """Takes what an execution needs; otherwise False, and ``wake`` is called when it is worth asking again."""
        return self._limiter.acquire(self)

    def release(self) -> None:
        """Gives it back at the end of the execution."""
        self._limiter.release(self)

    def close(self) -> None:
        """The instance is gone; it must have released before."""
        self._limiter.forget(self)


class RateLimiter:
    """Resources and who holds them. Without any limit (``enabled`` false) every execution may run at once.

    Args:
        enabled: whether ``--rate-limit=execution_count`` was given.
        resources: units by name and device (``EVERY_DEVICE`` for all); names that are not here have as many
            units as the instance that needs most.
    """

    def __init__(self, enabled: bool = False, resources: Mapping[_Key, int] | None = None) -> None:
        self._enabled = enabled
        self._given = dict(resources or {})
        self._held: Counter[_Key] = Counter()
        self._members: list[Allowance] = []
        self._waiting: list[Allowance] = []
        self._offered: Allowance | None = None

    def register(
        self,
        instance: str,
        resources: Sequence[Resource],
        priority: int,
        wake: Callable[[], None],
        device: int = 0,
    ) -> Allowance:
        """A new instance.

        Args:
            instance: its name, for the error.
            wake: called, with nothing acquired yet, when it waits and its turn may have come.

        Raises:
            TritiumError: INVALID_ARGUMENT when it needs more of a resource than there is.
        """
        member = Allowance(self, self.needs(instance, resources, device), priority, wake)
        self._members.append(member)
        return member

    def needs(self, instance: str, resources: Sequence[Resource], device: int = 0) -> Counter[_Key]:
        """What an instance would hold while it executes.

        Raises:
            TritiumError: as ``register``.
        """
        needs: Counter[_Key] = Counter()
        if self._enabled:
            for resource in resources:
                needs[resource.name, EVERY_DEVICE if resource.shared else device] += resource.count
        for (name, where), count in needs.items():
            limit = self._given_limit(name, where)
            if limit is not None and count > limit:
                raise invalid(
                    f'Resource count for "{name}" is limited to {limit} which will prevent scheduling of '
                    f"'{instance}', the minimum required count is {count}",
                    param="rate_limiter",
                )
        return needs

    def acquire(self, member: Allowance) -> bool:
        """See ``Allowance.acquire``."""
        if member.needs:
            if member is not self._offered:
                self._offer(member)
            # Who has waited for its turn is not overtaken, or an instance with large needs would starve.
            ahead = member is not self._offered and any(m.turn <= member.turn for m in self._waiting if m is not member)
            if ahead or not self._free(member):
                if member not in self._waiting:
                    self._waiting.append(member)
                return False
            if member in self._waiting:
                self._waiting.remove(member)
        member.executions += 1
        self._held.update(member.needs)
        return True

    def release(self, member: Allowance) -> None:
        """See ``Allowance.release``."""
        self._held.subtract(member.needs)
        if member.needs:
            self._offer()

    def forget(self, member: Allowance) -> None:
        """See ``Allowance.close``."""
        if member in self._members:
            self._members.remove(member)
        if member in self._waiting:
            self._waiting.remove(member)
        self._offer()

    def _offer(self, until: Allowance | None = None) -> None:
        """Offers what is free to those that wait, in turn, down to ``until``; ends at the first that must wait on.

        Who has no work any more declines by not acquiring.
        """
        while self._waiting:
            first = min(self._waiting, key=_turn)
            if (until is not None and (first is until or first.turn > until.turn)) or not self._free(first):
                return
            self._waiting.remove(first)
            before, self._offered = self._offered, first
            try:
                first.wake()
            finally:
                self._offered = before
            if first in self._waiting:
                return

    def _free(self, member: Allowance) -> bool:
        return all(self._held[key] + count <= self._limit(key) for key, count in member.needs.items())

    def _limit(self, key: _Key) -> int:
        given = self._given_limit(*key)
        return given if given is not None else max(member.needs.get(key, 0) for member in self._members)

    def _given_limit(self, name: str, device: int) -> int | None:
        found = self._given.get((name, device))
        return found if found is not None else self._given.get((name, EVERY_DEVICE))


def _turn(member: Allowance) -> int:
    return member.turn


def parse_rate_limit(mode: str, resources: Sequence[str]) -> RateLimiter:
    """The limiter that ``--rate-limit`` and ``--rate-limit-resource`` ask for.

    Args:
        mode: "execution_count", or "off".
        resources: each ``NAME:COUNT[:DEVICE]``.

    Raises:
        TritiumError: INVALID_ARGUMENT quoting a resource that cannot be read.
    """
    given: dict[_Key, int] = {}
    for text in resources:
        parts = text.split(":")
        numbers = parts[1:]
        if not parts[0] or not 1 <= len(numbers) <= 2 or not all(n.isascii() and n.isdecimal() for n in numbers):
            raise invalid(
                f"--rate-limit-resource is '{text}', expected NAME:COUNT or NAME:COUNT:DEVICE",
                param="rate_limit_resource",
            )
        given[parts[0], int(numbers[1]) if len(numbers) == 2 else EVERY_DEVICE] = int(numbers[0])
    return RateLimiter(mode == "execution_count", given)
