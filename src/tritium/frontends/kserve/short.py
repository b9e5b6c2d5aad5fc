"""The short way of ``infer`` over HTTP: from the bytes of a request to those of its answer, without ASGI.

What clients send is alike from request to request: the same head, the same JSON with other tensors behind it. So
both are read and checked once, kept by their bytes, and looked up from then on. Whatever is not plain (another
coding, an error in the request, a trace, a restricted API) is left to ``KserveHttp``, which answers all requests
and in the same way; tests/frontends/kserve/test_short.py holds the two equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple

import orjson

from tritium.backends.config import ModelConfig
from tritium.errors import TritiumError
from tritium.frontends.asgi import JSON, TEXT, error_headers
from tritium.frontends.kserve import codings, json_codec
from tritium.frontends.kserve.forms import MAX_KEPT, Form, form_of
from tritium.frontends.kserve.generate import write_error
from tritium.frontends.kserve.json_codec import HttpInfer
from tritium.frontends.kserve.shared import Shared
from tritium.types import InferResponse

if TYPE_CHECKING:
    from tritium.serving.server import Server

MAX_HEAD_BYTES = 4 << 10
MAX_JSON_BYTES = 4 << 10

_REQUEST_LINE = re.compile(rb"POST /v2/models/([!-$&-.0-\x3e@-~]+)(?:/versions/([0-9]+))?/infer HTTP/1\.1").fullmatch
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\x21-\xff\t ]*)").fullmatch
_LENGTH = re.compile(rb"[0-9]{1,15}").fullmatch
# Headers that change more than this way knows of.
_LONG_WAY = frozenset(
    (
        b"transfer-encoding",
        b"content-encoding",
        b"expect",
        b"upgrade",
        b"x-request-id",
        b"te",
        b"trailer",
        b"connection",
    )
)


class Head(NamedTuple):
    """The head of a request for ``infer``.

    Attributes:
        length: of the body, in bytes.
        json_size: the header ``Inference-Header-Content-Length``; None without it.
    """

    name: str
    version: str
    length: int
    json_size: str | None


def read_head(head: bytes) -> Head | None:
    """A head up to its empty line; None when it must take the long way."""
    line, *lines = head[:-4].split(b"\r\n")
    found = _REQUEST_LINE(line)
    if found is None:
        return None
    given: dict[bytes, bytes] = {}
    for one in lines:
        parsed = _HEADER(one)
        if parsed is None:
            return None
        name = parsed[1].lower()
        if name in _LONG_WAY or (name in given and name.endswith(b"content-length")):
            return None
        given.setdefault(name, parsed[2].rstrip(b" \t"))
    length = given.get(b"content-length", b"")
    if _LENGTH(length) is None or codings.choose(given.get(b"accept-encoding", b"").decode("latin-1")) is not None:
        return None
    json_size = given.get(b"inference-header-content-length")
    return Head(
        found[1].decode(),
        (found[2] or b"").decode(),
        int(length),
        None if json_size is None else json_size.decode("latin-1"),
    )


def _form(text: bytes, asked: HttpInfer, config: ModelConfig) -> Form | None:
    """The form of a request that was read; None when other requests with the same JSON may differ from it.

    Raises:
        TritiumError: it does not fit the model.
    """
    begins: list[int] = []
    at = 0
    for entry, tensor in zip(orjson.loads(text)["inputs"], asked.request.inputs.values(), strict=True):
        if "binary_data_size" not in entry.get("parameters", {}):
            return None
        begins.append(at)
        at += tensor.data.nbytes
    return form_of(asked, config, begins)


class Pending(NamedTuple):
    """A request that runs: what its answer is written with.

    Attributes:
        asked: as it was read; None when it has a form.
    """

    config: ModelConfig
    asked: HttpInfer | None
    form: Form | None


Answer = tuple[int, bytes, list[bytes | memoryview]]
Done = Callable[[Pending, "InferResponse | TritiumError"], None]


class ShortInfer:
    """The short way to all models of a server; one for all connections.

    Args:
        max_body_bytes: requests with larger bodies take the long way, to their refusal.
        closed: all requests do.
    """

    def __init__(self, server: Server, shared: Shared, max_body_bytes: int, *, closed: bool = False) -> None:
        self._server = server
        self._regions = shared.regions
        self._max_body_bytes = max_body_bytes
        self._heads: dict[bytes, Head | None] = {}
        self._forms: dict[tuple[str, str, int, bytes], Form] = {}
        # The operator may want something of headers.
        self.closed = closed or bool(shared.http_access) or shared.http_headers is not None

    def head(self, raw: bytes) -> Head | None:
        """The head of a request; None when it must take the long way."""
        try:
            found = self._heads[raw]
        except KeyError:
            found = None if len(raw) > MAX_HEAD_BYTES else read_head(raw)
            if found is not None and not 0 < found.length <= self._max_body_bytes:
                found = None
            if len(self._heads) >= MAX_KEPT:
                self._heads.clear()
            self._heads[raw] = found
        return None if found is None or self._server.draining else found

    def submit(self, head: Head, body: memoryview, done: Done) -> Callable[[], None] | None:
        """Starts a request.

        Args:
            done: called once with what ``write`` wants, perhaps before this returns.

        Returns:
            What cancels it; None when it must take the long way, and nothing has been done.

        Raises:
            TritiumError: it must take the long way, too.
        """
        arrived_ns = monotonic_ns()
        name, version, _, json_size = head
        model = self._server.model(name, version)
        if not model.direct or self._server.traces.samples(name):
            return None
        config = model.config
        form = None
        size = int(json_size) if json_size is not None and _LENGTH(json_size.encode("latin-1")) else 0
        if 0 < size <= min(len(body), MAX_JSON_BYTES):
            key = (name, version, len(body), bytes(body[:size]))
            form = self._forms.get(key)
            if form is None or form.config is not config:
                form = self._new_form(key, body, head, config, arrived_ns)
            if form is not None:
                request = form.request(name, version, body[size:], arrived_ns)
                return model.submit(request, partial(done, Pending(config, None, form)), form.rows)
        asked = json_codec.read(body, json_size, config, name, version, arrived_ns, self._regions)
        return model.submit(asked.request, partial(done, Pending(config, asked, None)))

    def _new_form(
        self, key: tuple[str, str, int, bytes], body: memoryview, head: Head, config: ModelConfig, arrived_ns: int
    ) -> Form | None:
        asked = json_codec.read(body, head.json_size, config, head.name, head.version, arrived_ns, self._regions)
        form = _form(key[3], asked, config)
        if form is not None:
            if len(self._forms) >= MAX_KEPT:
                self._forms.clear()
            self._forms[key] = form
        return form


def write(pending: Pending, answer: InferResponse | TritiumError) -> Answer:
    """The answer to a request.

    Returns:
        The status, the lines of the head (those of every answer apart) with the empty line, and the body in parts.
    """
    if isinstance(answer, TritiumError):
        return write_refusal(answer)
    form = pending.form
    try:
        if form is None or answer.parameters:
            asked = pending.asked or form.asked  # type: ignore[union-attr]
            parts, json_size = json_codec.write(asked, answer, pending.config)
            return 200, _head(parts, json_size), parts
        key = (answer.version, *[(t.name, t.dtype, t.shape, t.data.nbytes) for t in answer.outputs])
        known = form.answers.get(key)
        if known is None:
            parts, json_size = json_codec.write(form.asked, answer, pending.config)
            head = _head(parts, json_size)
            if len(parts) == 1 + sum(t.data.nbytes > 0 for t in answer.outputs):
                form.keep(key, (head, bytes(parts[0])))
            return 200, head, parts
    except TritiumError as error:
        return write_refusal(error, TEXT)
    head, text = known
    return 200, head, [text, *[t.data for t in answer.outputs if t.data.nbytes]]


def _head(parts: list[bytes | memoryview], json_size: int) -> bytes:
    length = sum(len(part) for part in parts)
    if json_size:
        return (
            b"content-length: %d\r\ncontent-type: application/octet-stream\r\n"
            b"inference-header-content-length: %d\r\n\r\n" % (length, json_size)
        )
    return b"content-length: %d\r\ncontent-type: application/json\r\n\r\n" % length


def write_refusal(error: TritiumError, content_type: bytes = JSON) -> Answer:
    """An error, as ``write`` gives an answer."""
    body = write_error(error)
    lines = [(b"content-length", str(len(body)).encode()), (b"content-type", content_type), *error_headers(error)]
    head = b"".join([b"%b: %b\r\n" % line for line in lines])
    return error.status.v2, head + b"\r\n", [body]
