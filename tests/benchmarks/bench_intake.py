"""What an event costs the coordinator, against a bare Ray actor with the same group commit.

    python -m tests.benchmarks.bench_intake [EVENTS A ROUND]

Both actors run on one cluster and get the same batches from the same number of senders, first 256
events a call, then 2. The bare actor writes one row an event: what a durable acknowledgement costs
without any meaning. It prints the CPU time of each actor's process, its writer's thread and Ray's
calls included, and the ratio, which is what counts. Each is measured several times, in turns: the
times vary by a third on a busy machine, and the ratio is that of the medians.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import ray
from tests.support.cluster import Service, ray_cluster

from stagescope_wire.schema import BEGIN, END, HELLO, SCHEMA, Sender

SENDERS = 32
ROUNDS = 3
WANTED = {256: 3.0, 2: 1.1}
"""Events a call -> the most that the coordinator may cost, in the bare actor's CPU time."""
Wire = tuple[Any, ...]


class Bare:
    """Writes each event as a row of text, in groups, and answers after the commit."""

    def __init__(self, path: str) -> None:
        self._queue: deque[tuple[list[Any], Future[None]]] = deque()
        self._changed = threading.Condition()
        self._path = path
        threading.Thread(target=self._run, daemon=True).start()

    async def pid(self) -> int:
        return os.getpid()

    async def record_events(self, *, sender: Wire, events: list[Wire]) -> dict[str, object]:
        rows = [(sender[0], event[2], event[1], repr(event[5])) for event in events]
        future: Future[None] = Future()
        with self._changed:
            self._queue.append((rows, future))
            self._changed.notify()
        await asyncio.wrap_future(future)
        return {"received": len(events)}

    def _run(self) -> None:
        connection = sqlite3.connect(self._path, isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE events (sender TEXT, seq INT, kind TEXT, fields TEXT)")
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                group = [*self._queue]
                self._queue.clear()
            connection.execute("BEGIN")
            for rows, _ in group:
                connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", rows)
            connection.execute("COMMIT")
            for _, future in group:
                future.set_result(None)


def batches(run: str, rank: int, size: int, count: int) -> tuple[Wire, list[list[Wire]]]:
    """Make a rank's batches: its stages begin and end, one microbatch after the other."""
    name = f"{run}-{rank:030d}"
    sender = Sender(
        name, run, "key", "actor", rank, clock_offset=0.0, clock_error=0.0, started=time.time()
    ).wire()
    seq, wall, mono = 1, time.time(), time.monotonic()
    events: list[Wire] = []
    for number in range(size * count // 2):
        step, microbatch = divmod(number, 128)
        fields = {"step": step + 1, "stage": "actor_update", "microbatch": microbatch}
        seq += 2
        events.append((SCHEMA, BEGIN, seq - 1, wall, mono, fields))
        ended = {**fields, "begin_seq": seq - 1, "status": "ok", "scalars": {"loss": 1.0}}
        events.append((SCHEMA, END, seq, wall, mono, ended))
    return sender, [events[at : at + size] for at in range(0, len(events), size)]


async def send(actor: Any, sender: Wire, sent: list[list[Wire]]) -> None:
    """Send a rank's batches, one on the way at a time."""
    for batch in sent:
        answer = await actor.record_events.remote(sender=sender, events=batch)
        assert answer["received"] == len(batch), answer


async def measure(actor: object, pid: int, run: str, size: int, events: int) -> float:
    """Return the microseconds of CPU that an event takes of the actor's process."""
    process = psutil.Process(pid)
    count = max(1, events // (size * SENDERS))
    every = [batches(run, rank, size, count) for rank in range(SENDERS)]
    hello = {"world_size": SENDERS}
    for sender, _ in every:
        await send(actor, sender, [[(SCHEMA, HELLO, 1, time.time(), time.monotonic(), hello)]])
    before = sum(process.cpu_times()[:2])
    await asyncio.gather(*(send(actor, sender, sent) for sender, sent in every))
    used = sum(process.cpu_times()[:2]) - before
    return used / (size * count * SENDERS) * 1e6


def main() -> None:
    """Print the table."""
    events = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as home, ray_cluster() as address:
        service = Service.start(Path(home), address, lease_seconds=600.0)
        try:
            bare_actor: Any = ray.remote(Bare)
            options = {"num_cpus": 0, "max_concurrency": 1000}
            bare = bare_actor.options(**options).remote(f"{home}/bare.db")
            pids = {"bare": ray.get(bare.pid.remote()), "coordinator": service.pid("coordinator")}
            actors = {"bare": bare, "coordinator": service.coordinator}
            for size, wanted in WANTED.items():
                total = events if size > 16 else events // 10
                rounds: dict[str, list[float]] = {name: [] for name in actors}
                for number in range(ROUNDS):
                    for name, actor in actors.items():
                        run = f"run-{size}-{number}"
                        took = asyncio.run(measure(actor, pids[name], run, size, total))
                        rounds[name].append(took)
                found = {name: statistics.median(each) for name, each in rounds.items()}
                print(  # noqa: T201
                    f"{size:4d} events a call: bare {found['bare']:7.1f} us, coordinator "
                    f"{found['coordinator']:7.1f} us of CPU an event, "
                    f"{found['coordinator'] / found['bare']:5.2f} x (wanted: <= {wanted:g} x)",
                    flush=True,
                )
        finally:
            service.stop()


if __name__ == "__main__":
    main()
