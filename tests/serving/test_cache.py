from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.executors import collect, config_of, request
from tests.serving.fakes import ECHO, Echo, write_model
from tests.serving.fakes import request as echo_request
from tests.serving.support import serving, touch
from tritium.backends.base import Timing
from tritium.errors import Code, TritiumError
from tritium.serving.cache import ENTRY_BYTES, LocalCache, Memory, key_of, parse_cache_config, salt_of
from tritium.types import InferRequest, InferResponse, RequestedOutput, SequenceRef, Tensor


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), max_size=60))
def test_the_cache_never_exceeds_its_size_and_forgets_the_oldest(puts: list[tuple[int, int]]):
    limit = 3 * ENTRY_BYTES

    async def run() -> None:
        cache, model = LocalCache(limit), {}
        for number, size in puts:
            key, entry = bytes([number]), bytes(size)
            await cache.put(key, entry)
            model.pop(key, None)
            if size + ENTRY_BYTES <= limit:
                model[key] = entry
            while sum(len(e) + ENTRY_BYTES for e in model.values()) > limit:
                model.pop(next(iter(model)))
            assert cache.stats.entries == len(model)
            assert 0 <= cache.stats.used_ratio <= 1
        for number in range(6):
            assert await cache.get(bytes([number])) == model.get(bytes([number]))
        assert (cache.stats.hits, cache.stats.misses) == (len(model), 6 - len(model))
        await cache.close()
        assert cache.stats.entries == 0

    asyncio.run(run())


async def test_what_is_asked_for_stays():
    cache = LocalCache(2 * (ENTRY_BYTES + 1))
    await cache.put(b"a", b"1")
    await cache.put(b"b", b"2")
    assert await cache.get(b"a") == b"1"
    await cache.put(b"c", b"3")
    assert [await cache.get(k) for k in (b"a", b"b", b"c")] == [b"1", None, b"3"]
    assert cache.stats.evictions == 1


def test_what_a_key_says():
    base = key_of(request(1, 2, id="a"), b"s")
    same = request(1, 2, id="b", parameters={"x": 1}, outputs=[RequestedOutput("OUT")])
    assert key_of(same, b"s") == base
    others = [request(2, 2), request(1, 3)]
    renamed = request(1, 2)
    renamed.inputs = {"OTHER": renamed.inputs["IN"]}
    reshaped = request(1, 2)
    reshaped.inputs["IN"] = Tensor("IN", reshaped.inputs["IN"].dtype, (2, 1), reshaped.inputs["IN"].data)
    found = {key_of(r, b"s") for r in (*others, renamed, reshaped)} | {base, key_of(request(1, 2), b"t")}
    assert len(found) == 6


def test_the_order_of_inputs_does_not_matter():
    one, other = request(), request()
    extra = Tensor.from_strings("WORD", [b"a"])
    one.inputs = {"IN": one.inputs["IN"], "WORD": extra}
    other.inputs = {"WORD": extra, "IN": other.inputs["IN"]}
    assert key_of(one, b"") == key_of(other, b"")


class Source:
    def __init__(self, error: TritiumError | None = None) -> None:
        self.calls = 0
        self.error = error

    async def __call__(self, one: InferRequest) -> AsyncIterator[InferResponse]:
        self.calls += 1
        names = [o.name for o in one.outputs] or ["A", "B"]
        outputs = [Tensor.from_strings(name, [name.encode()]) for name in names]
        yield InferResponse("", "", "", outputs, {"n": self.calls}, error=self.error)


async def ask(memory: Memory, source: Source, *outputs: str) -> tuple[InferResponse, Timing]:
    one, timing = request(), Timing()
    one.outputs = [RequestedOutput(name) for name in outputs]
    (answer,) = await collect(memory.answers(one, timing, lambda: source(one)))
    return answer, timing


def memory() -> Memory:
    return Memory(LocalCache(10_000), ["A", "B"], b"")


async def test_a_known_answer_is_given_again():
    cache, source = memory(), Source()
    first, timing = await ask(cache, source)
    assert (timing.cache, timing.cache_ns > 0) == ("miss", True)
    second, timing = await ask(cache, source)
    assert (timing.cache, timing.queue_ns > 0) == ("hit", True)
    assert source.calls == 1
    assert [bytes(t.data) for t in second.outputs] == [bytes(t.data) for t in first.outputs]
    assert (second.parameters, second.final) == ({"n": 1}, True)


async def test_fewer_outputs_come_from_an_answer_with_more_and_never_the_other_way_round():
    cache, source = memory(), Source()
    await ask(cache, source, "A")
    answer, timing = await ask(cache, source, "B")
    assert (timing.cache, [t.name for t in answer.outputs]) == ("miss", ["B"])
    answer, timing = await ask(cache, source)
    assert (timing.cache, [t.name for t in answer.outputs]) == ("miss", ["A", "B"])
    for outputs in (("A",), ("B",), ("A", "B"), ()):
        answer, timing = await ask(cache, source, *outputs)
        assert (timing.cache, [t.name for t in answer.outputs]) == ("hit", list(outputs or ("A", "B")))


async def test_errors_are_not_kept_and_broken_entries_are_none():
    cache = memory()
    bad, good = Source(TritiumError(Code.INTERNAL, "x")), Source()
    await ask(cache, bad)
    assert (await ask(cache, good))[1].cache == "miss"
    broken = Memory(store := LocalCache(1000), ["A", "B"], b"")
    await store.put(key_of(request(), b""), b"\xc1 nothing")
    assert (await ask(broken, good))[1].cache == "miss"


def test_the_salt_tells_loads_apart_unless_the_cache_is_shared():
    local, config = LocalCache(1), config_of(ECHO)
    assert salt_of(local, config, "a") != salt_of(local, config, "a")
    local.shared = True  # type: ignore[misc]
    assert salt_of(local, config, "a") == salt_of(local, config, "a")
    assert salt_of(local, config, "a") != salt_of(local, config, "b")
    assert salt_of(local, config, "a") != salt_of(local, config_of(ECHO, "other"), "a")
    # Nothing is known of the files: nothing is shared.
    assert salt_of(local, config, "") != salt_of(local, config, "")


def test_the_option():
    assert parse_cache_config([]) is None
    assert isinstance(parse_cache_config(["local,size=4096"]), LocalCache)
    for text in ("local", "disk,size=1", "local,size=-1", "local,host=1", "local,size=0", "local,size=1,host=2"):
        with pytest.raises(TritiumError, match=r"--cache-config is|expected a positive number"):
            parse_cache_config([text])
    with pytest.raises(TritiumError, match="names the caches local and redis"):
        parse_cache_config(["local,size=4096", "redis,host=a,port=1"])


async def test_a_model_with_a_cache(repository: Path):
    write_model(repository, "echo", ECHO + "response_cache { enable: true }")
    async with serving(repository, control="explicit", load_models=["echo"], cache=LocalCache(100_000)) as server:
        for id in ("a", "b"):
            assert (await server.infer(echo_request(id=id))).id == id
        assert len(Echo.made[0].seen) == 1
        (counted,) = server.statistics("echo")
        assert (counted.success.count, counted.inference_count) == (2, 1)
        assert (counted.cache_hit.count, counted.cache_miss.count) == (1, 1)
        touch(repository)
        await server.load("echo")
        await server.infer(echo_request())
        assert len(Echo.made[1].seen) == 1


async def test_requests_of_a_sequence_are_never_answered_from_it(repository: Path):
    write_model(repository, "echo", ECHO + "response_cache { enable: true }")
    async with serving(repository, cache=LocalCache(1 << 20)) as server:
        for _ in range(2):
            await server.infer(replace(echo_request(), sequence=SequenceRef(7, start=True)))
        assert len(Echo.made[0].seen) == 2
