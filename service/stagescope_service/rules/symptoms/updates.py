"""Evidence of the update: its first mini-batch's log-probs against the old ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from stagescope_service.rules.evidence import (
    ABS_DIFF,
    Count,
    Evidence,
    Example,
    listed,
    not_found,
    not_measured,
    short,
)
from stagescope_service.rules.history import READ, RunHistory
from stagescope_service.rules.passes import FirstPass
from stagescope_service.rules.steps import CurrentStep
from stagescope_wire.render import counted
from stagescope_wire.schema import Part

_NOISE: Final = 0.01
"""Nats by which the median sample of two passes in bfloat16 may differ."""
_FEW: Final = 16
"""Minimum tokens of a sample for a comparison with samples that differ, too."""
_ROUNDED: Final = 2.0
"""Number of mean rounding errors between two passes if half of the tokens are rounded to the next
value of a narrow dtype."""
_ENOUGH: Final = 3
"""Minimum samples of a rank, or of a piece of a stage, for a median that is its noise."""
_NAMED: Final = 6
"""Maximum number of samples and of ranks that a text names."""


def current_differs(history: RunHistory, *, factor: float, least: float, bound: float) -> Evidence:
    """Return the samples whose current log-probs in the first mini-batch are not the old ones.

    No update lies between the two, so they are equal, or differ by the noise of two passes. That
    noise is the median of the rank, or of the piece of the stage, that differs least. If another
    stage recorded the old ones, sums by sample are compared. A difference is then found only if the
    noise is 0. Tokens that are not finite differ. Each of the newest steps that has both, `READ` at
    most, must show it.

    Args:
        history: of the run.
        factor: multiple of the noise above which a sample's mean |current - old| is off.
        least: the same limit in nats.
        bound: a median in nats that no noise has. Twice the mismatch of the two sides is used if
            that is less, because rounding does not make a trainer differ more from itself than from
            the engine. Samples of a rank or piece above it are off if they exceed it themselves.
    """
    series = history.metric(ABS_DIFF).finite
    sizes = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
    looked: list[_Step] = []
    for step in reversed(history.steps[-_SEARCHED:]):
        passes = history.facts(step).first_passes
        if passes and "bitwise_equal" not in step.suspects:
            no_noise = min(bound, max(_NOISE, 2.0 * sizes.get(step.step, math.inf)))
            looked.append(_judge(step, passes, factor, least, no_noise))
        if len(looked) == READ:
            break
    if not looked:
        return not_measured("no stage has log_probs and old_log_probs of a first mini-batch")
    newest = looked[0]
    if not all(each.off for each in looked):
        return not_found(newest.text)
    ranks = sorted({(each.role, each.rank) for each in newest.off})
    lines = [_rank_text(role, rank, newest) for role, rank in ranks[:_NAMED]]
    where = listed(ranks)
    count = Count(len(newest.off), len(newest.passes), "sample")
    return Evidence(
        "found", count.shown / count.examined, looked[-1].step.step, where,
        (newest.text, *lines), _ONE_PART, count=count,
        ranks=frozenset(ranks) if len(newest.of_ranks) > len(ranks) else frozenset(),
        example=Example(newest.step.step, max(newest.off, key=_distance).sample),
    )  # fmt: skip


def _distance(each: FirstPass) -> float:
    return each.mean if math.isfinite(each.mean) else math.inf


_SEARCHED: Final = 10
"""Number of newest steps in which both streams are looked for."""
_ONE_PART: Final = (
    "in a payload of several mini-batches updates lie between the two: give each its minibatch "
    "number",
)


class _Step(NamedTuple):
    """The first mini-batch of a step."""

    step: CurrentStep
    passes: Sequence[FirstPass]
    off: Sequence[FirstPass]
    text: str

    @property
    def of_ranks(self) -> set[tuple[str, int]]:
        """Return (role, rank) of all passes."""
        return {(each.role, each.rank) for each in self.passes}


def _judge(
    step: CurrentStep, passes: Sequence[FirstPass], factor: float, least: float, bound: float
) -> _Step:
    medians = _medians(passes)
    noise = min(medians.values(), default=0.0)
    is_judged = noise == 0.0 or not passes[0].is_of_sums
    off = []
    for each in passes:
        is_far = any(medians.get(group, 0.0) > bound for group in _groups_of(each))
        least_off = 0.0 if math.isnan(each.rounding) else _ROUNDED * each.rounding
        limit = max(factor * noise, least, least_off)
        limit = min(limit, bound) if is_far else limit
        is_off = each.mean > limit and (noise == 0.0 or each.tokens >= _FEW)
        if each.non_finite or (is_judged and is_off):
            off.append(each)
    equal = sum(each.is_equal for each in passes)
    bad = sum(each.non_finite > 0 for each in passes)
    text = (
        f"step {step.step}: in the first mini-batch current and old log-probs are equal in {equal} "
        f"of {counted(len(passes), 'sample')}"
    )
    if bad:
        text += f", and not finite in {bad}"
    usual = medians.get(None, 0.0)
    if usual > 0.0:
        text += f", and differ by {short(usual)} nat in the median sample"
    return _Step(step, passes, off, text)


_Group: TypeAlias = "tuple[str, int] | Part | None"
"""Role and rank, a piece of the stage, or all samples."""


def _groups_of(each: FirstPass) -> tuple[_Group, ...]:
    return ((each.role, each.rank), each.part, None)


def _medians(passes: Sequence[FirstPass]) -> Mapping[_Group, float]:
    """Return how far two passes differ in the usual sample of each rank and of each piece of the
    stage. If these have too few samples, all samples count together."""
    groups: dict[_Group, list[float]] = {}
    for each in passes:
        for group in _groups_of(each) if math.isfinite(each.mean) else ():
            groups.setdefault(group, []).append(each.mean)
    return {
        group: float(np.median(means))
        for group, means in groups.items()
        if len(means) >= _ENOUGH or group is None
    }


def _rank_text(role: str, rank: int, step: _Step) -> str:
    of_rank = [each for each in step.passes if (each.role, each.rank) == (role, rank)]
    off = [each for each in step.off if (each.role, each.rank) == (role, rank)]
    known = [each for each in off if math.isfinite(each.mean)]
    texts = []
    if any(each.mean > 0.0 for each in known):
        mean = sum(each.mean * each.tokens for each in known) / sum(each.tokens for each in known)
        texts.append(f"by {short(mean)} nat on average")
    if bad := sum(each.non_finite for each in off):
        texts.append(f"{counted(bad, 'token')} not finite")
    listed = ", ".join(each.sample for each in off[:_NAMED]) + (
        ", ..." if len(off) > _NAMED else ""
    )
    return (
        f"{role} rank {rank}: {len(off)} of {counted(len(of_rank), 'sample')} differ, "
        f"{', '.join(texts)}: {listed}"
    )
