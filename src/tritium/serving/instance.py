"""Instance: one executing copy of a model version, in a process of its own or in a thread of this one.

How a batcher uses it::

    instance = Instance(context, "echo_0", services, backend="tritium.backends.python:PythonBackend")
    config = await instance.start()                        # auto-completed; further ones: start(config)
    await instance.free()                                  # ready and idle: form the batch now (late binding)
    execution = instance.execute(batch)                    # at once; the instance is busy from here
    while replies := await execution.some():               # or: async for reply in execution
        for reply in replies: ...reply.index, reply.response, reply.rescheduled
    execution.times                                        # input_ns, infer_ns, output_ns
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

from tritium.backends import wire
from tritium.backends.base import LoadContext, Placement
from tritium.backends.config import ModelConfig
from tritium.errors import Code, TritiumError
from tritium.observability import logs
from tritium.serving.config import make_config, parse_json
from tritium.serving.execution import Execution, Reply, Times
from tritium.serving.process import Process
from tritium.serving.services import Services
from tritium.serving.thread import Thread
from tritium.types import InferRequest

__all__ = ["Execution", "Instance", "Reply", "Services", "Times"]

MAX_BACKOFF_S = 30.0
# A life this long is no crash loop, in seconds.
STEADY_S = 30.0

_log = logs.get(__name__)


class Instance:
    """One executing copy of a model; restarts by itself when its process dies.

    Args:
        context: of the model.
        name: ``<group name>_<number>``, as the model and error messages see it.
        services: what the model may ask of the server.
        backend: "module:Class" of the ``InstanceBackend``.
        placement: whether it gets a process, which may die without harm, or a thread, to which nothing is copied.

    Attributes:
        life: counts the processes: a new one knows nothing of what the last one was told.
        on_free: called when it has become ready, and whenever a batch has returned; None for nobody.
    """

    def __init__(
        self,
        context: LoadContext,
        name: str,
        services: Services,
        *,
        backend: str = "tritium.backends.python:PythonBackend",
        kind: Literal["cpu", "gpu", "model"] = "cpu",
        device_id: int = 0,
        placement: Placement = "process",
    ) -> None:
        self.name = name
        self.kind: Literal["cpu", "gpu", "model"] = kind
        self.life = 0
        self.on_free: Callable[[], None] | None = None
        self._context = context
        self._services = services
        self._backend = backend
        self._device_id = device_id
        self._config: ModelConfig | None = None
        self._placement: Placement = placement
        self._process: Process | Thread | None = None
        self._reason = "the instance is not started"
        self._free = asyncio.Event()
        self._restart: asyncio.Task[None] | None = None
        self._stopped = False
        self._crashes = 0
        self._since = 0.0

    @property
    def ready(self) -> bool:
        """Whether it would take a batch, now or once the running one is through."""
        return not self._reason

    @property
    def busy(self) -> bool:
        """Whether the model's ``execute`` is running."""
        return self._process is not None and self._process.busy

    @property
    def reason(self) -> str:
        """Why it is not ready; "" when it is."""
        return self._reason

    @property
    def pid(self) -> int | None:
        """Process id of the host; None while there is none, and for a thread."""
        return None if self._process is None or self._process.ended else self._process.pid

    async def start(self, config: ModelConfig | None = None) -> ModelConfig:
        """Starts the process, completes the configuration, loads the model.

        Args:
            config: a completed and checked configuration; without one, ``context.config`` is completed.

        Raises:
            TritiumError: INTERNAL with the text of the model's exception; INVALID_ARGUMENT when the completed
                configuration is none.
        """
        self._config = await self._launch(config)
        return self._config

    async def _launch(self, config: ModelConfig | None) -> ModelConfig:
        """One new process or thread, loaded."""
        process = self._host()
        self._process = process
        try:
            await process.start()
            described = await process.exchange(self._setup(config), wire.Described)
            if config is None:
                source = parse_json(described.config, "the completed configuration")
                config = make_config(source, self._context.name, "the completed configuration")
            await process.exchange(wire.Load(json.dumps(config.to_json())), wire.Loaded)
        except BaseException as error:
            self._reason = error.message if isinstance(error, TritiumError) else "the load was given up"
            await process.kill()
            if isinstance(process, Process) and isinstance(error, TritiumError) and error.code is Code.UNAVAILABLE:
                raise TritiumError(Code.INTERNAL, f"the process of instance '{self.name}' ended in its load") from error
            raise
        if process.ended:
            raise TritiumError(Code.INTERNAL, f"the process of instance '{self.name}' ended after its load")
        self.life += 1
        self._since = time.monotonic()
        self._reason = ""
        self._idle()
        return config

    def _host(self) -> Process | Thread:
        if self._placement == "thread":
            return Thread(self.name, self._context.name, self._idle)
        return Process(self.name, self._context.name, self._services, self._idle, self._died)

    def _setup(self, config: ModelConfig | None) -> wire.Setup:
        context = self._context
        return wire.Setup(
            self._backend,
            context.name,
            context.version,
            "" if context.model_folder is None else str(context.model_folder),
            "" if context.version_folder is None else str(context.version_folder),
            self.name,
            self.kind,
            self._device_id,
            dict(context.backend_config),
            context.auto_complete,
            json.dumps((config or context.config).to_json()),
            config is None,
        )

    async def stop(self) -> None:
        """Finalizes the model and ends the process; executions inside end with UNAVAILABLE."""
        self._stopped = True
        self._reason = "the instance is stopped"
        self._free.set()
        if self._restart is not None:
            self._restart.cancel()
            with suppress(asyncio.CancelledError):
                await self._restart
        if self._process is not None:
            await self._process.stop()

    async def free(self) -> None:
        """Returns when the instance is ready and idle.

        Raises:
            TritiumError: UNAVAILABLE when it was stopped.
        """
        while True:
            if self._stopped:
                raise TritiumError(Code.UNAVAILABLE, f"instance '{self.name}' is stopped")
            if self.ready and not self.busy:
                return
            self._free.clear()
            await self._free.wait()

    @property
    def idle(self) -> bool:
        """Whether it would run a batch at once."""
        return not self._reason and not self.busy

    def execute(self, requests: Sequence[InferRequest], *, ahead: bool = False) -> Execution:
        """Runs a batch. Sequence, timeout, parameters and outputs of each request reach the model.

        Args:
            ahead: it may be busy with an earlier one; the batch then waits in front of the model.

        Raises:
            TritiumError: UNAVAILABLE when it is not ready (died a moment ago): form the batch again.
        """
        process = self._process
        if self._reason or process is None:
            raise TritiumError(Code.UNAVAILABLE, f"instance '{self.name}' is not ready: {self._reason}")
        if process.busy and not ahead:
            raise TritiumError(Code.INTERNAL, f"instance '{self.name}' is busy, expected a batch when it is free")
        return process.execute(requests)

    async def healthy(self) -> bool:
        """What the model's ``is_ready`` says; True without one."""
        if self._process is None or not self.ready:
            return False
        with suppress(TritiumError):
            return await self._process.well()
        return False

    def _idle(self) -> None:
        if not self.ready:
            return
        self._free.set()
        if self.on_free is not None:
            self.on_free()

    # -- restarts -------------------------------------------------------------------------------------------

    def _died(self, why: str) -> None:
        """The process is gone; one that was loaded gets a successor."""
        if self._reason or self._stopped:
            return
        self._reason = "its process died and is being started again"
        if time.monotonic() - self._since > STEADY_S:
            self._crashes = 0
        self._crashes += 1
        _log.error("a model's process died", model=self._context.name, instance=self.name, why=why)
        self._restart = asyncio.create_task(self._start_again())

    async def _start_again(self) -> None:
        """The first time at once, then with growing pauses, for as long as it takes."""
        while not self._stopped:
            if self._process is not None:
                await self._process.kill()
            if self._crashes > 1:
                await asyncio.sleep(min(0.25 * 2.0 ** (self._crashes - 2), MAX_BACKOFF_S))
            try:
                await self._launch(self._config)
            except TritiumError as error:
                self._crashes += 1
                self._reason = f"it cannot be started again: {error.message}"
                _log.error("a model's process cannot be started again", instance=self.name, error=error.message)
            else:
                _log.info("a model's process was started again", model=self._context.name, instance=self.name)
                return
