"""One function per op. ``choose`` picks the implementation once, when a rank starts.

Implementations: ``cpu`` (the C++ library), ``torch`` (torch's own fused calls) and ``reference`` (the
definitions, whose docstrings hold for all). In place: ``add_rms_norm`` on its residual, ``rope_and_write``
on q and k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tritium.llm.kernels import composed, cpu, reference
from tritium.llm.kernels.sampling import Filters

if TYPE_CHECKING:
    from tritium.llm.layers.inputs import ForwardInputs


class _Kernels(Protocol):
    """What an implementation offers; see ``reference`` for the definitions."""

    def rms_norm(self, x: Tensor, weight_H: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def silu_and_mul(self, x_T2I: Tensor) -> Tensor: ...
    def gelu_and_mul(self, x_T2I: Tensor, tanh: bool) -> Tensor: ...
    def rope_and_write(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        cos_sin_PD: Tensor,
        inputs: ForwardInputs,
        layer: int,
        interleaved: bool = False,
    ) -> None: ...
    def attention(
        self, q_THD: Tensor, inputs: ForwardInputs, layer: int, scale: float, window: int | None
    ) -> Tensor: ...

    def logits(self, x_NH: Tensor, weight_VH: Tensor) -> Tensor: ...

    def draw(self, logits_NV: Tensor, filters: Filters) -> Tensor: ...


_MODULES: dict[str, _Kernels] = {"torch": composed, "reference": reference}
_kernels: _Kernels = composed
_notices: list[str] = []


def choose(device: torch.device | str, deterministic: bool) -> str:
    """Picks the implementation for a device and says its name.

    ``cpu`` is batch-invariant by construction, so deterministic mode uses it too; ``torch`` is not.
    """
    global _kernels
    _notices.clear()
    if torch.device(device).type == "cpu":
        library = cpu.load()
        if isinstance(library, cpu.CpuKernels):
            _kernels = library
            return f"cpu ({library.isa})"
        _notices.append(library)
    _kernels = reference if deterministic else composed
    return "reference" if deterministic else "torch"


def use(name: str) -> None:
    """Picks an implementation by name (``cpu``, ``torch``, ``reference``), for tests and comparisons.

    Raises:
        ValueError: there is no such implementation here.
    """
    global _kernels
    library = cpu.load() if name == "cpu" else _MODULES.get(name, "unknown name")
    if isinstance(library, str):
        raise ValueError(f"kernels {name!r}: {library}")
    _kernels = library


def notices() -> list[str]:
    """What the operator should know of the last choice."""
    return list(_notices)


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim, same shape."""
    return _kernels.rms_norm(x, weight_H, eps)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds ``x`` to the residual in place, then norms it: (normed, residual)."""
    return _kernels.add_rms_norm(x_TH, residual_TH, weight_H, eps)


def silu_and_mul(x_T2I: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[gate | up]``, [T, I]."""
    return _kernels.silu_and_mul(x_T2I)


def gelu_and_mul(x_T2I: Tensor, tanh: bool) -> Tensor:
    """``gelu(gate) * up`` of ``[gate | up]``, [T, I]."""
    return _kernels.gelu_and_mul(x_T2I, tanh)


def rope_and_write(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cos_sin_PD: Tensor,
    inputs: ForwardInputs,
    layer: int,
    interleaved: bool = False,
) -> None:
    """Rotates q and k in place and writes k and v to the cache; q, k and v may be slices of one matrix."""
    _kernels.rope_and_write(q_THD, k_TGD, v_TGD, cos_sin_PD, inputs, layer, interleaved)


def attention(q_THD: Tensor, inputs: ForwardInputs, layer: int, scale: float, window: int | None) -> Tensor:
    """Causal attention over the paged cache, contiguous [T, H, D]."""
    return _kernels.attention(q_THD, inputs, layer, scale, window)


def logits(x_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """The output head ``x W^T``, summed and returned in float32 whatever the type of its operands, [N, V]."""
    return _kernels.logits(x_NH, weight_VH)


def draw(logits_NV: Tensor, filters: Filters) -> Tensor:
    """A token per row of float32 logits, int64 [N]; see ``sampling``."""
    return _kernels.draw(logits_NV, filters)
