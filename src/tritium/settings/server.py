"""The settings of the server around the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]

# Settings whose values hold commas: texts of them are parted at semicolons.
COMMAS_WITHIN = frozenset(
    {"http_restricted_api", "grpc_restricted_protocol", "metrics_config", "trace_config", "cache_config"}
    | {"rate_limit_resource", "backend_config"}
)
# Settings whose values end in a secret, after the last "=".
SECRETS = frozenset(("http_restricted_api", "grpc_restricted_protocol"))


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the server around the engines. Field names are the flags of the command line.

    Attributes:
        model: checkpoint folder, GGUF file or installed model name to serve, instead of a repository.
        model_repository: folders of models in Triton's layout (``<model>/config.pbtxt``, ``<model>/<version>/``);
            may be repeated.
        served_model_name: name under which MODEL is served, by default that of its file or folder; may be repeated:
            the first one is what the server calls it, the others are accepted too.
        host: address to listen on.
        http_port: HTTP: KServe v2 and OpenAI routes; 0 takes a free one.
        grpc_port: gRPC: KServe v2; 0 takes a free one.
        metrics_port: Prometheus metrics (``/metrics``; they are on the HTTP port too); 0 takes a free one.
        grpc_host: address of gRPC; by default that of --host.
        metrics_host: address of the metrics; by default that of --host.
        allow_http: open the HTTP port.
        allow_grpc: open the gRPC port.
        allow_metrics: open the metrics port.
        model_control_mode: none loads the whole repository at start; poll does too, and follows its files; explicit
            loads what --load-model names and then what clients ask for.
        repository_poll_secs: how often mode poll looks at the repository, in seconds.
        load_model: model to load at start in mode explicit; may be repeated, ``*`` is all.
        model_config_name: a model's configuration is ``configs/<this>.pbtxt``, where there is such a file.
        model_namespacing: models of different repositories may have the same name; refused when any two do, since no
            protocol could say which of them is meant.
        disable_auto_complete_config: do not add to configurations what the models themselves say.
        model_load_limit: models that load at the same time.
        strict_readiness: ready means that every model that should be loaded is; otherwise that requests are taken.
        exit_on_error: end the server when a model cannot be loaded at start.
        exit_timeout_secs: how long SIGTERM waits for requests in flight, in seconds.
        http_max_body_bytes: largest accepted HTTP request body, in bytes.
        grpc_max_message_bytes: largest accepted gRPC message, in bytes.
        http_header_forward_pattern: HTTP headers whose names match become parameters of the request.
        grpc_header_forward_pattern: gRPC metadata whose names match become parameters of the request.
        http_restricted_api: ``APIS:KEY=VALUE``: calls of these want the header KEY with that value; may be repeated.
        grpc_restricted_protocol: ``APIS:KEY=VALUE``: calls of these want the metadata ``triton-grpc-protocol-KEY``
            with that value; may be repeated.
        reuse_http_port: share the HTTP port with other servers.
        reuse_grpc_port: share the gRPC port with other servers.
        grpc_core: serve gRPC with the grpcio package instead of Tritium's own HTTP/2 server; slower, and used anyway
            for TLS and compressed answers.
        grpc_use_ssl: TLS on the gRPC port.
        grpc_use_ssl_mutual: TLS on the gRPC port that wants a certificate of the client.
        grpc_server_cert: file with the server's certificate (PEM).
        grpc_server_key: file with its private key (PEM).
        grpc_root_cert: file with the certificates that clients are checked by (PEM).
        grpc_infer_response_compression_level: how much gRPC answers are compressed.
        grpc_keepalive_time: how long a connection is idle until it is pinged, in milliseconds.
        grpc_keepalive_timeout: how long the answer to a ping may take, in milliseconds.
        grpc_keepalive_permit_without_calls: ping connections without calls too.
        grpc_http2_max_pings_without_data: pings in a row without data; 0 for any number.
        grpc_http2_min_recv_ping_interval_without_data: shortest time between pings of a client, in milliseconds.
        grpc_http2_max_ping_strikes: pings that come too soon until the connection is closed; 0 for any number.
        grpc_max_connection_age: how long a connection lives, in milliseconds; 0 for ever.
        grpc_max_connection_age_grace: how long its calls may take then, in milliseconds; 0 for ever.
        metrics_config: ``KEY=VALUE`` with counter_latencies, summary_latencies, histogram_latencies (true or false)
            or summary_quantiles (``0.5:0.05,0.9:0.01``); may be repeated.
        metrics_interval_ms: how old levels of machine and cache on the metrics page may be, in milliseconds.
        allow_cpu_metrics: show use of processors and memory.
        trace_config: ``KEY=VALUE`` with level (OFF, TIMESTAMPS, TENSORS), rate, count, mode, or
            ``triton,file=FILE`` and ``triton,log-frequency=N``; or mode=opentelemetry with
            ``opentelemetry,url=URL``, ``opentelemetry,resource=KEY=VALUE``; may be repeated.
        cache_config: ``local,size=BYTES`` keeps answers of models that want it, ``redis,host=HOST,port=PORT`` does
            so in a Redis (also user, password, db, connect_timeout, socket_timeout, wait_timeout in ms, pool_size,
            keep_alive, tls_enabled, cert, key, cacert, cacert_dir); may be repeated.
        rate_limit: execution_count lets instances run by their resources and priorities.
        rate_limit_resource: ``NAME:COUNT[:DEVICE]``: units of a resource of the rate limiter; may be repeated.
        backend_config: ``BACKEND,KEY=VALUE`` for all models of a backend; may be repeated.
        server_name: what the server calls itself in its metadata.
        log_level: least severe line that is logged.
        log_format: text (default, ISO8601) for people, json for machines.
        log_verbose: above 0, log every step (level debug).
        log_info: log lines of level info.
        log_warning: log lines of level warning.
        log_error: log lines of level error.
        log_file: file that lines are added to, instead of standard error.
    """

    model: str | None = None
    model_repository: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 8001
    metrics_port: Port = 8002
    grpc_host: str | None = None
    metrics_host: str | None = None
    allow_http: bool = True
    allow_grpc: bool = True
    allow_metrics: bool = True
    model_control_mode: Literal["none", "poll", "explicit"] = "none"
    repository_poll_secs: Annotated[float, msgspec.Meta(gt=0)] = 15.0
    load_model: tuple[str, ...] = ()
    model_config_name: str = ""
    model_namespacing: bool = False
    disable_auto_complete_config: bool = False
    model_load_limit: Positive = 4
    strict_readiness: bool = True
    exit_on_error: bool = True
    exit_timeout_secs: Seconds = 30.0
    http_max_body_bytes: Positive = 64 << 20
    grpc_max_message_bytes: Positive = 64 << 20
    http_header_forward_pattern: str = ""
    grpc_header_forward_pattern: str = ""
    http_restricted_api: tuple[str, ...] = ()
    grpc_restricted_protocol: tuple[str, ...] = ()
    reuse_http_port: bool = False
    reuse_grpc_port: bool = False
    grpc_core: bool = False
    grpc_use_ssl: bool = False
    grpc_use_ssl_mutual: bool = False
    grpc_server_cert: str = ""
    grpc_server_key: str = ""
    grpc_root_cert: str = ""
    grpc_infer_response_compression_level: Literal["none", "low", "medium", "high"] = "none"
    grpc_keepalive_time: Natural = 60_000
    grpc_keepalive_timeout: Natural = 20_000
    grpc_keepalive_permit_without_calls: bool = False
    grpc_http2_max_pings_without_data: Natural = 2
    grpc_http2_min_recv_ping_interval_without_data: Natural = 300_000
    grpc_http2_max_ping_strikes: Natural = 2
    grpc_max_connection_age: Natural = 0
    grpc_max_connection_age_grace: Natural = 0
    metrics_config: tuple[str, ...] = ()
    metrics_interval_ms: Positive = 2000
    allow_cpu_metrics: bool = True
    trace_config: tuple[str, ...] = ()
    cache_config: tuple[str, ...] = ()
    rate_limit: Literal["off", "execution_count"] = "off"
    rate_limit_resource: tuple[str, ...] = ()
    backend_config: tuple[str, ...] = ()
    server_name: str = "tritium"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json", "default", "ISO8601"] = "text"
    log_verbose: Natural = 0
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_file: str = ""
