"""What is made in the background and fails: tried again, and said where it fails for good."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.dumps import capture
from tests.support.stores import evidence_of
from tests.support.triggering import RuleBench, rule, rules_of, run, training

from stagescope_service.coordinator import retries
from stagescope_service.coordinator.aggregation import assembly
from stagescope_service.coordinator.aggregation.aggregator import Aggregator
from stagescope_service.coordinator.aggregation.assembly import TOO_LATE
from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.core.findings import NOT_AGGREGATED
from stagescope_service.core.instructions import Aggregate, Instruction, Put
from stagescope_service.core.operators import again
from stagescope_service.ingest.ingestors import IngestorDied
from stagescope_service.ingest.operator_tables import TABLE
from stagescope_service.store.contract import Delete, Write
from stagescope_service.store.tables import FindingRow
from stagescope_service.views.reading.completeness import gaps
from stagescope_wire.errors import CatalogueUnavailable, StoreError

STEP = Aggregate(1, 1)


class Broken:
    """A closed step with a scalar that is not finite, that is not aggregated yet."""

    def __init__(self, bench: RuleBench) -> None:
        self.bench, self.catalogue = bench, bench.catalogue
        self.parts, self.queue = bench.local.parts, bench.local.queue
        self.building = bench.local.ingestors.before_building
        self.tried = 0

    def keep_steps(self, count: int) -> None:
        """Have the parts of the newest `count` steps kept."""
        self.parts.steps.keep_steps = count

    async def prepare(self) -> None:
        rules = rules_of(rule("loss", metric="nonfinite_scalar/loss", when={">": 0}))
        await self.bench.triggers.put(rules, by="me")
        await self.bench.step(1, hold=True, scalars={0: {"loss": math.nan}})
        unaggregated = {"attempt_id": 1, "step": 1, "step_summary": None, "summary_mark": None}
        await self.parts.runner.write([Put("steps", unaggregated)])
        assert "being aggregated" in self.gap()
        self.queue.checks_rules = True
        self.tried = 0

    async def aggregate(self) -> None:
        """Have the step aggregated, and wait until all that follows is done."""
        self.parts.runner.start(STEP)
        await self.settled()

    async def settled(self) -> None:
        await asyncio.wait_for(self.bench.local.work(), 30)

    def gap(self) -> str:
        return gaps(self.catalogue, self.catalogue.steps(1)).get((1, 1), "")

    def said(self) -> list[FindingRow]:
        return self.bench.findings(NOT_AGGREGATED)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PAUSES", (0.0, 0.0))


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broken]:
    with training(tmp_path) as bench:
        found = Broken(bench)
        form = Aggregator.aggregate

        async def counted(*args: Any, **more: Any) -> None:
            found.tried += 1
            await form(*args, **more)

        monkeypatch.setattr(Aggregator, "aggregate", counted)
        yield found


def failing(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> None:
    """Have the next tries fail."""
    left, form = list(errors), Aggregator.aggregate

    async def fails(*args: Any, **more: Any) -> None:
        if left:
            raise left.pop(0)
        await form(*args, **more)

    monkeypatch.setattr(Aggregator, "aggregate", fails)


@pytest.mark.parametrize(
    "errors",
    [[RuntimeError("once")] * 2, [CatalogueUnavailable("for a while")] * 9],
    ids=["a failure", "an outage"],
)
def test_an_aggregation_that_failed_is_tried_again(
    broken: Broken, monkeypatch: pytest.MonkeyPatch, errors: list[Exception]
) -> None:
    async def work() -> None:
        await broken.prepare()
        failing(monkeypatch, *errors)
        await broken.aggregate()

    run(work)
    assert broken.catalogue.steps(1)[0]["has_summary"]
    assert (broken.gap(), broken.said()) == ("", [])
    assert broken.bench.fired() == [(1, 1, "loss")]


def test_numbers_without_what_was_read_last_say_so(broken: Broken) -> None:
    async def work() -> None:
        await broken.prepare()
        await broken.aggregate()
        assert broken.gap() == ""
        mark = broken.catalogue.parts_mark(1, 1)
        assert mark is not None
        late = {"attempt_id": 1, "step": 1, "parts_mark": mark + 1}
        await broken.parts.runner.write([Put("steps", late)])
        assert broken.gap() == (
            "numbers without what was read last: they are being aggregated again"
        )
        await broken.aggregate()
        assert broken.gap() == ""

    run(work)


def test_what_fails_for_good_is_said_and_holds_up_nothing(
    broken: Broken, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)

    async def work() -> None:
        await broken.prepare()
        first, *_ = broken.catalogue.summaries(1, 1)
        await broken.parts.runner.write([Put("summaries", {**first, "summary": b"junk"})])
        await broken.aggregate()
        assert broken.tried == 3
        (finding,) = broken.said()
        assert (finding["severity"], finding["step"], finding["run"]) == ("error", 1, "r")
        assert evidence_of(finding)["error"] in finding["message"]
        expected = "no numbers: the aggregation failed: " + evidence_of(finding)["error"]
        assert broken.gap() == expected
        assert broken.bench.fired() == [(1, 1, "loss")]  # what needs no summary is still said
        # More of the step arrives, or a release that can read it starts.
        await broken.parts.runner.write([Put("summaries", first)])
        await broken.aggregate()

    run(work)
    assert broken.tried == 4
    assert broken.catalogue.steps(1)[0]["has_summary"]
    assert (broken.gap(), broken.said()) == ("", [])


def test_steps_whose_numbers_lie_far_apart_are_aggregated_and_kept(broken: Broken) -> None:
    apart = broken.parts.steps.keep_steps + 2
    broken.keep_steps(3)

    async def work() -> None:
        await broken.prepare()
        for step in (apart, 2 * apart):
            await broken.bench.step(step)
        await broken.aggregate()
        assert broken.gap() == ""
        await broken.bench.step(3 * apart)
        broken.parts.runner.start(Aggregate(1, 3 * apart))
        await broken.aggregate()
        assert not broken.catalogue.summaries(1, 1)
        assert all(broken.catalogue.summaries(1, n * apart) for n in (1, 2, 3))
        assert broken.catalogue.steps(1, before=2)[0]["has_summary"]

    run(work)


def test_where_fewer_steps_are_kept_than_before_each_goes_in_a_transaction_of_its_own(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, write = broken.bench, broken.parts.runner.write
    removed: list[set[object]] = []

    async def noted(rows: Sequence[Write], *settled: Any) -> None:
        of_steps = {
            row.where["step"] for row in rows if isinstance(row, Delete) and "step" in row.where
        }
        removed.extend([of_steps] if of_steps else [])
        await write(rows, *settled)

    monkeypatch.setattr(broken.parts.runner, "write", noted)

    async def work() -> None:
        for step in range(1, 8):
            if step == 6:
                assert not removed
                broken.keep_steps(2)
            await bench.step(step, hold=True)
            await broken.settled()

    run(work)
    assert {row["step"] for row in broken.catalogue.summaries(1)} == {6, 7}
    assert all(len(steps) == 1 for steps in removed)
    assert {step for steps in removed for step in steps} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("measured", [True, False], ids=["with numbers", "without numbers"])
def test_a_payload_that_comes_when_the_parts_of_its_step_are_gone(
    broken: Broken, measured: bool
) -> None:
    bench, catalogue = broken.bench, broken.catalogue
    broken.keep_steps(3)

    async def come(step: int, absent: tuple[int, ...] = ()) -> None:
        await bench.step(step, hold=True, absent=absent)
        await broken.settled()

    async def work() -> None:
        await come(1, absent=(1,) if measured else (0, 1))
        for step in range(2, 7):
            await come(step)
        assert not catalogue.summaries(1, 1)
        stages = {row["rank"]: row["status"] for row in catalogue.stages(1, 1)}
        assert stages[1] != "ok"
        await bench.hand_over(1, rank=1)
        await broken.settled()
        await come(7)

    run(work)
    row = catalogue.steps(1, before=2)[0]
    gap = gaps(catalogue, [row]).get((1, 1), "")
    refused = [row for row in catalogue.losses(run="r") if row["kind"] == "payload"]
    assert row["has_summary"]
    assert row["summary_mark"] == row["parts_mark"]
    if not measured:  # nothing of it was ever counted: what came is all there is
        assert (gap, refused) == ("", [])
        return
    assert gap == f"numbers without 1 payload refused ({TOO_LATE})"
    ((_, reason),) = {(row["rank"], row["reason"]) for row in refused if row["step"] == 1}
    assert reason == TOO_LATE


def test_a_payload_that_settles_while_a_step_is_formed_counts_or_is_refused(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, catalogue = broken.bench, broken.catalogue
    start_now = broken.queue.start_now

    def start(instruction: Instruction) -> None:
        if not isinstance(instruction, Aggregate):
            start_now(instruction)

    monkeypatch.setattr(broken.queue, "start_now", start)

    async def refused(parts: assembly.StepParts) -> list[int]:
        """The payloads that are refused once the parts are gone."""
        await broken.parts.runner.write(assembly.rows_of(parts, "r"))
        late = assembly.too_late(catalogue, 1, 1, "r") or []
        return [put.row["rank"] for put in late if isinstance(put, Put) and put.table == "losses"]

    async def work() -> None:
        await bench.step(1, hold=True, absent=(1,))
        before = assembly.begin(catalogue, 1, 1)
        await bench.hand_over(1, rank=1)
        assert await refused(before) == [1]
        after = assembly.begin(catalogue, 1, 1)
        after.wall = 0.0  # all of it settled after the wall was taken, and was read
        assert await refused(after) == []

    run(work)


def test_a_step_that_could_not_be_read_for_a_moment_is_held_against_the_rules(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = broken.bench
    errors: list[Exception] = [CatalogueUnavailable("locked"), StoreError("once")]
    evaluate = bench.triggers._evaluate

    def failing(*args: Any) -> object:
        if errors:
            raise errors.pop()
        return evaluate(*args)

    async def work() -> None:
        await bench.triggers.put(rules_of(rule()), by="me")
        monkeypatch.setattr(bench.triggers, "_evaluate", failing)
        await bench.step(1, 1.0)

    run(work)
    assert bench.fired() == [(1, 1, "mean")]


# --- operator tables and weights ----------------------------------------------------------------
def announced(files: Path) -> dict[str, object]:
    """The row of a dump that was announced."""
    place = {"step": 1, "policy_version": None, "stage": "actor_update", "role": "actor", "rank": 1}
    part = dict.fromkeys(("occurrence", "epoch", "minibatch", "microbatch"), 0)
    return {
        "incarnation": "i", "work_key": "1||actor_update|0.0.0.0", "capture_id": "c",
        "attempt_id": 1, **place, **part, "node_id": "here", "dump_path": str(files),
        "announced_wall": 5.0, "mark": 7, "truncated": False,
    }  # fmt: skip


@pytest.mark.parametrize("passes", [True, False], ids=["for a moment", "for good"])
def test_an_operator_table_that_the_disk_refused_is_tried_again(
    broken: Broken, tmp_path: Path, passes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    row = announced(files := capture(tmp_path / "dump"))
    table = files / TABLE
    table.mkdir()  # a file cannot take its place
    broken.building += [lambda: None, table.rmdir if passes else lambda: None]

    async def work() -> None:
        await broken.parts.runner.write([Put("operators", row)])
        broken.parts.runner.start(again(row, "r"))
        await broken.settled()

    run(work)
    (told,) = broken.catalogue.operators(1, 1)
    said = broken.bench.findings("unreadable_dump")
    assert told["digested_mark"] == told["mark"]
    if passes:
        assert (told["state"], said) == ("digested", [])
        return
    assert told["state"] == "refused"
    assert "(3 tries)" in (told["reason"] or "")
    assert "(3 tries)" in said[0]["message"]


def dies() -> None:
    raise IngestorDied("it took more memory than there is")


def test_a_dump_that_kills_its_ingestor_does_it_twice_at_most(
    broken: Broken, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    row = announced(capture(tmp_path / "dump"))
    broken.building += [dies, dies, lambda: None]

    async def work() -> None:
        await broken.parts.runner.write([Put("operators", row)])
        broken.parts.runner.start(again(row, "r"))
        await broken.settled()

    run(work)
    (told,) = broken.catalogue.operators(1, 1)
    assert told["state"] == "refused"
    assert "(2 tries)" in (told["reason"] or "")
    assert len(broken.building) == 1  # no third try


def test_a_step_whose_coordinator_died_before_its_summary_is_aggregated_by_the_next(
    tmp_path: Path,
) -> None:
    """Its payloads are read, and its attempt lives: nothing else of it will ever arrive."""
    with training(tmp_path) as bench:

        async def check() -> None:
            for number in (1, 2, 3):
                await bench.step(number, hold=True)
            killed = {
                "attempt_id": 1,
                "step_summary": None,
                "summary_wall": None,
                "summary_mark": None,
            }
            await bench.local.parts.runner.write(
                [Put("steps", {**killed, "step": n}) for n in (1, 2)]
            )
            settings = bench.local.parts.settings
            opened = await Coordinator.open(settings, bench.store, bench.local.ingestors)
            await asyncio.wait_for(opened.parts.runner.settled(), 30)

        run(check)
        found = [bench.catalogue.step(1, number) for number in (1, 2)]
        assert [row is not None and row["step_summary"] is not None for row in found] == [
            True,
            True,
        ]


def test_of_many_steps_that_are_left_over_some_are_done_before_the_next_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = range(1, 10)
    running: list[int] = []
    most = 0
    aggregate = Aggregator.aggregate

    async def counted(self: Aggregator, step: Aggregate, *arguments: Any, **more: Any) -> None:
        nonlocal most
        running.append(step.step)
        most = max(most, len(running))
        await aggregate(self, step, *arguments, **more)
        running.remove(step.step)

    with training(tmp_path) as bench:

        async def check() -> None:
            for number in steps:
                await bench.step(number, hold=True)
            killed = {
                "attempt_id": 1,
                "step_summary": None,
                "summary_wall": None,
                "summary_mark": None,
            }
            await bench.local.parts.runner.write(
                [Put("steps", {**killed, "step": n}) for n in steps]
            )
            monkeypatch.setattr(Aggregator, "aggregate", counted)
            settings = bench.local.parts.settings
            opened = await Coordinator.open(settings, bench.store, bench.local.ingestors)
            await asyncio.wait_for(opened.parts.runner.settled(), 60)

        run(check)
    assert 1 < most <= 4
