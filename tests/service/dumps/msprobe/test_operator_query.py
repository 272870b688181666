"""Rows of an operator table by filter, and whole columns."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.dumps import Masked, table, tabled

from stagescope_service.dumps.msprobe.operator_query import (
    OperatorFilter,
    iterate_rows,
    load_columns,
    read_operators,
    read_stack,
)
from stagescope_service.dumps.msprobe.operator_table import SCHEMA
from stagescope_wire.errors import InvalidInput, NotFound, StoreError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table(tmp_path_factory.mktemp("dump"), Masked())


@pytest.fixture(scope="module")
def rows(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = pq.read_table(path).to_pylist()
    return found


def names(path: Path, where: OperatorFilter) -> list[str]:
    return list(read_operators(path, where, limit=10_000).columns["name"])


@given(st.text(alphabet="*?ae.l0[](\\^$|\n", min_size=1, max_size=8))
@example("*linear*")
@example("Module.*.forward.?")
@example("Functional.linear.0.forward")
@example("?*.*")
def test_patterns_match_the_full_name_and_are_not_regular_expressions(
    path: Path, pattern: str
) -> None:
    everything = names(path, OperatorFilter())
    literal = pattern.replace("[", "[[]")
    globs = "*" in pattern or "?" in pattern
    assert names(path, OperatorFilter(name=pattern)) == [
        name for name in everything if (fnmatchcase(name, literal) if globs else pattern in name)
    ]


@pytest.mark.parametrize(
    ("where", "fits"),
    [
        (OperatorFilter(kind="Module"), lambda row: row["kind"] == "Module"),
        (OperatorFilter(direction="backward"), lambda row: row["direction"] == "backward"),
        (OperatorFilter(section="parameters"), lambda row: row["section"] == "parameters"),
        (OperatorFilter(non_finite=True), lambda row: row["non_finite"] is not None),
        (OperatorFilter(first_order=3, last_order=5), lambda row: 3 <= row["order"] <= 5),
        (
            OperatorFilter(name="scores", kind="Module", section="output", direction="forward"),
            lambda row: (
                (row["name"], row["section"]) == ("Module.scores.Scores.forward.0", "output")
            ),
        ),
    ],
    ids=["kind", "direction", "section", "non_finite", "order", "together"],
)
def test_filters(path: Path, rows: list[dict[str, Any]], where: OperatorFilter, fits: Any) -> None:
    expected = [row for row in rows if fits(row)]
    assert 0 < len(expected) < len(rows)
    found = list(iterate_rows(path, where))
    assert str(found) == str(expected)  # NaN is not equal to itself
    page = read_operators(path, where, limit=10_000)
    assert str(page.columns["mean"]) == str([row["mean"] for row in expected])
    assert list(page.columns) == SCHEMA.names


@given(offset=st.integers(0, 300), limit=st.integers(0, 300))
def test_pages_add_up_to_all_rows(
    path: Path, rows: Sequence[dict[str, object]], offset: int, limit: int
) -> None:
    page = read_operators(path, offset=offset, limit=limit)
    expected = rows[offset : offset + limit]
    assert page.columns["index"] == [row["index"] for row in expected]
    assert page.more == (offset + limit < len(rows))


def test_invalid_queries_are_refused(path: Path) -> None:
    for offset, limit in ((0, 10_001), (0, -1), (-1, 1000)):
        with pytest.raises(InvalidInput):
            read_operators(path, offset=offset, limit=limit)
    with pytest.raises(InvalidInput):
        load_columns(path, ["nothing"])


def test_complete_columns_are_arrays(path: Path, rows: Sequence[dict[str, object]]) -> None:
    found = load_columns(path, ["order", "name", "module_class", "shape", "mean"])
    assert found["order"].tolist() == [row["order"] for row in rows]
    count = len(rows)
    for column in ("name", "module_class"):
        assert [found[column].text(i) for i in range(count)] == [row[column] for row in rows]
    shapes = [None if row["shape"] is None else str(row["shape"]) for row in rows]
    assert [found["shape"].text(i) for i in range(count)] == shapes
    assert found["mean_known"].tolist() == [row["mean"] is not None for row in rows]
    assert np.isnan(found["mean"][~found["mean_known"]]).all()


def test_columns_of_no_row_are_empty(tmp_path: Path) -> None:
    empty, _ = tabled(tmp_path, '{"data": {}}')
    found = load_columns(empty, ["name", "shape", "max"])
    assert (len(found["name"].codes), len(found["shape"].codes), len(found["max"])) == (0, 0, 0)


def test_a_file_that_is_not_an_operator_table_is_an_error(tmp_path: Path, path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no Parquet")
    pq.write_table(pa.table({"name": ["x"]}), tmp_path / "foreign.parquet")
    (tmp_path / "half.parquet").write_bytes(path.read_bytes()[:1000])
    for name in ("text", "foreign", "half"):
        with pytest.raises(StoreError, match="operator table"):
            read_operators(tmp_path / f"{name}.parquet")
    with pytest.raises(NotFound):
        read_operators(tmp_path / "nothing.parquet")
    with pytest.raises(NotFound, match="stack"):
        read_stack(path, "no such stack")
