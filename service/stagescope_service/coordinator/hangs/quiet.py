"""Findings of trainings in which no step closes any more."""

from __future__ import annotations

from typing import Final

from stagescope_service.core.entities import Attempt
from stagescope_service.core.findings import finding, of_attempt
from stagescope_service.core.hangs.quiet import QUIET_KIND, Quiet, quiet
from stagescope_service.core.instructions import Instruction, Put
from stagescope_service.core.state import State
from stagescope_service.store.tables import FindingRow
from stagescope_wire.links import Link
from stagescope_wire.render import ranks_text


class QuietTrainings:
    """Makes the finding of a quiet training, which is over when a step closes or the attempt ends.

    Args:
        state: the coordinator's state.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._open: dict[int, str] = {}
        """Attempt -> its finding."""

    def adopt(self, row: FindingRow) -> None:
        """Adopt an open finding of an earlier coordinator."""
        if row["attempt_id"] is not None:
            self._open[row["attempt_id"]] = row["finding_id"]

    def check(self, wall: float) -> list[Instruction]:
        """Return new findings, and end those that are over."""
        out: list[Instruction] = []
        registry = self._state.registry
        for attempt in registry.attempts.values():
            if attempt.over or attempt.attempt_id in self._open:
                continue
            found = quiet(attempt, wall)
            if found is not None and attempt is registry.newest(attempt.run):
                put = _finding(attempt, found, wall)
                self._open[attempt.attempt_id] = put.row["finding_id"]
                out.append(put)
        for attempt_id, finding_id in [*self._open.items()]:
            known = self._state.attempt(attempt_id)
            if known is not None and not known.over and quiet(known, wall) is not None:
                continue
            del self._open[attempt_id]
            columns = {"over_wall": wall, "last_wall": wall, "severity": "info"}
            out.append(Put("findings", {"finding_id": finding_id, **columns}))
        return out


def _finding(attempt: Attempt, found: Quiet, wall: float) -> Put:
    step = attempt.last_closed_step
    text = (
        f"no step closed for {_duration(found.seconds)} after step {step}; the longest wait for a "
        f"step before was {_duration(found.longest)}, and the processes still answer"
    )
    if found.behind:
        text += f". {ranks_text(found.behind)} did not reach the newest step"
    put = finding(
        QUIET_KIND,
        text,
        **of_attempt(attempt, wall),
        step=step,
        evidence={
            "seconds": found.seconds,
            "longest": found.longest,
            "behind": [[role, rank] for role, rank in found.behind],
        },
        advice="look at the stacks of the processes; a long evaluation or checkpoint is no fault",
        see=(Link.to_step("stuck", None, shows="who is waited for"),),
    )
    return Put("findings", {**put.row, "over_wall": None})


_UNITS: Final = ((3_600.0, "h"), (60.0, "min"))


def _duration(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= 2.0 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
