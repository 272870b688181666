"""Two tensors held against each other: bit by bit, in value, or within a tolerance."""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple

import numpy as np

from stagescope.batch import Tensor, widened
from stagescope.errors import InvalidInput

Array = np.ndarray[Any, Any]

BITWISE: Final = "bitwise"
EQUAL: Final = "equal"
WITHIN: Final = "within tolerance"
DIFFERENT: Final = "different"
VERDICTS: Final = (BITWISE, EQUAL, WITHIN, DIFFERENT)
"""The best first. `equal` are equal values of another dtype."""

TOLERANCE: Final = {
    "float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2,
}  # fmt: skip
"""|d| <= tolerance * max(1, |stored|), of the coarser of two dtypes; whole numbers are exact."""


def as_made(stored: Tensor, made: Tensor) -> Tensor:
    """Return a stored number in the dtype that it was made in, if it is one of its values.

    Numbers are recorded as Python's floats, whatever they had been.
    """
    if stored.values.ndim or made.dtype == "bfloat16" or made.values.dtype.kind != "f":
        return stored
    with np.errstate(over="ignore"):
        narrow = stored.values.astype(made.values.dtype)
    exact = _same(narrow.astype(np.float64), stored.values.astype(np.float64))
    return Tensor(made.dtype, narrow) if exact.all() else stored


def computed_tensor(name: str, value: Any) -> Tensor:
    """Return what a loss function gave as bits and dtype; torch is not imported for it.

    Raises:
        InvalidInput: no numbers.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().contiguous()
        if str(value.dtype) == "torch.bfloat16":
            library = sys.modules[type(value).__module__.partition(".")[0]]
            return Tensor("bfloat16", value.view(library.int16).numpy().view(np.uint16))
        value = value.numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise InvalidInput(
            f"{name} is a {type(value).__name__}", expected="a tensor, an array or a number"
        )
    return Tensor(array.dtype.name, array)


class Comparison(NamedTuple):
    """Two tensors held against each other, in float64; whole numbers exactly."""

    verdict: str
    compared: int
    differ: int
    max_abs: float
    mean_abs: float
    coordinate: tuple[int, ...] | None
    """Of the largest |d|; None where nothing differs, or shapes do."""
    stored: float | None
    computed: float | None
    outside: int
    dtype: str
    dtype_stored: str


def compare(
    stored: Tensor, computed: Tensor, mask: Array | None, tolerance: float | None = None
) -> Comparison:
    """Compare what was computed with what is stored.

    Args:
        stored, computed: of one shape, else they are different.
        mask: bool; where it has their shape, only what it marks is compared.
        tolerance: in the place of `TOLERANCE`.
    """
    dtypes = (computed.dtype, stored.dtype)
    if stored.values.shape != computed.values.shape:
        nothing = (0, 0, np.inf, np.inf, None, None, None, 0)
        return Comparison(DIFFERENT, *nothing, *dtypes)
    a, b = widened(stored), widened(computed)
    same = _same(a, b)
    there = mask if mask is not None and mask.shape == a.shape else np.ones(a.shape, bool)
    outside = int((~same & ~there).sum())
    differ = ~same & there
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.where(same, 0.0, np.abs(a.astype(np.float64) - b.astype(np.float64)))
    d = np.where(np.isnan(d), np.inf, d)  # one of them is no number
    whole = a.dtype.kind in "iub" and b.dtype.kind in "iub"
    if whole:  # float64 does not tell neighbours apart beyond 2^53
        d = np.where(same, 0.0, np.maximum(d, 1.0))
    count = int(there.sum())
    if not differ.any():
        exact = stored.dtype == computed.dtype and _bits(stored, there) == _bits(computed, there)
        verdict = BITWISE if exact else EQUAL
        return Comparison(verdict, count, 0, 0.0, 0.0, None, None, None, outside, *dtypes)
    at = tuple(map(int, np.unravel_index(np.where(differ, d, -1.0).argmax(), a.shape)))
    allowed = _allowed(a, dtypes, tolerance)
    verdict = WITHIN if not whole and (d <= allowed)[differ].all() else DIFFERENT
    return Comparison(
        verdict, count, int(differ.sum()), float(d[at]), float(d[there].mean()), at,
        float(a[at]), float(b[at]), outside, *dtypes,
    )  # fmt: skip


def _same(a: Array, b: Array) -> Array:
    """Where two arrays hold the same value; NaN and NaN do."""
    if a.dtype.kind in "iub" and b.dtype.kind in "iub":
        return np.asarray(a == b)  # exact also beyond 2^53
    return np.asarray((a == b) | (np.isnan(a) & np.isnan(b)))


def _bits(tensor: Tensor, there: Array) -> bytes:
    return np.ascontiguousarray(tensor.values)[there].tobytes()


def _allowed(a: Array, dtypes: tuple[str, str], tolerance: float | None) -> Array:
    found = max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
    if tolerance is not None:
        found = tolerance
    size = np.abs(a.astype(np.float64))
    # What is not finite is either the same or it is not.
    return np.where(np.isfinite(size), found * np.maximum(size, 1.0), 0.0)
