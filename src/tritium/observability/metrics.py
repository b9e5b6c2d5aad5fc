"""The metrics of the server: one table of names, one registry, and the page that Prometheus reads.

``nv_inference_*`` are Triton's names with Triton's meanings; ``tritium_*`` are the engine's and exist only
where a language model is loaded. Names, kinds, labels and help texts of the first set are those that a
recorded Triton server shows (conformance case ``metrics/families``).

How it is used::

    metrics = Metrics()
    model = metrics.add_model("smollm2", "1", "llm")      # at load: every series appears, at zero
    model.request_success(); model.inference(); model.execution(0.25); model.durations_us(request=1500)
    model.request_failure("REJECTED")
    model.observe_first_token(0.05); model.observe_inter_token(0.01); model.observe_queue(0.002)
    model.watch(lambda: client.stats)                      # once per engine; read when the page is
    metrics.remove_model("smollm2", "1")                   # at unload
    metrics.render()
"""

from __future__ import annotations

import math
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

Kind = Literal["counter", "gauge", "histogram"]
ModelKind = Literal["model", "llm"]
FailureReason = Literal["BACKEND", "CANCELED", "OTHER", "REJECTED"]

FAILURE_REASONS: tuple[FailureReason, ...] = ("BACKEND", "CANCELED", "OTHER", "REJECTED")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_MODEL = ("model", "version")
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_QUEUE_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)


@dataclass(frozen=True, slots=True)
class Family:
    """One line of the table.

    Attributes:
        buckets: upper bounds of a histogram, in the unit that the name ends in; () for the other kinds.
        llm: whether only language models have it.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = _MODEL
    buckets: tuple[float, ...] = ()
    llm: bool = False


# fmt: off
TABLE: tuple[Family, ...] = (
    Family("nv_inference_request_success", "counter",
           "Number of successful inference requests, all batch sizes"),
    Family("nv_inference_request_failure", "counter",
           "Number of failed inference requests, all batch sizes", labels=(*_MODEL, "reason")),
    Family("nv_inference_count", "counter",
           "Number of inferences performed (does not include cached requests)"),
    Family("nv_inference_exec_count", "counter",
           "Number of model executions performed (does not include cached requests)"),
    Family("nv_inference_request_duration_us", "counter",
           "Cumulative inference request duration in microseconds (includes cached requests)"),
    Family("nv_inference_queue_duration_us", "counter",
           "Cumulative inference queuing duration in microseconds (includes cached requests)"),
    Family("nv_inference_compute_input_duration_us", "counter",
           "Cumulative compute input duration in microseconds (does not include cached requests)"),
    Family("nv_inference_compute_infer_duration_us", "counter",
           "Cumulative compute inference duration in microseconds (does not include cached requests)"),
    Family("nv_inference_compute_output_duration_us", "counter",
           "Cumulative inference compute output duration in microseconds (does not include cached requests)"),
    Family("nv_inference_pending_request_count", "gauge",
           "Instantaneous number of pending requests awaiting execution per-model."),
    Family("tritium_time_to_first_token_seconds", "histogram",
           "From the arrival of a request to its first token, in seconds", buckets=_FIRST_TOKEN_S, llm=True),
    Family("tritium_inter_token_latency_seconds", "histogram",
           "Between two tokens of a request, in seconds", buckets=_INTER_TOKEN_S, llm=True),
    Family("tritium_queue_time_seconds", "histogram",
           "From the arrival of a request to the first step that takes it, in seconds", buckets=_QUEUE_S, llm=True),
    Family("tritium_requests_running", "gauge",
           "Sequences that the engine is computing", llm=True),
    Family("tritium_requests_waiting", "gauge",
           "Sequences that wait for room in the engine", llm=True),
    Family("tritium_kv_cache_usage_ratio", "gauge",
           "Share of the KV cache blocks that live sequences hold, 0 to 1", llm=True),
    Family("tritium_prefix_cache_queries_tokens_total", "counter",
           "Prompt tokens that were looked up in the prefix cache", llm=True),
    Family("tritium_prefix_cache_hits_tokens_total", "counter",
           "Prompt tokens that the prefix cache already held", llm=True),
    Family("tritium_preemptions_total", "counter",
           "Times that a running sequence gave its blocks back for another one", llm=True),
)
# fmt: on


class EngineLevels(Protocol):
    """What is read of an engine; ``tritium.llm.types.EngineStats`` has this shape.

    The prefix numbers count tokens; they and ``preemptions`` only grow while the engine lives.
    """

    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int


_Collector = Counter | Gauge | Histogram


class Metrics:
    """The registry of one server. Safe to call from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._families = {f.name: _collector(f, self.registry) for f in TABLE}
        self._shown = {f.name.removesuffix("_total"): f.name for f in TABLE if f.kind == "counter"}
        self._models: dict[tuple[str, str], ModelMetrics] = {}
        self._lock = threading.Lock()

    def add_model(self, name: str, version: str, kind: ModelKind = "model") -> ModelMetrics:
        """Makes every series of a model, at zero; a model that was there before begins anew.

        Args:
            kind: "llm" adds the engine's series.
        """
        with self._lock:
            self._forget(name, version, llm_only=False)
            model = ModelMetrics(self._families, name, version, kind)
            self._models[name, version] = model
            return model

    def remove_model(self, name: str, version: str) -> None:
        """At unload: Triton's series stay as they are, those of the engine go."""
        with self._lock:
            if self._models.pop((name, version), None) is not None:
                self._forget(name, version, llm_only=True)

    def render(self) -> bytes:
        """The page, in Prometheus' text format 0.0.4, every name exactly as the table has it.

        ``prometheus_client``'s own writer cannot be used: it forces ``_total`` on every counter, which
        Triton's names do not have, and adds ``_created`` series.
        """
        with self._lock:
            models = list(self._models.values())
        for model in models:
            model.read_engines()
        lines: list[str] = []
        for metric in self.registry.collect():
            lines.extend(_lines(metric, self._shown.get(metric.name, metric.name)))
        lines.append("")
        return "\n".join(lines).encode()

    def _forget(self, name: str, version: str, *, llm_only: bool) -> None:
        for family in TABLE:
            if llm_only and not family.llm:
                continue
            for labels in _label_values(family, name, version):
                # A name that was never there is no error: remove() passes over it silently.
                self._families[family.name].remove(*labels)


class ModelMetrics:
    """The series of one version of a model. Made by ``Metrics.add_model``; safe to call from any thread."""

    def __init__(self, families: dict[str, _Collector], name: str, version: str, kind: ModelKind) -> None:
        self.name = name
        self.version = version
        self.kind: ModelKind = kind
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._failures: dict[str, Counter] = {}
        self._engines: list[_Engine] = []
        self._lock = threading.Lock()
        for family in TABLE:
            if not family.llm or kind == "llm":
                self._take(family, families[family.name])

    def _take(self, family: Family, collector: _Collector) -> None:
        for labels in _label_values(family, self.name, self.version):
            child = collector.labels(*labels)
            if isinstance(child, Histogram):
                self._histograms[family.name] = child
            elif isinstance(child, Gauge):
                self._gauges[family.name] = child
            elif "reason" in family.labels:
                self._failures[labels[-1]] = child
            else:
                self._counters[family.name] = child

    def request_success(self, count: int = 1) -> None:
        """Requests that were answered."""
        self._counters["nv_inference_request_success"].inc(count)

    def request_failure(self, reason: FailureReason, count: int = 1) -> None:
        """Requests that ended with an error, a refusal by a queue (REJECTED) or a client that left (CANCELED)."""
        self._failures[reason].inc(count)

    def inference(self, count: int = 1) -> None:
        """Inferences: a request counts its batch size."""
        self._counters["nv_inference_count"].inc(count)

    def execution(self, count: float = 1) -> None:
        """Executions of the model; a request of an LLM adds its ``TokenDelta.exec_share``."""
        self._counters["nv_inference_exec_count"].inc(count)

    def durations_us(
        self,
        *,
        request: float = 0,
        queue: float = 0,
        compute_input: float = 0,
        compute_infer: float = 0,
        compute_output: float = 0,
    ) -> None:
        """Adds what a request took, in microseconds, to the cumulative durations."""
        counters = self._counters
        counters["nv_inference_request_duration_us"].inc(request)
        counters["nv_inference_queue_duration_us"].inc(queue)
        counters["nv_inference_compute_input_duration_us"].inc(compute_input)
        counters["nv_inference_compute_infer_duration_us"].inc(compute_infer)
        counters["nv_inference_compute_output_duration_us"].inc(compute_output)

    def pending(self, change: int) -> None:
        """Requests that began (positive) or ceased (negative) to wait for execution."""
        self._gauges["nv_inference_pending_request_count"].inc(change)

    def observe_first_token(self, seconds: float) -> None:
        """The time to the first token of a request; for kind "llm" only, like those that follow."""
        self._histograms["tritium_time_to_first_token_seconds"].observe(seconds)

    def observe_inter_token(self, seconds: float, count: int = 1) -> None:
        """The time between two tokens, ``count`` times (a delta of several tokens shares its time)."""
        histogram = self._histograms["tritium_inter_token_latency_seconds"]
        for _ in range(count):
            histogram.observe(seconds)

    def observe_queue(self, seconds: float) -> None:
        """How long a request waited for its first step."""
        self._histograms["tritium_queue_time_seconds"].observe(seconds)

    def watch(self, read: Callable[[], EngineLevels | None]) -> None:
        """Reads an engine whenever the page is rendered; call once for each engine of the model.

        Args:
            read: its last levels, at once; None while there is no engine. The counters of an engine that
                was started again begin at 0, which adds to what was counted before.
        """
        if self.kind != "llm":
            raise ValueError(f"model {self.name!r} has kind {self.kind!r}, only an 'llm' has engines")
        with self._lock:
            self._engines.append(_Engine(read))

    def read_engines(self) -> None:
        """Brings the engine's series up to date; ``Metrics.render`` does it."""
        with self._lock:
            for engine in self._engines:
                engine.refresh(self._counters)
            levels = [engine.last for engine in self._engines if engine.last is not None]
        if self._engines:
            total = sum(level.blocks_total for level in levels)
            used = sum(level.blocks_used for level in levels)
            self._gauges["tritium_requests_running"].set(sum(level.running for level in levels))
            waiting = sum(level.waiting for level in levels)
            self._gauges["tritium_requests_waiting"].set(waiting)
            # An LLM's requests wait in its engines and nowhere else.
            self._gauges["nv_inference_pending_request_count"].set(waiting)
            self._gauges["tritium_kv_cache_usage_ratio"].set(used / total if total else 0.0)


class _Engine:
    """One engine that is read, and how far its counters have been counted."""

    def __init__(self, read: Callable[[], EngineLevels | None]) -> None:
        self._read = read
        self._counted = dict.fromkeys(_ENGINE_COUNTERS, 0)
        self.last: EngineLevels | None = None

    def refresh(self, counters: dict[str, Counter]) -> None:
        self.last = self._read()
        if self.last is None:
            return
        for name, attribute in _ENGINE_COUNTERS.items():
            value: int = getattr(self.last, attribute)
            before = self._counted[name]
            # Below what it was: the engine was started again, and all of it is new.
            counters[name].inc(value - before if value >= before else value)
            self._counted[name] = value


_ENGINE_COUNTERS = {
    "tritium_prefix_cache_queries_tokens_total": "prefix_queries",
    "tritium_prefix_cache_hits_tokens_total": "prefix_hits",
    "tritium_preemptions_total": "preemptions",
}


def _collector(family: Family, registry: CollectorRegistry) -> _Collector:
    if family.kind == "counter":
        return Counter(family.name, family.help, family.labels, registry=registry)
    if family.kind == "gauge":
        return Gauge(family.name, family.help, family.labels, registry=registry)
    return Histogram(family.name, family.help, family.labels, registry=registry, buckets=family.buckets)


def _label_values(family: Family, name: str, version: str) -> list[tuple[str, ...]]:
    if "reason" in family.labels:
        return [(name, version, reason) for reason in FAILURE_REASONS]
    return [(name, version)]


def _lines(metric: Metric, name: str) -> Iterator[str]:
    """A family as text, under ``name``; a family without a series gives nothing, as in Triton."""
    samples = [s for s in metric.samples if not s.name.endswith("_created")]
    if not samples:
        return
    yield f"# HELP {name} {_escape(metric.documentation)}"
    yield f"# TYPE {name} {metric.type}"
    for sample in samples:
        shown = name if metric.type == "counter" else sample.name
        labels = ",".join(f'{key}="{_escape(value, quote=True)}"' for key, value in sample.labels.items())
        yield f"{shown}{{{labels}}} {_number(sample.value)}" if labels else f"{shown} {_number(sample.value)}"


def _number(value: float) -> str:
    """A value as Prometheus reads it; repr() loses nothing."""
    return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value) or ("NaN" if value != value else repr(float(value)))


def _escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


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
