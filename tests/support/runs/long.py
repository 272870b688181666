"""A run of many steps in a real catalogue, in the time that writing its rows takes.

Two steps are trained through the real coordinator, ingestor and aggregation. What these wrote of
the second is written of each later step, as they would have: with its own numbers of steps and
events, its own times, keys and identities. What retention removes of old steps is left out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.support.api import Rank, Report, Service, service
from tests.support.measure import payload
from tests.support.runs.shown import keep_tensors, loss
from tests.support.stores import rows_of

from stagescope_service.store.contract import Put, Store, Submitted
from stagescope_service.store.sql import SqlStore
from stagescope_service.store.tables import TABLES
from stagescope_wire.schema import BEGIN

RUN: Final = "r"
LOG_PROB: Final = "actor_compute_log_prob"
UPDATE: Final = "actor_update"
SCALARS: Final[Mapping[str, tuple[str, ...]]] = {
    "rollout_generate": (),
    LOG_PROB: ("entropy",),
    "ref_compute_log_prob": ("kl",),
    UPDATE: ("loss", "grad_norm", "clip_fraction", "approximate_kl", "kl_loss", "lr"),
}
"""Stage -> the scalars that are logged in it."""
SAMPLES: Final = 8
"""Of a rank and step."""
TOKENS: Final = 512
IN_RING: Final = 100
"""Newest steps whose payloads are still in a ring."""
_SEQS: Final = frozenset({"seq", "begin_seq", "end_seq", "revision"})
_STEPS: Final = frozenset({"step", "policy_version", "consumed_step"})
_GROUP: Final = 20_000
"""Rows of a transaction, at least."""


@dataclasses.dataclass(frozen=True)
class LongRun:
    """The run: how it goes on from step to step."""

    ranks: int
    seqs: int
    """Events of a rank and step."""
    seconds: float
    """Of a step."""
    rows: tuple[Put, ...]
    """Of step 2."""
    started: float
    """Unix seconds of the first event."""

    def rank(self, live: Service | None, rank: int, step: int) -> Rank:
        """Return a rank before its first event of `step`."""
        begun = self.started + (step - 1) * self.seconds
        found = Rank(live, run=RUN, rank=rank, world_size=self.ranks, start=begun, greets=False)
        found.seq = 1 + (step - 1) * self.seqs
        return found

    def train(self, live: Service, step: int, *, with_loss: bool = False) -> None:
        """Train the step after the newest one through the real coordinator, until it is closed.

        Its tensors are kept if the service keeps some: see `keep_tensors`. With `with_loss`, the
        update records what the loss did.
        """
        actors = [self.rank(live, rank, step) for rank in range(self.ranks)]
        _train(live, actors, step, with_loss)
        live.engine.take_together([_begun(actor, step + 1) for actor in actors])

    def of_step(self, step: int) -> Iterator[Put]:
        """Yield the rows of a later step than the second."""
        ahead = step - 2
        for put in self.rows:
            yield Put(put.table, _moved(put.table, put.row, ahead, self.seqs, self.seconds))

    def extend(self, store: Store, steps: Sequence[int], *, keep: int) -> None:
        """Write steps; of all but the newest `keep` without the statistics of their parts."""
        newest = steps[-1]
        waiting: list[Submitted] = []
        puts: list[Put] = []
        for step in steps:
            gone = {"summaries"} if step <= newest - keep else set[str]()
            in_ring = step > newest - IN_RING
            puts += [
                put if in_ring or put.table != "artifacts" else _deleted(put)
                for put in self.of_step(step)
                if put.table not in gone
            ]
            if len(puts) >= _GROUP or step == newest:
                waiting.append(store.submit(puts))
                puts = []
            if len(waiting) > 2:
                waiting.pop(0).result(600)
        for each in waiting:
            each.result(600)
        wall = self.started + newest * self.seconds
        process = {"max_step": newest, "last_wall": wall}
        ends = [Put("attempts", {"attempt_id": 1, "last_closed_step": newest})]
        ends += [
            Put("processes", {"incarnation": f"{RUN}-a1-actor-{rank}", **process})
            for rank in range(self.ranks)
        ]
        store.submit(ends).result(600)


def train_long(home: Path, steps: int, *, ranks: int = 64, keep: int = 2000) -> LongRun:
    """Make a catalogue in `home` with so many closed steps of one attempt, all ranks alive.

    Args:
        home: of the service.
        steps: their number, 3 at least.
        ranks: of the actor.
        keep: newest steps with the statistics of their parts.
    """
    with service(home, recorded=False) as live:
        keep_tensors(live)
        started = time.time() - steps * len(SCALARS) * 2.0
        actors = [
            Rank(live, run=RUN, rank=rank, world_size=ranks, start=started, greets=False)
            for rank in range(ranks)
        ]
        live.engine.take_together([actor.hello for actor in actors])
        before = actors[0].seq, actors[0].clock
        for step in (1, 2):
            before = actors[0].seq, actors[0].clock
            _train(live, actors, step)
        seqs, seconds = actors[0].seq - before[0], actors[0].clock - before[1]
        live.engine.take_together([_begun(actor, 3) for actor in actors])
        rows = tuple(_rows_of_step(live.store, 2))
    run = LongRun(ranks, seqs, seconds, rows, started)
    store = SqlStore(live.settings.catalogue_url)
    store.open()
    run.extend(store, range(3, steps + 1), keep=keep)
    store.close()
    return run


def _train(live: Service, actors: list[Rank], step: int, with_loss: bool = False) -> None:
    for stage, names in SCALARS.items():
        reports = []
        for rank, actor in enumerate(actors):
            handed = None
            if stage == LOG_PROB or (with_loss and stage == UPDATE):
                handed = payload(SAMPLES, TOKENS, seed=rank, first_sample=SAMPLES * rank)
            if handed is not None and stage == UPDATE:
                handed = loss(handed, step, rank)
            values = dict.fromkeys(names, 0.5 + rank / 1000)
            fields: dict[str, Any] = {"scalars": values} if values else {}
            fields["policy_version"] = step - 1
            reports.append(actor.draft_stage(stage, step, handed, **fields))
        live.engine.take_together(reports)


def _begun(actor: Rank, step: int) -> Report:
    stage = next(iter(SCALARS))
    return actor.draft(BEGIN, stage=stage, step=step, policy_version=step - 1)


def _rows_of_step(store: SqlStore, step: int) -> Iterator[Put]:
    for name, table in TABLES.items():
        if "step" in table.columns:
            for row in rows_of(store, name):
                if row["step"] == step:
                    yield Put(name, row)


def _moved(
    table: str, row: Mapping[str, Any], ahead: int, seqs: int, seconds: float
) -> dict[str, Any]:
    """Return a row as it is `ahead` steps later."""
    moved = dict(row)
    later_seqs, later = ahead * seqs, ahead * seconds
    for name, value in row.items():
        if value is None:
            continue
        if name in _STEPS:
            moved[name] = value + ahead
        elif name in _SEQS:
            moved[name] = value + later_seqs
        elif name.endswith(("_wall", "_mono")) or name == "wall":
            moved[name] = value + later
    if row.get("work_key") is not None:
        _, _, rest = row["work_key"].partition("|")
        moved["work_key"] = f"{moved['step']}|{rest}"
    if table == "artifacts":
        prefix, owner, number = row["artifact_id"].split("/")
        moved["artifact_id"] = f"{prefix}/{owner}/{int(number) + later_seqs}"
        moved["path"] = row["path"].replace(
            f"1~{row['step']}~{number}~", f"1~{moved['step']}~{int(number) + later_seqs}~"
        )
    elif table == "samples":
        moved["clock"] = row["clock"].replace(str(row["step"]), str(moved["step"]))
    elif table == "findings":
        moved["finding_id"] = f"{row['finding_id']}-{moved['step']}"
    return moved


def _deleted(put: Put) -> Put:
    return Put(put.table, {**put.row, "deleted_wall": put.row["wall"] + 600.0})
