"""The ranks of an engine. Rank 0 is in this process; one rank is all there is without parallelism."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tritium.errors import Code, TritiumError, invalid
from tritium.llm.checkpoint import Checkpoint, open_checkpoint
from tritium.llm.config import DeviceName, DTypeName, EngineConfig, TransformerConfig
from tritium.llm.kernels import ops
from tritium.llm.kernels.cpu.binding import cpu_flags
from tritium.llm.models import families
from tritium.llm.models.load import fill, settle, weights_bytes
from tritium.llm.runner import kv_cache
from tritium.llm.runner.inputs import RowTable
from tritium.llm.runner.model_runner import ModelRunner
from tritium.llm.runner.sampler import Sampler
from tritium.llm.types import EngineInfo, NewRow, Resolved, RowStep, SamplingParams, ScheduledBatch, StepOutput

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


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine will do with its settings on this machine; nothing is allocated yet.

    Attributes:
        model: the architecture that the checkpoint's tensors have.
        notices: sentences about the checkpoint, for the operator.
        info: what the engine will say of itself, but for kernels and times.
    """

    checkpoint: Checkpoint
    model: TransformerConfig
    dtype: torch.dtype
    device: torch.device
    notices: list[str]
    info: EngineInfo


def plan(config: EngineConfig) -> Plan:
    """Decides what the settings leave open, and the memory budget: for an engine, and for who wants to know before.

    Raises:
        TritiumError: the checkpoint cannot be read, is not supported or does not fit.
    """
    device = choose_device(config.device)
    usable = kv_cache.usable_bytes(config, device)
    checkpoint = open_checkpoint(Path(config.model), allow_bin=config.allow_bin)
    model, notices = settle(families.resolve(checkpoint.metadata), checkpoint)
    name, reason = choose_dtype(config.dtype, model.dtype, device, quantized=model.quantized)
    dtype = DTYPES[name]
    weights = weights_bytes(model, dtype, device)
    size = kv_cache.plan(config, model, dtype=dtype, device=device, usable=usable, weights=weights)
    info = EngineInfo(
        family=model.family,
        device=str(device),
        dtype=name,
        dtype_reason=reason,
        max_length=size.max_length,
        max_rows=config.max_rows,
        vocab_size=model.vocab,
        budget=size.budget,
        kernels="",
        startup={},
        notices=size.notices,
    )
    info.resolved = _resolved(config, model, info, device)
    return Plan(checkpoint, model, dtype, device, notices, info)


def _resolved(
    config: EngineConfig, model: TransformerConfig, info: EngineInfo, device: torch.device
) -> dict[str, Resolved]:
    """What became of the settings that were left open, and by whose word."""
    follows_checkpoint = device.type != "cpu" or model.dtype == "float32"
    shortened = info.max_length < model.max_positions
    sized = next((name for name in ("num_blocks", "kv_cache_bytes") if getattr(config, name) is not None), "")
    cache = f"from {sized}" if sized else "checkpoint, machine"
    open_ones = {
        "dtype": (config.dtype == "auto", info.dtype, "checkpoint" if follows_checkpoint else "checkpoint, machine"),
        "device": (config.device == "auto", info.device, "machine"),
        "max_length": (config.max_length is None, info.max_length, "machine" if shortened else "checkpoint"),
        "kv_cache_bytes": (config.kv_cache_bytes is None, info.budget.kv_bytes, cache),
        "num_blocks": (config.num_blocks is None, info.budget.num_blocks, cache),
        "threads": (config.threads is None and device.type == "cpu", physical_cores(), "machine"),
    }
    return {name: Resolved(value, source) for name, (is_open, value, source) in open_ones.items() if is_open}


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
        if choose_device(config.device).type == "cpu":
            torch.set_num_threads(config.threads or physical_cores())
        startup: dict[str, float] = {}
        started = time.monotonic()
        planned = plan(config)
        model = self.model = planned.model
        dtype, device, info = planned.dtype, planned.device, planned.info
        kernels = ops.choose(device, config.deterministic)
        decoder = fill(
            model, planned.checkpoint, planned.notices, dtype=dtype, device=device, deterministic=config.deterministic
        )
        startup["load_s"] = time.monotonic() - started
        started = time.monotonic()
        budget = info.budget
        self._runner = ModelRunner(
            decoder,
            kv_cache.KvCache(model, budget.num_blocks, budget.block_size, dtype, device),
            RowTable(
                max_rows=config.max_rows,
                max_length=info.max_length,
                block_size=budget.block_size,
                device=device,
            ),
            Sampler(model.vocab, device, config.seed),
            deterministic=config.deterministic,
        )
        self._warm_up(min(WARM_UP_TOKENS, config.max_tokens_per_step, info.max_length - 1))
        startup["warm_up_s"] = time.monotonic() - started
        info.kernels, info.startup = kernels, startup
        info.notices = [*ops.notices(), *decoder.notices, *info.notices]
        return info

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
    asked: DTypeName,
    stored: DTypeName,
    device: torch.device,
    flags: frozenset[str] | None = None,
    *,
    quantized: str | None = None,
) -> tuple[str, str]:
    """The type of weights and activations, and the sentence that says why.

    Args:
        flags: instruction sets of the CPU; this machine's when None.
        quantized: how the weights are stored, where that is no plain type; ``stored`` is what they become.
    """
    what = f"the checkpoint is {quantized or stored}"
    if asked != "auto":
        return asked, f"dtype is set to {asked}, {what}"
    if stored == "float32" or device.type != "cpu":
        return stored, what + (f", dequantized to {stored}" if quantized else "")
    found = sorted(FAST_FLAGS[stored] & (cpu_flags() if flags is None else flags))
    if found:
        how = f", dequantized to {stored}:" if quantized else " and"
        return stored, f"{what}{how} this CPU has {found[0]}"
    wanted = " or ".join(sorted(FAST_FLAGS[stored]))
    if quantized:
        return "float32", f"{what}, dequantized to float32, which is faster here: this CPU lacks {wanted}"
    return "float32", f"{what}, but this CPU lacks {wanted}, so float32 is faster"


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
