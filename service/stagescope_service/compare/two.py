"""Two dumps held against each other: what is read when, and what is said about what is missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from stagescope_service.compare import flow
from stagescope_service.compare.assemble import assemble, heaviest
from stagescope_service.compare.causes import likely
from stagescope_service.compare.mappers import Mapper
from stagescope_service.compare.notes import Notes
from stagescope_service.compare.pairing.align import join
from stagescope_service.compare.pairing.index import ShardIndex
from stagescope_service.compare.pairing.pieces import Piece
from stagescope_service.compare.pairing.shards import (
    JoinTask,
    Outcome,
    PairTask,
    run_task,
)
from stagescope_service.compare.pairing.taking import COMPARED
from stagescope_service.compare.plan import Couple, Match, Unit, of_a_part, plan
from stagescope_service.compare.results import Finding, First, PairResult, TensorResult, Verdict
from stagescope_service.compare.tolerances import Floor, Tolerances, declared_floor
from stagescope_service.dumps.records import Dump
from stagescope_service.statistics.pairwise import Pairwise

Progress = Callable[[int, int], None]
"""Told (tasks done, tasks known so far)."""

_UNMATCHED: Final = "the tokens of every sample differ"


_UnitKey = tuple[str, str, Unit]


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """Entries of one place, and in which unit they lie."""

    match: Match
    couple: Couple

    @property
    def unit(self) -> _UnitKey:
        return (self.match.section, self.match.borrowed, self.match.unit_of(self.couple))

    @property
    def has_rows(self) -> bool:
        return self.match.section not in flow.NAMED


class TwoSides:
    """The comparison of two dumps."""

    def __init__(
        self,
        dumps: tuple[Dump, Dump],
        tolerances: Tolerances,
        mapper: Mapper,
        progress: Progress,
    ) -> None:
        self._dumps = dumps
        self._tolerances = tolerances
        self._mapper = mapper
        self._progress = progress
        self._pieces: list[Piece] = []
        self._notes = Notes(of_a_part(*dumps))
        self._keys: dict[str, dict[str, None]] = {}
        self._floors: list[Pairwise | None] = [None, None]
        self._tokens_differ: frozenset[str] = frozenset()
        self._every_sample_differs = False
        self._tasks = [0, 0]
        self.bytes = 0

    def run(self, sides: tuple[int, int]) -> PairResult:
        """Compare them; `sides` are their places in the answer."""
        matches, findings = plan(*self._dumps)
        for finding in findings:
            self._notes.add(finding)
        sampling = [match for match in matches if match.section in flow.SAMPLING]
        self._compare_all(sampling)
        self._remember_differing_tokens()
        self._compare_all([match for match in matches if match.section not in flow.SAMPLING])
        self._notes.of_dumps(self._dumps)
        floor = self._floor()
        tensors = assemble(
            self._pieces, self._tolerances, floor,
            unmatched=_UNMATCHED if self._every_sample_differs else "",
        )  # fmt: skip
        findings = [*self._notes.findings, *_non_finite(tensors)]
        first = _first(tensors, findings)
        verdict = heaviest([*(t.verdict for t in tensors), *(f.verdict for f in findings)])
        if not tensors and verdict is not Verdict.DIFFERENT:
            verdict = Verdict.NOT_COMPARABLE
        result = PairResult(
            sides, verdict, _reason(verdict, tensors, findings), first, tensors, tuple(findings),
            {match.section: tuple(self._keys.get(match.section, ())) for match in matches}, floor,
        )  # fmt: skip
        causes, excluded = likely(result, self._dumps)
        return dataclasses.replace(result, causes=causes, excluded=excluded)

    def _compare_all(self, matches: Sequence[Match]) -> None:
        """Compare shard with shard where all shards lie alike, and join the rows of the others."""
        works = [_Work(match, couple) for match in matches for couple in match.couples()]
        for match in matches:
            self._notes.of_match(match)
        apart = {work.unit for work in works if None in work.couple}
        alike = [work for work in works if work.unit not in apart]
        outcomes = list(zip(alike, self._run_pairs(alike, joined=False), strict=True))
        # A unit is compared as it lies or joined, as a whole: a sample counts once in it.
        apart |= {work.unit for work, outcome in outcomes if any(outcome.index) and work.has_rows}
        joined = [work for work in works if work.unit in apart]
        outcomes = [(work, outcome) for work, outcome in outcomes if work.unit not in apart]
        outcomes += zip(joined, self._run_pairs(joined, joined=True), strict=True)
        indexes: dict[_UnitKey, tuple[list[ShardIndex], list[ShardIndex]]] = {}
        of_unit = {work.unit: work.match for work in works}
        for work, outcome in outcomes:
            self._take(outcome, work.match)
            self._notes.of_outcome(outcome, work.couple, work.match)
            for side in range(2):
                if (index := outcome.index[side]) is not None:
                    indexes.setdefault(work.unit, ([], []))[side].append(index)
        joins = [
            (of_unit[unit], task)
            for unit, (a, b) in indexes.items()
            for task in self._join_tasks(of_unit[unit], a, b)
        ]
        for (match, _), outcome in zip(joins, self._map([t for _, t in joins]), strict=True):
            self._take(outcome, match)
            self._notes.of_outcome(outcome, (None, None), match)

    def _run_pairs(self, works: Sequence[_Work], *, joined: bool) -> Iterable[Outcome]:
        return self._map([
            PairTask(
                self._dumps, work.couple, work.match.section, self._tolerances,
                self._tokens_differ, joined,
            )
            for work in works
        ])  # fmt: skip

    def _map(self, tasks: Sequence[PairTask | JoinTask]) -> Iterable[Outcome]:
        self._tasks[1] += len(tasks)
        for outcome in self._mapper(run_task, tasks):
            self._tasks[0] += 1
            self._progress(self._tasks[0], self._tasks[1])
            yield outcome

    def _take(self, outcome: Outcome, match: Match) -> None:
        pieces = outcome.pieces
        if match.borrowed:  # its tokens and masks are compared where they belong
            pieces = tuple(piece for piece in pieces if not flow.is_structural(piece.name))
        self._pieces += pieces
        self.bytes += outcome.bytes
        keys = self._keys.setdefault(match.section, {})
        keys.update(dict.fromkeys(piece.key for piece in pieces if piece.rows is not None))
        for side, floor in enumerate(outcome.floors):
            known = self._floors[side]
            if floor is not None:
                self._floors[side] = floor if known is None else known.merge(floor)

    def _join_tasks(self, match: Match, a: list[ShardIndex], b: list[ShardIndex]) -> list[JoinTask]:
        joined = join(a, b, match.places)
        self._notes.of_join(joined, match)
        return [
            JoinTask(
                self._dumps, a[at].entry, parts, match.section, self._tolerances,
                self._tokens_differ,
            )
            for at, parts in joined.parts
        ]  # fmt: skip

    def _remember_differing_tokens(self) -> None:
        differ: set[str] = set()
        equal: set[str] = set()
        for piece in self._pieces:
            if piece.rows is None or not flow.is_structural(piece.name):
                continue
            for row, label in enumerate(piece.rows.labels):
                state, unequal = piece.rows.states[row], piece.rows.numbers[row, 1]
                same = state == COMPARED and not unequal
                (equal if same else differ).add(label)
        self._tokens_differ = frozenset(differ)
        self._every_sample_differs = bool(differ) and not equal - differ

    def _floor(self) -> Floor | None:
        found = []
        for dump, measured in zip(self._dumps, self._floors, strict=True):
            declared = declared_floor(dump.about, f"the noise floor of {dump.name}")
            if declared is not None:
                found.append(declared)
            if measured is not None and measured.finite:
                source = f"old_log_probs of {dump.name} against recomputed_log_probs"
                found.append(Floor(measured.mean_abs, measured.max_abs, source))
        return max(found, key=lambda floor: floor.max, default=None)


def _first(tensors: Sequence[TensorResult], findings: Sequence[Finding]) -> First | None:
    alone = [f for f in findings if f.verdict is Verdict.DIFFERENT and f.section in flow.SAMPLING]
    if alone:
        return First("tokens", alone[0].section or "", "samples", alone[0].message)
    for tensor in tensors:
        if tensor.verdict is Verdict.DIFFERENT:
            return First(tensor.station, tensor.section, tensor.name, tensor.reason, tensor.first)
    other = [f for f in findings if f.verdict is Verdict.DIFFERENT]
    if not other:
        return None
    section = other[0].section or ""
    name = other[0].items[0] if other[0].items else ""
    return First(flow.station(section, name), section, name, other[0].message)


def _reason(verdict: Verdict, tensors: Sequence[TensorResult], findings: Sequence[Finding]) -> str:
    counts = {each: sum(tensor.verdict is each for tensor in tensors) for each in reversed(Verdict)}
    words = [f"{count} {each}" for each, count in counts.items() if count]
    text = f"of {len(tensors)} tensors and numbers {', '.join(words)}" if tensors else ""
    if not tensors:
        text = "the two sides have nothing in common that could be compared"
    why = [f.message for f in findings if f.verdict is verdict and verdict is not Verdict.SAME]
    lacking = dict.fromkeys(f.section or f.message for f in findings if f.kind == "only")
    if lacking:
        why.append(f"on one side only: {', '.join(lacking)}")
    return "; ".join([text, *why[:3]])


def _non_finite(tensors: Sequence[TensorResult]) -> list[Finding]:
    return [
        Finding(
            "note", f"{tensor.section}/{tensor.name}: {tensor.reason}", None, tensor.section,
        )
        for tensor in tensors
        if tensor.found.agreeing_non_finite and not tensor.found.disagreeing_non_finite
    ]  # fmt: skip
