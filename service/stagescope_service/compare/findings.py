"""Findings of a comparison besides its numbers: missing data, its side, and what it means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stagescope_service.compare import flow
from stagescope_service.compare.pairing.join import Join
from stagescope_service.compare.pairing.shard_comparison import ShardComparison
from stagescope_service.compare.pairing.shard_index import BY_ROW
from stagescope_service.compare.pairing.tasks import TaskOutcome
from stagescope_service.compare.results import ComparisonFinding, Verdict
from stagescope_service.compare.row_assignment import RowAssignment
from stagescope_service.compare.task_runner import EntryPair, SectionMatch, one_sided_verdict
from stagescope_service.dumps.records import Dump, DumpProblem, Location
from stagescope_wire.render import counted

_HARMLESS = ("unknown", "superseded", "gap")
"""Kinds of problems that leave nothing out."""
_UNKNOWN_SECTION = "other"
"""Section of a file with an unreadable header, and of tensors without their own section."""


class FindingCollector:
    """Collects the findings of two sides, each once, in the order in which they are made."""

    def __init__(self, dumps: tuple[Dump, Dump]) -> None:
        self._dumps = dumps
        self._one_sided_verdict = one_sided_verdict(*dumps)
        self.findings: list[ComparisonFinding] = []
        self._problems: dict[tuple[int, str, str], DumpProblem] = {}
        for side, dump in enumerate(dumps):
            self._add_file_problems((side, problem) for problem in dump.problems)
        self._left_out: dict[tuple[int, str], str] = {}
        self._known_unmatched: tuple[set[str], set[str]] = (set(), set())
        self.unmatched_samples: dict[int | None, set[str]] = {}
        """Step -> trajectories that only one side has."""
        self._unpaired_numbers: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
        """Section -> locations of numbers without a counterpart, of each side."""
        self._rows_by_location: dict[str, dict[Location, int]] = {}
        """Section -> number of rows at each location that were paired by it alone."""

    def add(self, finding: ComparisonFinding) -> None:
        """Keep a finding, unless it is already kept."""
        if finding not in self.findings:
            self.findings.append(finding)

    def add_one_sided_passes(self, match: SectionMatch) -> None:
        """Add the stages, steps and epochs of a section that only one side has."""
        passes = [{match.pass_of(entry) for entry in entries} for entries in match.entries]
        for side in range(2) if not match.borrowed else ():
            for batch_pass in sorted(passes[side] - passes[1 - side], key=str):
                files = [str(e.path) for e in match.entries[side] if match.pass_of(e) == batch_pass]
                # Another stage is another pass; a step or epoch of a shared stage is missing.
                # Tensors without a section of their own are expected nowhere.
                is_shared = batch_pass.stage in {other.stage for other in passes[1 - side]}
                is_missing = is_shared and match.section != _UNKNOWN_SECTION
                verdict = Verdict.NOT_COMPARABLE if is_missing else self._one_sided_verdict
                what = f"{match.section} of {batch_pass}"
                self._add_one_sided(what, side, match, files, verdict)

    def add_outcome(
        self, outcome: TaskOutcome, pair: EntryPair, match: SectionMatch, *, is_moved: bool = False
    ) -> None:
        """Keep a task's problems; add the tensors and numbers that only one side has.

        Args:
            outcome: result of the task.
            pair: the entries that it compared.
            match: the match of the entries.
            is_moved: the samples of these entries have another location on the other side.
        """
        self._add_file_problems(outcome.problems)
        for side, name, why in outcome.left_out:
            self._left_out[side, f"{match.section}/{name}"] = why
        if match.borrowed:
            return
        for side, names in enumerate(outcome.unmatched_names):
            if names and match.section not in flow.NAMED_SECTIONS:
                items = [f"{match.section}/{name}" for name in names]
                self._add_one_sided(", ".join(items), side, match, items)
        for side, index in enumerate(outcome.indexes):
            if index is None or pair[1 - side] is not None or not index.numbers:
                continue
            if is_moved:
                self.add_unpaired_numbers(match, [pair])
            else:
                location = str(index.entry.location)
                what = f"{', '.join(index.numbers)} of {location}"
                self._add_one_sided(what, side, match, [location], Verdict.NOT_COMPARABLE)

    def add_unpaired_numbers(self, match: SectionMatch, entry_pairs: Sequence[EntryPair]) -> None:
        """Count the numbers of parts that hold other samples than any part of the other side."""
        for pair in entry_pairs if not match.borrowed else ():
            for side, entry in enumerate(pair):
                if entry is not None:
                    locations = self._unpaired_numbers.setdefault(match.section, ({}, {}))
                    locations[side][str(entry.location)] = None

    def add_paired_by_location(
        self,
        comparisons: Sequence[ShardComparison],
        pair: EntryPair,
        match: SectionMatch,
        assignment: RowAssignment,
    ) -> None:
        """Count rows that were paired by location alone, whose samples are not known."""
        with_tokens = {each.locations for each in comparisons if each.name in flow.TOKENS}
        counts = self._rows_by_location.setdefault(match.section, {})
        for each in comparisons:
            if each.rows is None or each.key != BY_ROW or each.locations in with_tokens:
                continue
            if not assignment.confirms_order(each.locations[0], pair):
                counts[each.locations[0]] = len(each.rows.labels)

    def add_join(self, joined: Join, match: SectionMatch, step: int | None) -> None:
        """Add what has no counterpart after rows and named tensors of a step were joined."""
        section = match.section
        if section in flow.SAMPLE_SECTIONS:
            self.unmatched_samples.setdefault(step, set()).update(*joined.unmatched)
        for side in range(2):
            self._add_join_side(joined, match, side)
        if joined.conflicts:
            text = (
                f"{len(joined.conflicts)} samples of {section} occur several times with different "
                "contents and without positions; each occurrence was compared"
            )
            self.add(ComparisonFinding("conflict", text, None, section, tuple(joined.conflicts)))
        for label, one, other in joined.coverage:
            text = f"{section}: the fragments of {label} have {one} and {other} tokens"
            is_lacking = any(self._lacks_files(side, section) for side in range(2))
            verdict = Verdict.NOT_COMPARABLE if is_lacking else Verdict.DIFFERENT
            self.add(ComparisonFinding("coverage", text, None, section, (label,), verdict))
        for name, *shapes in joined.shapes:
            text = f"{section}/{name} has shapes {list(shapes[0])} and {list(shapes[1])}"
            self.add(ComparisonFinding("shapes", text, None, section, (name,), Verdict.DIFFERENT))

    def add_problems(self, is_explained: Callable[[int, DumpProblem], bool]) -> None:
        """Add every missing, damaged or refused file, what readers left out, and the counts.

        Args:
            is_explained: returns whether a side's problem is harmless and makes no finding.
        """
        self._add_counts()
        for side, dump in enumerate(self._dumps):
            if not dump.entries:
                text = f"{dump.name} holds nothing that can be compared"
                self.add(ComparisonFinding("empty", text, side, verdict=Verdict.NOT_COMPARABLE))
        for (side, path, kind), problem in self._problems.items():
            if is_explained(side, problem):
                continue
            verdict = Verdict.SAME if kind in _HARMLESS else Verdict.NOT_COMPARABLE
            section = problem.entry.section if problem.entry is not None else None
            self.add(ComparisonFinding(kind, problem.message, side, section, (path,), verdict))
        for (side, name), why in self._left_out.items():
            text = f"{name} was not compared: {why}"
            self.add(ComparisonFinding("left out", text, side, None, (name,)))

    def _add_file_problems(self, problems: Iterable[tuple[int, DumpProblem]]) -> None:
        for side, problem in problems:
            self._problems[side, str(problem.path), problem.kind] = problem

    def _add_counts(self) -> None:
        for section, sides in self._unpaired_numbers.items():
            counts = " and ".join(f"{len(locations)}" for locations in sides)
            text = (
                f"{section}: the numbers of {counts} parts are not compared, because the sides "
                "name their parts differently, or split their samples differently"
            )
            items = tuple(dict.fromkeys([*sides[0], *sides[1]]))
            self.add(ComparisonFinding("note", text, None, section, items))
        for section, rows in self._rows_by_location.items():
            if rows:
                text = (
                    f"{section}: {sum(rows.values())} rows are paired by location only. They have "
                    "neither ids nor tokens, so rows that differ may be different samples"
                )
                self.add(ComparisonFinding("note", text, None, section))

    def _add_join_side(self, joined: Join, match: SectionMatch, side: int) -> None:
        """Add what one side of a join has alone, and how many replicas it has."""
        section, is_borrowed = match.section, bool(match.borrowed)
        is_sampling = section in flow.SAMPLE_SECTIONS
        labels = [
            each for each in joined.unmatched[side] if each not in self._known_unmatched[side]
        ]
        if labels and not is_borrowed:
            may_be_unkept = self._lacks_files(1 - side, section) or (
                not joined.unmatched[1 - side] and _has_fewer_ranks(match, 1 - side)
            )
            is_sure = is_sampling and not may_be_unkept
            verdict = Verdict.DIFFERENT if is_sure else Verdict.NOT_COMPARABLE
            what = f"{counted(len(labels), 'sample')} of {section}"
            self._add_one_sided(what, side, match, labels, verdict)
        if is_sampling:
            self._known_unmatched[side].update(labels)
        if joined.unidentified[side]:
            text = (
                f"{joined.unidentified[side]} rows of {match.borrowed or section} cannot be "
                "identified: they have neither ids nor tokens, and no counterpart at their location"
            )
            verdict = Verdict.SAME if is_borrowed else Verdict.NOT_COMPARABLE
            self.add(ComparisonFinding("only", text, side, section, verdict=verdict))
        if joined.replicas[side]:
            text = f"{joined.replicas[side]} rows of {section} are replicas, and count once"
            self.add(ComparisonFinding("replicas", text, side, section))
        names = joined.unmatched_names[side]
        if names and not is_borrowed:
            what = f"{counted(len(names), 'tensor')} of {section}"
            self._add_one_sided(what, side, match, names, Verdict.NOT_COMPARABLE)

    def _lacks_files(self, side: int, section: str) -> bool:
        """Return whether a file that may hold rows of a section is lost or could not be read.

        Data that one side lacks then proves no difference, since that file may hold it.
        """
        return any(
            at == side
            and problem.kind not in _HARMLESS
            and (problem.entry is None or problem.entry.section in (section, _UNKNOWN_SECTION))
            for (at, _, _), problem in self._problems.items()
        )

    def _add_one_sided(
        self, what: str, side: int, match: SectionMatch, items: Sequence[str],
        verdict: Verdict = Verdict.SAME,
    ) -> None:  # fmt: skip
        text = f"{what} appeared on only one side"
        self.add(ComparisonFinding("only", text, side, match.section, tuple(items), verdict))


def _has_fewer_ranks(match: SectionMatch, side: int) -> bool:
    """Return whether a side has files of some of the other's ranks alone.

    Samples that it lacks may be of the others, whose files were not kept.
    """
    ranks = [{(e.location.role, e.location.rank) for e in entries} for entries in match.entries]
    return ranks[side] < ranks[1 - side]
