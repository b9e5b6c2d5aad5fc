"""What the two protocols of the KServe front end share, and what the operator said about them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from tritium.errors import invalid
from tritium.frontends.access import GRPC_PREFIX, Restrictions
from tritium.frontends.kserve.shared_memory import Regions
from tritium.observability.log_settings import LogSettings

Pattern = re.Pattern[str]


def header_pattern(option: str, text: str) -> Pattern | None:
    """What names of headers must match, as a whole and in either case, to become parameters of a request.

    Raises:
        TritiumError: INVALID_ARGUMENT when it is no regular expression.
    """
    try:
        return re.compile(text, re.IGNORECASE) if text else None
    except re.error as error:
        raise invalid(f"{option}: '{text}' is not a regular expression: {error}", param=option.lstrip("-")) from None


def forwarded(pattern: Pattern | None, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The headers that become parameters."""
    if pattern is None:
        return {}
    return {name: value for name, value in headers if pattern.fullmatch(name)}


@dataclass(frozen=True, slots=True)
class Shared:
    """One for both front ends of a server.

    Attributes:
        logs: the log settings that clients may read and change; None where the process has others.
        http_headers, grpc_headers: names of headers that become parameters; None for none.
        http_access, grpc_access: APIs that want a header.
    """

    regions: Regions = field(default_factory=Regions)
    logs: LogSettings | None = None
    http_headers: Pattern | None = None
    grpc_headers: Pattern | None = None
    http_access: Restrictions = field(default_factory=lambda: Restrictions("--http-restricted-api"))
    grpc_access: Restrictions = field(
        default_factory=lambda: Restrictions("--grpc-restricted-protocol", prefix=GRPC_PREFIX)
    )
