"""The output head of every implementation against its definition."""

from __future__ import annotations

import pytest
import torch

from tritium.llm.kernels import composed, reference

from .test_fused import DTYPES, KERNELS, random

SHAPES = [(1, 500, 64), (3, 1003, 96), (17, 77, 40), (70, 96, 576), (33, 31, 32), (5, 1, 7), (0, 64, 32)]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "vocab", "size"), [shape for shape in SHAPES if shape[0]])
def test_scores(name: str, dtype: torch.dtype, count: int, vocab: int, size: int) -> None:
    x, weight = random(count, size, dtype=dtype), random(vocab, size, dtype=dtype, seed=1)
    got = KERNELS[name].logits(x, weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, reference.logits(x, weight), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_company_does_not_matter(name: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    count, vocab, size = shape
    x, weight = random(count, size, dtype=dtype), random(vocab, size, dtype=dtype, seed=1)
    together = KERNELS[name].logits(x, weight)
    for row in range(count):
        assert torch.equal(KERNELS[name].logits(x[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize("name", KERNELS)
def test_strides_and_mixed_types(name: str) -> None:
    x, weight = random(6, 64, dtype=torch.bfloat16), random(64, 48, dtype=torch.bfloat16, seed=1)
    expected = reference.logits(x, weight.T.contiguous())
    torch.testing.assert_close(KERNELS[name].logits(x, weight.T), expected, atol=1e-4, rtol=1e-5)
    other = random(48, 6, dtype=torch.bfloat16)
    expected = reference.logits(other.T, weight[:, :].contiguous()[:, :48].contiguous())
    torch.testing.assert_close(KERNELS[name].logits(other.T, weight[:, :48]), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        KERNELS[name].logits(x.float(), weight.T.contiguous()), reference.logits(x, weight.T), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_not_a_number_stays_in_its_row(name: str) -> None:
    x, weight = random(20, 64, dtype=torch.bfloat16), random(100, 64, dtype=torch.bfloat16, seed=1)
    x[3, 5] = float("nan")
    weight[99, 1] = float("inf")
    got = KERNELS[name].logits(x, weight)
    assert got[3].isnan().all() and not got[:3].isnan().any() and not got[4:].isnan().any()
    assert got[:3, 99].isinf().all() and got[:3, :99].isfinite().all()


def test_scores_are_not_rounded() -> None:
    """Two scores that BF16 cannot tell apart keep their order."""
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    weight = torch.ones(2, 32, dtype=torch.bfloat16)
    weight[1, 0] = 1.0078125  # 32.0078 rounds to 32
    for kernels in (reference, composed, *KERNELS.values()):
        assert kernels.logits(x, weight).tolist() == [[32.0, 32.0078125]]
