"""Functions that declare the tables: a TypedDict is the type of a row, its fields the columns."""

from __future__ import annotations

import types
from typing import Any, Final, TypedDict, Union, get_args, get_origin

import sqlalchemy as sa
from sqlalchemy import Column, Index
from sqlalchemy.schema import SchemaItem
from typing_extensions import get_type_hints

from stagescope_service.store.columns import Blob, Flag, Int, Real, StrictJson, Text
from stagescope_wire.schema import PartColumns

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
