"""Results of a comparison: plain values, small whatever the size of the dumps."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

import numpy as np

from stagescope_service.compare.pairing.shard_comparison import ShardComparison
from stagescope_service.compare.pairing.token_alignment import ValueLocation
from stagescope_service.compare.tolerances import NoiseFloor, Tolerance
from stagescope_service.statistics.pairwise import Pairwise


class Verdict(str, enum.Enum):
    """How two things compare; later verdicts outweigh earlier ones."""

    SAME = "same"
    WITHIN_NOISE = "within noise"
    NOT_COMPARABLE = "not comparable"
    DIFFERENT = "different"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True, slots=True)
class ComparisonFinding:
    """Something that a user must know besides the numbers.

    Attributes:
        kind: 'section' (on one side only), 'only' (samples, tensors or locations on one side only),
            'replicas', 'conflict', 'coverage', 'shapes', 'left out', 'empty' or 'note'. A finding
            about a file has the kind of the reader's `Problem`.
        message: what was found, and what to do.
        side: index of the side, None for both.
        section: the section, None if it concerns no single one.
        items: names of files, samples, tensors or locations.
        verdict: its effect on the verdict of the comparison; `SAME` for none.
    """

    kind: str
    message: str
    side: int | None = None
    section: str | None = None
    items: tuple[str, ...] = ()
    verdict: Verdict = Verdict.SAME


@dataclasses.dataclass(frozen=True, slots=True)
class ShardResult:
    """One tensor of one pair of shards, such as a rank's microbatch, with its verdict."""

    verdict: Verdict
    comparison: ShardComparison


@dataclasses.dataclass(frozen=True, slots=True)
class TensorResult:
    """One tensor, or number, of a section over all ranks, parts and samples.

    Attributes:
        step: step of the first side.
        section, name: section and name of the tensor.
        station: its station in the flow.
        verdict: verdict over all shards; `reason` explains it.
        found: statistics over all shards; replicas count once.
        tolerance: the tolerance that was applied.
        shards: each pair of shards.
        first: location of the first value that differs (by more than the tolerance, if one does).
        largest: location of the largest |d|.
        samples: numbers of trajectories, each counted once: {compared, unequal, tokens differ,
            lengths differ}, and the `total` of its step on both sides; empty without rows.
    """

    step: int | None
    section: str
    name: str
    station: str
    verdict: Verdict
    reason: str
    found: Pairwise
    tolerance: Tolerance
    shards: tuple[ShardResult, ...]
    first: ValueLocation | None
    largest: ValueLocation | None
    samples: Mapping[str, int]

    @property
    def dtypes(self) -> tuple[tuple[str, str], ...]:
        """The distinct pairs of dtypes."""
        return tuple(dict.fromkeys(each.comparison.dtypes for each in self.shards))

    def worst_samples(self, most: int) -> list[tuple[str, list[float]]]:
        """Return (label, `pairwise.ROW`) of differing samples, the largest |d| first."""
        tables = [each.comparison.rows for each in self.shards if each.comparison.rows is not None]
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
class FirstDifference:
    """The first thing that differs in the order of the data flow."""

    station: str
    section: str
    name: str
    reason: str
    location: ValueLocation | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause, and what to check."""

    title: str
    evidence: str
    checks: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PairResult:
    """Result of two sides.

    Attributes:
        sides: indexes among the sides of the comparison.
        verdict: verdict of the two; `reason` explains it.
        first: first difference, None if nothing differs.
        tensors: all tensors in the order of the flow.
        findings: see `ComparisonFinding`.
        keys: section -> kinds of keys that paired its rows.
        noise_floor: the noise floor that log-probs were compared with.
        samples: number of trajectories of either side, each counted once.
        causes, excluded: likely causes, and what the evidence excludes.
    """

    sides: tuple[int, int]
    verdict: Verdict
    reason: str
    first: FirstDifference | None
    tensors: tuple[TensorResult, ...]
    findings: tuple[ComparisonFinding, ...]
    keys: Mapping[str, tuple[str, ...]]
    noise_floor: NoiseFloor | None = None
    samples: int = 0
    causes: tuple[Cause, ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def shares_nothing(self) -> bool:
        """Whether the two sides have no section in common."""
        return not self.tensors and not self.keys


@dataclasses.dataclass(frozen=True, slots=True)
class SideResult:
    """Contents of one side."""

    name: str
    kind: str
    entries: int
    bytes: int
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    parts: tuple[str, ...]
    sections: tuple[str, ...]
    about: Mapping[str, object]


@dataclasses.dataclass(frozen=True, slots=True)
class DumpComparison:
    """Result of a comparison of two or three dumps.

    Attributes:
        sides: the two or three sides.
        pairs: each side with each other, those of the first side first.
        verdict: the heaviest verdict of the pairs that have anything in common.
        bytes: number of bytes read.
        seconds: duration.
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
    def first(self) -> FirstDifference | None:
        """The first difference of the first pair that has one."""
        return next((pair.first for pair in self.pairs if pair.first is not None), None)
