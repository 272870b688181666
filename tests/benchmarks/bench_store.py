"""What a durable row costs: group commits beside SQLite's own speed, on the same disk.

Run with `python -m tests.benchmarks.bench_store [DIRECTORY]`. Only the ratios of one run mean
anything: a disk's flush takes between 0.05 and 20 ms.
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stagescope_service.store.connect import catalogue_url
from stagescope_service.store.contract import Put
from stagescope_service.store.sql import SqlStore

ROWS = 40_000
ONE_BY_ONE = 200


def stage_rows(count: int) -> list[Put]:
    """Begin events of 64 ranks, two a step and rank."""
    return [
        Put(
            "stages",
            {
                "incarnation": f"{number % 64:032x}",
                "work_key": f"{number // 128}||actor_update|0.0.0.{number // 64 % 2}",
                "revision": 0,
                "attempt_id": 1,
                "role": "actor",
                "rank": number % 64,
                "step": number // 128,
                "policy_version": None,
                "stage": "actor_update",
                "occurrence": 0,
                "epoch": 0,
                "minibatch": 0,
                "microbatch": number // 64 % 2,
                "begin_seq": number,
                "begin_wall": 1e9 + number,
                "begin_mono": float(number),
            },
        )
        for number in range(count)
    ]


def opened(directory: Path, name: str) -> SqlStore:
    """A new catalogue."""
    store = SqlStore(catalogue_url(directory / name))
    store.open()
    return store


def plain_executemany(directory: Path, puts: list[Put], *, upsert: bool) -> float:
    """The same rows into the table that holds them by sqlite3 alone, in one transaction."""
    store = opened(directory, f"plain-{upsert}")
    store.close()
    connection = sqlite3.connect(directory / f"plain-{upsert}" / "catalogue.db")
    connection.execute("PRAGMA synchronous=FULL")
    key = ("work_id", "sender_id", "revision")
    columns = (*key, "begin_after", "begin_wall", "begin_mono", "reserved")
    sets = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    conflict = f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {sets}" if upsert else ""
    marks = ", ".join("?" * len(columns))
    statement = f"INSERT INTO stage_rows ({', '.join(columns)}) VALUES ({marks}){conflict}"
    rows = [put.row for put in puts]
    values = [
        (
            2 * row["step"] + row["microbatch"], row["rank"], row["revision"], row["begin_seq"],
            row["begin_wall"], row["begin_mono"], bytes(20),
        )
        for row in rows
    ]  # fmt: skip
    began = time.perf_counter()
    with connection:
        connection.executemany(statement, values)
    seconds = time.perf_counter() - began
    connection.close()
    return len(puts) / seconds


def grouped(directory: Path, puts: list[Put], *, batch: int, threads: int) -> float:
    """Submissions of `batch` rows from several threads, until the last receipt."""
    store = opened(directory, f"grouped-{batch}-{threads}")
    batches = [puts[start : start + batch] for start in range(0, len(puts), batch)]

    def send(own: list[list[Put]]) -> None:
        for future in [store.submit(one) for one in own]:
            future.result(120)

    workers = [
        threading.Thread(target=send, args=(batches[number::threads],)) for number in range(threads)
    ]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    store.close()
    return len(puts) / seconds


def one_commit_a_row(directory: Path, puts: list[Put]) -> float:
    """Each row waits for its own receipt before the next is submitted."""
    store = opened(directory, "one")
    began = time.perf_counter()
    for put in puts:
        store.submit([put]).result(120)
    seconds = time.perf_counter() - began
    store.close()
    return len(puts) / seconds


def main(directory: Path) -> dict[str, float]:
    """Measure and print; returns rows per second by name."""
    puts = stage_rows(ROWS)
    cases: dict[str, Callable[[], float]] = {
        "plain INSERT, one executemany": lambda: plain_executemany(directory, puts, upsert=False),
        "plain upsert, one executemany": lambda: plain_executemany(directory, puts, upsert=True),
        "store, submissions of 256 rows": lambda: grouped(directory, puts, batch=256, threads=2),
        "store, submissions of 16 rows": lambda: grouped(directory, puts, batch=16, threads=2),
        "store, submissions of 1 row": lambda: grouped(directory, puts, batch=1, threads=2),
        "store, one commit a row": lambda: one_commit_a_row(directory, puts[:ONE_BY_ONE]),
    }
    found = {name: case() for name, case in cases.items()}
    base = found["plain upsert, one executemany"]
    for name, rate in found.items():
        print(f"{name:35} {rate:12,.0f} rows/s {rate / base:8.3f} of plain upsert")  # noqa: T201
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as place:
        main(Path(place))
