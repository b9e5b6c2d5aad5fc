"""Every implementation of attention against the definition, over ragged batches with poisoned slots."""

from __future__ import annotations

import pytest
import torch

from tritium.llm.kernels import composed, cpu, reference

from .batches import make_case, only_row, only_tokens

LIBRARIES = {isa: cpu.load(isa) for isa in ("avx512", "avx2")}
KERNELS = {name: library for name, library in LIBRARIES.items() if not isinstance(library, str)} | {"torch": composed}
NATIVE = [name for name in KERNELS if name != "torch"]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
MIXED = [(1, 1), (1, 17), (1, 64), (1, 300), (2, 2), (5, 16), (70, 70), (33, 290), (16, 129)]


def check(name: str, case, window: int | None = None) -> None:
    scale = case.q.shape[-1] ** -0.5
    expected = reference.attention(case.q, case.inputs, 0, scale, window).float()
    got = KERNELS[name].attention(case.q, case.inputs, 0, scale, window)
    assert got.dtype == case.q.dtype and got.is_contiguous()
    torch.testing.assert_close(got.float(), expected, atol=TOLERANCE[case.q.dtype], rtol=TOLERANCE[case.q.dtype])


def test_library_is_built() -> None:
    assert not isinstance(cpu.load(), str), cpu.load()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [8, 16, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (4, 1), (8, 1)])
def test_grid(name: str, dtype: torch.dtype, dim: int, heads: int, kv_heads: int) -> None:
    check(name, make_case(MIXED, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 128])
def test_block_sizes(name: str, block_size: int) -> None:
    check(name, make_case(MIXED, block_size=block_size, seed=block_size))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 8, 64, 100])
def test_window(name: str, dtype: torch.dtype, window: int) -> None:
    """Contexts one below, at and one above the window, and far above it."""
    rows = [(1, max(1, window - 1)), (1, window), (1, window + 1), (1, 5 * window + 300)]
    rows += [(window + 2, window + 2), (40, 40 + window), (3, 3 * window + 280)]
    check(name, make_case(rows, heads=4, kv_heads=2, dim=64, dtype=dtype), window)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("context", [15, 16, 17, 63, 64, 65, 255, 256, 257, 513])
def test_edges(name: str, context: int) -> None:
    """Contexts around the edges of blocks, key tiles and splits, by chunks of several sizes."""
    rows = [(1, context), *((n, context) for n in (2, 15, 16, 21, 22, 64) if n <= context)]
    check(name, make_case(rows, heads=3, kv_heads=1, dim=16, seed=context))


@pytest.mark.parametrize("name", KERNELS)
def test_queries_in_a_fused_matrix(name: str) -> None:
    case = make_case(MIXED, heads=4, kv_heads=2, dim=16)
    fused = torch.randn(case.q.shape[0], (4 + 2 + 2) * 16)
    fused[:, :64] = case.q.flatten(1)
    case.q = fused[:, :64].view(-1, 4, 16)
    check(name, case)


@pytest.mark.parametrize("name", [*NATIVE, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 90])
def test_batch_and_chunks_do_not_matter(name: str, dtype: torch.dtype, window: int | None) -> None:
    """Bit for bit: in a batch, alone, and in chunks of any size."""
    kernels = KERNELS.get(name, reference)
    case = make_case([*MIXED, (150, 700)], heads=9, kv_heads=3, dim=64, dtype=dtype)
    whole = kernels.attention(case.q, case.inputs, 0, 0.125, window)
    for row, (start, count, _) in enumerate(case.inputs.row_spans()):
        alone = only_row(case, row)
        expected = whole[start : start + count]
        assert torch.equal(kernels.attention(alone.q, alone.inputs, 0, 0.125, window), expected)
        for size in (1, 7, 16, 64):
            for begin in range(0, count, size):
                end = min(begin + size, count)
                chunk = only_tokens(case, row, begin, end)
                got = kernels.attention(chunk.q, chunk.inputs, 0, 0.125, window)
                assert torch.equal(got, expected[begin:end]), (row, size, begin)


@pytest.mark.parametrize("name", NATIVE)
def test_threads_do_not_matter(name: str) -> None:
    """One long row is split over threads, with the same bits."""
    case = make_case([(1, 3000)], heads=9, kv_heads=3, dim=64, dtype=torch.bfloat16)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(KERNELS[name].attention(case.q, case.inputs, 0, 0.125, None))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    check(name, case)


@pytest.mark.parametrize("name", [*KERNELS, "reference"])
def test_a_bad_row_stays_alone(name: str) -> None:
    kernels = KERNELS.get(name, reference)
    case = make_case([(1, 40), (1, 50), (8, 30)])
    good = kernels.attention(case.q, case.inputs, 0, 0.25, None)
    case.q[1] = float("nan")
    bad = kernels.attention(case.q, case.inputs, 0, 0.25, None)
    assert bad[1].isnan().all()
    assert torch.equal(bad[0], good[0]) and torch.equal(bad[2:], good[2:])
