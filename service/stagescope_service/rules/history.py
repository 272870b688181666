"""The history of one run for a diagnosis, read from the catalogue on demand."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Final, NamedTuple, Protocol

import numpy as np

from stagescope_service.rules.evidence import Series
from stagescope_service.rules.facts import StepFacts
from stagescope_service.statistics.step_metrics import VERSION, Dimension, SliceKey, SliceMetrics
from stagescope_service.statistics.summary import Summary
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.rollouts import RewardGroupsRow
from stagescope_service.store.tables import FindingRow, LossRow, SampleRow
from stagescope_service.store.tables.declare import NON_FINITE_NAMES
from stagescope_wire.batch import Batch
from stagescope_wire.nonfinite import JsonObject, number
from stagescope_wire.schema import ROLES

STEPS: Final = 2000
"""Newest steps that a diagnosis looks at."""
NEWEST: Final = 10
"""Newest measured steps that are looked at by rank, by round, and by sample."""
READ: Final = 3
"""Newest measured steps whose step summaries are read: they may be large."""
PARTIAL: Final = 200
"""Newest partial steps whose missing ranks are read."""
SYNC: Final = "weight_sync"
"""The stage of a weight sync."""
_ROWS: Final = 20_000
_CACHED: Final = 16
"""Measured steps that a history and those of its earlier steps keep together."""
_ORDER: Final = {role: at for at, role in enumerate(ROLES)}


class CurrentStep(NamedTuple):
    """A current step: no later attempt repeats it."""

    step: int
    attempt_id: int
    attempt: int
    """The attempt's number in its run."""
    verdict: str | None
    """The comparability of its streams; None: it was not measured."""
    suspects: tuple[str, ...]
    """The checks of its streams that failed."""


class MissingRank(NamedTuple):
    """The steps and stages that a rank is missing in.

    Attributes:
        steps: the steps that closed without it, ascending.
        stages: the stages of them that it did not end.
    """

    steps: list[int]
    stages: list[str]


@dataclasses.dataclass(frozen=True)
class LossOfStep:
    """The effect of the loss on the kept tokens of a step.

    Attributes:
        tokens: number of these tokens.
        shares: a fate of `loss_fate.NAMES` -> its share of the sum of |d|, 0 to 1.
        unrecorded: a field of `loss_fate.LossTokens` -> how to record it.
    """

    tokens: int
    shares: Mapping[str, float]
    unrecorded: Mapping[str, str]


class KeptTensors(Protocol):
    """Reads what the ring and the kept files still hold of a step."""

    def loss(self, step: CurrentStep) -> LossOfStep:
        """Return the effect of the loss on a step's tokens.

        Raises:
            StagescopeError: its streams are not kept.
        """
        ...

    def batch(self, step: CurrentStep, names: Sequence[str]) -> Batch | None:
        """Return the rows of a step with these tensors; None: not all of them are kept.

        Raises:
            StagescopeError: they cannot be read.
        """
        ...


class RunHistory:
    """The history of the current steps of a run, or of one of its attempts.

    Args:
        catalogue: the reading side of the store.
        run: the run's name.
        attempt: only this attempt, by its number; None: all current steps.
        last: the last step to look at; None: the newest.
        kept: reads tensors; None: symptoms that need tensors are not measured.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        run: str,
        *,
        attempt: int | None = None,
        last: int | None = None,
        kept: KeptTensors | None = None,
    ) -> None:
        self.run = run
        self.kept = kept
        self._catalogue = catalogue
        self._last = last
        rows = catalogue.attempts(run)
        self.attempts = sorted(
            (row for row in rows if attempt in (None, row["number"])), key=lambda row: row["number"]
        )
        self._ids = [int(row["attempt_id"]) for row in self.attempts]
        self._number = {int(row["attempt_id"]): int(row["number"]) for row in self.attempts}
        self._series = lru_cache(maxsize=None)(self._read_series)
        self.facts = lru_cache(maxsize=_CACHED)(self._facts_of)
        """Return the facts of a step."""

    def until(self, last: int) -> RunHistory:
        """Return the history up to the step `last`, without tensors."""
        found = RunHistory.__new__(RunHistory)
        for name in ("run", "attempts", "_catalogue", "_ids", "_number", "facts"):
            setattr(found, name, getattr(self, name))
        found._last, found.kept = last, None
        found._rows = [row for row in self._rows if row["step"] <= last]
        found._every_finding, found._every_loss = self._every_finding, self._every_loss
        found._series = lru_cache(maxsize=None)(found._read_series)
        return found

    # --- steps ----------------------------------------------------------------------------------
    @cached_property
    def _rows(self) -> list[JsonObject]:
        """The newest `STEPS` current closed steps, ascending, with their published numbers."""
        found: list[JsonObject] = []
        seen: set[int] = set()
        for row in self._catalogue.step_metrics(self._ids, version=VERSION, last=self._last):
            step, number = int(row["step"]), self._number[row["attempt_id"]]
            if row["closed_wall"] is None or step in seen or self._is_discarded(number, step):
                continue
            seen.add(step)
            found.append(row)
            if len(found) >= STEPS:
                break
        return found[::-1]

    def _is_discarded(self, number: int, step: int) -> bool:
        """Return whether an attempt later than `number` resumed before a step."""
        return any(
            row["number"] > number and row["resumed_from_step"] < step
            for row in self.attempts
            if row["resumed_from_step"] is not None
        )

    def earlier_attempts(self) -> Iterator[int]:
        """Yield the attempts before the last step's one that have closed steps, newest first."""
        newest = self.newest_attempt_id
        before = None if self._last is None else self._last + 1
        for attempt_id in reversed(self._ids):
            if newest is not None and self._number[attempt_id] < self._number[newest]:
                rows = self._catalogue.steps(attempt_id, before=before, limit=2)
                if any(row["closed_wall"] is not None for row in rows):
                    yield self._number[attempt_id]

    def attempt_of(self, step: int) -> int | None:
        """Return the number of the attempt that did a current step."""
        return self._attempt_of.get(step)

    @cached_property
    def _attempt_of(self) -> Mapping[int, int]:
        """Current closed step -> the number of its attempt."""
        return {step.step: step.attempt for step in self.steps}

    def number_of(self, attempt_id: int) -> int:
        """Return the number of an attempt of this history, by its id in the catalogue."""
        return self._number[attempt_id]

    @cached_property
    def steps(self) -> list[CurrentStep]:
        """The current closed steps, ascending."""
        return [
            CurrentStep(
                int(row["step"]),
                int(row["attempt_id"]),
                self._number[row["attempt_id"]],
                row["verdict"] if row["metrics"] is not None else None,
                tuple(row["suspects"] or ()),
            )
            for row in self._rows
        ]

    @cached_property
    def measured(self) -> list[CurrentStep]:
        """The steps that have numbers, ascending."""
        return [step for step in self.steps if step.verdict is not None]

    def partial(self) -> Series:
        """Return 1 for each step that closed without some of its ranks, else 0."""
        values = [float(row["completeness"] == "partial") for row in self._rows]
        return self._as_series("partial steps", self._rows, values)

    def missing(self) -> dict[tuple[str, int], MissingRank]:
        """Return (role, rank) -> the newest `PARTIAL` partial steps that it is missing in."""
        partial = [row for row in self._rows if row["completeness"] == "partial"][-PARTIAL:]
        wanted = {(row["attempt_id"], row["step"]) for row in partial}
        found: dict[tuple[str, int], MissingRank] = {}
        for attempt_id in sorted({attempt_id for attempt_id, _ in wanted}, key=self.number_of):
            own = [step for attempt, step in wanted if attempt == attempt_id]
            span = min(max(own) - min(own) + 1, STEPS)
            rows = self._catalogue.steps(attempt_id, before=max(own) + 1, limit=span)
            for row in reversed(rows):
                for each in (row["missing"] or ()) if row["step"] in own else ():
                    key = (each["role"], each["rank"])
                    rank = found.setdefault(key, MissingRank([], []))
                    if rank.steps[-1:] != [row["step"]]:
                        rank.steps.append(row["step"])
                    if each["stage"] not in rank.stages:
                        rank.stages.append(each["stage"])
        return found

    def mean_staleness(self, steps: Sequence[int]) -> float:
        """Return the mean staleness of the tokens of some steps; NaN if it is unknown."""
        wanted = set(steps)
        chosen = [step for step in self.measured if step.step in wanted]
        counts: dict[int, float] = defaultdict(float)
        for _, sizes in self.slices("staleness", "counts/tokens", chosen):
            for (_, age), size in sizes.items():
                counts[age] += size
        total = sum(counts.values())
        return sum(age * size for age, size in counts.items()) / total if total else math.nan

    @property
    def newest_attempt_id(self) -> int | None:
        """The catalogue's id of the last step's attempt."""
        if self._last is not None and self.steps:
            return self.steps[-1].attempt_id
        return self._ids[-1] if self._ids else None

    # --- numbers --------------------------------------------------------------------------------
    def metric(self, name: str) -> Series:
        """Return a published number of the steps that have it."""
        rows = [row for row in self._rows if name in (row["metrics"] or {})]
        return self._as_series(name, rows, [float(number(row["metrics"][name])) for row in rows])

    def slices(
        self, by: Dimension, name: str, steps: Sequence[CurrentStep] | None = None
    ) -> list[tuple[CurrentStep, Mapping[SliceKey, float]]]:
        """Return a published number of the slices of measured steps, ascending. Without `steps`,
        the newest measured steps are read."""
        chosen = self.measured[-NEWEST:] if steps is None else steps
        if not chosen:
            return []
        first, last = chosen[0].step, chosen[-1].step
        wanted = {(step.attempt_id, step.step): step for step in chosen}
        found: list[tuple[CurrentStep, Mapping[SliceKey, float]]] = []
        for row in self._catalogue.step_metrics(
            self._ids, version=VERSION, first=first, last=last, numbers="slices"
        ):
            step = wanted.get((row["attempt_id"], row["step"]))
            blob = row.get("slices")
            if step is not None and blob is not None:
                found.append((step, SliceMetrics.from_bytes(blob).column(by, name)))
        return found[::-1]

    @cached_property
    def scalar_names(self) -> list[str]:
        """The names of all scalars that were logged."""
        return sorted(self._catalogue.scalar_names(self._ids)) if self._ids else []

    def scalars(self, patterns: Sequence[str]) -> list[Series]:
        """Return the series of every scalar whose name matches a pattern, the first one first.

        Each role has its own, the actor's first. A value is the mean over the ranks and parts of
        the role that logged it; NaN where one of them is.
        """
        found = [series for name in self._matching(patterns) for series in self._series(name)]
        return [series for series in found if len(series)]

    def scalar_name(self, patterns: Sequence[str]) -> str | None:
        """Return the first name of a scalar that `scalars` returns series of."""
        return next((name for name in self._matching(patterns) if any(self._series(name))), None)

    def _matching(self, patterns: Sequence[str]) -> list[str]:
        names = [
            name
            for pattern in patterns
            for name in self.scalar_names
            if fnmatch.fnmatchcase(name, pattern)
        ]
        return [*dict.fromkeys(names)]

    def _read_series(self, name: str) -> list[Series]:
        current = {(step.attempt_id, step.step) for step in self.steps}
        by_role: dict[str, dict[tuple[int, int], list[tuple[float, int]]]] = {}
        for row in self._catalogue.scalar_values(self._ids, name, by_rank=False, last=self._last):
            key = (row["attempt_id"], -1 if row["step"] is None else row["step"])
            if key in current:
                bad = row["nan"] or row["posinf"] or row["neginf"]
                mean = math.nan if bad or row["mean"] is None else float(row["mean"])
                sums = by_role.setdefault(str(row["role"]), defaultdict(list))
                sums[key].append((mean, int(row["count"])))
        found = []
        for role in sorted(by_role, key=lambda role: (_ORDER.get(role, len(ROLES)), role)):
            sums = by_role[role]
            rows = [row for row in self._rows if (row["attempt_id"], row["step"]) in sums]
            values = [_weighted_mean(sums[row["attempt_id"], row["step"]]) for row in rows]
            label = f"{name} of {role}" if len(by_role) > 1 else name
            found.append(self._as_series(label, rows, values))
        return found

    def _as_series(self, name: str, rows: Sequence[JsonObject], values: Sequence[float]) -> Series:
        return Series(
            name,
            np.array([row["step"] for row in rows], np.int64),
            np.array([self._number[row["attempt_id"]] for row in rows], np.int64),
            np.array(values, np.float64),
        )

    # --- the newest measured step ---------------------------------------------------------------
    @cached_property
    def newest(self) -> StepFacts | None:
        """The newest step with readable numbers; None: none of the newest has any.

        If an older version wrote them, no step has any. Only the newest steps are read, so that a
        rule does not read every step of a long run to find that out.
        """
        found = (self.read(step) for step in reversed(self.measured[-_CACHED:]))
        return next((each for each in found if each is not None), None)

    @cached_property
    def summaries(self) -> list[tuple[CurrentStep, Summary]]:
        """The statistics of the newest `READ` steps with numbers, the newest first."""
        found = [(step, self.read(step)) for step in reversed(self.measured[-READ:])]
        return [(step, each.summary.summary) for step, each in found if each is not None]

    def read(self, step: CurrentStep) -> StepFacts | None:
        """Return a step with its statistics; None: this version can read none."""
        found = self.facts(step)
        return None if found.whole is None else found

    def _facts_of(self, step: CurrentStep) -> StepFacts:
        return StepFacts(self._catalogue, self.run, step.attempt_id, step.attempt, step.step)

    @cached_property
    def samples(self) -> list[SampleRow]:
        """The samples of the newest steps that have some, the newest step first."""
        found: list[SampleRow] = []
        for step in reversed(self.steps[-NEWEST:]):
            found += self._catalogue.samples(step.attempt_id, step.step, limit=_ROWS - len(found))
            if len(found) >= _ROWS:
                break
        return found

    @cached_property
    def groups(self) -> list[RewardGroupsRow]:
        """The groups of samples of each step that has some, ascending."""
        if not self._ids:
            return []
        current = {(step.attempt_id, step.step) for step in self.steps}
        rows = self._catalogue.reward_groups(self._ids, last=self._last)
        found = [row for row in rows if (row["attempt_id"], row["step"]) in current]
        return sorted(found, key=lambda row: row["step"])

    def has_weights(self, attempt: int) -> bool:
        """Return whether weights were recorded in an attempt, by its number."""
        found = (id for id, number in self._number.items() if number == attempt)
        return any(self._catalogue.newest_weights(each) is not None for each in found)

    def has_syncs(self, attempt: int) -> bool:
        """Return whether an attempt, by its number, reported a weight sync."""
        found = (id for id, number in self._number.items() if number == attempt)
        return any(self._catalogue.stages(each, stage=SYNC, limit=1) for each in found)

    # --- what else the service knows --------------------------------------------------------------
    @cached_property
    def findings(self) -> list[FindingRow]:
        """The findings of current steps up to the last one, the most recently seen first."""
        return [row for row in self.every_finding if self._is_current(row)]

    @property
    def every_finding(self) -> list[FindingRow]:
        """The same, with findings of repeated steps and of attempts that are over."""
        return [row for row in self._every_finding if self._is_known(row["step"])]

    @cached_property
    def losses(self) -> list[LossRow]:
        """Announced data of current steps that never arrived, up to the last step."""
        known = (row for row in self._every_loss if self._is_known(row["step"]))
        return [row for row in known if self._is_current(row)]

    @cached_property
    def non_finite_scalars(self) -> list[JsonObject]:
        """The logged numbers that are NaN or infinite, by step, up to the last one."""
        if not self._ids:
            return []
        current = {(step.attempt_id, step.step) for step in self.steps}
        rows = self._catalogue.scalars(self._ids, nonfinite=NON_FINITE_NAMES, limit=_ROWS)
        return [row for row in rows if (row["attempt_id"], row["step"]) in current]

    @cached_property
    def _every_finding(self) -> list[FindingRow]:
        return self._catalogue.findings(attempt_id=self._ids, limit=_ROWS) if self._ids else []

    @cached_property
    def _every_loss(self) -> list[LossRow]:
        return self._catalogue.losses(attempt_id=self._ids, limit=_ROWS) if self._ids else []

    def _is_known(self, step: int | None) -> bool:
        """Return whether the history includes a step; None (no step) is always included."""
        return self._last is None or step is None or step <= self._last

    def _is_current(self, row: FindingRow | LossRow) -> bool:
        """Return whether a row is current; without a step it is as current as its attempt."""
        attempt_id, step = row["attempt_id"], row["step"]
        newest = self.newest_attempt_id
        if attempt_id is None:
            return False
        number = self._number[attempt_id]
        if newest is None or number >= self._number[newest]:
            return True
        if step is None or self._is_discarded(number, step):
            return False
        return self._attempt_of.get(step, number) <= number

    def settings(self, name: str) -> Mapping[str, object]:
        """Return a settings table of the newest attempt that has one."""
        for attempt_id in reversed(self._ids):
            for settings in self._catalogue.settings_with(attempt_id, name):
                table = settings.get(name)
                if isinstance(table, Mapping):
                    return table
        return {}

    def stage_seconds(self) -> dict[tuple[str, str], dict[int, dict[int, float]]]:
        """Return (stage, role) -> step -> rank -> seconds, of the newest steps."""
        found: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
        for step in self.steps[-NEWEST:]:
            for (stage, role, rank), seconds in self._facts_of(step).seconds.items():
                found.setdefault((stage, role), {}).setdefault(step.step, {})[rank] = seconds
        return found


def _weighted_mean(values: Sequence[tuple[float, int]]) -> float:
    return sum(mean * count for mean, count in values) / sum(count for _, count in values)
