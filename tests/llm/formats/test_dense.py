from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tritium.llm.formats import check_values
from tritium.llm.formats.dense import TILE, DenseFormat, DenseHead

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def make(dtype: torch.dtype, rows: int, columns: int, *, bias: bool, deterministic: bool):
    generator = torch.Generator().manual_seed(rows)
    dense = DenseFormat(dtype, CPU, deterministic=deterministic)
    weight = torch.randn(rows, columns, generator=generator) / columns**0.5
    params = dense.make_parameters(rows, columns, bias=bias)
    dense.load(params, "weight", weight[: rows // 2], 0)
    dense.load(params, "weight", weight[rows // 2 :], rows // 2)
    if bias:
        dense.load(params, "bias", torch.randn(rows, generator=generator), 0)
    dense.finish(params)
    return dense, params, weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_product_equals_linear(dtype: torch.dtype, bias: bool, deterministic: bool) -> None:
    dense, params, weight = make(dtype, 96, 64, bias=bias, deterministic=deterministic)
    for count in (1, 2, TILE, TILE + 1, 100):
        x = torch.randn(count, 64).to(dtype)
        expected = F.linear(x, weight, params["bias"])
        assert dense.matmul(x, params).dtype == dtype
        torch.testing.assert_close(dense.matmul(x, params), expected)
    assert torch.equal(dense.dequantize(params), weight.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(960, 576), (576, 1536), (200, 72), (3001, 64)])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, rows: int, columns: int) -> None:
    """Any number of rows from 1 to 70, in any order, each row's result is bit for bit the same."""
    dense, params, _ = make(dtype, rows, columns, bias=True, deterministic=True)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(70, columns, generator=generator).to(dtype)
    alone = torch.cat([dense.matmul(x[i : i + 1], params) for i in range(70)])
    for count in range(1, 71):
        order = torch.randperm(70, generator=generator)[:count]
        assert torch.equal(dense.matmul(x[order], params), alone[order]), count
    assert torch.equal(dense.matmul(x.T.contiguous().T, params), alone)  # other strides


def test_a_weight_whose_tiles_are_not_invariant_goes_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that depends on the place of a row in the tile, as another machine's library might."""
    dense = DenseFormat(torch.float32, CPU, deterministic=True)

    def product(x: torch.Tensor, params: dict[str, torch.Tensor | None]) -> torch.Tensor:
        return F.linear(x, torch.ones(8, 8)) + torch.arange(x.shape[0]).unsqueeze(1)

    monkeypatch.setattr(dense, "_product", product)
    params = dense.make_parameters(8, 8, bias=False)
    dense.finish(params)
    x = torch.randn(5, 8)
    alone = torch.cat([dense.matmul(x[i : i + 1], params) for i in range(5)])
    assert torch.equal(dense.matmul(x, params), alone)


def test_packing_frees_the_plain_weight() -> None:
    dense, params, weight = make(torch.bfloat16, 96, 64, bias=False, deterministic=False)
    assert set(params) == {"weight", "bias"}
    assert dense.num_bytes(params) == weight.nbytes


@pytest.mark.parametrize(
    ("values", "dtype", "words"),
    [
        ([1.0, float("nan")], torch.float32, "not finite"),
        ([1.0, float("-inf")], torch.float32, "not finite"),
        ([1.0, -1e5], torch.float16, "does not fit in float16"),
        ([1.0, -1e5], torch.bfloat16, None),
        ([], torch.float32, None),
    ],
)
def test_check_values(values: list[float], dtype: torch.dtype, words: str | None) -> None:
    problem = check_values("w", torch.tensor(values), dtype)
    assert problem is None if words is None else (problem is not None and words in problem and "'w'" in problem)
    assert "int64" in str(check_values("w", torch.tensor([1]), dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_head_scores_in_float32(dtype: torch.dtype, deterministic: bool) -> None:
    head = DenseHead(dtype, CPU, deterministic=deterministic)
    weight = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    params = head.make_parameters(300, 64, bias=False)
    head.load(params, "weight", weight, 0)
    stored = params["weight"]
    head.finish(params)
    assert params["weight"] is stored or dtype == torch.float32  # 16 bits stay as they are, to be shared
    x = torch.randn(5, 64).to(dtype)
    got = head.matmul(x, params)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x.float() @ weight.float().T, atol=1e-4, rtol=1e-5)
