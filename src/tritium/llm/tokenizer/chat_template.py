"""Messages to a prompt, with control tokens only where the template itself wrote them.

A template and the texts it arranges end in one string, where ``<|im_end|>`` from the template and ``<|im_end|>``
typed by a user look the same. So before rendering, what users wrote is marked: one private-use character, which
occurs nowhere in the request or the template, goes into every spelling of a control token, and beside every edge
that could complete one with its neighbour. Control tokens are then found in the rendered text, and the marks taken
out again. Texts that spell no control token, that is nearly all, are rendered as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from tritium.errors import TritiumError, invalid
from tritium.llm.tokenizer.meter import OverBudget
from tritium.llm.tokenizer.sandbox import Sandbox, plain

MAX_TEMPLATE_CHARS = 1 << 20
"""Longest template of a checkpoint; the largest published ones have some 30 thousand characters."""
MAX_REQUEST_TEMPLATE_CHARS = 1 << 16
"""Longest template of a request: compiling takes up to 20 microseconds a character."""

Message = dict[str, Any]

_ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function", "ipython", "model", "observation"})
_FREE_TEXT = frozenset({"content", "text", "role", "reasoning_content"})
_PROBE = "Zq7probe"


class ChatTemplate:
    """The chat templates of a checkpoint.

    Args:
        named: templates by name; ``default`` is taken when a request names none, ``tool_use`` when it has tools.
        special: spellings of the control tokens -> id.
        variables: what every template sees (``bos_token`` and so on).

    Raises:
        TritiumError: a template does not compile, or exceeds its budget on a one-message conversation.
    """

    def __init__(self, named: Mapping[str, str], special: Mapping[str, int], variables: Mapping[str, Any]) -> None:
        self._named = dict(named)
        self._special = special
        self._variables = dict(variables)
        self._sandbox = Sandbox()
        self._marks = _Marks(special)
        self._compiled = lru_cache(maxsize=32)(self._compile)
        for name, source in self._named.items():
            _check_length(source, MAX_TEMPLATE_CHARS, f"the checkpoint's chat template {name!r}")
            self._compiled(source).check()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the checkpoint's templates; empty when it has none."""
        return tuple(self._named)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[str | int]:
        """The prompt: text, and ids of the control tokens that the template wrote, in order.

        Args:
            messages: ``{"role": ..., "content": text or text parts, ...}``.
            add_generation_prompt: end with the opening of the assistant's answer.
            tools: JSON descriptions of functions, handed to the template.
            template: a template's text, or the name of one of the checkpoint's.
            variables: further variables for the template (``chat_template_kwargs``).

        Raises:
            TritiumError: no template, a template that fails or exceeds its budget, or messages that it refuses.
        """
        compiled = self._compiled(self._choose(template, bool(tools)))
        given = {
            "messages": [
                _in_form(each, number, compiled) for number, each in enumerate(_conversation(messages, "messages"))
            ],
            "tools": _conversation(tools, "tools") if tools else None,
            **_checked(variables or {}, "chat_template_kwargs"),
        }
        mark = self._marks.choose(given, compiled.source)
        if mark:
            given = self._marks.put(given, mark)
        fixed = {"add_generation_prompt": add_generation_prompt, "documents": None}
        text = compiled.run({**self._variables, **fixed, **given})
        return self._marks.split(text, mark)

    def _choose(self, template: str | None, with_tools: bool) -> str:
        if template is not None and template not in self._named:
            _check_length(template, MAX_REQUEST_TEMPLATE_CHARS, "chat_template")
            return template
        if template is not None:
            return self._named[template]
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self._named:
                return self._named[name]
        known = f"; it has {', '.join(self._named)}" if self._named else ""
        raise invalid(f"this model has no default chat template{known}: expected 'chat_template'", param="messages")

    def _compile(self, source: str) -> _Compiled:
        try:
            template = self._sandbox.from_string(source)
        except (TemplateSyntaxError, SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
            raise invalid(f"chat_template does not compile: {_reason(error)}", param="chat_template") from error
        return _Compiled(source, template, self._sandbox, self._variables)


class _Compiled:
    """One template, and in which form it takes the content of messages."""

    def __init__(self, source: str, template: Template, sandbox: Sandbox, variables: Mapping[str, Any]) -> None:
        self.source = source
        self._template = template
        self._sandbox = sandbox
        self._variables = dict(variables)

    def run(self, variables: dict[str, Any]) -> str:
        try:
            return self._sandbox.run(self._template, variables)
        except (SecurityError, RecursionError, MemoryError) as error:
            raise invalid(f"chat_template is refused: {_reason(error)}", param="chat_template") from error
        except TemplateError as error:
            raise invalid(f"the chat template refuses these messages: {_reason(error)}", param="messages") from error
        except Exception as error:
            # A template is a program: on a message without what it expects it fails in any way that Python can.
            raise invalid(f"the chat template fails on these messages: {_reason(error)}", param="messages") from error

    def check(self) -> None:
        """Raise when the template exceeds its budget on one short message."""
        self._probe(_PROBE)

    @cached_property
    def takes_text(self) -> bool:
        """Content given as a string comes out."""
        return _PROBE in self._probe(_PROBE) or not self.takes_parts

    @cached_property
    def takes_parts(self) -> bool:
        """Content given as parts comes out as their text, not as a printed list."""
        text = self._probe([{"type": "text", "text": _PROBE}])
        return _PROBE in text and not re.search(r"['\"]type['\"]", text)

    def _probe(self, content: Any) -> str:
        given = {"messages": [{"role": "user", "content": content}], "tools": None, "add_generation_prompt": False}
        try:
            return self.run({**self._variables, **given})
        except TritiumError as error:
            if isinstance(error.__cause__, OverBudget | RecursionError | MemoryError):
                raise
            return ""


class _Marks:
    """Finds control tokens of the template, and keeps those of users from being found."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._find = special_pattern(special)
        self._heads = frozenset(token[:end] for token in special for end in range(1, len(token)))
        self._tails = frozenset(token[start:] for token in special for start in range(1, len(token)))
        self._longest = max(map(len, special), default=0)

    def choose(self, given: Mapping[str, Any], source: str) -> str:
        """A character that occurs nowhere; empty when nothing needs a mark."""
        if self._find is None:
            return ""
        texts = list(_texts(given))
        if not any(self._mark(text, "\0", key) != text for text, key in texts):
            return ""
        used = set(source).union(*(text for text, _ in texts))
        everything = [source, *(text for text, _ in texts)]
        for mark in map(chr, range(0xE000, 0xF900)):
            if mark not in used and not any(_escaped(mark) in text for text in everything):
                return mark
        raise invalid("the messages use every private-use character", param="messages")

    def put(self, given: Any, mark: str) -> Any:
        """A copy with marks."""
        return _changed(given, lambda text, key: self._mark(text, mark, key))

    def split(self, text: str, mark: str) -> list[str | int]:
        """The rendered text without marks, cut at control tokens."""
        if self._find is None:
            return [text]
        parts: list[str | int] = []
        end = 0
        for match in self._find.finditer(text):
            if mark and match.end() - match.start() == 1 and text[match.end() : match.end() + 1] == mark:
                continue
            parts += [_without(text[end : match.start()], mark), self._special[match[0]]]
            end = match.end()
        parts.append(_without(text[end:], mark))
        return [part for part in parts if part != ""]

    def _mark(self, text: str, mark: str, key: str) -> str:
        if self._find is None:
            return text
        # The character goes behind every letter of a spelling, so that no other one remains inside it.
        marked = self._find.sub(lambda match: mark.join(match[0]) + mark, text)
        if key == "type" or (key == "role" and text in _ROLES):
            return marked  # templates compare these, and build control tokens from roles
        ends = range(1, min(self._longest, len(text) + 1))
        if any(text[-size:] in self._heads for size in ends):
            marked += mark
        inside = key in _FREE_TEXT and 0 < len(text) < self._longest and any(text in each for each in self._special)
        if inside or any(text[:size] in self._tails for size in ends):
            marked = mark + marked
        return marked


def special_pattern(special: Iterable[str]) -> re.Pattern[str] | None:
    """Finds control tokens in a text, the longest first; None when there are none."""
    spellings = sorted(filter(None, special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, spellings))) if spellings else None


def _check_length(source: str, limit: int, name: str) -> None:
    if len(source) > limit:
        raise invalid(f"{name} has {len(source)} characters; at most {limit} are allowed", param="chat_template")


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _without(text: str, mark: str) -> str:
    return text.replace(mark, "").replace(_escaped(mark), "") if mark else text


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string in JSON-like data, with the key that it belongs to."""
    if isinstance(value, str):
        yield value, key
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name, ""
            yield from _texts(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)


def _changed(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    if isinstance(value, str):
        return change(value, key)
    if isinstance(value, dict):
        return {change(name, ""): _changed(item, change, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, change, key) for item in value]
    return value


def _checked(value: Any, param: str) -> Any:
    try:
        return plain(value)
    except TypeError as error:
        raise invalid(f"{param} cannot be given to a template: {error}", param=param) from error


def _conversation(items: Any, param: str) -> list[Message]:
    checked = _checked(items, param)
    if not isinstance(checked, list) or not checked:
        raise invalid(f"{param} is {'empty' if checked == [] else type(items).__name__}; expected a list", param=param)
    for number, item in enumerate(checked):
        if not isinstance(item, dict):
            raise invalid(f"{param}[{number}] is a {type(item).__name__}; expected an object", param=param)
    return checked


def _in_form(message: Message, number: int, compiled: _Compiled) -> Message:
    """The message with its content in a form that the template takes, and without absent fields."""
    message = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        texts = [_part_text(part, f"messages[{number}].content[{place}]") for place, part in enumerate(content)]
        if compiled.takes_parts:
            message["content"] = [{"type": "text", "text": text} for text in texts]
        else:
            message["content"] = "\n".join(texts)
    elif isinstance(content, str) and not compiled.takes_text:
        message["content"] = [{"type": "text", "text": content}]
    elif content is not None and not isinstance(content, str):
        kind = type(content).__name__
        raise invalid(f"messages[{number}].content is a {kind}; expected text or a list of parts", param="messages")
    return message


def _part_text(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise invalid(f"{place} is {kind!r}; this model takes {{'type': 'text', 'text': ...}}", param="messages")
    return part["text"]


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:500]
