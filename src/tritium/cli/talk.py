"""``tritium chat`` and ``tritium generate``: one model in the terminal, no server."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tritium.backends.llm import sampling_defaults
from tritium.backends.llm_settings import LlmSettings
from tritium.cli import options
from tritium.cli.flags import Parsed
from tritium.errors import TritiumError
from tritium.llm.checkpoint import read_metadata
from tritium.llm.config import EngineConfig
from tritium.llm.names import find_model
from tritium.llm.params import make_params
from tritium.observability import logs

if TYPE_CHECKING:
    from tritium.llm.api import LLM
    from tritium.llm.types import SamplingParams

HELP = "/new forgets the conversation, /exit leaves; Ctrl-C stops an answer, or leaves where there is none"


def _open(model: str, parsed: Parsed) -> LLM:
    """The model, its engine running; says so on standard error, where it does not disturb a pipe."""
    from tritium.llm.api import LLM

    logs.setup("warning", "text")
    begun = time.monotonic()
    print(f"loading {model} ...", end="", file=sys.stderr, flush=True)
    try:
        llm = LLM(model, **parsed.groups[EngineConfig])
    except BaseException:
        print(file=sys.stderr)
        raise
    info = llm.info
    print(f" ready in {time.monotonic() - begun:.1f} s ({info.dtype} on {info.device})", file=sys.stderr)
    return llm


def _params(llm: LLM, model: str, parsed: Parsed) -> SamplingParams:
    """What was typed over what the model's own files say."""
    plain = LlmSettings(alias="tritium", engine=EngineConfig(model=model))
    defaults = sampling_defaults(read_metadata(find_model(model)), plain, llm.info.vocab_size)
    return make_params(parsed.get(options.Sampling).given(), defaults, vocab_size=llm.info.vocab_size)


def generate(parsed: Parsed) -> int:
    """Continues one text on standard output."""
    asked = parsed.get(options.Generate)
    text = sys.stdin.read() if asked.prompt == "-" else asked.prompt
    with _open(asked.model, parsed) as llm:
        prompt: Any = [{"role": "user", "content": text}] if asked.chat else text
        for piece in llm.stream(prompt, _params(llm, asked.model, parsed)):
            print(piece, end="", flush=True)
        print()
    return 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one turn.

    Attributes:
        stopped: the person pressed Ctrl-C.
    """

    text: str
    pieces: int
    elapsed_s: float
    stopped: bool


def speak(pieces: Iterator[str]) -> Answer:
    """Prints an answer as it comes; Ctrl-C ends the answer, and the engine's work on it, not the program."""
    text, count, begun, stopped = "", 0, time.monotonic(), False
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            text += piece
            count += 1
    except KeyboardInterrupt:
        stopped = True
        print(" [stopped]", end="")
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    print()
    return Answer(text, count, time.monotonic() - begun, stopped)


class Conversation:
    """A chat with its history; what a turn adds is kept only when the turn has an answer."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None, stats: bool) -> None:
        self._llm = llm
        self._params = params
        self._opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._stats = stats
        self.messages = list(self._opening)

    def turn(self, text: str) -> None:
        """Asks, prints the answer and remembers both.

        Raises:
            TritiumError: the conversation does not fit into the model's context, for example.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = speak(self._llm.stream(asked, self._params))
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if self._stats and answer.pieces:
            rate = answer.pieces / answer.elapsed_s
            print(f"[{answer.pieces} pieces in {answer.elapsed_s:.1f} s, {rate:.1f}/s]", file=sys.stderr)

    def forget(self) -> None:
        """Starts a new conversation."""
        self.messages = list(self._opening)


def chat(parsed: Parsed) -> int:
    """A conversation in the terminal."""
    asked = parsed.get(options.Chat)
    with _open(asked.model, parsed) as llm:
        conversation = Conversation(llm, _params(llm, asked.model, parsed), system=asked.system, stats=asked.stats)
        print(HELP, file=sys.stderr)
        while (text := _read_line()) is not None:
            if text in ("/exit", "/quit"):
                break
            if text == "/new":
                conversation.forget()
            elif text.startswith("/"):
                print(HELP, file=sys.stderr)
            elif text:
                try:
                    conversation.turn(text)
                except TritiumError as error:
                    print(f"tritium: {error.message}", file=sys.stderr)
    return 0


def _read_line() -> str | None:
    """What the person types; None when they leave (Ctrl-D, or Ctrl-C where no answer is running)."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (editing and history of input lines, where Python has it)
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None
