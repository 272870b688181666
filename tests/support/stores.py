"""Helpers for tests that write a real catalogue."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
import sqlalchemy as sa

from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.connect import catalogue_url
from stagescope_service.store.contract import Put
from stagescope_service.store.snapshot import rows
from stagescope_service.store.sql import SqlStore
from stagescope_service.store.tables import TABLES, FindingRow

T = TypeVar("T")
DATABASES: Final = ("sqlite", "postgresql")
ON_SQLITE: Final = pytest.mark.parametrize("store", ["sqlite"], indirect=True)
"""For a test of what SQLite alone has."""
_REQUIRED: Final = "TEST_POSTGRESQL"
"""Set to `required` where a missing server is a failure and not a reason to skip."""


def url_of(directory: Path) -> str:
    """The URL of a SQLite catalogue in `directory`."""
    return catalogue_url(directory)


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """The URL of a PostgreSQL server of its own; see `postgresql_server`."""
    with postgresql_server() as (url, _):
        yield url


@contextlib.contextmanager
def postgresql_server() -> Iterator[tuple[str, Callable[..., None]]]:
    """A PostgreSQL server of its own, where there is one to start.

    It answers on a Unix socket in its directory alone, and does not flush to the disk.

    Yields:
        Its URL, and what ends it at once, or starts it again: `control("stop")`.
    """
    tools = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    as_root = os.getuid() == 0
    driver = importlib.util.find_spec("psycopg")
    if not driver or not tools or (as_root and not shutil.which("runuser")):
        assert os.environ.get(_REQUIRED) != "required", f"psycopg: {driver}, servers: {tools}"
        pytest.skip("no psycopg or no PostgreSQL server here: Debian has it as `postgresql`")
    prefix = ["runuser", "-u", "postgres", "--"] if as_root else []  # it refuses to run as root

    def run(tool: str, *arguments: str) -> None:
        command = [*prefix, str(tools[-1] / tool), "-D", data, *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd="/")

    # Not below pytest's own directory, which each start of pytest closes to other users.
    with tempfile.TemporaryDirectory(prefix="postgresql-") as data:
        if as_root:
            shutil.chown(data, "postgres")
        run("initdb", "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-k {data} -c listen_addresses='' -c fsync=off"

        def control(action: str) -> None:
            own = (
                ("-w", "-o", options, "-l", f"{data}/log") if action == "start" else ("-m", "fast")
            )
            run("pg_ctl", *own, action)

        control("start")
        try:
            yield f"postgresql+psycopg://tester@/postgres?host={data}", control
        finally:
            run("pg_ctl", "-m", "immediate", "stop")


_NUMBERS: Final = itertools.count(1)


@contextlib.contextmanager
def database(server: str, template: str = "template1") -> Iterator[str]:
    """The URL of a new database of a PostgreSQL server."""
    name = f"catalogue_{next(_NUMBERS)}"
    # A connection for each: the server may be started again in between.
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield server.replace("/postgres?", f"/{name}?")
    finally:
        with engine.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[tuple[SqlStore, Catalogue]]:
    """A catalogue in `directory`, to write and to read."""
    store, catalogue = SqlStore(url_of(directory)), Catalogue(url_of(directory))
    store.open()
    yield store, catalogue
    catalogue.close()
    store.close()


def write(store: SqlStore, *puts: Put) -> None:
    """Submit and wait for the receipt."""
    store.submit(puts).result(30)


def eventually(condition: Callable[[], T | None], seconds: float = 60.0) -> T:
    """Wait until `condition()` is true, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
    return found


def stage_row(rank: Any, step: int, **columns: object) -> Put:
    """A stage as a rank's begin event makes it."""
    row = {
        "incarnation": f"incarnation-{rank}",
        "work_key": f"{step}||actor_update|0.0.0.0",
        "revision": 0,
        "attempt_id": 1,
        "role": "actor",
        "rank": rank,
        "step": step,
        "stage": "actor_update",
        "begin_seq": step,
        "begin_wall": 1000.0 + step,
        "begin_mono": float(step),
    }
    columns.setdefault("begun_wall", columns.get("begin_wall", row["begin_wall"]))
    return Put("stages", {**row, **columns})


def training(attempt_id: int = 1, run: str = "r", number: int = 1) -> list[Put]:
    """A run with one attempt and one process."""
    return [
        Put("runs", {"run": run, "created_wall": 1.0}),
        Put(
            "attempts",
            {
                "attempt_id": attempt_id,
                "run": run,
                "number": number,
                "key": f"key-{number}",
                "opened_wall": 10.0 * number,
                "unkeyed": False,
            },
        ),
        Put(
            "processes",
            {
                "incarnation": f"incarnation-{attempt_id}-0",
                "attempt_id": attempt_id,
                "role": "actor",
                "rank": 0,
                "tp_size": 2,
                "host": "a",
                "first_wall": 10.0 * number,
                "last_wall": 10.0 * number + 5,
            },
        ),
    ]


_WORK: Final = {
    "policy_version": None,
    "occurrence": 0,
    "epoch": 0,
    "minibatch": 0,
    "microbatch": 0,
}


def rows_of_step(attempt_id: int, step: int, ranks: int = 3) -> list[Put]:
    """A closed step of some ranks, with a row of each kind that grows."""
    rows = [
        Put("steps", {"attempt_id": attempt_id, "step": step, "closed_wall": 1.0 + step,
                      "completeness": "complete", "step_summary": b"w", "parts_mark": 2,
                      "summary_mark": 1})
    ]  # fmt: skip
    for rank in range(ranks):
        incarnation = f"{attempt_id}-{rank}"
        place = {"attempt_id": attempt_id, "role": "actor", "rank": rank, "step": step, **_WORK}
        place |= {"incarnation": incarnation, "stage": "actor_update"}
        work = {**place, "work_key": f"{step}||actor_update|0.0.0.0"}
        file = {**place, "artifact_id": f"ring/{incarnation}/{step}", "seq": step, "kind": "ring"}
        rows += [
            Put("stages", {**work, "revision": step, "begin_wall": 1.0, "end_wall": 2.0}),
            Put("scalars", {**work, "name": "loss", "value": 1.0}),
            Put("payloads", {**work, "seq": step, "state": "ingested", "tensors": {"a": [1]}}),
            Put("summaries", {**place, "seq": step, "pair": "old/rollout", "summary": b"s"}),
            Put("artifacts", {**file, "deleted_wall": 3.0 if rank else None}),
            Put("samples", {"attempt_id": attempt_id, "clock": f"s{step}", "step": step,
                            "sample_uid": f"{rank}"}),
        ]  # fmt: skip
    rows.append(
        Put("findings", {"finding_id": f"{attempt_id}/{step}", "run": "r",
                         "attempt_id": attempt_id, "step": step, "kind": "k"})
    )  # fmt: skip
    return rows


def rows_of(store: SqlStore, table: str) -> list[dict[str, Any]]:
    """All rows of a table, read on the store's own reader."""
    assert store._reader is not None
    with store._reader.begin() as connection:
        return rows(dict, connection, TABLES[table].select())


def keyed(rows: Iterable[dict[str, Any]], *key: str) -> dict[object, dict[str, object]]:
    """Rows by their key."""
    return {tuple(row[name] for name in key): row for row in rows}


def fill(ballast: Path) -> None:
    """Write `ballast` until its disk is full."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(ballast.parent).free == 0


def evidence_of(finding: FindingRow) -> dict[str, Any]:
    """Return the evidence of a finding that has some."""
    assert finding["evidence"] is not None
    return finding["evidence"]
