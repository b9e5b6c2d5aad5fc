"""Pickled ``.bin`` shards: unpickled in a child process, handed over as safetensors.

``torch.load(weights_only=True)`` runs none of the file's code, but its unpickler has had holes; so it runs in a
process of its own, which has nothing worth taking and dies alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tritium.errors import TritiumError, invalid
from tritium.llm.checkpoint.safetensors import shards

if TYPE_CHECKING:
    import torch

INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"


def weight_files(folder: Path) -> list[Path]:
    """The ``.bin`` shards of a Hugging Face folder, in the order of their names; empty when there are none."""
    if (folder / INDEX).is_file():
        return sorted(shards(folder, folder / INDEX))
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []


def refusal(files: list[Path]) -> TritiumError:
    """The error for a checkpoint that has only pickled weights, with the two ways on."""
    return invalid(
        f"{files[0].name} is a pickle, which is not read unless allowed. Convert it once with "
        f"'tritium convert SOURCE OUT' and serve OUT, or pass --allow-bin",
        param="allow_bin",
    )


def to_safetensors(source: Path, target: Path) -> None:
    """Write the tensors of one ``.bin`` file as one safetensors file, through a child process.

    Raises:
        TritiumError: the file is no plain dictionary of tensors.
    """
    command = [sys.executable, "-m", "tritium.llm.checkpoint.unpickle", str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        reason = lines[-1] if lines else f"the reading process ended with status {done.returncode}"
        raise invalid(f"{source.name} cannot be read with weights_only: {reason}")


def _unshare(loaded: object) -> dict[str, torch.Tensor]:
    """Contiguous tensors of their own memory (safetensors stores no shared ones)."""
    import torch

    if not isinstance(loaded, dict):
        raise SystemExit(f"it holds a {type(loaded).__name__}, expected a dictionary of tensors")
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise SystemExit(f"its entry {name!r} is a {type(value).__name__}, expected a tensor")
        shared = value.untyped_storage().data_ptr() in storages
        tensors[name] = value.clone() if shared else value.contiguous()
        storages.add(value.untyped_storage().data_ptr())
    return tensors


def main(source: str, target: str) -> None:
    """Entry of the child process."""
    import pickle

    import torch
    from safetensors.torch import save_file

    try:
        loaded = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise SystemExit(str(error).splitlines()[0]) from None
    except Exception as error:  # a damaged archive: torch raises RuntimeError, EOFError, KeyError, ...
        raise SystemExit(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None
    save_file(_unshare(loaded), target, metadata={"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])
