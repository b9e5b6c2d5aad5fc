"""The C++ draw against its definition in torch."""

from __future__ import annotations

import pytest
import torch

from tritium.llm.kernels import sampling
from tritium.llm.kernels.sampling import Filters

from .test_attention import LIBRARIES

NATIVE = {name: library for name, library in LIBRARIES.items() if not isinstance(library, str)}
ROWS = 96


def logits(vocab: int, spread: float) -> torch.Tensor:
    scores = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    scores[:, vocab // 3] += 2 * spread
    return scores


def filters(temperature: float, top_k: int, top_p: float, min_p: float) -> Filters:
    return Filters(
        torch.full((ROWS,), temperature),
        torch.full((ROWS,), top_k),
        torch.full((ROWS,), top_p, dtype=torch.float64),
        torch.full((ROWS,), min_p),
        torch.rand(ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    )


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("vocab", [1, 5, 100, 1000, 10007])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 60.0])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 3, 1.0, 0.0),
        (1.5, 60, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (2.0, 0, 0.3, 0.0),
        (1.0, 0, 1e-9, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.9, 40, 0.95, 0.02),
        (1e-4, 0, 0.999999, 0.0),
    ],
)
def test_equals_the_definition(
    name: str, vocab: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    scores, given = logits(vocab, spread), filters(temperature, top_k, top_p, min_p)
    got, expected = NATIVE[name].draw(scores, given), sampling.draw(scores.clone(), given)
    differ = torch.nonzero(got != expected).flatten().tolist()
    # Sums of float32 weights are rounded differently: a draw may fall on the other side of an id's edge.
    assert len(differ) <= 1, (got[differ], expected[differ])
    if temperature:
        kept = sampling.weigh(scores, given)
        assert (kept[torch.arange(ROWS), got] > 0).sum() >= ROWS - 1


@pytest.mark.parametrize("name", NATIVE)
def test_ties(name: str) -> None:
    """Equal logits: the first is the best; all that tie with the last one kept are kept."""
    scores = torch.zeros(ROWS, 50)
    assert NATIVE[name].draw(scores, filters(0.0, 0, 1.0, 0.0)).tolist() == [0] * ROWS
    scores[:, 10:] = -1.0
    got = NATIVE[name].draw(scores, filters(1.0, 4, 1.0, 0.0))
    assert got.max() == 9 and torch.equal(got, sampling.draw(scores, filters(1.0, 4, 1.0, 0.0)))
    assert NATIVE[name].draw(scores, filters(1.0, 12, 1.0, 0.0)).max() > 9


@pytest.mark.parametrize("name", NATIVE)
def test_masked_ids(name: str) -> None:
    scores = torch.full((ROWS, 600), -torch.inf)
    scores[:, [3, 300, 599]] = torch.tensor([0.0, 1.0, 1.0])
    for given in (filters(1.0, 0, 1.0, 0.0), filters(1.0, 5, 0.99, 0.0), filters(0.0, 0, 1.0, 0.0)):
        assert set(NATIVE[name].draw(scores, given).tolist()) <= {3, 300, 599}
    scores[:] = -torch.inf  # nothing is left: any id, but an id
    for given in (filters(1.0, 5, 0.9, 0.1), filters(0.0, 0, 1.0, 0.0)):
        got = NATIVE[name].draw(scores, given)
        assert got.min() >= 0 and got.max() < 600


@pytest.mark.parametrize("name", NATIVE)
def test_the_last_number_takes_the_last_id(name: str) -> None:
    given = filters(1.0, 0, 1.0, 0.0)._replace(uniform=torch.full((ROWS,), 1 - 2**-53, dtype=torch.float64))
    scores = logits(3000, 0.1)
    scores[:, 2500:] = -torch.inf
    assert NATIVE[name].draw(scores, given).tolist() == [2499] * ROWS
