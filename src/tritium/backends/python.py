"""``python``: a user's ``model.py`` with a class ``TritonPythonModel``, unmodified, in a process of its own.

The one place where Tritium runs code that it did not ship. Its exceptions become errors of the requests, in the
words of Triton's Python backend.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritium.backends.base import InstanceBackend, InstanceContext, Send
from tritium.errors import Code, TritiumError, invalid
from tritium.types import InferRequest, InferResponse

if TYPE_CHECKING:
    from tritium.backends.host import Host
    from tritium.backends.pb_request import InferenceRequest, Open

DEFAULT_FILE = "model.py"
# TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
_RESCHEDULE = 2


class PythonBackend(InstanceBackend):
    """One instance of a Python model."""

    honours = frozenset({"default_model_filename"})

    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        self._host: Host | None = None
        self._module: types.ModuleType | None = None
        self._model: Any = None
        self._decoupled = False
        self._outputs: tuple[str, ...] = ()
        self._wanted: frozenset[str] = frozenset()
        self._states: frozenset[str] = frozenset()
        self._loop: Any = None
        self._types: Any = None

    def connect(self, server: Host) -> None:  # type: ignore[override]
        """Gives ``pb_utils`` the way to the server."""
        # Imported here: the front end knows this module too, but needs nothing of that.
        from tritium.backends import pb_request, pb_server

        self._host = server
        self._types = pb_request
        pb_server.connect(server)

    # -- life -----------------------------------------------------------------------------------------------

    def complete(self, config: dict[str, Any]) -> dict[str, Any]:
        """Asks the model's ``auto_complete_config``; a group without a device gets the CPU."""
        from tritium.backends.pb_config import ModelConfig

        for group in config.get("instance_group", ()):
            if group.get("kind", "KIND_AUTO") == "KIND_AUTO":
                group["kind"] = "KIND_CPU"
        config["default_model_filename"] = config.get("default_model_filename") or DEFAULT_FILE
        model = self._model_class(config)
        if not self.context.auto_complete or not hasattr(model, "auto_complete_config"):
            return config
        try:
            completed = model.auto_complete_config(ModelConfig(json.dumps(config)))
        except BaseException as error:
            raise TritiumError(Code.INTERNAL, describe(error)) from None
        if not isinstance(completed, ModelConfig):
            raise TritiumError(
                Code.INTERNAL,
                "auto_complete_config function in model '"
                f"{self.context.model}' returned a {type(completed).__name__}, expected the ModelConfig object",
            )
        return completed.as_dict()

    def load(self, config: dict[str, Any]) -> None:
        """Makes the model object and calls its ``initialize``."""
        model = self._model_class(config)
        self._decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
        self._outputs = tuple(output["name"] for output in config.get("output", ()))
        states = config.get("sequence_batching", {}).get("state", ())
        self._states = frozenset(state["output_name"] for state in states)
        self._wanted = frozenset(self._outputs) | self._states if self._outputs else frozenset()
        arguments = {
            "model_config": json.dumps(config),
            "model_instance_kind": self.context.kind.upper(),
            "model_instance_name": self.context.instance,
            "model_instance_device_id": str(self.context.device_id),
            "model_repository": str(self.context.model_folder),
            "model_version": self.context.version,
            "model_name": self.context.model,
        }
        try:
            self._model = model()
            if hasattr(self._model, "initialize"):
                self._model.initialize(arguments)
        except BaseException as error:
            self._model = None
            raise TritiumError(Code.INTERNAL, describe(error)) from None

    def unload(self) -> None:
        """Calls the model's ``finalize``; what it raises is logged."""
        model, self._model = self._model, None
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        if model is not None and hasattr(model, "finalize"):
            try:
                model.finalize()
            except BaseException as error:
                self._log(f"finalize of '{self.context.instance}' failed: {describe(error)}")

    def well(self) -> bool:
        """What the model's ``is_ready`` says; an exception means no."""
        if not hasattr(self._model, "is_ready"):
            return True
        try:
            answer = self._model.is_ready()
            if hasattr(answer, "__await__"):
                answer = self._run(answer)
            return bool(answer)
        except BaseException as error:
            self._log(f"is_ready of '{self.context.instance}' failed: {describe(error)}")
            return False

    def _model_class(self, config: dict[str, Any]) -> Any:
        """``TritonPythonModel`` of the model's file, imported once."""
        if self._module is None:
            self._module = _import(self.context, config.get("default_model_filename") or DEFAULT_FILE)
        try:
            return self._module.TritonPythonModel
        except AttributeError as error:
            raise TritiumError(Code.INTERNAL, f"AttributeError: {error}") from None

    # -- batches --------------------------------------------------------------------------------------------

    def execute(self, requests: Sequence[InferRequest], send: Send) -> Sequence[InferResponse | None] | None:
        """Gives the batch to the model's ``execute``."""
        request_type, open_type = self._types.InferenceRequest, self._types.Open
        outputs, lost = self._outputs, self._lost
        opened: list[Open] = []
        batch: list[InferenceRequest] = []
        for index, request in enumerate(requests):
            wanted = self._wanted
            if request.outputs:
                wanted = self._states.union(output.name for output in request.outputs)
            one = open_type(index, send, self._decoupled, wanted, lost)
            opened.append(one)
            batch.append(request_type.received(request, one, outputs))
        try:
            if not hasattr(self._model, "execute"):
                raise TritiumError(Code.INTERNAL, f"Python model {self._file()} does not implement `execute` method.")
            result = self._model.execute(batch)
            if type(result) is not list and hasattr(result, "__await__"):
                if self._decoupled:
                    self._background(result, opened)
                    return None
                result = self._run(result)
            return self._answers(opened, result)
        except BaseException as error:
            raise self._failure(opened, error) from None

    def _answers(self, opened: Sequence[Open], result: Any) -> Sequence[InferResponse | None] | None:
        """What the model returned, as answers."""
        if result is None:
            self._settle(opened)
            return None
        if self._decoupled:
            raise _Wrong(
                f"Python model '{self.context.instance}' is using the decoupled mode and the execute function must "
                "return None."
            )
        if not isinstance(result, list):
            raise _Wrong(f"Expected a list in the execute return, found type '{type(result)}'.")
        if len(result) != len(opened):
            raise _Wrong(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(opened)}, and InferenceResponse(s) size is:{len(result)}\n"
            )
        answers = [None if item is None else self._answer(o, item) for o, item in zip(opened, result, strict=True)]
        # Only now, since one bad item fails them all.
        silent: list[Open] = []
        for one, answer in zip(opened, answers, strict=True):
            if answer is None:
                silent.append(one)
            else:
                one.closed = True
        if silent:
            self._settle(silent)
        return answers

    def _answer(self, opened: Open, item: Any) -> InferResponse:
        if opened.release == _RESCHEDULE:
            raise _Wrong(
                "Expected a None object in the execute function return list for reschduled request, found type "
                f"'{type(item)}'."
            )
        if not isinstance(item, self._types.InferenceResponse):
            raise _Wrong(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(item)}'."
            )
        if opened.sent:
            raise _Wrong("Unable to send response. Non-decoupled model cannot send more than one response.")
        return item.typed(opened.wanted, True)

    def _settle(self, opened: Sequence[Open]) -> None:
        """Requests without an answer are rescheduled, or answered later, or never: those are told so."""
        for one in opened:
            if one.closed:
                continue
            if one.release == _RESCHEDULE:
                one.closed = True
                one.send.reschedule(one.index)
            elif not one.asked:
                one.closed = True
                self._unanswered(one.send, one.index, "execute returned None and did not ask for a response sender")

    def _unanswered(self, send: Send, index: int, why: str) -> None:
        error = TritiumError(Code.INTERNAL, self._text(f"the request was not answered: {why}"))
        send(index, InferResponse("", "", "", error=error), True)

    def _lost(self, send: Send, index: int) -> None:
        """Called by a destructor: neither the request nor its sender is left, and there was no final answer."""
        if self._host is not None:
            why = "its response sender is gone and did not send the final flag"
            self._host.later(lambda: self._unanswered(send, index, why))

    def _failure(self, opened: Sequence[Open], error: BaseException) -> TritiumError:
        """Ends every request that is open; the error that the host answers them with."""
        for one in opened:
            one.closed = True
        text = self._text(describe(error))
        self._log(text)
        return TritiumError(Code.INTERNAL, text)

    def _text(self, why: str) -> str:
        return f"Failed to process the request(s) for model '{self.context.instance}', message: {why}"

    def _log(self, text: str) -> None:
        if self._host is not None:
            self._host.log("error", text)

    def _file(self) -> str:
        return "" if self._module is None else str(self._module.__file__)

    # -- coroutines -----------------------------------------------------------------------------------------

    def _submit(self, coroutine: Any) -> Any:
        """Starts a coroutine in the loop of this process, which lives in a thread."""
        import asyncio
        import threading

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="tritium-coroutines").start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run(self, coroutine: Any) -> Any:
        """Runs a coroutine to its end; meanwhile this thread reads the pipe for it."""
        assert self._host is not None
        pipe = self._host.pipe
        future = self._submit(coroutine)
        future.add_done_callback(lambda _: pipe.nudge())
        pipe.wait(future.done)
        return future.result()

    def _background(self, coroutine: Any, opened: list[Open]) -> None:
        """Lets the coroutine of a decoupled model go on while the next batches come."""

        def done(future: Any) -> None:
            error = future.exception()
            if error is None:
                self._settle(opened)
                return
            still = [one for one in opened if not one.closed]
            failure = self._failure(still, error)
            for one in still:
                one.send(one.index, InferResponse("", "", "", error=failure), True)

        self._submit(coroutine).add_done_callback(done)


class _Wrong(Exception):
    """The model returned what it may not; the message goes out as it is."""


def _import(context: InstanceContext, filename: str) -> types.ModuleType:
    """The module of the model's file, under the name ``<version>.<file>``, as Triton names it.

    Raises:
        TritiumError: there is no such file, or what importing it raised.
    """
    path = context.version_folder / filename
    if path.suffix != ".py" or Path(filename).name != filename:
        raise invalid(f"default_model_filename is '{filename}', expected the name of a .py file", param=filename)
    if not path.is_file():
        raise TritiumError(
            Code.INTERNAL,
            f"Python model file not found: version {context.version} of model '{context.model}' has no '{filename}'",
        )
    sys.path.extend([str(context.version_folder), str(context.model_folder)])
    # A package of its own in place of a search, so that no other folder called "1" can get in between.
    package = types.ModuleType(context.version)
    package.__path__ = [str(context.version_folder)]
    sys.modules[context.version] = package
    try:
        return importlib.import_module(f"{context.version}.{path.stem}")
    except BaseException as error:
        raise TritiumError(Code.INTERNAL, describe(error)) from None


def describe(error: BaseException) -> str:
    """An exception as Triton writes it: type, text, and the user's frames, innermost first."""
    if isinstance(error, _Wrong | TritiumError):
        return str(error)
    frames: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _is_ours(code.co_filename):
            frames.append(f"  {code.co_filename}({trace.tb_lineno}): {code.co_name}\n")
        elif frames and code.co_filename == __file__:
            frames.clear()
        trace = trace.tb_next
    text = f"{type(error).__name__}: {error}"
    return text + "\n\nAt:\n" + "".join(reversed(frames)) if frames else text


def _is_ours(filename: str) -> bool:
    return filename.startswith(("<frozen ", _PACKAGE)) or any(part in filename for part in _MACHINERY)


_MACHINERY = ("/asyncio/", "/concurrent/futures/", "/importlib/")
_PACKAGE = str(Path(__file__).parents[1])
