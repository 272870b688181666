"""The columns of tables without rows."""

from __future__ import annotations

import math

import pandas
import polars
import pytest
from tests.tools import columns

from stagescope import Table
from stagescope.convert import COLUMNS, RECORDS
from stagescope_wire.nonfinite import Json

SPELLED: dict[str, Json] = {
    "int": 1, "float": 0.5, "text": "x", "bool": True, "ints": [1], "texts": ["x"],
    "nested": {"a": 1},
}  # fmt: skip
"""Kind of a column -> a value of it."""


def test_the_columns_are_those_of_the_answers() -> None:
    assert columns.FILE.read_text() == columns.columns_text(), "run python -m tests.tools.columns"


@pytest.mark.parametrize("noun", ["scalars", "tokens", "findings", "stages", "runs"])
def test_a_table_without_rows_concatenates_with_a_full_one(noun: str) -> None:
    row = {name: SPELLED[kind.rstrip("?")] for name, kind in COLUMNS[noun].items()}
    row |= {name: "nan" for name in ("value", "p") if name in row}
    full = Table.from_rows([row], order=("rank", "value"), columns=COLUMNS[noun])
    for empty in (
        Table.from_rows([], order=("rank", "value"), columns=COLUMNS[noun]),
        full[:0],
        full.select(*full.names)[1:],
    ):
        assert empty.names == full.names
        both = polars.concat([full.to_polars(), empty.to_polars()])
        assert both.height == 1
        assert empty.to_arrow().schema == full.to_arrow().schema
        assert dict(empty.to_pandas().dtypes) == dict(full.to_pandas().dtypes)
        assert empty.lines() == ["(no rows)"]


@pytest.mark.parametrize("noun", ["steps", "attempts", "weights"])
def test_records_keep_their_type_whatever_they_hold(noun: str) -> None:
    kinds = COLUMNS[noun]
    names = [name for name in kinds if name in RECORDS]
    assert names
    empty_row = {name: SPELLED[kind.rstrip("?")] for name, kind in kinds.items()}
    record = {
        name: {field: SPELLED[kind] for field, kind in RECORDS[name].items()} for name in names
    }
    full_row = empty_row | {name: [{**record[name], "later": 7}] for name in names}
    empty_row |= {name: [] for name in names}
    lacking = empty_row | dict.fromkeys(names)
    tables = [
        Table.from_rows(rows, columns=kinds)
        for rows in ([], [empty_row], [full_row], [empty_row, full_row], [lacking], [lacking] * 0)
    ]
    frames = [table.to_polars() for table in tables]
    both = polars.concat(frames)
    assert [both[name].to_list() for name in names] == [
        [[], [record[name]], [], [record[name]], None] for name in names
    ]
    assert both.filter(polars.col(names[0]).list.len() > 0).height == 2
    assert len({str(table.to_arrow().schema) for table in tables}) == 1
    assert tables[2].to_arrow().to_pylist()[0][names[0]] == [record[names[0]]]
    joined = pandas.concat([table.to_pandas() for table in tables])
    assert {str(joined[name].dtype) for name in names} == {"object"}


def test_a_selection_without_rows_keeps_the_types_of_its_table() -> None:
    full = Table.from_rows([{"epoch": 1, "x": 2, "y": math.inf, "z": "a", "b": False, "l": [1]}])
    empty = full.where(epoch=7)
    assert dict(empty.to_pandas().dtypes) == dict(full.to_pandas().dtypes)
    assert empty.to_polars().schema == full.to_polars().schema
