"""Calls between ingestors, one of which the newest coordinator has not called yet."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("ray")
from stagescope_service.ingest.actor import Ingestor
from stagescope_service.ingest.work_queue import Superseded


def test_rollouts_are_given_to_another_node_before_the_new_coordinator_called(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        ingestor = Ingestor("n2", str(tmp_path), 1 << 20, 1 << 20, [str(tmp_path)])
        await ingestor.serve("dead")
        assert await ingestor.rollouts([], ["s1"]) == []
        with pytest.raises(Superseded):
            await ingestor.call("unpin", 1, 1, caller="new")
        await ingestor.serve("new")
        assert await ingestor.call("unpin", 1, 1, caller="new")

    asyncio.run(asyncio.wait_for(work(), 120))
