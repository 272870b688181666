"""How the tables are declared."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import Column, Index

from stagescope.wire.schema import LAYOUT_COLUMNS, PART_FIELDS
from stagescope_service.store.columns import Int, Text

metadata: Final = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_INT_LAYOUT: Final = ("_rank", "_size", "_index")


def key(name: str, kind: Any) -> Column[Any]:
    """Return a column of the primary key."""
    return Column(name, kind, primary_key=True, autoincrement=False)


def columns(kind: Any, names: str) -> list[Column[Any]]:
    """Return a column for each of `names`, which spaces divide."""
    return [Column(name, kind) for name in names.split()]


def layout() -> list[Column[Any]]:
    """Return the columns that say where a rank stands in its parallel layout."""
    return [Column(name, Int if name.endswith(_INT_LAYOUT) else Text) for name in LAYOUT_COLUMNS]


def place(*extra: str) -> list[Column[Any]]:
    """Return the columns that say which work of which rank a row is about."""
    return [
        *columns(Int, "attempt_id step policy_version"),
        *columns(Text, "stage role"),
        Column("rank", Int),
        *(Column(name, Int) for name in (*PART_FIELDS, *extra)),
    ]


def table(name: str, *parts: Any) -> sa.Table:
    """Declare a table."""
    # With a rowid: WITHOUT ROWID repeats these long keys in every index, and was half as fast.
    return sa.Table(name, metadata, *parts, sqlite_strict=True)


def partial_index(name: str, *names: str, where: str) -> Index:
    """Return an index of the rows of which `where` is so; a query must say it word for word."""
    return Index(name, *names, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
