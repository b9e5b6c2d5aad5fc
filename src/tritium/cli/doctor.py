"""``tritium doctor``: is this machine ready? Each check has a status and, where something is wrong, a fix."""

from __future__ import annotations

import json
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tritium.cli import options
from tritium.cli.flags import Parsed
from tritium.errors import TritiumError, pip_install, python_command
from tritium.launch import addresses, first_plans
from tritium.llm.config import EngineConfig
from tritium.llm.names import NAMED
from tritium.observability.tables import size
from tritium.settings import ServerSettings, environment

Status = Literal["ok", "note", "warning", "broken"]

NVIDIA = Path("/proc/driver/nvidia/version")
SHM_BYTES = 64 << 20
MEMLOCK_BYTES = 64 << 20
OPEN_FILES = 4096


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        status: ``broken`` stops Tritium from serving; ``warning`` costs speed or a feature; ``note`` is a fact.
        fix: what to do about it; "" when there is nothing to do.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


def doctor(parsed: Parsed) -> int:
    """Runs all checks; 1 when something is broken."""
    asked = parsed.get(options.Doctor)
    settings = parsed.get(ServerSettings)
    config = parsed.get(EngineConfig, model="")
    checks = [
        *software(),
        *processor(),
        *device(config),
        *kernels(),
        *limits(),
        *extras(),
        *ports(settings),
        *(fits(replace(settings, model=asked.model), parsed.chosen(EngineConfig)) if asked.model is not None else []),
    ]
    if asked.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        for check in checks:
            print(f"{check.status:<8} {check.name:<14} {check.detail}")
            if check.fix:
                print(f"{'':<8} {'':<14} fix: {check.fix}")
    return int(any(check.status == "broken" for check in checks))


def software() -> Iterable[Check]:
    """Python, the operating system and torch."""
    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    if sys.platform != "linux":
        yield Check("system", "warning", f"{platform.system()}: only Linux is tested")
    try:
        import torch
    except ImportError as error:
        yield Check("torch", "broken", f"cannot be imported: {error}", "make install")
        return
    cuda = torch.version.cuda
    yield Check("torch", "ok", f"{torch.__version__} ({'CUDA ' + cuda if cuda else 'CPU build'})")


def processor() -> Iterable[Check]:
    """Vector units and free memory."""
    from tritium.llm.kernels.cpu.binding import cpu_flags
    from tritium.llm.runner.kv_cache import free_host_bytes

    flags = cpu_flags()
    fast = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    name = f"{platform.machine()}, {', '.join(fast) or 'no AVX2'}"
    if "avx512_bf16" in flags or "amx_bf16" in flags:
        yield Check("cpu", "ok", f"{name}: bfloat16 in hardware")
    else:
        yield Check("cpu", "note", f"{name}: no bfloat16 in hardware, float32 is the faster type")
    yield Check("memory", "ok", f"{size(free_host_bytes())} available")


def device(config: EngineConfig) -> Iterable[Check]:
    """The NVIDIA driver, CUDA as torch sees it, and each device's memory."""
    import torch

    visible = environment("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            detail = f"{facts.name}, compute {facts.major}.{facts.minor}, {size(free)} of {size(total)} free"
            bf16 = facts.major >= 8
            yield Check(
                f"cuda:{index}", "ok" if bf16 else "note", detail + ("" if bf16 else ": no bfloat16, use float16")
            )
    elif NVIDIA.exists() and torch.version.cuda is None:
        yield Check("cuda", "warning", "there is an NVIDIA driver, but torch is a CPU build", pip_install("torch"))
    elif NVIDIA.exists() and visible is not None:
        yield Check("cuda", "warning", f"no device is visible (CUDA_VISIBLE_DEVICES={visible!r})", "unset it")
    elif NVIDIA.exists():
        yield Check("cuda", "warning", "there is an NVIDIA driver, but torch finds no device", "compare nvidia-smi")
    elif config.device == "cuda":
        yield Check("cuda", "broken", "device is cuda, but there is no NVIDIA driver", "--device cpu")
    else:
        yield Check("cuda", "note", "no NVIDIA driver: models run on the CPU")


def kernels() -> Iterable[Check]:
    """The CPU kernels that are compiled at install."""
    from tritium.llm.kernels.cpu import CpuKernels, load

    found = load(compile=False)
    if isinstance(found, CpuKernels):
        yield Check("kernels", "ok", f"C++ kernels for {found.isa}")
    elif "is missing" in found and shutil.which("g++"):
        fix = python_command("-m", "tritium.llm.kernels.cpu")
        yield Check("kernels", "note", "not built for these sources; the first engine that starts compiles them", fix)
    else:
        compiler = "" if shutil.which("g++") else "apt-get install g++, then "
        yield Check("kernels", "warning", found, compiler + python_command("-m", "tritium.llm.kernels.cpu"))


def limits() -> Iterable[Check]:
    """Shared memory, locked memory, open files."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield Check(
            "/dev/shm", "warning", "missing: shared-memory regions will not work", "mount -t tmpfs tmpfs /dev/shm"
        )
    else:
        free = shutil.disk_usage(shm).free
        fix = "" if free >= SHM_BYTES else "mount -o remount,size=1G /dev/shm (docker: --shm-size=1g)"
        yield Check("/dev/shm", "ok" if not fix else "warning", f"{size(free)} free", fix)
    # Locked memory is what CUDA copies from; without a device nobody asks for it.
    short: Status = "warning" if NVIDIA.exists() else "note"
    unlimited = "ulimit -l unlimited (docker: --ulimit memlock=-1)"
    yield _limit("memlock", resource.RLIMIT_MEMLOCK, MEMLOCK_BYTES, size, short, unlimited)
    yield _limit("open files", resource.RLIMIT_NOFILE, OPEN_FILES, str, "warning", "ulimit -n 65536")


def _limit(name: str, which: int, enough: int, shown: Callable[[int], str], short: Status, fix: str) -> Check:
    soft, _ = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY:
        return Check(name, "ok", "unlimited")
    return Check(name, "ok", shown(soft)) if soft >= enough else Check(name, short, f"limit {shown(soft)}", fix)


def extras() -> Iterable[Check]:
    """Optional packages."""
    if find_spec("sentencepiece") is None:
        detail = "not installed: checkpoints that have only tokenizer.model cannot be served"
        yield Check("sentencepiece", "note", detail, pip_install("tritium[sentencepiece]"))
    else:
        yield Check("sentencepiece", "ok", metadata.version("sentencepiece"))
    for model in NAMED.values():
        file = model.file()
        if file is None:
            yield Check(model.name, "note", "not installed", model.install)
        else:
            yield Check(model.name, "ok", str(file))


def ports(settings: ServerSettings) -> Iterable[Check]:
    """Whether the ports of ``serve`` are free."""
    for name, host, port in addresses(settings):
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            fix = f"end what listens there (ss -ltnp 'sport = :{port}'), or choose another --{name}-port"
            yield Check(f"{name} port", "broken", f"{host}:{port}: {error.strerror}", fix)
        else:
            yield Check(f"{name} port", "ok", f"{host}:{port} is free")


def fits(settings: ServerSettings, engine: Mapping[str, Any]) -> Iterable[Check]:
    """Whether a model fits into memory, and what is left for its cache: the very plan that an engine makes.

    Args:
        engine: engine settings that were given.
    """
    from tritium.backends.llm import plan

    try:
        ((_, found),) = first_plans(replace(settings, model_repository=()), engine)
        if isinstance(found, TritiumError):
            raise found
        info, _ = plan(found.contexts[0])
    except TritiumError as error:
        yield Check("model", "broken", error.message)
        return
    budget = info.budget
    tokens = budget.num_blocks * budget.block_size
    detail = (
        f"{settings.model}: {info.dtype} on {info.device} ({info.dtype_reason}); weights {size(budget.weights_bytes)}, "
        f"activations {size(budget.activations_bytes)}, KV cache {size(budget.kv_bytes)} for {tokens} tokens "
        f"({size(budget.kv_bytes_per_token)} per token), {size(budget.margin_bytes)} left free; {info.max_length} "
        "tokens at most in a sequence"
    )
    yield Check("model", "warning" if info.notices else "ok", "; ".join([detail, *info.notices]))
