"""The metrics of the server: one registry, who counts what, and the page that Prometheus reads.

``metric_table`` has the names. How it is used::

    metrics = Metrics()
    model = metrics.add_model("smollm2", "1", "llm")      # at load: every series appears, at zero
    model.request_success(); model.inference(); model.execution(0.25); model.durations_us(request=1500, queue=2)
    model.request_failure("REJECTED")
    model.observe_first_token(0.05); model.observe_inter_token(0.01); model.observe_queue(0.002)
    model.watch(lambda: client.stats)                      # once per engine; read when the page is
    metrics.remove_model("smollm2", "1")                   # at unload
    metrics.custom("apples_total", "counter", "Apples counted").value({"kind": "red"}).inc(2)
    metrics.render()
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Protocol

from tritium.errors import invalid
from tritium.observability.machine import Machine
from tritium.observability.metric_table import (
    CACHE,
    FIRST_RESPONSE,
    MACHINE,
    MODEL_CACHE,
    SUMMARIES,
    TABLE,
    Row,
)
from tritium.observability.model_metrics import FAILURE_REASONS, FailureReason, MetricsConfig, ModelKind, ModelMetrics
from tritium.observability.series import Family, Kind

__all__ = ["FAILURE_REASONS", "TABLE", "FailureReason", "Metrics", "MetricsConfig", "ModelKind", "ModelMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*").fullmatch
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*").fullmatch


class CacheLevels(Protocol):
    """What is read of the response cache; ``serving.cache.CacheStats`` has this shape.

    ``used_ratio`` is the share of its size; durations are in nanoseconds.
    """

    entries: int
    lookups: int
    hits: int
    misses: int
    evictions: int
    lookup_ns: int
    insertion_ns: int
    used_ratio: float


class Metrics:
    """The registry of one server. Safe to call from any thread.

    Args:
        machine: where levels of the machine come from; None for a page without them.
    """

    def __init__(self, config: MetricsConfig | None = None, machine: Machine | None = None) -> None:
        self.config = config or MetricsConfig()
        self._machine = machine
        self._cache: Callable[[], CacheLevels] | None = None
        self._families: dict[str, Family] = {row.name: _family(row, self.config) for row in _rows()}
        self._custom: dict[str, Family] = {}
        self._models: dict[tuple[str, str], ModelMetrics] = {}
        self._read_at = -1e9
        self._lock = threading.Lock()
        if machine is not None:
            machine.read()  # utilization is measured from here

    def add_model(
        self,
        name: str,
        version: str,
        kind: ModelKind = "model",
        *,
        tags: Mapping[str, str] | None = None,
        cached: bool = False,
        decoupled: bool = False,
    ) -> ModelMetrics:
        """Makes every series of a model, at zero; a model that was there before begins anew.

        Args:
            kind: "llm" adds the engine's series.
            tags: further labels (``metric_tags``); each key is shown with an underscore before it.
            cached: whether the response cache is asked.
            decoupled: whether a request may have many answers.
        """
        labels = {"model": name, "version": version, **{f"_{key}": value for key, value in (tags or {}).items()}}
        with self._lock:
            if (old := self._models.pop((name, version), None)) is not None:
                old.forget(llm_only=False)
            model = ModelMetrics(self._families, labels, kind, self.config, cached=cached, decoupled=decoupled)
            self._models[name, version] = model
            return model

    def remove_model(self, name: str, version: str) -> None:
        """At unload: Triton's series stay as they are, those of the engine go."""
        with self._lock:
            if (model := self._models.get((name, version))) is not None:
                model.read_counts()
                model.forget(llm_only=True)

    def watch_cache(self, read: Callable[[], CacheLevels]) -> None:
        """Shows the levels of the response cache."""
        self._cache = read

    def custom(self, name: str, kind: Kind, help: str) -> Family:
        """A family of somebody's own, such as a Python model's; made when it is not there.

        Raises:
            TritiumError: INVALID_ARGUMENT when the name is not one that Prometheus takes, or is taken for
                something else.
        """
        if not _NAME(name):
            raise invalid(f"metric family name is '{name}', expected letters, digits, '_' and ':'", param="name")
        with self._lock:
            if name in self._families:
                raise invalid(f"metric family '{name}' is one of the server's own", param="name")
            family = self._custom.setdefault(name, Family(name, kind, help))
        if (family.kind, family.help) != (kind, help):
            raise invalid(f"metric family '{name}' is there already as a {family.kind}: {family.help}", param="name")
        return family

    def remove_custom(self, name: str) -> None:
        """Forgets a family of somebody's own; one that is not there is no error."""
        with self._lock:
            self._custom.pop(name, None)

    def render(self) -> bytes:
        """The page, in Prometheus' text format 0.0.4, every name exactly as the table has it."""
        with self._lock:
            models = list(self._models.values())
            custom = list(self._custom.values())
            self._read_levels()
        for model in models:
            model.read_counts()
            model.read_engines()
        lines: list[str] = []
        for family in (*self._families.values(), *custom):
            lines.extend(family.lines())
        lines.append("")
        return "\n".join(lines).encode()

    def _read_levels(self) -> None:
        """Brings the levels of machine and cache up to date, if they are old."""
        now = time.monotonic()
        if now - self._read_at < self.config.interval_s:
            return
        self._read_at = now
        if self._machine is not None and (levels := self._machine.read()) is not None:
            for attribute, row in MACHINE.items():
                self._families[row.name].value({}).set(getattr(levels, attribute))
        if self._cache is not None:
            cache = self._cache()
            for attribute, (row, unit) in CACHE.items():
                self._families[row.name].value({}).set(getattr(cache, attribute) / unit)


def _rows() -> Iterable[Row]:
    yield from TABLE
    yield from SUMMARIES.values()
    yield FIRST_RESPONSE
    yield from MODEL_CACHE
    yield from (row for row, _ in CACHE.values())
    yield from MACHINE.values()


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels of a series of somebody's own, in one order.

    Raises:
        TritiumError: INVALID_ARGUMENT for a name that Prometheus does not take.
    """
    for name in labels:
        if not _LABEL(name):
            raise invalid(f"metric label is '{name}', expected letters, digits and '_'", param="labels")
    return {name: labels[name] for name in sorted(labels)}


def _family(row: Row, config: MetricsConfig) -> Family:
    return Family(row.name, row.kind, row.help, bounds=row.buckets, quantiles=config.quantiles)


_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


def metrics_app(metrics: Metrics) -> Callable[[_Message, _Receive, _Send], Awaitable[None]]:
    """The ASGI application of the metrics port: any path answers 200 with the page, as Triton's does."""

    async def app(scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            page = metrics.render()
            headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(page)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else page})

    return app


async def _lifespan(receive: _Receive, send: _Send) -> None:
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return
