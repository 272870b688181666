"""Columns as other libraries have them: pandas, polars and arrow, imported when asked for.

A column has the same type in every answer: where its values do not tell (all are unknown, lists
are empty, floats happen to be whole), its name does, so that the tables of two steps concatenate.

Not by one call of narwhals for all three: its `from_dict` refuses an int column with a missing
value for pandas, and ranks, steps and rounds are such columns.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from stagescope.columns import Kinds
from stagescope.wire import nonfinite
from stagescope.wire.errors import MissingExtra

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

Columns = Mapping[str, Sequence[Any]]

_NONE: Final[Kinds] = {}


def kinds(columns: Columns, known: Kinds = _NONE) -> Kinds:
    """Return what each column holds, for tables that are to have the same types."""
    return {name: _kind(name, values, known) for name, values in columns.items()}


def to_pandas(columns: Columns, kinds: Kinds = _NONE) -> pandas.DataFrame:
    """Return the columns as a pandas DataFrame."""
    library = _import("pandas")
    series = {
        name: library.Series(list(values), dtype=_PANDAS[_kind(name, values, kinds)])
        for name, values in columns.items()
    }
    frame: pandas.DataFrame = library.DataFrame(series)
    return frame


def to_polars(columns: Columns, kinds: Kinds = _NONE) -> polars.DataFrame:
    """Return the columns as a polars DataFrame."""
    library = _import("polars")
    series = [
        library.Series(name, _flat(kind, values), dtype=_polars_type(library, kind))
        for name, values in columns.items()
        for kind in (_kind(name, values, kinds),)
    ]
    frame: polars.DataFrame = library.DataFrame(series)
    return frame


def to_arrow(columns: Columns, kinds: Kinds = _NONE) -> pyarrow.Table:
    """Return the columns as a pyarrow Table."""
    arrow = _import("pyarrow")
    arrays = {
        name: arrow.array(_flat(kind, values), type=_arrow_type(arrow, kind))
        for name, values in columns.items()
        for kind in (_kind(name, values, kinds),)
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
}


_INTS: Final = frozenset({
    "attempt", "attempts", "step", "rank", "round", "turn", "staleness", "superseded_by", "row",
    "position", "token_id", "order", "pid", "world_size", "parts", "parts_counted", "tokens",
    "masked_tokens", "nonfinite", "over_0.1", "over_0.5", "over_1", "over_5", "bytes", "files",
    "count", "losses", "findings", "firings", "fired", "seq", "revision", "processes", "epoch",
    "occurrence", "minibatch", "microbatch", "ranks_begun", "ranks_ended", "history_steps",
    "truncated_at", "masks", "replicas", "odd", "suspected", "start", "last_closed_step",
    "first_step", "last_step", "resumed_from_step", "consumed_step", "policy_version", "data_rank",
    "device_index", "sample_index", "cooldown", "calls", "grouped",
})  # fmt: skip
_INT_ENDS: Final = ("_rank", "_size", "_count", "_bytes", "_tokens", "_rows")
_FLOATS: Final = frozenset({
    "seconds", "wall", "begun", "ended", "since", "value", "p", "q", "abs_diff", "kl", "k3_kl",
    "pearson", "mult_prob_error", "reward", "min", "max", "mean", "norm", "last_value",
    "clock_error", "threshold", "relative", "temperature", "top_p", "waited_since", "cosine",
    "low", "high", "share",
})  # fmt: skip
_FLOAT_ENDS: Final = ("_wall", "_at", "_mono", "_seconds", "_mean", "_max", "_min", "_sum", "_std")
_BOOLS: Final = frozenset({
    "live", "superseded", "pinned", "measured", "certain", "done", "truncated", "shared", "unkeyed",
    "raw", "whole_role", "fired_live", "order_differs", "earliest", "acknowledged", "there",
    "joined_later", "processed", "device_time",
})  # fmt: skip
_INT_LISTS: Final = frozenset({"ranks", "odd_ranks", "shape", "policy_versions"})
_TEXT_LISTS: Final = frozenset({"sections", "suspects", "names", "dtypes"})


def _said(name: str) -> str:
    """Return what a column's name says that it holds."""
    if name in _BOOLS:
        return "bool"
    if name in _FLOATS or name.endswith(_FLOAT_ENDS):
        return "float"
    if name in _INTS or name.endswith(_INT_ENDS):
        return "int"
    return "text"


def _kind(name: str, values: Sequence[Any], kinds: Kinds) -> str:
    """Return what a column holds: int, bool, float, text, ints, texts, nested (? = with None)."""
    present = [value for value in values if value is not None]
    known = kinds.get(name)
    said = known or _said(name)
    if not values and known:
        return known
    may_lack = said.endswith("?") or len(present) < len(values)
    said = said.rstrip("?")
    optional = "?" if may_lack or not present else ""
    types = {type(value) for value in present}
    if not types:
        return said + (optional if said in ("int", "bool") else "")
    if types == {bool}:
        return "bool" + optional
    if types == {int} and said != "float" and all(-(2**63) <= value < 2**63 for value in present):
        return "int" + optional
    if types <= {int, float}:
        return "float"
    if types == {str}:
        return "text"
    if types == {list}:
        inner = {type(item) for value in present for item in value}
        if not inner:
            return "ints" if name in _INT_LISTS else "texts" if name in _TEXT_LISTS else "nested"
        return "ints" if inner == {int} else "texts" if inner == {str} else "nested"
    return "nested"


def _flat(kind: str, values: Sequence[Any]) -> list[Any]:
    """Return the values with what has no column type as JSON text, and floats all floats."""
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
