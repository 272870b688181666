"""Checkpoints: a folder a step, visible under its name only once it is whole.

`step_000003/` holds weights as safetensors, optimizer and random states as `.pt` files that are
read with `weights_only=True`, and `meta.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_PREFIX: Final = "step_"
_KEEP: Final = 3


class NotThere(ValueError):
    """There is no such checkpoint, or it is of another training."""


def begin(root: Path, step: int) -> Path:
    """Make the empty folder into which every rank writes its part of the checkpoint."""
    folder = root / f".writing-{_PREFIX}{step:06d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def commit(folder: Path, step: int, settings: dict[str, Any]) -> Path:
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


def latest(root: Path, settings: dict[str, Any]) -> tuple[int, Path] | None:
    """Return the step and folder of the last complete checkpoint, or None.

    Raises:
        NotThere: it was written under other settings.
    """
    folders = _complete(root)
    return _opened(folders[-1], settings) if folders else None


def after(root: Path, step: int, settings: dict[str, Any]) -> Path:
    """Return the folder of the checkpoint after `step`.

    Raises:
        NotThere: there is none, or it was written under other settings.
    """
    for folder in _complete(root):
        if folder.name == f"{_PREFIX}{step:06d}":
            return _opened(folder, settings)[1]
    there = ", ".join(folder.name for folder in _complete(root)) or "none"
    raise NotThere(f"{root} has no checkpoint after step {step} any more: it holds {there}")


def _opened(folder: Path, settings: dict[str, Any]) -> tuple[int, Path]:
    meta = json.loads((folder / "meta.json").read_text())
    mine = json.loads(json.dumps(settings))
    if meta["settings"] != mine:
        differ = sorted(k for k in mine if meta["settings"].get(k) != mine[k])
        raise NotThere(f"{folder} was written with other settings: {', '.join(differ)}")
    return meta["step"], folder


def save_weights(path: Path, module: torch.nn.Module) -> None:
    """Write a module's state dict to `{path}.safetensors`."""
    from safetensors.torch import save_file

    save_file(module.state_dict(), path.with_suffix(".safetensors"))


def load_weights(path: Path, module: torch.nn.Module) -> None:
    """Read what `save_weights` wrote; every name must be there."""
    from safetensors.torch import load_file

    module.load_state_dict(load_file(path.with_suffix(".safetensors")))


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a dict of tensors and numbers to `{path}.pt`."""
    import torch

    torch.save(state, path.with_suffix(".pt"))


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote; nothing but tensors and built-in types is unpickled."""
    import torch

    state: dict[str, Any] = torch.load(path.with_suffix(".pt"), weights_only=True)
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
