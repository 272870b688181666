"""STAGESCOPE_CANARY: a canary after every weight sync of a trainer, off by default."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from stagescope_workers.integrations.patches import guarded, log_once

if TYPE_CHECKING:
    from stagescope_workers.canary.after_syncs import WeightCanary

VARIABLE: Final = "STAGESCOPE_CANARY"
"""1: after every sync; N: for versions that N divides; 0 or unset: never."""
_ACTIVITY: Final = "the canary"


def every() -> int | None:
    """Return the number of versions from one canary to the next; None where none is wanted."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text.isdecimal():
        if text:
            log_once(f"{VARIABLE} is {text!r:.50}: a number is expected; there is no canary")
        return None
    return int(text) or None


@contextlib.contextmanager
def around_sync(
    find: Callable[[], WeightCanary | None],
    *,
    before: Callable[[WeightCanary], None] = lambda canary: None,
    after: Callable[[WeightCanary], None],
) -> Iterator[None]:
    """Run a weight sync; call `before` and `after` with the canary, guarded.

    Args:
        find: returns the canary of the trainer; None: there is none.
        before: runs before the sync.
        after: runs where the sync succeeded.
    """
    canary: WeightCanary | None = None
    with guarded(_ACTIVITY):
        canary = find()
        if canary is not None:
            canary.before_sync()
            before(canary)
    yield
    with guarded(_ACTIVITY):
        if canary is not None:
            after(canary)
