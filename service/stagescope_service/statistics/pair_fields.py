"""What the loops over pairs of values fill: the fields of a cell, the columns of a row, dtypes."""

from __future__ import annotations

import collections
import enum
from typing import Final, cast


class PairField(enum.IntEnum):
    """Index of each number in a cell. d = x - y. Sums and moments are of finite pairs."""

    PAIRS = 0
    FINITE = enum.auto()
    UNEQUAL = enum.auto()
    """d is not 0, or one side is non-finite and the other is not the same."""
    OVER = enum.auto()
    """|d| > atol + rtol * max(|x|, |y|), or non-finite and different."""
    X_NAN = enum.auto()
    X_POSINF = enum.auto()
    X_NEGINF = enum.auto()
    Y_NAN = enum.auto()
    Y_POSINF = enum.auto()
    Y_NEGINF = enum.auto()
    BOTH_NAN = enum.auto()
    BOTH_POSINF = enum.auto()
    BOTH_NEGINF = enum.auto()
    EXPONENT = enum.auto()
    """e: sums are divided by 2^e and squares by 2^2e."""
    D_ABS_SUM = enum.auto()
    D_SUM = enum.auto()
    X_SUM = enum.auto()
    Y_SUM = enum.auto()
    D_SQUARES = enum.auto()
    X_M2 = enum.auto()
    Y_M2 = enum.auto()
    XY_C = enum.auto()
    X_MIN = enum.auto()
    Y_MIN = enum.auto()
    X_MAX = enum.auto()
    Y_MAX = enum.auto()
    D_ABS_MAX = enum.auto()
    D_ABS_MAX_AT = enum.auto()
    """Flat coordinate, -1 for none; the lowest of several."""
    UNEQUAL_AT = enum.auto()
    OVER_AT = enum.auto()


_Index = collections.namedtuple("_Index", PairField.__members__)  # type: ignore[misc]
AT: Final = cast("type[PairField]", _Index(*map(int, PairField)))
"""`PairField` as plain ints, for the compiled loops."""
WIDTH: Final = len(PairField)

ROW: Final = ("pairs", "unequal", "over", "d_abs_max", "d_abs_sum", "finite")
"""Columns of a row's vector; `d_abs_*` are of the pairs that are finite on both sides: `finite`."""

KINDS: Final = (
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""Dtype tags; a tag's index is its kind in the kernel. The first four are those of `blocks`."""
