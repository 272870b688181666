"""Queries for samples, and for the rollouts that a trainer consumed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final, TypedDict

import sqlalchemy as sa
from typing_extensions import Unpack

from stagescope_service.store.queries.overview import ListedAttempt
from stagescope_service.store.queries.reader import (
    LIMIT,
    Filter,
    Reader,
    StepWindow,
    conditions,
    in_window,
)
from stagescope_service.store.snapshot import Query
from stagescope_service.store.tables import PayloadRow, SampleRow, payloads, samples
from stagescope_wire.schema import STEP_SUMMARY_STAGES

TRAINER_STAGES: Final = tuple(name for name in STEP_SUMMARY_STAGES if name != "rollout_generate")
MAX_VERSIONS: Final = 100
"""Maximum policy versions of a step's samples; the newest are used."""

_MOST: Final = 1.7e308
"""Nearly the largest finite number: a NaN or an infinity is not between it and its negative."""
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


class RewardGroupsRow(TypedDict):
    """The number of groups of samples in a step, by their rewards.

    `rewarded` groups have two samples and more, each with a finite reward. `equal` ones have a
    single reward. `low` and `high` ones have only the step's `lowest` or `highest` reward (null:
    none is rewarded).
    """

    attempt_id: int
    step: int
    groups: int
    single: int
    rewarded: int
    equal: int
    low: int
    high: int
    lowest: float | None
    highest: float | None


class RolloutQueries(Reader):
    """Queries for samples, and for the rollouts that a trainer consumed."""

    def samples(
        self, attempt_id: int, step: Filter = None, *, limit: int = LIMIT
    ) -> list[SampleRow]:
        """Return samples by step and sample_uid."""
        where = conditions("samples", attempt_id=attempt_id, step=step)
        return self._page(SampleRow, "samples", where, "step sample_uid clock", limit)

    def token_counts(self, attempt_id: int, steps: Sequence[int], *, limit: int) -> Counter[int]:
        """Return number of tokens -> the samples of steps that have so many, more than none.

        At most `limit` samples are counted, those of the last steps first.
        """
        own = (samples.c.attempt_id == attempt_id) & samples.c.step.in_(list(steps))
        rows: sa.FromClause = sa.select(samples.c.tokens).where(own).subquery()
        if (self._values(sa.select(sa.func.count()).where(own))[0]) > limit:
            newest = (samples.c.step.desc(), samples.c.sample_uid, samples.c.clock)
            chosen = sa.select(samples.c.tokens).where(own).order_by(*newest)
            rows = chosen.limit(limit).subquery()
        query = sa.select(rows.c.tokens, sa.func.count()).group_by(rows.c.tokens)
        return Counter({tokens: count for tokens, count in self._tuples(query) if tokens})

    def consumed(self, attempts: Sequence[int], attempt_id: int, step: int) -> list[SampleRow]:
        """Return the rows that other processes wrote for the samples that a step consumed."""
        parameters = {
            "attempt_ids": list(attempts),
            "attempt_id": attempt_id,
            "step": step,
            "clock": f"s{step}",
            "from_step": step - REUSED_STEPS,
            "to_step": step + REUSED_STEPS,
        }
        return self._rows(SampleRow, _consumed_samples(), parameters)

    def rollout_payloads(
        self, attempts: Sequence[int], step: int, versions: Collection[int | None]
    ) -> list[PayloadRow]:
        """Return ingested payloads of rollouts, the oldest first.

        Args:
            attempts: ids of the attempts.
            step: their step, unless they have none and one of `versions`.
            versions: policy versions; None selects payloads without one.
        """
        chosen = (
            payloads.c.attempt_id.in_(attempts)
            & (payloads.c.state == "ingested")
            & payloads.c.stage.not_in(TRAINER_STAGES)
        )
        # One select each instead of IN: SQLite then uses the index of payloads without a step.
        newest = sorted(versions, key=lambda version: (version is not None, version))
        cases = (
            payloads.c.step == step,
            *(
                payloads.c.step.is_(None) & (payloads.c.policy_version == each)
                for each in newest[-MAX_VERSIONS:]
            ),
        )
        selected = (sa.select(payloads).where(chosen, case) for case in cases)
        found = sa.union_all(*selected).subquery()
        by = (found.c.announced_wall, found.c.incarnation, found.c.seq)
        return self._rows(PayloadRow, sa.select(found).order_by(*by))

    def reward_groups(
        self, attempts: Sequence[int], **window: Unpack[StepWindow]
    ) -> list[RewardGroupsRow]:
        """Return the groups of samples of each step of some attempts.

        Steps whose samples name no group are left out.
        """
        return self._rows(RewardGroupsRow, _reward_groups(_groups(attempts, **window)))


@functools.cache
def _consumed_samples() -> Query:
    """Select the rows that other processes' rollouts wrote for the samples that a step consumed.

    It is built once, since it runs for each step, and each new one leaves 500 objects in cycles.
    """
    attempt_id: sa.BindParameter[int] = sa.bindparam("attempt_id")
    step: sa.BindParameter[int] = sa.bindparam("step")
    clock: sa.BindParameter[str] = sa.bindparam("clock")
    consumed = sa.select(samples.c.sample_uid).where(
        samples.c.attempt_id == attempt_id,
        samples.c.step == step,
        samples.c.clock == clock,
        samples.c.consumed_step == step,
    )
    # Three selects instead of one OR: each then uses an index. Consumed samples have their step
    # filled in, so few are without one.
    near = samples.c.step.between(sa.bindparam("from_step"), sa.bindparam("to_step"))
    cases = (
        samples.c.clock.like("v%") & samples.c.step.is_(None),
        samples.c.clock.like("v%") & near,
        (samples.c.attempt_id != attempt_id)
        & (samples.c.step == step)
        & (samples.c.clock == clock),
    )
    attempts: sa.BindParameter[int] = sa.bindparam("attempt_ids", expanding=True)
    chosen = samples.c.attempt_id.in_(attempts) & samples.c.sample_uid.in_(consumed)
    found = sa.union_all(*(sa.select(samples).where(chosen, case) for case in cases))
    return sa.select(found.subquery())


def _reward_groups(groups: sa.CTE) -> Query:
    """Select the number of groups of samples by attempt and step, and by their rewards.

    A group counts as rewarded if it has two samples and more, each with a finite reward.
    """
    steps = (
        sa.select(
            groups.c.attempt_id,
            groups.c.step,
            sa.func.min(groups.c.low).label("lowest"),
            sa.func.max(groups.c.high).label("highest"),
        )
        .group_by(groups.c.attempt_id, groups.c.step)
        .cte("reward_steps")
    )

    def many(condition: sa.ColumnElement[bool]) -> sa.Case[int]:
        return sa.func.sum(sa.case((condition, 1), else_=0))  # type: ignore[return-value]

    return (
        sa.select(
            groups.c.attempt_id,
            groups.c.step,
            sa.func.count().label("groups"),
            sa.func.sum(groups.c.single).label("single"),
            sa.func.sum(groups.c.rewarded).label("rewarded"),
            many(groups.c.low == groups.c.high).label("equal"),
            many(groups.c.high == steps.c.lowest).label("low"),
            many(groups.c.low == steps.c.highest).label("high"),
            steps.c.lowest,
            steps.c.highest,
        )
        .join_from(
            groups,
            steps,
            (groups.c.attempt_id == steps.c.attempt_id) & (groups.c.step == steps.c.step),
        )
        .group_by(groups.c.attempt_id, groups.c.step, steps.c.lowest, steps.c.highest)
    )


def _groups(attempt_ids: Sequence[int], **window: Unpack[StepWindow]) -> sa.CTE:
    reward = samples.c.reward
    number = sa.func.count()
    is_rewarded = (number > 1) & (
        sa.func.count(sa.case((reward.between(-_MOST, _MOST), 1))) == number
    )
    where: list[sa.ColumnElement[bool]] = [
        *in_window("samples", attempt_ids, **window),
        samples.c.step.is_not(None),
        samples.c.group_id.is_not(None),
    ]
    return (
        sa.select(
            samples.c.attempt_id,
            samples.c.step,
            sa.case((number == 1, 1), else_=0).label("single"),
            sa.case((is_rewarded, 1), else_=0).label("rewarded"),
            sa.case((is_rewarded, sa.func.min(reward))).label("low"),
            sa.case((is_rewarded, sa.func.max(reward))).label("high"),
        )
        .where(*where)
        .group_by(samples.c.attempt_id, samples.c.step, samples.c.group_id)
        .cte("reward_groups")
    )
