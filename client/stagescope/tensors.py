"""Full tensors of two dumps, as msprobe compared them."""

from __future__ import annotations

from typing import Any, Final

from stagescope import render
from stagescope.frames import Table
from stagescope.render import wrapped

ORDER: Final = (
    "name", "cosine", "max_abs_error", "max_relative_error", "euclidean_distance",
    "share_within_1e-3", "share_within_5e-3", "dtype_a", "shape_a", "dtype_b", "shape_b",
)  # fmt: skip

_NUMBERS: Final = {
    "cosine": "cosine", "max_abs_error": "max abs", "max_relative_error": "max rel",
    "share_within_1e-3": "in 1e-3", "share_within_5e-3": "in 5e-3",
}  # fmt: skip
_TENSOR: Final = 24
_NUMBER: Final = 10


class Tensors(Table):
    """A row a tensor that both dumps hold, in execution order; `a` is msprobe's NPU side.

    Usage:
        >>> tensors = session.tensors({"step": 5, "rank": 0}, {"rank": 1})
        >>> tensors.to_pandas().sort_values("cosine")
    """

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return each tensor's name and numbers as lines of at most `width` columns."""
        shown = [self[at] for at in range(len(self) if rows is None else min(rows, len(self)))]
        words = "".join(f"{word:>{_NUMBER}}" for word in _NUMBERS.values())
        head = wrapped("  ", f"{'tensor':<{_TENSOR}}{words}", width)
        lines = head if shown else ["(no tensors)"]
        for row in shown:
            other = "" if row["name_b"] in (None, row["name"]) else f" (b: {row['name_b']})"
            lines += wrapped("", f"{row['name']}{other}", width)
            numbers = "".join(f"{_number(row[name]):>{_NUMBER}}" for name in _NUMBERS)
            lines += wrapped("  ", f"{_tensor(row):<{_TENSOR}}{numbers}", width)
        left = (self.about.get("count") or 0) - len(shown)
        return [*lines, f"... {left} more tensors"] if left > 0 else lines


def _tensor(row: dict[str, Any]) -> str:
    sides = (f"{row[f'dtype_{side}'] or ''}{row[f'shape_{side}'] or ''}" for side in "ab")
    return " / ".join(dict.fromkeys(side.replace(" ", "") or render.MISSING for side in sides))


def _number(value: float | None) -> str:
    return render.MISSING if value is None else f"{value:.4g}"
