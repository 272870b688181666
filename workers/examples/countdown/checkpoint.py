"""Checkpoints: one folder per step, which gets its name once it is complete.

`step_000003/` holds weights as safetensors, optimizer and random states as `.pt` files that are
read with `weights_only=True`, and `meta.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_PREFIX: Final = "step_"
_KEEP: Final = 3


class CheckpointNotFound(ValueError):
    """The checkpoint does not exist, or belongs to another training."""


def begin(root: Path, step: int) -> Path:
    """Create the empty folder into which every rank writes its part of the checkpoint."""
    folder = root / f".writing-{_PREFIX}{step:06d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def commit(folder: Path, step: int, settings: Mapping[str, object]) -> Path:
    """Name a complete folder as the checkpoint after `step`, durably, and drop old ones."""
    (folder / "meta.json").write_text(json.dumps({"step": step, "settings": settings}, indent=1))
    for path in [*folder.iterdir(), folder]:
        _sync(path)
    final = folder.parent / f"{_PREFIX}{step:06d}"
    shutil.rmtree(final, ignore_errors=True)
    folder.rename(final)
    _sync(final.parent)
    for old in _complete(folder.parent)[:-_KEEP]:
        shutil.rmtree(old)
    return final


def latest(root: Path, settings: Mapping[str, object]) -> tuple[int, Path] | None:
    """Return the step and folder of the last complete checkpoint, or None.

    Raises:
        CheckpointNotFound: it was written with other settings.
    """
    folders = _complete(root)
    return _opened(folders[-1], settings) if folders else None


def after(root: Path, step: int, settings: Mapping[str, object]) -> Path:
    """Return the folder of the checkpoint after `step`.

    Raises:
        CheckpointNotFound: there is none, or it was written with other settings.
    """
    for folder in _complete(root):
        if folder.name == f"{_PREFIX}{step:06d}":
            return _opened(folder, settings)[1]
    names = ", ".join(folder.name for folder in _complete(root)) or "none"
    raise CheckpointNotFound(f"{root} has no checkpoint after step {step}: it has {names}")


def _opened(folder: Path, settings: Mapping[str, object]) -> tuple[int, Path]:
    meta = json.loads((folder / "meta.json").read_text())
    expected = json.loads(json.dumps(settings))
    if meta["settings"] != expected:
        differ = sorted(k for k in expected if meta["settings"].get(k) != expected[k])
        raise CheckpointNotFound(f"{folder} was written with other settings: {', '.join(differ)}")
    return meta["step"], folder


def save_weights(path: Path, module: torch.nn.Module) -> None:
    """Write a module's state dict to `{path}.safetensors`."""
    from safetensors.torch import save_file

    save_file(module.state_dict(), path.with_suffix(".safetensors"))


def load_weights(path: Path, module: torch.nn.Module) -> None:
    """Load a file of `save_weights`; every name must be present."""
    from safetensors.torch import load_file

    module.load_state_dict(load_file(path.with_suffix(".safetensors")))


def save_state(path: Path, state: Mapping[str, object]) -> None:
    """Write a dict of tensors and numbers to `{path}.pt`."""
    import torch

    torch.save(state, path.with_suffix(".pt"))


def load_state(path: Path) -> dict[str, Any]:
    """Load a file of `save_state`; only tensors and built-in types are unpickled."""
    import torch

    state: dict[str, object] = torch.load(path.with_suffix(".pt"), weights_only=True)
    return state


def _complete(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"{_PREFIX}*/meta.json"))


def _sync(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every filesystem syncs folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
