"""The published numbers of the slices of steps: of their ranks, rounds, turns and stalenesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stagescope_service.rules.memory import NEWEST, RunMemory
from stagescope_service.rules.missing import StepKey
from stagescope_service.rules.step_rows import StepRows
from stagescope_service.rules.steps import CurrentStep
from stagescope_service.statistics.step_metrics import VERSION, Dimension, SliceKey, SliceMetrics
from stagescope_service.store.catalogue import Catalogue


class StepSlices:
    """Reads the numbers of the slices of steps, each once.

    Args:
        catalogue: the reading side of the store.
        memory: what was read of the run before.
        rows: the current closed steps.
    """

    def __init__(self, catalogue: Catalogue, memory: RunMemory, rows: StepRows) -> None:
        self._catalogue = catalogue
        self._memory = memory
        self._rows = rows

    def column(
        self, by: Dimension, name: str, steps: Sequence[CurrentStep]
    ) -> list[tuple[CurrentStep, Mapping[SliceKey, float]]]:
        """Return a published number of the slices of some measured steps, ascending."""
        if by == "rank" or len(steps) <= NEWEST:  # ranks of many steps are not remembered
            return [(step, slices.column(by, name)) for step, slices in self._slices_of(steps)]
        of = {(step.attempt_id, step.step): step for step in steps}

        def read(keys: Sequence[StepKey]) -> Mapping[StepKey, Mapping[SliceKey, float]]:
            found = self._slices_of([of[key] for key in keys])
            return {(step.attempt_id, step.step): slices.column(by, name) for step, slices in found}

        found = self._memory.slices[by, name].of(self._rows.summary_walls(of), read)
        return [(of[key], column) for key, column in found.items()]

    def _slices_of(self, steps: Sequence[CurrentStep]) -> list[tuple[CurrentStep, SliceMetrics]]:
        """Return all numbers of the slices of steps; those of a few are remembered."""
        if len(steps) > NEWEST:
            return self._read(steps)
        of = {(step.attempt_id, step.step): step for step in steps}

        def read(keys: Sequence[StepKey]) -> Mapping[StepKey, SliceMetrics]:
            found = self._read([of[key] for key in keys])
            return {(step.attempt_id, step.step): slices for step, slices in found}

        found = self._memory.few_slices.of(self._rows.summary_walls(of), read)
        return [(of[key], slices) for key, slices in found.items()]

    def _read(self, steps: Sequence[CurrentStep]) -> list[tuple[CurrentStep, SliceMetrics]]:
        if not steps:
            return []
        first, last = steps[0].step, steps[-1].step
        wanted = {(step.attempt_id, step.step): step for step in steps}
        found: list[tuple[CurrentStep, SliceMetrics]] = []
        for row in self._catalogue.step_metrics(
            self._rows.ids, version=VERSION, first=first, last=last, numbers="slices"
        ):
            step = wanted.get((row["attempt_id"], row["step"]))
            blob = row.get("slices")
            if step is not None and blob is not None:
                found.append((step, SliceMetrics.from_bytes(blob)))
        return found[::-1]
