"""Who may call what: groups of APIs that want a header with a value (``--http-restricted-api`` and its gRPC twin)."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Literal, cast, get_args

from tritium.errors import Code, TritiumError, invalid

Api = Literal[
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
]
APIS: tuple[Api, ...] = get_args(Api)
GRPC_PREFIX = "triton-grpc-protocol-"


class Restrictions:
    """The header and the value that an API wants.

    Args:
        option: the flag that the texts come from, for errors.
        given: ``API,API:KEY=VALUE`` each.
        prefix: what stands before KEY in the name of the header.

    Raises:
        TritiumError: INVALID_ARGUMENT for a text of another form, an API that there is not, or one given twice.
    """

    def __init__(self, option: str, given: Sequence[str] = (), prefix: str = "") -> None:
        self._wanted: dict[Api, tuple[str, bytes]] = {}
        for text in given:
            apis, colon, rest = text.partition(":")
            key, equals, value = rest.partition("=")
            if not (colon and equals and key and apis):
                # The text holds a secret, so it is not shown.
                raise invalid(f"{option}: expected APIS:KEY=VALUE", param=option.lstrip("-"))
            for name in apis.split(","):
                if name not in APIS:
                    raise invalid(f"{option}: there is no API '{name}', expected one of {', '.join(APIS)}")
                if name in self._wanted:
                    raise invalid(f"{option}: API '{name}' is restricted twice")
                self._wanted[cast(Api, name)] = ((prefix + key).lower(), value.encode())

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def refusal(self, api: Api, header: Callable[[str], str | bytes | None]) -> str | None:
        """The name of the header that is missing or has another value; None when the call is allowed.

        Args:
            header: the value of a header by its name in lower case.
        """
        wanted = self._wanted.get(api)
        if wanted is None:
            return None
        name, expected = wanted
        value = header(name)
        found = value.encode("latin-1", "replace") if isinstance(value, str) else value or b""
        return None if hmac.compare_digest(found, expected) else name


def http_refusal(name: str) -> TritiumError:
    """The error of a call over HTTP without that header."""
    return TritiumError(Code.PERMISSION_DENIED, f"This API is restricted, expecting header '{name}'")


def grpc_refusal(name: str) -> TritiumError:
    """The error of a call over gRPC without that metadata (UNAVAILABLE, as Triton answers)."""
    return TritiumError(Code.UNAVAILABLE, f"This protocol is restricted, expecting header '{name}'")
