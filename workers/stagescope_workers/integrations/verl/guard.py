"""Nothing of ours is raised into a training: what fails is logged once, and left out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

from stagescope.wire.errors import StagescopeError
from stagescope_workers.probe.stage import Stage

_log = logging.getLogger("stagescope.verl")
_said: Final[set[str]] = set()


@contextlib.contextmanager
def guarded(what: str, *, but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Swallow whatever is raised inside, `but` this; the first time of each `what` it is logged."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        level = logging.DEBUG if what in _said else logging.WARNING
        _said.add(what)
        _log.log(level, "%s was left out: %r", what, error, exc_info=True)


@contextlib.contextmanager
def running(stage: Stage | None) -> Iterator[None]:
    """Run what is inside as `stage`, where there is one.

    Raises:
        StagescopeError: a capture that is strict could not be carried out.
    """
    if stage is None:
        yield
        return
    with guarded("the beginning of a stage", but=StagescopeError):
        stage.begin()
    try:
        yield
    except BaseException as error:
        with guarded("the end of a stage"):
            stage.end(error)
        raise
    with guarded("the end of a stage", but=StagescopeError):
        stage.end()
