"""Upserts of the logical rows that `tables.compact` stores.

A row is upserted by the ids of its key. Two rows of one logical key might get other ids, if
their works or senders differ in a column that is not of the key (a process that moves to another
attempt, a policy version that becomes known at a stage's end): such a row is read, merged in memory
and replaced. So is a row of which only a part of a work's or sender's columns are given.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter, sub
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from stagescope.wire.schema import PART_FIELDS
from stagescope_service.store.columns import Flag, StrictJson, dump_json
from stagescope_service.store.ids import Ids, Key
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
from stagescope_service.store.tables.declare import views

Row = Mapping[str, Any]

_PLACE: Final = ("attempt_id", "step", "policy_version", "stage", *PART_FIELDS)
_SENDER: Final = ("incarnation", "attempt_id", "role", "rank")
_CLOCK: Final = ("clock_offset", "clock_error")
_JSON_MOST: Final = 10_000
_RESERVED: Final = bytes(20)
"""As much as the end of a stage, a payload or an artifact adds to its row."""


@dataclasses.dataclass(frozen=True)
class _Compact:
    """How a logical table is stored."""

    view: sa.Table
    table: sa.Table
    work: tuple[str, ...]
    """The columns that say which work; with `work_key` where the logical rows have it."""
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Logical column -> column of a text's id."""
    after: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """Logical column -> column of the difference, and from what."""
    shared_json: tuple[str, ...] = ()
    """JSON that is often equal: with an id where it is, else in the row."""
    ends: frozenset[str] = frozenset()
    """Columns whose values take what a row reserved for them."""

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
    def plain(self) -> frozenset[str]:
        """The columns that are stored as they are."""
        derived = {*self.texts, *self.after, *self.shared_json, *_SENDER, *self.work, *_CLOCK}
        derived |= {"artifact_id", "path", "name"}
        return frozenset(self.view.c.keys()) - derived


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
    connection: sa.Connection, ids: Ids, name: str, columns: Sequence[str], rows: Sequence[Row]
) -> None:
    """Upsert rows of a view that all have the same columns."""
    compact, given = COMPACT_VIEWS[name], frozenset(columns)
    if name == "artifacts":
        rows = [{**row, **_split_artifact(row["artifact_id"])} for row in rows]
    if not all(_is_whole(compact, group, given) for group in compact.groups):
        _replace(connection, ids, compact, rows)
        return
    if compact.by_work:
        rows, unclear = _unambiguous(connection, ids, compact, rows)
        _replace(connection, ids, compact, unclear)
    if rows:
        _upsert(connection, ids, compact, given, rows)


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
    """Delete the works of a step to which no row refers any more."""
    used = [
        sa.exists().where(compact.table.c.work_id == works.c.work_id)
        for compact in COMPACT_VIEWS.values()
    ]
    own = (works.c.attempt_id == attempt_id) & (works.c.step == step)
    connection.execute(sa.delete(works).where(own, ~sa.or_(*used)))
    ids.clear()


# --- rows whose ids may differ from those of the stored row ---------------------------------------
def _unambiguous(
    connection: sa.Connection, ids: Ids, compact: _Compact, rows: Sequence[Row]
) -> tuple[Sequence[Row], list[Row]]:
    """Return the rows that can only be stored under their own ids, and the others."""
    work, sender = itemgetter(*compact.work), itemgetter(*_SENDER)
    ids.add_works(connection, dict.fromkeys(map(work, rows)))
    ids.add_senders(connection, dict.fromkeys(map(sender, rows)))
    several = {
        name for name in {row["incarnation"] for row in rows} if len(ids.senders_of[name]) > 1
    }
    repeated = set()
    for attempt_id, work_key in {(row["attempt_id"], row["work_key"]) for row in rows}:
        of_attempt = [each for each in ids.works_of_key[work_key] if each.attempt_id == attempt_id]
        if len(of_attempt) > 1:
            repeated.add((attempt_id, work_key))
    if not several and not repeated:
        return rows, []
    clear: list[Row] = []
    unclear: list[Row] = []
    for row in rows:
        incarnation, work_key = row["incarnation"], row["work_key"]
        if incarnation not in several and (row["attempt_id"], work_key) not in repeated:
            clear.append(row)
            continue
        pairs = sum(
            own.attempt_id == by.attempt_id
            for own in ids.works_of_key[work_key]
            for by in ids.senders_of[incarnation]
        )
        (clear if pairs <= 1 else unclear).append(row)
    return clear, unclear


def _replace(connection: sa.Connection, ids: Ids, compact: _Compact, rows: Sequence[Row]) -> None:
    """Merge rows with the stored ones, and write them anew."""
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
        complete.append({**unknown, **before, **row})
        if found is not None:
            own = (compact.table.c[each] == found[f"_{each}"] for each in compact.ids)
            connection.execute(sa.delete(compact.table).where(*own))
    if complete:
        _upsert(connection, ids, compact, frozenset(unknown), complete)


def _own_key(
    connection: sa.Connection, ids: Ids, compact: _Compact, row: Row
) -> list[sa.ColumnElement[bool]]:
    if compact.by_work:
        return [compact.view.c[name] == row[name] for name in compact.key]
    named = _key_ids(connection, ids, compact, [row])
    return [
        sa.literal_column(f"{compact.view.name}.{name}") == named[name][0] for name in compact.ids
    ]


# --- the rows as they are stored ------------------------------------------------------------------
def _upsert(
    connection: sa.Connection, ids: Ids, compact: _Compact, given: frozenset[str],
    rows: Sequence[Row],
) -> None:  # fmt: skip
    """Upsert rows of the same columns by their ids."""
    cells = _cells(connection, ids, compact, given, rows)
    kept = {"reserved"} if "reserved" in cells and given.isdisjoint(compact.ends) else set()
    if not compact.by_work:
        kept |= {"work_id"} if given.isdisjoint(compact.work) else set()
        kept |= {"sender_id"} if given.isdisjoint(_sender_columns(compact)) else set()
    statement = _statement(
        connection.dialect, compact.table, tuple(cells), frozenset(cells) - kept - {*compact.ids}
    )
    values = zip(*(cells[name] for name in statement.order), strict=True)
    if statement.is_positional:
        connection.exec_driver_sql(statement.text, list(values))
    else:
        named = [dict(zip(statement.order, each, strict=True)) for each in values]
        connection.exec_driver_sql(statement.text, named)
    if compact.table is scalar_rows:
        _advance_names(connection, ids, rows)
    elif compact.table is stage_rows and "begun_wall" in given:
        _advance_begins(connection, ids, rows)


def _sender_columns(compact: _Compact) -> tuple[str, ...]:
    return _SENDER if "incarnation" not in compact.key else _SENDER[1:]


def _cells(
    connection: sa.Connection, ids: Ids, compact: _Compact, given: frozenset[str],
    rows: Sequence[Row],
) -> dict[str, list[Any]]:  # fmt: skip
    """Return the stored columns of rows."""
    count = len(rows)

    def column(name: str) -> list[Any]:
        return [row[name] for row in rows]

    text_columns = {name: column(name) for name in compact.texts if name in given}
    ids.add_texts(connection, {text for values in text_columns.values() for text in values})
    cells: dict[str, list[Any]] = {
        compact.texts[name]: [ids.texts[text] for text in values]
        for name, values in text_columns.items()
    }
    cells |= _work_and_sender(connection, ids, compact, given, rows)
    if not compact.by_work:
        cells |= _key_ids(connection, ids, compact, rows)
    for name in compact.plain & given:
        kind = compact.view.c[name].type
        values = column(name)
        if isinstance(kind, Flag):
            values = [None if value is None else bool(value) for value in values]
        elif isinstance(kind, StrictJson):
            values = [None if value is None else dump_json(value) for value in values]
        cells[name] = values
    for name, (stored, base) in compact.after.items():
        if name in given:
            values = column(name)
            cells[stored] = [
                None if value is None else sub(value, from_)
                for value, from_ in zip(values, column(base), strict=True)
            ]
    if "clock_offset" in given:
        pairs = list(map(itemgetter(*_CLOCK), rows))
        ids.add_clocks(connection, pairs)
        cells["clock_id"] = [ids.clocks[pair] for pair in pairs]
    for name in compact.shared_json:
        if name in given:
            cells[f"{name}_id"], cells[name] = _shared(connection, ids, column(name))
    if "path" in given and compact.table is artifact_rows:
        cells["path_id"], cells["path"] = _paths(connection, ids, rows)
    if compact.ends:
        ended = not given.isdisjoint(compact.ends)
        values = column(next(iter(compact.ends))) if ended else []
        cells["reserved"] = (
            [_RESERVED if value is None else None for value in values]
            if ended
            else [_RESERVED] * count
        )
    return cells


def _work_and_sender(
    connection: sa.Connection, ids: Ids, compact: _Compact, given: frozenset[str],
    rows: Sequence[Row],
) -> dict[str, list[Any]]:  # fmt: skip
    known: dict[Key, int]
    add: Callable[[sa.Connection, Collection[Key]], None]
    known, add = (ids.works, ids.add_works)
    if "work_key" not in compact.work:
        known, add = (ids.places, ids.add_places)
    works: list[Key] = (
        list(map(itemgetter(*compact.work), rows))
        if compact.work[0] in given
        else [(None,) * len(compact.work)] * len(rows)
    )
    add(connection, dict.fromkeys(works))
    senders: list[Key] = (
        list(map(itemgetter(*_SENDER), rows))
        if "rank" in given
        else [(None,) * len(_SENDER)] * len(rows)
    )
    ids.add_senders(connection, dict.fromkeys(senders))
    return {
        "work_id": [known[key] for key in works],
        "sender_id": [ids.senders[key] for key in senders],
    }


def _key_ids(
    connection: sa.Connection, ids: Ids, compact: _Compact, rows: Sequence[Row]
) -> dict[str, list[Any]]:
    """Return the key columns of rows whose key is not their work and sender."""
    if compact.table is payload_rows:
        owners = [row["incarnation"] for row in rows]
        ids.add_texts(connection, owners)
        return {"owner_id": [ids.texts[name] for name in owners], "seq": [r["seq"] for r in rows]}
    prefixes, owners = [row["prefix"] for row in rows], [row["owner"] for row in rows]
    ids.add_texts(connection, {*prefixes, *owners})
    return {
        "prefix_id": [ids.texts[prefix] for prefix in prefixes],
        "owner_id": [NO_OWNER if name is None else ids.texts[name] for name in owners],
        "number": [row["number"] for row in rows],
    }


def _split_artifact(artifact_id: str) -> dict[str, Any]:
    """Return an id `prefix/owner/number` in its pieces; another id is all prefix."""
    prefix, _, rest = artifact_id.partition("/")
    owner, _, number = rest.rpartition("/")
    if owner and number.isdigit() and int(number) < 1 << 63 and str(int(number)) == number:
        return {"prefix": prefix, "owner": owner, "number": int(number)}
    return {"prefix": artifact_id, "owner": None, "number": 0}


def _paths(
    connection: sa.Connection, ids: Ids, rows: Sequence[Row]
) -> tuple[list[int | None], list[str | None]]:
    """Return (id of the common path, own path) of artifacts, one of which is None."""
    common: list[str | None] = []
    for row in rows:
        path, own = row["path"], f"{row['number']}~{row['owner']}"
        marked = None if path is None or PATH_MARK in path else path.replace(own, PATH_MARK)
        common.append(None if marked == path or row["owner"] is None else marked)
    ids.add_texts(connection, common)
    own_paths = [
        row["path"] if text is None else None for row, text in zip(rows, common, strict=True)
    ]
    return [ids.texts[text] for text in common], own_paths


def _shared(
    connection: sa.Connection, ids: Ids, values: Sequence[Any]
) -> tuple[list[int | None], list[str | None]]:
    """Return (id of the JSON, the JSON itself) of values, one of which is None."""
    documents = [None if value is None else dump_json(value) for value in values]
    counts = Counter(documents)
    shared = {
        text
        for text, count in counts.items()
        if text is not None
        and len(text) <= _JSON_MOST
        and (count > 1 or text in ids.texts or text in ids.seen)
    }
    ids.add_texts(connection, shared)
    ids.seen.update(dict.fromkeys(text for text in counts if text is not None))
    found = [ids.texts[text] if text in shared else None for text in documents]
    return found, [None if text in shared else text for text in documents]


# --- what is advanced with the rows ---------------------------------------------------------------
def _advance_names(connection: sa.Connection, ids: Ids, rows: Sequence[Row]) -> None:
    """Record the names of an attempt's scalars, and the last step of each."""
    last: dict[tuple[int, str], int | None] = {}
    for attempt_id, name, step in set(map(itemgetter("attempt_id", "name", "step"), rows)):
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
    insert = _insert(connection.dialect, scalar_names)
    later = sa.or_(
        scalar_names.c.last_step.is_(None), insert.excluded.last_step > scalar_names.c.last_step
    )
    statement = insert.on_conflict_do_update(
        index_elements=["attempt_id", "name"],
        set_={"last_step": insert.excluded.last_step},
        where=later,
    )
    connection.execute(
        statement,
        [{"attempt_id": key[0], "name": key[1], "last_step": step} for key, step in new.items()],
    )
    ids.last_steps |= new


def _is_later(step: int | None, than: int | None) -> bool:
    return step is not None and (than is None or step > than)


def _advance_begins(connection: sa.Connection, ids: Ids, rows: Sequence[Row]) -> None:
    """Record each attempt's training stage that began last."""
    latest: dict[int, Row] = {}
    for row in rows:
        begun, attempt_id = row["begun_wall"], row["attempt_id"]
        if begun is None or attempt_id is None or row["stage"] in (None, "rollout_generate"):
            continue
        known = latest[attempt_id]["begun_wall"] if attempt_id in latest else -float("inf")
        if begun > max(known, ids.last_begun.get(attempt_id, -float("inf"))):
            latest[attempt_id] = row
    if not latest:
        return
    insert = _insert(connection.dialect, training_begins)
    names = ("begun_wall", "begin_wall", "step")
    statement = insert.on_conflict_do_update(
        index_elements=["attempt_id"],
        set_={name: insert.excluded[name] for name in names},
        where=insert.excluded.begun_wall > training_begins.c.begun_wall,
    )
    values = [
        {"attempt_id": attempt_id, **{name: row.get(name) for name in names}}
        for attempt_id, row in latest.items()
    ]
    connection.execute(statement, values)
    ids.last_begun |= {attempt_id: row["begun_wall"] for attempt_id, row in latest.items()}


# --- statements -----------------------------------------------------------------------------------
def _insert(dialect: sa.Dialect, table: sa.Table) -> Any:
    # Both have the same methods; each compiles only for its own database.
    return (postgresql.insert if dialect.name == "postgresql" else sqlite.insert)(table)


class _Upsert:
    """An upsert in one database's dialect, with the order of its parameters."""

    def __init__(
        self, dialect: sa.Dialect, table: sa.Table, columns: tuple[str, ...], sets: frozenset[str]
    ) -> None:
        insert = _insert(dialect, table)
        keys = [column.name for column in table.primary_key]
        chosen = {name: insert.excluded[name] for name in sorted(sets)}
        statement = (
            insert.on_conflict_do_update(index_elements=keys, set_=chosen)
            if chosen
            else insert.on_conflict_do_nothing(index_elements=keys)
        )
        compiled = statement.compile(dialect=dialect, column_keys=list(columns))
        self.text = str(compiled)
        self.is_positional = compiled.positional
        self.order = tuple(compiled.positiontup or ()) if compiled.positional else columns


_statement = functools.lru_cache(maxsize=1024)(_Upsert)
