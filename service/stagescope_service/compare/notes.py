"""What a comparison says beside the numbers: what is missing, on which side, and what it means."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stagescope.render import counted
from stagescope_service.compare import flow
from stagescope_service.compare.pairing.align import Join
from stagescope_service.compare.pairing.index import ROW
from stagescope_service.compare.pairing.pieces import Piece
from stagescope_service.compare.pairing.row_assignment import RowAssignment
from stagescope_service.compare.pairing.shards import Outcome
from stagescope_service.compare.plan import Match, Pair, of_a_part
from stagescope_service.compare.results import Finding, Verdict
from stagescope_service.dumps.records import Dump, Place, Problem

_HARMLESS = ("unknown", "superseded", "gap")
"""Kinds of problems that leave nothing out."""
_UNKNOWN_SECTION = "other"
"""Of a file whose header could not be read, and of what has no section of its own."""


class Notes:
    """The findings of two sides, each once, in the order in which they were made."""

    def __init__(self, dumps: tuple[Dump, Dump]) -> None:
        self._dumps = dumps
        self._whole = of_a_part(*dumps)
        """What a stage makes of the comparison that one side alone has."""
        self.findings: list[Finding] = []
        self._problems: dict[tuple[int, str, str], Problem] = {
            (side, str(problem.path), problem.kind): problem
            for side, dump in enumerate(dumps)
            for problem in dump.problems
        }
        self._left_out: dict[tuple[int, str], str] = {}
        self._alone: tuple[set[str], set[str]] = (set(), set())
        self.alone: dict[int | None, set[str]] = {}
        """Step -> trajectories that one side alone has."""
        self._parts: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
        """Section -> places of numbers that have no counterpart, of each side."""
        self._by_place: dict[str, dict[Place, int]] = {}
        """Section -> rows at each place that were paired by it alone."""

    def add(self, finding: Finding) -> None:
        """Keep a finding, unless it was made before."""
        if finding not in self.findings:
            self.findings.append(finding)

    def of_match(self, match: Match) -> None:
        """Name the stages, steps and epochs of a section that one side alone has."""
        units = [{match.unit(entry) for entry in entries} for entries in match.entries]
        for side in range(2) if not match.borrowed else ():
            for unit in sorted(units[side] - units[1 - side], key=str):
                files = [str(e.path) for e in match.entries[side] if match.unit(e) == unit]
                # Another stage is another pass; a step or epoch of a shared stage is missing.
                # What has no section of its own is expected nowhere.
                known = unit.stage in {other.stage for other in units[1 - side]}
                known = known and match.section != _UNKNOWN_SECTION
                verdict = Verdict.NOT_COMPARABLE if known else self._whole
                self._only(f"{match.section} of {unit} is", side, match, files, verdict)

    def of_outcome(
        self, outcome: Outcome, pair: Pair, match: Match, *, is_moved: bool = False
    ) -> None:
        """Remember what could not be read; name tensors and numbers that one side alone has.

        `is_moved`: the samples of these places lie elsewhere on the other side.
        """
        for side, problem in outcome.problems:
            self._problems[side, str(problem.path), problem.kind] = problem
        for side, name, why in outcome.left_out:
            self._left_out[side, f"{match.section}/{name}"] = why
        if match.borrowed:
            return
        for side, names in enumerate(outcome.only):
            if names and match.section not in flow.NAMED:
                items = [f"{match.section}/{name}" for name in names]
                self._only(f"{', '.join(items)}:", side, match, items)
        for side, index in enumerate(outcome.index):
            alone = index is not None and pair[1 - side] is None and bool(index.numbers)
            if alone and is_moved:
                self.of_parts(match, [pair])
            elif index is not None and alone:
                where = str(index.entry.place)
                text = f"{', '.join(index.numbers)} of {where}:"
                self._only(text, side, match, [where], Verdict.NOT_COMPARABLE)

    def of_parts(self, match: Match, entry_pairs: Sequence[Pair]) -> None:
        """Count numbers of parts into which one side alone dealt its samples: they stand alone."""
        for pair in entry_pairs if not match.borrowed else ():
            for side, entry in enumerate(pair):
                if entry is not None:
                    places = self._parts.setdefault(match.section, ({}, {}))
                    places[side][str(entry.place)] = None

    def of_places(
        self, pieces: Sequence[Piece], pair: Pair, match: Match, assignment: RowAssignment
    ) -> None:
        """Name rows that were paired by their place alone, without a word of which they are."""
        told = {piece.places for piece in pieces if piece.name in flow.TOKENS}
        found = self._by_place.setdefault(match.section, {})
        for piece in pieces:
            if piece.rows is None or piece.key != ROW or piece.places in told:
                continue
            if not assignment.confirms(piece.places[0], pair):
                found[piece.places[0]] = len(piece.rows.labels)

    def of_join(self, joined: Join, match: Match, step: int | None) -> None:
        """Name what has no counterpart once rows and named tensors of a step are joined."""
        if match.section in flow.SAMPLING:
            self.alone.setdefault(step, set()).update(*joined.alone)
        for side in range(2):
            self._of_join_side(joined, match, side)
        section = match.section
        if joined.conflicts:
            text = (
                f"{len(joined.conflicts)} samples of {section} are there several times with other "
                "contents and no positions; each was compared"
            )
            self.add(Finding("conflict", text, None, section, joined.conflicts))
        for label, one, other in joined.coverage:
            text = f"{section}: the fragments of {label} hold {one} and {other} tokens"
            lacks = any(self._lacks_files(side, section) for side in range(2))
            verdict = Verdict.NOT_COMPARABLE if lacks else Verdict.DIFFERENT
            self.add(Finding("coverage", text, None, section, (label,), verdict))
        for name, *shapes in joined.shapes:
            text = f"{section}/{name} has shapes {list(shapes[0])} and {list(shapes[1])}"
            self.add(Finding("shapes", text, None, section, (name,), Verdict.DIFFERENT))

    def of_dumps(self, is_explained: Callable[[int, Problem], bool]) -> None:
        """Name every file that was missing, damaged or refused, and what readers left out.

        `is_explained`: says of which problems of a side nothing is to be said.
        """
        self._of_places()
        for side, dump in enumerate(self._dumps):
            if not dump.entries:
                text = f"{dump.name} holds nothing that can be compared"
                self.add(Finding("empty", text, side, verdict=Verdict.NOT_COMPARABLE))
        for (side, path, kind), problem in self._problems.items():
            if is_explained(side, problem):
                continue
            verdict = Verdict.SAME if kind in _HARMLESS else Verdict.NOT_COMPARABLE
            section = problem.entry.section if problem.entry is not None else None
            self.add(Finding(kind, problem.message, side, section, (path,), verdict))
        for (side, name), why in self._left_out.items():
            self.add(Finding("left out", f"{name} was not compared: {why}", side, None, (name,)))

    def _of_places(self) -> None:
        for section, sides in self._parts.items():
            counts = " and ".join(f"{len(places)}" for places in sides)
            text = (
                f"{section}: the numbers of {counts} parts are not compared: the sides dealt their "
                "samples into other parts"
            )
            items = tuple(dict.fromkeys([*sides[0], *sides[1]]))
            self.add(Finding("note", text, None, section, items))
        for section, places in self._by_place.items():
            if places:
                text = (
                    f"{section}: {sum(places.values())} rows are paired by place: neither ids nor "
                    "tokens say which samples they are, so what differs may be others"
                )
                self.add(Finding("note", text, None, section))

    def _of_join_side(self, joined: Join, match: Match, side: int) -> None:
        section, quiet = match.section, bool(match.borrowed)
        sampled = section in flow.SAMPLING
        new = [label for label in joined.alone[side] if label not in self._alone[side]]
        if new and not quiet:
            is_sure = sampled and not self._lacks_files(1 - side, section)
            verdict = Verdict.DIFFERENT if is_sure else Verdict.NOT_COMPARABLE
            are = "is" if len(new) == 1 else "are"
            self._only(
                f"{counted(len(new), 'sample')} of {section} {are}", side, match, new, verdict
            )
        if sampled:
            self._alone[side].update(new)
        if joined.unknown[side]:
            text = (
                f"{joined.unknown[side]} rows of {match.borrowed or section} have neither ids nor "
                "tokens and no counterpart at their place: nothing says which rows they are"
            )
            verdict = Verdict.SAME if quiet else Verdict.NOT_COMPARABLE
            self.add(Finding("only", text, side, section, verdict=verdict))
        if joined.replicas[side]:
            text = f"{joined.replicas[side]} rows of {section} are there again: once counted"
            self.add(Finding("replicas", text, side, section))
        names = joined.names_alone[side]
        if names and not quiet:
            are = "is" if len(names) == 1 else "are"
            text = f"{counted(len(names), 'tensor')} of {section} {are}"
            self._only(text, side, match, names, Verdict.NOT_COMPARABLE)

    def _lacks_files(self, side: int, section: str) -> bool:
        """Say whether a file that may hold rows of a section is lost or could not be read.

        What one side lacks then proves no difference: it may be in that file.
        """
        return any(
            at == side
            and problem.kind not in _HARMLESS
            and (problem.entry is None or problem.entry.section in (section, _UNKNOWN_SECTION))
            for (at, _, _), problem in self._problems.items()
        )

    def _only(
        self,
        what: str,
        side: int,
        match: Match,
        items: Sequence[str],
        verdict: Verdict = Verdict.SAME,
    ) -> None:
        text = f"{what} on one side only"
        self.add(Finding("only", text, side, match.section, tuple(items), verdict))
