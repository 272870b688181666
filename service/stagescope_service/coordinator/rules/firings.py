"""A firing with actions to take, and its form in its finding and its webhook."""

from __future__ import annotations

import dataclasses
from typing import Final, TypedDict, cast

from stagescope_service.core.catalogue_rows import row_id
from stagescope_service.core.findings import FindingLocation, finding
from stagescope_service.core.instructions import Put
from stagescope_service.rules.actions import FindingTemplate
from stagescope_service.rules.budget import ORDERED_BY
from stagescope_service.rules.document import Rule
from stagescope_service.rules.messages import FiringMessage, link_of
from stagescope_service.rules.names import is_nonfinite, scalar_of
from stagescope_service.rules.series import shown
from stagescope_service.store.tables.findings import FiredActions, FiringColumns
from stagescope_wire.links import Link, with_links
from stagescope_wire.nonfinite import Json, JsonObject


class FiringKey(TypedDict):
    """The key of a firing."""

    attempt_id: int
    step: int
    rule: str


@dataclasses.dataclass(frozen=True)
class DueFiring:
    """A firing with actions to take: its rule, and its row of the catalogue."""

    rule: Rule
    row: FiringColumns

    @property
    def key(self) -> FiringKey:
        """The key of the row."""
        row = self.row
        return {"attempt_id": row["attempt_id"], "step": row["step"], "rule": row["rule"]}

    @property
    def by(self) -> str:
        """The author of the capture that it requests."""
        return f"{ORDERED_BY}{self.rule.name}{self.at}"

    @property
    def at(self) -> str:
        """The end of `by`: the step and attempt."""
        return f" at step {self.row['step']} of attempt {self.row['evidence']['attempt']}"


_UPDATE: Final = "actor_update"
_OWN_UPDATES: Final = (
    "these are numbers of actor_update: its mini-batches after the first also contain the step's "
    "own updates. Record old_log_probs of the pass before it to separate the two"
)


def example_firing(rule: Rule, wall: float) -> FiringColumns:
    """Return a firing for the test message of a rule that never fired."""
    return {
        "attempt_id": 0,
        "step": 0,
        "rule": rule.name,
        "run": "made-up",
        "revision": None,
        "stage": rule.stage,
        "role": None,
        "rank": None,
        "round": None,
        "message": f"a made-up step: {rule.name} has not fired yet",
        "evidence": {},
        "wall": wall,
        "withdrawn_wall": None,
    }


def finding_of_firing(key: FiringKey) -> str:
    """Return the id of a firing's finding: one for each rule and step."""
    return row_id("trigger", key["rule"], key["attempt_id"], key["step"])


def _advice(due: DueFiring) -> str:
    """Return the advice; if the rank's streams cannot be compared, it starts with that cause."""
    template = due.rule.actions.finding or FindingTemplate()
    advice = template.advice.replace("{step}", str(due.row["step"]))
    metric = due.rule.metric
    is_mismatch = not (scalar_of(metric) or is_nonfinite(metric))
    if advice and due.row["stage"] == _UPDATE and is_mismatch:
        advice = f"{_OWN_UPDATES}; else {advice}"
    cause = due.row["evidence"].get("cause")
    if cause is None:
        return advice
    first = f"explain first why the streams cannot be compared ({cause['name']}, on "
    first += f"{due.row['role']} rank {due.row['rank']}): {cause['text']}"
    return f"{first}; once that is fixed: {advice}" if advice else first


def _see(due: DueFiring) -> list[Link]:
    """Return the links of a rule's `see`."""
    template = due.rule.actions.finding
    return [Link.to_step(noun, due.row["step"]) for noun in (template.see if template else ())]


_PLACE: Final = ("run", "step", "stage", "role", "rank", "wall")


def _columns(row: JsonObject, *names: str) -> dict[str, Json]:
    return {name: row[name] for name in names}


def finding_of(due: DueFiring) -> list[Put]:
    """Return the finding of a firing, if its rule makes one."""
    template, row = due.rule.actions.finding, due.row
    if template is None:
        return []
    made = finding(
        f"trigger_{due.rule.name}",
        row["message"],
        **cast("FindingLocation", _columns(row, "attempt_id", *_PLACE)),
        severity=template.severity,
        evidence={**shown(row["evidence"]), "round": row["round"]},
        advice=_advice(due),
        see=_see(due),
    )
    return [Put("findings", {**made.row, "finding_id": finding_of_firing(due.key)})]


def message_of(due: DueFiring, done: FiredActions, page: str | None) -> FiringMessage:
    """Return a firing in the form that its webhook receives.

    Args:
        due: the firing.
        done: the outcomes of the actions so far.
        page: address of the service's page, None if it is unknown.
    """
    row = due.row
    attempt = row["evidence"].get("attempt")
    template = due.rule.actions.finding
    message = {
        **_columns(row, "rule", "attempt_id", "round", "message", *_PLACE),
        "evidence": shown(row["evidence"]),
        "attempt": attempt,
        "severity": None if template is None else template.severity,
        "advice": with_links(_advice(due), _see(due)),
        "actions": done,
        "link": None if page is None else link_of(page, row["run"], row["step"], attempt),
    }
    return cast("FiringMessage", message)
