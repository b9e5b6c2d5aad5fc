"""How the gRPC port talks below its messages: keep-alive, compression, TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from tritium.errors import invalid
from tritium.settings import ServerSettings

_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}
_COMPRESSION = "grpc.default_compression_level"
# gRPC's own word for "never", in milliseconds and pings.
_NEVER = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Transport:
    """What a gRPC server is made with.

    Attributes:
        options: arguments of the channel (github.com/grpc/grpc, include/grpc/impl/channel_arg_names.h).
        credentials: None for a port without TLS.
        core: let gRPC's own package serve the port, whatever it is.
    """

    options: tuple[tuple[str, int], ...] = (
        # Two servers must not share a port unnoticed.
        ("grpc.so_reuseport", 0),
        # A client whose machine went away is noticed, and its requests end, after these two.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    )
    credentials: grpc.ServerCredentials | None = None
    core: bool = False

    @property
    def plain(self) -> bool:
        """Whether our own server does it: no TLS, and answers as they are."""
        return not self.core and self.credentials is None and all(name != _COMPRESSION for name, _ in self.options)


def transport(settings: ServerSettings) -> Transport:
    """What the settings of an operator ask for.

    Raises:
        TritiumError: INVALID_ARGUMENT when a file of TLS is missing.
    """
    s = settings
    options = {
        "grpc.so_reuseport": int(s.reuse_grpc_port),
        "grpc.keepalive_time_ms": s.grpc_keepalive_time or _NEVER,
        "grpc.keepalive_timeout_ms": s.grpc_keepalive_timeout,
        "grpc.keepalive_permit_without_calls": int(s.grpc_keepalive_permit_without_calls),
        "grpc.http2.max_pings_without_data": s.grpc_http2_max_pings_without_data,
        "grpc.http2.min_ping_interval_without_data_ms": s.grpc_http2_min_recv_ping_interval_without_data,
        "grpc.http2.max_ping_strikes": s.grpc_http2_max_ping_strikes,
        "grpc.max_connection_age_ms": s.grpc_max_connection_age or _NEVER,
        "grpc.max_connection_age_grace_ms": s.grpc_max_connection_age_grace or _NEVER,
    }
    level = _LEVELS[s.grpc_infer_response_compression_level]
    if level:
        options[_COMPRESSION] = level
    return Transport(tuple(options.items()), _credentials(settings), s.grpc_core)


def _credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    mutual = settings.grpc_use_ssl_mutual
    if not (settings.grpc_use_ssl or mutual):
        return None
    certificate = _read("grpc_server_cert", settings.grpc_server_cert)
    key = _read("grpc_server_key", settings.grpc_server_key)
    root = _read("grpc_root_cert", settings.grpc_root_cert) if mutual or settings.grpc_root_cert else None
    _check(settings)
    return grpc.ssl_server_credentials([(key, certificate)], root, mutual)


def _check(settings: ServerSettings) -> None:
    """Refuses files that make no TLS; gRPC itself would only say that it cannot listen."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    cert, key, root = settings.grpc_server_cert, settings.grpc_server_key, settings.grpc_root_cert
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise invalid(
            f"--grpc-server-cert {cert} and --grpc-server-key {key} are no certificate and its key (PEM): "
            f"{error.reason or error}",
            param="grpc_server_cert",
        ) from None
    if root:
        try:
            context.load_verify_locations(root)
        except ssl.SSLError as error:
            text = f"--grpc-root-cert {root} holds no certificates (PEM): {error.reason or error}"
            raise invalid(text, param="grpc_root_cert") from None


def _read(name: str, path: str) -> bytes:
    option = "--" + name.replace("_", "-")
    if not path:
        raise invalid(f"TLS on the gRPC port wants {option} FILE", param=name)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise invalid(f"{option} {path}: {error.strerror}", param=name) from None
