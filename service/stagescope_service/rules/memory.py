"""What earlier diagnoses of a run have read: the next one reads only what is new or has changed.

A training adds a step, and the doctor looks at 2000. A row is read again if its mark changed. Late
scalars and samples leave no mark. Those of the newest `LATE` steps are therefore read each time,
and those of all steps after `MAX_AGE` seconds.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np

from stagescope_service.rules.facts import StepStatistics
from stagescope_service.rules.missing import StepKey
from stagescope_service.statistics.step_metrics import Dimension, SliceKey, SliceMetrics
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.reader import StepRange
from stagescope_service.store.queries.rollouts import RewardGroupsRow
from stagescope_service.store.tables import FindingRow, ScalarRow
from stagescope_wire.nonfinite import number

NEWEST: Final = 10
"""Newest measured steps that are looked at by rank, by round, and by sample."""
LATE: Final = 32
"""Newest steps whose scalars and samples may still arrive."""
MAX_AGE: Final = 600.0
"""Seconds after which late scalars and samples of earlier steps count, too."""
_RUNS: Final = 4
"""Runs that are remembered, those that were asked for last."""
_ROWS: Final = 20_000
"""Rows of one kind, or as many as were last asked for, if these are more."""
_UNREAD: Final = object()
"""The mark of a row that was never read; it equals no other."""

_OF_ROUNDS: Final = "per_round/"

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """Rows that were read before, each with a mark that changes whenever the row does.

    Args:
        size: rows that are kept, or as many as were last asked for, if these are more.
    """

    def __init__(self, size: int = _ROWS) -> None:
        self._size = size
        self._marks: dict[K, Hashable] = {}
        self._known: dict[K, V] = {}
        self._lock = threading.Lock()

    def of(
        self, marks: Mapping[K, Hashable], read: Callable[[list[K]], Mapping[K, V]]
    ) -> dict[K, V]:
        """Return the rows of some keys, in their order; a key without a row is left out.

        Args:
            marks: key -> mark.
            read: reads the rows of some of the keys; it may return further ones.
        """
        with self._lock:
            wanted = self._wanted(marks)
            if wanted:
                self._take(wanted, marks, read(wanted))
            known = self._known
            if len(self._marks) > max(self._size, len(marks)):
                self._marks = dict(marks)
                self._known = known = {key: known[key] for key in marks if key in known}
            return {key: known[key] for key in marks if key in known}

    def _wanted(self, marks: Mapping[K, Hashable]) -> list[K]:
        """Return the keys that must be read."""
        mark_of = self._marks.get
        return [key for key, mark in marks.items() if mark_of(key, _UNREAD) != mark]

    def _take(self, wanted: Sequence[K], marks: Mapping[K, Hashable], found: Mapping[K, V]) -> None:
        for key in wanted:
            self._marks[key] = marks[key]
            if key in found:
                self._known[key] = found[key]
            else:
                self._known.pop(key, None)


class LateRows(Remembered[StepKey, V]):
    """Rows of steps that may still arrive after their step's mark; the keys ascend by step."""

    def __init__(self) -> None:
        super().__init__()
        self._since = time.monotonic()

    def _wanted(self, marks: Mapping[StepKey, Hashable]) -> list[StepKey]:
        now = time.monotonic()
        if now - self._since > MAX_AGE:
            self._marks.clear()
            self._known.clear()
            self._since = now
        return [*{*super()._wanted(marks), *[*marks][-LATE:]}]


def window_of(keys: Sequence[StepKey]) -> StepRange:
    """Return the steps from the first to the last of some keys."""
    steps = [step for _, step in keys]
    return {"first": min(steps), "last": max(steps)}


class Numbers:
    """The published numbers of a step, except those of its rounds, whose names differ by step.

    Attributes:
        verdict: the comparability of its streams.
        suspects: the checks of its streams that failed.
        places: name -> index of the number in `values`. Most steps share one.
        values: the numbers; some are not finite.
    """

    __slots__ = ("places", "suspects", "values", "verdict")

    def __init__(
        self, metrics: Mapping[str, object], verdict: str, suspects: Sequence[str] = ()
    ) -> None:
        known = {name: value for name, value in metrics.items() if not name.startswith(_OF_ROUNDS)}
        self.verdict = verdict
        self.suspects = _one_of(tuple(suspects))
        self.places = _places(tuple(known))
        self.values = np.array([*map(number, known.values())], np.float64)


@lru_cache(maxsize=64)
def _one_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the same names. Most steps have the same, so that they share one tuple."""
    return names


@lru_cache(maxsize=64)
def _places(names: tuple[str, ...]) -> dict[str, int]:
    """Return name -> index. Most steps have the same names, so that they share one."""
    return {name: at for at, name in enumerate(names)}


class StageMean(NamedTuple):
    """A scalar in a step: its mean over the ranks and parts of a role in a stage."""

    stage: str | None
    role: str
    mean: float
    """NaN or infinite where one of the values is, as in a sum."""


class RunMemory:
    """What was read of one run."""

    def __init__(self) -> None:
        self.numbers: Remembered[StepKey, Numbers] = Remembered()
        self.findings: Remembered[str, FindingRow] = Remembered()
        self.groups: LateRows[RewardGroupsRow] = LateRows()
        self.non_finite: LateRows[list[ScalarRow]] = LateRows()
        self.slices: dict[tuple[Dimension, str], Remembered[StepKey, Mapping[SliceKey, float]]] = (
            defaultdict(Remembered)
        )
        """(dimension, name) -> a published number of each slice."""
        self.few_slices: Remembered[StepKey, SliceMetrics] = Remembered(3 * NEWEST)
        """All numbers of the slices of the first and the newest steps."""
        self.statistics: Remembered[StepKey, StepStatistics] = Remembered(NEWEST)
        """Of the newest measured steps."""
        self._scalars: dict[str, LateRows[list[StageMean]]] = defaultdict(LateRows)

    def scalar(
        self,
        catalogue: Catalogue,
        ids: Sequence[int],
        name: str,
        closed: Mapping[StepKey, float | None],
    ) -> dict[StepKey, list[StageMean]]:
        """Return the means of a scalar in the steps that have it.

        Args:
            catalogue: the reading side of the store.
            ids: of the attempts.
            name: of the scalar.
            closed: when each of the steps closed; ascending by step.
        """

        def read(keys: Sequence[StepKey]) -> Mapping[StepKey, list[StageMean]]:
            found: dict[StepKey, list[StageMean]] = {}
            for attempt_id, step, stage, role, mean, nan, posinf, neginf, _count in (
                catalogue.scalar_means(ids, name, **window_of(keys))
            ):  # fmt: skip
                if step is not None:
                    bad = nan or posinf or neginf
                    value = _as_sum(nan, posinf, neginf) if bad or mean is None else mean
                    each = StageMean(stage, role, value)
                    found.setdefault((attempt_id, step), []).append(each)
            return found

        return self._scalars[name].of(closed, read)


def _as_sum(nan: int, posinf: int, neginf: int) -> float:
    """Return the sum of so many values that are not finite."""
    if nan or (posinf and neginf):
        return math.nan
    return math.inf if posinf else -math.inf


class RunMemories:
    """The memories of the runs that were asked for last; thread-safe."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, RunMemory] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run: str) -> RunMemory:
        """Return the memory of a run, an empty one if it has none."""
        with self._lock:
            found = self._of.setdefault(run, RunMemory())
            self._of.move_to_end(run)
            while len(self._of) > _RUNS:
                self._of.popitem(last=False)
            return found
