"""The inputs of rules for one step, read from the catalogue, for live evaluation and dry runs."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from stagescope.wire.errors import InvalidInput
from stagescope_service.rules import names
from stagescope_service.rules.document import Rule
from stagescope_service.statistics.part import PartRecord
from stagescope_service.statistics.step_summary import (
    MISMATCH_PAIRS,
    NOISE_PAIR,
    StepSummary,
    assemble,
)
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.columns import NON_FINITE_NAMES
from stagescope_service.store.parts import pair_name, part_records
from stagescope_service.store.queries.overview import ListedAttempt
from stagescope_service.store.tables import ScalarRow, UnfinishedRank

logger = logging.getLogger(__name__)

RankStage = tuple[str, str, int]
"""(stage, role, rank)."""

_ALL: Final = 1_000_000


@dataclasses.dataclass(frozen=True)
class Needs:
    """The inputs that the active rules need besides the step summary; others are not read."""

    noise: bool = False
    stages: frozenset[str] | None = frozenset()
    """Stages whose own statistics are needed; None for every stage."""
    seconds: bool = False
    scalars: bool = False
    """Whether a rule counts non-finite scalars."""

    @classmethod
    def from_rules(cls, rules: Iterable[Rule]) -> Needs:
        """Return the needs of these rules."""
        rules = list(rules)
        measured = [rule for rule in rules if not rule.of_stages]
        named = frozenset(rule.stage for rule in measured if rule.stage is not None)
        every = any(rule.by == "stage" and rule.stage is None for rule in measured)
        return cls(
            noise=any(rule.when.noise_ratio is not None for rule in measured),
            stages=None if every else named,
            seconds=any(rule.metric == names.STAGE_SECONDS for rule in rules),
            scalars=any(rule.of_scalars for rule in rules),
        )


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of a closed step.

    Attributes:
        attempt: The attempt's number in its run.
        summaries: Stage -> its statistics; key None is the step summary itself.
        noise: The same for the noise floor.
        missing: Ranks that did not end a stage.
        seconds: (stage, role, rank) -> the time that the rank spent in the stage.
        scalars: Those that are NaN or infinite, in the order of their logging.
    """

    run: str
    attempt_id: int
    attempt: int
    step: int
    summaries: Mapping[str | None, StepSummary]
    noise: Mapping[str | None, StepSummary]
    missing: Sequence[UnfinishedRank]
    seconds: Mapping[RankStage, float]
    scalars: Sequence[ScalarRow] = ()


def read(catalogue: Catalogue, attempt: ListedAttempt, number: int, needs: Needs) -> Facts | None:
    """Read a step of an attempt; None if it is not closed."""
    attempt_id = attempt["attempt_id"]
    row = catalogue.step(attempt_id, number)
    if row is None or row["closed_wall"] is None:
        return None
    summaries: dict[str | None, StepSummary] = {}
    noise: dict[str | None, StepSummary] = {}
    if row["step_summary"] is not None:
        try:
            step_summary = summaries[None] = StepSummary.from_bytes(row["step_summary"])
            summaries[step_summary.stage] = step_summary
            _add_stages(catalogue, attempt_id, number, needs, summaries)
            if needs.noise:
                _add_noise(catalogue, attempt_id, number, summaries, noise)
        except InvalidInput:
            # Written by another version: one step of a run's history must not disable its triggers.
            logger.warning("The stored summary of step %s cannot be read", number, exc_info=True)
    return Facts(
        run=attempt["run"],
        attempt_id=attempt_id,
        attempt=attempt["number"],
        step=number,
        summaries=summaries,
        noise=noise,
        missing=list(row["missing"] or ()),
        seconds=_seconds(catalogue, attempt_id, number) if needs.seconds else {},
        scalars=_non_finite_scalars(catalogue, attempt_id, number) if needs.scalars else (),
    )


def _add_stages(
    catalogue: Catalogue,
    attempt_id: int,
    step: int,
    needs: Needs,
    summaries: dict[str | None, StepSummary],
) -> None:
    """Add the statistics of the other stages that a rule reads."""
    if needs.stages is not None and needs.stages <= summaries.keys():
        return
    parts = _parts(catalogue, attempt_id, step)
    present = {part.stage for part in parts if part.summary.pair in MISMATCH_PAIRS}
    wanted = present if needs.stages is None else present & needs.stages
    for stage in sorted(wanted - summaries.keys()):
        summaries[stage] = assemble(parts, stage=stage)


def _add_noise(
    catalogue: Catalogue,
    attempt_id: int,
    step: int,
    summaries: Mapping[str | None, StepSummary],
    noise: dict[str | None, StepSummary],
) -> None:
    parts = _parts(catalogue, attempt_id, step, pair=pair_name(NOISE_PAIR))
    for stage, step_summary in summaries.items():
        try:
            noise[stage] = assemble(parts, stage=step_summary.stage, pairs=[NOISE_PAIR])
        except InvalidInput:  # noqa: PERF203 - no rank handed over recomputed_log_probs there
            continue


def _parts(
    catalogue: Catalogue, attempt_id: int, step: int, pair: str | None = None
) -> list[PartRecord]:
    rows = catalogue.summaries(attempt_id, step, pair=pair)
    if not rows:
        return []
    replaced = catalogue.replaced(attempt_id, step)
    return part_records(rows, catalogue.processes(attempt_id), replaced)


def _non_finite_scalars(catalogue: Catalogue, attempt_id: int, step: int) -> list[ScalarRow]:
    rows = catalogue.scalars(attempt_id, step, nonfinite=NON_FINITE_NAMES, limit=_ALL)
    return sorted(rows, key=lambda row: row["wall"])


def _seconds(catalogue: Catalogue, attempt_id: int, step: int) -> dict[RankStage, float]:
    """Return the time that each rank spent in each stage: the sum of its parts."""
    found: dict[RankStage, float] = defaultdict(float)
    for row in catalogue.stages(attempt_id, step, limit=_ALL):
        if row["begin_mono"] is not None and row["end_mono"] is not None:
            key = (row["stage"], row["role"], row["rank"])
            found[key] += max(row["end_mono"] - row["begin_mono"], 0.0)
    return dict(found)
