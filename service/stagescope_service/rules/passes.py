"""The first mini-batch of an update, sample by sample: current against old log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from stagescope_service.statistics.mismatch import rounding_floor
from stagescope_service.statistics.part import PartRecord
from stagescope_service.statistics.sequence_row import ROW
from stagescope_service.statistics.step_summary import assemble
from stagescope_wire.errors import InvalidInput
from stagescope_wire.schema import Part
from stagescope_wire.tensors import CURRENT_ALONE, UPDATE_PAIR

_TOKENS, _NON_FINITE, _D_ABS_SUM, _P_SUM = (
    ROW.index(name) for name in ("tokens", "non_finite", "d_abs_sum", "p_sum")
)
_RESIDUE: Final = 1e-12
"""Maximum relative difference that rounding leaves between two sums of the same numbers."""


class FirstPass(NamedTuple):
    """A sample of the first mini-batch of an update: current against old log-probs."""

    role: str
    rank: int
    part: Part
    """Its piece of the stage."""
    sample: str
    """Its id, or its row."""
    tokens: int
    """Number of tokens with two finite values."""
    non_finite: int
    """Number of the other tokens under the mask."""
    mean: float
    """Mean |current - old| of `tokens` in nats; 0.0: these are equal; NaN: there are none."""
    rounding: float
    """Mean error in nats caused by the dtypes of the two streams."""
    is_of_sums: bool = False
    """Whether `mean` is |mean of current - old| of streams that two stages recorded. Noise cancels
    in it: only its equality to 0 means something."""

    @property
    def is_equal(self) -> bool:
        """Whether every token has two finite values, which are equal."""
        return self.mean == 0.0 and not self.non_finite


def first_passes(parts: Sequence[PartRecord]) -> list[FirstPass]:
    """Return the samples of a first mini-batch whose payload has both streams."""
    counted = _counted(parts, UPDATE_PAIR)
    found: list[FirstPass] = []
    for part in parts:
        if part.key not in counted:
            continue
        rounding = rounding_floor(part.summary, part.summary.total)
        keys, values = part.summary.sequences.by_sample()
        for (sample, _, row), own in zip(keys, values, strict=True):
            tokens, bad = int(own[_TOKENS]), int(own[_NON_FINITE])
            if tokens or bad:
                name = sample or f"row {row}"
                mean = float(own[_D_ABS_SUM]) / tokens if tokens else math.nan
                found.append(
                    FirstPass(part.role, part.rank, part.part, name, tokens, bad, mean, rounding)
                )
    return found


def passes_apart(current: Sequence[PartRecord], old: Sequence[PartRecord]) -> list[FirstPass]:
    """Return the samples of a first mini-batch whose old log-probs another stage recorded.

    A sample is left out if one of its sums lacks a token, unless the only tokens that it lacks are
    current log-probs that are not finite.

    Args:
        current: the parts of current against rollout, or of current alone (`CURRENT_ALONE`).
        old: those of old against rollout.
    """
    first = [part for part in current if is_first(part.part)]
    stages = {part.stage for part in first}
    before = _sums([part for part in old if part.stage not in stages])
    found: list[FirstPass] = []
    for sample, now in _sums(first).items():
        then = before.get(sample)
        if then is None or then.non_finite or then.tokens != now.tokens + now.non_finite:
            continue
        if now.non_finite and now.pair != CURRENT_ALONE:
            continue  # the rollout's may be what is not finite
        mean = math.nan if now.non_finite else _apart(now.total, then.total) / now.tokens
        found.append(
            FirstPass(
                now.role, now.rank, now.part, sample, now.tokens, now.non_finite, mean, 0.0, True
            )
        )
    return found


def is_first(part: Part) -> bool:
    """Return whether a part of a stage belongs to the first mini-batch of its step."""
    return not (part.occurrence or part.epoch or part.minibatch)


def _apart(one: float, other: float) -> float:
    size = abs(one - other)
    return 0.0 if size <= _RESIDUE * max(abs(one), abs(other)) else size


class _Sum(NamedTuple):
    """A sample's sum of one stream, over the tokens whose values are finite."""

    tokens: int
    non_finite: int
    total: float
    role: str
    rank: int
    part: Part
    pair: tuple[str, str]


def _sums(parts: Sequence[PartRecord]) -> dict[str, _Sum]:
    """Return sample -> the sum of p, with the role, rank and part of its first piece."""
    found: dict[str, _Sum] = {}
    for pair in dict.fromkeys(part.summary.pair for part in parts):
        counted = _counted(parts, pair)
        for part in parts:
            if part.key not in counted or not part.has_ids or part.summary.pair != pair:
                continue
            keys, values = part.summary.sequences.by_sample()
            for (sample, _, _), own in zip(keys, values, strict=True):
                sums = found.setdefault(
                    sample, _Sum(0, 0, 0.0, part.role, part.rank, part.part, pair)
                )
                found[sample] = sums._replace(
                    tokens=sums.tokens + int(own[_TOKENS]),
                    non_finite=sums.non_finite + int(own[_NON_FINITE]),
                    total=sums.total + float(own[_P_SUM]),
                )
    return {name: sums for name, sums in found.items() if sums.tokens or sums.non_finite}


def _counted(parts: Sequence[PartRecord], pair: tuple[str, str]) -> set[str]:
    """Return the keys of the parts that count, without replicas and later passes."""
    try:
        return {*assemble(parts, pairs=[pair]).counted}
    except InvalidInput:
        return set()
