"""The ranks of an engine. Rank 0 is in this process; one rank is all there is without parallelism."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from tritium.errors import Code, TritiumError, invalid
from tritium.llm.checkpoint import open_checkpoint
from tritium.llm.config import DeviceName, DTypeName, EngineConfig, TransformerConfig
from tritium.llm.kernels import ops
from tritium.llm.kernels.cpu.binding import cpu_flags
from tritium.llm.models import families
from tritium.llm.models.load import load
from tritium.llm.runner import kv_cache
from tritium.llm.runner.inputs import RowTable
from tritium.llm.runner.model_runner import ModelRunner
from tritium.llm.runner.sampler import Sampler
from tritium.llm.types import EngineInfo, NewRow, RowStep, SamplingParams, ScheduledBatch, StepOutput

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# What makes 16-bit products on a CPU faster than float32 ones.
FAST_FLAGS = {"bfloat16": frozenset({"avx512_bf16", "amx_bf16"}), "float16": frozenset({"avx512_fp16", "amx_fp16"})}
WARM_UP_TOKENS = 64


class Handle:
    """A submitted step."""

    def __init__(self, output: StepOutput | None, error: Exception | None) -> None:
        self._output = output
        self._error = error

    def result(self) -> StepOutput:
        """The step's output.

        Raises:
            Exception: what the step raised.
        """
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output


class RankGroup:
    """Loads a model and runs batches on it.

    Attributes:
        model: facts of the architecture; set by ``load``.
    """

    Handle = Handle

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._runner: ModelRunner | None = None
        self.model: TransformerConfig | None = None

    def load(self) -> EngineInfo:
        """Reads the checkpoint, sizes the cache and runs a first batch.

        Raises:
            TritiumError: the checkpoint cannot be read, is not supported or does not fit.
        """
        config = self._config
        device = choose_device(config.device)
        if device.type == "cpu":
            torch.set_num_threads(config.threads or physical_cores())
        startup: dict[str, float] = {}
        started = time.monotonic()
        usable = kv_cache.usable_bytes(config, device)
        checkpoint = open_checkpoint(Path(config.model), allow_bin=config.allow_bin)
        model = self.model = families.resolve(checkpoint.metadata)
        name, reason = choose_dtype(config.dtype, model.dtype, device)
        dtype = DTYPES[name]
        kernels = ops.choose(device, config.deterministic)
        decoder = load(model, checkpoint, dtype=dtype, device=device, deterministic=config.deterministic)
        size = kv_cache.plan(config, model, dtype=dtype, device=device, usable=usable, weights=decoder.weights_bytes)
        startup["load_s"] = time.monotonic() - started
        started = time.monotonic()
        budget = size.budget
        self._runner = ModelRunner(
            decoder,
            kv_cache.KvCache(model, budget.num_blocks, budget.block_size, dtype, device),
            RowTable(
                max_rows=config.max_rows,
                max_length=size.max_length,
                block_size=budget.block_size,
                device=device,
            ),
            Sampler(model.vocab, device, config.seed),
            deterministic=config.deterministic,
        )
        self._warm_up(min(WARM_UP_TOKENS, config.max_tokens_per_step, size.max_length - 1))
        startup["warm_up_s"] = time.monotonic() - started
        return EngineInfo(
            family=model.family,
            device=str(device),
            dtype=name,
            dtype_reason=reason,
            max_length=size.max_length,
            max_rows=config.max_rows,
            vocab_size=model.vocab,
            budget=budget,
            kernels=kernels,
            startup=startup,
            notices=[*ops.notices(), *decoder.notices, *size.notices],
        )

    def submit(self, batch: ScheduledBatch) -> Handle:
        """Runs a batch; batches must come in the order in which they were scheduled."""
        if self._runner is None:
            raise TritiumError(Code.INTERNAL, "the ranks are not loaded")
        try:
            return Handle(self._runner.run(batch), None)
        except Exception as error:  # told where the output would have been read
            return Handle(None, error)

    def close(self) -> None:
        """Gives the model's memory back."""
        self._runner = None

    def _warm_up(self, count: int) -> None:
        """A prompt and one more token: libraries pick their kernels, threads start."""
        blocks = list(range(-(-(count + 1) // self._config.block_size)))
        new = NewRow(0, [0] * count, count, [], SamplingParams(temperature=0.0))
        prompt = ScheduledBatch(0, [], [new], [RowStep(0, 0, count, blocks, True)], [])
        following = ScheduledBatch(0, [], [], [RowStep(0, count, 1, [], True)], [])
        for batch in (prompt, following):
            self.submit(batch).result()
        assert self._runner is not None
        self._runner.sampler.forget(0)


def choose_device(name: DeviceName) -> torch.device:
    """The device of a setting; ``auto`` takes CUDA where there is one.

    Raises:
        TritiumError: INVALID_ARGUMENT when CUDA is asked for and torch sees none.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise invalid("device is cuda, but torch sees no CUDA device; expected cpu or auto here", param="device")
    return torch.device("cuda")


def choose_dtype(
    asked: DTypeName, stored: DTypeName, device: torch.device, flags: frozenset[str] | None = None
) -> tuple[str, str]:
    """The type of weights and activations, and the sentence that says why.

    Args:
        flags: instruction sets of the CPU; this machine's when None.
    """
    if asked != "auto":
        return asked, f"dtype is set to {asked}"
    if stored == "float32" or device.type != "cpu":
        return stored, f"the checkpoint is {stored}"
    found = sorted(FAST_FLAGS[stored] & (cpu_flags() if flags is None else flags))
    if found:
        return stored, f"the checkpoint is {stored} and this CPU has {found[0]}"
    wanted = " or ".join(sorted(FAST_FLAGS[stored]))
    return "float32", f"the checkpoint is {stored}, but this CPU lacks {wanted}, so float32 is faster"


def physical_cores(root: Path = Path("/")) -> int:
    """Cores that this process may run on: its affinity without hyper-threads, within the cgroup's quota."""
    allowed = os.sched_getaffinity(0)
    cores: set[str] = set()
    for cpu in allowed:
        try:
            path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            cores.add(path.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    count = len(cores)
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup, or "max"
        pass
    return count
