"""How the C++ library is chosen, built and refused."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from tritium.llm.kernels import cpu, ops
from tritium.llm.kernels.cpu import binding, build


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        assert ops.choose("cpu", False).startswith("cpu (") and ops.notices() == []
        assert ops.choose("cuda", False) == "torch"
        assert ops.choose("cuda", True) == "reference"
        monkeypatch.setattr(cpu, "load", lambda: "no library today")
        assert ops.choose("cpu", False) == "torch" and ops.notices() == ["no library today"]
        assert ops.choose("cpu", True) == "reference"
        with pytest.raises(ValueError, match="'nothing'"):
            ops.use("nothing")
    finally:
        monkeypatch.undo()
        ops.choose("cpu", False)


def test_one_openmp_runtime() -> None:
    """The library shares torch's threads; two runtimes would fight for the cores."""
    code = (
        "import torch; from tritium.llm.kernels import cpu; cpu.load();"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_why_there_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def fresh() -> object:
        return binding.load.__wrapped__()

    monkeypatch.setattr(binding, "cpu_flags", frozenset)
    assert "lacks AVX2" in str(fresh())
    monkeypatch.undo()
    monkeypatch.setattr(binding, "library_path", lambda folder, isa: tmp_path / "absent.so")
    assert "not built" in str(fresh())
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(binding, "library_path", lambda folder, isa: broken)
    assert "do not load" in str(fresh())
    monkeypatch.undo()
    monkeypatch.setattr(binding, "source_hash", lambda folder: "other")
    assert "other sources" in str(fresh())


def test_build_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.build(tmp_path) == ([], build.build(tmp_path)[1])
    assert "no g++ found" in build.build(tmp_path)[1]
    for source in (*build.SOURCES, *build.HEADERS):
        (tmp_path / source).write_text("this is not C++")
    monkeypatch.setenv("CXX", "g++")
    libraries, problem = build.build(tmp_path)
    assert libraries == [] and "failed for" in problem
    assert not list(tmp_path.glob("*.so"))


def test_batch_struct_is_all_words() -> None:
    assert ctypes.sizeof(binding.Batch) == 8 * len(binding.Batch._fields_)
