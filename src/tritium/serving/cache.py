"""Response cache: answers that were given before to the same inputs.

What the key says: model, version, and each input's name, type, shape and bytes. Request ids, parameters and the
requested outputs are not in it, as in Triton. An entry is bytes, so that it may lie in another process.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tritium.backends.base import LoadContext, Timing
from tritium.backends.config import ModelConfig, SequenceBatching
from tritium.errors import TritiumError, invalid
from tritium.observability import logs
from tritium.serving.changes import essence as same_answers
from tritium.serving.closing import closing
from tritium.settings import shown
from tritium.types import DType, InferRequest, InferResponse, Parameter, Tensor

# What an entry costs beside its bytes: key, links, objects.
ENTRY_BYTES = 200

_log = logs.get(__name__)


@dataclass(slots=True)
class CacheStats:
    """What happened to a cache; durations in nanoseconds. ``used_ratio`` is 0 where it is not known."""

    entries: int = 0
    lookups: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    lookup_ns: int = 0
    insertion_ns: int = 0
    used_ratio: float = 0.0


class Cache(Protocol):
    """Where entries lie. ``shared``: other servers use it too, so keys must mean the same everywhere."""

    shared: bool
    stats: CacheStats

    async def get(self, key: bytes) -> bytes | memoryview | None:
        """The entry, if there is one; a cache that is out of reach has none."""
        ...

    async def put(self, key: bytes, entry: bytes) -> None:
        """Keeps an entry, or not."""
        ...

    async def close(self) -> None:
        """Gives up connections."""
        ...


class LocalCache:
    """Entries in this process; those that were not asked for longest leave first.

    Args:
        size_bytes: most that all entries take.
    """

    shared = False

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 1:
            raise invalid(f"size of the response cache is {size_bytes}, expected a positive number", param="size")
        self.stats = CacheStats()
        self._size_bytes = size_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()

    async def get(self, key: bytes) -> bytes | None:
        """The entry, which is the youngest then."""
        begin_ns = time.monotonic_ns()
        stats = self.stats
        stats.lookups += 1
        entry = self._entries.get(key)
        if entry is None:
            stats.misses += 1
        else:
            stats.hits += 1
            self._entries.move_to_end(key)
        stats.lookup_ns += time.monotonic_ns() - begin_ns
        return entry

    async def put(self, key: bytes, entry: bytes) -> None:
        """Keeps an entry if it is not larger than all the room there is; others make room for it."""
        begin_ns = time.monotonic_ns()
        size = len(entry) + ENTRY_BYTES
        self._forget(key)
        if size <= self._size_bytes:
            while self._used_bytes + size > self._size_bytes:
                self._forget(next(iter(self._entries)))
                self.stats.evictions += 1
            self._entries[key] = entry
            self._used_bytes += size
        self.stats.entries = len(self._entries)
        self.stats.used_ratio = self._used_bytes / self._size_bytes
        self.stats.insertion_ns += time.monotonic_ns() - begin_ns

    async def close(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self._used_bytes = 0
        self.stats.entries, self.stats.used_ratio = 0, 0.0

    def _forget(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_bytes -= len(entry) + ENTRY_BYTES


def parse_cache_config(options: Sequence[str]) -> Cache | None:
    """The cache that ``--cache-config`` asks for; None without any.

    Args:
        options: each ``<cache>,<key>=<value>``, further keys behind commas; the caches are ``local``, with
            ``size``, and ``redis``, with the keys of ``redis_cache.RedisSettings``.

    Raises:
        TritiumError: INVALID_ARGUMENT quoting what cannot be read; UNAVAILABLE without the package ``redis``.
    """
    given: dict[str, dict[str, str]] = {}
    for text in options:
        name, _, pairs = text.partition(",")
        if name not in ("local", "redis") or "=" not in pairs:
            raise invalid(
                f"--cache-config is '{shown('cache_config', (text,))[0]}', expected local,size=BYTES or "
                "redis,host=HOST,port=PORT",
                param="cache_config",
            )
        # A comma is part of a value unless a key follows.
        for pair in re.split(r",(?=[a-z_]+=)", pairs):
            key, _, value = pair.partition("=")
            given.setdefault(name, {})[key] = value
    if len(given) > 1:
        raise invalid("--cache-config names the caches local and redis, expected one of them", param="cache_config")
    if "redis" in given:
        from tritium.serving.redis_cache import RedisCache, read_settings

        return RedisCache(read_settings(given["redis"]))
    return _local(given["local"]) if given else None


def _local(given: Mapping[str, str]) -> LocalCache:
    size = given.get("size", "")
    if set(given) != {"size"} or not (size.isascii() and size.isdecimal()):
        said = ",".join(f"{key}={value}" for key, value in given.items())
        raise invalid(f"--cache-config is 'local,{said}', expected local,size=BYTES", param="cache_config")
    return LocalCache(int(size))


class _Tensor(msgspec.Struct, array_like=True, gc=False):
    name: str
    dtype: DType
    shape: tuple[int, ...]
    data: memoryview


class _Entry(msgspec.Struct, array_like=True, gc=False):
    asked: list[str]
    outputs: list[_Tensor]
    parameters: dict[str, Parameter]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Entry)


def key_of(request: InferRequest, salt: bytes) -> bytes:
    """The key of a request.

    Args:
        salt: tells one load of a model from the next: another file may answer otherwise.
    """
    digest = hashlib.blake2b(salt, digest_size=16)
    for part in (request.model, request.version):
        _add(digest, part.encode())
    for name in sorted(request.inputs):
        tensor = request.inputs[name]
        _add(digest, f"{name}\0{tensor.dtype.value}\0{tensor.shape}".encode())
        digest.update(tensor.data.nbytes.to_bytes(8, "little"))
        digest.update(tensor.data)
    return digest.digest()


def _add(digest: hashlib.blake2b, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def pack(response: InferResponse, asked: Sequence[str]) -> bytes:
    """The entry for an answer; its tensors are copied, so buffers of a backend are free.

    Args:
        asked: names of the outputs that the request wanted; empty for all.
    """
    outputs = [_Tensor(tensor.name, tensor.dtype, tensor.shape, tensor.data) for tensor in response.outputs]
    return _encoder.encode(_Entry(list(asked), outputs, response.parameters))


def unpack(entry: bytes | memoryview, wanted: Sequence[str], *, doubt: bool = False) -> InferResponse | None:
    """The answer in an entry; None when it may lack an output that is wanted, or cannot be read.

    Args:
        wanted: names of outputs; the others are left out. Empty for all.
        doubt: somebody else may have written it: tensors whose bytes do not fit their shapes are none.
    """
    try:
        found = _decoder.decode(entry)
    except (msgspec.DecodeError, ValueError):
        return None
    if doubt and not all(map(_fits, found.outputs)):
        return None
    if found.asked and not (wanted and set(wanted) <= set(found.asked)):
        return None
    outputs = [
        Tensor(tensor.name, tensor.dtype, tensor.shape, tensor.data)
        for tensor in found.outputs
        if not wanted or tensor.name in wanted
    ]
    return InferResponse("", "", "", outputs, found.parameters)


def _fits(tensor: _Tensor) -> bool:
    if any(size < 0 for size in tensor.shape):
        return False
    if tensor.dtype is not DType.BYTES:
        return math.prod(tensor.shape) * tensor.dtype.numpy.itemsize == tensor.data.nbytes
    try:
        Tensor(tensor.name, tensor.dtype, tensor.shape, tensor.data).strings()
    except TritiumError:
        return False
    return True


def salt_of(cache: Cache, config: ModelConfig, content: str) -> bytes:
    """What makes the keys of one load of a model its own.

    A cache of this process is told every load apart. In a shared one, models with equal configurations and files
    are taken for the same; where nothing is known of the files, it shares nothing.

    Args:
        content: a digest of the files that the model was loaded from.
    """
    if not cache.shared or not content:
        return os.urandom(16)
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, same_answers(config.source))
    _add(digest, content.encode())
    return digest.digest()


class Memory:
    """The response cache as one load of a model uses it.

    Args:
        outputs: names of all outputs of the model.
        salt: of the keys.
    """

    def __init__(self, cache: Cache, outputs: Sequence[str], salt: bytes) -> None:
        self._cache = cache
        self._outputs = set(outputs)
        self._salt = salt

    async def answers(
        self, request: InferRequest, timing: Timing, ask: Callable[[], AsyncIterator[InferResponse]]
    ) -> AsyncGenerator[InferResponse]:
        """The answer that is known, or the fresh one, which is kept; ``timing`` says which and what it took.

        Args:
            ask: asks the backend, which is not done when the answer is known.
        """
        begin_ns = time.monotonic_ns()
        key = key_of(request, self._salt)
        entry = await self._cache.get(key)
        wanted = self._wanted(request)
        known = None if entry is None else unpack(entry, wanted, doubt=self._cache.shared)
        timing.cache = "miss" if known is None else "hit"
        timing.cache_ns = time.monotonic_ns() - begin_ns
        if known is not None:
            timing.queue_ns = max(1, begin_ns - request.arrived_ns)
            yield known
            return
        async with closing(ask()) as fresh:
            async for answer in fresh:
                if answer.final and answer.error is None:
                    begin_ns = time.monotonic_ns()
                    await self._cache.put(key, pack(answer, wanted))
                    timing.cache_ns += time.monotonic_ns() - begin_ns
                yield answer

    def _wanted(self, request: InferRequest) -> list[str]:
        names = {output.name for output in request.outputs}
        return [] if names >= self._outputs else sorted(names)


def remember(cache: Cache | None, config: ModelConfig, context: LoadContext) -> Memory | None:
    """The response cache for a load of a model; None where it is not to have one."""
    if not config.response_cache or cache is None:
        return None
    if isinstance(config.batching, SequenceBatching):
        _log.warning("response cache is off: a sequence's answers depend on what came before", model=config.name)
        return None
    return Memory(cache, [spec.name for spec in config.outputs], salt_of(cache, config, context.content))
