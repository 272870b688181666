"""Hashes of the code that a process has loaded and that no package version names.

Of a script outside of git, of uncommitted edits, and of a package that is installed from a folder,
nothing else says that they changed. Only hashes leave the process.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

MAX_FILES: Final = 400
"""`stagescope_service.compare.fingerprints.MOST_MODULES` is the same."""
_MAX_BYTES: Final = 1 << 21
_DIGITS: Final = 12
_MAIN: Final = "__main__"
_RAY_WORKER: Final = "default_worker.py"
_OURS: Final = frozenset({"stagescope", "stagescope_workers", "sitecustomize"})
"""Packages of ours, of which `packages` has the version."""


def loaded_code() -> dict[str, str]:
    """Return name of a module -> hash of its file; the main script has its file's name.

    Left out are the standard library, installed packages, and modules beyond `MAX_FILES`.
    """
    installed = _installed_folders()
    found: dict[str, str] = {}
    for name, path in _files():
        is_main = name == _MAIN
        if path.name == _RAY_WORKER or name.partition(".")[0] in _OURS:
            continue
        if not is_main and any(folder in path.parents for folder in installed):
            continue
        digest = file_hash(path)
        if digest is not None:
            found[path.name if is_main else name] = digest
        if len(found) >= MAX_FILES:
            break
    return found


def script_of(line: str, directory: str | None) -> tuple[str, str] | None:
    """Return (name, hash) of the script of a command line, such as that of a Ray job's driver.

    Args:
        line: the command line.
        directory: where it was started; None: not known.
    """
    for word in line.split():
        if word.endswith(".py"):
            path = Path(directory or "", word)
            digest = file_hash(path) if directory is not None or path.is_absolute() else None
            return None if digest is None else (path.name, digest)
    return None


def file_hash(path: Path) -> str | None:
    """Return a hash of a file of code; None where it cannot be read, or is no code."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]
    except OSError:
        return None


def _files() -> Iterator[tuple[str, Path]]:
    """Yield (name, source file) of the loaded modules, the main script first."""
    modules = dict(sys.modules)
    main = modules.pop(_MAIN, None)
    for name, module in [(_MAIN, main), *sorted(modules.items(), key=lambda item: item[0])]:
        file = _file_of(module) if isinstance(module, ModuleType) else None
        if isinstance(file, str) and file.endswith(".py"):
            yield name, Path(file).absolute()


def _file_of(module: ModuleType) -> object:
    # `getattr` would load a module that waits for its first use, in this thread.
    held: dict[str, object] = object.__getattribute__(module, "__dict__")
    return held.get("__file__")


def _installed_folders() -> list[Path]:
    paths = sysconfig.get_paths()
    named = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    others = (path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    return [Path(path).absolute() for path in {*named, *others}]
