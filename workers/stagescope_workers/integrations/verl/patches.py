"""Functions of other people's modules replaced when, and only when, those modules are imported."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_log = logging.getLogger("stagescope.verl")

Function = Callable[..., Any]

WAITING: Final = "waiting"
"""The module was not imported here."""
APPLIED: Final = "applied"
ABSENT: Final = "absent"
"""The module has no such function."""


@dataclasses.dataclass
class Patch:
    """One function to replace.

    Attributes:
        module: The module that holds it.
        path: Where in the module: `function` or `Class.method`.
        wrap: Makes the replacement of the original; it must call the original.
        purpose: What is not reported where the function cannot be found.
        modes: The modes of STAGESCOPE_VERL that want it.
        state: WAITING, APPLIED, ABSENT, or why it failed.
        replacement: What stands in the original's place.
    """

    module: str
    path: str
    wrap: Callable[[Function], Function]
    purpose: str
    modes: frozenset[str]
    state: str = WAITING
    replacement: Function | None = None

    @property
    def is_missing(self) -> bool:
        """Say whether the module is there and the function could not be replaced."""
        return self.state not in (WAITING, APPLIED)

    def __str__(self) -> str:
        return f"{self.purpose} ({self.module}: {self.path} is {self.state})"

    def apply(self, module: ModuleType) -> None:
        """Replace the function in `module`; whatever goes wrong is kept as `state`."""
        *holders, name = self.path.split(".")
        holder: Any = module
        for inner in holders:
            holder = vars(holder).get(inner)
            if not isinstance(holder, type):
                self.state = ABSENT
                return
        # vars: an inherited method belongs to another class, and is replaced there.
        original = vars(holder).get(name)
        if original is not None and original is self.replacement:
            return
        if not callable(original) or isinstance(original, staticmethod | type):
            self.state = ABSENT
            return
        try:
            self._replace(holder, name, original)
        except Exception as error:
            self.state = f"failed: {error!r:.200}"

    def _replace(self, holder: Any, name: str, original: Function) -> None:
        replacement = self.wrap(original)
        if inspect.iscoroutinefunction(replacement) != inspect.iscoroutinefunction(original):
            raise LookupError("it became asynchronous, or ceased to be")
        setattr(holder, name, replacement)
        self.replacement, self.state = replacement, APPLIED


class Patches:
    """Applies patches to modules that are there, and to others when they are imported."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._by_module: dict[str, list[Patch]] = {}
        for patch in patches:
            self._by_module.setdefault(patch.module, []).append(patch)

    def __iter__(self) -> Iterator[Patch]:
        return (patch for patches in self._by_module.values() for patch in patches)

    def install(self) -> None:
        """Apply what can be applied now, and wait for the imports of the rest."""
        sys.meta_path.insert(0, self)
        for name in self._by_module:
            module = sys.modules.get(name)
            if module is not None and not _is_loading(module):
                self._apply(name, module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as the others would, and have its patches applied after it has run."""
        if fullname not in self._by_module:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is None:
                continue
            if hasattr(spec.loader, "exec_module"):
                loader: Any = _PatchingLoader(
                    spec.loader, lambda module: self._apply(fullname, module)
                )
                spec.loader = loader
            return spec
        return None

    def _apply(self, name: str, module: ModuleType) -> None:
        patches = self._by_module[name]
        for patch in patches:
            patch.apply(module)
        missing = [patch for patch in patches if patch.is_missing]
        # Every rank finds the same: one of them says it.
        if missing and os.environ.get("RANK", "0") == "0":
            _log.warning("not reported with this version: %s", "; ".join(map(str, missing)))


class _PatchingLoader:
    """Runs one module as its own loader does, then calls `then`; the module keeps that loader.

    A loader may serve many modules (one zip file has one), so it is not changed itself.
    """

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Run `module`, which finds its own loader in `__spec__`, and patch it."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)


def _is_loading(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def say(patches: Iterable[Patch]) -> None:
    """Log in one line what is not reported with the verl that is being imported, if anything."""
    verl = sys.modules.get("verl")
    # Every rank finds the same: one of them says it.
    if verl is None or os.environ.get("RANK", "0") != "0":
        return
    version = str(getattr(verl, "__version__", "of unknown version"))
    missing = missing_hooks(patches, verl)
    if missing:
        _log.warning("not reported with verl %s: %s", version, "; ".join(missing))


def missing_hooks(patches: Iterable[Patch], verl: ModuleType) -> list[str]:
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
