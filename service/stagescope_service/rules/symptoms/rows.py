"""Evidence of reported rows: their texts, their ranks and their steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from stagescope_service.rules.document import DEFAULT_COOLDOWN
from stagescope_service.rules.evidence import ENDED_AFTER, Evidence, listed
from stagescope_service.rules.history import RunHistory
from stagescope_service.store.tables import FindingRow, LossRow
from stagescope_wire.render import counted, numbers_text

TRIGGER: Final = "trigger_"
"""Prefix of the kinds of findings that triggers' rules make."""


def detail_of(row: FindingRow, name: str) -> Any:
    """Return a field of a finding's evidence; None: it has none."""
    return (row["evidence"] or {}).get(name)


def messages(history: RunHistory, rows: list[FindingRow]) -> list[str]:
    """Sort findings by step; return what the first ones say, with the steps of those that say the
    same."""
    rows.sort(key=lambda row: (row["step"] is None, row["step"] or 0, row["first_wall"]))
    same: dict[str, list[int | None]] = {}
    for row in rows:
        same.setdefault(f"{of_earlier(history, row)}{row['message']}", []).append(row["step"])
    shown = [
        text if len(steps) == 1 else f"{text} ({_repeated(steps)})" for text, steps in same.items()
    ]
    said = sum(map(len, [*same.values()][:_SHOWN]))
    more = len(rows) - said
    return [*shown[:_SHOWN], *([f"and {counted(more, 'more finding')}"] if more else [])]


_SHOWN: Final = 3
"""Findings whose texts are shown."""


def _repeated(steps: Sequence[int | None]) -> str:
    """Return where several findings say the same."""
    known = sorted({step for step in steps if step is not None})
    count = counted(len(steps), "finding")
    return f"{count}, steps {numbers_text(known)}" if len(known) > 1 else count


def first_of(lines: Sequence[str], most: int, noun: str) -> list[str]:
    """Return the first lines, and how many more there are."""
    more = [f"and {len(lines) - most} more {noun}"] if len(lines) > most else []
    return [*lines[:most], *more]


def found_in(
    history: RunHistory,
    rows: Sequence[Mapping[str, Any]],
    lines: Sequence[str],
    of: Sequence[Mapping[str, Any]] | None = None,
) -> Evidence:
    """Return the evidence of reported rows, ended where enough steps closed since the last one.

    A row without a step counts in the last step of its attempt. A trigger's rule is silent during
    its cooldown, whether its condition holds or not.

    Args:
        history: of the run.
        rows: the reported rows.
        lines: the texts of the rows.
        of: the rows whose ranks are named; None: all.
    """
    named = rows if of is None else of
    of_ranks = {(row["role"], row["rank"]) for row in named if row["rank"] is not None}
    since = min((row["step"] for row in rows if row["step"] is not None), default=None)
    where = listed(sorted(of_ranks))
    evidence = Evidence("found", 1.0, since, where, tuple(lines), ranks=frozenset(of_ranks))
    steps = [_step_of(history, row) for row in rows]
    known = [step for step in steps if step is not None]
    if not known or len(known) < len(steps):
        return evidence
    silent = max(ENDED_AFTER, min(map(_silent_after, rows)))
    return evidence.ended_after([each.step for each in history.steps], max(known), silent)


def _silent_after(row: Mapping[str, Any]) -> int:
    if not str(row.get("kind")).startswith(TRIGGER):
        return 0
    steps = (row["evidence"] or {}).get("cooldown", DEFAULT_COOLDOWN)
    return steps if isinstance(steps, int) else DEFAULT_COOLDOWN


def _step_of(history: RunHistory, row: Mapping[str, Any]) -> int | None:
    """Return the step of a row; None: it belongs to none, and its attempt goes on."""
    if row["step"] is not None:
        return int(row["step"])
    number = history.number_of(row["attempt_id"])
    own = [step.step for step in history.steps if step.attempt <= number]
    goes_on = row["attempt_id"] == history.newest_attempt_id
    return None if goes_on or not own else own[-1]


def of_earlier(history: RunHistory, row: FindingRow | LossRow) -> str:
    """Return the attempt of a row as a prefix; "" for the newest."""
    attempt_id = row["attempt_id"]
    if attempt_id is None or attempt_id == history.newest_attempt_id:
        return ""
    return f"attempt {history.number_of(attempt_id)}: "
