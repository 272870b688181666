"""Nothing of ours is raised into a training: what fails is logged once, and left out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

_log = logging.getLogger("stagescope.verl")
_said: Final[set[str]] = set()


@contextlib.contextmanager
def guarded(what: str) -> Iterator[None]:
    """Swallow whatever is raised inside; the first time of each `what` it is logged."""
    try:
        yield
    except Exception as error:
        level = logging.DEBUG if what in _said else logging.WARNING
        _said.add(what)
        _log.log(level, "%s was left out: %r", what, error, exc_info=True)
