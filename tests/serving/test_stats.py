"""Why requests failed, as nv_inference_request_failure files it."""

from __future__ import annotations

import pytest

from tritium.backends.base import Timing
from tritium.errors import LOST, Code
from tritium.observability.metrics import Metrics
from tritium.serving.stats import ModelStats


@pytest.mark.parametrize(
    ("code", "reason", "filed"),
    [
        (Code.UNAVAILABLE, None, "REJECTED"),
        (Code.DEADLINE_EXCEEDED, None, "REJECTED"),
        (Code.UNAVAILABLE, LOST, "BACKEND"),
        (Code.INTERNAL, None, "BACKEND"),
        (Code.CANCELLED, None, "CANCELED"),
        (Code.INVALID_ARGUMENT, "range", "OTHER"),
    ],
)
def test_reasons(code: Code, reason: str | None, filed: str) -> None:
    metrics = Metrics()
    stats = ModelStats("m", "1")
    stats.attach(metrics.add_model("m", "1", "model"))
    stats.failed(code, 1000, Timing(), reason)
    lines = metrics.render().decode().splitlines()
    counted = [line for line in lines if line.startswith("nv_inference_request_failure{") and not line.endswith(" 0.0")]
    assert len(counted) == 1 and f'reason="{filed}"' in counted[0]
