"""Evidence of triggers: the firings of the rules that watch each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from stagescope_service.rules.evidence import Evidence, Firing, not_found
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.names import OF_STAGES
from stagescope_service.rules.symptoms.rows import detail_of, found_in, messages


def fired(
    history: RunHistory,
    *,
    kinds: Sequence[str],
    besides: Sequence[str] = (),
    explained: Collection[str] = (),
) -> Evidence:
    """Return the firings of triggers, each with its step.

    Args:
        history: of the run.
        kinds: the kinds of their findings, patterns with `*`.
        besides: kinds that are left out.
        explained: ids of findings that are left out.
    """
    rows = [
        row
        for row in history.findings_of(kinds)
        if row["kind"] not in besides and row["finding_id"] not in explained
    ]
    if not rows:
        return not_found("no trigger's rule fired")
    found = found_in(history, rows, messages(history, rows))
    firings = (
        Firing(row["finding_id"], row["step"], detail_of(row, "metric") in OF_STAGES)
        for row in rows
    )
    return dataclasses.replace(found, firings=tuple(firings))
