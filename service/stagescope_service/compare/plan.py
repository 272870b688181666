"""Plan which entries of two dumps are compared; everything is discovered from the dumps."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_service.compare.flow import SAMPLE_SECTIONS
from stagescope_service.compare.results import ComparisonFinding, Verdict
from stagescope_service.dumps.formats.own import KIND as OWN
from stagescope_service.dumps.importing import KEY_PREFIX
from stagescope_service.dumps.records import SECTIONS, Dump, DumpEntry, Location

COUNTERPART_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "is_loss": ("forward_data", "old_log_probs", "advantages", "loss"),
    "advantages": ("trajectories",),
    "old_log_probs": ("trajectories",),
}
"""Sections in which a side without a section may hold some of its tensors."""

EntryPair = tuple[DumpEntry | None, DumpEntry | None]
"""An entry of each side; None where a side has no counterpart."""


class BatchPass(NamedTuple):
    """One pass over the samples of a step: a sample occurs in it once, split over its shards."""

    step: int | None
    stage: str | None
    occurrence: int
    epoch: int

    def __str__(self) -> str:
        parts = ["" if self.step is None else f"step {self.step}", self.stage or ""]
        parts += [f"occurrence {self.occurrence}"] if self.occurrence else []
        parts += [f"epoch {self.epoch}"] if self.epoch else []
        return ", ".join(part for part in parts if part) or "epoch 0"


@dataclasses.dataclass(frozen=True, slots=True)
class SectionMatch:
    """Entries of two sides that may hold the same.

    Attributes:
        section: the section under which they are reported.
        entries: the entries of each side.
        common_locations: location of every entry -> the form of it that both sides share.
        borrowed: the section of one side's entries, where it is another one.
    """

    section: str
    entries: tuple[tuple[DumpEntry, ...], tuple[DumpEntry, ...]]
    common_locations: Mapping[Location, Location]
    borrowed: str = ""

    def pass_of(self, entry: DumpEntry) -> BatchPass:
        """Return the pass to which an entry belongs."""
        location = self.common_locations[entry.location]
        part = location.part
        return BatchPass(location.step, location.stage, part.occurrence, part.epoch)

    def pass_of_pair(self, pair: EntryPair) -> BatchPass:
        """Return the pass to which a pair belongs."""
        entry = pair[0] or pair[1]
        assert entry is not None
        return self.pass_of(entry)

    def entry_pairs(self) -> Iterator[EntryPair]:
        """Yield pairs of entries of one location; passes that only one side has are left out."""
        passes = [{self.pass_of(entry) for entry in entries} for entries in self.entries]
        shared = passes[0] & passes[1]
        by_location: dict[Location, tuple[list[DumpEntry], list[DumpEntry]]] = {}
        for side in range(2):
            for entry in self.entries[side]:
                if self.pass_of(entry) in shared:
                    location = self.common_locations[entry.location]
                    by_location.setdefault(location, ([], []))[side].append(entry)
        for one, other in by_location.values():
            yield from _entry_pairs(one, other)


def plan(a: Dump, b: Dump) -> tuple[list[SectionMatch], list[ComparisonFinding]]:
    """Return what to compare, in the order of the flow, and what only one side has."""
    sides: list[dict[str, list[DumpEntry]]] = []
    for dump in (a, b):
        by_section: dict[str, list[DumpEntry]] = collections.defaultdict(list)
        for entry in dump.entries:
            by_section[entry.section].append(entry)
        sides.append(by_section)
    one, other = sides
    verdict = one_sided_verdict(a, b)
    matches, findings = [], []
    for section in sorted(one.keys() | other.keys(), key=_section_order):
        if section in one and section in other:
            matches.append(_match_section(section, one[section], other[section]))
            continue
        side = 0 if section in one else 1
        borrowed = [
            _match_section(section, one[x], other[y], borrowed=counterpart)
            for counterpart in COUNTERPART_SECTIONS.get(section, ())
            for x, y in [(section, counterpart) if side == 0 else (counterpart, section)]
            if x in one and y in other
        ]
        matches += borrowed
        message = f"{section} is there on one side only"
        if borrowed:
            sections = ", ".join(each.borrowed for each in borrowed)
            message += f"; looked for in the other side's {sections}"
        files = tuple(dict.fromkeys(str(entry.path) for entry in sides[side][section]))
        findings.append(ComparisonFinding("section", message, side, section, files, verdict))
    return matches, findings


def one_sided_verdict(a: Dump, b: Dump) -> Verdict:
    """Return the verdict on a section or stage that only one side has.

    Two runs of this project record the same where they do the same: a section that one of them
    lacks was not computed, or not kept. Other formats have variants that hold different sections,
    and so have runs that were imported from them.
    """
    is_one_format = all(dump.kind == OWN and not _is_imported(dump) for dump in (a, b))
    return Verdict.NOT_COMPARABLE if is_one_format else Verdict.SAME


def _is_imported(dump: Dump) -> bool:
    attempts = dump.about.get("attempts")
    names = attempts if isinstance(attempts, list) else []
    return any(str(name).rpartition("@")[2].startswith(KEY_PREFIX) for name in names)


def _section_order(section: str) -> tuple[int, str]:
    sections = list(SECTIONS)
    first = 0 if section in SAMPLE_SECTIONS else 1
    position = sections.index(section) if section in sections else 99
    return (first * 100 + position, section)


def _match_section(
    section: str, a: Sequence[DumpEntry], b: Sequence[DumpEntry], borrowed: str = ""
) -> SectionMatch:
    def is_unique(coordinate: str) -> bool:
        return all(
            len({getattr(entry.location, coordinate) for entry in side}) <= 1 for side in (a, b)
        )

    # Two frameworks name a stage differently, and step 5 of one run is step 0 of another's replay:
    # a coordinate with at most one value on each side is not compared.
    any_step, any_stage, any_role = map(is_unique, ("step", "stage", "role"))
    common_locations = {
        location: location._replace(
            step=None if any_step else location.step,
            stage=None if any_stage else location.stage,
            role=None if any_role else location.role,
        )
        for location in (entry.location for entry in (*a, *b))
    }
    return SectionMatch(section, (tuple(a), tuple(b)), common_locations, borrowed)


def _entry_pairs(one: list[DumpEntry], other: list[DumpEntry]) -> Iterator[EntryPair]:
    if len(one) == len(other) == 1:
        yield one[0], other[0]
        return
    by_key = {entry.key or entry.path.name: entry for entry in other}
    for entry in one:
        yield entry, by_key.pop(entry.key or entry.path.name, None)
    for entry in by_key.values():
        yield None, entry
