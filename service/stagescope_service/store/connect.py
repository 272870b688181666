"""SQLAlchemy engines of the catalogue, and the translation of database errors.

SQLite is opened in WAL mode with `synchronous=FULL`: a commit is on disk when it returns, and
readers in other processes never wait for the writer. WAL needs shared memory between those
processes, so the file must be on a local filesystem.

A PostgreSQL database may hold the catalogues of several services, each in a schema of its own. The
writer's connection holds an advisory lock on its schema: a second service is refused, and the lock
goes with the connection.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa
from sqlalchemy import event, exc

from stagescope_service.store.tables import metadata
from stagescope_wire.errors import CatalogueUnavailable
from stagescope_wire.versions import install_command

if TYPE_CHECKING:
    import psycopg

REVISION: Final = "0016"
"""Revision of the tables; a catalogue of another revision is refused."""

_VERSION: Final = sa.Table(
    "alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True)
)
"""Holds the revision. It is Alembic's table, so that its migrations can follow after a release."""

BUSY_SECONDS: Final = 5.0
"""How long a statement waits for another process's lock before it fails."""

_WAL_BYTES: Final = 64 << 20
_FREED_PAGES: Final = 500
"""Pages that `free_pages` frees in one transaction."""
_ENCODINGS: Final = ("UTF8", "SQL_ASCII")
"""Encodings of PostgreSQL's databases that hold every text; SQL_ASCII keeps bytes as they are."""
_OLDEST_SQLITE: Final = (3, 37, 0)  # STRICT tables; upserts are older
_SHARED_FILESYSTEMS: Final = re.compile(
    r"nfs\d?|lustre|gpfs|cifs|smb\w*|9p|afs|beegfs|ceph|wekafs|ocfs2|gfs2?|glusterfs|pvfs2|orangefs"
    r"|juicefs|virtiofs|fuse\.(?!fuse-overlayfs|overlay|ext|ntfs).*"
)
_MOVE: Final = "give a path on a local disk, or use PostgreSQL (postgresql+psycopg://...)"


def catalogue_url(data_dir: str | Path) -> str:
    """Return the URL of the SQLite catalogue in a data directory."""
    path = Path(data_dir).absolute() / "catalogue.db"
    return f"sqlite:///{urllib.parse.quote(str(path))}"


def _schema_of(url: str) -> str | None:
    """Return the schema that a URL names, as `Settings.catalogue_url` does; None: it names none."""
    options = sa.engine.make_url(url).query.get("options", ())
    text = options if isinstance(options, str) else " ".join(options)
    found = re.search(r"-csearch_path=([a-z_][a-z0-9_]*)(?:\s|$)", text)
    return found[1] if found else None


def sqlite_path(url: str) -> Path | None:
    """Return the file of a SQLite URL, or None for a URL of another database.

    Raises:
        CatalogueUnavailable: not a URL, or a SQLite database in memory.
    """
    try:
        parsed = sa.engine.make_url(url)
    except exc.ArgumentError as error:
        raise CatalogueUnavailable(
            f"catalogue {url!r:.100} is not a database URL",
            expected="sqlite:////path/catalogue.db or postgresql+psycopg://host/database",
        ) from error
    if parsed.get_backend_name() != "sqlite":
        return None
    # Not parsed.database: SQLAlchemy 2.0 leaves it quoted, and 2.1 does not.
    database = urllib.parse.unquote(url.partition(":///")[2].partition("?")[0])
    if database in ("", ":memory:"):
        raise CatalogueUnavailable(
            "a SQLite catalogue in memory",
            expected="sqlite:////path/catalogue.db: other processes read it",
        )
    return Path(database).absolute()


def filesystem_of(path: Path, mountinfo: str) -> tuple[str, str]:
    """Return (mount point, filesystem type) of `path` from the text of /proc/self/mountinfo."""
    found = ("/", "")
    for line in mountinfo.split("\n"):
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
        if path.is_relative_to(mount) and len(mount) >= len(found[0]):
            found = (mount, right.split(" ")[0])
    return found


def check_local(path: Path, mountinfo: str | None = None) -> None:
    """Refuse a file on a network filesystem.

    Args:
        path: the existing or future file of the catalogue.
        mountinfo: the text of /proc/self/mountinfo; None reads it, if the system has one.

    Raises:
        CatalogueUnavailable: NFS, Lustre, GPFS and the like, with a suggested location.
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="replace")
        except OSError:
            return
    mount, kind = filesystem_of(path.resolve(), mountinfo)
    if _SHARED_FILESYSTEMS.fullmatch(kind):
        raise CatalogueUnavailable(
            f"catalogue {path} lies on {kind} (mounted at {mount}), where SQLite's WAL breaks",
            expected="a filesystem of this host",
            advice=_MOVE,
        )


def writer_engine(url: str) -> sa.Engine:
    """Return the engine of the single writer; creates SQLite's file and its directory."""
    path = sqlite_path(url)
    if path is None:
        return _server_writer(url)
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise CatalogueUnavailable(
            f"SQLite is {sqlite3.sqlite_version}", expected="3.37 or later", advice=_MOVE
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_local(path)
    # In a directory that others may read; SQLite's other files take the mode of this one.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    engine = _sqlite_engine(path, mode="rwc")

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, record: object) -> None:
        # Before the file has its first page: then `free_pages` can make it smaller.
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise CatalogueUnavailable(
                f"SQLite refused WAL for {path} (it stays in mode {mode!r})", advice=_MOVE
            )
        connection.execute("PRAGMA synchronous=FULL")
        # A reader that lasts lets the WAL grow; it gets as small again once it is written back.
        connection.execute(f"PRAGMA journal_size_limit={_WAL_BYTES}")

    return engine


def _server_writer(url: str) -> sa.Engine:
    """Return an engine with one connection, which holds the lock of the catalogue's only writer."""
    schema = _schema_of(url)
    engine = _server_engine(url, pool_size=1, max_overflow=0)

    @event.listens_for(engine, "connect")
    def prepare(connection: psycopg.Connection, record: object) -> None:
        deadline = time.monotonic() + BUSY_SECONDS  # a killed writer's lock goes with its socket
        with connection.cursor() as cursor:
            cursor.execute(b"SHOW server_encoding")
            (encoding,) = cursor.fetchone() or ("",)
            if encoding not in _ENCODINGS:
                raise CatalogueUnavailable(
                    f"the database of catalogue {url_without_password(url)} has the encoding "
                    f"{encoding}, which lacks characters of ids and messages",
                    expected="the encoding UTF8",
                    advice="make one: createdb --encoding=UTF8 --template=template0 NAME",
                )
            if schema is not None:
                cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}".encode())
            # A lost host's connection is found dead within a minute, and its lock is free.
            cursor.execute(b"SET tcp_keepalives_idle = 20")
            cursor.execute(b"SET tcp_keepalives_interval = 10")
            cursor.execute(b"SET tcp_keepalives_count = 3")
            while True:
                cursor.execute(
                    b"SELECT pg_try_advisory_lock(hashtextextended('stagescope ' || "
                    b"current_schema(), 0))"
                )
                (locked,) = cursor.fetchone() or (False,)
                connection.commit()
                if locked:
                    return
                if time.monotonic() > deadline:
                    raise CatalogueUnavailable(
                        f"another service writes to catalogue {url_without_password(url)}",
                        expected="one service for each catalogue",
                        advice="stop that service, or give this one a schema of its own "
                        "(STAGESCOPE_DATABASE_SCHEMA)",
                    )
                time.sleep(0.05)

    return engine


def free_pages(url: str) -> None:
    """Give the space of deleted rows back: SQLite's file shrinks, PostgreSQL reuses the space.

    SQLite moves pages in small transactions, so that others can write in between. PostgreSQL's
    VACUUM locks nobody out; it shortens a table's file only where the end of it is empty.

    Raises:
        CatalogueUnavailable: the database cannot be reached; a later call continues.
    """
    path = sqlite_path(url)
    with catalogue_errors(url_without_password(url)):
        if path is None:
            engine = _server_engine(url).execution_options(isolation_level="AUTOCOMMIT")
            try:
                with engine.connect() as server:
                    for table in metadata.tables:
                        server.exec_driver_sql(f"VACUUM {table}")
            finally:
                engine.dispose()
            return
        file = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
        with contextlib.closing(file):
            while file.execute("PRAGMA freelist_count").fetchone()[0]:
                began = time.monotonic()
                # As a script: `execute` would make one step of it, which frees one page.
                file.executescript(f"PRAGMA incremental_vacuum({_FREED_PAGES})")
                time.sleep(min(1.0, time.monotonic() - began))
            file.execute("PRAGMA busy_timeout=0")  # it waits for no reader; a later one is as good
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def revision_of(connection: sa.Connection) -> str | None:
    """Return the revision of a catalogue's tables; None for an empty database."""
    if not sa.inspect(connection).has_table(_VERSION.name):
        return None
    return connection.scalar(sa.select(_VERSION.c.version_num))


def make_tables(connection: sa.Connection) -> None:
    """Create the tables in an empty database; do nothing where this version's tables exist.

    Args:
        connection: inside a transaction that the caller commits. Its lock serializes services that
            start at the same time.

    Raises:
        CatalogueUnavailable: the tables are of another revision.
    """
    if revision_of(connection) is not None:
        check_revision(connection)
        return
    metadata.create_all(connection, checkfirst=False)
    _VERSION.create(connection)
    connection.execute(_VERSION.insert(), {"version_num": REVISION})


def check_revision(connection: sa.Connection, what: str = "the catalogue") -> None:
    """Refuse a catalogue of another revision, or a database without one.

    Args:
        connection: to the database.
        what: the name of the catalogue in the error.

    Raises:
        CatalogueUnavailable: the tables are of another revision.
    """
    revision = revision_of(connection)
    if revision != REVISION:
        raise CatalogueUnavailable(
            f"{what} is of revision {revision!r}, which this package does not know",
            expected=f"revision {REVISION!r}",
            advice="use the stagescope that wrote it, or give another catalogue",
        )


def reader_engine(url: str) -> sa.Engine:
    """Return a read-only engine, for any process; creates nothing."""
    path = sqlite_path(url)
    if path is None:
        return _server_engine(url).execution_options(postgresql_readonly=True)
    engine = _sqlite_engine(path, mode="rw")  # a WAL cannot always be read with mode=ro

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, record: object) -> None:
        connection.execute("PRAGMA query_only=ON")

    return engine


def _server_engine(url: str, **pool: int) -> sa.Engine:
    # Texts of every language, whatever PGCLIENTENCODING says.
    encoding = {"client_encoding": "utf8"}
    try:
        return sa.create_engine(url, pool_pre_ping=True, connect_args=encoding, **pool)
    except (exc.ArgumentError, ImportError) as error:
        raise CatalogueUnavailable(
            f"no driver for catalogue {url.partition('://')[0]!r}: {error}",
            advice=f"install it, for PostgreSQL: {install_command('postgresql')}",
        ) from error


def _sqlite_engine(path: Path, *, mode: str) -> sa.Engine:
    uri = f"file:{urllib.parse.quote(str(path))}?mode={mode}"

    def connect() -> sqlite3.Connection:
        # isolation_level None: this module issues BEGIN. The driver would begin only at the first
        # write, and a reader's queries would not share a snapshot.
        return sqlite3.connect(
            uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )

    engine = sa.create_engine(
        "sqlite://", creator=connect, poolclass=sa.QueuePool, pool_size=4, max_overflow=12
    )

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A writer that begins with a read may fail later, when it requests the lock.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if mode == "rwc" else "BEGIN")

    return engine


def file_id(path: Path) -> tuple[int, int] | None:
    """Return the identity of the file at a path, to detect its replacement; None if absent."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_transient(error: BaseException) -> bool:
    """Return whether the same write may succeed later, after an external change.

    A database that cannot be reached, lacks space, a privilege or a table is transient. An error
    about the values of a row is not.
    """
    if isinstance(error, exc.DBAPIError):
        return error.connection_invalidated or not _is_about_values(error.orig)
    # exc.TimeoutError: all connections of the pool are in use.
    return isinstance(error, CatalogueUnavailable | OSError | MemoryError | exc.TimeoutError)


_SQLITE_VALUES: Final = (sqlite3.IntegrityError, sqlite3.DataError)
_STATES_OF_VALUES: Final = re.compile("22...|23...|54...|42601|42804|42846|42883")
"""SQLSTATE: data exceptions, constraints, limits (an index row that is too long), and the syntax
errors and types that no later try changes."""


def _is_about_values(error: BaseException | None) -> bool:
    """Return whether a driver's error is about the values that it was given."""
    if isinstance(error, sqlite3.Error):
        return isinstance(error, _SQLITE_VALUES) or "binding parameter" in str(error)
    state = getattr(error, "sqlstate", None)
    if state is not None:
        return _STATES_OF_VALUES.fullmatch(state) is not None
    # psycopg refuses a NUL in a text (DataError) and a type that it does not know itself.
    return type(error).__name__ == "DataError" or "cannot adapt" in str(error)


def explain(error: BaseException, where: str) -> CatalogueUnavailable:
    """Convert a transient database error to one with advice."""
    if isinstance(error, CatalogueUnavailable):
        return error
    cause = getattr(error, "orig", None) or error
    text = str(cause)
    advice = next((advice for key, advice in _ADVICE.items() if key in text), "")
    return CatalogueUnavailable(f"catalogue {where}: {text}", advice=advice)


_ADVICE: Final = {
    "disk is full": "free space on its disk; what is queued is written as soon as there is some",
    "No space left": "free space on its disk; what is queued is written as soon as there is some",
    "locked": "another process holds a write lock; end it (a backup, an sqlite3 shell)",
    "unable to open": "check that the directory exists and may be written by this user",
    "readonly": "check that file and directory may be written by this user",
    "Permission denied": "check that file and directory may be written by this user",
    "permission denied": "grant the service's database user its privileges again; what is queued "
    "is written then",
    "does not exist": "restore it; what is queued is written then",
    "malformed": "the file is damaged; stop the service and restore or move it away",
    "not a database": "the file is not a catalogue; move it away or give another path",
    "no such table": "it does not exist yet; start the service first",
    "no such column": "it is of another version; use the stagescope that wrote it",
    "disk I/O error": "check the disk under it",
}


@contextmanager
def catalogue_errors(where: str) -> Iterator[None]:
    """Raise `CatalogueUnavailable` for every transient database error."""
    try:
        yield
    except (exc.SQLAlchemyError, OSError) as error:
        if not is_transient(error):
            raise
        raise explain(error, where) from error


def url_without_password(url: str) -> str:
    """Return `url` without its password, for messages."""
    path = sqlite_path(url)
    return str(path) if path else sa.engine.make_url(url).render_as_string(hide_password=True)
