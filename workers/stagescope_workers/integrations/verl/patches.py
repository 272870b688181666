"""Functions of other people's modules replaced when, and only when, those modules are imported."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
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
    """

    module: str
    path: str
    wrap: Callable[[Function], Function]
    purpose: str
    modes: frozenset[str]
    state: str = WAITING

    @property
    def is_missing(self) -> bool:
        """Say whether the module is there and the function could not be replaced."""
        return self.state not in (WAITING, APPLIED)

    def __str__(self) -> str:
        return f"{self.purpose} ({self.module}: {self.path} is {self.state})"

    def apply(self, module: ModuleType) -> None:
        """Replace the function in `module`; whatever goes wrong is kept as `state`."""
        try:
            *holders, name = self.path.split(".")
            holder = functools.reduce(getattr, holders, module)
            # vars: an inherited method belongs to another class, and is replaced there.
            original = vars(holder).get(name)
            if not callable(original):
                self.state = ABSENT
                return
            setattr(holder, name, self.wrap(original))
            self.state = APPLIED
        except Exception as error:
            self.state = f"failed: {error!r:.200}"
            _log.warning("%s of %s was not patched: %r", self.path, self.module, error)


class Patches:
    """Applies patches to modules that are there, and to others when they are imported."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._by_module: dict[str, list[Patch]] = {}
        for patch in patches:
            self._by_module.setdefault(patch.module, []).append(patch)
        self._loading = threading.local()

    def __iter__(self) -> Iterator[Patch]:
        return (patch for patches in self._by_module.values() for patch in patches)

    def install(self) -> None:
        """Apply what can be applied now, and wait for the imports of the rest."""
        for name in self._by_module:
            module = sys.modules.get(name)
            if module is not None and not _is_loading(module):
                self._apply(module)
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as the others would, and apply its patches after it has run."""
        loading: set[str] = self._loading.__dict__.setdefault("names", set())
        if fullname not in self._by_module or fullname in loading:
            return None
        loading.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            loading.discard(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._apply(module)

            loader.exec_module = exec_module
        return spec

    def _apply(self, module: ModuleType) -> None:
        patches = self._by_module[module.__name__]
        for patch in patches:
            if patch.state == WAITING:
                patch.apply(module)
        missing = [patch for patch in patches if patch.is_missing]
        # Every rank finds the same: one of them says it.
        if missing and os.environ.get("RANK", "0") == "0":
            _log.warning("not reported with this version: %s", "; ".join(map(str, missing)))


def _is_loading(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
