"""Steps that a coordinator had no time to aggregate: the catalogue says which, however old."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.api import Service, service
from tests.support.local import LocalCoordinator
from tests.support.parallel import Training

from stagescope_service.core.instructions import Aggregate, Instruction
from stagescope_service.statistics import StepSummary, publish, summarise

STEPS = 12
"""More than stay in memory: the oldest are known to the catalogue alone."""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "home") as running:
        yield running


def test_what_was_not_aggregated_before_a_crash_is_aggregated_after(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    local = LocalCoordinator(live.store, live.settings.data_path)
    due: list[Aggregate] = []
    start_now = local.queue.start_now

    def start(instruction: Instruction) -> None:
        """Leave every step: the coordinator dies before it aggregates one."""
        if isinstance(instruction, Aggregate):
            due.append(instruction)
        else:
            start_now(instruction)

    monkeypatch.setattr(local.queue, "start_now", start)
    asyncio.run(_train(local, training))
    attempt_id = live.catalogue.attempts("moe")[0]["attempt_id"]
    every = {(attempt_id, step) for step in range(1, STEPS + 1)}
    assert set(due) == {Aggregate(*key) for key in every}
    unaggregated = live.store.snapshot().unaggregated
    assert set(unaggregated) == every

    async def aggregate() -> None:
        for key in unaggregated:
            start_now(Aggregate(*key))
        await local.parts.runner.settled()

    asyncio.run(aggregate())
    assert live.store.snapshot().unaggregated == []
    for step in (1, STEPS):
        row = live.catalogue.step(attempt_id, step)
        assert row is not None
        assert row["step_summary"] is not None
        found = publish(StepSummary.from_bytes(row["step_summary"]).summary)
        assert found == pytest.approx(publish(summarise(training.unsplit(step))), rel=1e-9)


async def _train(local: LocalCoordinator, training: Training) -> None:
    await local.record(training.greetings())
    for step in range(1, STEPS + 1):
        await local.record(training.generate(step))
        await local.record(training.log_probs(step))
    await local.record(process.leave() for process in training.ranks)
    await local.record(process.leave() for process in training.rollouts)
