"""The first mini-batch of an update, sample by sample: current against old log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from stagescope.wire.errors import InvalidInput
from stagescope.wire.schema import UPDATE_PAIR
from stagescope_service.statistics.kernel import ROW
from stagescope_service.statistics.part import PartRecord
from stagescope_service.statistics.step_summary import assemble

_TOKENS, _D_ABS_SUM, _P_SUM = (ROW.index(name) for name in ("tokens", "d_abs_sum", "p_sum"))
_RESIDUE: Final = 1e-12
"""Difference of two sums of the same numbers that rounding leaves, over their size."""


class FirstPass(NamedTuple):
    """A sample of the first mini-batch of an update: current against old log-probs."""

    role: str
    rank: int
    sample: str
    """Its id, or its row."""
    tokens: int
    mean: float
    """Mean |current - old| in nats; 0.0: they are equal."""
    is_of_sums: bool = False
    """Whether `mean` is |mean of current - old|, of streams that two stages recorded: noise
    cancels in it, and only equality can be told from it."""


def first_passes(parts: Sequence[PartRecord]) -> list[FirstPass]:
    """Return the samples of a first mini-batch whose payload has both streams."""
    counted = _counted(parts, UPDATE_PAIR)
    found: list[FirstPass] = []
    for part in parts:
        if part.key not in counted:
            continue
        keys, values = part.summary.sequences.by_sample()
        for (sample, _, row), own in zip(keys, values, strict=True):
            tokens = int(own[_TOKENS])
            if tokens:
                name = sample or f"row {row}"
                mean = float(own[_D_ABS_SUM]) / tokens
                found.append(FirstPass(part.role, part.rank, name, tokens, mean))
    return found


def passes_apart(current: Sequence[PartRecord], old: Sequence[PartRecord]) -> list[FirstPass]:
    """Return the samples of a first mini-batch whose old log-probs another stage recorded.

    Args:
        current: the parts of current against rollout.
        old: those of old against rollout.
    """
    first = [
        part
        for part in current
        if not (part.part.occurrence or part.part.epoch or part.part.minibatch)
    ]
    stages = {part.stage for part in first}
    sums = _sums([part for part in old if part.stage not in stages], ("old", "rollout"))
    return [
        FirstPass(role, rank, sample, tokens, _apart(total, sums[sample][1]) / tokens, True)
        for sample, (tokens, total, role, rank) in _sums(first, ("current", "rollout")).items()
        if sample in sums and sums[sample][0] == tokens
    ]


def _apart(one: float, other: float) -> float:
    size = abs(one - other)
    return 0.0 if size <= _RESIDUE * max(abs(one), abs(other)) else size


def _sums(
    parts: Sequence[PartRecord], pair: tuple[str, str]
) -> dict[str, tuple[int, float, str, int]]:
    """Return sample -> its tokens, the sum of p, and the role and rank of its first part."""
    counted = _counted(parts, pair)
    found: dict[str, tuple[int, float, str, int]] = {}
    for part in parts:
        if part.key not in counted or not part.has_ids:
            continue
        keys, values = part.summary.sequences.by_sample()
        for (sample, _, _), own in zip(keys, values, strict=True):
            tokens, total, role, rank = found.get(sample, (0, 0.0, part.role, part.rank))
            tokens += int(own[_TOKENS])
            if tokens:
                found[sample] = (tokens, total + float(own[_P_SUM]), role, rank)
    return found


def _counted(parts: Sequence[PartRecord], pair: tuple[str, str]) -> set[str]:
    """Return the keys of the parts that count: replicas, and later passes, do not."""
    try:
        return {*assemble(parts, pairs=[pair]).counted}
    except InvalidInput:
        return set()
