"""A pytest plugin: what of stagescope was at work while a trainer's own tests ran, as JSON.

Equal outcomes prove nothing where nothing was attached. So it counts how often each replaced
function was called, and in how many tests, but for calls by a name that was imported, and keeps
what the integration logged: an exception of ours that `guarded` caught changes no outcome. It
imports nothing of stagescope, whose bootstrap is tried, too, and it runs in a folder of its own on
PYTHONPATH: a trainer has a package `tests`.
"""

from __future__ import annotations

import collections
import functools
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

VARIABLE: Final = "STAGESCOPE_OWN_TESTS_REPORT"
"""The file that is written."""

_calls: Final[collections.Counter[str]] = collections.Counter()
_tests: Final[set[str]] = set()
_logged: Final[list[str]] = []
_counting: Final[set[Callable[..., Any]]] = set()
_current = ""


class _Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _logged.append(f"{_current}: {record.getMessage()}")


def _patches() -> list[Any]:
    """Return the patches that were applied, as the finders of this process hold them."""
    finders = [each for each in sys.meta_path if type(each).__name__ == "Patches"]
    found = [patch for finder in finders for patch in finder]  # type: ignore[attr-defined]
    return [patch for patch in found if patch.state == "applied"]


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        _calls[name] += 1
        _tests.add(_current)
        return function(*args, **kwargs)

    return run


def _count_calls() -> None:
    for patch in _patches():
        *holders, name = patch.path.split(".")
        holder: object = functools.reduce(getattr, holders, sys.modules[patch.module])
        if patch.replacement in _counting or vars(holder)[name] is not patch.replacement:
            continue
        patch.replacement = _counted(patch.path, patch.replacement)
        _counting.add(patch.replacement)
        setattr(holder, name, patch.replacement)


def _wait_less() -> None:
    """Let the end of a training wait a second for receipts, not half a minute.

    A service that never answers sends none, and dozens of a trainer's tests train.
    """
    training = sys.modules.get("stagescope_workers.integrations.training")
    if training is not None:
        training.FINISH_SECONDS = 1.0  # type: ignore[attr-defined]


def pytest_configure() -> None:
    logging.getLogger("stagescope.integrations").addHandler(_Keep(logging.WARNING))


def pytest_runtest_setup(item: pytest.Item) -> None:
    global _current
    _current = item.nodeid
    _count_calls()  # a test may be the first that imports a module
    _wait_less()


def pytest_sessionfinish() -> None:
    found = {
        "applied": sorted({f"{patch.module}: {patch.path}" for patch in _patches()}),
        "calls": dict(_calls),
        "tests": len(_tests),
        "logged": _logged,
    }
    Path(os.environ[VARIABLE]).write_text(json.dumps(found))
