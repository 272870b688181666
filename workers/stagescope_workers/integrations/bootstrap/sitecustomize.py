"""Runs at the start of every Python process of a command that `stagescope run` started.

It imports nothing of stagescope until the process imports a trainer, and then installs that
trainer's patches. The variable STAGESCOPE_INTEGRATIONS has the table: see `registry`. Any other
`sitecustomize` on the path, such as the user's own, runs afterwards, as without this one.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys

# Every process of the command pays for what is imported here: `typing` would be most of it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Watch:
    """A finder that finds nothing itself: it installs the patches of a module before its import."""

    def __init__(self, table: dict[str, str]) -> None:
        self._table = table

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = self._table.pop(fullname, None)
        if module is None:
            return None
        _install(fullname, module)
        # The finder of the patches is on the list only now.
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                return spec
        return None


def _install(package: str, module: str) -> None:
    try:
        registry = importlib.import_module("stagescope_workers.integrations.registry")
        registry.install(package, module)
    except Exception as error:  # the command runs as without stagescope
        import logging

        logging.getLogger("stagescope.integrations").warning(
            "nothing of %s is reported: stagescope cannot be loaded by %s (%r)",
            package,
            sys.executable,
            error,
        )


def _run_next() -> None:
    """Run the `sitecustomize` that Python would have found without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_table = os.environ.get("STAGESCOPE_INTEGRATIONS", "")
sys.meta_path.insert(
    0, _Watch(dict(pair.split("=", 1) for pair in _table.split(",") if "=" in pair))
)
_run_next()
