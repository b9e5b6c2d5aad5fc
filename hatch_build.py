"""Build hook: compiles the C++ kernels into the wheel, and beside the source for an editable install."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "src/tritium/llm/kernels/cpu"


class KernelBuildHook(BuildHookInterface):
    """Runs ``kernels/cpu/build.py`` by path: the package itself is not importable yet."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the libraries; without a compiler the wheel is pure Python and says so."""
        folder = Path(self.root) / KERNELS
        spec = importlib.util.spec_from_file_location("tritium_kernel_build", folder / "build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        libraries, problem = module.build(folder)
        if problem:
            self.app.display_warning(f"tritium: CPU kernels not built, torch will be used instead: {problem}")
        if libraries:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["artifacts"].extend(f"/{KERNELS}/{library.name}" for library in libraries)
