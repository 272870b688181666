"""Whether two rows with one id are copies of one sample, pieces of it, or contradict each other.

Rows are compared by content: the positions of model tokens, the rollout's log-probs, the token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from stagescope_service.statistics.cell import Int64
from stagescope_service.statistics.part import GroupKey, PartRecord
from stagescope_service.statistics.sequence_row import ROW
from stagescope_service.statistics.summary import UNKNOWN
from stagescope_wire.schema import Part

_N, _Q_SUM, _NON_FINITE = (ROW.index(name) for name in ("tokens", "q_sum", "non_finite"))
_SAME_BITS: Final = 1e-6
_OTHER_DTYPE: Final = 2.0**-7
"""Relative error of q that a different dtype explains: bfloat16 has 8 significant bits."""
_ENOUGH_VALUES: Final = 4
"""Minimum number of different token ids, or rollout log-probs, that two parts must share to show
that their rows are of the same samples."""
_COMPUTED: Final = 0.5
"""Maximum difference in nats of two computations of one log-prob, if q is not a rollout's."""


def owner_of(record: PartRecord) -> GroupKey:
    """Return the key that is common to ranks that hold the same samples or pieces of them."""
    return record.group[:-1]


class PartRows:
    """The rows of one part with the content that distinguishes samples."""

    def __init__(self, record: PartRecord) -> None:
        summary = record.full_summary
        sequences = summary.sequences
        self.record = record
        self.owner = owner_of(record)
        self.samples = sequences.samples
        self.row = sequences.row.tolist()
        self.placed = sequences.placed[:, 0].tolist()
        self.values = sequences.values
        self.runs = sequences.runs()
        self.marks, self.mark_values = sequences.marks, sequences.mark_values
        self.has_marks = len(self.marks) > 0
        count = np.arange(len(sequences) + 1)
        self.mark_bounds = np.searchsorted(self.marks[:, 0], count).tolist()
        stream = summary.pair[1]
        self.transported = stream == "rollout"
        self.dtypes = summary.dtypes.get(stream, ())


class Row:
    """One row: its positions and its content."""

    __slots__ = ("content", "dropped", "first", "index", "rows", "runs")

    def __init__(self, rows: PartRows, index: int) -> None:
        self.rows, self.index = rows, index
        runs = rows.runs[index]
        self.first = int(runs[0, 0]) if len(runs) else 0
        self.runs = (runs - self.first).tobytes()
        """The runs of model tokens, relative to the first one."""
        self.content = -1
        """Index of its content among the distinct contents of its id."""
        self.dropped = False

    @property
    def part(self) -> Part:
        """The part of the stage that holds the row."""
        return self.rows.record.part

    @property
    def part_of_sample(self) -> str:
        """The cp rank of a row without an offset, else '': such parts all begin at 0."""
        cp_rank = self.rows.record.cp_rank
        return "" if cp_rank is None or self.placed else str(cp_rank)

    @property
    def placed(self) -> bool:
        """Whether its positions are those in its sample."""
        return bool(self.rows.placed[self.index])

    @property
    def intervals(self) -> Int64:
        """int64 [runs, 2]: positions of its runs of model tokens, half open."""
        return np.frombuffer(self.runs, np.int64).reshape(-1, 2) + self.first

    def marks(self) -> dict[int, tuple[int, float]]:
        """Position -> (token id, q)."""
        own = slice(self.rows.mark_bounds[self.index], self.rows.mark_bounds[self.index + 1])
        where = self.rows.marks[own].tolist()
        values = self.rows.mark_values[own].tolist()
        return {at: (token, q) for (_, at, token), q in zip(where, values, strict=True)}

    def has_equal_sums(self, other: Row) -> bool:
        """Return whether rows with the same runs have equal sums, within tolerance."""
        mine, its = self.rows.values[self.index], other.rows.values[other.index]
        if mine[_NON_FINITE] or its[_NON_FINITE]:
            return True  # sums are over finite tokens only, which may differ in a replica
        return _is_close(mine[_Q_SUM], its[_Q_SUM], _tolerance(self, other, int(mine[_N])))

    def compare_marks(self, other: Row) -> tuple[int, bool]:
        """Return the number of marks that two rows share, and whether all of them agree."""
        own_marks, other_marks = self.marks(), other.marks()
        both = own_marks.keys() & other_marks.keys()
        for at in both:
            (token, q), (its_token, its_q) = own_marks[at], other_marks[at]
            if UNKNOWN not in (token, its_token) and token != its_token:
                return len(both), False
            if not _is_close(q, its_q, _tolerance(self, other, 1)):
                return len(both), False
        return len(both), True


class SharedRows:
    """Whether two parts have the same samples under the ids that they share."""

    def __init__(self, by_sample: Mapping[str, Sequence[Row]]) -> None:
        self._rows: dict[str, dict[str, Row]] = {}
        """Part key -> sample -> its row, one of several."""
        self._ambiguous: set[tuple[str, str]] = set()
        """(part key, sample) for which the part has several rows: the id does not identify one."""
        self._known: dict[tuple[str, str], bool] = {}
        for sample, rows in by_sample.items():
            for row in rows:
                own = self._rows.setdefault(row.rows.record.key, {})
                if own.setdefault(sample, row) is not row:
                    self._ambiguous.add((row.rows.record.key, sample))

    def are_same(self, one: Row, other: Row) -> bool:
        """Return whether two rows of one id are the same sample, as all that their parts share."""
        mine, its = sorted((one.rows.record.key, other.rows.record.key))
        if mine == its:
            return False
        if (mine, its) not in self._known:
            shared = self._rows[mine].keys() & self._rows[its].keys()
            doubted = any((key, each) in self._ambiguous for key in (mine, its) for each in shared)
            same = not doubted and self._compare(self._rows[mine], self._rows[its])
            self._known[mine, its] = same
        return self._known[mine, its]

    @staticmethod
    def _compare(mine: Mapping[str, Row], its: Mapping[str, Row]) -> bool:
        tokens: set[int] = set()
        values: set[float] = set()
        has_other_values = False
        for sample in mine.keys() & its.keys():
            one, other = mine[sample], its[sample]
            bounds = _tolerance(one, other, 1)
            other_marks = other.marks()
            for at, (token, q) in one.marks().items():
                if at not in other_marks:
                    continue
                its_token, its_q = other_marks[at]
                if UNKNOWN not in (token, its_token):
                    if token != its_token:
                        return False
                    tokens.add(token)
                is_transported = one.rows.transported and other.rows.transported
                has_other_values |= not (is_transported and _is_close(q, its_q, bounds))
                values.add(q)
        has_same_values = not has_other_values and len(values) >= _ENOUGH_VALUES
        return has_same_values or len(tokens) >= _ENOUGH_VALUES


def _tolerance(one: Row, other: Row, tokens: int) -> tuple[float, float]:
    """Return (absolute, relative) bounds on the difference of q, or of a sum of it."""
    if not (one.rows.transported and other.rows.transported):
        return _COMPUTED * tokens**0.5, 0.1
    return 0.0, _SAME_BITS if one.rows.dtypes == other.rows.dtypes else _OTHER_DTYPE


def _is_close(x: float, y: float, bounds: tuple[float, float]) -> bool:
    if x == y or (x != x and y != y):
        return True
    absolute, relative = bounds
    return bool(abs(x - y) <= absolute + relative * max(abs(x), abs(y)))


def are_copies(one: Row, other: Row) -> bool:
    """Return whether two rows of one id are copies of each other."""
    if one.runs != other.runs or not one.has_equal_sums(other):
        return False
    if one.first == other.first:
        return one.compare_marks(other)[1]
    if one.placed or other.placed or not (one.rows.has_marks and other.rows.has_marks):
        return False
    mine, its = one.rows.record, other.rows.record
    # Within one pass a rank's rows at other positions are pieces, however similar.
    return (mine.role, mine.rank) != (its.role, its.rank) or _pass(mine.part) != _pass(its.part)


def _pass(part: Part) -> tuple[int, int]:
    return part.epoch, part.occurrence


def contradict(one: Row, other: Row, *, doubted: bool = False) -> bool:
    """Return whether two rows of one id, not copies, cannot be pieces of one sample either.

    Without evidence either way, a row nested in a larger one counts as a piece of it, unless the
    ids are `doubted` already.
    """
    if not (one.rows.has_marks and other.rows.has_marks) or not _overlap(
        one.intervals, other.intervals
    ):
        return False
    common, agree = one.compare_marks(other)
    if not agree:
        return True
    if one.runs == other.runs and one.first == other.first:
        return True  # their sums differ
    if one.placed or other.placed:
        return not common and (doubted or not _nested(one.intervals, other.intervals))
    # Rows without an offset begin with their sample: two masks are two samples.
    return one.rows.owner != other.rows.owner or not common


def _nested(one: Int64, other: Int64) -> bool:
    """Return whether all positions of one of two rows are among the other's."""
    small, large = sorted((one, other), key=lambda runs: int((runs[:, 1] - runs[:, 0]).sum()))
    large = large[np.argsort(large[:, 0])]
    at = np.maximum(np.searchsorted(large[:, 0], small[:, 0], "right") - 1, 0)
    return bool(((large[at, 0] <= small[:, 0]) & (large[at, 1] >= small[:, 1])).all())


def _overlap(one: Int64, other: Int64) -> bool:
    one, other = one[np.argsort(one[:, 0])], other[np.argsort(other[:, 0])]
    at = np.searchsorted(other[:, 0], one[:, 1], "left") - 1
    reach = np.maximum.accumulate(other[:, 1])
    return bool(((at >= 0) & (reach[np.maximum(at, 0)] > one[:, 0])).any())
