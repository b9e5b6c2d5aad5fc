"""The conformance suite against what this version can serve: no case that passed once may fail again.

The profiles of ``tests/conformance`` start a server with options of later versions (``--cache-config``,
``--rate-limit``, ...) and with models of the Python backend, so ``run.py --launch`` cannot start this one yet. Here
the server runs with the options of the profiles that it knows, on the suite's model repository, with no model loaded.
``tests/conformance_passing.txt`` names the cases that pass so.

    python -m tests.e2e.test_conformance

runs all cases and adds to that file those that pass by now.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.e2e.live import LiveServer

TESTS = Path(__file__).parents[1]
SUITE = TESTS / "conformance"
PASSING = TESTS / "conformance_passing.txt"
PROFILES = ("main", "failing")
OPTIONS = ("--model-control-mode=explicit", "--id=conformance", "--exit-timeout-secs=5")


def held() -> list[str]:
    """Names of the cases that must pass."""
    lines = (line.partition("#")[0].strip() for line in PASSING.read_text().splitlines())
    return [line for line in lines if line]


def run_cases(server: LiveServer, profile: str, cases: Iterable[str], folder: Path) -> dict[str, dict[str, str]]:
    """Runs the suite's runner; what it found by name of the case."""
    found = folder / f"{profile}.json"
    ports = (f"--http={server.http}", f"--grpc={server.grpc}", f"--metrics=127.0.0.1:{server.metrics_port}")
    command = [sys.executable, "run.py", *ports, f"--profile={profile}", f"--json={found}", *cases]
    # Nothing is written beside the suite's files: they stay those that were handed out.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(command, cwd=SUITE, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode in (0, 1) and found.is_file(), ran.stdout + ran.stderr
    return json.loads(found.read_text())


def run_profiles(cases: Iterable[str], folder: Path) -> dict[str, dict[str, str]]:
    """All profiles, each against a server of its own."""
    results: dict[str, dict[str, str]] = {}
    for profile in PROFILES:
        repository = folder / profile / "model_repository"
        shutil.copytree(SUITE / "model_repository", repository)
        with LiveServer([f"--model-repository={repository}", *OPTIONS], folder / f"{profile}.log") as server:
            results |= run_cases(server, profile, cases, folder)
    return results


def test_no_case_that_passed_fails(tmp_path: Path) -> None:
    results = run_profiles(held(), tmp_path)
    assert sorted(results) == sorted(held()), "a name in conformance_passing.txt is no case, or stands there twice"
    failed = [f"{name}: {result['why']}" for name, result in results.items() if result["state"] != "ok"]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("group", ["health", "infer", "generate", "stream", "errors_http", "errors_grpc", "repository"])
def test_the_group_is_not_empty(group: str) -> None:
    assert any(name.startswith(f"{group}/") for name in held())


def main() -> None:
    """Adds the cases that pass by now."""
    with tempfile.TemporaryDirectory() as folder:
        results = run_profiles(["*"], Path(folder))
    more = sorted({name for name, result in results.items() if result["state"] == "ok"} - set(held()))
    with PASSING.open("a") as file:
        file.writelines(f"{name}\n" for name in more)
    print(f"{len(more)} new cases pass, {len(held())} in all")


if __name__ == "__main__":
    main()
