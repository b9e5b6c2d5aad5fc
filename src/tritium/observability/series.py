"""Time series of one process and the page that shows them: counters, gauges, histograms, summaries.

``prometheus_client`` cannot make this page: it forces ``_total`` on every counter, knows no quantiles, and gives
all series of a family the same labels, whereas Triton's differ by model (``metric_tags``) and by what a Python
model makes of its own. The text is Prometheus' format 0.0.4.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "summary"]

# A summary knows the values of this many seconds, and of those at most so many of the latest.
WINDOW_S = 60.0
MAX_VALUES = 2048


class Value:
    """A counter or a gauge. Safe to call from any thread, as are the classes below."""

    __slots__ = ("_lock", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0.0

    @property
    def value(self) -> float:
        """What it stands at."""
        return self._value

    def inc(self, amount: float = 1.0) -> None:
        """Adds ``amount``."""
        with self._lock:
            self._value += amount

    def set(self, value: float) -> None:
        """Takes ``value`` in place of what it was."""
        with self._lock:
            self._value = value

    def samples(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        """Suffix of the name, further labels, value."""
        yield "", {}, self._value


class Histogram:
    """Counts of values up to each bound, their sum and number.

    Args:
        bounds: upper bounds, ascending, without the infinite one.
    """

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._lock = threading.Lock()
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """``count`` times the same value."""
        at = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[at] += count
            self._sum += value * count

    def samples(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        """Suffix of the name, further labels, value."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        below = 0
        for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
            below += count
            yield "_bucket", {"le": number(bound)}, float(below)
        yield "_count", {}, float(below)
        yield "_sum", {}, total


class Summary:
    """Quantiles of the values of the last minute, and the sum and number of all.

    Args:
        quantiles: which, each from 0 to 1.
    """

    __slots__ = ("_count", "_latest", "_lock", "_quantiles", "_sum")

    def __init__(self, quantiles: Sequence[float]) -> None:
        self._lock = threading.Lock()
        self._quantiles = tuple(quantiles)
        self._latest: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)
        self._count = 0
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One value."""
        with self._lock:
            self._latest.append((time.monotonic(), value))
            self._count += 1
            self._sum += value

    def samples(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        """Suffix of the name, further labels, value; NaN where no value came in the last minute."""
        since = time.monotonic() - WINDOW_S
        with self._lock:
            while self._latest and self._latest[0][0] < since:
                self._latest.popleft()
            values, count, total = sorted(value for _, value in self._latest), self._count, self._sum
        yield "_count", {}, float(count)
        yield "_sum", {}, total
        for quantile in self._quantiles:
            at = min(len(values), max(1, math.ceil(quantile * len(values)))) - 1
            yield "", {"quantile": format(quantile, "g")}, values[at] if values else math.nan


Series = Value | Histogram | Summary


class Family:
    """All series of one name.

    Args:
        bounds: of histograms.
        quantiles: of summaries.
    """

    def __init__(
        self, name: str, kind: Kind, help: str, *, bounds: Sequence[float] = (), quantiles: Sequence[float] = ()
    ) -> None:
        self.name = name
        self.kind: Kind = kind
        self.help = help
        self._bounds = bounds
        self._quantiles = quantiles
        self._series: dict[tuple[tuple[str, str], ...], Series] = {}

    def __len__(self) -> int:
        return len(self._series)

    def value(self, labels: Mapping[str, str]) -> Value:
        """The counter or gauge with these labels, made when it is not there."""
        found = self._series.setdefault(tuple(labels.items()), Value())
        assert isinstance(found, Value)
        return found

    def histogram(self, labels: Mapping[str, str], bounds: Sequence[float] = ()) -> Histogram:
        """The histogram with these labels, made when it is not there (then with ``bounds``, or the family's)."""
        found = self._series.setdefault(tuple(labels.items()), Histogram(bounds or self._bounds))
        assert isinstance(found, Histogram)
        return found

    def summary(self, labels: Mapping[str, str]) -> Summary:
        """The summary with these labels, made when it is not there."""
        found = self._series.setdefault(tuple(labels.items()), Summary(self._quantiles))
        assert isinstance(found, Summary)
        return found

    def remove(self, labels: Mapping[str, str]) -> None:
        """Forgets a series; one that is not there is no error."""
        self._series.pop(tuple(labels.items()), None)

    def lines(self) -> Iterator[str]:
        """The text of the family; nothing without a series, as in Triton."""
        # A list of them, since other threads add and remove meanwhile.
        series = list(self._series.items())
        if not series:
            return
        yield f"# HELP {self.name} {escape(self.help)}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, one in series:
            for suffix, more, value in one.samples():
                shown = ",".join(f'{key}="{escape(text, quote=True)}"' for key, text in (*labels, *more.items()))
                yield (
                    f"{self.name}{suffix}{{{shown}}} {number(value)}"
                    if shown
                    else f"{self.name}{suffix} {number(value)}"
                )


def number(value: float) -> str:
    """A value as Prometheus reads it; repr() loses nothing."""
    return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value) or ("NaN" if value != value else repr(float(value)))


def escape(text: str, *, quote: bool = False) -> str:
    """A text as the format wants it, with ``quote`` that of a label."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
