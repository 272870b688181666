"""The store against what happens to disks, files and processes."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from tests.support.stores import (
    ON_SQLITE,
    database,
    eventually,
    fill,
    postgresql_server,
    rows_of,
    stage_row,
    url_of,
    write,
)

from stagescope_service.store import connect
from stagescope_service.store.contract import Put
from stagescope_service.store.sql import SqlStore
from stagescope_wire.errors import CatalogueUnavailable

_WRITER = """
import sys, threading
from stagescope_service.store.contract import Put
from stagescope_service.store.sql import SqlStore

store = SqlStore(sys.argv[1])
store.open()
lock = threading.Lock()

def receipt(number, future):
    future.result()
    with lock:
        print(number, flush=True)

number = int(sys.argv[2])
while True:
    batch = [store.submit([
        Put("runs", {"run": f"{n}-a"}), Put("meta", {"key": f"{n}-b", "value": n})
    ]) for n in range(number, number + 50)]
    for n, future in enumerate(batch, number):
        receipt(n, future)
    number += 50
"""


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    acknowledged: list[int] = []
    for lines in (1, 130, 333):  # the next one starts on what the killed one left
        start = max(acknowledged, default=-1) + 1
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, url, str(start)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert process.stdout is not None
        acknowledged += [int(process.stdout.readline()) for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in process.stdout if line.endswith("\n")]
        process.stdout.close()
        process.wait()
    store = SqlStore(url)
    store.open()
    runs = {row["run"] for row in rows_of(store, "runs")}
    metas = {row["key"] for row in rows_of(store, "meta")}
    store.close()
    assert len(acknowledged) >= 464
    assert {f"{number}-a" for number in acknowledged} <= runs
    assert {f"{number}-b" for number in acknowledged} <= metas
    # What was not acknowledged is there as a whole or not at all.
    assert {name[:-2] for name in runs} == {name[:-2] for name in metas}


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
def test_a_server_that_ends_its_connections_gets_every_row(store: SqlStore) -> None:
    """As where PostgreSQL is restarted or fails over while the service writes."""
    others = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    submitted = []
    engine = sa.create_engine(store.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for number in range(2000):
            row = Put("meta", {"key": f"{number}", "value": number})
            submitted.append(store.submit([row]))
            if number % 400 == 399:
                submitted[number // 2].result(60)
                connection.exec_driver_sql(others)
        for each in submitted:
            each.result(60)
        written = connection.exec_driver_sql("SELECT count(*) FROM meta WHERE key ~ '^[0-9]+$'")
        assert written.scalar() == 2000
    engine.dispose()


def test_a_server_that_is_stopped_and_started_under_load_gets_every_row() -> None:
    with postgresql_server() as (server, control), database(server) as url:
        store = SqlStore(url)
        store.open()
        submitted = []
        for outage in range(3):
            for number in range(300):
                row = Put("meta", {"key": f"{outage}-{number}", "value": number})
                submitted.append(store.submit([row]))
                if number == 150:
                    control("stop")
            eventually(lambda: not store.health().healthy)
            with pytest.raises(CatalogueUnavailable):
                store.snapshot()
            control("start")
            for each in submitted:
                each.result(60)
        keys = {row["key"] for row in rows_of(store, "meta")}
        assert keys >= {f"{outage}-{number}" for outage in range(3) for number in range(300)}
        assert store.health().healthy
        store.close()


def test_a_full_disk_holds_writes_back_until_there_is_space(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqlStore(url_of(small_disk))
    store.open()
    write(store, Put("runs", {"run": "before"}))
    ballast = small_disk / "ballast"
    fill(ballast)
    blob = os.urandom(200_000)
    held = [
        store.submit([Put("steps", {"attempt_id": 1, "step": step, "step_summary": blob})])
        for step in range(3)
    ]
    eventually(lambda: not store.health().healthy)
    assert "free space" in store.health().reason
    later = store.submit([Put("meta", {"key": "order", "value": "later"})])
    assert not any(future.done() for future in [*held, later])
    ballast.unlink()
    for future in [*held, later]:
        future.result(30)
    assert store.health() == (True, "")
    assert len(rows_of(store, "steps")) == 3
    store.close()
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]


def test_a_disk_that_stays_full_fails_close_and_acknowledges_nothing(small_disk: Path) -> None:
    store = SqlStore(url_of(small_disk))
    store.open()
    write(store, Put("runs", {"run": "before"}))
    held = [
        store.submit(
            [Put("steps", {"attempt_id": 1, "step": step, "step_summary": bytes(6_000_000)})]
        )
        for step in range(2)
    ]
    eventually(lambda: not store.health().healthy)
    store.close(timeout=0.2)
    assert all(isinstance(future.exception(0), CatalogueUnavailable) for future in held)
    store.open()
    assert rows_of(store, "steps") == []
    assert len(rows_of(store, "runs")) == 1
    store.close()


def test_a_catalogue_cannot_be_made_on_a_full_disk_but_later(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    fill(ballast)
    store = SqlStore(url_of(small_disk))
    with pytest.raises(CatalogueUnavailable):
        store.open()
    ballast.unlink()
    store.open()
    write(store, Put("runs", {"run": "a"}))
    store.close()


def test_a_lock_of_another_process_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "BUSY_SECONDS", 0.05)
    store = SqlStore(url_of(tmp_path))
    store.open()
    other = sqlite3.connect(tmp_path / "catalogue.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    held = [store.submit([stage_row(0, step)]) for step in range(3)]
    eventually(lambda: "locked" in store.health().reason)
    assert not any(future.done() for future in held)
    other.execute("COMMIT")
    other.close()
    for future in held:
        future.result(30)
    assert store.health().healthy
    store.close()


def test_a_path_that_cannot_be_used_is_told_and_later_works(tmp_path: Path) -> None:
    (tmp_path / "place").write_text("a file where a directory is needed")
    store = SqlStore(url_of(tmp_path / "place"))
    waiting = store.submit([Put("runs", {"run": "early"})])
    for _ in range(2):
        with pytest.raises(CatalogueUnavailable):
            store.open()
    (tmp_path / "place").unlink()
    store.open()
    waiting.result(30)
    store.close()


def test_a_file_that_is_no_catalogue_is_not_touched(tmp_path: Path) -> None:
    text = b"dear diary, " * 1000
    (tmp_path / "catalogue.db").write_bytes(text)
    with pytest.raises(CatalogueUnavailable, match="move it away"):
        SqlStore(url_of(tmp_path)).open()
    assert (tmp_path / "catalogue.db").read_bytes() == text


@ON_SQLITE
def test_nothing_is_acknowledged_into_a_file_that_was_deleted(
    store: SqlStore, tmp_path: Path
) -> None:
    write(store, Put("runs", {"run": "before"}))
    (tmp_path / "away").mkdir()
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    for path in files:
        path.rename(tmp_path / "away" / path.name)
    held = store.submit([Put("runs", {"run": "held"})])
    eventually(lambda: "removed" in store.health().reason)
    assert not held.done()
    for path in files:
        (tmp_path / "away" / path.name).rename(path)
    held.result(30)
    assert len(rows_of(store, "runs")) == 2


@ON_SQLITE
def test_a_catalogue_put_back_from_a_backup_is_written_on(store: SqlStore, tmp_path: Path) -> None:
    write(store, Put("runs", {"run": "kept"}))
    with sqlite3.connect(tmp_path / "catalogue.db") as source:
        copy = sqlite3.connect(tmp_path / "backup.db")
        source.backup(copy)
        copy.close()
    source.close()
    write(store, Put("runs", {"run": "after the backup"}))
    (tmp_path / "catalogue.db-wal").unlink()
    (tmp_path / "catalogue.db-shm").unlink()
    os.replace(tmp_path / "backup.db", tmp_path / "catalogue.db")
    write(store, Put("runs", {"run": "new"}))
    assert {row["run"] for row in rows_of(store, "runs")} == {"kept", "new"}


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("nfs", True), ("nfs4", True), ("lustre", True), ("gpfs", True), ("cifs", True),
        ("fuse.sshfs", True), ("beegfs", True), ("ext4", False), ("xfs", False),
        ("tmpfs", False), ("overlay", False), ("fuse.fuse-overlayfs", False),
    ],
)  # fmt: skip
def test_shared_filesystems_are_refused(kind: str, refused: bool) -> None:
    mountinfo = (
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"36 22 0:31 / /mnt/my\\040share rw,noatime shared:1 - {kind} server:/x rw\n"
        "37 22 0:32 / /mnt/my rw - nfs4 other rw\n"
    )
    path = Path("/mnt/my share/run/catalogue.db")
    if refused:
        with pytest.raises(CatalogueUnavailable, match=r"local disk, or use PostgreSQL"):
            connect.check_local(path, mountinfo)
    else:
        connect.check_local(path, mountinfo)
    connect.check_local(Path("/home/catalogue.db"), mountinfo)


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "catalogue.db", "", "postgresql+nodriver://h/d"]
)
def test_urls_that_name_no_usable_database(url: str) -> None:
    with pytest.raises(CatalogueUnavailable):
        SqlStore(url).open()
