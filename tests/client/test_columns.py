"""The columns of tables without rows, held to the models of the API's answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import pandas
import polars
import pytest
from pydantic import BaseModel

from stagescope import Table
from stagescope.columns import COLUMNS, RECORDS
from stagescope.wire.nonfinite import Json
from stagescope_service.api.models import (
    common,
    diagnosis,
    numbers,
    operators,
    runs,
    samples,
    service,
    steps,
    triggers,
)

MODELS: Final[Mapping[str, type[BaseModel]]] = {
    "rounds": numbers.SliceRow,
    "ranks": numbers.RankRow,
    "tokens": numbers.TokenRow,
    "samples": samples.SampleRow,
    "loss": samples.LossRow,
    "diagnosis": diagnosis.Symptom,
    "stages": steps.StageRow,
    "scalars": steps.ScalarRow,
    "stuck": steps.StuckRow,
    "dumps": common.DumpRow,
    "kept": steps.KeptFile,
    "operators": operators.OperatorRow,
    "non_finite": operators.FirstNonFinite,
    "weights": service.Weight,
    "versions": service.WeightVersion,
    "devices": service.Device,
    "runs": runs.RunRow,
    "metric_names": runs.NumberName,
    "attempts": runs.AttemptRow,
    "steps": runs.StepRow,
    "findings": runs.FindingRow,
    "findings/groups": runs.FindingGroup,
    "losses": runs.LossRow,
    "losses/groups": runs.LossGroup,
    "firings": triggers.Firing,
    "firings/groups": runs.FiringGroup,
}
_KINDS: Final = {"integer": "int", "number": "float", "boolean": "bool", "string": "text"}


def columns_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the columns that every row of a model has, and what each holds."""
    schema = model.model_json_schema()
    kept = schema["required"]
    return {name: kind_of(schema["properties"][name], schema.get("$defs", {})) for name in kept}


def kind_of(about: Mapping[str, Json], defs: Mapping[str, Json]) -> str:
    if "$ref" in about:
        return kind_of(defs[about["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in about:
        kinds = [kind_of(each, defs) for each in about["anyOf"] if each.get("type") != "null"]
        # Beside a number stand the names of those that are not finite.
        kind = "float" if "float" in kinds else kinds[0]
        optional = len(kinds) < len(about["anyOf"]) and kind in ("int", "bool")
        return kind + "?" * optional
    if about.get("type") == "array":
        inner = kind_of(about["items"], defs)
        return {"int": "ints", "text": "texts"}.get(inner, "nested")
    return _KINDS.get(about.get("type", ""), "nested")


@pytest.mark.parametrize("noun", MODELS)
def test_the_columns_are_those_of_the_answers(noun: str) -> None:
    assert COLUMNS[noun] == columns_of(MODELS[noun])


def test_every_noun_has_a_model() -> None:
    assert COLUMNS.keys() == MODELS.keys()


@pytest.mark.parametrize("noun", ["scalars", "tokens", "findings", "stages", "runs"])
def test_a_table_without_rows_concatenates_with_a_full_one(noun: str) -> None:
    spell: dict[str, Json] = {
        "int": 1, "float": 0.5, "text": "x", "bool": True, "ints": [1], "texts": ["x"],
        "nested": {"a": 1},
    }  # fmt: skip
    row = {name: spell[kind.rstrip("?")] for name, kind in COLUMNS[noun].items()}
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


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("begun_again", common.BegunAgain),
        ("missing", common.Missing),
        ("superseded", runs.Superseded),
        ("odd_ranks", common.RoleRank),
    ],
)
def test_records_have_the_fields_of_the_answers(name: str, model: type[BaseModel]) -> None:
    assert RECORDS[name] == columns_of(model)


@pytest.mark.parametrize("noun", ["steps", "attempts", "weights"])
def test_records_keep_their_type_whatever_they_hold(noun: str) -> None:
    columns = COLUMNS[noun]
    names = [name for name in columns if name in RECORDS]
    assert names
    spell: dict[str, Json] = {
        "int": 1, "float": 0.5, "text": "x", "bool": True, "ints": [1], "texts": ["x"],
        "nested": {"a": 1},
    }  # fmt: skip
    empty_row = {name: spell[kind.rstrip("?")] for name, kind in columns.items()}
    record = {name: {field: spell[kind] for field, kind in RECORDS[name].items()} for name in names}
    full_row = empty_row | {name: [{**record[name], "later": 7}] for name in names}
    empty_row |= {name: [] for name in names}
    lacking = empty_row | dict.fromkeys(names)
    tables = [
        Table.from_rows(rows, columns=columns)
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
