"""The C++ kernels, by ctypes: batch-invariant by construction (see attention.cpp)."""

from __future__ import annotations

from tritium.llm.kernels.cpu.binding import CpuKernels, load

__all__ = ["CpuKernels", "load"]
