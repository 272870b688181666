from __future__ import annotations

import importlib
import math
import sys

import polars
import pyarrow
import pytest

from stagescope import InvalidInput, Metrics, MissingExtra, NotFound, Record, Table
from stagescope_wire.nonfinite import Json

ROWS: list[dict[str, Json]] = [
    {"rank": 0, "value": 0.5, "stage": "nan", "ok": True, "ranks": [1, 2], "more": {"a": math.inf}},
    {"rank": None, "value": "nan", "stage": None, "ok": None, "ranks": None, "more": None},
    {"rank": 2, "value": None, "stage": "s", "ok": False, "ranks": [], "more": {"b": [1, "x"]}},
]


@pytest.fixture
def table() -> Table:
    return Table.from_rows(ROWS, title="rows", about={"run": "r", "attempt": 2})


def test_spelled_numbers_become_floats_where_numbers_stand(table: Table) -> None:
    assert math.isnan(table["value"][1])
    assert table["value"][2] is None
    assert table["stage"][0] == "nan"


def test_a_text_column_keeps_spelled_numbers() -> None:
    table = Table.from_rows([{"x": "inf"}, {"x": "infinite"}, {"y": "-inf"}])
    assert table["x"] == ("inf", "infinite", None)
    assert table["y"] == (None, None, -math.inf)


def test_rows_columns_and_slices(table: Table) -> None:
    assert len(table) == 3
    assert table[0]["rank"] == 0
    assert table[-1]["rank"] == 2
    assert [row["rank"] for row in table] == [0, None, 2]
    assert table[1:]["rank"] == (None, 2)
    assert table.select("rank", "ok").names == ("rank", "ok")
    assert table.where(rank=2, ok=False)["stage"] == ("s",)
    assert table.where(rank=2).about == {"run": "r", "attempt": 2}
    with pytest.raises(IndexError):
        table[3]
    with pytest.raises(NotFound, match="one of rank, value"):
        table["no"]
    with pytest.raises(NotFound):
        table.where(no=1)


def test_columns_have_one_length() -> None:
    with pytest.raises(InvalidInput, match="lengths"):
        Table({"a": [1], "b": []})


def test_pandas(table: Table) -> None:
    frame = table.to_pandas()
    assert frame["rank"].dtype == "Int64"
    assert frame["rank"].isna().tolist() == [False, True, False]
    assert frame["value"].dtype == "float64"
    assert frame["ok"].dtype == "boolean"
    assert frame["stage"].tolist() == ["nan", None, "s"]
    assert frame["ranks"][0] == [1, 2]
    assert Table.from_rows([{"a": 1, "b": True, "c": 1.5, "d": 2}]).to_pandas().dtypes.tolist() == [
        "int64",
        "bool",
        "float64",
        "int64",
    ]


def test_polars(table: Table) -> None:
    frame = table.to_polars()
    assert frame["rank"].to_list() == [0, None, 2]
    assert frame.schema["ranks"] == polars.List(polars.Int64)
    assert math.isnan(frame["value"][1])
    assert frame["value"][2] is None
    assert frame["more"].to_list() == ['{"a": "inf"}', None, '{"b": [1, "x"]}']


def test_arrow(table: Table) -> None:
    arrow = table.to_arrow()
    assert arrow.schema.field("rank").type == pyarrow.int64()
    assert arrow["value"].null_count == 1
    assert arrow["ranks"].to_pylist() == [[1, 2], None, []]
    assert polars.DataFrame(table)["rank"].to_list() == [0, None, 2]


@pytest.mark.parametrize("rows", [[], [{}], [{"a": None}], [{"a": 2**70}], [{"a": [1, "x", None]}]])
def test_odd_tables_convert_and_show(rows: list[dict[str, Json]]) -> None:
    table = Table.from_rows(rows)
    expected = len(rows) if any(rows) else 0
    assert len(table) == expected
    assert len(table.to_pandas()) == len(table.to_polars()) == len(table.to_arrow()) == expected
    assert repr(table)
    assert table._repr_html_()


def test_ints_and_floats_in_one_column_are_floats() -> None:
    table = Table.from_rows([{"a": 1}, {"a": 0.5}])
    assert table.to_arrow().schema.field("a").type == pyarrow.float64()
    assert table.to_polars().schema["a"] == polars.Float64
    assert table.to_pandas()["a"].dtype == "float64"


@pytest.mark.parametrize("name", ["pandas", "polars", "pyarrow"])
def test_a_missing_library_names_the_extra(
    table: Table, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None is how Python itself marks a module as not importable.
    monkeypatch.setitem(sys.modules, name, None)
    convert = {"pandas": table.to_pandas, "polars": table.to_polars, "pyarrow": table.to_arrow}
    with pytest.raises(MissingExtra, match=r"\[notebook\]") as caught:
        convert[name]()
    assert isinstance(caught.value, ImportError)
    monkeypatch.undo()
    importlib.import_module(name)


def test_text_names_run_and_attempt_once(table: Table) -> None:
    rows = [{**row, "run": "r", "attempt": 2} for row in ROWS]
    text = repr(Table.from_rows(rows, title="rows", about={"run": "r", "attempt": 2}))
    assert text.splitlines()[0] == "rows, run r, attempt 2 (3 rows)"
    assert "attempt" not in text.splitlines()[1]
    assert max(map(len, text.splitlines())) <= 80


def test_a_column_that_differs_from_the_heading_stays() -> None:
    table = Table.from_rows([{"attempt": 1}, {"attempt": 2}], about={"run": "r", "attempt": None})
    assert "attempt" in repr(table).splitlines()[1]


def test_long_and_truncated_tables_are_marked() -> None:
    table = Table.from_rows([{"a": n} for n in range(200)], truncated=True)
    assert "... 180 more rows" in repr(table)
    assert "truncated at 200 rows" in repr(table)
    assert "... 100 more rows" in table._repr_html_()
    assert len(table.lines()) == 2 + 200 + 1


def test_metrics_are_a_mapping_of_floats() -> None:
    metrics = Metrics.from_answer(
        {
            "run": "nan", "step": 5, "metrics": {"a/x": "nan", "a/y": "-inf", "b": 1.5},
            "noise_floor": {"x": "inf"}, "missing": None,
        }
    )  # fmt: skip
    assert math.isnan(metrics["a/x"])
    assert metrics["a/y"] == -math.inf
    assert metrics.run == "nan"
    assert metrics.noise_floor == {"x": math.inf}
    assert dict(metrics.under("a/")).keys() == {"a/x", "a/y"}
    assert metrics.get("no") is None
    assert "no" not in metrics
    with pytest.raises(KeyError, match="one of a/x"):
        metrics["no"]
    assert metrics.to_pandas()["value"].tolist()[2] == 1.5
    assert metrics.to_polars().shape == metrics.to_arrow().shape == (3, 2)
    assert metrics.to_dicts()[2] == {"name": "b", "value": 1.5}


def test_metrics_describe_their_provenance() -> None:
    metrics = Metrics.from_answer(
        {
            "run": "r",
            "attempt": 1,
            "step": 5,
            "complete": "partial",
            "missing": [{"role": "actor", "rank": 1, "stage": "s", "status": "begun"}],
            "stage": "actor_update",
            "role": "actor",
            "metrics": {"a": 1.0},
            "nonfinite": {"rollout": {"nan": 2}, "old": {"nan": 0}},
            "comparability": [{"code": "shift", "verdict": "warning", "text": "<b>shifted</b>"}],
            "superseded_by": 2,
            "also_live": [{"run": "other", "attempt": 1}],
            "coverage": {
                "payloads_ingested": 1, "payloads_refused": 3, "payloads_lost": 0, "tokens": 9,
                "tokens_sent": 9,
            },
        }
    )  # fmt: skip
    assert "not in these numbers: 3 refused payloads; see lost data" in repr(metrics)
    assert "lost payloads" not in repr(metrics)
    # What the refused payloads hold, nobody knows: these are not all that were sent.
    assert "tokens: 9 of 9 that were read count" in repr(metrics)
    text, page = repr(metrics), metrics._repr_html_()
    phrases = (
        "partial", "actor/1 s begun", "shift", "2 NaN in rollout", "superseded by attempt 2",
        "other",
    )  # fmt: skip
    for phrase in phrases:
        assert phrase in text
    assert "in old" not in text
    assert "<b>shifted" not in page
    assert "&lt;b&gt;shifted" in page
    assert max(map(len, text.splitlines())) <= 80


def test_a_record_shows_its_fields_on_lines_that_fit() -> None:
    record = Record({"a": {"b": 1, "c": {"d": None}}, "path": "/x" * 100}, title="status")
    lines = repr(record).splitlines()
    assert lines[0] == "status"
    assert lines[1].split() == ["a.b", "1"]
    assert lines[2].split() == ["a.c.d", "-"]
    # A path stays in one piece, to be copied.
    assert [line for line in lines if len(line) > 80] == [f"path   {'/x' * 100}"]
    assert "".join(line.split()[-1] for line in lines[3:]) == "/x" * 100
    assert record["a"]["b"] == 1
    assert "status" in record._repr_html_()
    with pytest.raises(KeyError):
        record["no"]
