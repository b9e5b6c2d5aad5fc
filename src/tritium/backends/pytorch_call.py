"""How a model of torch is called: its arguments and results, and which declared name stands for which of them."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritium.errors import invalid
from tritium.types import DType

TYPES = {
    "torch.bool": DType.BOOL,
    "torch.uint8": DType.UINT8,
    "torch.uint16": DType.UINT16,
    "torch.uint32": DType.UINT32,
    "torch.uint64": DType.UINT64,
    "torch.int8": DType.INT8,
    "torch.int16": DType.INT16,
    "torch.int32": DType.INT32,
    "torch.int64": DType.INT64,
    "torch.float16": DType.FP16,
    "torch.float32": DType.FP32,
    "torch.float64": DType.FP64,
    "torch.bfloat16": DType.BF16,
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument or result.

    Attributes:
        dtype: None where the file does not say.
        shape: with the batch dimension, -1 for any; None where the file does not say.
        optional: it may be left out; ``default`` then stands for it.
        keyword: it is passed by its name.
    """

    name: str
    dtype: DType | None = None
    shape: tuple[int, ...] | None = None
    optional: bool = False
    keyword: bool = False
    default: Any = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the model.

    Attributes:
        results: None where only a run tells.
        mapping: the only argument is a dict of tensors, by any names.
        typed: types and shapes are known.
    """

    arguments: tuple[Argument, ...]
    results: tuple[Argument, ...] | None
    mapping: bool = False
    typed: bool = False


def is_program(path: Path) -> bool:
    """Whether a file holds a program of ``torch.export`` rather than TorchScript."""
    if path.suffix == ".pt2" or not zipfile.is_zipfile(path):
        return path.suffix == ".pt2"
    with zipfile.ZipFile(path) as archive:
        return any(name.rpartition("/")[2] == "archive_format" for name in archive.namelist())


def holds_libraries(path: Path) -> bool:
    """Whether a program comes with compiled libraries (torch.export.pt2_archive: ``data/aotinductor/``)."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any("data/aotinductor/" in name for name in archive.namelist())


def describe_script(module: Any, model: str) -> Call:
    """The call of a TorchScript module: names, but neither types nor shapes.

    Raises:
        TritiumError: INVALID_ARGUMENT for an argument that is neither a tensor nor a list of strings.
    """
    schema = module.forward.schema
    found = schema.arguments[1:]
    if len(found) == 1 and str(found[0].type) == "Dict[str, Tensor]":
        return Call((), _results(schema), mapping=True)
    arguments: list[Argument] = []
    for one in found:
        kind = str(one.type)
        plain = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
        optional = one.has_default_value() or plain != kind
        default = one.default_value if one.has_default_value() else None
        if plain not in ("Tensor", "List[str]"):
            if not one.has_default_value():
                raise invalid(
                    f"argument '{one.name}' of forward() of model '{model}' is of type {kind}, expected Tensor, "
                    "List[str], or Dict[str, Tensor] as the only one",
                    param=one.name,
                )
            plain = ""
        arguments.append(
            Argument(one.name, DType.BYTES if plain == "List[str]" else None, None, optional, default=default)
        )
    return Call(tuple(arguments), _results(schema))


def _results(schema: Any) -> tuple[Argument, ...] | None:
    (given,) = schema.returns
    if given.type.kind() == "TupleType":
        kinds = [str(element) for element in given.type.elements()]
    elif str(given.type) in ("Tensor", "List[str]"):
        kinds = [str(given.type)]
    else:
        return None
    return tuple(
        Argument(f"OUTPUT__{index}", DType.BYTES if kind == "List[str]" else None) for index, kind in enumerate(kinds)
    )


def describe_program(program: Any, model: str) -> Call:
    """The call of a program of ``torch.export``, with types and shapes.

    Raises:
        TritiumError: INVALID_ARGUMENT when an argument or result is no tensor.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    given = program.call_spec.in_spec
    keywords = list(given.child(1).context or ())
    positional = given.child(0).num_leaves
    arguments: list[Argument] = []
    for index, name in enumerate(program.graph_signature.user_inputs):
        shown = name if index < positional else keywords[index - positional]
        dtype, shape = _typed(values.get(name), f"input {index} of the program of model '{model}'")
        arguments.append(Argument(str(shown), dtype, shape, keyword=index >= positional))
    results: list[Argument] = []
    for index, name in enumerate(program.graph_signature.user_outputs):
        dtype, shape = _typed(values.get(name), f"output {index} of the program of model '{model}'")
        results.append(Argument(f"OUTPUT__{index}", dtype, shape))
    return Call(tuple(arguments), tuple(results), typed=True)


def _typed(value: Any, shown: str) -> tuple[DType, tuple[int, ...]]:
    dtype = TYPES.get(str(getattr(value, "dtype", None)))
    if dtype is None:
        raise invalid(
            f"{shown} is of type {getattr(value, 'dtype', type(value).__name__)}, expected a tensor of a known type"
        )
    return dtype, tuple(size if type(size) is int else -1 for size in value.shape)


def positions(
    model: str, kind: str, names: Sequence[str], there: Sequence[Argument], *, counted: bool = True
) -> dict[str, int]:
    """Which argument or result each declared name stands for.

    As in Triton: inputs by the names of the arguments of ``forward()`` if all are such; else by ``<name>__<index>``, if
    all are such; else in the order of the configuration.

    Args:
        counted: whether ``there`` holds all that there are.

    Raises:
        TritiumError: INVALID_ARGUMENT when a place does not exist, or two names stand for the same one.
    """
    own = [one.name for one in there]
    if kind == "input" and all(name in own for name in names):
        return {name: own.index(name) for name in names}
    indices = [name.rpartition("__")[2] for name in names]
    numbered = all(
        "__" in name and index.isascii() and index.isdecimal() for name, index in zip(names, indices, strict=True)
    )
    found = dict(zip(names, map(int, indices), strict=True)) if numbered else {n: i for i, n in enumerate(names)}
    for name, index in found.items():
        if counted and index >= len(there):
            raise invalid(
                f"{kind} '{name}' of model '{model}' stands for number {index}, the model has {len(there)} {kind}s"
                f"{' (' + ', '.join(own) + ')' if own else ''}",
                param=name,
            )
    if len(set(found.values())) < len(found):
        raise invalid(f"two {kind}s of model '{model}' have the same index: {', '.join(names)}", param=kind)
    return found
