"""Compare two or three dumps: everything that any of them has, with a verdict."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Final

from stagescope.compared import ALONE, SIDES
from stagescope.render import counted
from stagescope.wire.errors import InvalidInput
from stagescope_service.compare import flow
from stagescope_service.compare.assemble import assemble, heaviest, with_totals
from stagescope_service.compare.causes import likely
from stagescope_service.compare.derived import judge_derived
from stagescope_service.compare.notes import Notes
from stagescope_service.compare.pairing.align import is_in_place, join
from stagescope_service.compare.pairing.index import ROW, ShardIndex
from stagescope_service.compare.pairing.pieces import Piece
from stagescope_service.compare.pairing.row_assignment import RowAssignment
from stagescope_service.compare.pairing.shards import JoinTask, Outcome
from stagescope_service.compare.pairing.token_alignment import COMPARED
from stagescope_service.compare.plan import Match, Pair, Unit, plan
from stagescope_service.compare.results import (
    Comparison,
    Finding,
    First,
    PairResult,
    SideResult,
    TensorResult,
    Verdict,
)
from stagescope_service.compare.running import Mapper, Progress, Runner, UnitKey, Work, threads
from stagescope_service.compare.tolerances import NoiseFloor, Tolerances, declared_floor
from stagescope_service.dumps.records import Dump, Place, Problem
from stagescope_service.statistics import pairwise
from stagescope_service.statistics.pairwise import Pairwise


def first_difference(tensors: Sequence[TensorResult], findings: Sequence[Finding]) -> First | None:
    """Return the first thing that differs in the order in which data flows, None if nothing."""
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


def reason_of(
    verdict: Verdict,
    tensors: Sequence[TensorResult],
    findings: Sequence[Finding],
    sides: tuple[int, int],
) -> str:
    """Return why a comparison has its verdict, in words; `sides`: the places of its two."""
    counts = {each: sum(tensor.verdict is each for tensor in tensors) for each in reversed(Verdict)}
    words = [f"{count} {each}" for each, count in counts.items() if count]
    text = f"of {len(tensors)} tensors and numbers {', '.join(words)}" if tensors else ""
    if not tensors:
        text = "the two sides have nothing in common that could be compared"
    told: dict[str, dict[str, None]] = {}
    for finding in findings:
        if finding.verdict is verdict and verdict is not Verdict.SAME:
            letters = told.setdefault(finding.message, {})
            letters.update({} if finding.side is None else {SIDES[sides[finding.side]]: None})
    why = [
        f"{' and '.join(letters)}: {message}" if letters else message
        for message, letters in told.items()
    ]
    lacking = dict.fromkeys(
        f.section or f.message for f in findings if f.kind in ALONE and f.message not in told
    )
    if lacking:
        why.append(f"on one side only: {', '.join(lacking)}")
    return "; ".join([text, *why[:3]])


def non_finite(tensors: Sequence[TensorResult]) -> list[Finding]:
    """Return what is the same NaN or infinity on both sides."""
    return [
        Finding(
            "note", f"{tensor.section}/{tensor.name}: {tensor.reason}", None, tensor.section,
        )
        for tensor in tensors
        if tensor.found.agreeing_non_finite and not tensor.found.disagreeing_non_finite
    ]  # fmt: skip


_OF_OPERATORS: Final = "other"
"""Section of tensors by operator (msprobe's), known by their names."""
_UNMATCHED: Final = "the tokens of every sample differ"


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
        self._runner = Runner(dumps, tolerances, mapper, progress)
        self._pieces: list[Piece] = []
        self._notes = Notes(dumps)
        self._keys: dict[str, dict[str, None]] = {}
        self._floors: list[Pairwise | None] = [None, None]
        steps = ({entry.place.step for entry in dump.entries} for dump in dumps)
        self._dealt = RowAssignment(several_steps=any(len(each) > 1 for each in steps))
        self._whole: set[str] = set()
        self._lacking: set[str] = set()
        self._every_sample_differs = False
        self.bytes = 0

    def run(self, sides: tuple[int, int]) -> PairResult:
        """Compare them; `sides` are their places in the answer."""
        matches, findings = plan(*self._dumps)
        for finding in findings:
            self._notes.add(finding)
        sampling = [match for match in matches if match.section in flow.SAMPLING]
        self._compare_all(sampling)
        self._remember_differing_tokens()
        self._runner.expect([match for match in matches if match not in sampling])
        for wave in _waves(matches):
            self._compare_all(wave)
        self._notes.of_dumps(self._is_explained)
        floor = self._floor()
        tensors = assemble(
            self._pieces, self._tolerances, floor,
            unmatched=_UNMATCHED if self._every_sample_differs else "",
        )  # fmt: skip
        tensors, total = with_totals(judge_derived(tensors), self._notes.alone)
        findings = [*self._notes.findings, *non_finite(tensors)]
        first = first_difference(tensors, findings)
        verdict = heaviest([*(t.verdict for t in tensors), *(f.verdict for f in findings)])
        if not tensors and verdict is not Verdict.DIFFERENT:
            verdict = Verdict.NOT_COMPARABLE
        result = PairResult(
            sides, verdict, reason_of(verdict, tensors, findings, sides), first, tensors,
            tuple(findings),
            {match.section: tuple(self._keys.get(match.section, ())) for match in matches}, floor,
            total,
        )  # fmt: skip
        causes, excluded = likely(result, self._dumps)
        return dataclasses.replace(result, causes=causes, excluded=excluded)

    def _compare_all(self, matches: Sequence[Match]) -> None:
        """Compare shard with shard where all shards lie alike, and join the rows of the others."""
        for match in matches:
            self._notes.of_match(match)
        works = [work for match in matches for work in self._works(match)]
        # What other sections say of these rows is known by now, if they do not lie alike.
        apart = {work.unit for work in works if self._is_apart(work)}
        alike = [work for work in works if work.unit not in apart]
        outcomes = list(zip(alike, self._runner.pairs(alike, joined=False), strict=True))
        # A unit is compared as it lies or joined, as a whole: a sample counts once in it.
        apart |= {work.unit for work, outcome in outcomes if any(outcome.index) and work.has_rows}
        joined = [work for work in works if work.unit in apart]
        outcomes = [(work, outcome) for work, outcome in outcomes if work.unit not in apart]
        outcomes += zip(joined, self._runner.pairs(joined, joined=True), strict=True)
        uneven = {work.unit for work, outcome in outcomes if _is_uneven(work, outcome)}
        for work, outcome in outcomes:
            if work.has_rows:
                self._dealt.learn(work.pair, outcome)
            if work.match.section in flow.SAMPLING and _is_reordered(outcome):
                self._dealt.is_reordered = True
        indexes: dict[UnitKey, tuple[list[ShardIndex], list[ShardIndex]]] = {}
        of_unit = {work.unit: work.match for work in works}
        for work, outcome in outcomes:
            self._take(outcome, work.match, work.pair, is_uneven=work.unit in uneven)
            is_moved = work.is_alone or self._dealt.is_moved(work.pair)
            self._notes.of_outcome(outcome, work.pair, work.match, is_moved=is_moved)
            for side, index in enumerate(outcome.index):
                if index is not None:
                    indexes.setdefault(work.unit, ([], []))[side].append(index)
        joins = [
            (unit, task)
            for unit, sides in indexes.items()
            for a, b in [self._dealt.named(sides, self._dumps)]
            for task in self._join_tasks(of_unit[unit], a, b)
        ]
        outcomes_of_joins = self._runner.all([task for _, task in joins])
        for (unit, _), outcome in zip(joins, outcomes_of_joins, strict=True):
            self._take(outcome, of_unit[unit], (None, None), is_uneven=unit in uneven)
            self._notes.of_outcome(outcome, (None, None), of_unit[unit])

    def _works(self, match: Match) -> list[Work]:
        """Return the entries to hold against each other: where it is known, of the same samples."""
        entry_pairs = list(match.entry_pairs())
        if match.section in (*flow.SAMPLING, *flow.TELLING, *flow.NAMED):
            return [Work(match, pair) for pair in entry_pairs]
        units: dict[Unit, list[Pair]] = {}
        for pair in entry_pairs:
            units.setdefault(match.unit_of(pair), []).append(pair)
        works = []
        for of_unit in units.values():
            kept, apart = self._dealt.recoupled(of_unit)
            if match.section in flow.COUNTED:  # what is of all rows of a part has no counterpart
                self._notes.of_parts(match, apart)
                apart = []
            works += [Work(match, pair) for pair in kept]
            works += [Work(match, pair, is_alone=True) for pair in apart]
        return works

    def _is_apart(self, work: Work) -> bool:
        if None in work.pair or not work.has_rows or work.match.section in flow.COUNTED:
            return None in work.pair
        return self._dealt.is_told(work.pair) or self._dealt.is_told_of_ranks(work.pair)

    def _take(self, outcome: Outcome, match: Match, pair: Pair, *, is_uneven: bool) -> None:
        pieces = outcome.pieces
        if match.section not in flow.NAMED and not self._dealt.same_samples(pair):
            counted = [piece.name for piece in pieces if piece.rows is None]
            pieces = tuple(piece for piece in pieces if piece.rows is not None)
            self._notes.of_parts(match, [pair] if counted else [])
        self._notes.of_places(pieces, pair, match, self._dealt)
        if match.section not in (*flow.SAMPLING, *flow.NAMED, _OF_OPERATORS):
            why = (self._dealt.why_unproven(p, pair, is_uneven=is_uneven) for p in pieces)
            pieces = tuple(map(_unproven, pieces, why))
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
        self._notes.of_join(joined, match, next(iter([*a, *b])).entry.place.step)
        if match.section in flow.SAMPLING and not is_in_place(joined, a, match.places):
            self._dealt.is_reordered = True
        if joined.is_whole:
            self._whole.add(match.section)
        else:
            self._lacking.add(match.section)
        return [
            JoinTask(
                self._dumps, a[at].entry, parts, match.section, self._tolerances,
                self._runner.tokens_differ,
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
        self._runner.tokens_differ = frozenset(differ)
        self._every_sample_differs = bool(differ) and not equal - differ

    def _is_explained(self, side: int, problem: Problem) -> bool:
        """Say whether a missing file is none: every sample is there, in parts dealt otherwise.

        Ranks may have other numbers of parts (dynamic batches): what a reader misses of a grid may
        never have been. Where an entry of the same place is there, a file is missing.
        """
        entry = problem.entry
        if problem.kind != "missing" or entry is None or entry.place.rank is None:
            return False
        if any(each.place == entry.place for each in self._dumps[side].entries):
            return False
        if self._whole or self._lacking:
            return not self._lacking
        return self._has_every_sample(side, entry.place)

    def _has_every_sample(self, side: int, place: Place) -> bool:
        """Say whether a stage holds every trajectory of the step, as files of others tell."""
        sampled: set[str] = set()
        held: dict[str, set[str]] = {}
        for piece in self._pieces:
            where = piece.places[side]
            if piece.rows is None or where.step != place.step:
                continue
            labels = piece.rows.labels
            if where.stage == place.stage and where.rank is not None:
                held.setdefault(piece.section, set()).update(labels)
            elif piece.section in flow.SAMPLING:
                sampled.update(labels)
        return bool(sampled) and any(
            sampled <= labels or (sampled.isdisjoint(labels) and len(sampled) == len(labels))
            for labels in held.values()
        )

    def _floor(self) -> NoiseFloor | None:
        found = []
        for dump, measured in zip(self._dumps, self._floors, strict=True):
            declared = declared_floor(dump.about, f"the noise floor of {dump.name}")
            if declared is not None:
                found.append(declared)
            if measured is not None and measured.finite:
                source = f"old_log_probs of {dump.name} against recomputed_log_probs"
                found.append(NoiseFloor(measured.mean_abs, measured.max_abs, source))
        return max(found, key=lambda floor: floor.max, default=None)


def _is_uneven(work: Work, outcome: Outcome) -> bool:
    """Whether a side has nothing at a place where the other has rows, or not as many."""
    one, other = outcome.index
    is_lacking = None in work.pair or (
        one is not None and other is not None and one.rows != other.rows
    )
    return work.has_rows and is_lacking


def _is_reordered(outcome: Outcome) -> bool:
    """Whether rows of two files at one place are known, and known to be in another order."""
    known = any(piece.rows is not None and piece.key != ROW for piece in outcome.pieces)
    return known and not outcome.in_order


def _unproven(piece: Piece, why: str) -> Piece:
    return dataclasses.replace(piece, unproven=why) if why else piece


def _waves(matches: Sequence[Match]) -> Iterator[list[Match]]:
    """Yield matches in the order in which they are compared: what tells rows before the others."""
    for wave in range(3):
        yield [match for match in matches if _wave(match.section) == wave]


def _wave(section: str) -> int:
    if section in flow.SAMPLING:
        return -1
    return 0 if section in flow.TELLING else 2 if section in flow.COUNTED else 1


_log = logging.getLogger("stagescope.compare")


def compare(
    sides: Sequence[Dump],
    *,
    tolerances: Tolerances | None = None,
    mapper: Mapper | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Hold two or three dumps against each other.

    Every rank, part and trajectory that a side has counts; rows pair by sample, not by place; of
    padded rows what their masks cover. Files that are missing, damaged or refused are findings.
    Memory is bounded by two shards for each task that the mapper runs at a time.

    Args:
        sides: two or three; the first is held against each other one, then these two.
        tolerances: what counts as noise; see `tolerances`.
        mapper: where shards are compared; threads of this process by default.
        progress: told (tasks done, tasks known so far).

    Raises:
        InvalidInput: other than two or three sides.
    """
    if not 2 <= len(sides) <= 3:
        raise InvalidInput(f"{counted(len(sides), 'side')} given", expected="two or three")
    pairwise.warm(_log_compiling)  # before threads ask for it at once
    began = time.monotonic()
    run = mapper if mapper is not None else threads()
    told = progress if progress is not None else _silent
    pairs, read = [], 0
    for at in itertools.combinations(range(len(sides)), 2):
        two = TwoSides((sides[at[0]], sides[at[1]]), tolerances or Tolerances(), run, told)
        pairs.append(two.run((at[0], at[1])))
        read += two.bytes
    verdict, reason = _overall(pairs)
    return Comparison(
        tuple(map(_side, sides)), tuple(pairs), verdict, reason, read, time.monotonic() - began
    )


def _overall(pairs: Sequence[PairResult]) -> tuple[Verdict, str]:
    shared = [pair for pair in pairs if not pair.shares_nothing]
    if not shared:
        return Verdict.NOT_COMPARABLE, "; ".join(dict.fromkeys(pair.reason for pair in pairs))
    verdict = heaviest(pair.verdict for pair in shared)
    return verdict, next(pair.reason for pair in shared if pair.verdict is verdict)


def _side(dump: Dump) -> SideResult:
    places = [entry.place for entry in dump.entries]
    files = {(entry.path, entry.place): entry.bytes for entry in dump.entries}
    return SideResult(
        name=dump.name, kind=dump.kind, entries=len(places), bytes=sum(files.values()),
        steps=tuple(sorted({place.step for place in places if place.step is not None})),
        ranks=tuple(sorted({place.rank for place in places if place.rank is not None})),
        parts=tuple(map(str, sorted({place.part for place in places}))),
        sections=tuple(dict.fromkeys(entry.section for entry in dump.entries)),
        about=dict(dump.about),
    )  # fmt: skip


def _log_compiling() -> None:
    _log.info("compiling the loops of comparisons, once for an installation")


def _silent(done: int, known: int) -> None:
    """Tell nobody."""
