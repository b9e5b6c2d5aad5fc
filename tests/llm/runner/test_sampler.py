"""The sampler against a plain per-row twin and transformers' processors, and what makes its draws repeatable."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tritium.llm.kernels import ops
from tritium.llm.kernels.sampling import Filters, weigh
from tritium.llm.runner.sampler import Draw, Sampler, best_of, uniforms
from tritium.llm.types import NewRow, SamplingParams

VOCAB = 97
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=["torch", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.use(request.param)
    yield request.param
    ops.choose(CPU, False)


def logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def filters(given: SamplingParams, uniform: list[float] | np.ndarray) -> Filters:
    rows = len(uniform)
    return Filters(
        torch.full((rows,), given.temperature),
        torch.full((rows,), given.top_k),
        torch.full((rows,), given.top_p, dtype=torch.float64),
        torch.full((rows,), given.min_p),
        torch.tensor(uniform, dtype=torch.float64),
    )


def params(**values) -> SamplingParams:
    return SamplingParams(**({"seed": 1} | values))


def run(sampler: Sampler, scores: Tensor, rows: list[int], lengths: list[int]) -> Draw:
    return sampler.sample(scores.clone(), np.array(rows), np.array(lengths))


def one(scores: Tensor, given: SamplingParams, tokens: list[int], num_prompt: int) -> Draw:
    sampler = Sampler(scores.shape[-1], CPU)
    sampler.add(NewRow(0, tokens, num_prompt, [], given))
    return run(sampler, scores.reshape(1, -1), [0], [len(tokens)])


def twin(scores: Tensor, given: SamplingParams, tokens: list[int], num_prompt: int) -> int:
    """The definition, one id at a time, in float64."""
    x = scores.double().tolist()
    output = tokens[num_prompt:]
    for v in range(len(x)):
        if v in tokens:
            x[v] = x[v] / given.repetition_penalty if x[v] > 0 else x[v] * given.repetition_penalty
        x[v] -= given.presence_penalty * (v in output) + given.frequency_penalty * output.count(v)
        x[v] += given.logit_bias.get(v, 0.0)
        if v in given.stop_token_ids and len(output) < given.min_tokens:
            x[v] = -math.inf
    best = max(x)
    if given.greedy:
        return x.index(best)
    weights = [math.exp((value - best) / given.temperature) for value in x]
    order = sorted(range(len(x)), key=lambda v: -weights[v])
    keep = order[: given.top_k] if 0 < given.top_k < len(x) else order
    total, before, nucleus = sum(weights[v] for v in keep), 0.0, []
    for v in keep:
        if before >= given.top_p * total:
            break
        nucleus.append(v)
        before += weights[v]
    final = [w if v in nucleus and w >= given.min_p else 0.0 for v, w in enumerate(weights)]
    target = float(uniforms([given.seed or 0], [len(output)])[0]) * sum(final)
    running = 0.0
    for v, weight in enumerate(final):
        running += weight
        if running > target:
            return v
    raise AssertionError("no token")


GRID = [
    params(temperature=0.0),
    params(temperature=0.0, repetition_penalty=1.7),
    params(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.7),
    params(temperature=0.0, logit_bias={3: 9.0, 4: -100.0}),
    params(temperature=0.0, stop_token_ids=list(range(0, VOCAB, 2)), min_tokens=9),
    params(temperature=1.0),
    params(temperature=0.7, top_k=5),
    params(temperature=1.3, top_p=0.8),
    params(temperature=1.0, min_p=0.2),
    params(temperature=2.0, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
    params(temperature=0.9, top_k=1),
    params(temperature=0.9, top_p=1e-6),
    params(temperature=1.0, top_k=VOCAB + 5, frequency_penalty=-1.0, repetition_penalty=0.8),
    params(temperature=1.0, seed=-(2**63), logit_bias={7: 2.5}, min_tokens=3, stop_token_ids=[1, 2, 3]),
]


def history(i: int) -> tuple[list[int], int]:
    return [(i * 7 + j * j) % VOCAB for j in range(4 + i)], 2 + i // 2


@pytest.mark.parametrize("seed", range(8))
def test_batch_equals_the_twin(seed: int) -> None:
    scores = logits(len(GRID), seed)
    sampler = Sampler(VOCAB, CPU)
    expected = []
    for i, given in enumerate(GRID):
        tokens, num_prompt = history(i)
        sampler.add(NewRow(i, tokens, num_prompt, [], given))
        expected.append(twin(scores[i], given, tokens, num_prompt))
    rows = list(range(len(GRID)))
    got = run(sampler, scores, rows, [len(history(i)[0]) for i in rows])
    assert got.tokens_N.tolist() == expected


def test_order_and_company_do_not_matter() -> None:
    vocab = 5003
    scores = logits(len(GRID), 5, vocab)
    lengths = [len(history(i)[0]) for i in range(len(GRID))]

    def tokens_of(order: list[int]) -> dict[int, int]:
        sampler = Sampler(vocab, CPU)
        for i in order:
            tokens, num_prompt = history(i)
            sampler.add(NewRow(i, tokens, num_prompt, [], GRID[i]))
        drawn = run(sampler, scores[order], order, [lengths[i] for i in order])
        return dict(zip(order, drawn.tokens_N.tolist(), strict=True))

    whole = tokens_of(list(range(len(GRID))))
    assert tokens_of(torch.randperm(len(GRID), generator=torch.Generator().manual_seed(3)).tolist()) == whole
    for i in range(len(GRID)):
        assert tokens_of([i]) == {i: whole[i]}


def test_counts_grow_and_come_back_after_preemption() -> None:
    given = params(temperature=0.8, presence_penalty=0.9, frequency_penalty=0.6, repetition_penalty=1.3)
    sampler = Sampler(VOCAB, CPU)
    sampler.add(NewRow(0, [1, 2, 3], 3, [], given))
    tokens = [1, 2, 3]
    for step in range(20):
        if step == 11:  # preempted, and back in another row with all its tokens
            sampler.forget(0)
            sampler.add(NewRow(4, list(tokens), 3, [], given))
        scores = logits(1, step)
        got = run(sampler, scores, [4 if step >= 11 else 0], [len(tokens)])
        assert got.tokens_N.tolist() == [twin(scores[0], given, tokens, 3)]
        tokens += got.tokens_N.tolist()


def reference_weights(scores: Tensor, *warpers) -> Tensor:
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    return torch.softmax(scores, -1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.9])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (0, 0.77, 0.0), (0, 1.0, 0.1), (30, 0.9, 0.03)])
def test_filters_equal_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    scores = logits(6, 11)
    given = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    warpers: list = [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = reference_weights(scores, *warpers)
    got = weigh(scores, filters(given, [0.0] * 6))
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got / got.sum(-1, keepdim=True), expected)


def test_repetition_penalty_equals_transformers() -> None:
    scores, tokens = logits(1, 2), [5, 9, 9, 40]
    expected = RepetitionPenaltyLogitsProcessor(penalty=2.5)(torch.tensor([tokens]), scores.clone())
    scores[0, 50] = scores.max()  # so that the best one is not always an unseen id
    got = one(scores, params(temperature=0.0, repetition_penalty=2.5), tokens, 2)
    expected[0, 50] = scores[0, 50]
    assert got.tokens_N.item() == expected.argmax().item()


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20000 draws, 0.1 % level."""
    scores = torch.linspace(-2, 1, 12).repeat(20000, 1)
    drawn = ops.draw(scores, filters(params(), uniforms([123] * 20000, list(range(20000)))))
    expected = torch.softmax(scores[0], -1) * 20000
    counts = torch.bincount(drawn, minlength=12)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 31.26  # 11 degrees of freedom


def test_uniforms() -> None:
    """In [0, 1), flat, and without correlation between neighbouring seeds or places."""
    seeds = [s for s in range(100) for _ in range(100)]
    u = uniforms(seeds, [p for _ in range(100) for p in range(100)])
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, 20, (0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 43.8  # 19 degrees of freedom, 0.1 %
    table = u.reshape(100, 100)
    for a, b in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.04
    assert len(np.unique(u)) == u.size


@pytest.mark.parametrize("edge", [0.0, 1 - 2**-53])
def test_a_filtered_id_is_never_drawn(edge: float) -> None:
    scores = torch.tensor([[0.0, 1.0, 5.0, 4.9, 0.1, 0.0]])
    token = ops.draw(scores, filters(params(top_k=2), [edge])).item()
    assert token == (2 if edge == 0 else 3)


def test_logprobs_are_of_the_raw_logits() -> None:
    scores = logits(1, 4)
    raw = torch.log_softmax(scores[0], -1)
    given = params(temperature=0.2, top_k=3, logit_bias={11: 50.0}, logprobs=4)
    got = one(scores, given, [1], 1).logprobs[0]
    assert got is not None and got.token == 11
    assert got.logprob == pytest.approx(raw[11].item())
    best = torch.topk(raw, 4)
    assert [token for token, _ in got.top] == best.indices.tolist()
    assert [value for _, value in got.top] == pytest.approx(best.values.tolist())
    zero = one(scores, params(temperature=0.0, logprobs=0), [1], 1).logprobs[0]
    assert zero is not None and zero.top == [] and zero.token == scores.argmax().item()
    assert one(scores, params(temperature=0.0), [1], 1).logprobs == [None]


def test_equal_logprobs_come_in_the_order_of_their_ids() -> None:
    """Whatever the other rows ask for: 16-bit logits are often equal."""
    values = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]] * 3)
    expected = [(1, 2.0), (3, 2.0), (2, 1.0), (4, 1.0), (5, 1.0), (0, 0.0)]
    for counts in ([1, 3, 4], [2, 0, 6], [0, 5, 1], [0, 0, 0], [9, 1, 2]):
        assert best_of(values, counts) == [expected[:count] for count in counts]
    values[1] = torch.nan  # a bad row has no best ones, and takes none from its neighbours
    assert best_of(values, [2, 2, 2]) == [expected[:2], [], expected[:2]]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_stay_with_their_row(poison: float, temperature: float) -> None:
    scores = logits(3, 6)
    sampler = Sampler(VOCAB, CPU)
    for row in range(3):
        sampler.add(NewRow(row, [1], 1, [], params(temperature=temperature, logprobs=1)))
    good = run(sampler, scores, [0, 1, 2], [1, 1, 1])
    assert not good.bad_N.any()
    scores[1, 13] = poison
    got = run(sampler, scores, [0, 1, 2], [1, 1, 1])
    assert got.bad_N.tolist() == [False, True, False]
    assert got.tokens_N[[0, 2]].tolist() == good.tokens_N[[0, 2]].tolist()


def test_huge_but_finite_logits_are_good() -> None:
    scores = torch.full((1, VOCAB), 3e38)
    scores[0, 8] = 3.3e38
    got = one(scores, params(temperature=0.0), [1], 1)
    assert not got.bad_N.any() and got.tokens_N.item() == 8


def test_a_free_row_is_forgotten() -> None:
    sampler = Sampler(VOCAB, CPU, seed=9)
    sampler.add(NewRow(0, [1], 1, [], params(temperature=0.0, logit_bias={5: 1000.0})))
    sampler.forget(0)
    sampler.add(NewRow(0, [1], 1, [], SamplingParams(temperature=0.0)))
    scores = logits(1, 1)
    assert run(sampler, scores, [0], [1]).tokens_N.item() == scores.argmax().item()


def test_an_end_that_the_model_does_not_know_is_no_end() -> None:
    given = params(temperature=0.0, stop_token_ids=[5, VOCAB, 10**6], min_tokens=3)
    scores = logits(1)
    scores[0, 5] = 100.0
    assert one(scores, given, [1, 2], 2).tokens_N.tolist() != [5]
