"""Graph: the steps of an ensemble by the tensors between them, checked once when the ensemble is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tritium.backends.config import ANY, Ensemble, ModelConfig, Step, TensorSpec
from tritium.errors import TritiumError, invalid


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A step in its graph.

    Attributes:
        config: of its model.
        depth: number of decoupled steps before it. A step of depth n runs once for each index of n numbers, one
            for each answer of each of those steps.
        inputs: input of the model -> tensor of the ensemble.
        optional: those tensors among them that it can do without.
    """

    step: Step
    config: ModelConfig
    depth: int
    inputs: Mapping[str, str]
    optional: frozenset[str]

    @property
    def out_depth(self) -> int:
        """Depth of the tensors that it makes."""
        return self.depth + self.config.decoupled


@dataclass(frozen=True, slots=True)
class Graph:
    """All steps, in an order in which each comes after those that it needs.

    Attributes:
        depths: of each tensor.
        readers: steps that take a tensor, by its name.
    """

    nodes: tuple[Node, ...]
    depths: Mapping[str, int]
    readers: Mapping[str, tuple[Node, ...]]

    @property
    def decoupled(self) -> bool:
        """Whether a request may have any number of answers."""
        return any(node.config.decoupled for node in self.nodes)

    def needed(self, outputs: Iterable[str]) -> frozenset[Node]:
        """The steps without which these tensors are not made."""
        wanted = set(outputs)
        found: set[Node] = set()
        for node in reversed(self.nodes):
            if wanted & set(node.step.outputs.values()):
                found.add(node)
                wanted |= set(node.inputs.values())
        return frozenset(found)


@dataclass(slots=True)
class _Use:
    """A tensor of the ensemble as one model, or the ensemble itself, declares it."""

    model: str
    name: str
    spec: TensorSpec
    batched: bool


def build(config: ModelConfig, ensemble: Ensemble, find: Callable[[str, int], ModelConfig]) -> Graph:
    """The graph of an ensemble.

    Args:
        find: the configuration of a step's model and version (-1 for any).

    Raises:
        TritiumError: INVALID_ARGUMENT when the steps make a circle, a tensor is written twice or by nobody, a step
            names an input or output that its model does not have, or two sides of a tensor disagree about its
            type or shape.
    """
    models = [find(step.model, step.version) for step in ensemble.steps]
    makers = _makers(config, ensemble)
    for step, model in zip(ensemble.steps, models, strict=True):
        _check_step(config, step, model, makers)
    nodes = _sorted(config, ensemble, models, makers)
    depths = {spec.name: 0 for spec in config.inputs}
    for node in nodes:
        depths.update(dict.fromkeys(node.step.outputs.values(), node.out_depth))
    _check_types(config, ensemble, models)
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for tensor in node.inputs.values():
            readers.setdefault(tensor, []).append(node)
    return Graph(tuple(nodes), depths, {name: tuple(found) for name, found in readers.items()})


def _makers(config: ModelConfig, ensemble: Ensemble) -> dict[str, int | None]:
    """Which step writes each tensor; None for the request itself."""
    makers: dict[str, int | None] = {spec.name: None for spec in config.inputs}
    for index, step in enumerate(ensemble.steps):
        for tensor in step.outputs.values():
            if tensor in makers:
                raise invalid(
                    f"tensor '{tensor}' can appear in an output map only once for ensemble '{config.name}' and may be "
                    "no input of it",
                    param="output_map",
                )
            makers[tensor] = index
    for spec in config.outputs:
        if spec.name not in makers:
            raise invalid(f"ensemble '{config.name}' has output '{spec.name}' that no step writes", param=spec.name)
    used = {tensor for step in ensemble.steps for tensor in step.inputs.values()}
    for spec in config.inputs:
        if spec.name not in used:
            raise invalid(f"ensemble '{config.name}' has input '{spec.name}' that no step reads", param=spec.name)
    return makers


def _check_step(config: ModelConfig, step: Step, model: ModelConfig, makers: Mapping[str, int | None]) -> None:
    where = f"ensemble '{config.name}', step of model '{step.model}'"
    for name, tensor in step.inputs.items():
        if model.input(name) is None:
            raise invalid(f"in {where}: the model has no input '{name}'", param="input_map")
        if tensor not in makers:
            raise invalid(f"in {where}: nothing writes the tensor '{tensor}' of input '{name}'", param="input_map")
    for name in step.outputs:
        if model.output(name) is None:
            raise invalid(f"in {where}: the model has no output '{name}'", param="output_map")
    for spec in model.inputs:
        if not spec.optional and spec.name not in step.inputs:
            raise invalid(f"in {where}: input '{spec.name}' of the model is not in input_map", param="input_map")
    if config.max_batch_size > model.max_batch_size and model.max_batch_size > 0:
        raise invalid(
            f"in {where}: the ensemble allows max_batch_size {config.max_batch_size}, but the model allows only "
            f"{model.max_batch_size}",
            param="max_batch_size",
        )


def _sorted(
    config: ModelConfig, ensemble: Ensemble, models: list[ModelConfig], makers: Mapping[str, int | None]
) -> list[Node]:
    """The steps in order.

    Raises:
        TritiumError: INVALID_ARGUMENT naming the models of a circle.
    """
    found: dict[int, Node] = {}
    left = dict(enumerate(ensemble.steps))
    while left:
        ready = [
            index
            for index, step in left.items()
            if all(makers[tensor] is None or makers[tensor] in found for tensor in step.inputs.values())
        ]
        if not ready:
            names = ", ".join(f"'{step.model}'" for step in left.values())
            raise invalid(f"ensemble '{config.name}' has a circle: steps of {names} wait for each other", param="step")
        for index in ready:
            step, model = left.pop(index), models[index]
            before = [makers[tensor] for tensor in step.inputs.values()]
            depth = max((found[maker].out_depth for maker in before if maker is not None), default=0)
            found[index] = Node(step, model, depth, step.inputs, _optional(config, step, model))
    return list(found.values())


def _optional(config: ModelConfig, step: Step, model: ModelConfig) -> frozenset[str]:
    """Tensors that may be missing: optional inputs of the ensemble that are optional for the model too."""
    found: set[str] = set()
    for name, tensor in step.inputs.items():
        outer, inner = config.input(tensor), model.input(name)
        if outer is None or inner is None or not outer.optional:
            continue
        if not inner.optional:
            raise invalid(
                f"in ensemble '{config.name}', step of model '{step.model}': input '{tensor}' of the ensemble is "
                f"optional, but input '{name}' of the model is not",
                param=tensor,
            )
        found.add(tensor)
    return frozenset(found)


def _check_types(config: ModelConfig, ensemble: Ensemble, models: list[ModelConfig]) -> None:
    seen: dict[str, _Use] = {}
    for tensor, use in _uses(config, ensemble, models):
        first = seen.setdefault(tensor, use)
        if first is use:
            continue
        where = f"in ensemble '{config.name}', tensor '{tensor}'"
        sides = f"in model '{first.model}' ('{first.name}')", f"in model '{use.model}' ('{use.name}')"
        if first.spec.dtype is not use.spec.dtype:
            raise invalid(
                f"{where}: inconsistent data type: {first.spec.dtype.value} {sides[0]}, {use.spec.dtype.value} "
                f"{sides[1]}",
                param=tensor,
            )
        if not _fit(first, use):
            raise invalid(
                f"{where}: inconsistent shape: {list(first.spec.dims)} {sides[0]}, {list(use.spec.dims)} {sides[1]}",
                param=tensor,
            )


def _uses(config: ModelConfig, ensemble: Ensemble, models: list[ModelConfig]) -> Iterator[tuple[str, _Use]]:
    batched = config.max_batch_size > 0
    for spec in (*config.inputs, *config.outputs):
        yield spec.name, _Use(config.name, spec.name, spec, batched)
    for step, model in zip(ensemble.steps, models, strict=True):
        inner = model.max_batch_size > 0
        for name, tensor in (*step.inputs.items(), *step.outputs.items()):
            spec = model.input(name) if name in step.inputs and step.inputs[name] == tensor else model.output(name)
            if spec is not None:
                yield tensor, _Use(model.name, name, spec, inner)


def _fit(one: _Use, other: _Use) -> bool:
    """Whether the shapes can be the same; one with a batch dimension has any size in front."""
    shapes = [(ANY, *use.spec.dims) if use.batched else use.spec.dims for use in (one, other)]
    return len(shapes[0]) == len(shapes[1]) and all(
        a == b or ANY in (a, b) for a, b in zip(shapes[0], shapes[1], strict=True)
    )


def unavailable(ensemble: str, models: list[str]) -> TritiumError:
    """What the load of an ensemble fails with whose steps cannot be had."""
    names = ", ".join(models)
    return invalid(f"ensemble {ensemble} contains models that are not available or ambiguous: {names}")
