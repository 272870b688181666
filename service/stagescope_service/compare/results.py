"""What a comparison says: plain values, small whatever the dumps' sizes were."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from stagescope_service.compare.pairing.pieces import Piece
from stagescope_service.compare.pairing.token_alignment import Location
from stagescope_service.compare.tolerances import NoiseFloor, Tolerance
from stagescope_service.dumps.records import Place
from stagescope_service.statistics.pairwise import Pairwise


class Verdict(str, enum.Enum):
    """What two things are to each other; the later ones outweigh the earlier."""

    SAME = "same"
    WITHIN_NOISE = "within noise"
    NOT_COMPARABLE = "not comparable"
    DIFFERENT = "different"

    def __str__(self) -> str:
        return self.value

    @property
    def weight(self) -> int:
        """Of two verdicts the heavier one is that of both."""
        return _WEIGHTS[self]


_WEIGHTS: Final = {verdict: weight for weight, verdict in enumerate(Verdict)}


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something that a reader must know beside the numbers.

    Attributes:
        kind: that of a reader's `Problem` (a file), or 'section' (on one side alone), 'only'
            (samples, tensors or places on one side alone), 'replicas', 'conflict', 'coverage',
            'shapes', 'left out', 'empty', 'note'.
        message: what, and what to do.
        side: which side's, None of both.
        section: of which section, where it is of one.
        items: names of files, samples, tensors or places.
        verdict: what it makes of the comparison; `SAME` where it does not touch it.
    """

    kind: str
    message: str
    side: int | None = None
    section: str | None = None
    items: tuple[str, ...] = ()
    verdict: Verdict = Verdict.SAME


@dataclasses.dataclass(frozen=True, slots=True)
class PlaceResult:
    """One tensor of one pair of shards, such as a rank's microbatch."""

    verdict: Verdict
    piece: Piece

    @property
    def place(self) -> Place:
        """Where the first side's was made."""
        return self.piece.places[0]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorResult:
    """One tensor, or number, of a section over all ranks, parts and samples.

    Attributes:
        step: of the first side.
        section, name: which.
        station: where in the flow it lies.
        verdict: of the whole; `reason` says why in words.
        found: over all places; replicas count once.
        tolerance: what was allowed.
        places: each pair of shards.
        first: where the first value is that is different (over the tolerance where one is).
        largest: where the largest |d| is.
        samples: trajectories, each once: {compared, unequal, tokens differ, lengths differ}, and
            the `total` that the two sides have of its step; empty of what has no rows.
    """

    step: int | None
    section: str
    name: str
    station: str
    verdict: Verdict
    reason: str
    found: Pairwise
    tolerance: Tolerance
    places: tuple[PlaceResult, ...]
    first: Location | None
    largest: Location | None
    samples: Mapping[str, int]

    @property
    def dtypes(self) -> tuple[tuple[str, str], ...]:
        """The pairs of dtypes, each once."""
        return tuple(dict.fromkeys(each.piece.dtypes for each in self.places))

    def worst_samples(self, most: int) -> list[tuple[str, list[float]]]:
        """Return (label, `pairwise.ROW_COLUMNS`) of samples that differ, the largest |d| first."""
        tables = [each.piece.rows for each in self.places if each.piece.rows is not None]
        if not tables:
            return []
        numbers = np.concatenate([table.numbers for table in tables])
        differ = np.flatnonzero(numbers[:, 1] > 0)
        order = np.lexsort((-numbers[differ, 1], -numbers[differ, 3]))
        ends = np.cumsum([len(table.labels) for table in tables])
        found = []
        for row in differ[order[:most]].tolist():
            at = int(np.searchsorted(ends, row, "right"))
            found.append((tables[at].labels[row - int(ends[at])], numbers[row].tolist()))
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class First:
    """The first thing that differs in the order in which data flows."""

    station: str
    section: str
    name: str
    reason: str
    location: Location | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause, and what to look at."""

    title: str
    evidence: str
    checks: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PairResult:
    """Two sides.

    Attributes:
        sides: their places among the comparison's sides.
        verdict: of the two; `reason` says why in words.
        first: None where nothing differs.
        tensors: in the order of the flow.
        findings: see `Finding`.
        keys: by what the rows of each section were paired.
        floor: the noise floor that log-probs were held against.
        samples: trajectories of both sides, each once, those of one side alone too.
        causes, excluded: likely causes, and what the evidence excludes.
    """

    sides: tuple[int, int]
    verdict: Verdict
    reason: str
    first: First | None
    tensors: tuple[TensorResult, ...]
    findings: tuple[Finding, ...]
    keys: Mapping[str, tuple[str, ...]]
    floor: NoiseFloor | None = None
    samples: int = 0
    causes: tuple[Cause, ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def shares_nothing(self) -> bool:
        """Whether the two have no section in common."""
        return not self.tensors and not self.keys


@dataclasses.dataclass(frozen=True, slots=True)
class SideResult:
    """One side as it was found."""

    name: str
    kind: str
    entries: int
    bytes: int
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    parts: tuple[str, ...]
    sections: tuple[str, ...]
    about: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """The answer.

    Attributes:
        sides: two or three.
        pairs: each side with each other, the first side's first.
        verdict: the heaviest of the pairs that have anything in common.
        bytes: that were read.
        seconds: that it took.
    """

    sides: tuple[SideResult, ...]
    pairs: tuple[PairResult, ...]
    verdict: Verdict
    reason: str
    bytes: int
    seconds: float

    @property
    def exit_status(self) -> int:
        """0 same or within noise, 1 different, 2 could not be compared."""
        return {Verdict.DIFFERENT: 1, Verdict.NOT_COMPARABLE: 2}.get(self.verdict, 0)

    @property
    def first(self) -> First | None:
        """The first difference of the first pair that has one."""
        return next((pair.first for pair in self.pairs if pair.first is not None), None)
