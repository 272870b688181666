"""The ids of what many rows have in common: texts, works, senders and clocks.

They are in memory, so that a row costs no query, and new ones are inserted in the transaction of
the rows that refer to them. Where such a transaction fails, `clear` must be called: its ids are
not in the catalogue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from stagescope_service.store.tables.compact import KNOWN_TEXTS, clocks, senders, texts, works

Key = tuple[Any, ...]

_MOST: Final = 200_000
"""Maximum entries of a kind in memory; beyond that all are read again when they are needed."""
_CHUNK: Final = 400


class Owned(NamedTuple):
    """A work or a sender, and the attempt that it is of."""

    id: int
    attempt_id: int | None


class Ids:
    """Looks up ids, and creates those that do not exist; used by the writer only."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything that was read or created."""
        self.texts: dict[str | None, int | None] = {None: None}
        self.texts |= {text: at for at, text in enumerate(KNOWN_TEXTS)}
        self.works: dict[Key, int] = {}
        """(attempt_id, step, policy_version, stage, part, work_key) -> id"""
        self.places: dict[Key, int] = {}
        """The same without a work_key -> id of one of these works."""
        self.senders: dict[Key, int] = {}
        """(incarnation, attempt_id, role, rank) -> id"""
        self.clocks: dict[Key, int | None] = {(None, None): None}
        self.works_of_key: dict[str, list[Owned]] = {}
        self.senders_of: dict[str, list[Owned]] = {}
        self.last_steps: dict[tuple[int, str], int | None] = {}
        """(attempt_id, name) -> the last step that the catalogue knows of a scalar"""
        self.last_begun: dict[int, float] = {}
        """attempt_id -> when the last training stage began that the catalogue knows"""
        self.seen: dict[str, None] = {}
        """JSON that was written once: written again, it gets an id."""
        self._steps: set[Key] = set()
        self._next: dict[str, int] = {}

    def forget_many(self) -> None:
        """Bound the memory; to be called between transactions or groups of rows."""
        sizes = (self.texts, self.works, self.places, self.senders, self.clocks, self.last_steps)
        if any(len(each) > _MOST for each in sizes):
            self.clear()
        if len(self.seen) > _MOST // 20:
            self.seen.clear()

    # --- texts and clocks ---------------------------------------------------------------------
    def add_texts(self, connection: sa.Connection, wanted: Collection[str | None]) -> None:
        """Make sure that `texts` has these."""
        missing = sorted({text for text in wanted if text is not None} - self.texts.keys())
        for chunk in _chunks(missing):
            query = sa.select(texts.c.text, texts.c.text_id).where(texts.c.text.in_(chunk))
            self.texts.update((row[0], row[1]) for row in connection.execute(query))
        new = [text for text in missing if text not in self.texts]
        self.texts.update(self._insert(connection, texts, "text_id", [(text,) for text in new]))

    def add_clocks(self, connection: sa.Connection, wanted: Iterable[Key]) -> None:
        """Make sure that `clocks` has these offsets and errors; the same may have several ids."""
        new = [key for key in dict.fromkeys(wanted) if key not in self.clocks]
        self.clocks.update(self._insert(connection, clocks, "clock_id", new))

    # --- works --------------------------------------------------------------------------------
    def add_works(self, connection: sa.Connection, wanted: Collection[Key]) -> None:
        """Make sure that `works` has these."""
        missing = [key for key in wanted if key not in self.works]
        if not missing:
            return
        unread = {key[-1] for key in missing if key[-1] is not None} - self.works_of_key.keys()
        for chunk in _chunks(sorted(unread)):
            self.works_of_key |= {work_key: [] for work_key in chunk}
            query = sa.select(works).where(works.c.work_key.in_(chunk))
            for row in connection.execute(query):
                self._found_work(row[0], tuple(row[1:]))
        self._read_steps(connection, [key for key in missing if key[-1] is None])
        self._new_works(connection, [key for key in missing if key not in self.works])

    def add_places(self, connection: sa.Connection, wanted: Collection[Key]) -> None:
        """Make sure that `places` has these."""
        missing = [key for key in wanted if key not in self.places]
        self._read_steps(connection, missing)
        self._new_works(connection, [(*key, None) for key in missing if key not in self.places])

    def _read_steps(self, connection: sa.Connection, keys: Iterable[Key]) -> None:
        for attempt_id, step in {key[:2] for key in keys} - self._steps:
            self._steps.add((attempt_id, step))
            of_step = works.c.attempt_id.is_not_distinct_from(attempt_id)
            query = sa.select(works).where(of_step, works.c.step.is_not_distinct_from(step))
            for row in connection.execute(query):
                key = tuple(row[1:])
                self.places[key[:-1]] = row[0]
                if key[-1] is None:  # another is found by its key, together with its like
                    self.works[key] = row[0]

    def _new_works(self, connection: sa.Connection, keys: Sequence[Key]) -> None:
        for key, work_id in self._insert(connection, works, "work_id", keys, one=False):
            self._found_work(work_id, key)

    def _found_work(self, work_id: int, key: Key) -> None:
        self.works[key] = self.places[key[:-1]] = work_id
        if key[-1] is not None:
            self.works_of_key.setdefault(key[-1], []).append(Owned(work_id, key[0]))

    # --- senders ------------------------------------------------------------------------------
    def add_senders(self, connection: sa.Connection, wanted: Collection[Key]) -> None:
        """Make sure that `senders` has these."""
        missing = [key for key in wanted if key not in self.senders]
        if not missing:
            return
        unread = {key[0] for key in missing} - self.senders_of.keys()
        for chunk in _chunks(sorted(name for name in unread if name is not None)):
            self._read_senders(connection, senders.c.incarnation.in_(chunk))
        if None in unread:
            self._read_senders(connection, senders.c.incarnation.is_(None))
        self.senders_of |= {name: [] for name in unread if name not in self.senders_of}
        new = [key for key in missing if key not in self.senders]
        for key, sender_id in self._insert(connection, senders, "sender_id", new, one=False):
            self._found_sender(sender_id, key)

    def _read_senders(self, connection: sa.Connection, which: sa.ColumnElement[bool]) -> None:
        for row in connection.execute(sa.select(senders).where(which)):
            self._found_sender(row[0], tuple(row[1:]))

    def _found_sender(self, sender_id: int, key: Key) -> None:
        self.senders[key] = sender_id
        self.senders_of.setdefault(key[0], []).append(Owned(sender_id, key[1]))

    # --- rows of these tables -----------------------------------------------------------------
    def _insert(
        self,
        connection: sa.Connection,
        table: sa.Table,
        id_name: str,
        keys: Sequence[Key],
        *,
        one: bool = True,
    ) -> list[tuple[Any, int]]:
        """Insert rows; return each key (of `one` column: its value) with its new id."""
        if not keys:
            return []
        if id_name not in self._next:
            newest = connection.scalar(sa.select(sa.func.max(table.c[id_name])))
            self._next[id_name] = 1 if newest is None else newest + 1
        first = self._next[id_name]
        self._next[id_name] += len(keys)
        names = [column.name for column in table.columns if column.name != id_name]
        rows = [
            {id_name: first + at, **dict(zip(names, key, strict=True))}
            for at, key in enumerate(keys)
        ]
        connection.execute(sa.insert(table), rows)
        return [
            (key[0] if one and len(key) == 1 else key, first + at) for at, key in enumerate(keys)
        ]


def _chunks(values: Sequence[Any]) -> Iterable[list[Any]]:
    rest = iter(values)
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk
