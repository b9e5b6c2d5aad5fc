"""The metrics of one version of a model: what is counted, and how an engine is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from tritium.errors import invalid
from tritium.observability.metric_table import FIRST_RESPONSE, LATENCIES, MODEL_CACHE, SUMMARIES, TABLE, Row
from tritium.observability.series import Family, Histogram, Summary, Value
from tritium.settings.parts import flag, parts

ModelKind = Literal["model", "llm"]
FailureReason = Literal["BACKEND", "CANCELED", "OTHER", "REJECTED"]

FAILURE_REASONS: tuple[FailureReason, ...] = ("BACKEND", "CANCELED", "OTHER", "REJECTED")
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Which families there are (``--metrics-config``), and how often levels are read anew.

    Attributes:
        counter_latencies: the cumulative durations.
        summary_latencies: quantiles of the durations.
        quantiles: those, each from 0 to 1.
        histogram_latencies: the times to the first answer of decoupled models, in buckets.
        interval_s: levels of machine and cache on the page are at most this old.
    """

    counter_latencies: bool = True
    summary_latencies: bool = False
    quantiles: tuple[float, ...] = QUANTILES
    histogram_latencies: bool = False
    interval_s: float = 2.0


def parse_metrics_config(texts: Sequence[str], interval_s: float = 2.0) -> MetricsConfig:
    """What ``--metrics-config`` says.

    Raises:
        TritiumError: INVALID_ARGUMENT for a setting that there is not, or a value that does not fit.
    """
    option = "--metrics-config"
    config = MetricsConfig(interval_s=interval_s)
    for part in parts(option, texts):
        if part.key in ("counter_latencies", "summary_latencies", "histogram_latencies"):
            config = replace(config, **{part.key: flag(option, part)})
        elif part.key == "summary_quantiles":
            config = replace(config, quantiles=_quantiles(part.value))
        else:
            raise invalid(
                f"{option}: there is no setting '{part.key}', expected counter_latencies, summary_latencies, "
                "summary_quantiles or histogram_latencies",
                param="metrics_config",
            )
    return config


def _quantiles(text: str) -> tuple[float, ...]:
    """``QUANTILE:ERROR,...``; the error is not needed, since quantiles are exact here."""
    try:
        found = tuple(float(pair.partition(":")[0]) for pair in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= quantile <= 1 for quantile in found):
        raise invalid(
            f"--metrics-config: summary_quantiles is '{text}', expected such as 0.5:0.05,0.9:0.01",
            param="metrics_config",
        )
    return found


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


class ModelMetrics:
    """The series of one version of a model. Made by ``Metrics.add_model``; safe to call from any thread.

    Attributes:
        summarizes: whether single durations are wanted (``summary_latencies``), and not only their sums.
    """

    def __init__(
        self,
        families: Mapping[str, Family],
        labels: Mapping[str, str],
        kind: ModelKind,
        config: MetricsConfig,
        *,
        cached: bool = False,
        decoupled: bool = False,
    ) -> None:
        self.kind: ModelKind = kind
        self._labels = dict(labels)
        self._families = families
        self._values: dict[str, Value] = {}
        self._histograms: dict[str, Histogram] = {}
        self._summaries: dict[str, Summary] = {}
        self._failures: dict[str, Value] = {}
        self._engines: list[_Engine] = []
        self._report: Callable[[], None] | None = None
        self.summarizes = config.summary_latencies
        self._lock = threading.Lock()
        for row in TABLE:
            if (not row.llm or kind == "llm") and (config.counter_latencies or row.name not in LATENCIES):
                self._take(row)
        if config.summary_latencies:
            self._take(*SUMMARIES.values())
        if config.histogram_latencies and decoupled:
            self._take(FIRST_RESPONSE)
        if cached:
            self._take(*(row for row in MODEL_CACHE if config.summary_latencies or row.kind != "summary"))

    def _take(self, *rows: Row) -> None:
        for row in rows:
            family = self._families[row.name]
            if row.kind == "histogram":
                self._histograms[row.name] = family.histogram(self._labels)
            elif row.kind == "summary":
                self._summaries[row.name] = family.summary(self._labels)
            elif "reason" in row.labels:
                for reason in FAILURE_REASONS:
                    self._failures[reason] = family.value({**self._labels, "reason": reason})
            else:
                self._values[row.name] = family.value(self._labels)

    def forget(self, *, llm_only: bool) -> None:
        """Takes its series from the page; with ``llm_only`` those of the engine."""
        llm = {row.name for row in TABLE if row.llm}
        for name in (*self._values, *self._histograms, *self._summaries):
            if not llm_only or name in llm:
                self._families[name].remove(self._labels)
        for reason in () if llm_only else FAILURE_REASONS:
            self._families["nv_inference_request_failure"].remove({**self._labels, "reason": reason})
        with self._lock:
            self._engines.clear()

    def request_success(self, count: int = 1) -> None:
        """Requests that were answered."""
        self._values["nv_inference_request_success"].inc(count)

    def request_failure(self, reason: FailureReason, count: int = 1) -> None:
        """Requests that ended with an error, a refusal by a queue (REJECTED) or a client that left (CANCELED)."""
        self._failures[reason].inc(count)

    def inference(self, count: int = 1) -> None:
        """Inferences: a request counts its batch size."""
        self._values["nv_inference_count"].inc(count)

    def execution(self, count: float = 1) -> None:
        """Executions of the model; a request of an LLM adds its ``TokenDelta.exec_share``."""
        self._values["nv_inference_exec_count"].inc(count)

    def durations_us(
        self,
        *,
        request: float,
        queue: float,
        compute_input: float | None = None,
        compute_infer: float | None = None,
        compute_output: float | None = None,
    ) -> None:
        """Adds what a request took, in microseconds; None for parts that it never came to."""
        parts = (("request", request), ("queue", queue), ("compute_input", compute_input))
        for part, us in (*parts, ("compute_infer", compute_infer), ("compute_output", compute_output)):
            if us is None:
                continue
            if (counter := self._values.get(f"nv_inference_{part}_duration_us")) is not None:
                counter.inc(us)
            if (summary := self._summaries.get(SUMMARIES[part].name)) is not None:
                summary.observe(us)

    def first_response(self, ms: float) -> None:
        """The time to the first answer of a decoupled model, in milliseconds."""
        if self._histograms and (histogram := self._histograms.get(FIRST_RESPONSE.name)) is not None:
            histogram.observe(ms)

    def cache_hit(self, us: float) -> None:
        """The response cache had the answer; how long it took to look."""
        self._cached("hit", "hits", us)

    def cache_miss(self, us: float) -> None:
        """The response cache had no answer; how long it took to look and to keep the model's."""
        self._cached("miss", "misses", us)

    def _cached(self, one: str, many: str, us: float) -> None:
        if (counter := self._values.get(f"nv_cache_num_{many}_per_model")) is not None:
            counter.inc()
            self._values[f"nv_cache_{one}_duration_per_model"].inc(us)
        if (summary := self._summaries.get(f"nv_cache_{one}_summary_per_model")) is not None:
            summary.observe(us)

    def pending(self, change: int) -> None:
        """Requests that began (positive) or ceased (negative) to wait for execution."""
        self._values["nv_inference_pending_request_count"].inc(change)

    def observe_first_token(self, seconds: float) -> None:
        """The time to the first token of a request; for kind "llm" only, like those that follow."""
        self._histograms["tritium_time_to_first_token_seconds"].observe(seconds)

    def observe_inter_token(self, seconds: float, count: int = 1) -> None:
        """The time between two tokens, ``count`` times (a delta of several tokens shares its time)."""
        self._histograms["tritium_inter_token_latency_seconds"].observe(seconds, count)

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
            raise ValueError(f"model {self._labels['model']!r} has kind {self.kind!r}, only an 'llm' has engines")
        with self._lock:
            self._engines.append(_Engine(read))

    def watch_counts(self, report: Callable[[], None]) -> None:
        """Calls ``report`` before its series are read, so that it can count what is new."""
        self._report = report

    def read_counts(self) -> None:
        """Brings what is counted elsewhere up to date; ``Metrics`` does it."""
        if self._report is not None:
            self._report()

    def read_engines(self) -> None:
        """Brings the engine's series up to date; ``Metrics.render`` does it."""
        with self._lock:
            for engine in self._engines:
                engine.refresh(self._values)
            levels = [engine.last for engine in self._engines if engine.last is not None]
            if not self._engines:
                return
        total = sum(level.blocks_total for level in levels)
        used = sum(level.blocks_used for level in levels)
        self._values["tritium_requests_running"].set(sum(level.running for level in levels))
        waiting = sum(level.waiting for level in levels)
        self._values["tritium_requests_waiting"].set(waiting)
        # An LLM's requests wait in its engines and nowhere else.
        self._values["nv_inference_pending_request_count"].set(waiting)
        self._values["tritium_kv_cache_usage_ratio"].set(used / total if total else 0.0)


class _Engine:
    """One engine that is read, and how far its counters have been counted."""

    def __init__(self, read: Callable[[], EngineLevels | None]) -> None:
        self._read = read
        self._counted = dict.fromkeys(_ENGINE_COUNTERS, 0)
        self.last: EngineLevels | None = None

    def refresh(self, counters: Mapping[str, Value]) -> None:
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
