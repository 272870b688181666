"""The list of runs says what each is like, at a cost that its length does not change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.api import Rank, Service, service
from tests.support.measure import payload
from tests.support.stores import eventually

from stagescope_service.store.contract import Put


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "home") as running:
        yield running


def _train(live: Service, run: str, noises: list[float], **settings: object) -> Rank:
    rank = Rank(live, run=run, world_size=1, settings=settings,
                fingerprint={"git": {"commit": f"{run}0"}, "python": "3.11"})  # fmt: skip
    for step, noise in enumerate(noises, 1):
        rank.stage("actor_compute_log_prob", step, payload(seed=step, noise=noise))
        rank.say("log", step=step, scalars={"reward": step / 10})
    rank.begin("actor_compute_log_prob", len(noises) + 1)
    return rank


def _judged(live: Service) -> dict[str, Any]:
    """The rows once the doctor has looked at every run as it is."""

    def rows() -> list[dict[str, Any]] | None:
        found: list[dict[str, Any]] = live.get("/runs/overview")["rows"]
        return found if all((row["judgement"] or {}).get("current") for row in found) else None

    return {row["run"]: row for row in eventually(rows)}


def test_each_run_has_its_verdict_and_its_numbers_in_small(live: Service) -> None:
    _train(live, "well", [0.001] * 12)
    _train(live, "jumps", [0.001] * 8 + [0.5] * 12)
    new = Rank(live, run="new", world_size=1)
    new.stage("actor_update", 1)
    new.say("finish")
    first = live.get("/runs/overview")["rows"]
    assert [row["run"] for row in first] == ["jumps", "well", "new"]
    found = _judged(live)
    doctor = live.get("/runs/jumps/diagnosis")
    assert found["jumps"]["judgement"]["healthy"] is doctor["healthy"] is False
    assert found["jumps"]["judgement"]["sentence"] == doctor["rows"][0]["sentence"]
    assert found["well"]["judgement"]["healthy"] is live.get("/runs/well/diagnosis")["healthy"]
    assert found["new"]["judgement"]["healthy"] is None, "nothing is measured of it"
    assert found["new"]["spark"]["abs_diff"] == [None]
    spark = found["jumps"]["spark"]
    assert spark["steps"] == [*range(1, 21)]
    series = live.get("/series", run="jumps", metric="logprob_abs_diff/mean")
    assert spark["abs_diff"] == series["series"][0]["values"][:-1], "without the open step"
    assert spark["reward"] == pytest.approx([step / 10 for step in range(1, 21)])
    assert spark["reward_name"] == "reward"
    kinds = {row["kind"] for row in live.get("/findings", run="jumps")["rows"]
             if row["severity"] == "warning" and row["over_wall"] is None}  # fmt: skip
    assert found["jumps"]["findings"]["warning"] == len(kinds)


def test_a_verdict_is_of_the_run_as_it_is(live: Service) -> None:
    rank = Rank(live, run="young", world_size=1)
    rank.begin("actor_compute_log_prob", 1)
    assert _judged(live)["young"]["judgement"]["healthy"] is None, "no step is closed"
    assert live.get("/runs/young/diagnosis")["healthy"] is None
    for step in range(1, 21):
        rank.stage("actor_compute_log_prob", step, payload(seed=step, noise=0.001))
    before = _judged(live)["young"]["judgement"]
    for step in range(21, 33):
        rank.stage("actor_compute_log_prob", step, payload(seed=step, noise=0.5))
    # What was said of earlier steps is marked, and made again at once.
    [row] = live.get("/runs/overview")["rows"]
    assert row["judgement"] == {**before, "current": False}
    judgement = _judged(live)["young"]["judgement"]
    first = live.get("/runs/young/diagnosis")["rows"][0]
    assert judgement["sentence"] == first["sentence"] != before["sentence"]


def test_a_sparkline_of_a_long_run_is_as_short_and_has_its_ends(live: Service) -> None:
    _train(live, "long", [0.01])
    steps = [Put("steps", {"attempt_id": 1, "step": step, "closed_wall": 1.0})
             for step in range(2, 5001)]  # fmt: skip
    live.store.submit(
        [*steps, Put("attempts", {"attempt_id": 1, "last_closed_step": 5000})]
    ).result(30)
    (row,) = live.get("/runs/overview")["rows"]
    spark = row["spark"]
    assert len(spark["steps"]) == 32
    assert (spark["steps"][0], spark["steps"][-1]) == (1, 5000)
    assert spark["abs_diff"][1:] == [None] * 31


def test_runs_are_drawn_over_each_other_with_what_differs(live: Service) -> None:
    _train(live, "a", [0.01, 0.02], lr=1e-6, model="m")
    _train(live, "b", [0.03, 0.04, 0.05], lr=5e-5, model="m")
    drawn = live.get("/figures/runs", run=["a", "b"])
    traces = drawn["figure"]["data"]
    assert {(trace["name"], len(trace["x"])) for trace in traces} == {("a", 3), ("b", 4)}
    assert len({(trace["name"], trace["line"]["color"]) for trace in traces}) == 2
    assert sum(trace["showlegend"] for trace in traces) == 2
    missing = live.get("/figures/runs", run=["a", "b"], metric=["grad_norm"])
    assert missing["note"] == "a has no grad_norm; b has no grad_norm"
    found = live.get("/runs/settings", run=["b", "a"])
    assert found["runs"] == ["b", "a"]
    rows = {row["name"]: row["values"] for row in found["rows"]}
    assert rows == {"lr": [5e-5, 1e-6], "commit": ["b0", "a0"]}
    assert found["same"] == 1
    live.problem(404, "/figures/runs", run=["a", "x"])
    live.problem(422, "/runs/settings")
