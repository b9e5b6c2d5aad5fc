"""Stop strings in a stream of text: nothing of a stop string is ever sent."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the earliest stop string in text that comes in pieces.

    Text that could still become the beginning of a stop string is held back, and nothing more than that.

    Args:
        stops: the strings; none of them empty.
        include: whether the matched string stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece.

        Returns:
            the text that may be sent now, and the stop string that ended it (nothing may follow then).
        """
        if not self._stops:
            return text, None
        self._held += text
        matched = self._earliest()
        if matched is not None:
            at, stop = matched
            sent = self._held[: at + len(stop)] if self._include else self._held[:at]
            self._held = ""
            return sent, stop
        keep = self._undecided()
        sent = self._held[: len(self._held) - keep]
        self._held = self._held[len(sent) :]
        return sent, None

    def flush(self) -> str:
        """What is still held back when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _earliest(self) -> tuple[int, str] | None:
        """The match that is complete first; of those complete at the same place, the one that begins first."""
        found = [(self._held.find(stop), stop) for stop in self._stops]
        ends = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
        if not ends:
            return None
        _, at, stop = min(ends)
        return at, stop

    def _undecided(self) -> int:
        """Length of the longest tail that begins some stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
