"""The one error type of Tritium, the one table from its codes to protocol statuses, and commands that mend things."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from enum import Enum


class Code(Enum):
    """What went wrong, by the names that gRPC gives its status codes."""

    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    UNAUTHENTICATED = "UNAUTHENTICATED"


@dataclass(frozen=True, slots=True)
class Status:
    """How one code looks on each protocol.

    Attributes:
        v2: HTTP status on the KServe v2 routes, as the recorded Triton server answers.
        v1: HTTP status on the OpenAI routes.
        grpc: number of the gRPC status code.
        kind: ``error.type`` of an OpenAI error body.
    """

    v2: int
    v1: int
    grpc: int
    kind: str


STATUS: dict[Code, Status] = {
    Code.CANCELLED: Status(400, 499, 1, "cancelled"),
    Code.UNKNOWN: Status(400, 500, 2, "server_error"),
    Code.INVALID_ARGUMENT: Status(400, 400, 3, "invalid_request_error"),
    Code.DEADLINE_EXCEEDED: Status(503, 504, 4, "timeout_error"),
    Code.NOT_FOUND: Status(404, 404, 5, "invalid_request_error"),
    Code.ALREADY_EXISTS: Status(400, 409, 6, "invalid_request_error"),
    Code.PERMISSION_DENIED: Status(403, 403, 7, "permission_error"),
    Code.RESOURCE_EXHAUSTED: Status(503, 429, 8, "rate_limit_error"),
    Code.UNIMPLEMENTED: Status(501, 501, 12, "invalid_request_error"),
    Code.INTERNAL: Status(500, 500, 13, "server_error"),
    Code.UNAVAILABLE: Status(503, 503, 14, "overloaded_error"),
    Code.UNAUTHENTICATED: Status(401, 401, 16, "authentication_error"),
}


# ``TritiumError.reason`` where what answers a request died under it: clients may try again (UNAVAILABLE), but nobody
# has refused the request, and statistics count it as a failure of the backend.
LOST = "backend_lost"


class TritiumError(Exception):
    """An error that a user may read.

    Args:
        code: what kind of error; decides the status on each protocol.
        message: names the field, the value and what was expected; holds no path of the server
            that the user did not send, no address and nothing of another user.
        param: the field of the request that is wrong, when there is one.
        reason: a stable word for programs (``error.code`` of an OpenAI body).
        retry_after_s: when the same request may be tried again, in seconds.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        param: str | None = None,
        reason: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.reason = reason
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> Status:
        """The protocol statuses of this error's code."""
        return STATUS[self.code]


def invalid(message: str, *, param: str | None = None, reason: str | None = None) -> TritiumError:
    """An ``INVALID_ARGUMENT`` error, by far the most common one."""
    return TritiumError(Code.INVALID_ARGUMENT, message, param=param, reason=reason)


def python_command(*arguments: str) -> str:
    """A line for a shell that runs this very interpreter: a bare ``python`` or ``pip`` may belong to another one."""
    return shlex.join([sys.executable or "python", *arguments])


def pip_install(*what: str) -> str:
    """The line that installs packages where this process would find them."""
    return python_command("-m", "pip", "install", *what)
