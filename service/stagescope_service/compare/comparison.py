"""Compare two or three dumps: everything that any of them holds, with a verdict."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from stagescope_service.compare import flow
from stagescope_service.compare.assemble import (
    PAIRED,
    assemble,
    heaviest,
    judge_derived,
    with_totals,
)
from stagescope_service.compare.causes import likely_causes
from stagescope_service.compare.findings import FindingCollector
from stagescope_service.compare.pairing.join import is_unmoved, join
from stagescope_service.compare.pairing.shard_comparison import ShardComparison
from stagescope_service.compare.pairing.shard_index import BY_ROW, ShardIndex
from stagescope_service.compare.pairing.tasks import JoinTask, TaskOutcome
from stagescope_service.compare.pairing.token_alignment import COMPARED
from stagescope_service.compare.results import (
    ComparisonFinding,
    DumpComparison,
    FirstDifference,
    PairResult,
    SideResult,
    TensorResult,
    Verdict,
)
from stagescope_service.compare.row_assignment import RowAssignment, is_permuted_by
from stagescope_service.compare.task_runner import (
    EntryPair,
    Mapper,
    PassKey,
    Progress,
    SectionMatch,
    TaskRunner,
    WorkItem,
    plan,
    thread_mapper,
)
from stagescope_service.compare.tolerances import NoiseFloor, Tolerances, declared_noise_floor
from stagescope_service.dumps.records import Dump, DumpProblem, Location
from stagescope_service.statistics import pairwise
from stagescope_service.statistics.pairwise import Pairwise
from stagescope_wire.comparison_texts import ONE_SIDED_KINDS, SIDES
from stagescope_wire.errors import InvalidInput
from stagescope_wire.render import counted

_OTHER_SECTION: Final = "other"
"""Section of tensors by operator (msprobe's), which are identified by their names."""
_TOKENS_DIFFER: Final = "the tokens of every sample differ"

_Indexes = dict[PassKey, tuple[list[ShardIndex], list[ShardIndex]]]
"""Pass -> the indexes of its shards on each side."""

_log = logging.getLogger("stagescope.compare")


def compare(
    sides: Sequence[Dump],
    *,
    tolerances: Tolerances | None = None,
    mapper: Mapper | None = None,
    progress: Progress | None = None,
) -> DumpComparison:
    """Compare two or three dumps.

    Every rank, part and trajectory that a side has counts. Rows pair by sample, not by position.
    In padded rows only the values under their masks count. Missing, damaged or refused files
    become findings. Memory is bounded by two shards for each task that the mapper runs at a time.

    Args:
        sides: two or three; the first is compared with each other one, then these two.
        tolerances: what counts as noise; see `tolerances`.
        mapper: where shards are compared; threads of this process by default.
        progress: called with (tasks done, tasks planned so far).

    Raises:
        InvalidInput: other than two or three sides.
    """
    if not 2 <= len(sides) <= 3:
        raise InvalidInput(f"{counted(len(sides), 'side')} given", expected="two or three")
    # Compile before several threads need the loops at once.
    pairwise.warm(lambda: _log.info("compiling the loops of comparisons, once per installation"))
    began = time.monotonic()
    pairs, bytes_read = [], 0
    for first, second in itertools.combinations(range(len(sides)), 2):
        comparer = PairComparer(
            (sides[first], sides[second]), tolerances or Tolerances(), mapper or thread_mapper(),
            progress or (lambda done, planned: None),
        )  # fmt: skip
        pairs.append(comparer.run((first, second)))
        bytes_read += comparer.bytes
    verdict, reason = _overall(pairs)
    return DumpComparison(
        tuple(map(_side_result, sides)), tuple(pairs), verdict, reason, bytes_read,
        seconds=time.monotonic() - began,
    )  # fmt: skip


class PairComparer:
    """Compares two dumps."""

    def __init__(
        self, dumps: tuple[Dump, Dump], tolerances: Tolerances, mapper: Mapper, progress: Progress
    ) -> None:
        self._dumps = dumps
        self._tolerances = tolerances
        self._runner = TaskRunner(dumps, tolerances, mapper, progress)
        self._comparisons: list[ShardComparison] = []
        self._findings = FindingCollector(dumps)
        self._keys: dict[str, dict[str, None]] = {}
        self._log_prob_noise: list[Pairwise | None] = [None, None]
        steps = ({entry.location.step for entry in dump.entries} for dump in dumps)
        self._assignment = RowAssignment(several_steps=any(len(each) > 1 for each in steps))
        self._complete_sections: set[str] = set()
        self._incomplete_sections: set[str] = set()
        self._every_sample_differs = False
        self.bytes = 0

    def run(self, sides: tuple[int, int]) -> PairResult:
        """Compare the two dumps; `sides` are their indexes among the sides of the answer."""
        matches, findings = plan(*self._dumps)
        for finding in findings:
            self._findings.add(finding)
        sampling = [match for match in matches if match.section in flow.SAMPLE_SECTIONS]
        self._compare_all(sampling)
        self._find_differing_tokens()
        self._runner.prefetch([match for match in matches if match not in sampling])
        for wave in range(3):
            self._compare_all([match for match in matches if _wave(match.section) == wave])
        self._findings.add_problems(self._is_explained)
        noise_floor = self._noise_floor()
        tensors = assemble(
            self._comparisons, self._tolerances, noise_floor,
            uncomparable_reason=_TOKENS_DIFFER if self._every_sample_differs else "",
        )  # fmt: skip
        tensors, total = with_totals(judge_derived(tensors), self._findings.unmatched_samples)
        findings = [*self._findings.findings, *_non_finite_findings(tensors)]
        first = _first_difference(tensors, findings)
        verdict = heaviest([*(t.verdict for t in tensors), *(f.verdict for f in findings)])
        if not tensors and verdict is not Verdict.DIFFERENT:
            verdict = Verdict.NOT_COMPARABLE
        result = PairResult(
            sides, verdict, _reason(verdict, tensors, findings, sides), first, tensors,
            tuple(findings),
            {match.section: tuple(self._keys.get(match.section, ())) for match in matches},
            noise_floor, total,
        )  # fmt: skip
        causes, excluded = likely_causes(result, self._dumps)
        return dataclasses.replace(result, causes=causes, excluded=excluded)

    def _compare_all(self, matches: Sequence[SectionMatch]) -> None:
        """Compare shards directly where all of a pass align, and join the rows of the others."""
        for match in matches:
            self._findings.add_one_sided_passes(match)
        items = [item for match in matches for item in self._work_items(match)]
        # Sections that were compared before may show already that the rows do not align.
        to_join = {item.pass_key for item in items if self._needs_join(item)}
        direct = [item for item in items if item.pass_key not in to_join]
        outcomes = [*zip(direct, self._runner.compare_pairs(direct, index_only=False), strict=True)]
        # All shards of a pass are compared directly, or all are joined: a sample counts once in it.
        to_join |= {i.pass_key for i, outcome in outcomes if i.has_rows and any(outcome.indexes)}
        joined = [item for item in items if item.pass_key in to_join]
        outcomes = [each for each in outcomes if each[0].pass_key not in to_join]
        outcomes += zip(joined, self._runner.compare_pairs(joined, index_only=True), strict=True)
        uneven = {item.pass_key for item, outcome in outcomes if _is_uneven(item, outcome)}
        for item, outcome in outcomes:
            if item.has_rows:
                self._assignment.record_outcome(item.pair, outcome)
            if item.match.section in flow.SAMPLE_SECTIONS:
                self._assignment.is_reordered |= _is_reordered(outcome)
        self._assignment.is_permuted |= _is_permuted(outcomes)
        indexes: _Indexes = {}
        for item, outcome in outcomes:
            is_uneven = item.pass_key in uneven
            self._collect(outcome, item.match, item.pair, is_uneven=is_uneven)
            is_moved = item.has_no_counterpart or self._assignment.is_moved(item.pair)
            self._findings.add_outcome(outcome, item.pair, item.match, is_moved=is_moved)
            for side, index in enumerate(outcome.indexes):
                if index is not None:
                    indexes.setdefault(item.pass_key, ([], []))[side].append(index)
        self._join_passes({item.pass_key: item.match for item in items}, indexes, uneven)

    def _join_passes(
        self, matches: dict[PassKey, SectionMatch], indexes: _Indexes, uneven: set[PassKey]
    ) -> None:
        """Join the rows of the indexed shards of each pass, and compare the pairs."""
        tasks = {
            key: self._join_tasks(
                matches[key], *self._assignment.with_known_keys(sides, self._dumps)
            )
            for key, sides in indexes.items()
        }
        keys = [key for key, of_pass in tasks.items() for _ in of_pass]
        outcomes = self._runner.run_all([*itertools.chain.from_iterable(tasks.values())])
        for key, outcome in zip(keys, outcomes, strict=True):
            self._collect(outcome, matches[key], (None, None), is_uneven=key in uneven)
            self._findings.add_outcome(outcome, (None, None), matches[key])

    def _work_items(self, match: SectionMatch) -> list[WorkItem]:
        """Return the pairs of entries to compare; they have the same samples where known."""
        entry_pairs = list(match.entry_pairs())
        located = (*flow.SAMPLE_SECTIONS, *flow.IDENTIFYING_SECTIONS, *flow.NAMED_SECTIONS)
        if match.section in located:
            return [WorkItem(match, pair) for pair in entry_pairs]
        by_pass = collections.defaultdict(list)
        for pair in entry_pairs:
            by_pass[match.pass_of_pair(pair)].append(pair)
        items = []
        for pairs in by_pass.values():
            paired, unpaired = self._assignment.pair_by_samples(pairs)
            if match.section in flow.NUMBER_SECTIONS:
                # A number is of all rows of its part: other parts have no counterpart.
                self._findings.add_unpaired_numbers(match, unpaired)
                unpaired = []
            items += [WorkItem(match, pair) for pair in paired]
            items += [WorkItem(match, pair, has_no_counterpart=True) for pair in unpaired]
        return items

    def _needs_join(self, item: WorkItem) -> bool:
        if None in item.pair:
            return True
        if not item.has_rows or item.match.section in flow.NUMBER_SECTIONS:
            return False
        assignment = self._assignment
        return assignment.is_identified(item.pair) or assignment.is_identified_by_ranks(item.pair)

    def _collect(
        self, outcome: TaskOutcome, match: SectionMatch, pair: EntryPair, *, is_uneven: bool
    ) -> None:
        """Keep what a task compared, its keys and its noise, and add what it notes."""
        comparisons = outcome.comparisons
        if match.section not in flow.NAMED_SECTIONS and not self._assignment.has_same_samples(pair):
            if any(comparison.rows is None for comparison in comparisons):
                self._findings.add_unpaired_numbers(match, [pair])
            comparisons = tuple(each for each in comparisons if each.rows is not None)
        self._findings.add_paired_by_location(comparisons, pair, match, self._assignment)
        by_name = (*flow.SAMPLE_SECTIONS, *flow.NAMED_SECTIONS, _OTHER_SECTION)
        if match.section not in by_name:
            comparisons = self._assignment.with_doubts(comparisons, pair, is_uneven=is_uneven)
        if match.borrowed:  # its tokens and masks are compared in their own section
            comparisons = tuple(e for e in comparisons if not flow.is_structural(e.name))
        self._comparisons += comparisons
        self.bytes += outcome.bytes
        keys = self._keys.setdefault(match.section, {})
        keys.update(dict.fromkeys(each.key for each in comparisons if each.rows is not None))
        for side, noise in enumerate(outcome.log_prob_noise):
            total = self._log_prob_noise[side]
            if noise is not None:
                self._log_prob_noise[side] = noise if total is None else total.merge(noise)

    def _join_tasks(
        self, match: SectionMatch, a: list[ShardIndex], b: list[ShardIndex]
    ) -> list[JoinTask]:
        joined = join(a, b, match.common_locations)
        self._findings.add_join(joined, match, next(iter([*a, *b])).entry.location.step)
        if match.section in flow.SAMPLE_SECTIONS:
            self._assignment.is_reordered |= not is_unmoved(joined, a, match.common_locations)
        sections = self._complete_sections if joined.is_complete else self._incomplete_sections
        sections.add(match.section)
        return [
            JoinTask(
                self._dumps, a[at].entry, counterparts, match.section, self._tolerances,
                self._runner.differing_samples,
            )
            for at, counterparts in joined.counterparts
        ]  # fmt: skip

    def _find_differing_tokens(self) -> None:
        """Find the samples whose tokens differ: their other values are not compared."""
        differ: set[str] = set()
        equal: set[str] = set()
        for comparison in self._comparisons:
            rows = comparison.rows
            if rows is None or not flow.is_structural(comparison.name):
                continue
            for row, label in enumerate(rows.labels):
                is_equal = rows.states[row] == COMPARED and not rows.numbers[row, 1]
                (equal if is_equal else differ).add(label)
        self._runner.differing_samples = frozenset(differ)
        self._every_sample_differs = bool(differ) and not equal - differ

    def _is_explained(self, side: int, problem: DumpProblem) -> bool:
        """Return whether a missing file lacks nothing, since other parts hold every sample.

        Ranks may have different numbers of parts (dynamic batches), so a file that a reader expects
        in a grid of parts may not exist at all. If another entry has its location, the file is
        missing.
        """
        entry = problem.entry
        if problem.kind != "missing" or entry is None or entry.location.rank is None:
            return False
        if any(each.location == entry.location for each in self._dumps[side].entries):
            return False
        if self._complete_sections or self._incomplete_sections:
            return not self._incomplete_sections
        return self._has_every_sample(side, entry.location)

    def _has_every_sample(self, side: int, location: Location) -> bool:
        """Return whether a stage holds every trajectory of the step, as other files list them."""
        sampled: set[str] = set()
        held: dict[str, set[str]] = {}
        for comparison in self._comparisons:
            here = comparison.locations[side]
            if comparison.rows is None or here.step != location.step:
                continue
            labels = comparison.rows.labels
            if here.stage == location.stage and here.rank is not None:
                held.setdefault(comparison.section, set()).update(labels)
            elif comparison.section in flow.SAMPLE_SECTIONS:
                sampled.update(labels)
        return bool(sampled) and any(
            sampled <= labels or (sampled.isdisjoint(labels) and len(sampled) == len(labels))
            for labels in held.values()
        )

    def _noise_floor(self) -> NoiseFloor | None:
        floors = []
        for dump, measured in zip(self._dumps, self._log_prob_noise, strict=True):
            declared = declared_noise_floor(dump.about, f"the noise floor of {dump.name}")
            if declared is not None:
                floors.append(declared)
            if measured is not None and measured.finite:
                source = f"old_log_probs of {dump.name} against recomputed_log_probs"
                floors.append(NoiseFloor(measured.mean_abs, measured.max_abs, source))
        return max(floors, key=lambda floor: floor.max, default=None)


def _first_difference(
    tensors: Sequence[TensorResult], findings: Sequence[ComparisonFinding]
) -> FirstDifference | None:
    """Return the first thing that differs in the order of the data flow, None if nothing does."""
    different = [finding for finding in findings if finding.verdict is Verdict.DIFFERENT]
    for finding in different:
        if finding.section in flow.SAMPLE_SECTIONS:
            return FirstDifference("tokens", finding.section or "", "samples", finding.message)
    for tensor in tensors:
        if tensor.verdict is Verdict.DIFFERENT:
            return FirstDifference(
                tensor.station, tensor.section, tensor.name, tensor.reason, tensor.first
            )
    if not different:
        return None
    finding = different[0]
    section = finding.section or ""
    name = finding.items[0] if finding.items else ""
    return FirstDifference(flow.station(section, name), section, name, finding.message)


def _reason(
    verdict: Verdict,
    tensors: Sequence[TensorResult],
    findings: Sequence[ComparisonFinding],
    sides: tuple[int, int],
) -> str:
    """Return a sentence on why a comparison has its verdict; `sides`: indexes of the two sides."""
    counts = collections.Counter(tensor.verdict for tensor in tensors)
    by_verdict = ", ".join(f"{counts[each]} {each}" for each in reversed(Verdict) if counts[each])
    text = f"of {len(tensors)} tensors and numbers {by_verdict}"
    if not tensors:
        text = "the two sides have nothing in common that could be compared"
    sides_by_message: dict[str, dict[str, None]] = {}
    for finding in findings:
        if finding.verdict is verdict and verdict is not Verdict.SAME:
            letters = sides_by_message.setdefault(finding.message, {})
            letters.update({} if finding.side is None else {SIDES[sides[finding.side]]: None})
    reasons = [
        f"{' and '.join(letters)}: {message}" if letters else message
        for message, letters in sides_by_message.items()
    ]
    one_sided = dict.fromkeys(
        finding.section or finding.message
        for finding in findings
        if finding.kind in ONE_SIDED_KINDS and finding.message not in sides_by_message
    )
    if one_sided:
        reasons.append(f"on only one side: {', '.join(one_sided)}")
    return "; ".join([*_compared_share(tensors), text, *reasons[:3]])


def _compared_share(tensors: Sequence[TensorResult]) -> list[str]:
    """Return how many samples and steps have all their values compared; [] if all have."""
    steps: dict[int | None, tuple[int, int]] = {}
    for tensor in tensors:
        if tensor.samples and tensor.section not in flow.SAMPLE_SECTIONS:
            own = tensor.samples["compared"], sum(tensor.samples[name] for name in PAIRED)
            compared, paired = steps.get(tensor.step, own)
            steps[tensor.step] = min(compared, own[0]), max(paired, own[1])
    compared, paired = (
        (sum(each) for each in zip(*steps.values(), strict=True)) if steps else (0, 0)
    )
    if compared == paired:
        return []
    share = f"values of {compared} of {counted(paired, 'sample')} were compared"
    if len(steps) > 1:
        share += f", in {sum(own > 0 for own, _ in steps.values())} of {len(steps)} steps"
    return [f"{share}; the rest was not, because their tokens or lengths differ"]


def _non_finite_findings(tensors: Sequence[TensorResult]) -> list[ComparisonFinding]:
    """Return notes on tensors that hold the same NaN or infinity on both sides."""
    return [
        ComparisonFinding(
            "note", f"{tensor.section}/{tensor.name}: {tensor.reason}", None, tensor.section,
        )
        for tensor in tensors
        if tensor.found.agreeing_non_finite and not tensor.found.disagreeing_non_finite
    ]  # fmt: skip


def _is_uneven(item: WorkItem, outcome: TaskOutcome) -> bool:
    """Return whether a side has no entry where the other has rows, or another number of rows.

    A file of numbers alone (NexRL's `loss` next to `is_loss_debug`) has no rows that could differ.
    """
    counts = {each.rows for each in outcome.indexes if each is not None and each.row_tensors}
    return item.has_rows and (None in item.pair or len(counts) > 1)


def _is_permuted(outcomes: Sequence[tuple[WorkItem, TaskOutcome]]) -> bool:
    """Return whether the rows of all shards of a pass seem to be the same in another order.

    For rows without ids and tokens this means the same lengths in another order. Samples that moved
    to another rank or microbatch show only in all shards together.
    """
    lengths = collections.defaultdict(list)
    for item, outcome in outcomes:
        for each in outcome.comparisons:
            if each.rows is not None and each.key == BY_ROW:
                lengths[item.pass_key, each.name].append(each.rows.lengths)
    return any(is_permuted_by(np.concatenate(each)) for each in lengths.values())


def _is_reordered(outcome: TaskOutcome) -> bool:
    """Return whether the rows of two files of one location are known to differ in order."""
    return not outcome.in_order and any(
        each.rows is not None and each.key != BY_ROW for each in outcome.comparisons
    )


def _wave(section: str) -> int:
    """Return when a section is compared: those that identify rows come before the others."""
    if section in flow.SAMPLE_SECTIONS:
        return -1
    if section in flow.IDENTIFYING_SECTIONS:
        return 0
    return 2 if section in flow.NUMBER_SECTIONS else 1


def _overall(pairs: Sequence[PairResult]) -> tuple[Verdict, str]:
    """Return verdict and reason of all pairs that have anything in common."""
    shared = [pair for pair in pairs if not pair.shares_nothing]
    if not shared:
        return Verdict.NOT_COMPARABLE, "; ".join(dict.fromkeys(pair.reason for pair in pairs))
    verdict = heaviest(pair.verdict for pair in shared)
    return verdict, next(pair.reason for pair in shared if pair.verdict is verdict)


def _side_result(dump: Dump) -> SideResult:
    locations = [entry.location for entry in dump.entries]
    files = {(entry.path, entry.location): entry.bytes for entry in dump.entries}
    return SideResult(
        name=dump.name, kind=dump.kind, entries=len(locations), bytes=sum(files.values()),
        steps=tuple(sorted({each.step for each in locations if each.step is not None})),
        ranks=tuple(sorted({each.rank for each in locations if each.rank is not None})),
        parts=tuple(map(str, sorted({each.part for each in locations}))),
        sections=tuple(dict.fromkeys(entry.section for entry in dump.entries)),
        about=dict(dump.about),
    )  # fmt: skip
