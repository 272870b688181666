"""Queries about rollouts that a trainer consumed: samples and payloads of other processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import sqlalchemy as sa

from stagescope.schema import WHOLE_STAGES
from stagescope_service.store.base import Row
from stagescope_service.store.snapshot import Query
from stagescope_service.store.tables import payloads, samples

TRAINER_STAGES: Final = tuple(name for name in WHOLE_STAGES if name != "rollout_generate")
REUSED_STEPS: Final = 8
"""A sample that a step so many steps away consumed may be consumed once more."""


def side_by_side(attempts: Sequence[Row], attempt_id: int) -> list[int]:
    """Return the attempts of a run that were live while `attempt_id` was, itself among them."""
    own = next((row for row in attempts if row["attempt_id"] == attempt_id), None)
    if own is None:
        return [attempt_id]
    return [
        row["attempt_id"]
        for row in attempts
        if row["opened_wall"] <= own["last_wall"] and row["last_wall"] >= own["opened_wall"]
    ]


def consumed_samples(attempt_ids: Sequence[int], attempt_id: int, step: int) -> Query:
    """Select the rows that other processes' rollouts wrote of the samples that a step consumed."""
    consumed = sa.select(samples.c.sample_uid).where(
        samples.c.attempt_id == attempt_id,
        samples.c.step == step,
        samples.c.clock == f"s{step}",
        samples.c.consumed_step == step,
    )
    # Consumed ones have their step filled in, so few are without one and an index finds them.
    near = samples.c.step.between(step - REUSED_STEPS, step + REUSED_STEPS)
    stepless = samples.c.clock.like("v%") & (samples.c.step.is_(None) | near)
    elsewhere = (samples.c.attempt_id != attempt_id) & (samples.c.clock == f"s{step}")
    return sa.select(samples).where(
        samples.c.attempt_id.in_(attempt_ids),
        stepless | elsewhere,
        samples.c.sample_uid.in_(consumed),
    )


def rollout_payloads(
    attempt_ids: Sequence[int], step: int, versions: Collection[int | None]
) -> Query:
    """Select ingested payloads of a step, or of no step and one of `versions`, oldest first.

    Args:
        attempt_ids: of these attempts.
        step: the step.
        versions: policy versions; None for those that said none.
    """
    numbers = [version for version in versions if version is not None]
    unnumbered = payloads.c.policy_version.is_(None) if None in versions else sa.false()
    of_version = payloads.c.policy_version.in_(numbers) | unnumbered
    return (
        sa.select(payloads)
        .where(
            payloads.c.attempt_id.in_(attempt_ids),
            (payloads.c.step == step) | (payloads.c.step.is_(None) & of_version),
            payloads.c.state == "ingested",
            payloads.c.stage.not_in(TRAINER_STAGES),
        )
        .order_by(payloads.c.announced_wall, payloads.c.incarnation, payloads.c.seq)
    )
