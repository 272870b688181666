"""Which entries of two dumps are held against each other: discovered from both, never given."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_service.compare.flow import SAMPLING
from stagescope_service.compare.results import Finding, Verdict
from stagescope_service.dumps.formats.own import KIND as OWN
from stagescope_service.dumps.importing import KEY_PREFIX
from stagescope_service.dumps.records import SECTIONS, Dump, Entry, Place

COUNTERPARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "is_loss": ("forward_data", "old_log_probs", "advantages", "loss"),
    "advantages": ("trajectories",),
    "old_log_probs": ("trajectories",),
}
"""Where a side without a section may hold some of its tensors."""

Entries = tuple[tuple[Entry, ...], tuple[Entry, ...]]
Pair = tuple[Entry | None, Entry | None]


class Unit(NamedTuple):
    """Within it a sample is there once: what else differs in a place are shards."""

    step: int | None
    stage: str | None
    occurrence: int
    epoch: int

    def __str__(self) -> str:
        words = ["" if self.step is None else f"step {self.step}", self.stage or ""]
        words += [f"occurrence {self.occurrence}"] if self.occurrence else []
        words += [f"epoch {self.epoch}"] if self.epoch else []
        return ", ".join(word for word in words if word) or "epoch 0"


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """Entries of two sides that may hold the same.

    Attributes:
        section: under which it is reported.
        entries: of each side.
        places: of every entry's place the form that both sides share.
        borrowed: of which section one side's entries are, where they are of another.
    """

    section: str
    entries: Entries
    places: Mapping[Place, Place]
    borrowed: str = ""

    def unit(self, entry: Entry) -> Unit:
        """Return in which unit an entry lies."""
        place = self.places[entry.place]
        return Unit(place.step, place.stage, place.part.occurrence, place.part.epoch)

    def unit_of(self, pair: Pair) -> Unit:
        """Return in which unit a pair lies."""
        entry = pair[0] or pair[1]
        assert entry is not None
        return self.unit(entry)

    def entry_pairs(self) -> Iterator[Pair]:
        """Yield entries of one place, one of each side; None where a side has no such.

        What lies in a unit that one side alone has is left out.
        """
        units = [{self.unit(entry) for entry in entries} for entries in self.entries]
        shared = units[0] & units[1]
        by_place: dict[Place, tuple[list[Entry], list[Entry]]] = {}
        for side in range(2):
            for entry in self.entries[side]:
                if self.unit(entry) not in shared:
                    continue
                by_place.setdefault(self.places[entry.place], ([], []))[side].append(entry)
        for one, other in by_place.values():
            yield from _entry_pairs(one, other)


def plan(a: Dump, b: Dump) -> tuple[list[Match], list[Finding]]:
    """Return what to compare, in the order of the flow, and what one side alone has."""
    sections: list[dict[str, list[Entry]]] = []
    for dump in (a, b):
        found: dict[str, list[Entry]] = collections.defaultdict(list)
        for entry in dump.entries:
            found[entry.section].append(entry)
        sections.append(found)
    one, other = sections
    lone = of_a_part(a, b)
    names = sorted(one.keys() | other.keys(), key=_order)
    matches, findings = [], []
    for section in names:
        if section in one and section in other:
            matches.append(_match(section, one[section], other[section]))
            continue
        side = 0 if section in one else 1
        borrowed = [
            _match(section, one[x], other[y], borrowed=lent)
            for lent in COUNTERPARTS.get(section, ())
            for x, y in [(section, lent) if side == 0 else (lent, section)]
            if x in one and y in other
        ]
        matches += borrowed
        beside = "".join(f", {each.borrowed}" for each in borrowed)
        message = f"{section} is there on one side only"
        if beside:
            message += f"; looked for in the other side's {beside[2:]}"
        files = tuple(dict.fromkeys(str(entry.path) for entry in sections[side][section]))
        findings.append(Finding("section", message, side, section, files, lone))
    return matches, findings


def of_a_part(a: Dump, b: Dump) -> Verdict:
    """Return what a section or stage makes of the comparison that one side alone has.

    Two runs of this project say the same where they do the same: what one lacks it has not done,
    or not kept. Other formats have forms that hold different sections, and so have runs that were
    taken in from them.
    """
    is_one_form = all(dump.kind == OWN and not _is_imported(dump) for dump in (a, b))
    return Verdict.NOT_COMPARABLE if is_one_form else Verdict.SAME


def _is_imported(dump: Dump) -> bool:
    attempts = dump.about.get("attempts")
    names = attempts if isinstance(attempts, list) else []
    return any(str(name).rpartition("@")[2].startswith(KEY_PREFIX) for name in names)


def _order(section: str) -> tuple[int, str]:
    known = list(SECTIONS)
    first = 0 if section in SAMPLING else 1
    return (first * 100 + (known.index(section) if section in known else 99), section)


def _match(section: str, a: Sequence[Entry], b: Sequence[Entry], borrowed: str = "") -> Match:
    def is_one(values: Callable[[Place], object]) -> bool:
        return all(len({values(entry.place) for entry in side}) <= 1 for side in (a, b))

    # Two frameworks name a stage differently, and step 5 of one run is step 0 of another's replay.
    step, stage, role = is_one(_step), is_one(_stage), is_one(_role)
    places = {
        place: place._replace(
            step=None if step else place.step,
            stage=None if stage else place.stage,
            role=None if role else place.role,
        )
        for place in (entry.place for entry in (*a, *b))
    }
    return Match(section, (tuple(a), tuple(b)), places, borrowed)


def _step(place: Place) -> object:
    return place.step


def _stage(place: Place) -> object:
    return place.stage


def _role(place: Place) -> object:
    return place.role


def _entry_pairs(one: list[Entry], other: list[Entry]) -> Iterator[Pair]:
    if len(one) == len(other) == 1:
        yield one[0], other[0]
        return
    by_key = {entry.key or entry.path.name: entry for entry in other}
    for entry in one:
        partner = by_key.pop(entry.key or entry.path.name, None)
        yield entry, partner
    for entry in by_key.values():
        yield None, entry
