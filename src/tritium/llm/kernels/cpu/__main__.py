"""``python -m tritium.llm.kernels.cpu``: compiles the C++ kernels again."""

from __future__ import annotations

import sys
from pathlib import Path

from tritium.llm.kernels.cpu.build import build

if __name__ == "__main__":
    libraries, problem = build(Path(__file__).parent)
    for library in libraries:
        print(library)
    if problem:
        sys.exit(problem)
