"""Queries about rollouts that a trainer consumed: samples and payloads of other processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import sqlalchemy as sa

from stagescope.wire.schema import STEP_SUMMARY_STAGES
from stagescope_service.store.queries.overview import ListedAttempt
from stagescope_service.store.snapshot import Query
from stagescope_service.store.tables import payloads, samples

TRAINER_STAGES: Final = tuple(name for name in STEP_SUMMARY_STAGES if name != "rollout_generate")
MAX_VERSIONS: Final = 100
"""Maximum policy versions of a step's samples; the newest are used."""

REUSED_STEPS: Final = 8
"""Maximum distance in steps at which a consumed sample may be consumed again."""


def side_by_side(attempts: Sequence[ListedAttempt], attempt_id: int) -> list[int]:
    """Return the attempts of a run that were live at the same time as `attempt_id`, and itself."""
    own = next((row for row in attempts if row["attempt_id"] == attempt_id), None)
    if own is None:
        return [attempt_id]
    return [
        row["attempt_id"]
        for row in attempts
        if row["opened_wall"] <= own["last_wall"] and row["last_wall"] >= own["opened_wall"]
    ]


def consumed_samples(attempt_ids: Sequence[int], attempt_id: int, step: int) -> Query:
    """Select the rows that other processes' rollouts wrote for the samples that a step consumed."""
    consumed = sa.select(samples.c.sample_uid).where(
        samples.c.attempt_id == attempt_id,
        samples.c.step == step,
        samples.c.clock == f"s{step}",
        samples.c.consumed_step == step,
    )
    # Three selects instead of one OR: each then uses an index. Consumed samples have their step
    # filled in, so few are without one.
    numbers = (step - REUSED_STEPS, step + REUSED_STEPS)
    cases = (
        samples.c.clock.like("v%") & samples.c.step.is_(None),
        samples.c.clock.like("v%") & samples.c.step.between(*numbers),
        (samples.c.attempt_id != attempt_id)
        & (samples.c.step == step)
        & (samples.c.clock == f"s{step}"),
    )
    chosen = samples.c.attempt_id.in_(attempt_ids) & samples.c.sample_uid.in_(consumed)
    found = sa.union_all(*(sa.select(samples).where(chosen, case) for case in cases))
    return sa.select(found.subquery())


def rollout_payloads(
    attempt_ids: Sequence[int], step: int, versions: Collection[int | None]
) -> Query:
    """Select ingested payloads of a step, or of no step and one of `versions`, oldest first.

    Args:
        attempt_ids: ids of the attempts.
        step: the step.
        versions: policy versions; None selects payloads without one.
    """
    chosen = (
        payloads.c.attempt_id.in_(attempt_ids)
        & (payloads.c.state == "ingested")
        & payloads.c.stage.not_in(TRAINER_STAGES)
    )
    # One select each instead of IN: SQLite then uses the index of payloads without a step.
    newest = sorted(versions, key=lambda version: (version is not None, version))[-MAX_VERSIONS:]
    cases = (
        payloads.c.step == step,
        *(payloads.c.step.is_(None) & (payloads.c.policy_version == each) for each in newest),
    )
    found = sa.union_all(*(sa.select(payloads).where(chosen, case) for case in cases)).subquery()
    return sa.select(found).order_by(found.c.announced_wall, found.c.incarnation, found.c.seq)
