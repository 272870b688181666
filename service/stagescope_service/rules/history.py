"""The history of one run for a diagnosis, read from the catalogue on demand."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Final

import numpy as np
from typing_extensions import Self

from stagescope_service.rules.evidence import Series
from stagescope_service.rules.facts import StepFacts, StepStatistics
from stagescope_service.rules.logged import LoggedScalars
from stagescope_service.rules.memory import NEWEST as NEWEST
from stagescope_service.rules.memory import RunMemory, window_of
from stagescope_service.rules.missing import StepKey, missing_ranks
from stagescope_service.rules.pooled import STEPS as POOLED
from stagescope_service.rules.pooled import PooledSteps, pool
from stagescope_service.rules.reported import ROWS, KnownReports, ReportedRows
from stagescope_service.rules.step_rows import STEPS, StepRows
from stagescope_service.rules.step_slices import StepSlices
from stagescope_service.rules.steps import CurrentStep, CutOffStep, KeptTensors, MissingRank
from stagescope_service.statistics.cell import Int64
from stagescope_service.statistics.step_metrics import Dimension, SliceKey
from stagescope_service.statistics.summary import Summary
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.canary import CanaryAgreement
from stagescope_service.store.queries.rollouts import RewardGroupsRow
from stagescope_service.store.tables import (
    FindingRow,
    LossRow,
    OperatorTableRow,
    ProcessColumns,
    UnfinishedRank,
    WeightVerdictRow,
)
from stagescope_service.store.tables.training import ENDED
from stagescope_wire.names import BISECT, EXPERIMENT
from stagescope_wire.nonfinite import JsonObject

READ: Final = 3
"""Newest measured steps whose step summaries are read: they may be large."""
PARTIAL: Final = 200
"""Newest partial steps whose missing ranks are read."""
CAPTURES: Final = 8
"""Newest captured steps of an attempt that are looked at."""
SYNC: Final = "weight_sync"
"""The stage of a weight sync."""
_CACHED: Final = 16
"""Measured steps that a history and those of its earlier steps keep together."""


class RunHistory:
    """The history of the current steps of a run, or of one of its attempts.

    Args:
        catalogue: the reading side of the store.
        run: the run's name.
        attempt: only this attempt, by its number; None: all current steps.
        last: the last step to look at; None: the newest.
        kept: reads tensors; None: symptoms that need tensors are not measured.
        memory: what earlier histories of the run have read.
    """

    reads_every_step = True
    """Whether `measured` has the steps before the newest ones, too."""

    def __init__(
        self,
        catalogue: Catalogue,
        run: str,
        *,
        attempt: int | None = None,
        last: int | None = None,
        kept: KeptTensors | None = None,
        memory: RunMemory | None = None,
    ) -> None:
        self.run = run
        self.kept = kept
        self._catalogue = catalogue
        self._last = last
        self._memory = memory or RunMemory()
        rows = catalogue.attempts(run)
        self.attempts = sorted(
            (row for row in rows if attempt in (None, row["number"])), key=lambda row: row["number"]
        )
        self._rows = StepRows(catalogue, self.attempts, last, self._memory)
        self._reported = ReportedRows(catalogue, self._rows.ids, self._memory)
        self._ids, self._number = self._rows.ids, self._rows.number
        self._slices = StepSlices(catalogue, self._memory, self._rows)
        self.has_weights = lru_cache(maxsize=None)(self._has_weights)
        """Return whether weights were recorded in an attempt, by its number."""
        self.has_syncs = lru_cache(maxsize=None)(self._has_syncs)
        """Return whether an attempt, by its number, reported a weight sync."""
        self.facts = lru_cache(maxsize=_CACHED)(self._facts_of)
        """Return the facts of a step."""

    def until(self, last: int) -> Self:
        """Return the history up to the step `last`, without tensors."""
        found = object.__new__(type(self))
        found._adopt(self)
        found._last = last
        found._rows = self._rows.until(last)
        found.steps = self.steps[: len(found._rows)]
        return found

    def _adopt(self, other: RunHistory) -> None:
        """Take over what another history has read, without its tensors."""
        kinds = type(other).__mro__
        cached = {
            name
            for kind in kinds
            for name, value in vars(kind).items()
            if isinstance(value, cached_property)
        }
        vars(self).update({name: each for name, each in vars(other).items() if name not in cached})
        self.kept = None

    # --- steps ----------------------------------------------------------------------------------
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
        number = self._number
        return [
            CurrentStep(step, attempt_id, number[attempt_id], found.verdict, found.suspects)
            if found is not None
            else CurrentStep(step, attempt_id, number[attempt_id], None, ())
            for (attempt_id, step), found in self._rows.numbers_of_rows()
        ]

    @cached_property
    def measured(self) -> list[CurrentStep]:
        """The steps that have numbers, ascending."""
        return self._measured

    @cached_property
    def _measured(self) -> list[CurrentStep]:
        """The same, with numbers of all tokens."""
        return [step for step in self.steps if step.verdict is not None]

    @cached_property
    def suspects(self) -> Mapping[str, Int64]:
        """Check of the streams -> the places in `measured` of the steps that fail it."""
        found: dict[str, list[int]] = defaultdict(list)
        for at, step in enumerate(self.measured):
            for check in step.suspects:
                found[check].append(at)
        return {check: np.array(places, np.int64) for check, places in found.items()}

    def has_no_streams(self, step: CurrentStep) -> bool:
        """Return whether a step was aggregated as far as it can be, and has no numbers."""
        row = self._rows.of_step[step.step]
        is_due = row.parts_mark is not None and row.parts_mark != row.summary_mark
        return not (row.has_summary or is_due or row.rows_removed)

    def processes(self, attempt_id: int) -> list[ProcessColumns]:
        """Return the processes of an attempt."""
        return self._catalogue.processes(attempt_id)

    def partial(self) -> Series:
        """Return 1 for each step that closed without some of its ranks, else 0.

        Steps before the newest `PARTIAL` partial ones count as the oldest of these.
        """
        missing = self._missing
        oldest = float(bool(next(iter(missing.values()), ())))
        values = {
            at: (oldest if row.completeness == "partial" else 0.0)
            for at, row in enumerate(self._rows.rows)
        }
        if missing:
            lacks = {key: float(bool(ranks)) for key, ranks in missing.items()}
            values |= {at: lacks[key] for at, key in enumerate(self._rows.keys) if key in lacks}
        return self._rows.series_at("partial steps", values)

    def missing(self) -> dict[tuple[str, int], MissingRank]:
        """Return (role, rank) -> the newest `PARTIAL` partial steps that it is missing in."""
        found: dict[tuple[str, int], MissingRank] = {}
        for (_, step), ranks in self._missing.items():
            for each in ranks:
                rank = found.setdefault((each["role"], each["rank"]), MissingRank([], []))
                if rank.steps[-1:] != [step]:
                    rank.steps.append(step)
                if each["stage"] not in rank.stages:
                    rank.stages.append(each["stage"])
        return found

    @cached_property
    def _missing(self) -> dict[StepKey, list[UnfinishedRank]]:
        """The newest `PARTIAL` partial steps, ascending, and the ranks that each lacks."""
        rows = (row for row in self._rows.rows if row.completeness == "partial")
        partial = [(row.attempt_id, row.step) for row in rows][-PARTIAL:]
        found = missing_ranks(self._catalogue, self.attempts, partial)
        return {key: found.get(key, []) for key in partial}

    def cut_off_step(self, attempt_id: int) -> CutOffStep | None:
        """Return the first step that an attempt's end closed as partial; None: there is none."""
        rows = self._catalogue.steps(attempt_id, limit=NEWEST)
        keys = [
            (attempt_id, row["step"])
            for row in rows
            if (row["close_reason"], row["completeness"]) == (ENDED, "partial")
        ]
        found = missing_ranks(self._catalogue, self.attempts, keys)
        cut = [CutOffStep(step, ranks) for (_, step), ranks in found.items()]
        return min(cut, default=None, key=lambda each: each.step)

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
        return self.reports.newest_attempt_id

    # --- numbers --------------------------------------------------------------------------------
    def metric(self, name: str) -> Series:
        """Return a published number of the steps that have it."""
        return self._rows.metric(name)

    def slices(
        self, by: Dimension, name: str, steps: Sequence[CurrentStep] | None = None
    ) -> list[tuple[CurrentStep, Mapping[SliceKey, float]]]:
        """Return a published number of the slices of measured steps, ascending. Without `steps`,
        the newest measured steps are read."""
        chosen = self.measured[-NEWEST:] if steps is None else steps
        return self._slices.column(by, name, chosen)

    @cached_property
    def logged(self) -> LoggedScalars:
        """The numbers that the training logged."""
        return LoggedScalars(self._catalogue, self._memory, self._rows)

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

    @cached_property
    def pooled(self) -> PooledSteps | None:
        """The tokens of the newest steps of the newest attempt, as many as the checks need; None:
        there are none."""
        if not self.measured:
            return None
        newest = self.measured[-1].attempt
        own = (step for step in reversed(self.measured[-POOLED:]) if step.attempt == newest)
        found = (self.read(step) for step in own)
        return pool((each.step, each.summary) for each in found if each is not None)

    def read(self, step: CurrentStep) -> StepFacts | None:
        """Return a step with its statistics; None: this version can read none."""
        found = self.facts(step)
        return None if found.whole is None else found

    def _facts_of(self, step: CurrentStep) -> StepFacts:
        known = self._statistics.get((step.attempt_id, step.step))
        return StepFacts(self._catalogue, self.run, step.attempt_id, step.attempt, step.step, known)

    @cached_property
    def _statistics(self) -> Mapping[StepKey, StepStatistics]:
        """What earlier histories have computed of the newest measured steps."""
        newest = (self._rows.of_step[step.step] for step in self._measured[-NEWEST:])
        marks = {
            (row.attempt_id, row.step): (
                row.summary_wall, row.parts_mark, row.summary_mark, row.rows_removed
            )
            for row in newest
        }  # fmt: skip
        return self._memory.statistics.of(
            marks, lambda keys: {key: StepStatistics() for key in keys}
        )

    @cached_property
    def token_counts(self) -> Counter[int]:
        """Number of tokens -> the samples of the newest steps that have so many."""
        found: Counter[int] = Counter()
        newest = reversed(self.steps[-NEWEST:])
        for attempt_id, own in groupby(newest, key=lambda step: step.attempt_id):
            steps = [step.step for step in own]
            found += self._catalogue.token_counts(attempt_id, steps, limit=ROWS - found.total())
        return found

    @cached_property
    def groups(self) -> list[RewardGroupsRow]:
        """The groups of samples of each step that has some, ascending."""
        if not self._ids:
            return []

        def read(keys: Sequence[StepKey]) -> Mapping[StepKey, RewardGroupsRow]:
            rows = self._catalogue.reward_groups(self._ids, **window_of(keys))
            return {(row["attempt_id"], row["step"]): row for row in rows}

        return [*self._memory.groups.of(self._rows.closed, read).values()]

    def compared_weights(self, since: int | None) -> list[WeightVerdictRow]:
        """Return the verdicts on the weights of the newest attempt, from a step on."""
        if self.newest_attempt_id is None:
            return []
        rows = self._catalogue.weight_verdicts(self.newest_attempt_id)
        steps = [row for row in rows if row["step"] is not None]
        known = [row for row in steps if self.reports.is_known(row["step"])]
        return [row for row in known if since is None or (row["step"] or 0) >= since]

    @cached_property
    def canaries(self) -> list[CanaryAgreement]:
        """The canary's versions up to the last step, in order, by engine instance."""
        rows = self._catalogue.canary_agreements(self._ids)
        known = (row for row in rows if self.reports.is_known(row.step))
        return sorted(known, key=lambda row: (self._number[row.attempt_id], row.version))

    def _has_weights(self, attempt: int) -> bool:
        found = (id for id, number in self._number.items() if number == attempt)
        return any(self._catalogue.newest_weights(each) is not None for each in found)

    def has_compared_weights(self) -> bool:
        """Return whether weights of both sides of a sync were compared, up to the last step."""
        verdicts = (row for each in self._ids for row in self._catalogue.weight_verdicts(each))
        return any(
            row["agree"] or row["differ"] for row in verdicts if self.reports.is_known(row["step"])
        )

    def has_operators(self) -> bool:
        """Return whether operators of a step up to the last one were captured."""
        steps = (
            step for each in self._ids for step in self._catalogue.operator_steps(each, limit=STEPS)
        )
        return any(map(self.reports.is_known, steps))

    def captured_after(self, attempt: int, step: int) -> Iterator[CurrentStep]:
        """Yield the current captured steps after a step of an attempt (its number), newest first:
        at most `CAPTURES` of each attempt."""
        for attempt_id in reversed(self._ids):
            number = self._number[attempt_id]
            for found in self._catalogue.operator_steps(attempt_id, limit=CAPTURES):
                if (number, found) > (attempt, step) and self.attempt_of(found) == number:
                    yield CurrentStep(found, attempt_id, number, None, ())

    def operators(self, attempt_id: int, step: int) -> list[OperatorTableRow]:
        """Return the operator tables of a step."""
        return self._catalogue.operators(attempt_id, step)

    def _has_syncs(self, attempt: int) -> bool:
        found = (id for id, number in self._number.items() if number == attempt)
        return any(self._catalogue.stages(each, stage=SYNC, limit=1) for each in found)

    # --- what else the service knows --------------------------------------------------------------
    @cached_property
    def reports(self) -> KnownReports:
        """The findings and the lost data that were known at the last step."""
        return KnownReports(self._reported, self._rows, self._last)

    @property
    def findings(self) -> list[FindingRow]:
        """The findings of current steps, the most recently seen first."""
        return self.reports.findings

    @property
    def losses(self) -> list[LossRow]:
        """Announced data of current steps that never arrived."""
        return self.reports.losses

    def findings_of(self, kinds: Iterable[str]) -> list[FindingRow]:
        """Return those of some kinds (patterns with `*`), in the same order."""
        return self.reports.of(kinds)

    def settings(self, name: str) -> Mapping[str, object]:
        """Return a settings table of the newest attempt that has one."""
        for attempt_id in reversed(self._ids):
            for settings in self._catalogue.settings_with(attempt_id, name):
                table = settings.get(name)
                if isinstance(table, Mapping):
                    return table
        return {}

    @cached_property
    def bisections(self) -> list[JsonObject]:
        """What `stagescope bisect` reported of measured steps, the newest report first."""
        attempts = {step.step: step.attempt for step in self.measured}
        return [
            row
            for row in self._catalogue.settings_of_runs(f"{EXPERIMENT}{self.run}-", BISECT)
            if row.get("run") == self.run and row.get("step") in attempts
            if row.get("attempt") in (None, attempts[row["step"]])
        ]

    def stage_seconds(self) -> dict[tuple[str, str], dict[int, dict[int, float]]]:
        """Return (stage, role) -> step -> rank -> seconds, of the newest steps."""
        found: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
        for attempt_id, own in groupby(self.steps[-NEWEST:], key=lambda step: step.attempt_id):
            steps = [step.step for step in own]
            rows = self._catalogue.stage_seconds(attempt_id, steps)
            for step, stage, role, rank, seconds in rows:
                of_step = found.setdefault((stage, role), {}).setdefault(step, {})
                of_step[rank] = of_step.get(rank, 0.0) + max(seconds, 0.0)
        return found
