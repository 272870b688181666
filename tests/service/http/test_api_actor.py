"""The API's calls of the cluster: off its event loop, and no more of them than needed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ray = pytest.importorskip("ray")
from stagescope_service.api_actor import CoordinatorCommands  # noqa: E402
from stagescope_service.ingest import actor as ingest_actor  # noqa: E402
from stagescope_service.settings import Settings  # noqa: E402
from stagescope_wire.framing import WirePayload  # noqa: E402


def commands_of(home: Path) -> CoordinatorCommands:
    return CoordinatorCommands(Settings(home=home))


def test_payloads_are_stored_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(ray, "put", lambda payload: threads.append(threading.get_ident()))
    commands = commands_of(tmp_path)

    async def answered(method: str, **arguments: object) -> dict[str, object]:
        return {"received": 1}

    monkeypatch.setattr(commands, "_call", answered)
    payload: WirePayload = {"schema": 1, "tensors": {}, "strings": {}, "meta": {}}
    asyncio.run(commands.record_events(sender=(), events=(), payloads={1: payload}))
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_the_parts_of_a_file_cost_one_look_at_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[None] = []

    def nodes() -> list[dict[str, Any]]:
        looks.append(None)
        return [{"NodeID": "n1", "Alive": True}]

    ingestor = SimpleNamespace(read_artifact=SimpleNamespace(remote=lambda *part: part))
    here = SimpleNamespace(get_node_id=lambda: "n0")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)  # else Ray starts a cluster
    monkeypatch.setattr(ray, "nodes", nodes)
    monkeypatch.setattr(ray, "get", lambda ref, timeout: b"x")
    monkeypatch.setattr(ingest_actor.Ingestors, "handle_for", lambda self, node: ingestor)
    commands = commands_of(tmp_path)
    for part in range(10):
        content = commands.read_artifact(node_id="n1", path="/f", offset=part, size=1)
        assert content == b"x"
    assert len(looks) == 1
