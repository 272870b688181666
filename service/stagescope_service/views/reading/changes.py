"""What tells whether an answer about a whole run may be another one now."""

from __future__ import annotations

from typing import Final

from stagescope_service.views.reading.answers import Key
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_wire.names import BISECT, EXPERIMENT

_LIVE: Final = 10.0
_ENDED: Final = 60.0
"""Seconds for which an answer about a live run and about another one holds, since late scalars and
samples change no step."""


def change_key(deps: Dependencies, name: str, run: str, asked: object) -> Key:
    """Return a key that changes whenever an answer about a run may.

    Args:
        deps: the catalogue's holder.
        name: of the kind of answer.
        run: the run.
        asked: what else selects the answer; its `repr` counts.

    Raises:
        NotFound: no such run.
    """
    target = deps.finder.attempt(run)
    attempts = deps.catalogue.attempts(target.run)
    mark = deps.catalogue.change_mark([row["attempt_id"] for row in attempts])
    states = [(row["number"], row["ended_wall"], row["resumed_from_step"]) for row in attempts]
    bisected = len(deps.catalogue.settings_of_runs(f"{EXPERIMENT}{target.run}-", BISECT))
    is_live = any(row["live"] for row in attempts)
    period = int(deps.clock() / (_LIVE if is_live else _ENDED))
    known = repr((target.display_name, asked, is_live, period, states, bisected))
    return (name, target.run, known, mark)
