"""What the doctor remembers of a run: it must say the same as one that reads everything."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import pytest
from tests.service.rules.planted import (
    STAGE,
    healthy_scalars,
    make_batch,
    report,
    since,
    train,
    wire,
)
from tests.support.api import Rank, Service

from stagescope_service.rules import memory
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.memory import LATE, LateRows, Remembered, RunMemories
from stagescope_service.rules.missing import StepKey
from stagescope_service.views.diagnosis import diagnosis_of
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_wire.schema import LOG


class Table:
    """Rows by key, and the keys that were read."""

    def __init__(self, rows: Mapping[StepKey, str]) -> None:
        self.rows = dict(rows)
        self.reads: list[set[StepKey]] = []

    def read(self, keys: Sequence[StepKey]) -> Mapping[StepKey, str]:
        self.reads.append({*keys})
        return self.rows


def test_a_row_is_read_again_only_if_its_mark_changed() -> None:
    table = Table({(1, 1): "a", (1, 2): "b"})
    known: Remembered[StepKey, str] = Remembered()
    marks = {(1, 1): 1.0, (1, 2): 1.0, (1, 3): 1.0}
    assert known.of(marks, table.read) == table.rows
    assert known.of(marks, table.read) == table.rows
    table.rows[1, 3] = "late"
    assert known.of({**marks, (1, 3): 2.0}, table.read) == table.rows
    assert table.reads == [{*marks}, {(1, 3)}]
    # A row that is not asked for is not answered, and is still known.
    assert known.of({(1, 2): 1.0}, table.read) == {(1, 2): "b"}
    assert known.of(marks | {(1, 3): 2.0}, table.read) == table.rows
    assert len(table.reads) == 2


def test_late_rows_of_the_newest_steps_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = range(1, LATE + 11)
    table = Table({(1, step): f"{step}" for step in steps})
    known: LateRows[str] = LateRows()
    marks = {(1, step): 0.0 for step in steps}
    known.of(marks, table.read)
    table.rows[1, steps[-1]] = table.rows[1, 1] = "late"
    found = known.of(marks, table.read)
    assert table.reads[1] == {(1, step) for step in steps[-LATE:]}
    assert (found[1, 1], found[1, steps[-1]]) == ("1", "late")
    monkeypatch.setattr(memory, "MAX_AGE", -1.0)
    assert known.of(marks, table.read)[1, 1] == "late"


def test_it_says_what_a_doctor_says_that_reads_everything(live: Service) -> None:
    deps: Dependencies = live.app.state.deps
    run = "remembered"
    ranks = [Rank(live, run=run, rank=rank, world_size=4) for rank in range(4)]

    def go_on(steps: range) -> str:
        """Train, and compare both diagnoses; return the text."""
        for step in steps:
            reports = []
            for number, rank in enumerate(ranks):
                batch = make_batch(step, number, 0)
                batch.add(0.1 if step > 14 else 0.0)
                scalars = {**healthy_scalars(step), "grad_norm": 90.0 if step == 18 else 1.0}
                payload = wire(batch, run)
                reports.append(rank.draft_stage(STAGE, step, payload, scalars=scalars))
            live.engine.take_together(reports)
        known = diagnosis_of(deps, run, None, None)
        fresh = diagnosis_of(dataclasses.replace(deps, memories=RunMemories()), run, None, None)
        assert known == fresh
        return str(known[0]["text"])

    texts = [go_on(range(begin, begin + 3)) for begin in range(1, 25, 3)]
    assert texts[0].startswith("Nothing is wrong")
    assert len({*texts}) == len(texts)
    report(live, run, "payload_refused", severity="error")
    assert "payload_refused" in go_on(range(0))
    # What arrives late, of a closed step.
    ranks[0].say(LOG, step=20, scalars={"entropy": math.nan})
    go_on(range(0))
    rows = {row["rule"]: row for row in diagnosis_of(deps, run, None, None)[1]}
    assert rows["non_finite_scalars"]["verdict"] == "found"


def test_what_was_computed_of_a_step_is_dropped_when_its_data_change(live: Service) -> None:
    deps: Dependencies = live.app.state.deps
    run = "changed"

    def ask() -> tuple[object, object]:
        """Return the diagnosis; one that remembers nothing must be the same."""
        known = diagnosis_of(deps, run, None, None)
        forgetful = dataclasses.replace(deps, memories=RunMemories())
        assert known == diagnosis_of(forgetful, run, None, None)
        return known

    def computed() -> object:
        """Return what is remembered of the newest measured step."""
        history = RunHistory(deps.catalogue, run, memory=deps.memories.of(run))
        return None if history.newest is None else history.newest.published

    seqs = itertools.count(1_000, 100)

    def going_on(key: str, rank: int) -> Rank:
        """Return a process of a training that `train` reported."""
        process = Rank(live, run=run, rank=rank, key=key, start=20_000.0, greets=False)
        process.seq = next(seqs)
        return process

    train(live, run, steps=range(1, 13), ranks=3)
    answers, known = [ask()], [computed()]
    assert computed() is known[0]
    # Another part of the newest closed step arrives late.
    late = going_on("a1", 2)
    batch = make_batch(12, 7, 0)
    batch.add(0.4)
    late.stage(STAGE, 12, wire(batch, run), microbatch=1)
    answers.append(ask())
    known.append(computed())
    # A restart trains the last steps again.
    worse = since(10, lambda batch: batch.add(0.2))
    train(live, run, worse, steps=range(9, 13), key="a2", start=9_000.0, ranks=3)
    answers.append(ask())
    known.append(computed())
    # Another run has the name of a deleted one.
    for key, rank in itertools.product(("a1", "a2"), range(3)):
        going_on(key, rank).say("finish")
    response = live.operate.delete(f"/runs/{run}", params={"wait": 30})
    assert response.json().get("deleted"), response.text
    train(live, run, steps=range(1, 13), key="a3", start=30_000.0, ranks=3, seed=1)
    answers.append(ask())
    known.append(computed())
    assert all(one != other for one, other in itertools.combinations(answers, 2))
    assert all(one != other for one, other in itertools.combinations(known, 2))
