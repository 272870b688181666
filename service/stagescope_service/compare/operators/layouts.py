"""The parallel layout of the ranks that dumped one side, and rules of a user on their tensors.

An axis is a kind of parallelism (`dp`, `tp`, `cp`, `sp`, `ep`). The ranks of a side form a grid:
one rank for each combination of coordinates. `sp` has the coordinates of `tp` in most trainers, and
`ep` lies inside of `dp`, so an axis counts only if the ones before it do not distinguish all ranks.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from stagescope_wire.errors import InvalidInput
from stagescope_wire.render import counted

AXES: Final = ("dp", "cp", "tp", "sp", "ep", "etp")
"""Outermost first."""
ROW_AXIS: Final = "dp"
"""The axis along which ranks hold other rows of a batch."""
SUM, MEAN, SAME, SKIP = "sum", "mean", "same", "skip"

_LAYOUT: Final = re.compile(r"(?P<axis>[a-z]+)(?P<size>[1-9]\d{0,5})")


@dataclasses.dataclass(frozen=True, slots=True)
class RankTable:
    """The dump of one rank.

    Attributes:
        rank: its rank.
        path: its operator table.
        coordinates: axis -> index of the rank; empty if unknown.
        tensors: directory of its full tensors, None without them.
    """

    rank: int
    path: Path
    coordinates: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tensors: Path | None = None


Ranks: TypeAlias = "Path | Sequence[RankTable]"
"""A side of a comparison: the operator table of one rank, or those of several."""


def ranks_of(side: Ranks) -> Sequence[RankTable]:
    """Return the tables of a side."""
    return [RankTable(0, side)] if isinstance(side, Path) else side


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a side by their coordinates.

    Attributes:
        axes, sizes: the axes with several ranks, outermost first, and their sizes.
        ranks: ranks in the order of the coordinates, the last axis varies fastest.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def coordinates(self, at: int) -> dict[str, int]:
        """Return the coordinates of `ranks[at]`."""
        found = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            at, found[axis] = divmod(at, size)
        return {axis: found[axis] for axis in self.axes}

    def text(self) -> str:
        """Return it as text: `dp 2, tp 2`."""
        pairs = zip(self.axes, self.sizes, strict=True)
        return ", ".join(f"{axis} {size}" for axis, size in pairs)


def read_layout(text: str, ranks: Sequence[int]) -> list[dict[str, int]]:
    """Return the coordinates of ranks by a layout such as `dp2tp2`; the last axis varies fastest.

    Raises:
        InvalidInput: not of this form, or of another number of ranks.
    """
    pairs = [(each["axis"], int(each["size"])) for each in _LAYOUT.finditer(text)]
    if "".join(f"{axis}{size}" for axis, size in pairs) != text or not pairs:
        raise InvalidInput(f"layout {text!r:.100}", expected="such as dp2tp2, outermost axis first")
    if unknown := [axis for axis, _ in pairs if axis not in AXES]:
        raise InvalidInput(f"layout {text} has the axis {unknown[0]}", expected=", ".join(AXES))
    if len({axis for axis, _ in pairs}) < len(pairs):
        raise InvalidInput(f"layout {text} names an axis twice", expected="each axis once")
    count = math.prod(size for _, size in pairs)
    if count != len(ranks):
        raise InvalidInput(
            f"layout {text} is of {counted(count, 'rank')}, and {len(ranks)} are compared",
            expected="a layout of all ranks that dumped, or of those that ranks= chooses",
        )
    axes = [axis for axis, _ in pairs]
    places = itertools.product(*(range(size) for _, size in pairs))
    return [dict(zip(axes, place, strict=True)) for place in places]


def grid_of(tables: Sequence[RankTable], side: str) -> tuple[Grid, list[RankTable]]:
    """Return the grid of a side's ranks, and its tables in that order.

    Args:
        tables: of ranks that are distinct.
        side: its name, for errors.

    Raises:
        InvalidInput: their coordinates are not known, or form no grid.
    """
    tables = sorted(tables, key=lambda table: table.rank)
    if len(tables) == 1:
        return Grid((), (), (tables[0].rank,)), tables
    if unknown := [table.rank for table in tables if not table.coordinates]:
        raise InvalidInput(
            f"{counted(len(unknown), 'rank')} of side {side} reported no layout, rank {unknown[0]} "
            "among them",
            expected="a layout such as layout=dp2tp2, the outermost axis first",
        )
    chosen: list[str] = []
    for axis in AXES:
        distinct = len({_place(table, chosen) for table in tables})
        if len({_place(table, [*chosen, axis]) for table in tables}) > distinct:
            chosen.append(axis)
    axes = [axis for axis in AXES if axis in chosen]
    values = {axis: sorted({table.coordinates.get(axis, 0) for table in tables}) for axis in axes}
    by_place = {_place(table, axes): table for table in tables}
    places = list(itertools.product(*values.values()))
    if len(by_place) < len(tables) or any(place not in by_place for place in places):
        known = "; ".join(f"rank {table.rank}: {_text(table.coordinates)}" for table in tables[:8])
        raise InvalidInput(
            f"the {len(tables)} ranks of side {side} do not form a grid ({known})",
            expected="a dump of every combination of coordinates, such as layout=dp2tp2",
        )
    sizes = tuple(len(each) for each in values.values())
    ordered = [by_place[place] for place in places]
    return Grid(tuple(axes), sizes, tuple(table.rank for table in ordered)), ordered


def _place(table: RankTable, axes: Sequence[str]) -> tuple[int, ...]:
    return tuple(table.coordinates.get(axis, 0) for axis in axes)


def _text(coordinates: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {index}" for axis, index in coordinates.items()) or "no coordinates"


@dataclasses.dataclass(frozen=True, slots=True)
class ShardRule:
    """How the tensors whose names match are put together.

    Attributes:
        pattern: matches `NAME.SECTION.INDEX` of a tensor (`fnmatch`).
        ways: axis -> a dimension (its index from 0), or `sum`, `mean`, `same` or `skip`.
    """

    pattern: str
    ways: Mapping[str, int | str]

    def matches(self, name: str) -> bool:
        """Return whether it is of this tensor."""
        return fnmatch.fnmatchcase(name, self.pattern)


def read_rule(text: str) -> ShardRule:
    """Parse `PATTERN=AXIS:HOW[,AXIS:HOW]`, such as `*.o_proj.*.output.*=tp:sum`.

    Raises:
        InvalidInput: not of this form.
    """
    pattern, equals, ways_text = text.rpartition("=")
    ways: dict[str, int | str] = {}
    for item in ways_text.split(","):
        axis, _, how = (part.strip() for part in item.partition(":"))
        if how.isdecimal():
            ways[axis] = int(how)
        elif how in (SUM, MEAN, SAME, SKIP):
            ways[axis] = how
        if axis not in AXES or axis not in ways:
            ways.clear()
            break
    if not pattern or not equals or not ways:
        raise InvalidInput(
            f"shard rule {text!r:.200}",
            expected="PATTERN=AXIS:HOW, where HOW is a dimension from 0, sum, mean, same or skip",
        )
    return ShardRule(pattern, ways)
