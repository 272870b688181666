"""stagescope: a debugging service for RL post-training on Ray (wire format and client).

Usage::

    import stagescope

    session = stagescope.attach()           # the running service, or attach("http://head:8700")
    session.step("latest").metrics()        # exact mismatch of the last step
    session.step(5).rounds().to_pandas()    # which round went wrong

Training processes import this package for `stagescope_wire`, so the client and its HTTP library are
imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from stagescope_wire import __version__ as __version__
from stagescope_wire import errors
from stagescope_wire.errors import *  # noqa: F403 - all of them, by __all__

if TYPE_CHECKING:
    from stagescope.answers import Metrics, Record
    from stagescope.replaying import replay
    from stagescope.rollouts import ReplayRollouts
    from stagescope.session import Session, attach, engine
    from stagescope.step import Step
    from stagescope.table import Table
    from stagescope_wire.batch import Batch


__all__ = [
    "Batch", "Metrics", "Record", "ReplayRollouts", "Session", "Step", "Table", "attach", "engine",
    "replay",
]  # fmt: skip
__all__ += errors.__all__

_LAZY = {
    "Batch": "stagescope_wire.batch", "Metrics": "stagescope.answers",
    "Record": "stagescope.answers", "ReplayRollouts": "stagescope.rollouts",
    "Session": "stagescope.session", "Step": "stagescope.step", "Table": "stagescope.table",
    "attach": "stagescope.session", "engine": "stagescope.session",
    "replay": "stagescope.replaying",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names only, without modules and imported helpers."""
    return sorted([*__all__, "__version__"])
