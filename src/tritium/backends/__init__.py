"""Backends by the names that a configuration may give them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tritium.errors import Code, TritiumError, invalid

if TYPE_CHECKING:
    from tritium.backends.base import Backend

LLM = "tritium.backends.llm:LlmBackend"
BACKENDS: dict[str, str] = {
    "tritium": LLM,
    "tensorrtllm": LLM,
    "vllm": LLM,
    "python": "tritium.backends.python:PythonBackend",
    "onnxruntime": "tritium.backends.onnxruntime:OnnxRuntimeBackend",
    "openvino": "tritium.backends.openvino:OpenVinoBackend",
    "pytorch": "tritium.backends.pytorch:PyTorchBackend",
    "tensorflow": "tritium.backends.tensorflow:TensorFlowBackend",
    "tensorrt": "tritium.backends.tensorrt:TensorRtBackend",
}
# ``platform`` is the older field; it counts when ``backend`` is empty.
PLATFORMS: dict[str, str] = {
    "tensorrt_llm": "tensorrtllm",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorflow_savedmodel": "tensorflow",
    "tensorrt_plan": "tensorrt",
}
# What was once served and is not here, with what to do instead.
RETIRED: dict[str, str] = {
    "tensorflow_graphdef": "a GraphDef says nothing of its inputs: save the model as a SavedModel (model.savedmodel) "
    "and set platform to 'tensorflow_savedmodel'",
    "torch_aoti": "save the model with torch.export.save (model.pt2) and set backend to 'pytorch'",
}
# What lies in a version folder says which backend a model without a configuration needs; the first hit counts.
MARKS: tuple[tuple[str, str], ...] = (
    ("model.json", "vllm"),
    ("model.py", "python"),
    ("*.gguf", "tritium"),
    ("*.safetensors", "tritium"),
    ("*.safetensors.index.json", "tritium"),
    ("pytorch_model*.bin", "tritium"),
    ("model.savedmodel", "tensorflow"),
    ("model.plan", "tensorrt"),
    ("model.onnx", "onnxruntime"),
    ("model.xml", "openvino"),
    ("model.pt", "pytorch"),
    ("model.pt2", "pytorch"),
)


def detect(version_folder: Path) -> str:
    """The backend that the files of a version folder (or of the only folder in it) ask for; "" for none."""
    try:
        entries = sorted(version_folder.iterdir())
    except OSError:
        return ""
    folders = [e for e in entries if e.is_dir() and not e.name.startswith(".")]
    for pattern, backend in MARKS:
        if any(e.match(pattern) for e in entries):
            return backend
    if len(folders) == 1:
        for pattern, backend in MARKS:
            if any(True for _ in folders[0].glob(pattern)):
                return backend
    return ""


def incomplete(version_folder: Path) -> str:
    """What the files of a version folder lack by their own word; "" when nothing says so. Blocks.

    Checkpoints tell their sizes; a ``model.py`` and the like do not.
    """
    from tritium.llm import checkpoint

    return checkpoint.incomplete(version_folder)


def is_text(backend: str, platform: str) -> bool:
    """Whether the ``backend`` and ``platform`` of a configuration stand for a language model; imports nothing."""
    return BACKENDS.get(backend or PLATFORMS.get(platform, "")) == LLM


def name_of(backend: str, platform: str) -> str:
    """The name of the backend that the two fields mean; as it stands there when there is none of that name."""
    return backend or PLATFORMS.get(platform, platform)


def find(backend: str, platform: str, model: str) -> type[Backend]:
    """The class for the ``backend`` and ``platform`` of a configuration; imports it.

    Raises:
        TritiumError: INVALID_ARGUMENT when neither names a backend that there is.
    """
    name = name_of(backend, platform)
    target = BACKENDS.get(name) if backend or platform in PLATFORMS else None
    if target is None:
        if platform in RETIRED:
            raise invalid(
                f"platform '{platform}' of model '{model}' is not served: {RETIRED[platform]}", param="platform"
            )
        if not backend and not platform:
            raise invalid(f"must specify 'backend' or 'platform' for '{model}', none was given and no file tells it")
        raise invalid(
            f"unable to find backend library for backend '{backend or platform}', "
            # Triton's sentence; that it is not alone helps who mistyped a name.
            f"try specifying runtime on the model configuration. Backends here: {', '.join(BACKENDS)}",
            param="backend" if backend else "platform",
        )
    if platform in PLATFORMS and BACKENDS[PLATFORMS[platform]] != target:
        raise invalid(
            f"model '{model}' has backend '{backend}' and platform '{platform}', expected one of the two, or both for "
            "the same backend",
            param="platform",
        )
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ImportError as error:
        raise TritiumError(
            Code.UNAVAILABLE, f"backend '{name}' cannot be used here: {error}", param="backend"
        ) from error
