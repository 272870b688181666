"""Stages, scalars, payloads and artifacts in less than a fifth of the space.

What many rows have in common moves to tables of its own, to which rows refer by an integer; the old
names become views of the same rows. See `store.tables.compact`.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Real: sa.types.TypeEngine[float] = sa.Double().with_variant(sa.REAL(), "sqlite")
Flag = sa.Boolean().with_variant(sa.Integer(), "sqlite")
Text = sa.Text()
Blob = sa.LargeBinary()

KNOWN_TEXTS = ("ingested", "announced", "ok", "ring", "kept", "open", "unfinished", "failed")
PART = "occurrence epoch minibatch microbatch"
WORK = f"attempt_id step policy_version stage {PART} work_key".split()
SENDER = ["incarnation", "attempt_id", "role", "rank"]
TEXT_COLUMNS = ("stage", "work_key", "incarnation", "role")
OLD = ("stages", "scalars", "payloads", "artifacts")
OWN = "o.seq || '~' || o.incarnation"
SPLIT = (
    "(o.artifact_id = o.kind || '/' || o.incarnation || '/' || o.seq "
    "AND o.seq >= 0 AND o.incarnation <> '' AND o.kind NOT LIKE '%/%')"
)
MARKED = f"replace(o.path, {OWN}, '{{payload}}')"
COMMON = f"({SPLIT} AND {MARKED} <> o.path AND o.path NOT LIKE '%{{payload}}%')"


def columns(kind: Any, names: str) -> list[sa.Column[object]]:
    return [sa.Column(name, kind) for name in names.split()]


def create(name: str, key: Sequence[sa.Column[object]], *others: Any, rowid: bool = True) -> None:
    for column in key:
        column.nullable = False
    primary = sa.PrimaryKeyConstraint(*(column.name for column in key), name=f"pk_{name}")
    options = {"sqlite_strict": True} | ({} if rowid else {"sqlite_with_rowid": False})
    op.create_table(name, *key, *others, primary, **options)


def index(name: str, table: str, names: list[str], where: str | None = None) -> None:
    condition = None if where is None else sa.text(where)
    op.create_index(name, table, names, sqlite_where=condition, postgresql_where=condition)


def text_of(column: str) -> str:
    return f"(SELECT t.text FROM texts t WHERE t.text_id = r.{column})"


def upgrade() -> None:
    create_tables()
    for name in OLD:
        op.rename_table(name, f"old_{name}")
    fill()
    for name in OLD:
        op.drop_table(f"old_{name}")
    create_views()


def create_tables() -> None:
    unique = sa.UniqueConstraint("text", name="uq_texts_text")
    create("texts", columns(Int, "text_id"), sa.Column("text", Text), unique)
    create(
        "works",
        columns(Int, "work_id"),
        *columns(Int, "attempt_id step policy_version"),
        sa.Column("stage", Text),
        *columns(Int, PART),
        sa.Column("work_key", Text),
    )
    index("ix_works_attempt_id_step", "works", ["attempt_id", "step"])
    index("ix_works_work_key", "works", ["work_key"])
    create(
        "senders",
        columns(Int, "sender_id"),
        sa.Column("incarnation", Text),
        sa.Column("attempt_id", Int),
        sa.Column("role", Text),
        sa.Column("rank", Int),
    )
    index("ix_senders_incarnation", "senders", ["incarnation"])
    create("clocks", columns(Int, "clock_id"), *columns(Real, "clock_offset clock_error"))
    create(
        "scalar_names",
        [sa.Column("attempt_id", Int), sa.Column("name", Text)],
        sa.Column("last_step", Int),
    )
    create(
        "training_begins",
        columns(Int, "attempt_id"),
        *columns(Real, "begun_wall begin_wall"),
        sa.Column("step", Int),
    )
    create(
        "stage_rows",
        columns(Int, "work_id sender_id revision"),
        sa.Column("begin_after", Int),
        *columns(Real, "begin_wall begin_mono"),
        sa.Column("end_after", Int),
        *columns(Real, "end_wall end_mono"),
        sa.Column("device_time", Flag),
        sa.Column("device_seconds", Real),
        *columns(Int, "clock_id status_id"),
        *columns(Text, "error_type error_message"),
        sa.Column("superseded", Flag),
        sa.Column("begun_wall", Real),
        sa.Column("reserved", Blob),
        rowid=False,
    )
    index("ix_stage_rows_open", "stage_rows", ["work_id"], "end_wall IS NULL")
    index("ix_stage_rows_superseded", "stage_rows", ["work_id"], "superseded")
    create(
        "scalar_rows",
        columns(Int, "work_id name_id sender_id"),
        sa.Column("value", Real),
        sa.Column("nonfinite_id", Int),
        sa.Column("wall", Real),
        rowid=False,
    )
    create(
        "payload_rows",
        columns(Int, "owner_id seq"),
        *columns(Int, "work_id sender_id state_id"),
        sa.Column("reason", Text),
        sa.Column("tensors_id", Int),
        sa.Column("tensors", Text),
        sa.Column("meta_id", Int),
        sa.Column("meta", Text),
        *columns(Int, "bytes node"),
        *columns(Real, "announced_wall settled_wall"),
        sa.Column("digest", Text),
        sa.Column("consumed_step", Int),
        sa.Column("reserved", Blob),
        rowid=False,
    )
    index("ix_payload_rows_work_id", "payload_rows", ["work_id"])
    index("ix_payload_rows_announced", "payload_rows", ["work_id"], "state_id = 1")
    create(
        "artifact_rows",
        columns(Int, "prefix_id owner_id number"),
        *columns(Int, "seq_after work_id sender_id kind_id node path_id"),
        sa.Column("path", Text),
        sa.Column("bytes", Int),
        sa.Column("checksum", Text),
        *columns(Flag, "shared pinned"),
        *columns(Real, "wall deleted_wall"),
        *columns(Text, "sections tensors"),
        sa.Column("reserved", Blob),
        rowid=False,
    )
    index("ix_artifact_rows_work_id", "artifact_rows", ["work_id"])
    index("ix_artifact_rows_live", "artifact_rows", ["kind_id"], "deleted_wall IS NULL")


def same(column: str, left: str, right: str) -> str:
    """Compare two columns, of which null equals null, so that each database uses an index."""
    if op.get_bind().dialect.name == "sqlite":
        return f"{left} IS {right}"
    real = column in ("clock_offset", "clock_error")
    none = "chr(1)" if column in TEXT_COLUMNS else "'NaN'" if real else "-9223372036854775808"
    return f"coalesce({left}, {none}) = coalesce({right}, {none})"


def join(table: str, alias: str, names: list[str]) -> str:
    on = " AND ".join(same(name, f"{alias}.{name}", f"o.{name}") for name in names)
    return f"JOIN {table} {alias} ON {on}"


def text_id(value: str) -> str:
    return f"(SELECT t.text_id FROM texts t WHERE t.text = {value})"


def fill() -> None:
    """Copy every row."""
    run = op.get_bind().exec_driver_sql
    for at, text in enumerate(KNOWN_TEXTS):
        run(f"INSERT INTO texts (text_id, text) VALUES ({at}, '{text}')")
    wanted = [
        f"SELECT {name} AS text FROM old_{table}"
        for table, names in {
            "stages": ("status",),
            "scalars": ("name", "nonfinite"),
            "payloads": ("incarnation", "state", "node_id"),
            "artifacts": ("kind", "node_id"),
        }.items()
        for name in names
    ]
    wanted += [
        f"SELECT {name} FROM old_payloads WHERE length({name}) <= 10000 "
        f"GROUP BY {name} HAVING count(*) > 1"
        for name in ("tensors", "meta")
    ]
    wanted += [
        f"SELECT CASE WHEN {SPLIT} THEN o.kind ELSE o.artifact_id END FROM old_artifacts o",
        f"SELECT o.incarnation FROM old_artifacts o WHERE {SPLIT}",
        f"SELECT {MARKED} FROM old_artifacts o WHERE {COMMON}",
    ]
    run(
        f"INSERT INTO texts (text_id, text) SELECT row_number() OVER (ORDER BY x.text) + "
        f"{len(KNOWN_TEXTS) - 1}, x.text FROM ({_percent(' UNION '.join(wanted))}) x "
        "WHERE x.text IS NOT NULL AND x.text NOT IN (SELECT text FROM texts)"
    )
    keys = [f"SELECT {', '.join(WORK)} FROM old_{name}" for name in OLD[:3]]
    keys.append(f"SELECT {', '.join(WORK[:-1])}, NULL FROM old_artifacts")
    number("works", "work_id", WORK, keys)
    keys = [f"SELECT {', '.join(SENDER)} FROM old_{name}" for name in OLD]
    number("senders", "sender_id", SENDER, keys)
    clock = ["clock_offset", "clock_error"]
    found = "clock_offset IS NOT NULL OR clock_error IS NOT NULL"
    keys = [f"SELECT DISTINCT {', '.join(clock)} FROM old_stages WHERE {found}"]
    number("clocks", "clock_id", clock, keys)
    both = f"{join('works', 'w', WORK)} {join('senders', 's', SENDER)}"
    run(
        "INSERT INTO stage_rows SELECT w.work_id, s.sender_id, o.revision, "
        "o.begin_seq - o.revision, o.begin_wall, o.begin_mono, o.end_seq - o.revision, o.end_wall, "
        f"o.end_mono, o.device_time, o.device_seconds, c.clock_id, {text_id('o.status')}, "
        "o.error_type, o.error_message, o.superseded, o.begun_wall, NULL "
        f"FROM old_stages o {both} LEFT {join('clocks', 'c', clock)}"
    )
    run(
        f"INSERT INTO scalar_rows SELECT w.work_id, {text_id('o.name')}, s.sender_id, o.value, "
        f"{text_id('o.nonfinite')}, o.wall FROM old_scalars o {both}"
    )
    shared = [
        f"t_{name}.text_id, CASE WHEN t_{name}.text_id IS NULL THEN o.{name} END"
        for name in ("tensors", "meta")
    ]
    joined = " ".join(
        f"LEFT JOIN texts t_{name} ON t_{name}.text = o.{name}" for name in ("tensors", "meta")
    )
    run(
        f"INSERT INTO payload_rows SELECT {text_id('o.incarnation')}, o.seq, w.work_id, "
        f"s.sender_id, {text_id('o.state')}, o.reason, {', '.join(shared)}, o.bytes, "
        f"{text_id('o.node_id')}, o.announced_wall, o.settled_wall, o.digest, o.consumed_step, "
        f"NULL FROM old_payloads o {both} {joined}"
    )
    places = join("works", "w", WORK[:-1])
    run(
        _percent(
            f"INSERT INTO artifact_rows SELECT CASE WHEN {SPLIT} THEN {text_id('o.kind')} "
            f"ELSE {text_id('o.artifact_id')} END, "
            f"CASE WHEN {SPLIT} THEN {text_id('o.incarnation')} ELSE -1 END, "
            f"CASE WHEN {SPLIT} THEN o.seq ELSE 0 END, "
            f"CASE WHEN {SPLIT} THEN 0 ELSE o.seq END, w.work_id, s.sender_id, "
            f"{text_id('o.kind')}, {text_id('o.node_id')}, "
            f"CASE WHEN {COMMON} THEN {text_id(MARKED)} END, "
            f"CASE WHEN {COMMON} THEN NULL ELSE o.path END, o.bytes, o.checksum, o.shared, "
            "o.pinned, o.wall, o.deleted_wall, o.sections, o.tensors, NULL FROM old_artifacts o "
            f"{places} AND w.work_key IS NULL {join('senders', 's', SENDER)}"
        )
    )
    split_others()
    run(
        "INSERT INTO scalar_names SELECT attempt_id, name, max(step) FROM old_scalars "
        "WHERE attempt_id IS NOT NULL GROUP BY attempt_id, name"
    )
    run(
        "INSERT INTO training_begins SELECT x.attempt_id, x.begun_wall, x.begin_wall, x.step FROM "
        "(SELECT attempt_id, begun_wall, begin_wall, step, row_number() OVER "
        "(PARTITION BY attempt_id ORDER BY begun_wall DESC) AS place FROM old_stages "
        "WHERE stage <> 'rollout_generate' AND begun_wall IS NOT NULL "
        "AND attempt_id IS NOT NULL) x "
        "WHERE x.place = 1"
    )


def split_others() -> None:
    """Split artifact ids of which the columns say otherwise, as the writer splits them."""
    connection = op.get_bind()
    query = (
        "SELECT r.prefix_id, t.text FROM artifact_rows r JOIN texts t ON t.text_id = r.prefix_id "
        "WHERE r.owner_id = -1"
    )
    for whole, artifact_id in connection.exec_driver_sql(query).fetchall():
        prefix, _, rest = artifact_id.partition("/")
        owner, _, digits = rest.rpartition("/")
        if not owner or not digits.isdigit() or str(int(digits)) != digits:
            continue
        if int(digits) >= 1 << 63:
            continue
        connection.execute(
            sa.text(
                "UPDATE artifact_rows SET prefix_id = :prefix, owner_id = :owner, "
                "number = :number, seq_after = seq_after - :number "
                "WHERE prefix_id = :whole AND owner_id = -1"
            ),
            {
                "prefix": find_text(prefix),
                "owner": find_text(owner),
                "number": int(digits),
                "whole": whole,
            },
        )


def find_text(text: str) -> int:
    """Return the id of a text, and insert it where it is new."""
    connection = op.get_bind()
    query = sa.text("SELECT text_id FROM texts WHERE text = :text")
    found = connection.scalar(query, {"text": text})
    if found is None:
        insert = "INSERT INTO texts SELECT max(text_id) + 1, :text FROM texts"
        connection.execute(sa.text(insert), {"text": text})
        found = connection.scalar(query, {"text": text})
    return int(found)


def _percent(statement: str) -> str:
    """Escape what the driver of PostgreSQL would take for a parameter."""
    return statement if op.get_bind().dialect.name == "sqlite" else statement.replace("%", "%%")


def number(table: str, id_name: str, names: list[str], queries: list[str]) -> None:
    """Fill a table with what several queries select, each row once and with an id."""
    listed = ", ".join(names)
    op.get_bind().exec_driver_sql(
        f"INSERT INTO {table} ({id_name}, {listed}) SELECT row_number() OVER (ORDER BY {listed}), "
        f"{listed} FROM ({' UNION '.join(queries)}) x"
    )


def create_views() -> None:
    work = (
        "w.attempt_id, w.step, w.policy_version, w.stage, s.role, s.rank, "
        "w.occurrence, w.epoch, w.minibatch, w.microbatch"
    )
    joined = "JOIN works w ON w.work_id = r.work_id JOIN senders s ON s.sender_id = r.sender_id"
    path = f"replace({text_of('path_id')}, '{{payload}}', r.number || '~' || {text_of('owner_id')})"
    nonfinite = f"CASE WHEN r.nonfinite_id IS NOT NULL THEN {text_of('nonfinite_id')} END"
    views = {
        "stages": (
            f"SELECT r.work_id, r.sender_id, s.incarnation, w.work_key, r.revision, {work}, "
            "r.revision + r.begin_after AS begin_seq, r.begin_wall, r.begin_mono, "
            "r.revision + r.end_after AS end_seq, r.end_wall, r.end_mono, r.device_time, "
            "r.device_seconds, c.clock_offset, c.clock_error, "
            f"{text_of('status_id')} AS status, r.error_type, r.error_message, r.superseded, "
            f"r.begun_wall FROM stage_rows r {joined} "
            "LEFT JOIN clocks c ON c.clock_id = r.clock_id"
        ),
        "scalars": (
            "SELECT r.work_id, r.name_id, r.sender_id, s.incarnation, w.work_key, n.text AS name, "
            f"{work}, r.value, {nonfinite} AS nonfinite, r.wall "
            f"FROM scalar_rows r {joined} JOIN texts n ON n.text_id = r.name_id"
        ),
        "payloads": (
            "SELECT r.owner_id, r.work_id, r.sender_id, r.state_id, "
            f"{text_of('owner_id')} AS incarnation, r.seq, {work}, w.work_key, "
            f"{text_of('state_id')} AS state, r.reason, "
            f"coalesce({text_of('tensors_id')}, r.tensors) AS tensors, "
            f"coalesce({text_of('meta_id')}, r.meta) AS meta, r.bytes, "
            f"{text_of('node')} AS node_id, r.announced_wall, r.settled_wall, r.digest, "
            f"r.consumed_step FROM payload_rows r {joined}"
        ),
        "artifacts": (
            "SELECT r.prefix_id, r.owner_id, r.number, r.work_id, r.sender_id, r.kind_id, "
            f"CASE WHEN r.owner_id < 0 THEN {text_of('prefix_id')} ELSE {text_of('prefix_id')} "
            f"|| '/' || {text_of('owner_id')} || '/' || r.number END AS artifact_id, "
            "s.incarnation, r.number + r.seq_after AS seq, w.attempt_id, w.step, w.stage, s.role, "
            f"s.rank, {text_of('kind_id')} AS kind, {text_of('node')} AS node_id, "
            f"coalesce(r.path, {path}) AS path, "
            "r.bytes, r.checksum, r.shared, r.pinned, r.wall, r.deleted_wall, w.policy_version, "
            "w.occurrence, w.epoch, w.minibatch, w.microbatch, r.sections, r.tensors "
            f"FROM artifact_rows r {joined}"
        ),
    }
    for name, query in views.items():
        op.get_bind().exec_driver_sql(f"CREATE VIEW {name} AS {query}")
