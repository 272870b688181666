"""Which checks may fail in which cells, told from many cells at once.

A step has thousands of rounds, and nearly every check of nearly every round is passed. These
conditions are necessary for a check to fail: the check itself decides, and words it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

import numpy as np

from stagescope_service.statistics.cell import Bool, Field, Float64
from stagescope_service.statistics.checks import (
    ENOUGH,
    FAR_SHARE,
    FAR_TOKENS,
    MANY,
    POSITIVE_BOUND,
    ROUNDED_SHARE,
    SHIFTED_RATIO,
    SHIFTS,
)
from stagescope_service.statistics.coverage import LACKING_SHARE
from stagescope_service.statistics.noise_checks import (
    CALIBRATION_BIAS,
    CALIBRATION_Z,
    SCALED_CORRELATION,
    SCALED_SIZE,
)

CellCheck = Literal[
    "constant", "probabilities", "coverage", "rounded", "shifted", "unrelated", "padding",
    "temperature", "calibration",
]  # fmt: skip
"""A check that one cell allows; `calibration` stands for `renormalised`, too."""
CELL_CHECKS: Final[tuple[CellCheck, ...]] = get_args(CellCheck)
_SLACK: Final = 1.0 - 1e-9
"""The condition may round the last bit in another way than the check."""


def may_be_equal(cells: Float64) -> Bool:
    """Return a mask of the cells in which enough tokens count, and the streams may be equal."""
    equal: Bool = cells[:, Field.EQUAL] >= np.maximum(cells[:, Field.TOKENS], ENOUGH)
    return equal


def may_fail(cells: Float64) -> Mapping[CellCheck, Bool]:
    """Return, for each check, a mask of the cells `[n, WIDTH]` in which it may fail."""

    def of(field: Field) -> Float64:
        column: Float64 = cells[:, field]
        return column

    tokens, masked, equal = of(Field.TOKENS), of(Field.MASKED), of(Field.EQUAL)
    enough, many = tokens >= ENOUGH, tokens >= MANY
    few = _SLACK * LACKING_SHARE * masked
    with np.errstate(all="ignore"):
        size = of(Field.D_ABS_SUM) / tokens
        shifted = np.zeros(len(cells), bool)
        for total, count, *_ in SHIFTS:
            mean = of(total) / of(count)
            shifted |= (of(count) >= ENOUGH) & (_SLACK * mean < SHIFTED_RATIO * size)
        varies, spread = of(Field.Q_M2), of(Field.D_M2)
        correlation = (of(Field.PQ_C) - varies) / np.sqrt(varies * spread)
        bias = of(Field.RATIO_SUM) / tokens - 1.0
        error = np.sqrt(of(Field.RATIO_M2) / (tokens - 1) / tokens)
        return {
            "constant": enough
            & ((of(Field.P_MIN) == of(Field.P_MAX)) | (of(Field.Q_MIN) == of(Field.Q_MAX))),
            "probabilities": (tokens > 0)
            & ((of(Field.P_MAX) > POSITIVE_BOUND) | (of(Field.Q_MAX) > POSITIVE_BOUND)),
            "coverage": (masked > 0) & (np.maximum(of(Field.P_LACKS), of(Field.Q_LACKS)) >= few),
            "rounded": (tokens - equal >= ENOUGH)
            & (of(Field.SAME_BF16) - equal >= _SLACK * ROUNDED_SHARE * (tokens - equal)),
            "shifted": enough & shifted,
            "unrelated": many
            & (of(Field.ABS_OVER_1) >= np.maximum(FAR_TOKENS, _SLACK * FAR_SHARE * tokens)),
            "padding": (masked > 0) & (of(Field.EDGE_ZERO) >= few),
            "temperature": many
            & (size >= _SLACK * SCALED_SIZE)
            & (np.abs(correlation) >= _SLACK * SCALED_CORRELATION),
            # Equal ratios have no error; NaN is no reason to pass.
            "calibration": many
            & ~(np.abs(bias) < _SLACK * CALIBRATION_BIAS)
            & ~(np.abs(of(Field.RAW_SUM) / tokens) < _SLACK * CALIBRATION_Z * error),
        }
