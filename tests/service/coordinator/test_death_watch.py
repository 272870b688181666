"""Which of several ranks died on its own, by Ray's record of their actors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.local import coordinator_of
from tests.support.stores import rows_of, url_of

from stagescope_service.core.state import State
from stagescope_service.ingest.cluster_state import ActorDeath, own_deaths
from stagescope_service.store.sql import SqlStore
from stagescope_wire.schema import Sender

KILLED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker "
    "exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some "
    "common causes include: (1) the process was killed by the OOM killer"
)
"""As Ray 2.60 says it of an actor after `kill -9`."""
OWNER_DIED = (
    "The actor is dead because its owner has died. Owner worker exit type: SYSTEM_ERROR Worker "
    "exit detail: Owner's worker process has crashed."
)


def _actor(pid: int, reason: int, text: str, out_of_memory: str = "") -> dict[str, Any]:
    cause = SimpleNamespace(
        actor_died_error_context=SimpleNamespace(reason=reason, error_message=text),
        oom_context=SimpleNamespace(error_message=out_of_memory),
    )
    return {"Address": {"NodeID": "n"}, "Pid": pid, "EndTime": 5000.0, "DeathCause": cause}


def test_only_actors_that_nobody_ended_died_on_their_own() -> None:
    exited = KILLED.replace("SYSTEM_ERROR", "INTENDED_SYSTEM_EXIT")
    actors = [
        _actor(1, 1, KILLED),
        _actor(2, 2, OWNER_DIED),
        _actor(3, 4, "it was killed by ray.kill"),
        _actor(4, 1, exited),
        _actor(5, 0, "", "the node ran out of memory"),
    ]
    found = own_deaths(actors)
    assert {pid: death.wall for (_, pid), death in found.items()} == {1: 5.0, 5: 5.0}
    assert found["n", 1].reason.endswith("connection error code 2. End of file.")


@pytest.mark.parametrize("is_earlier", [False, True])
def test_the_rank_that_ray_did_not_end_with_its_driver_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_earlier: bool
) -> None:
    """Both were last heard at one time; `is_earlier`: an earlier process had the same id."""
    now = [1000.0]
    store = SqlStore(url_of(tmp_path))

    async def deaths() -> Mapping[tuple[str, int], ActorDeath]:
        return {("n", 41): ActorDeath(900.0 if is_earlier else 1001.0, "killed")}

    async def train() -> None:
        parts = coordinator_of(
            store, tmp_path, state=State(lease_seconds=45.0),
            wall=lambda: now[0], mono=lambda: now[0],
        ).parts  # fmt: skip
        monkeypatch.setattr(parts.ingestors, "actor_deaths", deaths)
        for rank in (0, 1):
            sender = Sender(
                f"r{rank}", "r", "a", "actor", rank, node_id="n", started=1000.0, clock_offset=0.0
            )
            events = [
                (1, "hello", 1, 1000.0, 0.0, {"pid": 40 + rank, "world_size": 2}),
                (1, "begin", 2, 1000.0, 0.0, {"step": 1, "stage": "actor_update"}),
            ]
            await parts.intake.record(sender.wire(), events)
        for _ in range(60):
            now[0] += 1.0
            await parts.leases.expire()
        await parts.runner.settled()

    store.open()
    try:
        asyncio.run(train())
        found = [row for row in rows_of(store, "findings") if row["kind"] == "process_died"]
    finally:
        store.close()
    if is_earlier:
        assert found == []
        return
    [row] = found
    assert (row["role"], row["rank"], row["step"], row["severity"]) == ("actor", 1, 1, "error")
    assert "(pid 41) died in step 1" in row["message"]
