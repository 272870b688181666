"""Columns as other libraries have them: pandas, polars and arrow, imported when asked for.

Not by one call of narwhals for all three: its `from_dict` refuses an int column with a missing
value for pandas, and ranks, steps and rounds are such columns.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from stagescope import nonfinite
from stagescope.errors import MissingExtra

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

Columns = Mapping[str, Sequence[Any]]


def to_pandas(columns: Columns) -> pandas.DataFrame:
    """Return the columns as a pandas DataFrame."""
    library = _import("pandas")
    series = {
        name: library.Series(list(values), dtype=_PANDAS[_kind(values)])
        for name, values in columns.items()
    }
    frame: pandas.DataFrame = library.DataFrame(series)
    return frame


def to_polars(columns: Columns) -> polars.DataFrame:
    """Return the columns as a polars DataFrame."""
    library = _import("polars")
    series = [
        library.Series(name, _flat(values), dtype=_polars_type(library, _kind(values)))
        for name, values in columns.items()
    ]
    frame: polars.DataFrame = library.DataFrame(series)
    return frame


def to_arrow(columns: Columns) -> pyarrow.Table:
    """Return the columns as a pyarrow Table."""
    arrow = _import("pyarrow")
    arrays = {
        name: arrow.array(_flat(values), type=_arrow_type(arrow, _kind(values)))
        for name, values in columns.items()
    }
    return arrow.table(arrays)


_PANDAS: Final[Mapping[str, str]] = {
    "int": "int64",
    "int?": "Int64",
    "bool": "bool",
    "bool?": "boolean",
    "float": "float64",
    "text": "object",
    "ints": "object",
    "texts": "object",
    "nested": "object",
    "empty": "object",
}


def _kind(values: Sequence[Any]) -> str:
    """Return what a column holds: int, bool, float, text, ints, texts, nested, empty (? = None)."""
    present = [value for value in values if value is not None]
    optional = "?" if len(present) < len(values) else ""
    types = {type(value) for value in present}
    if not types:
        return "empty"
    if types == {bool}:
        return "bool" + optional
    if types == {int} and all(-(2**63) <= value < 2**63 for value in present):
        return "int" + optional
    if types <= {int, float}:
        return "float"
    if types == {str}:
        return "text"
    if types == {list}:
        inner = {type(item) for value in present for item in value}
        return "ints" if inner == {int} else "texts" if inner <= {str} else "nested"
    return "nested"


def _flat(values: Sequence[Any]) -> list[Any]:
    """Return the values with what has no column type as JSON text, and floats all floats."""
    kind = _kind(values)
    if kind == "float":
        return [None if value is None else float(value) for value in values]
    if kind != "nested":
        return list(values)
    return [
        value if value is None or isinstance(value, str) else json.dumps(nonfinite.spell(value))
        for value in values
    ]


def _polars_type(polars: Any, kind: str) -> Any:
    return {
        "int": polars.Int64,
        "bool": polars.Boolean,
        "float": polars.Float64,
        "ints": polars.List(polars.Int64),
        "texts": polars.List(polars.String),
    }.get(kind.rstrip("?"), polars.String)


def _arrow_type(arrow: Any, kind: str) -> Any:
    return {
        "int": arrow.int64(),
        "bool": arrow.bool_(),
        "float": arrow.float64(),
        "ints": arrow.list_(arrow.int64()),
        "texts": arrow.list_(arrow.string()),
    }.get(kind.rstrip("?"), arrow.string())


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"this conversion needs {name}, which is not installed",
            advice=f"pip install {name}, or all of them: pip install 'stagescope[notebook]'",
        ) from error
