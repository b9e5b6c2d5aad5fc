"""EnsembleRunner: a request through a graph of models, each step as soon as it has its tensors.

A decoupled step answers any number of times. Each of its answers has an index, and what follows it runs once for
each: a tensor that is made after n decoupled steps has an index of n numbers, and a step takes the tensors whose
indices agree. Answers leave in the order of their indices.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import replace

from tritium.backends import is_text
from tritium.backends.base import Backend, LoadContext, Timing
from tritium.backends.config import Ensemble, ModelConfig
from tritium.errors import Code, TritiumError
from tritium.observability import logs
from tritium.serving.batch import rows_of
from tritium.serving.closing import closing
from tritium.serving.graph import Graph, Node, build
from tritium.serving.stats import ModelStats
from tritium.types import InferRequest, InferResponse, RequestedOutput, Tensor

_log = logs.get(__name__)

# Answers that are under way behind a decoupled step or wait for the client; when there are more, the step waits too.
MAX_UNREAD = 32

Index = tuple[int, ...]
Call = Callable[[InferRequest], AsyncIterator[InferResponse]]


class EnsembleRunner(Backend):
    """The backend of an ensemble.

    Args:
        find: the configuration of a model that is served, by name and version (-1 for any).
        call: sends a request to a model of the server.
    """

    def __init__(
        self, context: LoadContext, find: Callable[[str, int], ModelConfig], call: Call, stats: ModelStats
    ) -> None:
        super().__init__(context)
        self._config = context.config
        self._find = find
        self._call = call
        self._stats = stats
        self._graph = Graph((), {}, {})
        self._limit = 0
        self._up = False

    async def complete(self, config: ModelConfig) -> ModelConfig:
        """Checks the graph; an ensemble is decoupled when a step is.

        Raises:
            TritiumError: INVALID_ARGUMENT naming what does not go together.
        """
        assert isinstance(config.batching, Ensemble)
        self._graph = build(config, config.batching, self._find)
        self.answers_once = all(_once(node.config, self._find) for node in self._graph.nodes)
        self._limit = config.batching.max_inflight
        self._config = replace(config, decoupled=self._graph.decoupled)
        return self._config

    async def load(self) -> None:
        """Nothing is to be loaded: the steps are models of their own."""
        self._up = True

    async def unload(self) -> None:
        """Takes no more; whoever asked for an answer ends what runs for it."""
        self._up = False

    def ready(self) -> bool:
        """Whether it is loaded."""
        return self._up

    def current(self) -> bool:
        """Whether the steps are still the models that the graph was made for."""
        try:
            return all(self._find(node.step.model, node.step.version) == node.config for node in self._graph.nodes)
        except TritiumError:
            return False

    async def stream(self, request: InferRequest, timing: Timing) -> AsyncGenerator[InferResponse]:
        """Answers one request; closing the iterator cancels what runs for it.

        Raises:
            TritiumError: what a step failed with.
        """
        begin_ns = time.monotonic_ns()
        timing.queue_ns = max(1, begin_ns - request.arrived_ns)
        run = _Run(self._config, self._graph, request, self._call, self._limit)
        rows, output_ns = rows_of(self._config, request), 0
        try:
            run.begin()
            timing.input_ns = time.monotonic_ns() - begin_ns
            async for outputs in run.answers():
                made_ns = time.monotonic_ns()
                answer = self._response(request, outputs, final=not self._graph.decoupled)
                output_ns += time.monotonic_ns() - made_ns
                timing.output_ns = output_ns
                yield answer
            if self._graph.decoupled:
                yield InferResponse("", "", "", final=True, empty=True)
        finally:
            await run.close()
            infer_ns = max(0, time.monotonic_ns() - begin_ns - timing.input_ns - output_ns)
            self._stats.executed(rows, input_ns=timing.input_ns, infer_ns=infer_ns, output_ns=output_ns)

    def _response(self, request: InferRequest, outputs: list[Tensor], final: bool) -> InferResponse:
        sequence = request.sequence
        parameters: dict[str, bool | int | float | str] = {
            "sequence_id": sequence.id if sequence is not None else 0,
            "sequence_start": sequence is not None and sequence.start,
            "sequence_end": sequence is not None and sequence.end,
        }
        return InferResponse("", "", "", outputs, parameters, final=final)


def _once(config: ModelConfig, find: Callable[[str, int], ModelConfig]) -> bool:
    """Whether a step has one answer to a request that asks for no stream."""
    if not config.decoupled:
        return True
    if isinstance(config.batching, Ensemble):
        return all(_once(find(step.model, step.version), find) for step in config.batching.steps)
    return is_text(config.backend, config.platform)


class _Gate:
    """Limits the requests of one step that run at a time, and tells who makes them to wait.

    Attributes:
        made: requests that run or wait for their turn.
    """

    def __init__(self, limit: int) -> None:
        self.made = 0
        self.turns = asyncio.Semaphore(limit) if limit else nullcontext()
        self._limit = limit
        self._left = asyncio.Event()

    def leave(self) -> None:
        """A request is through."""
        self.made -= 1
        self._left.set()

    async def room(self) -> None:
        """Returns when another request would run at once."""
        while self._limit and self.made >= self._limit:
            self._left.clear()
            await self._left.wait()


class _Run:
    """One request on its way through the graph."""

    def __init__(self, config: ModelConfig, graph: Graph, request: InferRequest, call: Call, limit: int) -> None:
        self._config = config
        self._graph = graph
        self._request = request
        self._call = call
        self._tensors: dict[str, dict[Index, Tensor | None]] = {name: {} for name in graph.depths}
        self._outputs = sorted({out.name for out in request.outputs} or {spec.name for spec in config.outputs})
        self._depth = max(graph.depths[name] for name in self._outputs)
        self._nodes = graph.needed(self._outputs)
        self._gates = {node: _Gate(limit) for node in self._nodes}
        self._started: set[tuple[Node, Index]] = set()
        self._active: dict[asyncio.Task[None], Index] = {}
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._error: TritiumError | None = None
        self._answered = False
        self._uses = self._single_uses()
        self._left = dict[tuple[str, Index], int]()

    def _single_uses(self) -> dict[str, int]:
        """How often each index of a tensor is used; without the tensors that are used for many indices."""
        found: dict[str, int] = {}
        for name, depth in self._graph.depths.items():
            readers = [node for node in self._graph.readers.get(name, ()) if node in self._nodes]
            is_output = name in self._outputs
            if all(node.depth == depth for node in readers) and (not is_output or self._depth == depth):
                found[name] = len(set(readers)) + is_output
        return found

    def begin(self) -> None:
        """Puts the inputs of the request into the graph."""
        for spec in self._config.inputs:
            self._publish(spec.name, (), self._request.inputs.get(spec.name))

    async def answers(self) -> AsyncGenerator[list[Tensor]]:
        """The outputs of each answer, in order.

        Raises:
            TritiumError: what a step failed with, or INTERNAL when a step leaves out what an answer needs.
        """
        while True:
            ready = self._complete()
            for index in ready:
                self._answered = True
                outputs = [tensor for name in self._outputs if (tensor := self._at(name, index)) is not None]
                for name in self._outputs:
                    self._used(name, index)
                self._room.set()
                yield outputs
            if ready:
                # More may have come while the client read these.
                continue
            if self._error is not None:
                raise self._error
            if not self._active:
                break
            self._changed.clear()
            await self._changed.wait()
        if not self._answered and not self._graph.decoupled:
            raise TritiumError(
                Code.INTERNAL,
                f"in ensemble '{self._config.name}', unexpected deadlock, at least one output is not set while no "
                "more ensemble steps can be made",
            )

    async def close(self) -> None:
        """Cancels what still runs."""
        tasks = list(self._active)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _complete(self) -> list[Index]:
        """Indices of answers that are complete, up to the first that has to wait for an earlier one."""
        deepest = next(name for name in self._outputs if self._graph.depths[name] == self._depth)
        found: list[Index] = []
        for index in sorted(self._tensors[deepest]):
            if not all(self._has(name, index) for name in self._outputs):
                continue
            if any(other < index[: len(other)] for other in self._active.values()):
                break
            found.append(index)
        return found

    def _has(self, name: str, index: Index) -> bool:
        return index[: self._graph.depths[name]] in self._tensors[name]

    def _at(self, name: str, index: Index) -> Tensor | None:
        return self._tensors[name].get(index[: self._graph.depths[name]])

    def _used(self, name: str, index: Index) -> None:
        """A use of a tensor is over; after the last one it goes, and with it the memory that it lies in."""
        left = self._left.get((name, index))
        if left == 1:
            del self._left[name, index], self._tensors[name][index]
        elif left is not None:
            self._left[name, index] = left - 1

    def _publish(self, name: str, index: Index, tensor: Tensor | None) -> None:
        """A tensor has come (None: an optional one that the request lacks); starts the steps that waited for it."""
        uses = self._uses.get(name)
        if uses == 0:
            return
        if uses is not None:
            self._left[name, index] = uses
        self._tensors[name][index] = tensor
        for node in self._graph.readers.get(name, ()):
            if node not in self._nodes:
                continue
            for at in self._indices(node, name, index):
                if (node, at) not in self._started and all(self._has(t, at) for t in node.inputs.values()):
                    self._started.add((node, at))
                    self._gates[node].made += 1
                    task = asyncio.get_running_loop().create_task(self._step(node, at))
                    self._active[task] = at
                    task.add_done_callback(self._ended)

    def _indices(self, node: Node, name: str, index: Index) -> list[Index]:
        """The indices for which ``node`` may run now that ``name`` has come for ``index``."""
        if len(index) == node.depth:
            return [index]
        deepest = next(t for t in node.inputs.values() if self._graph.depths[t] == node.depth)
        return [at for at in self._tensors[deepest] if at[: len(index)] == index]

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._active[task]
        if not task.cancelled() and (error := task.exception()) is not None and self._error is None:
            self._error = self._inside(error)
        self._changed.set()
        self._room.set()

    def _inside(self, error: BaseException) -> TritiumError:
        """An error of a step, as the client of the ensemble sees it."""
        if not isinstance(error, TritiumError):
            _log.error("step of an ensemble failed", model=self._config.name, error=error)
            return TritiumError(Code.INTERNAL, f"in ensemble '{self._config.name}', {type(error).__name__}")
        message = f"in ensemble '{self._config.name}', {error.message}"
        return TritiumError(error.code, message, reason=error.reason, retry_after_s=error.retry_after_s)

    async def _step(self, node: Node, index: Index) -> None:
        gate = self._gates[node]
        try:
            async with gate.turns:
                await self._answer(node, index)
        finally:
            gate.leave()
            self._started.discard((node, index))

    async def _answer(self, node: Node, index: Index) -> None:
        """Runs a step once and publishes what it answers."""
        count = 0
        async with closing(self._call(self._request_of(node, index))) as answers:
            async for answer in answers:
                if answer.error is not None:
                    raise answer.error
                if answer.empty:
                    continue
                if count and not node.config.decoupled:
                    raise TritiumError(Code.INTERNAL, f"model '{node.step.model}' gave more than one answer")
                at = (*index, count) if node.config.decoupled else index
                count += 1
                for tensor in answer.outputs:
                    target = node.step.outputs.get(tensor.name)
                    if target is not None:
                        self._publish(target, at, Tensor(target, tensor.dtype, tensor.shape, tensor.data))
                self._changed.set()
                del answer
                if node.config.decoupled:
                    await self._room_behind(node)

    async def _room_behind(self, node: Node) -> None:
        """Waits until the steps that read of ``node``, and the client, can take more."""
        while len(self._complete()) + sum(len(at) > node.depth for at in self._active.values()) >= MAX_UNREAD:
            self._room.clear()
            await self._room.wait()
        for tensor in node.step.outputs.values():
            for reader in self._graph.readers.get(tensor, ()):
                if reader in self._gates:
                    await self._gates[reader].room()

    def _request_of(self, node: Node, index: Index) -> InferRequest:
        inputs: dict[str, Tensor] = {}
        for name, source in node.inputs.items():
            tensor = self._at(source, index)
            if tensor is not None:
                inputs[name] = Tensor(name, tensor.dtype, tensor.shape, tensor.data)
        for source in set(node.inputs.values()):
            self._used(source, index)
        trace = self._request.trace
        return replace(
            self._request,
            model=node.step.model,
            version="" if node.step.version < 0 else str(node.step.version),
            inputs=inputs,
            outputs=[RequestedOutput(name) for name in node.step.outputs],
            arrived_ns=time.monotonic_ns(),
            parameters=dict(self._request.parameters),
            trace=trace.child(node.step.model, "", self._request.id) if trace is not None else None,
        )
