"""Removes the rows of a run in small transactions, and counts them.

The rows of works go work by work, so that each transaction begins where the one before it ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import sqlalchemy as sa

from stagescope_service.store.contract import RemoveRun
from stagescope_service.store.ids import Ids
from stagescope_service.store.tables.compact import (
    artifact_rows,
    payload_rows,
    scalar_rows,
    senders,
    stage_rows,
    texts,
    works,
)
from stagescope_service.store.tables.declare import metadata
from stagescope_service.store.tables.training import attempts, runs

_WORKS: Final = 50
"""Works whose rows are removed together; each may have a row of every rank."""
_OF_WORKS: Final = (stage_rows, scalar_rows, payload_rows, artifact_rows)
_LAST: Final = (works, senders, attempts, runs)
_OTHERS: Final = tuple(
    table
    for table in metadata.tables.values()
    if table not in (*_OF_WORKS, *_LAST)
    and not {"attempt_id", "run"}.isdisjoint(table.columns.keys())
    and table.name != "engines"  # they outlive the run
)
"""Tables whose rows name an attempt, a run or both."""


def remove_run(connection: sa.Connection, ids: Ids, one: RemoveRun) -> None:
    """Delete rows of a run, at most `one.limit`; errors propagate.

    Args:
        connection: in a transaction.
        ids: the writer's ids; those of deleted rows are forgotten.
        one: the run, its attempts, and the limit.
    """
    ids.clear()
    left = _remove_works(connection, one.attempt_ids, one.limit)
    for table in (*_OTHERS, senders):
        for condition in _of_run(table, one):
            left -= _remove(connection, table, condition, left)
    if left > 0:
        connection.execute(sa.delete(attempts).where(attempts.c.run == one.run))


def count_rows(connection: sa.Connection, run: str, attempt_ids: Sequence[int]) -> int:
    """Return how many rows a run has, its own included."""
    counted = (
        sa.select(sa.func.count()).select_from(table).where(sa.or_(*conditions))
        for table, conditions in _all_of_run(run, attempt_ids)
    )
    return 1 + sum(connection.scalar(query) or 0 for query in counted)


def has_rows(connection: sa.Connection, run: str, attempt_ids: Sequence[int]) -> bool:
    """Return whether a run has a row that `RemoveRun` would delete."""
    return any(
        connection.scalar(
            sa.select(sa.exists(sa.select(sa.literal(1)).select_from(table).where(each)))
        )
        for table, conditions in _all_of_run(run, attempt_ids)
        for each in conditions
    )


def _all_of_run(
    run: str, attempt_ids: Sequence[int]
) -> Iterator[tuple[sa.Table, list[sa.ColumnElement[bool]]]]:
    own = sa.select(works.c.work_id).where(works.c.attempt_id.in_(attempt_ids))
    for table in _OF_WORKS:
        yield table, [table.c.work_id.in_(own)]
    one = RemoveRun(run, tuple(attempt_ids), 0)
    for table in (*_OTHERS, works, senders, attempts):
        yield table, _of_run(table, one)


def _remove_works(connection: sa.Connection, attempt_ids: Sequence[int], left: int) -> int:
    """Delete works with their rows; return how many more rows may be deleted."""
    own = sa.select(works.c.work_id).where(works.c.attempt_id.in_(attempt_ids)).limit(_WORKS)
    while left > 0 and (batch := list(connection.scalars(own))):
        # The path of a step's files in a ring is a text that no other attempt has.
        paths = sa.select(artifact_rows.c.path_id).where(
            artifact_rows.c.work_id.in_(batch), artifact_rows.c.path_id.is_not(None)
        )
        unused = list(connection.scalars(paths.distinct()))
        for table in _OF_WORKS:
            left -= _remove(connection, table, table.c.work_id.in_(batch), left)
        if left > 0:
            left -= _remove(connection, works, works.c.work_id.in_(batch), _WORKS)
        if left > 0 and unused:
            connection.execute(sa.delete(texts).where(texts.c.text_id.in_(unused)))
    return left


def _remove(
    connection: sa.Connection, table: sa.Table, condition: sa.ColumnElement[bool], most: int
) -> int:
    """Delete rows for which a condition holds; return how many."""
    if most <= 0:
        return 0
    key = list(table.primary_key)
    chosen = sa.tuple_(*key) if len(key) > 1 else key[0]
    found = sa.select(*key).where(condition).limit(most)
    # With the condition twice: by the key alone, SQLite would search all of the table.
    return connection.execute(sa.delete(table).where(condition, chosen.in_(found))).rowcount


def _of_run(table: sa.Table, one: RemoveRun) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of a run's rows in a table, each with an index of its own."""
    found: list[sa.ColumnElement[bool]] = []
    if "attempt_id" in table.c:
        found.append(table.c.attempt_id.in_(one.attempt_ids))
    if "run" in table.c:
        found.append(table.c.run == one.run)
    return found
