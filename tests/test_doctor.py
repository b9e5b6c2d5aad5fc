"""``tritium doctor``: what it finds on this machine, and that it says of memory what an engine then says."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint
from tritium.cli import doctor, main
from tritium.llm.config import EngineConfig
from tritium.llm.runner import kv_cache
from tritium.llm.runner.ranks import RankGroup
from tritium.observability.tables import size
from tritium.settings import ServerSettings

FREE = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "repository" / "tiny" / "1")


def test_doctor(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", str(tiny), *FREE, "--http-port", str(port), "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["http port"]["status"] == "broken"
    assert "--http-port" in checks["http port"]["fix"]
    assert checks["grpc port"]["status"] == "ok"
    assert checks["torch"]["status"] == "ok"
    assert checks["model"]["status"] == "ok"
    assert main(["doctor", *FREE]) == 0
    assert "python" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_it_says_what_an_engine_says(tiny: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(kv_cache, "free_host_bytes", lambda: 1 << 30)
    given = {"device": "cpu", "dtype": dtype, "max_rows": 50, "max_tokens_per_step": 40}
    (check,) = doctor.fits(ServerSettings(model=str(tiny)), given)
    # As `serve` does it: one token for each running sequence must fit into a step.
    given["max_tokens_per_step"] = 50
    info = RankGroup(EngineConfig(str(tiny), **given)).load()  # type: ignore[arg-type]
    assert check.status == "warning" and "max_tokens_per_step is raised to 50" in check.detail
    budget = info.budget
    parts = (budget.weights_bytes, budget.activations_bytes, budget.kv_bytes, budget.margin_bytes)
    assert all(size(part) in check.detail for part in parts)
    assert f"{info.dtype} on cpu ({info.dtype_reason})" in check.detail
    assert f"for {budget.num_blocks * budget.block_size} tokens" in check.detail
    assert f"{info.max_length} tokens at most" in check.detail


def test_a_model_that_does_not_fit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServerSettings(model=str(tiny))
    (check,) = doctor.fits(settings, {"num_blocks": 2})
    assert check.status == "warning" and "max_length is lowered" in check.detail
    monkeypatch.setattr(kv_cache, "free_host_bytes", lambda: 1000)
    (check,) = doctor.fits(settings, {"device": "cpu"})
    assert check.status == "broken" and "the model does not fit" in check.detail
    assert next(iter(doctor.fits(ServerSettings(model="nothing"), {}))).status == "broken"
