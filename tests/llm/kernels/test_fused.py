"""Norms, activations and rope of every implementation against their definitions."""

from __future__ import annotations

import pytest
import torch

from tritium.llm.kernels import composed, reference

from .batches import make_case
from .test_attention import LIBRARIES

KERNELS = {name: library for name, library in LIBRARIES.items() if not isinstance(library, str)} | {"torch": composed}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One unit in the last place of the storage type, as float32 sums are taken in another order.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

pytestmark = pytest.mark.parametrize("name", KERNELS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def close(got: torch.Tensor, expected: torch.Tensor, atol: float = 0.0) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=max(atol, tolerance), rtol=tolerance)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dtypes
@pytest.mark.parametrize("shape", [(1, 576), (3, 7), (40, 1000), (0, 64), (5, 3, 80)])
def test_rms_norm(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    close(KERNELS[name].rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@dtypes
def test_rms_norm_of_a_slice(name: str, dtype: torch.dtype) -> None:
    """Query and key heads are normed inside of the fused q, k, v matrix."""
    qkv, weight = random(9, 8, 32, dtype=dtype), random(32, dtype=dtype, seed=1)
    close(KERNELS[name].rms_norm(qkv[:, 2:5], weight, 1e-6), reference.rms_norm(qkv[:, 2:5], weight, 1e-6))


@dtypes
@pytest.mark.parametrize("shape", [(1, 576), (33, 1000), (0, 64), (2, 5)])
def test_add_rms_norm(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual, weight = (random(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, shape[1:])))
    expected, expected_sum = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    got, got_sum = KERNELS[name].add_rms_norm(x, residual, weight, 1e-5)
    close(got, expected)
    assert torch.equal(got_sum, expected_sum) and got_sum is residual


@dtypes
def test_a_float32_residual(name: str, dtype: torch.dtype) -> None:
    """The residual stream is wider than what is added to it and what comes out."""
    x, weight = random(9, 100, dtype=dtype), random(100, dtype=dtype, seed=1)
    residual = random(9, 100, dtype=torch.float32, seed=2)
    close(KERNELS[name].rms_norm(residual, weight, 1e-5), reference.rms_norm(residual, weight, 1e-5))
    expected, expected_sum = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    got, got_sum = KERNELS[name].add_rms_norm(x, residual, weight, 1e-5)
    assert got.dtype == dtype and got_sum is residual and torch.equal(got_sum, expected_sum)
    close(got, expected)


@dtypes
@pytest.mark.parametrize("shape", [(1, 6), (17, 3072), (0, 8), (300, 200)])
def test_gated(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = random(*shape, dtype=dtype) * 6
    x[:, :2] *= 30  # far out, where an exponential overflows
    close(KERNELS[name].silu_and_mul(x), reference.silu_and_mul(x))
    for tanh in (False, True):
        # The erf is good to 1.5e-7, and is multiplied by x and the other half.
        close(KERNELS[name].gelu_and_mul(x, tanh), reference.gelu_and_mul(x, tanh), atol=2e-5)


@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotated"), [(16, 16), (64, 64), (80, 32), (12, 6)])
def test_rope_and_write(name: str, dtype: torch.dtype, interleaved: bool, dim: int, rotated: int) -> None:
    results = []
    for kernels in (reference, KERNELS[name]):
        case = make_case([(1, 5), (1, 33), (7, 20)], heads=4, kv_heads=2, dim=dim, dtype=dtype)
        qkv = random(9, 8, dim, dtype=dtype, seed=2)
        q, k, v = qkv.split((4, 2, 2), dim=1)
        angles = random(64, rotated // 2, dtype=torch.float32, seed=3)
        table = torch.cat((angles.cos(), angles.sin()), -1)
        kernels.rope_and_write(q, k, v, table, case.inputs, 0, interleaved)
        results.append((qkv, case.inputs.keys[0], case.inputs.values[0]))
    for got, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        close(got.nan_to_num(0), expected.nan_to_num(0))
    assert torch.equal(results[0][2].nan_to_num(0), results[1][2].nan_to_num(0))  # values are copied


@dtypes
def test_company_does_not_matter(name: str, dtype: torch.dtype) -> None:
    kernels = KERNELS[name]
    x, residual = random(70, 2048, dtype=dtype), random(70, 2048, dtype=dtype, seed=1)
    weight = random(2048, dtype=dtype, seed=2)
    norm, gate = kernels.rms_norm(x, weight, 1e-5), kernels.silu_and_mul(x)
    added, _ = kernels.add_rms_norm(x, residual.clone(), weight, 1e-5)
    for row in (0, 33, 69):
        one = slice(row, row + 1)
        assert torch.equal(kernels.rms_norm(x[one], weight, 1e-5), norm[one])
        assert torch.equal(kernels.silu_and_mul(x[one]), gate[one])
        assert torch.equal(kernels.add_rms_norm(x[one], residual[one].clone(), weight, 1e-5)[0], added[one])
