"""Use of the KV cache: the replay keeps its books, and blocks use at least 96 % of what they reserve."""

from __future__ import annotations

import pytest

from tritium.bench import Item, kv, workload


@pytest.mark.parametrize("rate", [0.0, 4.0])
def test_blocks_use_what_they_reserve(rate: float) -> None:
    result = kv.compare(workload("C", request_rate=rate), bytes_per_token=100)
    assert result["blocks"]["used_over_reserved"] >= 0.96
    assert result["contiguous"]["used_over_reserved"] < 0.2
    assert result["blocks"]["duration"] < result["contiguous"]["duration"]
    assert result["kv_cache_bytes"] == 8 * 2048 * 100
    assert result["blocks"]["peak_reserved_bytes"] <= result["kv_cache_bytes"]
    shown = kv.show(result)
    assert "blocks of 16 tokens" in shown
    assert "mean over time" in shown


def test_one_request_by_hand() -> None:
    """A prompt of 20 and 3 tokens: steps hold 20, 21 and 22 tokens in 2 blocks of 16."""
    item = Item([1] * 20, 3)
    blocks = kv.on_blocks([item], capacity=1024, block_size=16, max_length=64)
    assert [(p.used, p.reserved) for p in blocks.points] == [(20, 32), (21, 32), (22, 32)]
    whole = kv.contiguous([item], capacity=1024, max_length=64)
    assert [(p.used, p.reserved) for p in whole.points] == [(20, 64), (21, 64), (22, 64)]
    assert blocks.duration_s == pytest.approx(3 * kv.STEP_S + 22 * kv.TOKEN_S)
    assert blocks.duration_s == pytest.approx(whole.duration_s)


def test_use_is_weighted_by_time() -> None:
    trace = kv.Trace("t", [kv.Point(0.0, 1.0, 10, 20, 1), kv.Point(1.0, 3.0, 20, 20, 1)])
    assert trace.use == pytest.approx((10 + 60) / (20 + 60))


def test_both_replays_do_the_same_work() -> None:
    items = workload("C")
    tokens = sum(len(i.prompt) + i.output_len - 1 for i in items)
    for trace in (
        kv.on_blocks(items, capacity=64 * 2048, block_size=16, max_length=2048),
        kv.contiguous(items, capacity=64 * 2048, max_length=2048),
    ):
        computed = sum((p.step_s - kv.STEP_S) / kv.TOKEN_S for p in trace.points)
        assert computed == pytest.approx(tokens)
