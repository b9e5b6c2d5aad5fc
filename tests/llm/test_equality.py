"""The equality grid: what a request is answered does not depend on its company, on chunks, hits or preemption.

Deterministic mode is held to equal tokens and bit-equal log-probabilities. The default mode in float32 is held
to equal tokens up to the first place where the reference's two best logits are within ``TOLERANCE``; from there
on the reference's tokens are forced and the comparison goes on. No more than 2 % of the places may need that.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.llm.equality import (
    MAX_LENGTH,
    ROWS,
    TOLERANCE,
    WHOLE,
    Loop,
    Output,
    Pushing,
    Tally,
    Way,
    after,
    greedy,
    prompt,
    request,
    workload,
)
from tests.tiny import VOCAB, make_checkpoint
from tritium.llm.config import EngineConfig
from tritium.llm.kernels import ops
from tritium.llm.runner.ranks import RankGroup
from tritium.llm.types import FinishReason, GenerateRequest, TokenLogprob

CACHE_TOKENS = 2560
# Room for the longest request and little more: the others wait, and crowd each other out.
FEW_TOKENS = 128
FAMILIES = ("llama", "mistral", "qwen3")  # mistral's window of 12 tokens is shorter than most contexts
# Blocks of 4 tokens make preemption come by itself; 16 is what engines use.
MODES = {"float32": 16, "bfloat16": 4}


class Bench:
    """A loaded model and what each request of the workload is answered when it is alone."""

    def __init__(self, folder: Path, family: str, dtype: str, block: int, deterministic: bool) -> None:
        path = make_checkpoint(folder / family, family)
        config = EngineConfig(
            model=str(path),
            dtype=dtype,
            device="cpu",
            block_size=block,
            max_rows=ROWS,
            max_length=MAX_LENGTH,
            num_blocks=CACHE_TOKENS // block,
            deterministic=deterministic,
            threads=1,
        )
        self.block = block
        self.ranks = RankGroup(config)
        self.budget = self.ranks.load().budget
        self.requests = workload()
        self.alone = {one.id: self.run([one], Way())[one.id] for one in self.requests}

    def run(self, requests: list[GenerateRequest], way: Way) -> dict[str, Output]:
        return self.loop(way).run(requests)

    def loop(self, way: Way) -> Loop:
        return Loop(self.ranks, self.budget, way)

    @property
    def few(self) -> int:
        return FEW_TOKENS // self.block

    def ways(self) -> list[Way]:
        """Chunks x prefix cache x preemption, and both depths of steps in flight with each value of those."""
        found = []
        for (i, chunk), prefix, crowded in product(enumerate((16, 64, WHOLE)), (False, True), (False, True)):
            found.append(Way(chunk, prefix, self.few if crowded else None, 1 + (i + prefix + crowded) % 2, crowded))
        if self.block == 4:
            found += [Way(64, prefix, self.few, 2) for prefix in (False, True)]
        return found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    ops.choose("cpu", False)


@pytest.fixture(scope="module", params=product(FAMILIES, MODES), ids="-".join)
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    family, dtype = request.param
    return Bench(tmp_path_factory.mktemp("exact"), family, dtype, MODES[dtype], True)


@pytest.fixture(scope="module", params=FAMILIES)
def usual(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("usual"), request.param, "float32", 16, False)


def assert_own_answers(outputs: dict[str, Output]) -> None:
    """Nobody got the answer to another prompt, and nobody what is no answer."""
    assert all(0 <= token < VOCAB for output in outputs.values() for token in output.tokens)
    assert len({tuple(output.tokens) for output in outputs.values()}) == len(outputs)


def assert_same(expected: Output, found: Output, where: object) -> None:
    assert found.tokens == expected.tokens, where
    assert found.logprobs == expected.logprobs, where
    assert found.finish is expected.finish, where


def test_workload(exact: Bench) -> None:
    """It tells requests apart, and both ends and all three counts of log-probabilities are in it."""
    assert_own_answers(exact.alone)
    assert {output.finish for output in exact.alone.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert {len(output.logprobs[0].top) for output in exact.alone.values()} == {1, 2, 3}
    assert sum(len(output.tokens) for output in exact.alone.values()) > 250


def test_in_company(exact: Bench) -> None:
    """Alone or with 15 others: the same tokens and log-probabilities, whatever the settings."""
    for way in exact.ways():
        loop = exact.loop(way)
        found = loop.run(exact.requests)
        assert_own_answers(found)
        for name, output in exact.alone.items():
            assert_same(output, found[name], (name, way))
        assert loop.most_in_flight == way.in_flight
        if way.pushed:
            long = [output for output in found.values() if len(output.tokens) > 3 * Pushing.EVERY]
            assert min(output.preemptions for output in long) >= 3
        elif way.num_blocks:
            assert sum(output.preemptions for output in found.values()) >= 4


def hits(bench: Bench) -> Iterator[tuple[GenerateRequest, Output, Output]]:
    """Requests cold and with a hit, which ends at each place in a block: (request, cold, hit)."""
    block = bench.block
    warm = bench.loop(Way(16, prefix_cache=True))
    tokens = prompt(500, 3 * block)
    warm.run([request(0, tokens)])
    asked = [request(length % 2, tokens[:length]) for length in range(2 * block, 3 * block + 1)]
    # One that leaves the known path within a block, and has more to compute than fits in a step.
    asked += [request(n, [*tokens[: 2 * block - 1], *prompt(501 + n, 37)]) for n in (0, 1)]
    for one in asked:
        cold = bench.run([one], Way())[one.id]
        hit = warm.run([one])[one.id]
        assert (cold.cached > 0, hit.cached >= block) == (False, True)
        yield one, cold, hit
    # By now its own tokens are known as well.
    hit = warm.run([one])[one.id]
    assert hit.cached == (len(one.tokens) - 1) // block * block
    yield one, cold, hit


def test_prefix_hits(exact: Bench) -> None:
    for one, cold, hit in hits(exact):
        assert_same(cold, hit, len(one.tokens))


def settle(bench: Bench, tally: Tally, one: GenerateRequest, expected: Output, found: Output, way: Way) -> None:
    """Compares by the rule; where two runs part, goes on with the reference's tokens forced."""
    place = tally.compare(one, expected, found)
    while place is not None and (rest := after(one, expected, place)):
        one, expected = rest
        place = tally.compare(one, expected, bench.run([one], way)[one.id])


def test_default_mode(usual: Bench, record_testsuite_property) -> None:
    """Other settings, and other kernels than the reference's, which add in another order."""
    ops.use("torch")
    tally = Tally()
    for way in (way for way in usual.ways() if way.in_flight == 2):
        found = usual.run(usual.requests, way)
        assert_own_answers(found)
        for one in usual.requests:
            settle(usual, tally, one, usual.alone[one.id], found[one.id], way)
    for one, cold, hit in hits(usual):
        settle(usual, tally, one, cold, hit, Way())
    print(tally)
    record_testsuite_property("equality_rule_used", f"{tally.ties + tally.draws} of {tally.positions}")
    tally.check()


def test_rule() -> None:
    """Parting is allowed where the reference was undecided, only there, and not often."""
    one = GenerateRequest(id="r", tokens=[1], params=greedy(0), arrived_ns=0)

    def output(*entries: tuple[int, float, float]) -> Output:
        logprobs = [TokenLogprob(t, best, [(t, best), (t + 1, second)]) for t, best, second in entries]
        return Output([t for t, _, _ in entries], logprobs, FinishReason.LENGTH)

    clear, close, last = (5, -0.1, -3.0), (7, -0.7, -0.7 - TOLERANCE / 2), (9, -0.1, -3.0)
    tally = Tally()
    assert tally.compare(one, output(clear, close), output(clear, close)) is None
    assert tally.compare(one, output(clear, close, last), output(clear, (8, -0.7, -0.7))) == 1
    assert (tally.positions, tally.ties) == (4, 1)
    forced = after(one, output(clear, close, last), 1)
    assert forced is not None
    assert (forced[0].tokens, forced[0].params.max_tokens, forced[1].tokens) == ([1, 5, 7], 1, [9])
    with pytest.raises(AssertionError, match="the gap is"):
        Tally().compare(one, output(clear), output((6, -0.1, -3.0)))
    with pytest.raises(AssertionError, match=r"r\[0\]"):
        Tally().compare(one, output(clear), output((5, -0.2, -3.0)))
    with pytest.raises(AssertionError):
        tally.check()
