"""Detects a training in which no step closes any more, though its processes still answer.

Its ranks may wait outside the reported stages, or a role waits for another.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from stagescope_service.core.entities import Attempt
from stagescope_wire.schema import RankKey

QUIET_KIND: Final = "training_quiet"
"""The finding of such a training."""

_CLOSES: Final = 3
"""Minimum closed steps of an attempt, to know how long a step may take."""
_LEAST: Final = 600.0
"""Minimum seconds without a closed step."""
_LONGER: Final = 5.0
"""Times the longest wait for a step, after which the next one is late."""


class Quiet(NamedTuple):
    """A training without a closed step for long.

    Attributes:
        seconds: since the last step closed.
        longest: the longest wait for a step before, in seconds.
        behind: the ranks that did not reach the newest step, by role and rank.
    """

    seconds: float
    longest: float
    behind: list[RankKey]


def quiet(attempt: Attempt, wall: float) -> Quiet | None:
    """Return how long no step of an attempt closed, if that is much longer than ever before.

    Args:
        attempt: an attempt that is not over.
        wall: Unix time now.
    """
    last, longest = attempt.last_closed_wall, attempt.longest_wait
    if last is None or attempt.closes < _CLOSES:
        return None
    if wall - last <= max(_LEAST, _LONGER * longest):
        return None
    # A raw caller does not poll: nobody knows whether it still works.
    live = [each for each in attempt.processes.values() if each.live and not each.raw]
    reached = {(each.role, each.rank): each.max_step for each in live if each.max_step is not None}
    newest = max(reached.values(), default=0)
    behind = sorted(rank for rank, step in reached.items() if step < newest)
    return Quiet(wall - last, longest, behind) if live else None
