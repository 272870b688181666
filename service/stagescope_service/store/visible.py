"""What a reader sees that may see some runs only: the database itself hides the rest.

Each connection of such a reader has a temporary view for every table and view of the catalogue,
under the same name, with the rows of these runs alone, and its queries look among those only. So no
query can forget to ask, and one that finds no such view fails. A table that belongs to no run is
empty unless it is in `_SHARED`, and so is one that is new.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import sqlalchemy as sa

from stagescope_service.store.tables.declare import metadata, views

PATTERN: Final = re.compile(r"[A-Za-z0-9._*?-]{1,100}")
"""Names of runs, in which `*` stands for any characters and `?` for one."""
_SHARED: Final = frozenset({"texts", "clocks", "weight_manifests", "trigger_rules"})
"""Tables without a run: the first three are found from rows of a run alone, and rules are needed to
say what fired."""
_VERSION: Final = "alembic_version"


def hiding_views(patterns: Sequence[str], *, schema: str, is_sqlite: bool) -> Iterator[str]:
    """Yield the statements that hide other runs in a connection.

    Args:
        patterns: of the runs that are seen.
        schema: where the tables are.
        is_sqlite: whether the database is SQLite, else PostgreSQL.
    """
    matches = _matches(patterns, is_sqlite=is_sqlite)
    attempts = f"SELECT attempt_id FROM {schema}.attempts WHERE {matches}"
    yield f"CREATE TEMP VIEW {_VERSION} AS SELECT * FROM {schema}.{_VERSION}"
    for table in (*metadata.tables.values(), *views.tables.values()):
        where = _condition(table, matches, f"attempt_id IN ({attempts})")
        yield f"CREATE TEMP VIEW {table.name} AS SELECT * FROM {schema}.{table.name} WHERE {where}"


def _condition(table: sa.Table, matches: str, of_attempts: str) -> str:
    if table.name in _SHARED:
        return "1 = 1"
    has_run, has_attempt = "run" in table.c, "attempt_id" in table.c
    if has_run and has_attempt:
        return f"({matches}) OR (run IS NULL AND {of_attempts})"
    return matches if has_run else of_attempts if has_attempt else "1 = 0"


def _matches(patterns: Sequence[str], *, is_sqlite: bool) -> str:
    """Return the condition that a run matches one of the patterns, case and all."""
    for pattern in patterns:
        if not PATTERN.fullmatch(pattern):  # it becomes a part of a statement
            raise ValueError(f"{pattern!r} is no pattern of runs")
    if is_sqlite:
        return " OR ".join(f"run GLOB '{pattern}'" for pattern in patterns) or "1 = 0"
    kinds = {"*": ".*", "?": "."}
    regular = ["".join(kinds.get(c, re.escape(c)) for c in pattern) for pattern in patterns]
    return " OR ".join(f"run ~ '^{each}$'" for each in regular) or "1 = 0"
