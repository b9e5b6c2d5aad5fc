"""What the backends of tensor runtimes share: finding and completing a model, and the way of one batch through it."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from tritium.backends import signature as tensors
from tritium.backends.base import InstanceBackend, InstanceContext, Send
from tritium.backends.options import Options
from tritium.backends.signature import DEFAULT_MAX_BATCH, Declared, Signature
from tritium.errors import Code, TritiumError, invalid, pip_install
from tritium.types import InferRequest, InferResponse, Tensor

# More of a runtime's error text is of no use to who reads it.
MAX_ERROR = 2000


class RuntimeBackend(InstanceBackend):
    """One instance of a model that is a file for a runtime.

    Attributes:
        name: of the backend.
        platform: how Triton calls it, "" when it has no name for it.
        files: names that the model's file may have when the configuration gives none; the first is the usual one.
        options: what the configuration asks of the runtime; set before ``open`` is called.
    """

    joined = True
    honours = frozenset(
        {
            "default_model_filename",
            "optimization.graph",
            "optimization.cuda",
            "optimization.execution_accelerators",
        }
    )
    name: ClassVar[str]
    platform: ClassVar[str] = ""
    files: ClassVar[tuple[str, ...]]

    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        self.options: Options
        self._log: Any = None
        self._signature: Signature | None = None
        self._inputs: dict[str, Declared] = {}
        self._outputs: dict[str, Declared] = {}
        self._scalars: frozenset[str] = frozenset()
        self._batched = False

    # -- for each runtime -----------------------------------------------------------------------------------

    @abstractmethod
    def open(self, path: Path, config: Mapping[str, Any]) -> Signature:
        """Loads the model and says what its tensors are.

        Args:
            path: of the file or folder; it exists.

        Raises:
            TritiumError: a wish of ``options`` cannot be granted.
            Exception: anything that the runtime has against the file.
        """

    @abstractmethod
    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """Runs the model.

        Args:
            inputs: those that were declared and given, in the model's shapes.
            outputs: names of declared ones that are wanted.

        Returns:
            At least the wanted ones. Their buffers stay as they are when the next batch runs.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of the model; also when ``open`` has failed."""

    def prepare(self, config: Mapping[str, Any]) -> None:
        """Called when the configuration is complete and fits the model."""

    # -- life -----------------------------------------------------------------------------------------------

    def connect(self, server: Any) -> None:
        """Keeps the way to the server's log."""
        self._log = server.log

    def complete(self, config: dict[str, Any]) -> dict[str, Any]:
        """Fills in backend, platform and file, and what the model's file says of its tensors."""
        config["backend"], config["platform"] = self.name, self.platform
        signature = self._open(config)
        config["default_model_filename"] = config.get("default_model_filename") or self._find(config).name
        if self.context.auto_complete:
            default = self.options.setting("default-max-batch-size", DEFAULT_MAX_BATCH)
            tensors.complete(config, signature, default)
        ignored = self.options.ignored()
        if ignored:
            self._log("warning", f"set, and without meaning for the backend '{self.name}': {', '.join(ignored)}")
        return config

    def load(self, config: dict[str, Any]) -> None:
        """Loads the model, unless ``complete`` has, and checks it against the completed configuration."""
        if config.get("model_transaction_policy", {}).get("decoupled"):
            raise invalid(
                f"model_transaction_policy.decoupled is true for model '{config['name']}', expected false: the backend "
                f"'{self.name}' gives each request one answer",
                param="model_transaction_policy",
            )
        signature = self._signature or self._open(config)
        tensors.check(config, signature)
        self._batched = config.get("max_batch_size", 0) > 0
        self._inputs = {one.name: one for one in tensors.declared_inputs(config)}
        self._outputs = {one.name: one for one in tensors.declared_outputs(config)}
        self._scalars = frozenset(one.name for one in (*signature.inputs, *signature.outputs) if one.shape == ())
        self.prepare(config)

    def unload(self) -> None:
        """Frees the model."""
        self._signature = None
        self.close()

    def _open(self, config: dict[str, Any]) -> Signature:
        path = self._find(config)
        self.options = Options(config, self.context.settings)
        self.options.setting("default-max-batch-size", DEFAULT_MAX_BATCH)
        try:
            self._signature = self.open(path, config)
        except TritiumError:
            raise
        except Exception as error:
            raise TritiumError(
                Code.INTERNAL,
                f"failed to load model '{self.context.model}' version {self.context.version}: '{path.name}' cannot be "
                f"loaded by {self.name}: {self._plain(error)}",
            ) from error
        return self._signature

    def _find(self, config: Mapping[str, Any]) -> Path:
        """The model's file, by the name that the configuration gives or by one of the usual ones.

        Raises:
            TritiumError: there is none, or more than one.
        """
        given = config.get("default_model_filename", "")
        folder, version = self.context.version_folder, f"version {self.context.version} of model '{self.context.model}'"
        if given:
            path = PurePosixPath(given)
            if path.is_absolute() or ".." in path.parts:
                raise invalid(
                    f"default_model_filename is '{given}', expected a path below the version's folder",
                    param="default_model_filename",
                )
            if not (folder / path).exists():
                raise TritiumError(Code.INTERNAL, f"{version} has no '{given}', which default_model_filename names")
            return folder / path
        found = [name for name in self.files if (folder / name).exists()]
        if not found:
            expected = " or ".join(f"'{name}'" for name in self.files)
            raise TritiumError(Code.INTERNAL, f"{version} has no {expected}, expected the file of the model")
        if len(found) > 1:
            raise invalid(
                f"{version} has {' and '.join(found)}, expected one of them: set default_model_filename",
                param="default_model_filename",
            )
        return folder / found[0]

    # -- batches --------------------------------------------------------------------------------------------

    def execute(self, requests: Sequence[InferRequest], send: Send) -> Sequence[InferResponse]:
        """Runs the batch, which is one request."""
        (request,) = requests
        for name, declared in self._inputs.items():
            if not declared.optional and name not in request.inputs:
                raise tensors.input_missing(self.context.model, name)
        wanted = [output.name for output in request.outputs] or list(self._outputs)
        inputs = {name: self._inward(tensor) for name, tensor in request.inputs.items()}
        try:
            found = self.infer(inputs, wanted)
        except TritiumError:
            raise
        except Exception as error:
            text = f"{self.name} cannot run model '{self.context.model}': {self._plain(error)}"
            raise TritiumError(Code.INTERNAL, text) from error
        return [InferResponse("", "", "", [self._outward(self._outputs[name], found) for name in wanted])]

    def _inward(self, tensor: Tensor) -> Tensor:
        """A scalar of the model is declared with the shape [1]."""
        if tensor.name in self._scalars and not self._batched:
            return Tensor(tensor.name, tensor.dtype, (), tensor.data)
        return tensor

    def _outward(self, declared: Declared, found: Mapping[str, Tensor]) -> Tensor:
        """An output, if it is what was declared."""
        tensor = found[declared.name]
        if not tensor.shape and not self._batched:
            tensor = Tensor(tensor.name, tensor.dtype, (1,), tensor.data)
        shape = declared.shape
        expected = shape if shape is None or not self._batched else (-1, *shape)
        fits = expected is None or (
            len(expected) == len(tensor.shape)
            and all(wants in (-1, has) for wants, has in zip(expected, tensor.shape, strict=True))
        )
        if tensor.dtype is not declared.dtype or not fits:
            wanted = "" if expected is None else f" of shape {list(expected)}"
            raise TritiumError(
                Code.INTERNAL,
                f"{declared.shown} of model '{self.context.model}' came as {tensor.dtype.value} of shape "
                f"{list(tensor.shape)}, expected {declared.dtype.value}{wanted}, as the configuration declares it",
            )
        return tensor

    def _plain(self, error: Exception) -> str:
        """A runtime's error without the server's own paths."""
        text = str(error).strip() or type(error).__name__
        return text.replace(f"{self.context.version_folder}/", "").strip()[:MAX_ERROR]


def require(module: str, backend: str, package: str) -> Any:
    """The module of a runtime.

    Args:
        package: what to install, as pip calls it.

    Raises:
        TritiumError: INVALID_ARGUMENT with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise invalid(
            f"backend '{backend}' needs {package}, which {_why(error, module)}: install {package}: "
            f"{pip_install(package)}",
            param="backend",
        ) from error


def _why(error: ImportError, module: str) -> str:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == module.partition(".")[0]:
        return "is not installed"
    return f"cannot be imported here ({error})"


def installed(*packages: str) -> bool:
    """Whether one of these packages is installed; imports none."""
    return any(_version(package) for package in packages)


def is_cpu_build(package: str) -> bool:
    """Whether a package is not installed, or is a build that says of itself that it is for the CPU."""
    version = _version(package)
    return not version or version.endswith("+cpu")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
