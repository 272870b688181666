"""Functions that declare the tables: a TypedDict is the type of a row, its fields the columns.

The column types are the same in SQLite and PostgreSQL. SQLite's tables are STRICT: the database
rejects a value of a wrong type, as PostgreSQL does, instead of converting it. STRICT supports
INTEGER, REAL, TEXT and BLOB, so every type here has one of those names on SQLite.
"""

from __future__ import annotations

import json
import math
import types
from typing import Any, Final, TypedDict, Union, get_args, get_origin

import sqlalchemy as sa
from sqlalchemy import Column, Index
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeDecorator, TypeEngine
from typing_extensions import get_type_hints

from stagescope_wire.nonfinite import Json
from stagescope_wire.schema import PartColumns

Int: Final[TypeEngine[int]] = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Real: Final[TypeEngine[float]] = sa.Double().with_variant(sa.REAL(), "sqlite")
Text: Final[TypeEngine[str]] = sa.Text()
Blob: Final[TypeEngine[bytes]] = sa.LargeBinary()

_NAMES: Final = {math.inf: "inf", -math.inf: "-inf"}
NON_FINITE_NAMES: Final = ("nan", *_NAMES.values())
"""The results of `nonfinite_name` for non-finite numbers."""


def nonfinite_name(value: float) -> str | None:
    """Return 'nan', 'inf' or '-inf', or None where `value` is finite."""
    return None if math.isfinite(value) else _NAMES.get(value, "nan")


def split_value(value: float | None) -> dict[str, Json]:
    """Return the columns `value` and `nonfinite` of a scalar."""
    if value is None:
        return {"value": None, "nonfinite": None}
    value = float(value)  # database drivers do not accept numpy scalars as floats
    name = nonfinite_name(value)
    return {"value": None if name else value, "nonfinite": name}


def dump_json(value: Json) -> str:
    """Write strict JSON: non-finite floats become the strings 'nan', 'inf', '-inf'.

    Raises:
        TypeError: a value that JSON cannot represent.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare; the usual value is traversed once, in C
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Json) -> Json:
    if isinstance(value, float):
        return nonfinite_name(value) or value
    if isinstance(value, dict):
        return {_finite(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class StrictJson(TypeDecorator[Any]):
    """JSON as TEXT, readable by any tool; None is NULL, which means unknown."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Json, dialect: Dialect) -> str | None:
        """Write JSON."""
        return None if value is None else dump_json(value)

    def process_result_value(self, value: Json, dialect: Dialect) -> Json:
        """Read JSON."""
        return None if value is None else json.loads(value)


class Flag(TypeDecorator[bool]):
    """A bool; an INTEGER on SQLite, whose STRICT tables have no BOOLEAN."""

    impl = sa.Boolean
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Choose the database's own type."""
        return dialect.type_descriptor(sa.Integer() if dialect.name == "sqlite" else sa.Boolean())

    def process_bind_param(self, value: Any, dialect: Dialect) -> bool | None:
        """Write a bool."""
        return None if value is None else bool(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> bool | None:
        """Read a bool."""
        return None if value is None else bool(value)


# --- tables ------------------------------------------------------------------------------------
metadata: Final = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

views: Final = sa.MetaData()
"""Views with the logical columns of the rows of `tables.compact`."""

_KINDS: Final[dict[Any, Any]] = {str: Text, int: Int, float: Real, bool: Flag(), bytes: Blob}
"""Type of a field -> type of its column; other types are JSON."""


def key(name: str, kind: Any, *, is_generated: bool = False) -> Column[object]:
    """Return a column of the primary key."""
    return Column(name, kind, primary_key=True, autoincrement=is_generated)


def columns(kind: Any, names: str) -> list[Column[object]]:
    """Return a column for each of `names`, which are separated by spaces."""
    return [Column(name, kind) for name in names.split()]


def table(
    name: str, row: type, keys: str, *parts: SchemaItem, is_generated: bool = False
) -> sa.Table:
    """Declare a table.

    Args:
        name: of the table.
        row: the TypedDict of its rows.
        keys: the columns of the primary key, separated by spaces.
        parts: indexes and constraints.
        is_generated: whether the database generates the key.
    """
    declared = _columns(row, keys, is_generated=is_generated)
    # With a rowid: WITHOUT ROWID repeats these long keys in every index, and was half as fast.
    return sa.Table(name, metadata, *declared, *parts, sqlite_strict=True)


def view(name: str, row: type, keys: str) -> sa.Table:
    """Declare the logical rows of a compact table, as `table` does."""
    return sa.Table(name, views, *_columns(row, keys))


def _columns(row: type, keys: str, *, is_generated: bool = False) -> list[Column[object]]:
    hints = get_type_hints(row)
    kinds = {name: _KINDS.get(_required(hint), StrictJson()) for name, hint in hints.items()}
    own = [key(name, kinds.pop(name), is_generated=is_generated) for name in keys.split()]
    return own + [Column(name, kind) for name, kind in kinds.items()]


def _required(hint: Any) -> Any:
    """Return the type of a field that is not null."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = {*get_args(hint)} - {types.NoneType}
    return hint


def partial_index(name: str, *names: str, where: str) -> Index:
    """Return an index of the rows where `where` is true; a query must repeat it word for word."""
    return Index(name, *names, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


class RankWork(PartColumns):
    """The columns that identify the rank and the work of a row, without the stage."""

    attempt_id: int
    step: int | None
    policy_version: int | None
    role: str
    rank: int


class StageWork(RankWork):
    """The columns that identify the rank and the work of a row."""

    stage: str


class LayoutRow(TypedDict):
    """A rank's place in its parallel layout."""

    cluster: str | None
    node: str | None
    host: str | None
    device_kind: str | None
    device_index: int | None
    device_serial: str | None
    dp_rank: int | None
    dp_size: int | None
    tp_rank: int | None
    tp_size: int | None
    pp_rank: int | None
    pp_size: int | None
    vpp_rank: int | None
    vpp_size: int | None
    cp_rank: int | None
    cp_size: int | None
    sp_rank: int | None
    sp_size: int | None
    ep_rank: int | None
    ep_size: int | None
    etp_rank: int | None
    etp_size: int | None
    engine: str | None
    engine_version: str | None
    framework: str | None
    framework_version: str | None
