"""Evidence of the update: its first mini-batch's log-probs against the old ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from stagescope.render import counted
from stagescope_service.diagnosis.evidence import Evidence, not_found, not_measured, short
from stagescope_service.diagnosis.history import READ, RunHistory, StepInForce
from stagescope_service.diagnosis.passes import FirstPass

_FEW: Final = 16
"""Fewest tokens of a sample whose mean is compared with those of samples that differ, too."""
_NAMED: Final = 6
"""Samples and ranks that a text names."""


def current_differs(
    history: RunHistory, *, factor: float = 10.0, least: float = 1e-4, bound: float = 0.03
) -> Evidence:
    """Return which samples' current log-probs in the first mini-batch are not the old ones.

    No update lies between the two, so that they are equal, or differ by the noise of two passes.
    Where another stage recorded the old ones, sums by sample are compared: what differs is found
    there only where the usual sample is equal.
    Each of the newest steps that has both, `READ` at most, must show it.

    Args:
        history: of the run.
        factor: of the median sample's mean |current - old|, from which a sample is off.
        least: the same in nats.
        bound: the median sample's mean in nats, from which all are off.
    """
    looked: list[_Step] = []
    for step in reversed(history.steps[-_SEARCHED:]):
        passes = [each for each in history.first_passes(step) if math.isfinite(each.mean)]
        if passes and "bitwise_equal" not in step.suspects:
            looked.append(_judge(step, passes, factor, least, bound))
        if len(looked) == READ:
            break
    if not looked:
        return not_measured("no stage has log_probs and old_log_probs of a first mini-batch")
    newest = looked[0]
    if not all(each.off for each in looked):
        return not_found(newest.text)
    ranks = sorted({(each.role, each.rank) for each in newest.off})
    lines = [_rank_text(role, rank, newest) for role, rank in ranks[:_NAMED]]
    where = ", ".join(f"{role} {rank}" for role, rank in ranks[:_NAMED])
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    share = len(newest.off) / len(newest.passes)
    return Evidence(
        "found", share, looked[-1].step.step, where + more, (newest.text, *lines), _ONE_PART
    )


_SEARCHED: Final = 10
"""Newest steps in which both streams are looked for."""
_ONE_PART: Final = (
    "in a payload of several mini-batches updates lie between the two: give each its minibatch "
    "number",
)


class _Step(NamedTuple):
    """What a step's first mini-batch shows."""

    step: StepInForce
    passes: Sequence[FirstPass]
    off: Sequence[FirstPass]
    text: str


def _judge(
    step: StepInForce, passes: Sequence[FirstPass], factor: float, least: float, bound: float
) -> _Step:
    usual = float(np.median([each.mean for each in passes]))
    limit = max(factor * usual, least)
    is_judged = usual == 0.0 or not passes[0].is_of_sums
    off = [
        each
        for each in passes
        if is_judged and each.mean > limit and (usual == 0.0 or each.tokens >= _FEW)
    ]
    equal = sum(each.mean == 0.0 for each in passes)
    text = (
        f"step {step.step}: in the first mini-batch current and old log-probs are equal in {equal} "
        f"of {counted(len(passes), 'sample')}"
    )
    if usual > 0.0:
        text += f", and {short(usual)} nat apart in the median sample"
    return _Step(step, passes, passes if usual > bound else off, text)


def _rank_text(role: str, rank: int, step: _Step) -> str:
    of_rank = [each for each in step.passes if (each.role, each.rank) == (role, rank)]
    off = [each for each in step.off if (each.role, each.rank) == (role, rank)]
    mean = sum(each.mean * each.tokens for each in off) / sum(each.tokens for each in off)
    listed = ", ".join(each.sample for each in off[:_NAMED]) + (
        ", ..." if len(off) > _NAMED else ""
    )
    return (
        f"{role} rank {rank}: {len(off)} of {counted(len(of_rank), 'sample')} differ, by "
        f"{short(mean)} nat on average: {listed}"
    )
