"""ctypes binding of the C++ library: pointers out of tensors, one prepared struct per pass."""

from __future__ import annotations

import ctypes
import functools
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch  # loads torch's own OpenMP runtime, which the library then shares
from torch import Tensor

from tritium.llm.kernels import composed, sampling
from tritium.llm.kernels.cpu.build import ISAS, build, library_path, source_hash
from tritium.observability import logs

if TYPE_CHECKING:
    from tritium.llm.layers.inputs import ForwardInputs

FOLDER = Path(__file__).parent
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SILU, GELU_TANH, GELU_ERF = 0, 1, 2

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "tritium_rms_norm": [_INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT, _FLOAT],
    "tritium_add_rms_norm": [_INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _FLOAT],
    "tritium_gated": [_INT, _INT, _POINTER, _POINTER, _INT, _INT],
    "tritium_rope_and_write": [*[_POINTER] * 7, *[_INT] * 5],
    "tritium_logits": [_INT, *[_POINTER] * 3, *[_INT] * 3],
    "tritium_draw": [_POINTER, _INT, _INT, *[_POINTER] * 6],
    "tritium_attention": [_POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER, _FLOAT, _INT],
}

_log = logs.get("tritium.engine")


class Batch(ctypes.Structure):
    """``Batch`` of batch.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("positions", "slots", "query_starts", "contexts", "table")),
        *((name, _INT) for name in ("table_stride", "rows", "tokens", "heads", "kv_heads", "head_dim")),
        *((name, _INT) for name in ("block_size", "dtype")),
    ]


class CpuKernels:
    """The ops on CPU tensors of float32, bfloat16 and float16; definitions in ``kernels.reference``."""

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self.isa = isa
        self._rms_norm = library.tritium_rms_norm
        self._add_rms_norm = library.tritium_add_rms_norm
        self._gated = library.tritium_gated
        self._rope_and_write = library.tritium_rope_and_write
        self._attention = library.tritium_attention
        self._logits = library.tritium_logits
        self._draw = library.tritium_draw

    def rms_norm(self, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """``reference.rms_norm``."""
        dtype, wide = weight_H.dtype, x.dtype == torch.float32
        if not wide and x.dtype != dtype:
            return composed.rms_norm(x, weight_H, eps)
        out = torch.empty(x.shape, dtype=dtype)
        size = x.shape[-1]
        if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == size:
            outer, inner, stride = x.shape[0], x.shape[1], x.stride(0)
        else:
            x = x.contiguous()
            outer, inner, stride = x.numel() // size, 1, size
        pointers = (x.data_ptr(), out.data_ptr(), weight_H.data_ptr())
        self._rms_norm(DTYPES[dtype], wide, *pointers, outer, stride, inner, size, eps)
        return out

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``reference.add_rms_norm``."""
        dtype, wide = x_TH.dtype, residual_TH.dtype == torch.float32
        if not residual_TH.is_contiguous() or weight_H.dtype != dtype or not (wide or residual_TH.dtype == dtype):
            return composed.add_rms_norm(x_TH, residual_TH, weight_H, eps)
        x_TH = x_TH.contiguous()
        out = torch.empty_like(x_TH)
        rows, size = x_TH.numel() // x_TH.shape[-1], x_TH.shape[-1]
        pointers = (x_TH.data_ptr(), residual_TH.data_ptr(), weight_H.data_ptr(), out.data_ptr())
        self._add_rms_norm(DTYPES[dtype], wide, *pointers, rows, size, eps)
        return out, residual_TH

    def silu_and_mul(self, x_T2I: Tensor) -> Tensor:
        """``reference.silu_and_mul``."""
        return self._gate(x_T2I, SILU)

    def gelu_and_mul(self, x_T2I: Tensor, tanh: bool) -> Tensor:
        """``reference.gelu_and_mul``."""
        return self._gate(x_T2I, GELU_TANH if tanh else GELU_ERF)

    def _gate(self, x_T2I: Tensor, kind: int) -> Tensor:
        x = x_T2I.contiguous()
        tokens, size = x.shape[0], x.shape[1] // 2
        out = torch.empty((tokens, size), dtype=x.dtype)
        self._gated(DTYPES[x.dtype], kind, x.data_ptr(), out.data_ptr(), tokens, size)
        return out

    def rope_and_write(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        cos_sin_PD: Tensor,
        inputs: ForwardInputs,
        layer: int,
        interleaved: bool = False,
    ) -> None:
        """``reference.rope_and_write``."""
        keys, values = inputs.keys[layer], inputs.values[layer]
        same_type = q_THD.dtype == k_TGD.dtype == v_TGD.dtype == keys.dtype
        packed = _heads_packed(q_THD) and _heads_packed(k_TGD) and _heads_packed(v_TGD)
        if not (same_type and packed and cos_sin_PD.is_contiguous() and cos_sin_PD.dtype == torch.float32):
            composed.rope_and_write(q_THD, k_TGD, v_TGD, cos_sin_PD, inputs, layer, interleaved)
            return
        self._rope_and_write(
            _batch(inputs, q_THD.shape[1]),
            q_THD.data_ptr(),
            k_TGD.data_ptr(),
            v_TGD.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            cos_sin_PD.data_ptr(),
            cos_sin_PD.shape[1],
            interleaved,
            q_THD.stride(0),
            k_TGD.stride(0),
            v_TGD.stride(0),
        )

    def attention(self, q_THD: Tensor, inputs: ForwardInputs, layer: int, scale: float, window: int | None) -> Tensor:
        """``reference.attention``."""
        keys = inputs.keys[layer]
        q_THD = q_THD.to(keys.dtype)
        if not _heads_packed(q_THD):
            q_THD = q_THD.contiguous()
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        self._attention(
            _batch(inputs, q_THD.shape[1]),
            q_THD.data_ptr(),
            q_THD.stride(0),
            out.data_ptr(),
            keys.data_ptr(),
            inputs.values[layer].data_ptr(),
            scale,
            window or 0,
        )
        return out

    def logits(self, x_NH: Tensor, weight_VH: Tensor) -> Tensor:
        """``reference.logits``."""
        if x_NH.dtype != weight_VH.dtype or not weight_VH.is_contiguous():
            return composed.logits(x_NH, weight_VH)
        x_NH = x_NH.contiguous()
        count, vocab = x_NH.shape[0], weight_VH.shape[0]
        out = torch.empty((count, vocab), dtype=torch.float32)
        pointers = (x_NH.data_ptr(), weight_VH.data_ptr(), out.data_ptr())
        self._logits(DTYPES[x_NH.dtype], *pointers, count, vocab, weight_VH.shape[1])
        return out

    def draw(self, logits_NV: Tensor, filters: sampling.Filters) -> Tensor:
        """``sampling.draw``."""
        if logits_NV.dtype != torch.float32:
            return sampling.draw(logits_NV, filters)
        logits_NV = logits_NV.contiguous()
        columns = [
            column.to(dtype).contiguous()
            for column, dtype in zip(
                filters, (torch.float32, torch.int64, torch.float64, torch.float32, torch.float64), strict=True
            )
        ]
        tokens_N = torch.empty(logits_NV.shape[0], dtype=torch.int64)
        pointers = (column.data_ptr() for column in columns)
        self._draw(logits_NV.data_ptr(), *logits_NV.shape, *pointers, tokens_N.data_ptr())
        return tokens_N


def _heads_packed(x_THD: Tensor) -> bool:
    """Whether only the stride between tokens is free, as in a slice of a fused q, k, v matrix."""
    return x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]


def _batch(inputs: ForwardInputs, heads: int) -> int:
    """Address of the pass's ``Batch``, filled on its first use; it holds on to the tensors that it points to."""
    prepared = inputs.prepared
    if prepared is None or prepared[0] != heads:
        prepared = inputs.prepared = _prepare(inputs, heads)
    return prepared[1]


def _prepare(inputs: ForwardInputs, heads: int) -> tuple[int, int, Batch, list[Tensor]]:
    cache = inputs.keys[0]
    if not cache.is_contiguous() or inputs.block_table_BM.stride(-1) != 1:
        raise ValueError("the KV cache and the rows of the block table must be contiguous")
    tensors = [
        inputs.positions_T.long().contiguous(),
        inputs.slots_T.long().contiguous(),
        inputs.query_starts_B1.int().contiguous(),
        inputs.context_lens_B.int().contiguous(),
        inputs.block_table_BM.int(),
    ]
    struct = Batch(
        *(t.data_ptr() for t in tensors),
        tensors[4].stride(0),
        inputs.context_lens_B.shape[0],
        inputs.tokens_T.shape[0],
        heads,
        cache.shape[1],
        cache.shape[3],
        cache.shape[2],
        DTYPES[cache.dtype],
    )
    return heads, ctypes.addressof(struct), struct, tensors


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this machine as Linux names them; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


@functools.cache
def load(isa: str | None = None, *, compile: bool = True) -> CpuKernels | str:
    """The library of the newest instruction set that this machine has (or of ``isa``), or why there is none.

    Only a library of the present sources is taken. Where it is missing it is compiled, which takes some seconds.

    Args:
        compile: whether that may be done here.
    """
    flags = cpu_flags()
    usable = [name for name, (_, needs) in ISAS.items() if needs <= flags and isa in (None, name)]
    if not usable:
        return f"the CPU ({platform.machine()}) lacks AVX2; attention and norms run on torch, slower"
    path = library_path(FOLDER, usable[0])
    problem = f"{path.name} is missing"
    if not path.exists() and compile:
        _log.info("the C++ kernels of these sources are not built, compiling them", isa=usable[0])
        started = time.monotonic()
        _, problem = build(FOLDER, usable[:1])
        if not problem:
            _log.info("the C++ kernels are compiled", isa=usable[0], seconds=round(time.monotonic() - started, 1))
    if not path.exists():
        return f"the C++ kernels are not built ({problem}); attention and norms run on torch, slower"
    return _open(path, usable[0])


def _open(path: Path, isa: str) -> CpuKernels | str:
    """The library, which says itself of which sources it is: a file that was renamed is refused."""
    again = f"attention and norms run on torch, slower; remove {path} to have it compiled again"
    try:
        library = ctypes.CDLL(str(path))
        library.tritium_source_hash.restype = ctypes.c_char_p
        if library.tritium_source_hash().decode() != source_hash(path.parent, isa):
            return f"the C++ kernels were built from other sources; {again}"
        return CpuKernels(library, isa)
    except (OSError, AttributeError) as error:
        return f"the C++ kernels do not load ({error}); {again}"
