"""Upserts of the logical rows that `tables.compact` stores.

A row is upserted by the ids of its key. Two rows of one logical key may get other ids if their
works or senders differ in a column outside the key. Examples are a process that moves to another
attempt, or a policy version that becomes known at a stage's end. Such a row is read, merged in
memory and replaced, as is a row with only some columns of a work or sender.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from stagescope_service.store import statements
from stagescope_service.store.ids import Ids, Key
from stagescope_service.store.statements import Columns, Conflict, columns_of
from stagescope_service.store.tables.compact import (
    NO_OWNER,
    PATH_MARK,
    artifact_rows,
    payload_rows,
    scalar_names,
    scalar_rows,
    stage_rows,
    training_begins,
    works,
)
from stagescope_service.store.tables.declare import dump_json, split_value, views
from stagescope_wire.schema import PART_FIELDS

Row = Mapping[str, Any]

_PLACE: Final = ("attempt_id", "step", "policy_version", "stage", *PART_FIELDS)
_SENDER: Final = ("incarnation", "attempt_id", "role", "rank")
_CLOCK: Final = ("clock_offset", "clock_error")
_JSON_MOST: Final = 2000
"""Characters (ASCII) of JSON that is stored once. Longer JSON stays in its rows: a row of an index
of PostgreSQL has at most 2704 bytes."""
_RESERVED: Final = bytearray(20)
"""Bytes that the end of a stage, a payload or an artifact adds to its row. (SQLite's driver takes a
bytearray as it is, and looks for an adapter of bytes.)"""


@dataclasses.dataclass(frozen=True)
class _Compact:
    """How a logical table is stored."""

    view: sa.Table
    table: sa.Table
    work: tuple[str, ...]
    """The columns that identify the work; with `work_key` if the logical rows have it."""
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Logical column -> column of a text's id."""
    after: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """Logical column -> column of the difference, and the column that it is relative to."""
    shared_json: tuple[str, ...] = ()
    """JSON that is often equal: stored once with an id if it is, else in the row."""
    ends: frozenset[str] = frozenset()
    """Columns whose values use the space that a row reserved for them."""

    @functools.cached_property
    def key(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.view.primary_key)

    @functools.cached_property
    def ids(self) -> tuple[str, ...]:
        """The primary key of the stored row."""
        return tuple(column.name for column in self.table.primary_key)

    @functools.cached_property
    def groups(self) -> tuple[frozenset[str], ...]:
        """The columns that are given together, as each of these has one id."""
        sender = set(_SENDER if "incarnation" not in self.key or self.by_work else _SENDER[1:])
        found = [frozenset(self.work), frozenset(sender)]
        return (*found, *([frozenset(_CLOCK)] if "clock_offset" in self.view.c else []))

    @property
    def by_work(self) -> bool:
        """Whether the ids of work and sender are the key."""
        return "work_key" in self.key

    @functools.cached_property
    def plain(self) -> Mapping[str, object]:
        """The columns that are stored as they are, with their types."""
        derived = {*self.texts, *self.after, *self.shared_json, *_SENDER, *self.work, *_CLOCK}
        derived |= {"artifact_id", "path", "name"}
        return {column.name: column.type for column in self.view.c if column.name not in derived}


COMPACT_VIEWS: Final = {
    "stages": _Compact(
        views.tables["stages"],
        stage_rows,
        (*_PLACE, "work_key"),
        texts={"status": "status_id"},
        after={"begin_seq": ("begin_after", "revision"), "end_seq": ("end_after", "revision")},
        ends=frozenset({"end_wall"}),
    ),
    "scalars": _Compact(
        views.tables["scalars"],
        scalar_rows,
        (*_PLACE, "work_key"),
        texts={"name": "name_id", "nonfinite": "nonfinite_id"},
    ),
    "payloads": _Compact(
        views.tables["payloads"],
        payload_rows,
        (*_PLACE, "work_key"),
        texts={"incarnation": "owner_id", "state": "state_id", "node_id": "node"},
        shared_json=("tensors", "meta"),
        ends=frozenset({"settled_wall"}),
    ),
    "artifacts": _Compact(
        views.tables["artifacts"],
        artifact_rows,
        _PLACE,
        texts={"kind": "kind_id", "node_id": "node"},
        after={"seq": ("seq_after", "number")},
        ends=frozenset({"deleted_wall"}),
    ),
}


def write(
    connection: sa.Connection, ids: Ids, name: str, names: Sequence[str], rows: Sequence[Row]
) -> None:
    """Upsert rows of a view that all have the same columns, in the same order."""
    compact = COMPACT_VIEWS[name]
    if name == "artifacts":
        rows = [{**row, **_split_artifact(row["artifact_id"])} for row in rows]
        names = tuple(rows[0])
    given = frozenset(names)
    if not all(_is_whole(compact, group, given) for group in compact.groups):
        _replace(connection, ids, compact, rows)
        return
    columns = columns_of(names, rows)
    cells = _work_and_sender(connection, ids, compact, columns)
    if compact.by_work and (unclear := _unclear(ids, columns, cells["work_id"])):
        _replace(connection, ids, compact, [rows[at] for at in unclear])
        rows = [row for at, row in enumerate(rows) if at not in unclear]
        if not rows:
            return
        columns = columns_of(names, rows)
        cells = _work_and_sender(connection, ids, compact, columns)
    _upsert(connection, ids, compact, columns, cells)


def _is_whole(compact: _Compact, group: frozenset[str], given: frozenset[str]) -> bool:
    own = group & given
    is_key = compact.by_work and not group.isdisjoint(compact.key)
    return own == group or (not own and not is_key)


def delete(
    name: str, where: Sequence[sa.ColumnElement[bool]], limit: int | None = None
) -> sa.Delete:
    """Return the deletion of the rows of a view for which conditions hold, at most `limit`."""
    compact = COMPACT_VIEWS[name]
    ids: list[sa.ColumnElement[int]] = [
        sa.literal_column(f"{name}.{column}", sa.BigInteger()) for column in compact.ids
    ]
    found = sa.select(*ids).select_from(compact.view).where(*where).limit(limit)
    own = sa.tuple_(*(compact.table.c[column] for column in compact.ids))
    return sa.delete(compact.table).where(own.in_(found))


def remove_works(connection: sa.Connection, ids: Ids, attempt_id: int, step: int) -> None:
    """Delete the works of a step that no row refers to any more."""
    used = [
        sa.exists().where(compact.table.c.work_id == works.c.work_id)
        for compact in COMPACT_VIEWS.values()
    ]
    own = (works.c.attempt_id == attempt_id) & (works.c.step == step)
    connection.execute(sa.delete(works).where(own, ~sa.or_(*used)))
    ids.forget_works()


# --- rows whose ids may differ from those of the stored row ---------------------------------------
def _unclear(ids: Ids, columns: Columns, work_ids: Sequence[int]) -> dict[int, None]:
    """Return the positions of the rows that may be stored under other ids than their own."""
    incarnations = columns["incarnation"]
    works = list(zip(columns["attempt_id"], columns["work_key"], strict=True))
    several = {name for name in {*incarnations} if len(ids.senders_of[name]) > 1}
    repeated = {
        (attempt_id, work_key)
        for attempt_id, work_key in dict(zip(work_ids, works, strict=True)).values()
        if sum(each.attempt_id == attempt_id for each in ids.works_of_key[work_key]) > 1
    }
    if not several and not repeated:
        return {}
    unclear: dict[int, None] = {}
    for at, (incarnation, work) in enumerate(zip(incarnations, works, strict=True)):
        if incarnation in several or work in repeated:
            pairs = sum(
                own.attempt_id == by.attempt_id
                for own in ids.works_of_key[work[1]]
                for by in ids.senders_of[incarnation]
            )
            if pairs > 1:
                unclear[at] = None
    return unclear


def _replace(connection: sa.Connection, ids: Ids, compact: _Compact, rows: Sequence[Row]) -> None:
    """Merge rows with the stored ones and replace these."""
    name = compact.view.name
    unknown = dict.fromkeys(compact.view.c.keys())
    stored_ids: list[sa.Label[int]] = [
        sa.literal_column(f"{name}.{each}", sa.BigInteger()).label(f"_{each}")
        for each in compact.ids
    ]
    complete: list[Row] = []
    for row in rows:
        query = sa.select(*compact.view.c, *stored_ids)
        query = query.where(*_own_key(connection, ids, compact, row))
        found = connection.execute(query).mappings().first()
        before = {} if found is None else {column: found[column] for column in unknown}
        if compact.table is scalar_rows and "value" in row:
            row = {**row, **split_value(row["value"])}
        complete.append({**unknown, **before, **row})
        if found is not None:
            own = (compact.table.c[each] == found[f"_{each}"] for each in compact.ids)
            connection.execute(sa.delete(compact.table).where(*own))
    if complete:
        columns = columns_of(complete[0], complete)
        cells = _work_and_sender(connection, ids, compact, columns)
        _upsert(connection, ids, compact, columns, cells)


def _own_key(
    connection: sa.Connection, ids: Ids, compact: _Compact, row: Row
) -> list[sa.ColumnElement[bool]]:
    if compact.by_work:
        return [compact.view.c[name] == row[name] for name in compact.key]
    named = _key_ids(connection, ids, compact, columns_of(row, [row]))
    return [
        sa.literal_column(f"{compact.view.name}.{name}") == named[name][0] for name in compact.ids
    ]


# --- the rows as they are stored ------------------------------------------------------------------
def _upsert(
    connection: sa.Connection, ids: Ids, compact: _Compact, columns: Columns, cells: Columns
) -> None:
    """Upsert rows by their ids; `cells` has those of works and senders."""
    cells |= _cells(connection, ids, compact, columns)
    given = columns.keys()
    kept = {"reserved"} if "reserved" in cells and given.isdisjoint(compact.ends) else set()
    if not compact.by_work:
        kept |= {"work_id"} if given.isdisjoint(compact.work) else set()
        kept |= {"sender_id"} if given.isdisjoint(_sender_columns(compact)) else set()
    sets = frozenset(cells) - kept - {*compact.ids}
    statements.insert(connection, compact.table, cells, Conflict(sets))
    if compact.table is scalar_rows:
        _advance_names(connection, ids, columns)
    elif compact.table is stage_rows and "begun_wall" in given:
        _advance_begins(connection, ids, columns)


def _sender_columns(compact: _Compact) -> tuple[str, ...]:
    return _SENDER if "incarnation" not in compact.key else _SENDER[1:]


def _cells(connection: sa.Connection, ids: Ids, compact: _Compact, columns: Columns) -> Columns:
    """Return the stored columns of rows, without the ids of works and senders."""
    if compact.table is scalar_rows and "value" in columns and "nonfinite" not in columns:
        columns = columns | _split_values(columns["value"])
    cells: Columns = {
        stored: ids.of_texts(connection, columns[name])
        for name, stored in compact.texts.items()
        if name in columns
    }
    if not compact.by_work:
        cells |= _key_ids(connection, ids, compact, columns)
    for name, kind in compact.plain.items():
        if name in columns:
            cells[name] = statements.stored(connection.dialect, kind, columns[name])
    for name, (stored, base) in compact.after.items():
        if name in columns:
            cells[stored] = _differences(columns[name], columns[base])
    if "clock_offset" in columns:
        cells["clock_id"] = ids.of_clocks(connection, _keys(columns, _CLOCK))
    for name in compact.shared_json:
        if name in columns:
            cells[f"{name}_id"], cells[name] = _shared(connection, ids, columns[name])
    if "path" in columns and compact.table is artifact_rows:
        cells["path_id"], cells["path"] = _paths(connection, ids, columns)
    if compact.ends:
        cells["reserved"] = _reserved(compact, columns)
    return cells


def _keys(columns: Columns, names: Sequence[str]) -> list[Key]:
    """Return the values of some columns, by row."""
    return list(zip(*(columns[name] for name in names), strict=True))


def _count(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def _split_values(values: Sequence[Any]) -> Columns:
    """Return the columns `value` and `nonfinite` of scalars."""
    if {*map(type, values)} == {float} and all(map(math.isfinite, values)):
        return {"nonfinite": [None] * len(values)}
    split = [split_value(value) for value in values]
    return columns_of(split[0], split)


def _differences(values: Sequence[int | None], bases: Sequence[int]) -> list[int | None]:
    return [
        None if value is None else value - base for value, base in zip(values, bases, strict=True)
    ]


def _reserved(compact: _Compact, columns: Columns) -> Sequence[bytearray | None]:
    """Return the space that each row reserves for its end; None if the end is given."""
    ended = compact.ends & columns.keys()
    if not ended:
        return [_RESERVED] * _count(columns)
    return [_RESERVED if value is None else None for value in columns[min(ended)]]


def _work_and_sender(
    connection: sa.Connection, ids: Ids, compact: _Compact, columns: Columns
) -> Columns:
    """Return the ids of the works and the senders of rows."""
    count = _count(columns)
    by_key = "work_key" in compact.work
    works: list[Key] = [(None,) * len(compact.work)] * count
    if compact.work[0] in columns:
        works = _keys(columns, compact.work)
    senders: list[Key] = [(None,) * len(_SENDER)] * count
    if "rank" in columns:
        senders = _keys(columns, _SENDER)
    of_works = ids.of_works if by_key else ids.of_places
    return {
        "work_id": of_works(connection, works), "sender_id": ids.of_senders(connection, senders)
    }  # fmt: skip


def _key_ids(connection: sa.Connection, ids: Ids, compact: _Compact, columns: Columns) -> Columns:
    """Return the key columns of rows whose key is not their work and sender."""
    if compact.table is payload_rows:
        owners = ids.of_texts(connection, columns["incarnation"])
        return {"owner_id": owners, "seq": columns["seq"]}
    owners = ids.of_texts(connection, columns["owner"])
    return {
        "prefix_id": ids.of_texts(connection, columns["prefix"]),
        "owner_id": [NO_OWNER if owner is None else owner for owner in owners],
        "number": columns["number"],
    }


def _split_artifact(artifact_id: str) -> dict[str, object]:
    """Return an id `prefix/owner/number` in its pieces; another id is all prefix."""
    prefix, _, rest = artifact_id.partition("/")
    owner, _, number = rest.rpartition("/")
    if owner and number.isdigit() and int(number) < 1 << 63 and str(int(number)) == number:
        return {"prefix": prefix, "owner": owner, "number": int(number)}
    return {"prefix": artifact_id, "owner": None, "number": 0}


def _paths(
    connection: sa.Connection, ids: Ids, columns: Columns
) -> tuple[Sequence[int | None], Sequence[str | None]]:
    """Return (id of the common path, own path) of artifacts; one of the two is None."""
    paths, owners = columns["path"], columns["owner"]
    common: list[str | None] = []
    for path, number, owner in zip(paths, columns["number"], owners, strict=True):
        own = f"{number}~{owner}"
        marked = None if path is None or PATH_MARK in path else path.replace(own, PATH_MARK)
        common.append(None if marked == path or owner is None else marked)
    own_paths = [path if text is None else None for path, text in zip(paths, common, strict=True)]
    return ids.of_texts(connection, common), own_paths


def _shared(
    connection: sa.Connection, ids: Ids, values: Sequence[Any]
) -> tuple[Sequence[int | None], Sequence[str | None]]:
    """Return (id of the JSON, the JSON itself) of values; one of the two is None."""
    documents = [None if value is None else dump_json(value) for value in values]
    counts = Counter(text for text in documents if text is not None and len(text) <= _JSON_MOST)
    shared = {
        text
        for text, count in counts.items()
        if count > 1 or text in ids.texts or hash(text) in ids.seen
    }
    ids.seen.update(map(hash, counts))
    found = ids.of_texts(connection, [text if text in shared else None for text in documents])
    return found, [None if text in shared else text for text in documents]


# --- what is advanced with the rows ---------------------------------------------------------------
def _advance_names(connection: sa.Connection, ids: Ids, columns: Columns) -> None:
    """Record the names of an attempt's scalars, and the last step of each."""
    last: dict[tuple[int, str], int | None] = {}
    for attempt_id, name, step in {*_keys(columns, ("attempt_id", "name", "step"))}:
        if attempt_id is None:
            continue
        key = (attempt_id, name)
        if key not in last or (
            step is not None and step > (-1 if last[key] is None else last[key])
        ):
            last[key] = step
    new = {
        key: step
        for key, step in last.items()
        if key not in ids.last_steps or _is_later(step, ids.last_steps[key])
    }
    if not new:
        return
    names: Columns = {
        "attempt_id": [key[0] for key in new],
        "name": [key[1] for key in new],
        "last_step": [*new.values()],
    }
    later = Conflict(frozenset({"last_step"}), newer="last_step")
    statements.insert(connection, scalar_names, names, later)
    ids.last_steps |= new


def _is_later(step: int | None, than: int | None) -> bool:
    return step is not None and (than is None or step > than)


def _advance_begins(connection: sa.Connection, ids: Ids, columns: Columns) -> None:
    """Record the training stage that began last, by attempt."""
    names = ("attempt_id", "begun_wall", "begin_wall", "step")
    columns = {"begin_wall": [None] * _count(columns), **columns}
    latest: dict[int, Key] = {}
    known = ids.last_begun
    for key, stage in zip(_keys(columns, names), columns["stage"], strict=True):
        attempt_id, begun, *_ = key
        if begun is None or attempt_id is None or stage in (None, "rollout_generate"):
            continue
        if attempt_id not in known or begun > known[attempt_id]:
            latest[attempt_id], known[attempt_id] = key, begun
    if latest:
        begins: dict[str, Sequence[object]] = dict(
            zip(names, zip(*latest.values(), strict=True), strict=True)
        )
        later = Conflict(frozenset(names[1:]), newer="begun_wall")
        statements.insert(connection, training_begins, begins, later)
