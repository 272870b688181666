"""The memory of a coordinator over a long training: what it holds does not grow with the steps."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.stores import opened
from tests.support.triggering import rule, rules_of

from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.coordinator.rules import followed_run
from stagescope_service.coordinator.rules import watch as trigger_watch
from stagescope_service.core import entities, state
from stagescope_service.core.instructions import IngestJob, PayloadKey, Put
from stagescope_service.ingest.ingestors import IngestorClient
from stagescope_service.ingest.reader import Outcome
from stagescope_service.rules import watch
from stagescope_service.settings import Settings
from stagescope_service.store import ids
from stagescope_service.store.sql import SqlStore
from stagescope_wire import schema

STEPS: Final = 100
"""Of each half."""
AT_ONCE: Final = 10
"""Steps of a batch."""
_LEFT_OUT: Final = (types.ModuleType, type, types.FrameType, asyncio.AbstractEventLoop)


class NoTensors(IngestorClient):
    """An ingestor that finds a payload in order, and keeps a file of it."""

    home = "n"

    def node_of(self, node_id: str | None) -> str:
        return node_id or self.home

    async def ingest(
        self, node_id: str | None, key: PayloadKey, job: IngestJob, payload: object
    ) -> Outcome:
        work = {name: job[name] for name in ("step", "policy_version", "stage")}
        work |= {name: job[name] for name in schema.PART_FIELDS}
        row = {
            "artifact_id": f"ring/{key.incarnation}/{key.seq}", "kind": "ring", "node_id": "n",
            "attempt_id": job["attempt_id"], "role": job["role"], "rank": job["rank"], **work,
            "path": f"/ring/{job['step']}~{key.seq}~{key.incarnation}", "bytes": 1, "wall": 1.0,
        }  # fmt: skip
        return Outcome("ingested", None, [Put("artifacts", row)], {})

    async def _call(self, node_id: str | None, method: str, *arguments: object) -> Any:
        raise AssertionError(method)


class Rank:
    """A rank that reports some steps in a batch; its clock's offset changes with each."""

    def __init__(self, rank: int) -> None:
        self.rank, self.seq, self.step = rank, 0, 0
        self.answered: Mapping[str, Any] = {}

    def event(self, kind: str, **fields: object) -> schema.WireTuple:
        self.seq += 1
        at = self.step + self.seq / 1e6
        return schema.Event(kind, self.seq, at, at, fields).wire()

    async def train(self, coordinator: Coordinator) -> None:
        events = [] if self.seq else [self.event(schema.HELLO, world_size=2)]
        payloads: dict[int, object] = {}
        for _ in range(AT_ONCE):
            self.step += 1
            for stage in ("actor_compute_log_prob", "actor_update"):
                work = {"stage": stage, "step": self.step}
                events.append(self.event(schema.BEGIN, **work))
                fields: dict[str, object] = {**work, "status": "ok"}
                if stage == "actor_update":
                    fields["scalars"] = {"loss": float(self.step)}
                else:
                    shape = ["float32", [self.step, self.rank], None]
                    fields["payload"] = {"tensors": {"values": shape}, "bytes": 1, "meta": {}}
                events.append(self.event(schema.END, **fields))
                if "payload" in fields:
                    payloads[self.seq] = object()
        offset = self.step + self.rank / 10
        sender = schema.Sender(
            f"i{self.rank}", "r", "a", "actor", self.rank, "n", offset, offset / 1000, 1.0, 0
        )
        answer = await coordinator.record_events(
            sender=sender.wire(), events=events, payloads=payloads
        )
        assert not answer["refused"], answer


def referents(each: object) -> Sequence[object]:
    """What an object holds; of a function its closure alone."""
    if isinstance(each, types.FunctionType):
        return each.__closure__ or ()
    return gc.get_referents(each)


def held(*roots: object) -> int:
    """The number of objects that some hold; not those of SQLAlchemy, whose caches are bounded."""
    seen = {id(each) for each in roots}
    waiting = [*roots]
    while waiting:
        for each in referents(waiting.pop()):
            if id(each) in seen or isinstance(each, _LEFT_OUT):
                continue
            if type(each).__module__.partition(".")[0] in ("sqlalchemy", "sqlite3", "concurrent"):
                continue
            seen.add(id(each))
            waiting.append(each)
    return len(seen)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a few steps reach."""
    monkeypatch.setattr(ids, "_MOST", 20)
    monkeypatch.setattr(entities, "SETTLED_REMEMBERED", 20)
    monkeypatch.setattr(state, "FINDINGS_REMEMBERED", 20)
    monkeypatch.setattr(watch, "_COOLING", 10)
    monkeypatch.setattr(trigger_watch, "REACH", 10)
    for module in (watch, followed_run):
        monkeypatch.setattr(module, "HISTORY", 10)
        monkeypatch.setattr(module, "REACH", 10)


@pytest.mark.usefixtures("small")
def test_what_a_coordinator_holds_stays_over_a_long_training(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, _):
        first, second = asyncio.run(_train(store, tmp_path))
    assert second <= 1.03 * first, (first, second)


async def _train(store: SqlStore, folder: Path) -> tuple[int, int]:
    settings = Settings(home=folder, data_dir=folder, database_url=store.url)
    coordinator = await Coordinator.open(settings, store, NoTensors())
    always = rule(metric="stage_seconds", when={">": -1.0})
    await coordinator.parts.triggers.put(rules_of(always), by="test")
    ranks = [Rank(0), Rank(1)]
    found = []
    for _ in range(2):
        for _ in range(STEPS // AT_ONCE):
            await asyncio.gather(*(each.train(coordinator) for each in ranks))
            await coordinator.parts.runner.settled()
        gc.collect()
        found.append(held(coordinator, store))
    return found[0], found[1]


def test_an_actor_searches_for_garbage_and_not_in_what_it_imported() -> None:
    # In a process of its own: what is frozen stays so.
    program = """
import gc
from stagescope_service.coordinator.actor import DebugCoordinator
actor = DebugCoordinator({})
assert gc.get_freeze_count() > 10_000, gc.get_freeze_count()
assert gc.get_threshold()[2] <= 10, gc.get_threshold()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
