"""The metrics that there are: names, kinds, labels and help texts.

Those beginning with ``nv_`` are what a recorded Triton server shows (conformance case ``metrics/families``);
``tritium_*`` are the engine's and exist only where a language model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from tritium.observability.series import Kind

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
class Row:
    """One family of the table.

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
TABLE: tuple[Row, ...] = (
    Row("nv_inference_request_success", "counter",
           "Number of successful inference requests, all batch sizes"),
    Row("nv_inference_request_failure", "counter",
           "Number of failed inference requests, all batch sizes", labels=(*_MODEL, "reason")),
    Row("nv_inference_count", "counter",
           "Number of inferences performed (does not include cached requests)"),
    Row("nv_inference_exec_count", "counter",
           "Number of model executions performed (does not include cached requests)"),
    Row("nv_inference_request_duration_us", "counter",
           "Cumulative inference request duration in microseconds (includes cached requests)"),
    Row("nv_inference_queue_duration_us", "counter",
           "Cumulative inference queuing duration in microseconds (includes cached requests)"),
    Row("nv_inference_compute_input_duration_us", "counter",
           "Cumulative compute input duration in microseconds (does not include cached requests)"),
    Row("nv_inference_compute_infer_duration_us", "counter",
           "Cumulative compute inference duration in microseconds (does not include cached requests)"),
    Row("nv_inference_compute_output_duration_us", "counter",
           "Cumulative inference compute output duration in microseconds (does not include cached requests)"),
    Row("nv_inference_pending_request_count", "gauge",
           "Instantaneous number of pending requests awaiting execution per-model."),
    Row("tritium_time_to_first_token_seconds", "histogram",
           "From the arrival of a request to its first token, in seconds", buckets=_FIRST_TOKEN_S, llm=True),
    Row("tritium_inter_token_latency_seconds", "histogram",
           "Between two tokens of a request, in seconds", buckets=_INTER_TOKEN_S, llm=True),
    Row("tritium_queue_time_seconds", "histogram",
           "From the arrival of a request to the first step that takes it, in seconds", buckets=_QUEUE_S, llm=True),
    Row("tritium_requests_running", "gauge",
           "Sequences that the engine is computing", llm=True),
    Row("tritium_requests_waiting", "gauge",
           "Sequences that wait for room in the engine", llm=True),
    Row("tritium_kv_cache_usage_ratio", "gauge",
           "Share of the KV cache blocks that live sequences hold, 0 to 1", llm=True),
    Row("tritium_prefix_cache_queries_tokens_total", "counter",
           "Prompt tokens that were looked up in the prefix cache", llm=True),
    Row("tritium_prefix_cache_hits_tokens_total", "counter",
           "Prompt tokens that the prefix cache already held", llm=True),
    Row("tritium_preemptions_total", "counter",
           "Times that a running sequence gave its blocks back for another one", llm=True),
)

# Of every model, unless ``counter_latencies`` is off.
LATENCIES = frozenset(row.name for row in TABLE if row.name.endswith("_duration_us"))

# Of every model, with ``summary_latencies``.
SUMMARIES: dict[str, Row] = {
    "request": Row("nv_inference_request_summary_us", "summary",
                   "Summary of inference request duration in microseconds (includes cached requests)"),
    "queue": Row("nv_inference_queue_summary_us", "summary",
                 "Summary of inference queuing duration in microseconds (includes cached requests)"),
    "compute_input": Row("nv_inference_compute_input_summary_us", "summary",
                         "Cumulative compute input duration in microseconds (does not include cached requests)"),
    "compute_infer": Row("nv_inference_compute_infer_summary_us", "summary",
                         "Cumulative compute inference duration in microseconds (does not include cached requests)"),
    "compute_output": Row("nv_inference_compute_output_summary_us", "summary",
                          "Cumulative inference compute output duration in microseconds (does not include cached "
                          "requests)"),
}
# Of every decoupled model, with ``histogram_latencies``.
FIRST_RESPONSE = Row("nv_inference_first_response_histogram_ms", "histogram",
                     "Duration from request to first response in milliseconds", buckets=(100, 500, 2000, 5000))

# Of models with a response cache; the summaries with ``summary_latencies``.
MODEL_CACHE: tuple[Row, ...] = (
    Row("nv_cache_num_hits_per_model", "counter", "Number of cache hits per model"),
    Row("nv_cache_num_misses_per_model", "counter", "Number of cache misses per model"),
    Row("nv_cache_hit_duration_per_model", "counter", "Total cache hit duration per model, in microseconds"),
    Row("nv_cache_miss_duration_per_model", "counter",
        "Total cache miss (insert+lookup) duration per model, in microseconds"),
    Row("nv_cache_hit_summary_per_model", "summary",
        "Summary of cache hit counts/durations per model, in microseconds."),
    Row("nv_cache_miss_summary_per_model", "summary",
        "Summary of cache miss counts/durations per model, in microseconds."),
)
# Of the response cache as a whole: the attribute of ``CacheLevels`` to its family, and what divides it.
CACHE: dict[str, tuple[Row, float]] = {
    "entries": (Row("nv_cache_num_entries", "gauge", "Number of responses stored in response cache", ()), 1),
    "lookups": (Row("nv_cache_num_lookups", "gauge", "Number of cache lookups in response cache", ()), 1),
    "hits": (Row("nv_cache_num_hits", "gauge", "Number of cache hits in response cache", ()), 1),
    "misses": (Row("nv_cache_num_misses", "gauge", "Number of cache misses in response cache", ()), 1),
    "evictions": (Row("nv_cache_num_evictions", "gauge", "Number of cache evictions in response cache", ()), 1),
    "lookup_ns": (Row("nv_cache_lookup_duration", "gauge",
                      "Total cache lookup duration (hit and miss), in microseconds", ()), 1e3),
    "insertion_ns": (Row("nv_cache_insertion_duration", "gauge",
                         "Total cache insertion duration, in microseconds", ()), 1e3),
    "used_ratio": (Row("nv_cache_util", "gauge", "Cache utilization [0.0 - 1.0]", ()), 1),
}
# Of the machine: the attribute of ``MachineLevels`` to its family.
MACHINE: dict[str, Row] = {
    "utilization": Row("nv_cpu_utilization", "gauge", "CPU utilization rate [0.0 - 1.0]", ()),
    "memory_total": Row("nv_cpu_memory_total_bytes", "gauge", "CPU total memory (RAM), in bytes", ()),
    "memory_used": Row("nv_cpu_memory_used_bytes", "gauge", "CPU used memory (RAM), in bytes", ()),
}
# fmt: on
