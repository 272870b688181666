"""A captured step: which rank did which parts of it, and what is kept of them.

The service itself does a capture that only keeps recorded tensors. Once the step is closed, the
kept files count. A rank that recorded none of these tensors is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Final, NamedTuple

from stagescope_service.core.entities import ANNOUNCED, INGESTED
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.tables import (
    ArtifactRow,
    DumpRow,
    PayloadRow,
    ProcessColumns,
    StageRow,
    UnfinishedRank,
)
from stagescope_service.views.reading.completeness import ALL_ROWS, rows_removed
from stagescope_wire.captures import matches_rank
from stagescope_wire.keep import capture_selectors, kept_sections
from stagescope_wire.plan import StoredCapture
from stagescope_wire.schema import Part, RankKey

PartKey = tuple[str, Part]
"""A stage and its part."""
Reported = Mapping[PartKey, set[str]]
"""States of a rank's dumps in a step, by part."""

COLLECTED: Final = "complete"
NO_REPORT: Final = "no report"
_NOT_KEPT: Final = "not kept"
"""State of a rank whose tensors came before the request was active, or found no room."""
_WORST: Final = ("failed", "missed", "truncated", "skipped", "armed", COLLECTED)
"""States of a rank's dumps in a step: the first that occurs is the state of the rank."""
_STEPS_BEFORE: Final = 2
"""Closed steps that predict the parts of a rank in a step, if they are equal."""


class RankState(NamedTuple):
    """The state of a rank in a captured step, and whether it is final."""

    state: str
    final: bool


class StepOfCapture:
    """A captured step, and which rank does which parts in it."""

    def __init__(
        self, catalogue: Catalogue, attempt_id: int, number: int, spec: StoredCapture
    ) -> None:
        self._catalogue, self._attempt_id, self._number = catalogue, attempt_id, number
        self._spec, self._selectors = spec, frozenset(capture_selectors(spec))
        self.unrecorded = set[str]()
        """The selectors of the request for which `kept` has found nothing."""
        self._stages = None if spec["stages"] == "all" else list(spec["stages"])
        rows = catalogue.steps(attempt_id, before=number + 1, limit=_STEPS_BEFORE + 1)
        own = [row for row in rows if row["step"] == number]
        self._row = own[0] if own else None
        # A trainer may have no step of that number: it is over with a later one.
        known = own or catalogue.steps(attempt_id, limit=_STEPS_BEFORE)
        self.closed = any(row["step"] >= number and row["closed_wall"] is not None for row in known)
        earlier = [row for row in rows if row["step"] < number and row["closed_wall"] is not None]
        self._before = [row["step"] for row in earlier[:_STEPS_BEFORE]]
        self._parts_by_step: dict[int, dict[RankKey, set[PartKey]]] = {}

    @cached_property
    def _parts(self) -> Mapping[RankKey, int]:
        """How many parts of the requested stages each rank did."""
        counts = self._catalogue.count_stages(self._attempt_id, self._number, stage=self._stages)
        parts: Counter[RankKey] = Counter()
        for (stage, role, rank), count in counts.items():
            if self._is_requested(stage):
                parts[role, rank] += count
        return parts

    def kept(self) -> dict[RankKey, RankState]:
        """Return what is kept of each rank that recorded requested tensors, or did not get to it.

        It leaves out a rank that did the stages and recorded none of them. Only the names of kept
        numbers are known, not those of logged ones.
        """
        found: dict[RankKey, list[RankState]] = defaultdict(list)
        self.unrecorded = set(self._selectors)
        # What another process did again does not count: it may have died with its payloads.
        replaced = self._catalogue.replaced(self._attempt_id, self._number)
        files = {
            (file["incarnation"], file["seq"]): file
            for file in self._catalogue.artifacts(
                self._attempt_id, self._number, kind="kept", deleted=None, limit=ALL_ROWS
            )
            if self._is_of_request(file)
        }
        payloads = self._catalogue.payloads(
            self._attempt_id, self._number, stage=self._stages, limit=ALL_ROWS
        )
        for payload in payloads:
            key = payload["incarnation"], payload["seq"]
            file = files.pop(key, None)
            if key not in replaced and self._is_of_request(payload):
                found[payload["role"], payload["rank"]] += self._kept_of(payload, file)
        for file in files.values():  # retention removed the row of its payload
            if self._recorded(file["stage"], *_names_in(file)):
                found[file["role"], file["rank"]].append(RankState(COLLECTED, True))
        for each in (self._row and self._row["missing"]) or ():
            if self._is_of_request(each):
                found[each["role"], each["rank"]].append(RankState(each["status"], True))
        return {
            # What is open comes first, then what is not there.
            rank: min(states, key=lambda each: (each.final, each.state == COLLECTED))
            for rank, states in found.items()
            if states
        }

    def _kept_of(self, payload: PayloadRow, file: ArtifactRow | None) -> Iterator[RankState]:
        """Yield the state of a payload's share of the request; nothing if it has no share."""
        recorded = set(payload["tensors"] or ())
        tensors, numbers = (set[str](), set[str]()) if file is None else _names_in(file)
        wanted = self._recorded(payload["stage"], recorded | tensors)
        if payload["state"] == ANNOUNCED:
            # Which numbers came with a payload without tensors is known only later.
            if wanted or not recorded:
                yield RankState(NO_REPORT, False)
        elif payload["state"] != INGESTED:
            if wanted or not recorded:
                yield RankState(payload["state"], True)
        elif not wanted <= tensors:
            yield RankState(_NOT_KEPT, True)
        elif self._recorded(payload["stage"], (), numbers) or wanted:
            yield RankState(COLLECTED, True)

    def _recorded(
        self, stage: str, tensors: Collection[str], numbers: Collection[str] = ()
    ) -> set[str]:
        """Return the names that the request keeps, and mark their selectors as found."""
        sections = kept_sections(self._selectors, stage, tensors, numbers)
        if sections and self.unrecorded:
            self.unrecorded -= {
                each for each in self.unrecorded if kept_sections({each}, stage, tensors, numbers)
            }
        return {name for names in sections.values() for name in names}

    def _is_of_request(self, row: ArtifactRow | PayloadRow | UnfinishedRank) -> bool:
        of_stage = self._stages is None or row["stage"] in self._stages
        return of_stage and self.includes((row["role"], row["rank"]))

    @property
    def rows_removed(self) -> str | None:
        """Why the rows of its ranks are not known any more; None: they are."""
        return None if self._row is None else rows_removed(self._row)

    def includes(self, rank: RankKey) -> bool:
        """Return whether the request is for a rank."""
        roles = self._spec["roles"]
        return (not roles or rank[0] in roles) and matches_rank(self._spec["ranks"], rank[1])

    def stepless_ranks(self) -> set[RankKey]:
        """Return the ranks that did a requested stage, by its name, without a step."""
        if self._stages is None:
            return set()
        counts = self._catalogue.count_stages(self._attempt_id, None, stage=self._stages)
        return {(role, rank) for _, role, rank in counts}

    def state_of(self, rank: RankKey, reported: Reported) -> RankState:
        """Return the state of a rank, given the states of its dumps."""
        states = set[str]().union(*reported.values()) if reported else set()
        worst = next((state for state in _WORST if state in states), NO_REPORT)
        over = self.is_over(rank)
        if over and worst in (COLLECTED, NO_REPORT):
            is_complete = self._parts.get(rank, 0) <= len(reported)
            return RankState(worst if is_complete else NO_REPORT, True)
        if over:
            return RankState(worst, worst != "armed")
        return RankState(worst, "armed" not in states and self._has_reported_all(rank, reported))

    def has_parts(self, role: str) -> bool:
        """Return whether a rank of a role did a part of the requested stages."""
        return role in self._roles

    @cached_property
    def _roles(self) -> set[str]:
        return {role for role, _ in self._parts}

    def is_over(self, rank: RankKey) -> bool:
        """Return whether nothing more will arrive from a rank for the step.

        Its events arrive in order, so it is known once the rank has begun a later step or is gone.
        A driver may close the step earlier (`end_step`). A rank whose role does the stages may then
        still have data on its way.
        """
        if rank in self._past:
            return True
        return self.closed and not (rank in self._alive and self.has_parts(rank[0]))

    @property
    def is_settled(self) -> bool:
        """Whether nothing more will arrive of the step from any rank of the request."""
        waited_for = {
            rank
            for rank in self._alive - self._past
            if self.includes(rank) and self.has_parts(rank[0]) and not self._has_ended(rank)
        }
        return self.closed and not waited_for

    @cached_property
    def _processes(self) -> list[ProcessColumns]:
        return self._catalogue.processes(self._attempt_id)

    @cached_property
    def _alive(self) -> set[RankKey]:
        """The ranks whose process still reports."""
        return {
            _rank(row)
            for row in self._processes
            if row["finished_wall"] is None and row["lapsed_wall"] is None and not row["raw"]
        }

    @cached_property
    def _past(self) -> set[RankKey]:
        """The ranks that have begun a later step."""
        return {
            _rank(row)
            for row in self._processes
            if row["max_step"] is not None and row["max_step"] > self._number
        }

    def _has_ended(self, rank: RankKey) -> bool:
        """Return whether a rank has ended each part that any rank of its role began."""
        ended = {part_key(row) for row in self._rows if _rank(row) == rank and row["end_wall"]}
        return ended >= self._parts_of_role(rank[0])

    def _parts_of_role(self, role: str) -> set[PartKey]:
        return {part_key(row) for row in self._rows if row["role"] == role}

    def _has_reported_all(self, rank: RankKey, reported: Reported) -> bool:
        """Return whether a rank has reported all parts that it is known to do in the step.

        Those of an open step are the parts of each step before it.
        """
        if not reported:
            return False
        if self.closed:  # by a driver, while the rank has yet to begin another step
            return reported.keys() >= self._parts_of_role(rank[0])
        if not self._before:
            return False
        usual = [self._parts_in(number).get(rank, set()) for number in self._before]
        begun = self._parts_in(self._number).get(rank, set())
        is_regular = all(parts == usual[0] for parts in usual)
        return is_regular and reported.keys() >= {*usual[0], *begun}

    def _parts_in(self, number: int) -> Mapping[RankKey, set[PartKey]]:
        """Return the parts of the requested stages that each rank did in a step."""
        if number not in self._parts_by_step:
            parts: defaultdict[RankKey, set[PartKey]] = defaultdict(set)
            for row in self._stage_rows(number):
                parts[_rank(row)].add(part_key(row))
            self._parts_by_step[number] = parts
        return self._parts_by_step[number]

    @cached_property
    def _rows(self) -> list[StageRow]:
        return self._stage_rows(self._number)

    def _stage_rows(self, number: int) -> list[StageRow]:
        rows = self._catalogue.stages(self._attempt_id, number, stage=self._stages, limit=ALL_ROWS)
        return [row for row in rows if self._is_requested(row["stage"])]

    def _is_requested(self, stage: str) -> bool:
        # 'all' leaves out the rollout, which runs in an inference engine.
        return self._stages is not None or stage != "rollout_generate"


def _names_in(file: ArtifactRow) -> tuple[set[str], set[str]]:
    """Return the names of a kept file's tensors, and those of its numbers."""
    tensors = set(file["tensors"] or ())
    sections = file["sections"] or {}
    numbers = {name for section in ("loss", "metrics") for name in sections.get(section, ())}
    return tensors, numbers - tensors


def _rank(row: StageRow | ProcessColumns) -> RankKey:
    return row["role"], row["rank"]


def part_key(row: StageRow | DumpRow) -> PartKey:
    """Return the stage and part of a row."""
    return row["stage"], Part.of_columns(row)
