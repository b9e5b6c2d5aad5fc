"""What ``tritium bench`` says while it measures."""

from __future__ import annotations

import pytest

from tritium.cli.measure import Bar


def run(bar: Bar) -> None:
    for done in range(3):
        bar(done, 2)


def test_a_line_for_each_run_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar("workload C", 2)
    run(bar)
    run(bar)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("workload C run 1/2: 2 done in ")
    assert second.startswith("workload C run 2/2: 2 done in ")


def test_a_bar_for_who_watches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bar = Bar("workload C", 2)
    monkeypatch.setattr(bar, "_shown", True)
    bar(0, 2)
    assert capsys.readouterr().err == f"\rworkload C run 1/2 [{'.' * 30}] 0/2"
    bar(1, 2)
    bar(2, 2)
    shown = capsys.readouterr().err
    assert f"[{'#' * 15}{'.' * 15}] 1/2" in shown and shown.rstrip().endswith(" s") and shown.endswith("\n")
