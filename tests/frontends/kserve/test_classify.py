from __future__ import annotations

import numpy as np
import pytest

from tritium.errors import TritiumError
from tritium.frontends.kserve.classify import classify
from tritium.types import DType, Tensor

FRUIT = ("apple", "banana", "cherry", "date", "elder berry")


def best(values: object, kind: str, count: int, **more: object) -> tuple[list[str], tuple[int, ...]]:
    found = classify(Tensor.from_numpy("T", np.array(values, dtype=kind)), count, **more)  # type: ignore[arg-type]
    return [text.decode() for text in found.strings()], found.shape


def test_the_recorded_answers() -> None:
    one = [[0.1, 0.7, 0.05, 0.9, 0.3]]
    assert best(one, "f4", 3, batched=True, labels=FRUIT) == (
        ["0.900000:3:date", "0.700000:1:banana", "0.300000:4:elder berry"],
        (1, 3),
    )
    two = [*one, [5, 4, 3, 2, 1]]
    assert best(two, "f4", 1, batched=True, labels=FRUIT) == (["0.900000:3:date", "5.000000:0:apple"], (2, 1))
    ties = [[1, 2, 2, 1, 2]]
    assert best(ties, "f4", 4, batched=True)[0] == ["2.000000:1", "2.000000:2", "2.000000:4", "1.000000:0"]
    assert best([4, 9, 2, 10], "i4", 2, batched=False) == (["10:3", "9:1"], (2,))


def test_more_classes_than_there_are_and_nan_last() -> None:
    assert best([float("nan"), 1, 2], "f8", 9, batched=False)[0] == ["2.000000:2", "1.000000:1", "nan:0"]


def test_empty_rows() -> None:
    assert best(np.zeros((0, 3)), "f4", 2, batched=True) == ([], (0, 0))
    assert best(np.zeros((2, 0)), "f4", 2, batched=True) == ([], (2, 0))


@pytest.mark.parametrize("tensor", [Tensor.from_strings("T", [b"a"]), Tensor("T", DType.BF16, (1,), memoryview(b"ab"))])
def test_types_without_order_are_refused(tensor: Tensor) -> None:
    with pytest.raises(TritiumError, match="class result not available for output 'T' due to unsupported type"):
        classify(tensor, 1, batched=False)
