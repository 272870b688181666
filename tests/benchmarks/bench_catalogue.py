"""What a rank-step costs in the catalogue: bytes by table and index, writing and reading.

    python -m tests.benchmarks.bench_catalogue [ranks] [steps]

A simulated job speaks to the real state machine, and its rows go to a real SQLite catalogue: four
stages a rank and step, of which two hand over a payload of eight samples and three log eight
scalars, a clock offset that changes every second step, a ring of the last steps' files, and part
summaries that are deleted as those of old steps are. The bytes are the growth between two steps.
Times are the best of some runs; "x" is against plain SQL over as many rows in the same run.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from tests.support.batches import batch_of, random_streams

from stagescope_service.core.arrival import Arrival
from stagescope_service.core.instructions import Delete, Ingest, Put
from stagescope_service.core.state import State
from stagescope_service.ingest.kept_files import artifact_row
from stagescope_service.ingest.reader import summary_rows
from stagescope_service.statistics import summarise
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.connect import catalogue_url
from stagescope_service.store.sql import SqlStore
from stagescope_wire.schema import BEGIN, END, HELLO, Event, Sender

STAGES: Final = (
    "rollout_generate",
    "actor_compute_log_prob",
    "ref_compute_log_prob",
    "actor_update",
)
HANDING: Final = STAGES[:2]
SCALARS: Final = {
    "actor_compute_log_prob": ("entropy",),
    "ref_compute_log_prob": ("kl",),
    "actor_update": ("loss", "grad_norm", "clip_fraction", "approximate_kl", "kl_loss", "lr"),
}
TENSORS: Final = {
    name: ["float32", [8, 512], None]
    for name in ("old_log_probs", "rollout_log_probs", "response_mask", "responses")
}
BEGAN: Final = 1.8e9
KEPT: Final = 8
"""Newest steps with part summaries and files in the ring; both have limits in a service, too."""
GROUP: Final = 2000
Write = Put | Delete


class Job:
    """The ranks of a training, and the rows that follow of their events."""

    def __init__(self, ranks: int) -> None:
        self.state = State()
        self.ranks = ranks
        self._seq = 0
        rng = np.random.default_rng(1)
        self._rng = rng
        self._summary = summarise(batch_of(*random_streams(rng, 8, 512)))
        self._rings: list[list[Put]] = []
        self._senders = [
            Sender(rng.bytes(16).hex(), "qwen3-8b-countdown", "key", "actor", rank, "n" * 56,
                   clock_offset=1e-3, clock_error=1e-4, started=BEGAN)
            for rank in range(ranks)
        ]  # fmt: skip

    def hello(self) -> Iterator[Write]:
        """Every rank's hello."""
        self._seq += 1
        for rank, sender in enumerate(self._senders):
            layout = {"dp_rank": rank, "dp_size": self.ranks, "host": f"host-{rank // 8}"}
            fields = {"world_size": self.ranks, "layout": layout}
            yield from self._say(sender, Event(HELLO, self._seq, BEGAN, 1.0, fields))

    def step(self, step: int) -> Iterator[Write]:
        """One step of every rank."""
        files: list[Put] = []
        if step % 2:
            self._senders = [
                dataclasses.replace(sender, clock_offset=offset, clock_error=offset / 10)
                for sender, offset in zip(
                    self._senders, self._rng.uniform(0, 1e-2, self.ranks).tolist(), strict=True
                )
            ]
        for number, stage in enumerate(STAGES):
            self._seq += 2
            work = {"step": step, "stage": stage, "policy_version": step - 1}
            for sender in self._senders:
                begin, end = self._rng.uniform(0, 9, 2).cumsum() + (BEGAN + 40 * step + 10 * number)
                event = Event(BEGIN, self._seq - 1, float(begin), float(begin) - 1.7e9, work)
                yield from self._say(sender, event)
                said: dict[str, object] = {**work, "begin_seq": self._seq - 1, "status": "ok"}
                values = {name: float(self._rng.normal()) for name in SCALARS.get(stage, ())}
                said |= {"scalars": values} if values else {}
                if stage in HANDING:
                    meta = {"policy_version": step - 1, "temperature": 1.0}
                    said["payload"] = {"tensors": TENSORS, "bytes": 65536, "meta": meta}
                yield from self._say(
                    sender, Event(END, self._seq, float(end), float(end) - 1.7e9, said), files
                )
        self._rings.append(files)
        if len(self._rings) > KEPT:
            for put in self._rings.pop(0):
                name = put.row["artifact_id"]
                yield Put("artifacts", {"artifact_id": name, "deleted_wall": BEGAN + 40.0 * step})
            yield Delete("summaries", {"attempt_id": 1, "step": step - KEPT})

    def _say(self, sender: Sender, event: Event, files: list[Put] | None = None) -> Iterator[Write]:
        has_payload = "payload" in event.fields
        for each in self.state.handle(sender, event, event.wall, Arrival(has_payload)):
            if isinstance(each, Put | Delete):
                yield each
            elif isinstance(each, Ingest) and files is not None:
                key, job = each.key, each.job
                yield from summary_rows(key, job, self._summary)
                name = f"1~{job['step']}~{key.seq}~{key.incarnation}.safetensors"
                path = Path("/data/stagescope/ring") / name
                files.append(artifact_row(key, job, "ring", "n" * 56, path, 65536))
                yield files[-1]
                columns = {"digest": self._rng.bytes(16).hex(), "bytes": 65536, "node_id": "n" * 56}
                settled = self.state.settle(key, "ingested", None, event.wall + 0.1, **columns)
                yield from (put for put in settled if isinstance(put, Put | Delete))


def write(store: SqlStore, writes: list[Write]) -> float:
    """Write in groups; return the seconds of CPU that it takes, of this process."""
    before = time.process_time()
    for at in range(0, len(writes), GROUP):
        store.submit(writes[at : at + GROUP]).result(60)
    return time.process_time() - before


def sizes(path: Path) -> dict[str, int]:
    """Return the bytes of each table and index, as its filled pages; `file` is the file's."""
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        (free,) = connection.execute("PRAGMA freelist_count").fetchone()
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        found = {"file": (pages - free) * page}
        try:
            each = "SELECT name, sum(pgsize) FROM dbstat GROUP BY name"
            found |= dict(connection.execute(each).fetchall())
        except sqlite3.OperationalError:
            print("this SQLite has no dbstat: only the file is measured")  # noqa: T201
    connection.close()
    return found


def best(call: Callable[[], object], runs: int = 7) -> float:
    """Return the fewest milliseconds of some runs."""
    took = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return min(took) * 1e3


def reference(path: Path, rows: int) -> Callable[[], object]:
    """Return a query of as many rows of twenty columns by an index, without the store."""
    connection = sqlite3.connect(path)
    columns = ", ".join(f"c{number}" for number in range(20))
    connection.execute(f"CREATE TABLE plain (step, {columns})")
    values = [(number % 50, "text" * 5, *[number] * 19) for number in range(rows * 50)]
    connection.executemany(f"INSERT INTO plain VALUES ({','.join('?' * 21)})", values)
    connection.execute("CREATE INDEX by_step ON plain (step)")
    names = ("step", *columns.split(", "))

    def query() -> list[dict[str, object]]:
        found = connection.execute("SELECT * FROM plain WHERE step = 25 ORDER BY c5")
        return [dict(zip(names, row, strict=True)) for row in found]

    return query


def questions(catalogue: Catalogue, step: int) -> dict[str, Callable[[], object]]:
    """Return the usual queries."""
    return {
        "stages of a step": lambda: catalogue.stages(1, step),
        "timings of 20 steps": lambda: catalogue.timings(1, range(step - 20, step)),
        "payloads of a step": lambda: catalogue.payloads(1, step),
        "payload states of 20 steps": lambda: catalogue.payload_states([1], range(step - 20, step)),
        "summaries of a step": lambda: catalogue.summaries(1, step),
        "scalars of a step": lambda: catalogue.scalars(1, step),
        "scalar over steps": lambda: list(catalogue.scalar_values([1], "loss", by_rank=False)),
        "scalar by rank": lambda: list(catalogue.scalar_values([1], "loss", by_rank=True)),
        "scalar names": lambda: catalogue.scalar_names([1]),
        "steps": lambda: catalogue.steps(1, limit=100),
        "step metrics": lambda: list(catalogue.step_metrics([1], version=1)),
        "processes": lambda: catalogue.processes(1),
        "runs": lambda: catalogue.runs(),
        "open stages": lambda: catalogue.open_stages(1),
        "training attempt": lambda: catalogue.training_attempt(),
        "counts": lambda: catalogue.counts(),
    }


def main() -> dict[str, object]:
    """Print and return the figures."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    with tempfile.TemporaryDirectory() as place:
        path, job = Path(place) / "catalogue.db", Job(ranks)
        store, first = SqlStore(catalogue_url(place)), 2 * KEPT
        store.open()
        write(store, [*job.hello(), *(row for step in range(1, first) for row in job.step(step))])
        before, rows, cpu = sizes(path), Counter[str](), 0.0
        for step in range(first, first + steps):
            made = list(job.step(step))
            rows.update(each.table for each in made)
            cpu += write(store, made)
        after = sizes(path)
        grown = {name: (after[name] - before.get(name, 0)) / (ranks * steps) for name in after}
        print(f"{ranks} ranks, {steps} steps: bytes a rank-step")  # noqa: T201
        for name, size in sorted(grown.items(), key=lambda item: -item[1]):
            if size > 0.5:
                print(f"{size:10.1f}  {name}")  # noqa: T201
        rate = sum(rows.values()) / cpu
        counts = {name: round(count / ranks / steps, 2) for name, count in rows.items()}
        print(f"{rate:10.0f}  rows a CPU second; rows a rank-step: {json.dumps(counts)}")  # noqa: T201
        catalogue = Catalogue(store.url)
        base = best(reference(Path(place) / "plain.db", 4 * ranks))
        times = {}
        for name, question in questions(catalogue, first + steps - 3).items():
            times[name] = best(question)
            print(f"{times[name]:10.2f} ms {times[name] / base:7.2f} x  {name}")  # noqa: T201
        catalogue.close()
        store.close()
    return {"bytes": grown, "rate": rate, "milliseconds": times}


if __name__ == "__main__":
    main()
