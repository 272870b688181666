"""Pins reach every node that holds payloads of the step, and outlive what the ring lets go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from tests.support.local import LocalCoordinator
from tests.support.stores import url_of, write
from tests.support.triggering import rule, rules_of, run, training

from stagescope_service.coordinator.rules.actions import gone_of
from stagescope_service.store.contract import Put
from stagescope_service.store.queries.reader import LIMIT
from stagescope_service.store.ring import RingKey
from stagescope_service.store.sql import SqlStore
from stagescope_service.store.tables import ArtifactRow
from stagescope_wire.errors import NotFound

pytest.importorskip("ray")

STEP = 5


def test_a_pin_reaches_payloads_beyond_the_first_page(tmp_path: Path) -> None:
    store = SqlStore(url_of(tmp_path))
    store.open()
    local = LocalCoordinator(store, tmp_path)
    rings = {name: local.ingestors.worker(name).reader.ring for name in ("a", "z")}
    values = np.zeros(8, np.float32)
    # As the catalogue orders them, those of node z come after a whole page of node a's.
    for seq, node in [*((seq, "a") for seq in range(LIMIT + 50)), (5000, "z"), (5001, "z")]:
        path = ""
        if node == "z" or seq < 3:
            tensors = {"old_log_probs": ("float32", values.shape, values, None)}
            entry = rings[node].keep(RingKey(1, STEP, node, seq), tensors, {})
            assert entry is not None
            path = str(entry.path)
        row = {"artifact_id": f"ring/{node}/{seq:06}", "attempt_id": 1, "step": STEP, "path": path}
        place = {"stage": "actor_update", "rank": 0, "kind": "ring", "node_id": node}
        gone = {} if path else {"deleted_wall": 1.0}
        write(store, Put("artifacts", {**row, **place, **gone}))
    answer = asyncio.run(local.coordinator.parts.retention.pin(1, STEP))
    store.close()
    assert (answer.payloads, answer.gone, answer.reasons) == (5, LIMIT + 47, ())
    # The next payload that needs the room finds none of them evictable.
    assert rings["z"].pin_step(1, STEP).payloads == 2


def test_pinned_steps_outlive_the_ring_and_the_ingestor(tmp_path: Path) -> None:
    with training(tmp_path, ring_bytes=40_000) as bench:

        async def work() -> None:
            await bench.triggers.put(rules_of(rule(actions={"finding": {}, "pin": 2})), by="me")
            for step in range(1, 4):
                await bench.step(step, 0.01)
            await bench.step(4, 1.0)
            for step in range(5, 30):
                if step == 15:
                    bench.local.ingestors.restart()  # the ingestor is a new process
                await bench.step(step, 0.01)
            for step in range(30, 40):
                await bench.step(step, 1.0)

        run(work)
        ring = bench.local.ingestors.worker(None).reader.ring
        held = {entry.key.step for entry in ring.entries() if entry.pinned}
        assert {3, 4} <= held
        assert sum(entry.bytes for entry in ring.entries() if entry.pinned) <= 20_000
        assert ring.bytes <= 40_000
        assert {row["step"] for row in bench.catalogue.pinned_steps()} == held
        said = bench.findings("pin_not_kept")
        assert said
        assert "pinned payloads use" in said[-1]["message"]
        assert ring.not_kept == 0


@pytest.mark.parametrize(("attempt_id", "step"), [(1, 7), (2, 1)])
def test_a_step_that_never_began_cannot_be_pinned(
    tmp_path: Path, attempt_id: int, step: int
) -> None:
    with training(tmp_path) as bench:

        async def work() -> None:
            await bench.step(1, 0.01)
            coordinator = bench.local.coordinator
            for call in (coordinator.pin, coordinator.unpin):
                with pytest.raises(NotFound, match=f"no step {step}"):
                    await call(attempt_id=attempt_id, step=step, by="me")
            assert (await coordinator.pin(attempt_id=1, step=1, by="me"))["pinned"] is True

        run(work)
        # The row of a step that never began would be the newest step of the run.
        assert [(row["attempt_id"], row["step"]) for row in bench.catalogue.steps()] == [(1, 1)]


def test_a_pin_that_comes_too_late_is_said(tmp_path: Path) -> None:
    with training(tmp_path, ring_bytes=12_000) as bench:

        async def work() -> None:
            await bench.triggers.put(rules_of(rule(actions={"finding": {}, "pin": 9})), by="me")
            for step in range(1, 6):
                await bench.step(step, 0.01)
            await bench.step(6, 1.0)

        run(work)
        gone = [
            row for row in bench.findings("pin_not_kept") if "had left the ring" in row["message"]
        ]
        assert [row["step"] for row in gone][:2] == [1, 2]


def test_payloads_that_the_catalogue_does_not_know_yet_are_not_gone() -> None:
    there = cast("ArtifactRow", {"deleted_wall": None})
    deleted = cast("ArtifactRow", {"deleted_wall": 1.0})
    assert gone_of([there, there], 4) == 0
    assert gone_of([there, deleted], 4) == 1
    assert gone_of([there, there, deleted], 1) == 2
