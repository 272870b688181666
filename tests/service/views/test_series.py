"""`GET /series` and what client and terminal make of it, on the real service."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.pool import QueuePool
from tests.support.api import Rank, Service, service
from tests.support.command_line import invoke
from tests.support.measure import payload
from tests.support.stores import training

import stagescope
from stagescope_service.store.contract import Put
from stagescope_wire.errors import InvalidInput, NotFound
from stagescope_wire.sparkline import sparkline

STAGE = "actor_compute_log_prob"
K3 = "rollout_corr/k3_kl"


def train(live: Service, steps: range, key: str, start: float, **hello: Any) -> None:
    """Two ranks; the last step is open.

    Step 3 has no numbers. In step 4 the loss of rank 1 and one of its log-probs are NaN.
    """
    ranks = [Rank(live, rank=rank, key=key, start=start, **hello) for rank in (0, 1)]
    for step in steps:
        for at, rank in enumerate(ranks):
            handed = payload(seed=10 * step + at, first_sample=4 * at)
            loss = math.nan if (step, at) == (4, 1) else float(step + at)
            if math.isnan(loss):
                handed["tensors"]["old_log_probs"][2][0, 0] = math.nan
            logged = {} if step == 5 else {"loss": loss}
            rank.stage(STAGE, step, None if step == 3 else handed, scalars=logged)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Attempt 1 did steps 1 to 7, attempt 2 resumed after 5 and did 6 to 8."""
    with service(tmp_path_factory.mktemp("home")) as running:
        train(running, range(1, 8), "a1", 1_000.0)
        train(running, range(6, 9), "a2", 2_000.0, resumed_from_step=5)
        yield running


@pytest.fixture
def session(real: Service) -> Iterator[stagescope.Session]:
    with real.session() as session:
        yield session


def test_each_step_once_with_the_number_that_the_step_itself_answers(real: Service) -> None:
    answer = real.get("/series", metric=K3)
    assert answer["steps"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert answer["attempts"] == [1] * 5 + [2] * 3
    assert answer["superseded_by"] == [None] * 8
    (one,) = answer["series"]
    for step, value in zip(answer["steps"], one["values"], strict=True):
        if value is not None:
            found = real.get(f"/steps/{step}/metrics")
            assert value == found["metrics"][K3]
            assert answer["comparable"][step - 1] == found["comparable"]
    missing = [step for step, value in enumerate(one["values"], 1) if value is None]
    assert missing == [3, 8]
    assert answer["reasons"][2] == "no rank handed over both streams"
    assert answer["reasons"][7] == "the step is still open"
    assert answer["complete"][7] == "open"


def test_the_tokens_that_are_not_finite_are_counted(
    real: Service, session: stagescope.Session
) -> None:
    answer = real.get("/series", metric=K3)
    assert answer["nonfinite"] == [0, 0, None, 1, 0, 0, 0, None]
    (metrics,) = [real.get("/steps/4/metrics")["nonfinite"]]
    assert metrics["old"]["nan"] == 1
    series = session.series(K3)
    assert series["nonfinite"] == tuple(answer["nonfinite"])
    assert "some tokens are not finite and not counted: step 4" in series.notes()


def test_superseded_steps_are_marked_where_they_are_requested(real: Service) -> None:
    every = real.get("/series", metric=K3, superseded=True)
    pairs = list(zip(every["steps"], every["attempts"], every["superseded_by"], strict=True))
    assert pairs[-5:] == [(6, 1, 2), (6, 2, None), (7, 1, 2), (7, 2, None), (8, 2, None)]
    first = real.get("/series", metric=K3, attempt=1)
    assert first["steps"] == [1, 2, 3, 4, 5, 6, 7]
    assert first["superseded_by"] == [None] * 5 + [2, 2]


@pytest.mark.parametrize("by", ["rank", "round"])
def test_slices_are_those_of_the_step(real: Service, by: str) -> None:
    answer = real.get("/series", metric=K3, by=by)
    rows = real.get(f"/steps/2/{by}s")["rows"]
    assert [one[by] for one in answer["series"]] == [row[by] for row in rows] == [0, 1]
    assert [one["values"][1] for one in answer["series"]] == [row["k3_kl"] for row in rows]
    assert [one["values"][2] for one in answer["series"]] == [None, None]
    if by == "rank":
        assert [one["name"] for one in answer["series"]] == ["actor 0", "actor 1"]
        (alone,) = real.get("/series", metric=K3, by=by, rank=1)["series"]
        assert alone["values"] == answer["series"][1]["values"]


def test_scalars_over_ranks_and_by_rank(real: Service, session: stagescope.Session) -> None:
    answer = real.get("/series", metric="loss", to=5)
    assert answer["kind"] == "scalar"
    (one,) = answer["series"]
    assert one["values"] == [1.5, 2.5, 3.5, "nan", None]
    assert (one["low"][0], one["high"][0]) == (1.0, 2.0)
    assert answer["reasons"] == [None] * 4 + ["no rank logged it"]
    by_rank = session.series("loss", by="rank", from_step=3, to_step=4)
    assert by_rank["actor 0"] == (3.0, 4.0)
    assert by_rank["actor 1"][0] == 4.0
    assert math.isnan(by_rank["actor 1"][1])


def test_the_newest_first_where_there_are_more(real: Service) -> None:
    newest = real.get("/series", metric=K3, limit=3)
    assert newest["steps"] == [6, 7, 8]
    before = real.get("/series", metric=K3, limit=3, to=newest["earlier_to"])
    assert before["steps"] == [3, 4, 5]
    assert real.get("/series", metric=K3, to=2)["earlier_to"] is None


def test_a_name_that_is_not_there(real: Service, session: stagescope.Session) -> None:
    for wrong, meant in (("k3_kl", K3), ("los", "loss"), ("rollout_corr/k3kl", K3)):
        problem = real.problem(404, "/series", metric=wrong)
        assert f"did you mean {meant}" in problem["advice"]
        assert problem["advice"].endswith("see /runs/r/metrics for the names")
    with pytest.raises(NotFound, match="whole step"):
        session.series("rollout_corr/training_ppl", by="rank")
    with pytest.raises(InvalidInput, match="scalar"):
        session.series("loss", by="round")
    for by in (None, "rank"):
        with pytest.raises(InvalidInput, match="stage 'nosuch' cannot be chosen"):
            session.series(K3, by=by, stage="nosuch")
    with pytest.raises(NotFound, match="logged in no stage 'nosuch'"):
        session.series("loss", stage="nosuch")


def test_a_refused_question_leaves_no_transaction_open(real: Service) -> None:
    pool = real.catalogue._engine.pool
    assert isinstance(pool, QueuePool)
    gc.collect()
    gc.disable()  # what the error keeps alive is not freed
    try:
        before = pool.checkedout()
        real.problem(404, "/series", metric="rollout_corr/training_ppl", by="rank")
        assert pool.checkedout() == before
    finally:
        gc.enable()


def test_names_are_those_of_all_ranks_and_steps(real: Service) -> None:
    columns = {"attempt_id": 90, "role": "actor", "stage": "actor_update", "work_key": "w"}
    steps = [{"attempt_id": 90, "step": step, "closed_wall": 1.0} for step in range(1, 31)]
    scalars = [{"name": "a_first", "step": 30, "rank": rank} for rank in range(5_001)]
    scalars += [
        {"name": "entropy", "step": 30, "rank": 5_001},
        {"name": "val/reward", "step": 2, "rank": 5_002},
    ]
    real.store.submit(
        [
            *training(90, run="wide"),
            *(Put("steps", step) for step in steps),
            *(
                Put("scalars", {**columns, "incarnation": f"i{row['rank']}", **row, "value": 1.0})
                for row in scalars
            ),
        ]
    ).result(60)
    for wrong, meant in (("entropi", "entropy"), ("val/rewards", "val/reward")):
        problem = real.problem(404, "/series", run="wide", metric=wrong)
        assert f"did you mean {meant}" in problem["advice"]
    late = real.get("/series", run="wide", metric="val/reward", **{"from": 28})
    assert (late["kind"], late["steps"], late["series"]) == ("scalar", [28, 29, 30], [])
    assert late["reasons"] == ["no rank logged it"] * 3
    asked = {"run": "wide", "metric": "val/reward", "from": 28}
    problem = real.problem(404, "/series", **asked, rank=7)
    assert problem["detail"].startswith("there is no val/reward of any role, rank 7")
    problem = real.problem(404, "/series", **asked, stage="actor_updat")
    assert "did you mean actor_update" in problem["advice"]


@pytest.mark.parametrize("asked", [{"metric": K3}, {"metric": K3, "by": "rank"}])
def test_the_number_of_queries_does_not_grow_with_the_steps(
    real: Service, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str]
) -> None:
    asking = real.catalogue._reading
    queries: list[int] = []

    def counted() -> object:
        queries.append(1)
        return asking()

    monkeypatch.setattr(real.catalogue, "_reading", counted)
    taken = []
    for limit in (1, 2, 100):
        queries.clear()
        real.get("/series", limit=limit, **asked)
        taken.append(len(queries))
    # One more for each of the 8 steps would be 16 and more: `also_live` is remembered for a while.
    assert max(taken) < 16, taken


def test_the_names_of_a_run_are_those_that_can_be_asked_for(
    real: Service, session: stagescope.Session
) -> None:
    names = session.metric_names()
    kinds = dict(zip(names["name"], names["kind"], strict=True))
    assert (kinds[K3], kinds["loss"]) == ("metric", "scalar")
    assert dict(zip(names["name"], names["unit"], strict=True))[K3] == "nat"
    assert len(session.metric_names("r", limit=3)) == 3
    for name in (K3, "loss", names["name"][0]):
        assert real.get("/series", metric=name)["series"]
    env = real.environment()
    assert K3 in invoke("series", env=env).stdout
    real.problem(404, "/runs/none/metrics")


def test_the_terminal_draws_and_says_gaps(real: Service) -> None:
    where = real.environment()
    env = {**where, "COLUMNS": "80"}
    text = invoke("series", K3, "--by", "rank", env=env).stdout
    assert "actor 0" in text
    assert "no value at step 3: no rank handed over both streams" in text
    assert "attempts 1, 2" in text
    assert max(map(len, text.splitlines())) <= 80
    loss = invoke("series", "loss", env=env).stdout
    assert "not finite at step 4" in loss
    assert invoke("series", "k3_kl", env=env).exit_code == 4
    table = invoke("series", "loss", "--table", env=env).stdout
    assert "no rank logged it" in table


def test_a_sparkline_shows_peaks_gaps_and_what_is_not_finite() -> None:
    assert sparkline([0.0, 1.0, None, math.nan], 10, bars="_#") == "_# !"
    narrow = sparkline([0.0] * 50 + [9.0] + [0.0] * 49, 10, bars="_#")
    assert len(narrow) == 10
    assert narrow.count("#") == 1  # a single peak is not averaged away
    assert sparkline([1.0, 1.0], 5, bars="_#") == "__"


def test_a_window_that_ends_before_it_begins_is_refused(real: Service) -> None:
    answer = real.read.get("/series", params={"metric": "loss", "from": 5, "to": 3})
    assert answer.status_code == 422
    assert "from is 5 and to is 3" in answer.text


def test_a_missing_stage_or_rank_is_named_with_those_that_exist(real: Service) -> None:
    problem = real.problem(404, "/series", metric="loss", stage="actor_compute_logprob")
    assert STAGE in problem["advice"]
    for metric in (K3, "loss"):
        problem = real.problem(404, "/series", metric=metric, by="rank", rank=7)
        assert "rank 7" in problem["wrong"]
        assert "actor ranks 0-1" in problem["expected"]
    assert "any role" not in str(real.problem(404, "/series", metric=K3, role="critic"))


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Attempt 1 did steps 1 to 4; rank 0 of attempt 2 did 2 to 4 and went back to 3 inside it."""
    with service(tmp_path_factory.mktemp("home")) as running:
        train(running, range(1, 5), "a1", 1_000.0)
        ranks = [
            Rank(running, rank=rank, key="a2", start=2_000.0, resumed_from_step=1)
            for rank in (0, 1)
        ]
        for at, steps in enumerate(((2, 3, 4, 3, 4), (2, 3, 4))):
            for go, step in enumerate(steps):
                handed = payload(seed=10 * go + at, first_sample=100 * go + 4 * at)
                again = {"occurrence": 1} if go > 2 else {}
                ranks[at].stage(STAGE, step, handed, scalars={"loss": float(go)}, **again)
        for rank in ranks:
            rank.say("end_step", step=4)
        yield running


AGAIN = [{"role": "actor", "ranks": [0], "stages": [STAGE]}]


@pytest.mark.parametrize("metric", [K3, "loss"])
def test_a_step_that_was_begun_again_within_its_attempt_is_marked(
    twice: Service, metric: str
) -> None:
    for by in ({}, {"by": "rank"}):
        answer = twice.get("/series", metric=metric, **by)
        assert answer["attempts"] == [1, 2, 2, 2]
        assert answer["begun_again"] == [[], [], AGAIN, AGAIN]
    # The attempt that did each step once has no mark, also where its steps are asked for.
    every = twice.get("/series", metric=metric, superseded=True)
    marked = [
        (step, attempt)
        for step, attempt, ranks in zip(
            every["steps"], every["attempts"], every["begun_again"], strict=True
        )
        if ranks
    ]
    assert marked == [(3, 2), (4, 2)]
    assert twice.get("/series", metric=metric, to=2)["begun_again"] == [[], []]
    assert twice.get("/series", metric=metric, **{"from": 10**6})["begun_again"] == []


def test_the_answers_about_a_step_say_that_it_was_begun_again(twice: Service) -> None:
    nouns = ("metrics", "rounds", "ranks", "tokens", "scalars", "stages")
    for noun in nouns:
        assert twice.get(f"/steps/4/{noun}")["begun_again"] == AGAIN, noun
        assert twice.get(f"/steps/2/{noun}")["begun_again"] == [], noun
        assert twice.get(f"/steps/4/{noun}", attempt=1)["begun_again"] == [], noun
    rows = twice.get("/steps")["rows"]
    marked = [(row["step"], row["attempt"]) for row in rows if row["begun_again"]]
    assert marked == [(4, 2), (3, 2)]


def test_the_number_of_a_step_begun_again_is_marked(twice: Service) -> None:
    where = twice.environment()
    env = {**where, "COLUMNS": "80"}
    in_one = "repeated by actor rank 0: both executions count in the numbers"
    for command in ("metrics", "rounds", "ranks", "tokens", "scalars", "stages"):
        text = " ".join(invoke(command, "3", env=env).stdout.split())
        assert in_one in text, command
        assert "repeated" not in invoke(command, "2", env=env).stdout, command
    in_several = "repeated in steps 3-4 by actor rank 0: both executions count in the numbers"
    for arguments in (("steps",), ("series", K3), ("series", "loss", "--table")):
        shown = invoke(*arguments, env=env).stdout
        assert in_several in " ".join(shown.split()), arguments
        assert max(map(len, shown.splitlines())) <= 80
    by_rank = invoke("series", "loss", "--by", "rank", env=env).stdout.splitlines()
    marks = next(line for line in by_rank if set(line) == {" ", "|", "^"})
    assert marks == " " * len("actor 0  ") + " |^^"
    assert "| begin of attempt 2 at step 2" in by_rank
    with twice.session() as session:
        assert session.step(3).metrics().begun_again == AGAIN
        assert in_one in session.step(3).metrics()._repr_html_()
        found = session.series(K3)
        assert in_several in found._repr_html_()
        assert found["begun_again"][2:] == (AGAIN, AGAIN)
        assert found.to_polars()["begun_again"].dtype == found[:0].to_polars()["begun_again"].dtype


def test_the_steps_that_only_a_superseded_attempt_has_are_named(tmp_path: Path) -> None:
    with service(tmp_path) as live:
        train(live, range(1, 10), "a1", 1_000.0)
        train(live, range(1, 4), "a2", 2_000.0)
        for metric in ("loss", K3):
            whole = live.get("/series", metric=metric)
            assert (whole["steps"], whole["attempts"]) == ([1, 2, 3], [2, 2, 2])
            assert whole["note"].startswith("attempt 1 has steps 4-9, which no current attempt")
            late = live.get("/series", metric=metric, **{"from": 5, "to": 9})
            assert (late["steps"], late["note"][:23]) == ([], "attempt 1 has steps 5-9")
            assert live.get("/series", metric=metric, attempt=1)["note"] is None
            assert live.get("/series", metric=metric, **{"to": 3})["note"] is None
        env = live.environment()
        text = invoke("series", "loss", "--attempt", "1", env=env).stdout
        said = " ".join(text.split())
        assert "superseded: steps 1-9 of attempt 1, because attempt 2 resumed before them" in said
        assert "done again" not in text
        empty = invoke("series", "loss", "--from", "5", "--to", "9", env=env).stdout
        assert "(no steps)" in empty
        assert "attempt 1 has steps 5-9" in empty
