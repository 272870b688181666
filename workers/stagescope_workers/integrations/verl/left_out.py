"""What the verl that is here lacks of what is patched: found by its files, nothing is imported."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from stagescope_workers.integrations.verl.patches import Patch

_log = logging.getLogger("stagescope.verl")


def say(patches: Iterable[Patch]) -> None:
    """Log in one line what is not reported with the verl that is being imported, if anything."""
    verl = sys.modules.get("verl")
    # Every rank finds the same: one of them says it.
    if verl is None or os.environ.get("RANK", "0") != "0":
        return
    version = str(getattr(verl, "__version__", "of unknown version"))
    missing = left_out(patches, verl)
    if missing:
        _log.warning("not reported with verl %s: %s", version, "; ".join(missing))


def left_out(patches: Iterable[Patch], verl: ModuleType) -> list[str]:
    """Return the purposes that no module of `verl` serves: it came later, or went.

    A purpose that several modules serve (verl has two trainers, and had two kinds of workers)
    needs one of them.
    """
    folders = [Path(folder) for folder in verl.__path__]
    served: dict[str, bool] = {}
    for patch in patches:
        known = served.get(patch.purpose, False)
        served[patch.purpose] = known or _has_file(folders, patch.module)
    return [purpose for purpose, is_served in served.items() if not is_served]


def _has_file(folders: list[Path], module: str) -> bool:
    parts = module.split(".")[1:]
    paths = [folder.joinpath(*parts) for folder in folders]
    # What does not lie in folders (a zip file) cannot be looked at so.
    return any(path.is_dir() or path.with_suffix(".py").exists() for path in paths) or not any(
        folder.is_dir() for folder in folders
    )
