"""Reads the numbers of a run's steps as lines, and what happened in the steps as marks."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from stagescope_service.figures.lines import Line, Mark, NotFinite, Place, ranges
from stagescope_service.statistics.step_metrics import (
    OF_STALENESS,
    STALENESSES,
    VERSION,
    floor_name,
    staleness_name,
)
from stagescope_service.store.queries.curves import MarkedStep, StoredNumbers
from stagescope_service.store.tables.declare import nonfinite_name
from stagescope_service.views.reading.completeness import aggregation_errors
from stagescope_service.views.reading.dependencies import Dependencies, Window
from stagescope_service.views.reading.rows import Lineage
from stagescope_service.views.series_points import (
    ABSENT,
    NOT_LOGGED,
    NOT_STORED,
    OPEN,
    why_unmeasured,
)
from stagescope_wire.names import unit_of_metric
from stagescope_wire.render import counted

Value = float | str | None


@dataclasses.dataclass(frozen=True)
class Panel:
    """One metric or scalar."""

    name: str
    unit: str
    lines: tuple[Line, ...]
    not_finite: tuple[NotFinite, ...] = ()
    floor: tuple[Line, ...] = ()
    """The noise floor: the same number of the trainer against itself, where it was recorded."""
    stalenesses: tuple[tuple[int, tuple[Line, ...]], ...] = ()
    """(staleness, lines), if tokens of several stalenesses were trained on."""

    @property
    def has_values(self) -> bool:
        """Whether any step has a finite value."""
        return any(line.has_values for line in self.lines)


@dataclasses.dataclass(frozen=True)
class CurveRequest:
    """The request for a figure."""

    metrics: Sequence[str] = ()
    """Names of published metrics or scalars; none: the reward and the mismatch, else scalars."""
    attempt: int | None = None
    window: Window = dataclasses.field(default_factory=lambda: Window(first=None, last=None))
    superseded: bool = True
    smooth: float | None = None


class _Column(NamedTuple):
    """A number by step; steps without it are missing in both."""

    finite: dict[Place, float]
    bad: dict[Place, str]
    """nan, inf or -inf."""

    @classmethod
    def from_values(cls, values: Iterable[tuple[Place, Value]]) -> _Column:
        """Split values into finite and other ones."""
        known = {key: value for key, value in values if value is not None}
        bad = {key: value for key, value in known.items() if isinstance(value, str)}
        finite = {k: v for k, v in known.items() if not isinstance(v, str)} if bad else known
        return cls(finite, bad)  # type: ignore[arg-type]


def _columns(stored: StoredNumbers) -> list[_Column]:
    """Return a column for each of the requested names."""
    return [
        _Column.from_values(zip(stored.places, values, strict=True)) for values in stored.values
    ]


class CurveReader:
    """Reads the catalogue's columns of some attempts, each once."""

    def __init__(
        self,
        deps: Dependencies,
        run: str,
        ids: Sequence[int],
        window: Window,
        lineage: Lineage,
        request: CurveRequest,
    ) -> None:
        self._deps, self._ids, self._window, self._lineage = deps, ids, window, lineage
        self.run = run
        self.states: dict[Place, bool] = {}
        """Step -> whether a later attempt did it again; ascending by step."""
        self._closed: dict[Place, float | None] = {}
        """Step -> when it closed; ascending by step."""
        seen: set[int] = set()
        for state in reversed(deps.catalogue.step_states(ids, **window)):
            self._closed[state.attempt_id, state.step] = state.closed_wall
            by = state.superseded_by or lineage.repeated_by(state.attempt_id, state.step)
            again = state.step in seen or by is not None
            seen.add(state.step)
            # An attempt that is requested by its number shows all of its steps.
            if request.superseded or request.attempt is not None or not again:
                self.states[state.attempt_id, state.step] = again
        self.states = dict(reversed(self.states.items()))
        self._closed = dict(reversed(self._closed.items()))
        groups: dict[tuple[int, bool], list[Place]] = defaultdict(list)
        for key, again in self.states.items():
            groups[lineage.numbers[key[0]], again].append(key)
        self._groups = sorted(groups.items())
        self._reasons: dict[Place, str] | None = None
        self._absent: dict[str, list[Place]] = {}

    # --- metrics and scalars -----------------------------------------------------------------
    def metric_panels(self, names: Sequence[str]) -> dict[str, list[Panel]]:
        """Return name -> the panel of a published metric."""
        floors = [floor_name(name) for name in names]
        stored = self._stored([*names, *floors])
        columns = _columns(stored)
        sliced = self._of_stalenesses(names) if stored.several_versions else {}
        measured = [key for key in stored.places if key in self.states]
        panels: dict[str, list[Panel]] = {}
        for at, name in enumerate(names):
            column, floor = columns[at], columns[len(names) + at]
            known = column.finite.keys() | column.bad.keys()
            self._absent[name] = [key for key in measured if key not in known]
            panels[name] = [
                Panel(
                    name,
                    unit_of_metric(name),
                    self._lines(column),
                    self._not_finite(column),
                    self._lines(floor),
                    tuple(
                        (k, lines)
                        for k, of in sliced.items()
                        if name in of and (lines := self._lines(of[name]))
                    ),
                )
            ]
        return panels

    def _stored(self, names: Sequence[str]) -> StoredNumbers:
        return self._deps.catalogue.stored_numbers(
            self._ids, names, version=VERSION, **self._window
        )

    def _of_stalenesses(self, names: Sequence[str]) -> dict[int, Mapping[str, _Column]]:
        """Return staleness -> name -> values, if tokens of several stalenesses count."""
        sliced = [name for name in names if name in OF_STALENESS]
        wanted = [staleness_name(k, name) for k in STALENESSES for name in sliced]
        columns = iter(_columns(self._stored(wanted)))
        return {k: {name: next(columns) for name in sliced} for k in STALENESSES}

    def scalar_panels(self, name: str) -> list[Panel]:
        """Return a panel for each stage and role that logged a scalar: the mean over its ranks."""
        series: dict[tuple[str | None, str | None], list[tuple[Place, Value]]] = defaultdict(list)
        catalogue, memory = self._deps.catalogue, self._deps.memories.of(self.run)
        logged = memory.scalar(catalogue, self._ids, name, self._closed)
        for key, means in logged.items():
            for each in means:
                series[each.stage, each.role].append((key, nonfinite_name(each.mean) or each.mean))
        self._absent[name] = [key for key in self.states if key not in logged]
        several = len(series) > 1
        panels = []
        for place, values in sorted(series.items(), key=str):
            label = f"{name} ({' '.join(part for part in place if part)})" if several else name
            column = _Column.from_values(values)
            lines, bad = self._lines(column), self._not_finite(column)
            panels.append(Panel(label, unit_of_metric(name), lines, bad))
        return panels or [Panel(name, "", ())]

    def _lines(self, column: _Column) -> tuple[Line, ...]:
        """Return a line for each attempt, and another for the steps that a later one repeated."""
        if not column.finite:
            return ()
        get = column.finite.get
        return tuple(
            Line(number, again, tuple(step for _, step in keys), tuple(map(get, keys)))
            for (number, again), keys in self._groups
        )

    def _not_finite(self, column: _Column) -> tuple[NotFinite, ...]:
        found = [
            NotFinite(step, self._lineage.numbers[attempt_id], value)
            for (attempt_id, step), value in column.bad.items()
            if (attempt_id, step) in self.states
        ]
        return tuple(sorted(found))

    # --- marks ---------------------------------------------------------------------------------
    def gaps(self, metrics: Collection[str]) -> list[Mark]:
        """Return the steps without a value, with the reason."""
        if self._reasons is None:
            self._reasons = self._why()
        found: list[Mark] = []
        if metrics:
            found += ranges("no value", "", self._reasons)
        for name, keys in self._absent.items():
            is_scalar = name not in metrics
            reason = NOT_LOGGED if is_scalar else ABSENT
            texts = dict.fromkeys(keys, f"{name}: {reason}")
            if is_scalar:
                texts |= {k: f"{name}: {OPEN}" for k in keys if self._reasons.get(k) == OPEN}
            found += ranges("no value", "", texts)
        return found

    def _why(self) -> dict[Place, str]:
        """Return why steps have no numbers, in the order of the steps."""
        catalogue = self._deps.catalogue
        rows = catalogue.unmeasured_steps(self._ids, version=VERSION, **self._window)
        rows = [row for row in rows if (row["attempt_id"], row["step"]) in self.states]
        if not rows:
            return {}
        errors = aggregation_errors(catalogue, self._ids)
        losses = {
            (row["attempt_id"], row["step"]): f"{counted(row['count'], 'payload')} lost: "
            f"{row['reason']:.100}"
            for row in catalogue.lost_payloads(self._ids, **self._window)
        }
        reasons = {}
        for row in rows:
            key = (row["attempt_id"], row["step"])
            why = why_unmeasured(row, errors.get(key), losses.get(key))
            reasons[key] = NOT_STORED if row["has_summary"] else why
        return reasons

    def weight_syncs(self) -> list[Mark]:
        """Return the steps that sent weights to the rollout."""
        steps = self._deps.catalogue.steps_with_stage(self._ids, "weight_sync", **self._window)
        text = "weights were synchronised"
        return ranges("weight sync", "", {(0, step): text for step in steps})

    def captures(self) -> list[Mark]:
        """Return the steps with dumps."""
        rows = self._deps.catalogue.dumps_by_step(self._ids, **self._window)
        return [
            Mark(
                "capture", row.severity or "", row.step, row.step,
                f"capture {row.kind}: {counted(row.times, 'dump')} of {row.text}, "
                f"{row.severity or 'state unknown'}",
            )
            for row in self._shown(rows)
        ]  # fmt: skip

    def findings(self) -> list[Mark]:
        """Return the steps with findings, the worst severity of each last."""
        rows = self._deps.catalogue.findings_by_step(self._ids, **self._window)
        return [
            Mark("finding", row.severity or "", row.step, row.step,
                 f"{row.kind}: {row.text:.200}" + (f" ({row.times})" if row.times > 1 else ""))
            for row in self._shown(rows)
        ]  # fmt: skip

    def _shown(self, rows: Iterable[MarkedStep]) -> list[MarkedStep]:
        return [row for row in rows if (row.attempt_id, row.step) in self.states]
