"""Findings that a step's payloads describe their streams differently than the step before."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Final

from stagescope_service.core.catalogue_rows import row_id
from stagescope_service.core.findings import STREAM_CHANGED, finding
from stagescope_service.core.instructions import Delete, Put
from stagescope_service.core.stream_attributes import StreamValues, streams_of_payloads
from stagescope_service.store.catalogue import Catalogue
from stagescope_wire.links import Link
from stagescope_wire.nonfinite import Json, JsonObject

_NEAR: Final = 10
"""Steps before and after a step that are searched for its neighbours."""
_KEPT: Final = 20
"""Newest changes that a finding lists, besides the first one."""
_PAYLOADS: Final = 10_000


@dataclasses.dataclass(frozen=True)
class _Change:
    """A change of an attribute, of one or more streams, between two steps of an attempt."""

    step: int
    before_step: int
    streams: tuple[str, ...]
    before: str
    after: str

    def to_json(self) -> JsonObject:
        return {**dataclasses.asdict(self), "streams": list(self.streams)}


def stream_changes(
    catalogue: Catalogue, run: str, attempt_id: int, step: int
) -> list[Put | Delete]:
    """Return the findings of attributes that change in a step, or no longer do.

    The step after it is checked again, because it may have been aggregated before. An attribute of
    an attempt has one finding, however often it changes.
    """
    near = catalogue.steps(attempt_id, before=step + _NEAR, limit=2 * _NEAR)
    steps = sorted(row["step"] for row in near)
    later = [row["step"] for row in near if row["step"] > step and row["has_summary"]]
    said = _Said(catalogue, attempt_id)
    changes = {
        at: _changes(at, [each for each in steps if each < at], said)
        for at in (step, *sorted(later)[:1])
    }
    known: dict[str, JsonObject] = {}
    for row in catalogue.findings(run=run, attempt_id=attempt_id, kind=STREAM_CHANGED):
        evidence = row["evidence"] or {}
        known[str(evidence.get("attribute"))] = dict(evidence)
    rows: list[Put | Delete] = []
    for attribute in sorted({*known, *(name for own in changes.values() for name in own)}):
        record = _Record.from_json(known.get(attribute, {}))
        before = record
        for at, own in changes.items():
            record = record.replaced(at, own.get(attribute, []))
        if record != before:
            rows.append(record.row(attribute, run, attempt_id))
    return rows


class _Said:
    """How the payloads of an attempt's steps describe their streams; each step is read once."""

    def __init__(self, catalogue: Catalogue, attempt_id: int) -> None:
        self._catalogue, self._attempt_id = catalogue, attempt_id
        self._known: dict[int, StreamValues] = {}

    def of(self, step: int) -> StreamValues:
        if step not in self._known:
            rows = self._catalogue.payloads(
                self._attempt_id, step, state="ingested", limit=_PAYLOADS
            )
            replaced = self._catalogue.replaced(self._attempt_id, step)
            self._known[step] = streams_of_payloads(rows, replaced)
        return self._known[step]


def _changes(step: int, earlier: Sequence[int], said: _Said) -> dict[str, list[_Change]]:
    """Return attribute -> its changes in a step, against the last step before that has it."""
    unknown = {
        (place, attribute): _text(values)
        for place, own in said.of(step).items()
        for attribute, values in own.items()
    }
    streams: dict[tuple[str, int, str, str], set[str]] = {}
    for before_step in reversed(earlier[-_NEAR:]):
        if not unknown:
            break
        before = said.of(before_step)
        for place, attribute in list(unknown):
            values = before.get(place, {}).get(attribute)
            if values is None:
                continue
            after = unknown.pop((place, attribute))
            if _text(values) != after:
                key = (attribute, before_step, _text(values), after)
                streams.setdefault(key, set()).add(place[1])
    found: dict[str, list[_Change]] = {}
    for (attribute, before_step, before_text, after), names in streams.items():
        change = _Change(step, before_step, tuple(sorted(names)), before_text, after)
        found.setdefault(attribute, []).append(change)
    return {name: sorted(own, key=lambda each: each.streams) for name, own in found.items()}


def _text(values: Sequence[Json]) -> str:
    return " and ".join(map(str, values))


@dataclasses.dataclass(frozen=True)
class _Record:
    """The changes of one attribute in an attempt: the first, the newest, and in how many steps."""

    first: tuple[_Change, ...] = ()
    newest: tuple[_Change, ...] = ()
    steps: int = 0

    @classmethod
    def from_json(cls, evidence: Mapping[str, Json]) -> _Record:
        first, newest, steps = (evidence.get(name) for name in ("first", "newest", "steps"))
        if not isinstance(steps, int):
            return cls()
        return cls(_parsed(first), _parsed(newest), steps)

    def replaced(self, step: int, changes: Sequence[_Change]) -> _Record:
        """Return the record with other changes of a step; changes older than the list stay."""
        kept = sorted({each.step for each in self.newest})
        if self.steps > len(kept) and step <= kept[0]:
            return self
        newest = sorted(
            [*(each for each in self.newest if each.step != step), *changes],
            key=lambda each: (each.step, each.streams),
        )
        listed = sorted({each.step for each in newest})
        count = self.steps - len(kept) + len(listed)
        first = self.first
        if count == len(listed):
            first = tuple(each for each in newest if each.step == listed[0]) if listed else ()
        shown = tuple(each for each in newest if each.step in listed[-_KEPT:])
        return _Record(first, shown, count)

    def row(self, attribute: str, run: str, attempt_id: int) -> Put | Delete:
        """Return the finding, or its deletion if nothing changes."""
        finding_id = row_id(STREAM_CHANGED, run, attempt_id, attribute)
        if not self.steps:
            return Delete("findings", {"finding_id": finding_id})
        first, last = self.first[0], self.newest[-1]
        put = finding(
            STREAM_CHANGED,
            self._message(attribute),
            run=run,
            attempt_id=attempt_id,
            step=first.step,
            wall=time.time(),
            severity="info",
            evidence={
                "attribute": attribute,
                "steps": self.steps,
                "first_step": first.step,
                "last_step": last.step,
                "first": [each.to_json() for each in self.first],
                "newest": [each.to_json() for each in self.newest],
            },
            advice="if the training changes it on purpose, as a schedule does, nothing is wrong. "
            "Then read the numbers before and after separately. If not, find out what changed it",
            see=(Link.to_step("metrics", last.step, shows="what the step says of its streams"),),
        )
        return Put("findings", {**put.row, "finding_id": finding_id})

    def _message(self, attribute: str) -> str:
        if self.steps == 1:
            listed = "; ".join(
                f"{_named(each)} {each.before} in step {each.before_step}, {each.after} since"
                for each in self.first
            )
            return f"{attribute} changes in step {self.first[0].step}: {listed}"
        first, last = self.first[0], self.newest[-1]
        return (
            f"{attribute} changes in {self.steps} steps, from {first.step} to {last.step}: "
            f"{_named(first)} {first.before} in step {first.before_step}, {first.after} in step "
            f"{first.step}; {_named(last)} {last.after} since step {last.step}"
        )


def _named(change: _Change) -> str:
    return " and ".join(change.streams)


def _parsed(value: Json) -> tuple[_Change, ...]:
    found = []
    for each in value if isinstance(value, list) else ():
        if isinstance(each, dict):
            streams = each["streams"]
            found.append(
                _Change(
                    step=int(str(each["step"])),
                    before_step=int(str(each["before_step"])),
                    streams=tuple(map(str, streams)) if isinstance(streams, list) else (),
                    before=str(each["before"]),
                    after=str(each["after"]),
                )
            )
    return tuple(found)
