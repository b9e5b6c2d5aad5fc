"""How other projects spell settings and values, and what becomes of flags that have no meaning here."""

from __future__ import annotations

# Other projects' spellings of settings that exist here (hyphens stand for underscores too).
ALIASES: dict[str, str] = {
    # vLLM
    "port": "http_port",
    "max-model-len": "max_length",
    "max-num-seqs": "max_rows",
    "max-num-batched-tokens": "max_tokens_per_step",
    "gpu-memory-utilization": "memory_fraction",
    "kv-cache-memory-bytes": "kv_cache_bytes",
    "num-gpu-blocks-override": "num_blocks",
    "enable-prefix-caching": "prefix_cache",
    "shutdown-timeout": "exit_timeout_secs",
    # Triton
    "model-store": "model_repository",
    "http-address": "host",
    "grpc-address": "grpc_host",
    "metrics-address": "metrics_host",
    "http-max-input-size": "http_max_body_bytes",
    "model-load-thread-count": "model_load_limit",
    "id": "server_name",
    # TensorRT-LLM
    "max-batch-size": "max_rows",
    "max-num-tokens": "max_tokens_per_step",
    "max-seq-len": "max_length",
}

# Flags that take all the words behind them, up to the next flag, where MODEL stands before them: so does vLLM.
SEVERAL = frozenset(("served_model_name",))

# Other projects' spellings of values.
VALUE_ALIASES: dict[str, dict[str, str]] = {
    "log_format": {"iso8601": "ISO8601"},
    "dtype": {
        "half": "float16",
        "fp16": "float16",
        "bf16": "bfloat16",
        "float": "float32",
        "fp32": "float32",
    },
}

_ALWAYS = "continuous (in-flight) batching is always on"
_KERNELS = "kernels are chosen for the machine at start"
_POOLS = "memory is taken as it is needed"

# Flags that are taken, with this reason in a notice, because what they ask for is how Tritium always works.
NOTICES: dict[str, str] = {
    "enable-inflight-batching": _ALWAYS,
    "use-inflight-batching": _ALWAYS,
    "inflight-batching": _ALWAYS,
    "enable-chunked-prefill": "prompts are always computed in chunks between decode steps",
    "use-gemm-plugin": _KERNELS,
    "gemm-plugin": _KERNELS,
    "use-gpt-attention-plugin": _KERNELS,
    "gpt-attention-plugin": _KERNELS,
    "remove-input-padding": "batches are never padded",
    "allow-gpu-metrics": "metrics of GPUs come from their own exporter (DCGM)",
    "enable-peer-access": "devices reach each other where they can",
    "paged-kv-cache": "the KV cache is always paged",
    "use-paged-kv-cache": "the KV cache is always paged",
    "trust-remote-code": "no code of a checkpoint is ever run",
    "disable-log-requests": "prompts and answers are never logged",
    # Triton's, that are followed by a value.
    "http-thread-count": "one event loop serves all connections",
    "grpc-infer-thread-count": "one event loop serves all calls",
    "grpc-infer-allocation-pool-size": "nothing is kept between calls",
    "backend-directory": "backends are part of this package or installed beside it",
    "repoagent-directory": "there are no repository agents",
    "cache-directory": "the response cache is part of this package",
    "pinned-memory-pool-byte-size": _POOLS,
    "cuda-memory-pool-byte-size": _POOLS,
    "cuda-virtual-address-size": _POOLS,
    "buffer-manager-thread-count": "tensors are not gathered by threads",
    "min-supported-compute-capability": _KERNELS,
    "host-policy": "the operating system places threads and memory",
}
# Those of them that always have a value.
NOTICES_WITH_VALUE = frozenset(
    {"http-thread-count", "grpc-infer-thread-count", "grpc-infer-allocation-pool-size", "backend-directory"}
    | {"repoagent-directory", "cache-directory", "pinned-memory-pool-byte-size", "cuda-memory-pool-byte-size"}
    | {"cuda-virtual-address-size", "buffer-manager-thread-count", "min-supported-compute-capability", "host-policy"}
)

# Flags of Triton's past -> the flag of today and its value, with the old one's value in it.
DEPRECATED: dict[str, tuple[str, str]] = {
    "trace-file": ("trace-config", "triton,file={}"),
    "trace-level": ("trace-config", "level={}"),
    "trace-rate": ("trace-config", "rate={}"),
    "trace-count": ("trace-config", "count={}"),
    "trace-log-frequency": ("trace-config", "triton,log-frequency={}"),
    "strict-model-config": ("disable-auto-complete-config", "{}"),
    "response-cache-byte-size": ("cache-config", "local,size={}"),
}
# What may follow such a flag as its value.
NOTICE_WORDS = frozenset(
    ("auto", "true", "false", "enable", "disable", "none", "float16", "float32", "bfloat16", "int8", "fp8")
)
