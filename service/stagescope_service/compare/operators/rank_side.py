"""The operator tables of one side's ranks, in the rows of its first rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stagescope_service.compare.operators.calls import Codes, Flags, OperatorColumns, pair_calls
from stagescope_service.compare.operators.counts import join_rows
from stagescope_service.compare.operators.layouts import Grid, RankTable, grid_of
from stagescope_service.compare.operators.rank_tensors import Float64, RankTensors
from stagescope_service.compare.operators.readings import Sizes

NUMBERS: Final = ("min", "max", "mean", "norm")

Stats = npt.NDArray[np.float64]
"""Statistics by `NUMBERS`: [4, *grid, ...]; unknown ones are NaN."""


class Side:
    """The tables of one side's ranks.

    Attributes:
        grid: the ranks.
        columns: their tables in the order of the grid; `base` is the first.
        tensors: their full tensors.
        numbers, known: statistics, and which of them are known: [4, *grid, row].
    """

    def __init__(self, tables: Sequence[RankTable], name: str) -> None:
        """Read the tables; `name` is the side's name, for errors."""
        grid, tables = grid_of(tables, name)
        self.grid: Grid = grid
        self.columns = [OperatorColumns(table.path) for table in tables]
        self.base = self.columns[0]
        self.tensors = RankTensors(tables)
        self._rows: list[Codes] = [self._rows_of(each) for each in self.columns]
        shape = (len(NUMBERS), *grid.sizes, self.base.rows)
        numbers = self._gather(lambda side, name: side.numbers(name), np.nan)
        self.numbers: Stats = numbers.astype(np.float64).reshape(shape)
        known = self._gather(lambda side, name: side.is_known(name), 0)
        self.known: Flags = known.astype(bool).reshape(shape)

    def row_of(self, at: int, row: int) -> int:
        """Return the row in the table of rank `at` of the grid, -1 if it has none."""
        return int(self._rows[at][row])

    def texts(self, column: str, row: int) -> list[str | None]:
        """Return a text of a row on each rank."""
        return [
            None if rows[row] < 0 else side.texts(column).text(int(rows[row]))
            for side, rows in zip(self.columns, self._rows, strict=True)
        ]

    def text(self, column: str, row: int) -> str | None:
        """Return a text of a row on the first rank."""
        return self.base.texts(column).text(row)

    def sizes_of(self, row: int) -> Sizes | None:
        """Return the shape of a tensor on each rank, None if not all ranks have it alike."""
        texts = [text for text in self.texts("shape", row) if text is not None]
        shapes = [json.loads(text) for text in texts]
        if len(texts) < len(self.columns) or len({len(shape) for shape in shapes}) > 1:
            return None
        sizes: Sizes = np.asarray(shapes, np.int64).reshape(*self.grid.sizes, len(shapes[0]))
        return sizes

    def name_of(self, row: int) -> str:
        """Return the name of a tensor: `NAME.SECTION.INDEX`."""
        parts = (self.text(column, row) for column in ("name", "section", "index"))
        return ".".join(filter(None, parts))

    def tensor(self, at: int, row: int) -> Float64 | None:
        """Return the full tensor of rank `at` of the grid; None without one of its shape."""
        own = self.row_of(at, row)
        tensor = self.tensors.read(at, own)
        shape = self.columns[at].texts("shape").text(own) if own >= 0 else None
        return tensor if tensor is not None and str([*tensor.shape]) == shape else None

    def sum_of(self, row: int, ranks: Sequence[int]) -> Float64 | None:
        """Return the sum of the full tensors of ranks (indexes in the grid); None without them."""
        total: Float64 | None = None
        for at in ranks:
            tensor = self.tensor(at, row)
            if tensor is None or (total is not None and total.shape != tensor.shape):
                return None
            total = tensor if total is None else total + tensor
        return total

    def disagreements(self, thresholds: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return for each axis and row how many lines of ranks along it differ: [axis, row].

        Args:
            thresholds: relative difference that counts, of each row.
        """
        axes = range(len(self.grid.axes))
        found = [self._differing_lines(axis + 1, thresholds) for axis in axes]
        return np.asarray(found, np.int64).reshape(len(found), self.base.rows)

    def _differing_lines(
        self, axis: int, thresholds: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.int64]:
        numbers = self.numbers
        first = np.take(numbers, [0], axis)
        extremes = np.nanmax(np.abs(np.where(np.isfinite(numbers), numbers, 0.0))[:2], axis=0)
        scale = np.maximum(np.abs(numbers), np.abs(first))
        scale[2] = np.maximum(extremes, np.take(extremes, [0], axis - 1))
        with np.errstate(invalid="ignore"):
            near = np.abs(numbers - first) <= thresholds * scale
        equal = near | (numbers == first) | (np.isnan(numbers) & np.isnan(first))
        differ = (~equal).any(axis=(0, axis))
        return np.asarray(differ.reshape(-1, self.base.rows).sum(axis=0), np.int64)

    def _rows_of(self, columns: OperatorColumns) -> Codes:
        if columns is self.base:
            return np.arange(self.base.rows, dtype=np.int64)
        found = np.full(self.base.rows, -1, np.int64)
        joined = join_rows(self.base, columns, pair_calls(self.base, columns))
        both = (joined.row_a >= 0) & (joined.row_b >= 0)
        found[joined.row_a[both]] = joined.row_b[both]
        return found

    def _gather(
        self, column_of: Callable[[OperatorColumns, str], npt.NDArray[Any]], otherwise: float
    ) -> npt.NDArray[Any]:
        """Return columns by (statistic, rank, row); `otherwise` where a rank has no such row."""
        return np.asarray(
            [
                [
                    np.append(column_of(side, name), otherwise)[rows]
                    for side, rows in zip(self.columns, self._rows, strict=True)
                ]
                for name in NUMBERS
            ]
        )
