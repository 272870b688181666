"""Convert columns to pandas, polars and arrow, which are imported on demand.

A column has the same type in every answer, so that the tables of two steps concatenate. If its
values do not determine the type (all are missing, lists are empty, all floats are integral), its
name does.

narwhals cannot do this for all three: its `from_dict` refuses an int column with a missing value
for pandas, and ranks, steps and rounds are such columns.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stagescope_wire import nonfinite
from stagescope_wire.errors import MissingExtra
from stagescope_wire.nonfinite import Json
from stagescope_wire.render import Columns
from stagescope_wire.versions import install_command

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

Kinds: TypeAlias = Mapping[str, str]
"""Column -> int, float, bool, text, ints, texts or nested; `int?` and `bool?` may be missing."""

_FILE: Final = json.loads(Path(__file__).with_name("columns.json").read_text(encoding="utf-8"))
# `python -m tests.tools.columns` makes the file of the OpenAPI document.
RECORDS: Final[Mapping[str, Kinds]] = _FILE["records"]
"""Nested column whose values are lists of records -> the fields of a record."""
COLUMNS: Final[Mapping[str, Kinds]] = _FILE["tables"]
"""Table -> its columns, so that a table without rows has the same ones."""

_NONE: Final[Kinds] = {}
_Library: TypeAlias = Any
"""The module pandas, polars or pyarrow; each is optional."""


def kinds(columns: Columns, known: Kinds = _NONE) -> Kinds:
    """Return the kind of each column; `known` are the kinds that do not depend on values."""
    return {name: _kind(name, values, known) for name, values in columns.items()}


def to_pandas(columns: Columns, kinds: Kinds = _NONE) -> pandas.DataFrame:
    """Return the columns as a pandas DataFrame."""
    library = _import("pandas")
    series = {
        name: library.Series(list(values), dtype=_PANDAS.get(_kind(name, values, kinds), "object"))
        for name, values in columns.items()
    }
    frame: pandas.DataFrame = library.DataFrame(series)
    return frame


def to_polars(columns: Columns, kinds: Kinds = _NONE) -> polars.DataFrame:
    """Return the columns as a polars DataFrame."""
    library = _import("polars")
    series = [
        library.Series(name, _flat(kind, values, name), dtype=_polars_type(library, kind, name))
        for name, values in columns.items()
        for kind in (_kind(name, values, kinds),)
    ]
    frame: polars.DataFrame = library.DataFrame(series)
    return frame


def to_arrow(columns: Columns, kinds: Kinds = _NONE) -> pyarrow.Table:
    """Return the columns as a pyarrow Table."""
    arrow = _import("pyarrow")
    arrays = {
        name: arrow.array(_flat(kind, values, name), type=_arrow_type(arrow, kind, name))
        for name, values in columns.items()
        for kind in (_kind(name, values, kinds),)
    }
    return arrow.table(arrays)


_PANDAS: Final[Mapping[str, str]] = {
    "int": "int64", "int?": "Int64", "bool": "bool", "bool?": "boolean", "float": "float64",
}  # fmt: skip


_BY_NAME: Final[Mapping[str, str]] = {
    **{
        name: kind.rstrip("?")
        for columns in COLUMNS.values()
        for name, kind in columns.items()
        if kind.rstrip("?") in ("int", "float", "bool")
    },
    **dict.fromkeys((
        "cooldown", "epoch", "fired", "microbatch", "minibatch", "occurrence", "replicas",
        "staleness", "start",
    ), "int"),
    **dict.fromkeys(("cosine", "high", "last_value", "low", "relative", "since", "value"), "float"),
    **dict.fromkeys(("acknowledged", "fired_live", "joined_later", "there"), "bool"),
}  # fmt: skip
"""Column -> its kind, in tables that declare none."""
_INT_ENDS: Final = ("_rank", "_size", "_count", "_bytes", "_tokens", "_rows")
_FLOAT_ENDS: Final = ("_wall", "_at", "_mono", "_seconds", "_mean", "_max", "_min", "_sum", "_std")
_INT_LISTS: Final = frozenset({"ranks", "shape", "policy_versions"})
_TEXT_LISTS: Final = frozenset({"sections", "suspects", "names", "dtypes"})


def _kind_by_name(name: str) -> str:
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.endswith(_FLOAT_ENDS):
        return "float"
    return "int" if name.endswith(_INT_ENDS) else "text"


def _kind(name: str, values: Sequence[Json], kinds: Kinds) -> str:
    """Return a column's kind: int, bool, float, text, ints, texts, records or nested.

    `?`: with None. Records are lists of mappings whose fields `RECORDS` knows by the column's name.
    """
    present = [value for value in values if value is not None]
    known = kinds.get(name)
    if known == "nested" and name in RECORDS:
        known = "records"
    declared = known or _kind_by_name(name)
    if not values and known:
        return known
    has_missing = declared.endswith("?") or len(present) < len(values)
    declared = declared.rstrip("?")
    optional = "?" if has_missing or not present else ""
    types = {type(value) for value in present}
    if not types:
        return declared + (optional if declared in ("int", "bool") else "")
    if types == {bool}:
        return "bool" + optional
    fits_int64 = types == {int} and all(-(2**63) <= value < 2**63 for value in present)
    if fits_int64 and declared != "float":
        return "int" + optional
    if types <= {int, float}:
        return "float"
    if types == {str}:
        return "text"
    if types == {list}:
        inner = {type(item) for value in present for item in value}
        if name in RECORDS and inner <= {dict}:
            return "records"
        if not inner:
            return "ints" if name in _INT_LISTS else "texts" if name in _TEXT_LISTS else "nested"
        return "ints" if inner == {int} else "texts" if inner == {str} else "nested"
    return "nested"


def _flat(kind: str, values: Sequence[Json], name: str) -> list[Json]:
    """Return the values of a column; nested values become JSON text, ints among floats floats."""
    if kind == "float":
        return [None if value is None else float(value) for value in values]
    if kind == "records":  # of the known fields alone: a later service may add some
        fields = RECORDS[name]
        return [
            None if value is None else [{each: item.get(each) for each in fields} for item in value]
            for value in values
        ]
    if kind != "nested":
        return list(values)
    return [
        value if value is None or isinstance(value, str) else json.dumps(nonfinite.spell(value))
        for value in values
    ]


def _polars_type(polars: _Library, kind: str, name: str) -> object:
    if kind == "records":
        fields = RECORDS[name].items()
        return polars.List(polars.Struct({n: _polars_type(polars, kind, n) for n, kind in fields}))
    return {
        "int": polars.Int64, "bool": polars.Boolean, "float": polars.Float64,
        "ints": polars.List(polars.Int64), "texts": polars.List(polars.String),
    }.get(kind.rstrip("?"), polars.String)  # fmt: skip


def _arrow_type(arrow: _Library, kind: str, name: str) -> object:
    if kind == "records":
        fields = [(n, _arrow_type(arrow, kind, n)) for n, kind in RECORDS[name].items()]
        return arrow.list_(arrow.struct(fields))
    return {
        "int": arrow.int64(), "bool": arrow.bool_(), "float": arrow.float64(),
        "ints": arrow.list_(arrow.int64()), "texts": arrow.list_(arrow.string()),
    }.get(kind.rstrip("?"), arrow.string())  # fmt: skip


def _import(name: str) -> _Library:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"this conversion needs {name}, which is not installed",
            advice=f"pip install {name}, or all of them: {install_command('notebook')}",
        ) from error
