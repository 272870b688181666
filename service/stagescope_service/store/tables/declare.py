"""Functions that declare the tables."""

from __future__ import annotations

from typing import Any, Final, TypedDict

import sqlalchemy as sa
from sqlalchemy import Column, Index

from stagescope_service.store.columns import Int, Text
from stagescope_wire.schema import LAYOUT_COLUMNS, PART_FIELDS, PartColumns

metadata: Final = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

views: Final = sa.MetaData()
"""Views with the logical columns of the rows of `tables.compact`."""

_INT_LAYOUT: Final = ("_rank", "_size", "_index")


def key(name: str, kind: Any) -> Column[object]:
    """Return a column of the primary key."""
    return Column(name, kind, primary_key=True, autoincrement=False)


def columns(kind: Any, names: str) -> list[Column[object]]:
    """Return a column for each of `names`, which are separated by spaces."""
    return [Column(name, kind) for name in names.split()]


def layout() -> list[Column[Any]]:
    """Return the columns of a rank's place in its parallel layout."""
    return [Column(name, Int if name.endswith(_INT_LAYOUT) else Text) for name in LAYOUT_COLUMNS]


def place(*extra: str) -> list[Column[Any]]:
    """Return the columns that identify the rank and the work of a row."""
    return [
        *columns(Int, "attempt_id step policy_version"),
        *columns(Text, "stage role"),
        Column("rank", Int),
        *(Column(name, Int) for name in (*PART_FIELDS, *extra)),
    ]


def table(name: str, *parts: Any, **options: Any) -> sa.Table:
    """Declare a table."""
    # With a rowid: WITHOUT ROWID repeats these long keys in every index, and was half as fast.
    return sa.Table(name, metadata, *parts, sqlite_strict=True, **options)


def view(name: str, *parts: Any) -> sa.Table:
    """Declare the logical rows of a compact table: their key and columns."""
    return sa.Table(name, views, *parts)


def partial_index(name: str, *names: str, where: str) -> Index:
    """Return an index of the rows where `where` is true; a query must repeat it word for word."""
    return Index(name, *names, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


class RankWork(PartColumns):
    """The columns of `place` without the stage: they identify the rank and the work of a row."""

    attempt_id: int
    step: int | None
    policy_version: int | None
    role: str
    rank: int


class StageWork(RankWork):
    """The columns of `place`, with the stage."""

    stage: str


class LayoutRow(TypedDict):
    """The columns of `layout`: a rank's place in its parallel layout."""

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
