"""LLM engines behind the Backend interface."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tritium.backends.base import Change, Footprint, LoadContext, TextBackend, Timing
from tritium.backends.config import ModelConfig
from tritium.backends.llm_effective import effective, sampling
from tritium.backends.llm_settings import LlmSettings, read_settings
from tritium.backends.llm_tensors import TensorForm, complete_tensors
from tritium.errors import Code, TritiumError, invalid
from tritium.llm.checkpoint import Metadata, find_checkpoint, read_metadata
from tritium.llm.client import EngineClient
from tritium.llm.config import EngineConfig
from tritium.llm.models.families import resolve
from tritium.llm.params import make_params
from tritium.llm.tokenizer import load_tokenizer
from tritium.llm.types import EngineInfo, EngineStats, GenerateRequest, TokenDelta
from tritium.observability import logs
from tritium.settings import Effective
from tritium.types import InferRequest, InferResponse

AFFINITY_TOKENS = 64


class LlmBackend(TextBackend):
    """One or more engines of the same model; requests go to the least busy one, prefixes to the same one."""

    def __init__(self, context: LoadContext) -> None:
        super().__init__(context)
        self._log = logs.get("tritium.llm")
        self._config = context.config
        self._settings: LlmSettings | None = None
        self._form: TensorForm | None = None
        self._effective: dict[str, Effective] = {}
        self._engines: list[EngineClient] = []

    async def complete(self, config: ModelConfig) -> ModelConfig:
        """Adds the standard tensors, all optional: each model speaks text and tokens, whatever its file declares."""
        self._settings = await asyncio.to_thread(read_settings, self.context, find_checkpoint)
        self._config = _completed(config, self._settings)
        return self._config

    async def load(self) -> None:
        """Starts the engines; each has generated a real token when this returns."""
        if self._settings is None:
            await self.complete(self._config)
        settings = self._settings
        assert settings is not None
        metadata = await asyncio.to_thread(read_metadata, Path(settings.engine.model))
        transformer = resolve(metadata)
        self.tokenizer = await asyncio.to_thread(load_tokenizer, metadata)
        self.vocab_size = transformer.vocab
        self.sampling_defaults = sampling_defaults(metadata, settings, self.vocab_size)
        name = f"{self.context.name}/{self.context.version}"
        self._engines = [
            EngineClient(config, self.tokenizer, name=f"{name}[{index}]", env=env)
            for index, (config, env) in enumerate(placements(settings))
        ]
        # One after the other: each sizes its cache by the memory that the others left.
        for engine in self._engines:
            await engine.start()
        info = self.engine_info()
        self._effective = effective(settings, self._engines[0].config, info, metadata)
        self.max_length = min(e.info.max_length for e in self._engines if e.info is not None)
        if info.device == "cpu" and any(g.device == "gpu" for g in settings.groups):
            settings.notices.append("instance_group asks for KIND_GPU, but there is no CUDA device: it runs on the CPU")
        self._notify([*settings.notices, *info.notices])
        self._form = TensorForm(self, settings, self._config)

    async def reconfigure(self, context: LoadContext) -> Change | None:
        """Waits and limits of the queue, priorities, tensors and sampling values: the engines keep their weights."""
        before = self._settings
        if before is None or not self._engines:
            return None
        settings = await asyncio.to_thread(read_settings, context, find_checkpoint)
        now, then = placements(settings), placements(before)
        if [env for _, env in now] != [env for _, env in then] or not all(
            old.same_engine(new) for (old, _), (new, _) in zip(then, now, strict=True)
        ):
            return None
        config = _completed(context.config, settings)
        metadata = await asyncio.to_thread(read_metadata, Path(settings.engine.model))
        defaults = sampling_defaults(metadata, settings, self.vocab_size)

        def apply() -> None:
            self.context, self._settings, self._config = context, settings, config
            self.sampling_defaults = defaults
            self._form = TensorForm(self, settings, config)
            for engine, (queue, _) in zip(self._engines, now, strict=True):
                engine.follow(queue)
            self._notify(settings.notices)

        return Change(config, apply)

    async def footprint(self, context: LoadContext) -> Footprint:
        """What the engines took, the weights by the size of the other checkpoint, the KV cache as it is set."""
        assert self._settings is not None
        settings = await asyncio.to_thread(read_settings, context, find_checkpoint)
        grown = await asyncio.to_thread(_grown, self._settings.engine.model, settings.engine.model)
        budget = self.engine_info().budget
        kv_bytes = settings.engine.kv_cache_bytes
        if kv_bytes is None:
            kv_bytes = budget.kv_bytes
        each = int(budget.weights_bytes * grown) + budget.activations_bytes + kv_bytes
        if self.engine_info().device == "cpu":
            return Footprint(host=each * len(placements(settings)))
        gpus: dict[str, int] = {}
        for _, env in placements(settings):
            gpu = env.get("CUDA_VISIBLE_DEVICES") or next(iter(visible_gpus()), "0")
            gpus[gpu] = gpus.get(gpu, 0) + each
        return Footprint(gpus=gpus)

    def _notify(self, notices: list[str]) -> None:
        for notice in notices:
            self._log.warning("%s/%s: %s", self.context.name, self.context.version, notice)

    async def unload(self) -> None:
        """Ends the engines."""
        engines, self._engines = self._engines, []
        await asyncio.gather(*(engine.stop() for engine in engines))

    def ready(self) -> bool:
        """Whether at least one engine's step loop moves."""
        return any(engine.ready() for engine in self._engines)

    def reason(self) -> str:
        """Why no engine is ready."""
        if self.ready():
            return ""
        return self._engines[0].reason() if self._engines else "not loaded"

    def stream(self, request: InferRequest, timing: Timing) -> AsyncIterator[InferResponse]:
        """Answers an inference request in tensors of text or tokens."""
        if self._form is None:
            raise TritiumError(Code.UNAVAILABLE, f"model '{request.model}' is not loaded")
        return self._form.stream(request, timing)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta]:
        """Continues one sequence on the engine that suits it best."""
        async with aclosing(self._pick(request.tokens).generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    def engine_stats(self) -> list[EngineStats]:
        """One entry per engine, in a fixed order."""
        return [engine.stats for engine in self._engines]

    def engine_infos(self) -> list[EngineInfo]:
        """What each engine said when it became ready."""
        infos = [engine.info for engine in self._engines if engine.info is not None]
        if not infos:
            raise TritiumError(Code.UNAVAILABLE, f"model '{self.context.name}' has no engine")
        return infos

    def engine_settings(self) -> Mapping[str, Effective]:
        """What the files of the model, its checkpoint and the machine made of the settings."""
        return self._effective

    def _pick(self, tokens: list[int]) -> EngineClient:
        """The least loaded engine that is up; among nearly equal ones, always the same for a prefix."""
        up = [e for e in self._engines if e.ready()] or self._engines
        if not up:
            raise TritiumError(Code.UNAVAILABLE, f"model '{self.context.name}' is not loaded")
        least = min(engine.load for engine in up)
        close = [engine for engine in up if engine.load <= least + 1]
        return close[hash(tuple(tokens[:AFFINITY_TOKENS])) % len(close)]


def plan(context: LoadContext) -> tuple[EngineInfo, dict[str, Effective]]:
    """What the first engine of a language model would say of itself, and the settings that its model has for it.

    Starts nothing. Imports torch: it is for the command line.

    Raises:
        TritiumError: the model cannot be loaded.
    """
    from tritium.llm.runner import ranks

    settings = read_settings(context, find_checkpoint)
    engine = placements(settings)[0][0]
    planned = ranks.plan(engine)
    planned.info.notices = [*settings.notices, *planned.notices, *planned.info.notices]
    return planned.info, effective(settings, engine, planned.info, planned.checkpoint.metadata)


def _completed(config: ModelConfig, settings: LlmSettings) -> ModelConfig:
    if config.max_batch_size == 0 and not config.inputs and settings.alias != "vllm":
        # Nobody said how requests look: take batches, since a batch is no more than that many sequences.
        # Clients of vLLM's backend know: it takes one prompt of shape [1].
        config = replace(config, max_batch_size=settings.engine.max_rows)
    return complete_tensors(config)


def _grown(before: str, after: str) -> float:
    """How much larger one checkpoint's files are than another one's."""
    sizes = [
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size
        for path in (Path(before), Path(after))
    ]
    return sizes[1] / max(1, sizes[0])


def placements(settings: LlmSettings) -> list[tuple[EngineConfig, Mapping[str, str]]]:
    """One engine configuration and environment for each engine that instance_group asks for.

    As in Triton, ``count`` is per GPU, and KIND_GPU without a list means each visible one. Engines that
    share a device share its memory and threads.
    """
    spots: list[tuple[str, str | None]] = []
    visible = visible_gpus()
    for group in settings.groups:
        if group.device == "cpu" or (group.device in ("gpu", "auto") and not visible):
            spots += [("cpu" if group.device == "cpu" else "auto", None)] * group.count
        elif group.device == "model" or (group.device == "auto" and not group.gpus):
            spots += [("auto", None)] * group.count
        else:
            wanted = [str(gpu) for gpu in group.gpus] or visible
            for gpu in wanted:
                if gpu not in visible:
                    raise invalid(f"instance_group: gpus names {gpu}, visible are {', '.join(visible)}", param="gpus")
                spots += [("cuda", gpu)] * group.count
    spots = spots or [("auto", None)]
    if len(spots) == 1 and spots[0] == ("auto", None):
        return [(settings.engine, {})]
    return [_place(settings.engine, spot, spots.count(spot)) for spot in spots]


def _place(engine: EngineConfig, spot: tuple[str, str | None], sharing: int) -> tuple[EngineConfig, Mapping[str, str]]:
    device, gpu = spot
    changes: dict[str, Any] = {"memory_fraction": engine.memory_fraction / sharing}
    if engine.device == "auto":
        changes["device"] = device
    if gpu is None and engine.threads is None and sharing > 1:
        changes["threads"] = max(1, (os.cpu_count() or 1) // sharing)
    return replace(engine, **changes), {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}


def visible_gpus() -> list[str]:
    """Indices of the NVIDIA devices that this process may use, without loading any library of theirs."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [part.strip() for part in listed.split(",") if part.strip() not in ("", "-1")]
    try:
        return [str(i) for i in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    except OSError:
        return []


def sampling_defaults(metadata: Metadata, settings: LlmSettings, vocab_size: int) -> Mapping[str, object]:
    """The model's own sampling values: triton_config.json wins over generation_config.json."""
    values = {name.partition(".")[2]: e.value for name, e in sampling(settings, metadata).items()}
    params = make_params(values, vocab_size=vocab_size)
    return {k: v for k, v in msgspec.structs.asdict(params).items() if v != getattr(_PLAIN, k)}


_PLAIN = make_params({}, vocab_size=1)
