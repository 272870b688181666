"""The facts of one closed step that rules and symptoms judge, read from the store."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import cached_property, lru_cache
from typing import Final, TypeVar, cast

from stagescope_service.rules.missing import missing_then
from stagescope_service.rules.passes import FirstPass, first_passes, passes_apart
from stagescope_service.statistics.comparability import Comparability, examine
from stagescope_service.statistics.mismatch import publish
from stagescope_service.statistics.part import PartRecord
from stagescope_service.statistics.step_summary import (
    MISMATCH_PAIRS,
    NOISE_PAIR,
    StepSummary,
    assemble,
)
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.parts import pair_name, part_records
from stagescope_service.store.tables import ScalarRow, StepRow, UnfinishedRank
from stagescope_service.store.tables.declare import NON_FINITE_NAMES
from stagescope_wire.errors import InvalidInput
from stagescope_wire.tensors import CURRENT_ALONE, UPDATE_PAIR

logger = logging.getLogger(__name__)

RankStage = tuple[str, str, int]
"""(stage, role, rank)."""
_ALL: Final = 1_000_000

T = TypeVar("T")


class StepStatistics:
    """What was read and computed of a step's statistics; valid while the step has the same mark.

    The parts themselves are left out, because they may be large.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, object] = {}

    def of(self, name: Hashable, compute: Callable[[], T]) -> T:
        """Return what has a name; it is computed when it is first asked for."""
        if name not in self._known:
            self._known[name] = compute()
        return cast("T", self._known[name])


class StepFacts:
    """The facts of a step. Each is read from the catalogue when it is first asked for.

    Args:
        catalogue: the reading side of the store.
        run: the run's name.
        attempt_id: of the attempt, in the catalogue.
        attempt: its number in the run.
        step: the step.
        known: what earlier facts of the step have computed; None: nothing.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        run: str,
        attempt_id: int,
        attempt: int,
        step: int,
        known: StepStatistics | None = None,
    ) -> None:
        self._catalogue = catalogue
        self.run = run
        self.attempt_id = attempt_id
        self.attempt = attempt
        self.step = step
        self._known = known or StepStatistics()
        self._of_stage = lru_cache(maxsize=None)(self._read_stage)

    @cached_property
    def row(self) -> StepRow | None:
        """The row of the step; None: there is none."""
        return self._catalogue.step(self.attempt_id, self.step)

    @property
    def is_closed(self) -> bool:
        """Whether the step is closed."""
        return self.row is not None and self.row["closed_wall"] is not None

    # --- statistics -----------------------------------------------------------------------------
    @cached_property
    def whole(self) -> StepSummary | None:
        """The statistics of the step; None: none, or another version wrote them."""
        return self._known.of("whole", self._read_whole)

    def _read_whole(self) -> StepSummary | None:
        if self.row is None or self.row["step_summary"] is None:
            return None
        try:
            return StepSummary.from_bytes(self.row["step_summary"])
        except InvalidInput:
            logger.warning("The stored summary of step %s cannot be read", self.step, exc_info=True)
            return None

    @property
    def summary(self) -> StepSummary:
        """The statistics of a step that has some."""
        assert self.whole is not None
        return self.whole

    def of_stage(self, stage: str | None) -> StepSummary | None:
        """Return the statistics of a stage, or of the step if it is None; None: there are none."""
        if self.whole is None or stage in (None, self.whole.stage):
            return self.whole
        return self._of_stage(stage)

    @cached_property
    def stages(self) -> list[str]:
        """The stages that have both streams."""
        if self.whole is None:
            return []
        found = {part.stage for part in self._parts if part.summary.pair in MISMATCH_PAIRS}
        return sorted(found | {self.whole.stage})

    @cached_property
    def published(self) -> Mapping[str, float]:
        """The published numbers."""
        return self._known.of("published", lambda: publish(self.summary.summary))

    @cached_property
    def published_noise(self) -> Mapping[str, float] | None:
        """The published numbers of the trainer against itself; None: not recorded."""
        found = self.noise(self.summary.stage)
        return None if found is None else publish(found.summary)

    @cached_property
    def comparability(self) -> Comparability:
        """Whether the streams can be compared."""
        return self._known.of(
            "comparability", lambda: examine(self.summary.summary, self.summary.ranks)
        )

    def _read_stage(self, stage: str) -> StepSummary | None:
        return assemble(self._parts, stage=stage) if stage in self.stages else None

    def noise(self, stage: str) -> StepSummary | None:
        """Return the statistics of the trainer against itself in a stage; None: not recorded."""
        return self._known.of(("noise", stage), lambda: self._read_noise(stage))

    def _read_noise(self, stage: str) -> StepSummary | None:
        try:
            return assemble(self.parts(NOISE_PAIR), stage=stage, pairs=[NOISE_PAIR])
        except InvalidInput:  # no rank handed over recomputed_log_probs there
            return None

    @property
    def _pairs(self) -> Set[str]:
        """The names of the pairs of streams that ranks reported."""
        return self._known.of(
            "pairs", lambda: self._catalogue.summary_pairs(self.attempt_id, self.step)
        )

    @cached_property
    def _parts(self) -> list[PartRecord]:
        return self.parts()

    def parts(self, pair: tuple[str, str] | None = None) -> list[PartRecord]:
        """Return the report of each rank on a pair of streams, or on every pair; [] if it cannot be
        read."""
        name = None if pair is None else pair_name(pair)
        if name is not None and name not in self._pairs:
            return []
        rows = self._catalogue.summaries(self.attempt_id, self.step, pair=name)
        if not rows:
            return []
        replaced = self._catalogue.replaced(self.attempt_id, self.step)
        try:
            return part_records(rows, self._catalogue.processes(self.attempt_id), replaced)
        except InvalidInput:
            logger.warning("The parts of step %s cannot be read", self.step, exc_info=True)
            return []

    @cached_property
    def first_passes(self) -> list[FirstPass]:
        """The samples of the first mini-batch: current against old log-probs."""
        together = self.parts(UPDATE_PAIR)
        if together:
            return first_passes(together)
        current = self.parts(("current", "rollout")) or self.parts(CURRENT_ALONE)
        return passes_apart(current, self.parts(("old", "rollout"))) if current else []

    # --- events ---------------------------------------------------------------------------------
    @cached_property
    def missing(self) -> Sequence[UnfinishedRank]:
        """The ranks that did not end a stage, without those that never run it."""
        stored = () if self.row is None else self.row["missing"] or ()
        if not stored:
            return ()
        return missing_then(self._catalogue, self.run, self.attempt, self.step, stored)

    @cached_property
    def seconds(self) -> Mapping[RankStage, float]:
        """The time that each rank spent in each stage: the sum of its parts."""
        found: dict[RankStage, float] = defaultdict(float)
        for row in self._catalogue.stages(self.attempt_id, self.step, limit=_ALL):
            if row["begin_mono"] is not None and row["end_mono"] is not None:
                key = (row["stage"], row["role"], row["rank"])
                found[key] += max(row["end_mono"] - row["begin_mono"], 0.0)
        return dict(found)

    @cached_property
    def scalars(self) -> Sequence[ScalarRow]:
        """The scalars that are NaN or infinite, in the order of their logging."""
        rows = self._catalogue.scalars(
            self.attempt_id, self.step, nonfinite=NON_FINITE_NAMES, limit=_ALL
        )
        return sorted(rows, key=lambda row: row["wall"])
