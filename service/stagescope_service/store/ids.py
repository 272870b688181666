"""The ids of shared values: texts, works, senders and clocks.

They are in memory, so that a row costs no query. New ones are inserted in the transaction of the
rows that refer to them. If such a transaction fails, call `clear`: its ids are not in the
catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

import sqlalchemy as sa

from stagescope_service.store import statements
from stagescope_service.store.tables.compact import KNOWN_TEXTS, clocks, senders, texts, works

Key = tuple[Any, ...]

_MOST: Final = 20_000
"""Maximum entries of a kind in memory; beyond that the kind is read again when it is needed. A work
takes 0.6 KB, a sender 0.4 KB, a text or a clock mostly 0.2 KB."""
_CHUNK: Final = 400


class OwnedId(NamedTuple):
    """A work or a sender, and its attempt."""

    id: int
    attempt_id: int | None


class Ids:
    """Looks up ids, and creates those that do not exist; used by the writer only."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all that was read or created."""
        self.forget_works()
        self._forget_texts()
        self._forget_clocks()
        self._forget_senders()
        self.last_steps: dict[tuple[int, str], int | None] = {}
        """(attempt_id, name) -> the last step that the catalogue knows of a scalar"""
        self.last_begun: dict[int, float] = {}
        """attempt_id -> when the last training stage began that the catalogue knows"""
        self.seen: set[int] = set()
        """Hashes of JSON that was written once; at the second time it gets an id."""
        self._next: dict[str, int] = {}

    def forget_works(self) -> None:
        """Forget the works; call it after some were deleted."""
        self.works: dict[Key, int] = {}
        """(attempt_id, step, policy_version, stage, part, work_key) -> id"""
        self.places: dict[Key, int] = {}
        """The same without a work_key -> id of one of these works."""
        self.works_of_key: dict[str, list[OwnedId]] = {}
        self._steps: set[Key] = set()
        """(attempt_id, step, policy_version) whose works were read"""

    def _forget_texts(self) -> None:
        self.texts: dict[str | None, int | None] = {None: None}
        self.texts |= {text: at for at, text in enumerate(KNOWN_TEXTS)}

    def _forget_clocks(self) -> None:
        self.clocks: dict[Key, int | None] = {(None, None): None}

    def _forget_senders(self) -> None:
        self.senders: dict[Key, int] = {}
        """(incarnation, attempt_id, role, rank) -> id"""
        self.senders_of: dict[str, list[OwnedId]] = {}

    def forget_many(self) -> None:
        """Bound the memory; call it between transactions or groups of rows."""
        if max(len(self.works), len(self.places), len(self._steps)) > _MOST:
            self.forget_works()
        if len(self.texts) > _MOST:
            self._forget_texts()
        if len(self.clocks) > _MOST:
            self._forget_clocks()
        if len(self.senders) > _MOST:
            self._forget_senders()
        for rest in (self.last_steps, self.last_begun):
            if len(rest) > _MOST:
                rest.clear()
        if len(self.seen) > _MOST:
            self.seen.clear()

    # --- looking up ---------------------------------------------------------------------------
    def of_texts(self, connection: sa.Connection, wanted: Sequence[str | None]) -> list[int | None]:
        """Return the ids of texts; None is None."""
        return _looked_up(connection, self.texts, wanted, self._add_texts)

    def of_clocks(self, connection: sa.Connection, wanted: Sequence[Key]) -> list[int | None]:
        """Return the ids of (offset, error); equal ones may have several."""
        return _looked_up(connection, self.clocks, wanted, self._add_clocks)

    def of_works(self, connection: sa.Connection, wanted: Sequence[Key]) -> list[int]:
        """Return the ids of works."""
        return _looked_up(connection, self.works, wanted, self._add_works)

    def of_places(self, connection: sa.Connection, wanted: Sequence[Key]) -> list[int]:
        """Return the ids of works whose key is unknown."""
        return _looked_up(connection, self.places, wanted, self._add_places)

    def of_senders(self, connection: sa.Connection, wanted: Sequence[Key]) -> list[int]:
        """Return the ids of senders."""
        return _looked_up(connection, self.senders, wanted, self._add_senders)

    # --- texts and clocks ---------------------------------------------------------------------
    def _add_texts(self, connection: sa.Connection, wanted: Iterable[str | None]) -> None:
        missing = sorted({text for text in wanted if text is not None and text not in self.texts})
        for chunk in _chunks(missing):
            found = connection.execute(_OF_TEXTS, {"chosen": chunk})
            self.texts.update({row.text: row.text_id for row in found})
        new = [(text,) for text in missing if text not in self.texts]
        for (text,), text_id in self._insert(connection, texts, "text_id", new):
            self.texts[text] = text_id

    def _add_clocks(self, connection: sa.Connection, wanted: Iterable[Key]) -> None:
        new = [key for key in dict.fromkeys(wanted) if key not in self.clocks]
        self.clocks.update(self._insert(connection, clocks, "clock_id", new))

    # --- works --------------------------------------------------------------------------------
    def _add_works(self, connection: sa.Connection, wanted: Iterable[Key]) -> None:
        missing = [key for key in dict.fromkeys(wanted) if key not in self.works]
        work_keys = {key[-1] for key in missing if key[-1] is not None}
        unread = [key for key in work_keys if key not in self.works_of_key]
        for chunk in _chunks(sorted(unread)):
            self.works_of_key |= {work_key: [] for work_key in chunk}
            for row in connection.execute(_OF_WORK_KEYS, {"chosen": chunk}):
                self._found_work(row[0], tuple(row[1:]))
        self._read_steps(connection, [key for key in missing if key[-1] is None])
        self._new_works(connection, [key for key in missing if key not in self.works])

    def _add_places(self, connection: sa.Connection, wanted: Iterable[Key]) -> None:
        missing = [key for key in dict.fromkeys(wanted) if key not in self.places]
        self._read_steps(connection, missing)
        self._new_works(connection, [(*key, None) for key in missing if key not in self.places])

    def _read_steps(self, connection: sa.Connection, keys: Iterable[Key]) -> None:
        # By version, too: work without a step becomes more and more.
        for own in {key[:3] for key in keys} - self._steps:
            self._steps.add(own)
            columns = (works.c.attempt_id, works.c.step, works.c.policy_version)
            same = (each.is_not_distinct_from(key) for each, key in zip(columns, own, strict=True))
            for row in connection.execute(sa.select(works).where(*same)):
                key = tuple(row[1:])
                self.places[key[:-1]] = row[0]
                if key[-1] is None:  # another is found by its key, together with its like
                    self.works[key] = row[0]

    def _new_works(self, connection: sa.Connection, keys: Sequence[Key]) -> None:
        for key, work_id in self._insert(connection, works, "work_id", keys):
            self._found_work(work_id, key)

    def _found_work(self, work_id: int, key: Key) -> None:
        self.works[key] = self.places[key[:-1]] = work_id
        if key[-1] is not None:
            self.works_of_key.setdefault(key[-1], []).append(OwnedId(work_id, key[0]))

    # --- senders ------------------------------------------------------------------------------
    def _add_senders(self, connection: sa.Connection, wanted: Iterable[Key]) -> None:
        missing = [key for key in dict.fromkeys(wanted) if key not in self.senders]
        unread = {key[0] for key in missing if key[0] not in self.senders_of}
        for chunk in _chunks(sorted(name for name in unread if name is not None)):
            self._read_senders(connection, senders.c.incarnation.in_(chunk))
        if None in unread:
            self._read_senders(connection, senders.c.incarnation.is_(None))
        self.senders_of |= {name: [] for name in unread if name not in self.senders_of}
        new = [key for key in missing if key not in self.senders]
        for key, sender_id in self._insert(connection, senders, "sender_id", new):
            self._found_sender(sender_id, key)

    def _read_senders(self, connection: sa.Connection, which: sa.ColumnElement[bool]) -> None:
        for row in connection.execute(sa.select(senders).where(which)):
            self._found_sender(row[0], tuple(row[1:]))

    def _found_sender(self, sender_id: int, key: Key) -> None:
        self.senders[key] = sender_id
        self.senders_of.setdefault(key[0], []).append(OwnedId(sender_id, key[1]))

    # --- rows of these tables -----------------------------------------------------------------
    def _insert(
        self, connection: sa.Connection, table: sa.Table, id_name: str, keys: Sequence[Key]
    ) -> list[tuple[Key, int]]:
        """Insert rows; return each key with its new id."""
        if not keys:
            return []
        if id_name not in self._next:
            newest = connection.scalar(sa.select(sa.func.max(table.c[id_name])))
            self._next[id_name] = 1 if newest is None else newest + 1
        first = self._next[id_name]
        self._next[id_name] += len(keys)
        new_ids = range(first, first + len(keys))
        names = [column.name for column in table.columns if column.name != id_name]
        values = dict(zip(names, zip(*keys, strict=True), strict=True))
        statements.insert(connection, table, {id_name: new_ids, **values})
        return list(zip(keys, new_ids, strict=True))


_Known = TypeVar("_Known")
_Id = TypeVar("_Id", int, "int | None")


def _looked_up(
    connection: sa.Connection,
    known: Mapping[_Known, _Id],
    wanted: Sequence[_Known],
    add: Callable[[sa.Connection, Iterable[_Known]], None],
) -> list[_Id]:
    """Return the ids of the wanted values; unknown ones are added."""
    find = known.__getitem__
    try:
        return list(map(find, wanted))
    except KeyError:
        add(connection, wanted)
    return list(map(find, wanted))


def _choose(column: sa.Column[object], *columns: Any) -> sa.Executable:
    return sa.select(*columns).where(column.in_(sa.bindparam("chosen", expanding=True)))


_OF_TEXTS: Final = _choose(texts.c.text, texts.c.text, texts.c.text_id)
_OF_WORK_KEYS: Final = _choose(works.c.work_key, works)


def _chunks(values: Sequence[object]) -> Iterable[list[Any]]:
    rest = iter(values)
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk
