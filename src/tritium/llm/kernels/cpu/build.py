"""Compiles the C++ kernels with the system's g++, once per instruction set. Standard library only.

``hatch_build.py`` calls it at install; ``python -m tritium.llm.kernels.cpu`` calls it again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

# Newest first: what `-march` and its extras need of /proc/cpuinfo.
ISAS: dict[str, tuple[list[str], frozenset[str]]] = {
    "avx512": (
        ["-march=x86-64-v4", "-mavx512bf16"],
        frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16", "avx2", "fma", "f16c"}),
    ),
    "avx2": (["-march=x86-64-v3"], frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})),
}
# GCC 12 takes the "undefined" operands of its own AVX-512 headers for a mistake.
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-maybe-uninitialized",
]
SOURCES = ("attention.cpp", "fused.cpp", "logits.cpp", "sampling.cpp")
HEADERS = ("batch.h", "tiles.h", "vector.h")
COMPILE_LIMIT_S = 300


def library_path(folder: Path, isa: str) -> Path:
    """Where the library of one instruction set lies."""
    return folder / f"libtritium_{isa}.so"


def source_hash(folder: Path) -> str:
    """Names the sources that a library was built from, so that an outdated one is never called."""
    digest = hashlib.blake2b(digest_size=8)
    for name in (*SOURCES, *HEADERS):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def build(folder: Path) -> tuple[list[Path], str]:
    """Compiles ``folder``'s sources for every instruction set, beside them.

    Returns:
        The libraries, and why there is none (empty when all is well). Never raises for a missing or
        failing compiler: the ops then run on torch.
    """
    if os.uname().machine not in ("x86_64", "amd64"):
        return [], f"the C++ kernels are written for x86-64, not {os.uname().machine}"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return [], "no g++ found; install it (apt-get install g++) and run: python -m tritium.llm.kernels.cpu"
    built: list[Path] = []
    for isa, (march, _) in ISAS.items():
        target = library_path(folder, isa)
        partial = target.with_suffix(f".{os.getpid()}")
        sources = [str(folder / name) for name in SOURCES]
        command = [compiler, *FLAGS, *march, f"-DSOURCE_HASH={source_hash(folder)}", *sources, "-o", str(partial)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return built, f"{compiler} took more than {COMPILE_LIMIT_S} s"
        if done.returncode != 0:
            return built, f"{compiler} failed for {isa}: {done.stderr.strip()[-2000:]}"
        partial.replace(target)  # whole or not at all, also under a running process
        built.append(target)
    return built, ""
