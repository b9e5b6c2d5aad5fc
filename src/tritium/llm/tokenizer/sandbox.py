"""Renders chat templates from checkpoints and requests, which are hostile until proven otherwise.

Two walls. jinja2's immutable sandbox keeps a template away from Python: no underscore attributes, no mutation of
what it is given. A meter keeps it from using the machine up: everything a template can do repeatedly or with large
values (loop steps, calls, filters, operators, comparisons, slices, output) is charged to a budget *before* it is
done, in units of about one character copied. The budget grows with the request's own size and is exact: the same
request has the same answer on an idle and on a busy machine, which a time limit would not give, and no thread has to
be killed.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from tritium.llm.tokenizer.meter import CALL, STEP, Meter, OverBudget, check_format

BUDGET_UNITS = 32 << 20
"""Work that any template may do: at most one to two seconds, where a long conversation takes some milliseconds."""
UNITS_PER_INPUT = 32
"""Work allowed on top for each unit of messages and tools; about what tokenizing them takes."""
LARGEST_BITS = 4096

_UNAVAILABLE_FILTERS = ("striptags", "urlize", "xmlattr", "wordwrap", "pprint")
_UNAVAILABLE_METHODS = frozenset({"striptags", "unescape", "translate", "maketrans", "encode"})
_LISTING = frozenset(
    {"list", "sort", "unique", "batch", "slice", "groupby", "dictsort", "join", "min", "max", "sum", "length", "count"}
)
_PER_CHARACTER = _LISTING - {"length", "count"}
_SORTING = frozenset({"sort", "unique", "groupby", "dictsort", "min", "max"})


class _Metering(NodeTransformer):
    """Puts the meter into a template: into loops, concatenations, comparisons, slices and constant output."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter("_charge", nodes.Const(None))))
        if node.test is not None:
            node.test = _filter("_charge", node.test)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_concat", nodes.List(node.nodes))

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _charged(node.expr)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _charged(node.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _charged(node.node)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        constant = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        if constant:
            node.nodes.insert(0, _filter("_constant", nodes.Const(constant)))
        return node


def _filter(name: str, value: Any) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None)


def _charged(value: nodes.Expr) -> nodes.Expr:
    return value if isinstance(value, nodes.Const) else _filter("_charge", value)


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks answers for training; in serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for (that of transformers), behind both walls.

    Args:
        units: budget of one rendering, before what its own size adds.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, units: int = BUDGET_UNITS) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            # Folding constants would run a template's operations while compiling it, outside any budget.
            optimized=False,
            finalize=self._output,
            cache_size=0,
        )
        self._units = units
        self._thread = threading.local()
        for name in _UNAVAILABLE_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["tojson"] = self._tojson
        # Nothing here is HTML, so marking strings as safe markup would only open other code paths.
        self.filters["safe"] = str
        self.filters.update({name: self._metered(name, each) for name, each in self.filters.items()})
        self.tests.update({name: self._metered(name, each) for name, each in self.tests.items()})
        own = {"_concat": self._concat, "_charge": self._charge, "_constant": self._constant}
        self.filters.update(own)
        self.globals.update({"raise_exception": _raise_exception, "strftime_now": _strftime_now})

    def run(self, template: Template, variables: dict[str, Any]) -> str:
        """Render within a fresh budget, which grows with the size of ``variables``."""
        units = self._units + UNITS_PER_INPUT * Meter(1 << 62).weigh(variables)
        outer = getattr(self._thread, "meter", None)
        self._thread.meter = Meter(units)
        try:
            return "".join(template.generate(**variables))
        finally:
            self._thread.meter = outer

    @property
    def _meter(self) -> Meter:
        return self._thread.meter

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Metering().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call from a template: charged for its arguments, its result, and what it will need in between."""
        self._meter.spend(CALL + self._meter.weigh(args) + self._meter.weigh(kwargs))
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes):
            self._meter.before(name, owner, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        self._meter.spend(self._meter.weigh(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An arithmetic operator, charged for the size of its result."""
        self._meter.spend(STEP)
        sized = (str, bytes, list, tuple)
        if operator == "*" and (isinstance(left, sized) or isinstance(right, sized)):
            value, times = (left, right) if isinstance(left, sized) else (right, left)
            if isinstance(times, int):
                self._meter.spend(self._meter.weigh(value) * max(times, 0) + max(times, 0))
        elif operator == "%" and isinstance(left, str):
            check_format(left)
            self._meter.spend(self._meter.weigh(right) * (1 + left.count("%")) + len(left))
        elif isinstance(left, sized) or isinstance(right, sized):
            self._meter.spend(self._meter.weigh(left) + self._meter.weigh(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > LARGEST_BITS:
                raise OverBudget(f"the chat template computes a number of more than {LARGEST_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also keeps out methods of strings whose time or result is no multiple of their input."""
        unavailable = isinstance(obj, str) and attr in _UNAVAILABLE_METHODS
        return not unavailable and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` as the sandbox has it, where the format asks for no great width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text: str = value.__self__
        check_format(text)

        def format_(*args: Any, **kwargs: Any) -> str:
            self._meter.spend((self._meter.weigh(args) + self._meter.weigh(kwargs)) * (1 + text.count("{")) + len(text))
            return wrapped(*args, **kwargs)

        return format_

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passes = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            meter = getattr(self._thread, "meter", None)
            if meter is None:
                # Called by the compiler, to fold constants. It takes any failure to mean "not now".
                raise OverBudget("a filter runs only while rendering")
            given = args[passes:]
            value: Any = given[0] if given else None
            if name in _LISTING and hasattr(value, "__next__"):
                value = list(value)
                args = (*args[:passes], value, *given[1:])
                given = args[passes:]
            factor = 4 if name in _SORTING else 1
            listed = 8 * len(value) if name in _PER_CHARACTER and isinstance(value, str) else 0
            meter.spend(CALL + factor * (meter.weigh(given) + meter.weigh(kwargs) + listed))
            meter.before(name, value, given[1:], kwargs)
            result = function(*args, **kwargs)
            meter.spend(meter.weigh(result))
            return result

        return metered

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as chat templates expect it (transformers): not escaped for HTML, not for ASCII."""
        short = (indent, *(separators or ()))
        if any((isinstance(each, str) and len(each) > 16) or (isinstance(each, int) and each > 16) for each in short):
            raise OverBudget("the chat template calls tojson with an indent or separator of more than 16 characters")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_no_json
        )
        if indent is None:
            return encoder.encode(value)
        pieces: list[str] = []
        for piece in encoder.iterencode(value):
            self._meter.spend(len(piece))
            pieces.append(piece)
        return "".join(pieces)

    @pass_context
    def _output(self, _context: Context, value: Any) -> Any:
        self._meter.spend(self._meter.weigh(value))
        return value

    @pass_context
    def _charge(self, _context: Context, value: Any) -> Any:
        if hasattr(value, "__next__"):
            value = list(value)  # an iterator has no size, and comparing with one runs it
        self._meter.spend(STEP + self._meter.weigh(value))
        return value

    @pass_context
    def _constant(self, _context: Context, length: int) -> str:
        self._meter.spend(length)
        return ""

    @pass_context
    def _concat(self, _context: Context, values: list[Any]) -> str:
        self._meter.spend(STEP + self._meter.weigh(values))
        return "".join(map(str, values))


def _no_json(value: Any) -> Any:
    raise TypeError(f"tojson got {type(value).__name__}, which JSON cannot hold")


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > 256 or re.search(r"%\D?\d", layout):
        raise OverBudget("the chat template calls strftime_now with a width, or more than 256 characters")
    return datetime.now().strftime(layout)


def plain(value: Any, depth: int = 0) -> Any:
    """A copy of JSON-like data in plain dicts, lists, strings, numbers; all that a template may be given.

    Raises:
        TypeError: something else is in it, or it is nested more than 100 deep.
    """
    if depth > 100:
        raise TypeError("it is nested more than 100 deep")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    raise TypeError(f"it holds a {type(value).__name__}; expected JSON")
