"""Wholes that a coordinator had no time to form: the catalogue says which, however old they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.api import Service, service
from tests.support.floor import LocalFloor
from tests.support.parallel import Training

from stagescope_service.core.instructions import Aggregate
from stagescope_service.statistics import StepSummary, publish, summarise

STEPS = 12
"""More than stay in memory: the oldest are known to the catalogue alone."""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "home") as running:
        yield running


class DyingFloor(LocalFloor):
    """A coordinator's floor that takes payloads in and dies before it forms any whole."""

    def assemble(self, order: Aggregate) -> None:
        self.owed.append(order)

    owed: list[Aggregate]


def test_what_was_not_formed_before_a_crash_is_formed_after(live: Service) -> None:
    training = Training()
    floor = DyingFloor(live.store, live.catalogue, live.settings.data_path)
    floor.owed = []
    asyncio.run(_train(floor, training))
    attempt_id = live.catalogue.attempts("moe")[0]["attempt_id"]
    every = {(attempt_id, step) for step in range(1, STEPS + 1)}
    assert {(order.attempt_id, order.step) for order in floor.owed} == every
    unformed = live.store.snapshot().unformed
    assert set(unformed) == every

    async def form() -> None:
        for place in unformed:
            LocalFloor.aggregate(floor, Aggregate(*place))
        await floor.work()

    asyncio.run(form())
    assert live.store.snapshot().unformed == []
    for step in (1, STEPS):
        row = live.catalogue.step(attempt_id, step)
        assert row is not None
        found = publish(StepSummary.from_bytes(row["whole"]).summary)
        assert found == pytest.approx(publish(summarise(training.unsplit(step))), rel=1e-9)


async def _train(floor: LocalFloor, training: Training) -> None:
    await floor.hear(training.greetings())
    for step in range(1, STEPS + 1):
        await floor.hear(training.generate(step))
        await floor.hear(training.log_probs(step))
    await floor.hear(process.leave() for process in training.ranks)
    await floor.hear(process.leave() for process in training.rollouts)
