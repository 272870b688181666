"""Catches our exceptions in a training process: each activity that fails is logged once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from stagescope.wire.errors import StagescopeError

if TYPE_CHECKING:
    from stagescope_workers.probe.stage import Stage

_log = logging.getLogger("stagescope.integrations")
_logged: Final[set[str]] = set()


def log_once(*lines: str) -> None:
    """Log each of these warnings the first time."""
    for line in lines:
        if line not in _logged:
            _logged.add(line)
            _log.warning("%s", line)


@contextlib.contextmanager
def guarded(activity: str, *, reraise: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Catch any exception except `reraise`; log a warning the first time for each `activity`."""
    try:
        yield
    except reraise:
        raise
    except Exception as error:
        level = logging.DEBUG if activity in _logged else logging.WARNING
        _logged.add(activity)
        _log.log(level, "%s was skipped: %r", activity, error, exc_info=True)


@contextlib.contextmanager
def ending(activity: str, end: Callable[[BaseException | None], None]) -> Iterator[None]:
    """Run the body; then call `end`, guarded as `activity`, with what the body raised, or None."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        with guarded(activity):
            end(error)


@contextlib.contextmanager
def running(stage: Stage | None) -> Iterator[None]:
    """Run the body as `stage`, where there is one.

    Raises:
        StagescopeError: a strict capture failed.
    """
    if stage is None:
        yield
        return
    with guarded("the beginning of a stage", reraise=StagescopeError):
        stage.begin()
    try:
        yield
    except BaseException as error:
        with guarded("the end of a stage"):
            stage.end(error)
        raise
    with guarded("the end of a stage", reraise=StagescopeError):
        stage.end()
