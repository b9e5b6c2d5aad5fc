"""The order in which ``InferenceRequest.inputs()`` lists the inputs: that of Triton's hash tables.

Triton keeps the inputs of a request in a ``std::unordered_map``, and models that take ``inputs()[1]`` or answer in
the order of their inputs have been written against what comes out of it. So the same order is worked out here:
GNU's libstdc++, ``_Hash_bytes`` (64 bit MurmurHash2) and the insertion and growth of ``_Hashtable``.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

_MASK = (1 << 64) - 1
_FACTOR = 0xC6A4A7935BD1E995
_SEED = 0xC70F6907
# Sizes of the table: the first one, then about twice the last one each time.
_FIRST = 13
_PRIMES = (13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753)


@lru_cache(maxsize=1024)
def in_order(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names as a model sees them, given in the order of the request."""
    # Triton copies the table of what came into the table of what the model gets.
    return _through_table(_through_table(names))


def _through_table(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names as a table lists them into which they were put one after the other."""
    hashes = {name: _hash(name.encode()) for name in names}
    size = 1
    listed: list[str] = []
    for count, name in enumerate(hashes, 1):
        if size == 1 or count > size:
            size = _FIRST if size == 1 else _PRIMES[min(bisect_left(_PRIMES, 2 * size), len(_PRIMES) - 1)]
            before, listed = listed, []
            for other in before:
                _insert(listed, other, hashes, size)
        _insert(listed, name, hashes, size)
    return tuple(listed)


def _insert(listed: list[str], name: str, hashes: dict[str, int], size: int) -> None:
    """Puts a name in front of those of its bucket, or of all when the bucket is empty."""
    bucket = hashes[name] % size
    at = next((i for i, other in enumerate(listed) if hashes[other] % size == bucket), 0)
    listed.insert(at, name)


def _hash(data: bytes) -> int:
    found = _SEED ^ (len(data) * _FACTOR & _MASK)
    whole = len(data) & ~7
    for at in range(0, whole, 8):
        word = _mix(int.from_bytes(data[at : at + 8], "little") * _FACTOR & _MASK) * _FACTOR & _MASK
        found = (found ^ word) * _FACTOR & _MASK
    if len(data) & 7:
        found = (found ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _MASK
    return _mix(_mix(found) * _FACTOR & _MASK)


def _mix(value: int) -> int:
    return value ^ (value >> 47)
