"""An error as the status of a gRPC call."""

from __future__ import annotations

import math

from tritium.errors import TritiumError

# A status message travels as a header, and clients take 8 KiB of headers by default.
_MAX_MESSAGE = 4096


def status_of(error: TritiumError) -> tuple[int, str, tuple[tuple[str, str], ...]]:
    """The number of the status, its message and the trailing metadata."""
    trailing: tuple[tuple[str, str], ...] = ()
    if error.retry_after_s is not None:
        trailing = (("grpc-retry-pushback-ms", str(max(1, math.ceil(error.retry_after_s * 1000)))),)
    return error.status.grpc, _fitting(error.message), trailing


def _fitting(message: str) -> str:
    """As much of a message as a header takes, in which all but printable ASCII is escaped, three bytes for each."""
    size = 0
    for at, char in enumerate(message):
        size += 1 if " " <= char <= "~" else 3 * len(char.encode(errors="replace"))
        if size > _MAX_MESSAGE:
            return message[:at]
    return message
