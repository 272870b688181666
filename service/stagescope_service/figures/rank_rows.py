"""Numbers of ranks as rows of a figure: sorted and folded; ranks that differ come first."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stagescope_service import figure_style as style
from stagescope_service.statistics.cell import Float64
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render import counted, ranks_text
from stagescope_wire.schema import RankKey

MAX_ROWS: Final = 64
_ALONE: Final = 12
"""Most ranks with rows of their own, because they differ from the others, which are folded."""
_NAMED: Final = 6
"""Most ranks that are named, because they differ, each with its number."""
_GROUPS: Final = 40
"""Most rows of folded ranks."""
_APART: Final = 6.0
"""A rank differs from the others beyond this many standard deviations from the median,"""
_LEAST: Final = 0.25
"""and by at least this share of the median."""
_DIMENSIONS: Final = ("tp", "pp", "cp", "dp", "ep", "host")

Flags = npt.NDArray[np.bool_]


Fold: TypeAlias = Literal["mean", "max", "sum"]
"""How a number is folded over several ranks."""


@dataclasses.dataclass(frozen=True)
class HeatRow:
    """One rank, or several folded ones."""

    label: str
    ranks: tuple[RankKey, ...]
    values: tuple[float | None, ...]
    """One a column; None: no token was measured there."""
    tokens: tuple[int, ...]
    apart: bool = False
    """Whether the rank differs from the others."""
    largest: tuple[str, ...] = ()
    """The rank with the largest value in each column, if ranks are folded."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """A number and a count of tokens by rank (rows) and column; NaN: not measured."""

    ranks: tuple[RankKey, ...]
    columns: tuple[int, ...]
    values: Float64
    tokens: Float64
    fold: Fold

    def take(self, rows: Sequence[int]) -> Grid:
        """Return some of the ranks."""
        at = list(rows)
        return dataclasses.replace(
            self,
            ranks=tuple(self.ranks[row] for row in at),
            values=self.values[at],
            tokens=self.tokens[at],
        )

    def over_columns(self) -> Float64:
        """Return one value for each rank."""
        return _fold(self.values, self.tokens, self.fold, axis=1)

    def over_ranks(self) -> Float64:
        """Return one value for each column."""
        return _fold(self.values, self.tokens, self.fold, axis=0)


def _fold(values: Float64, tokens: Float64, fold: Fold, axis: int) -> Float64:
    """Return a number of the tokens of several cells: a mean is weighted with its tokens."""
    known = ~np.isnan(values)
    filled = np.where(known, values, 0.0)
    if fold == "max":
        largest = np.where(known, values, -np.inf).max(axis=axis, initial=-np.inf)
        return np.where(known.any(axis=axis), largest, np.nan)
    if fold == "sum":
        return np.where(known.any(axis=axis), filled.sum(axis=axis), np.nan)
    weights = np.where(known, tokens, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Float64 = (filled * weights).sum(axis=axis) / weights.sum(axis=axis)
    return mean


def rows_of(
    grid: Grid, layouts: Mapping[RankKey, JsonObject]
) -> tuple[tuple[HeatRow, ...], str | None, str | None]:
    """Return the rows, how they are folded, and a sentence about both."""
    overall = grid.over_columns()
    order = np.argsort(-np.where(np.isnan(overall), -np.inf, overall), kind="stable").tolist()
    several = len({role for role, _ in grid.ranks}) > 1
    names = [_name(rank, several) for rank in grid.ranks]
    is_folded = len(grid.ranks) > MAX_ROWS
    best = _best_dimension(grid, overall, layouts) if is_folded else None
    # A property of a whole group makes none of its ranks the odd one out.
    groups = None if best is None else [best.keys[row] for row in range(len(grid.ranks))]
    apart = standing_apart(overall, groups)
    texts = []
    if apart.any():
        found = [row for row in order if apart[row]]
        middle = style.number(float(np.nanmedian(overall)))
        each = [
            f"{ranks_text([grid.ranks[row]])} ({style.number(float(overall[row]))})"
            for row in found[:_NAMED]
        ]
        more = f" and {len(found) - _NAMED} more with less" if len(found) > _NAMED else ""
        verb = "differs" if len(found) == 1 else "differ"
        differs = f"{', '.join(each)}{more} {verb} from the other ranks"
        texts.append(f"{differs}: the median rank has {middle}")

    def single(row: int) -> HeatRow:
        label = names[row] + _place(layouts.get(grid.ranks[row]))
        return _row(grid.take([row]), label, apart[row])

    if not is_folded:
        return tuple(map(single, order)), None, "; ".join(texts) or None
    alone = [row for row in order if apart[row]][:_ALONE]
    rest = sorted(set(range(len(grid.ranks))) - set(alone), key=lambda row: grid.ranks[row])
    members: dict[str, list[int]] = defaultdict(list)
    if best is not None:
        for row in rest:
            members[f"{best.name} {best.keys[row]}"].append(row)
        by = f"{best.name}, which explains {best.share:.0%} of the variance between ranks"
    else:
        size = -(-len(rest) // (_GROUPS - 8))
        for at in range(0, len(rest), size):
            block = rest[at : at + size]
            members[f"{names[block[0]]} to {grid.ranks[block[-1]][1]}"] = block
        by = "their numbers, as no parallel dimension tells them apart"
    folded = [
        _row(grid.take(rows), f"{label} ({counted(len(rows), 'rank')})")
        for label, rows in members.items()
    ]
    folded.sort(key=_sort_value)
    texts.append(f"{len(rest)} of {len(grid.ranks)} ranks are folded by {by}")
    return (*map(single, alone), *folded), by, "; ".join(texts)


def _sort_value(row: HeatRow) -> float:
    """Return the sort key of folded rows: the largest mean over tokens first."""
    known = [(v, n) for v, n in zip(row.values, row.tokens, strict=True) if v is not None]
    total = sum(n for _, n in known)
    return -sum(v * n for v, n in known) / total if total else math.inf


def standing_apart(values: Float64, groups: Sequence[object] | None = None) -> Flags:
    """Return which values lie above the others of their group (None: all are one).

    It uses the median and its absolute deviation, scaled to the standard deviation of a normal
    distribution (P. J. Rousseeuw, C. Croux, "Alternatives to the Median Absolute Deviation", 1993).
    Below four values none does.
    """
    apart = np.zeros(len(values), bool)
    _, group = np.unique([str(key) for key in groups or ["all"] * len(values)], return_inverse=True)
    for number in range(int(group.max(initial=-1)) + 1):
        own = np.flatnonzero((group == number) & np.isfinite(values))
        if len(own) < 4:
            continue
        middle = float(np.median(values[own]))
        spread = 1.4826 * float(np.median(np.abs(values[own] - middle)))
        bound = middle + max(_APART * spread, _LEAST * abs(middle))
        apart[own] = values[own] > bound
    return apart


class _Dimension(NamedTuple):
    """A parallel dimension (or the host) along which ranks can be folded."""

    name: str
    keys: tuple[object, ...]
    """One a rank."""
    share: float
    """Share of the variance between ranks that lies between its groups; see `explained`."""


def _best_dimension(
    grid: Grid, overall: Float64, layouts: Mapping[RankKey, JsonObject]
) -> _Dimension | None:
    """Return the dimension that explains most of the differences of ranks; None: none is known."""
    best: _Dimension | None = None
    for name in _DIMENSIONS:
        column = "host" if name == "host" else f"{name}_rank"
        keys = tuple((layouts.get(rank) or {}).get(column) for rank in grid.ranks)
        if None in keys or not 2 <= len(set(keys)) <= _GROUPS:
            continue
        share = explained(overall, keys)
        if best is None or share > best.share + 0.01:
            best = _Dimension(name, keys, share)
    return best


def explained(values: Float64, keys: Sequence[object]) -> float:
    """Return the share of the variance of values that lies between the groups of equal keys.

    Values are clipped to their first and last hundredth, so that an outlier does not decide.
    """
    known = np.isfinite(values)
    texts = [str(key) for key, ok in zip(keys, known, strict=True) if ok]
    if len(set(texts)) < 2:
        return 0.0
    clipped = np.clip(values[known], *np.quantile(values[known], [0.01, 0.99]))
    centred = clipped - clipped.mean()
    total = float((centred**2).sum())
    if total <= 0.0:
        return 0.0
    _, group = np.unique(texts, return_inverse=True)
    sizes, sums = np.bincount(group), np.bincount(group, centred)
    return float((sums**2 / sizes).sum()) / total


def _row(grid: Grid, label: str, apart: bool | np.bool_ = False) -> HeatRow:
    values = grid.over_ranks()
    largest: tuple[str, ...] = ()
    if len(grid.ranks) > 1:
        filled = np.where(np.isnan(grid.values), -np.inf, grid.values)
        where = filled.argmax(axis=0)
        largest = tuple(
            f"largest: {_name(grid.ranks[row], True)}, "
            f"{style.number(float(grid.values[row, column]))}"
            for column, row in enumerate(where.tolist())
        )
    return HeatRow(
        label=label,
        ranks=grid.ranks,
        values=tuple(None if math.isnan(value) else value for value in values.tolist()),
        tokens=tuple(int(count) for count in grid.tokens.sum(axis=0)),
        apart=bool(apart),
        largest=largest,
    )


def _name(rank: RankKey, several: bool) -> str:
    return f"{rank[0]} {rank[1]}" if several else f"rank {rank[1]}"


def _place(layout: JsonObject | None) -> str:
    """Return the parallel coordinates of a rank that has several."""
    if layout is None:
        return ""
    found = [
        f"{name} {layout[f'{name}_rank']}"
        for name in ("dp", "tp", "pp", "cp", "ep")
        if layout.get(f"{name}_rank") is not None and (layout.get(f"{name}_size") or 1) > 1
    ]
    return f" ({', '.join(found)})" if found else ""
