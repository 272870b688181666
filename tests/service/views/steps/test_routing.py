"""Routes of a mixture of experts: from what the probe counts to the answer and the doctor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.api import Rank, Service
from tests.support.routes import Fault, Routed, routed

LOG_PROB = "actor_compute_log_prob"


def run_of(live: Service, name: str, step: Routed, parts: int = 1, steps: int = 1) -> str:
    """Report a training whose steps have these tokens, in microbatches; return its name."""
    rank = Rank(live, run=name, world_size=1)
    size = len(step.mask) // parts
    for number in range(1, steps + 1):
        for part in range(parts):
            rows = slice(part * size, (part + 1) * size)
            sent = step.payload(rows, first_sample=part * size)
            rank.stage(LOG_PROB, number, sent, microbatch=part)
    rank.begin(LOG_PROB, steps + 1)
    return name


def same_of(step: Routed) -> Any:
    """Whether rollout and trainer chose the same experts, bool [rows, tokens, layers]."""
    rollout, trainer = step.of_tokens
    return (np.sort(rollout, -1) == np.sort(trainer, -1)).all(-1)


def test_the_answer_is_what_the_routes_say(live: Service) -> None:
    step = routed(flips=0.02)
    found = live.get(f"/steps/1/routing?run={run_of(live, 'moe', step)}")
    on = step.mask != 0
    same = same_of(step)
    hit, d = ~same.all(-1)[on], np.abs(step.p.astype(float) - step.q)[on]
    assert (found["tokens"], found["hit"]) == (on.sum(), hit.sum())
    assert found["mean_hit"] == pytest.approx(d[hit].mean())
    assert found["mean_same"] == pytest.approx(d[~hit].mean())
    assert found["carried"] == pytest.approx(d[hit].sum() / d.sum())
    excess = (d[hit].sum() - hit.sum() * d[~hit].mean()) / d.sum()
    assert found["excess"] == pytest.approx(excess)
    for row in found["rows"]:
        assert row["agreement"] == pytest.approx(same[on][:, row["layer"]].mean())
        half = [same[:, :32, row["layer"]].mean(), same[:, 33:, row["layer"]].mean()]
        assert row["by_round"] == pytest.approx(half)
    assert [row["hit"] for row in found["rounds"]] == [
        (~same[:, :32].all(-1)).sum(), (~same[:, 33:].all(-1)).sum()
    ]  # fmt: skip
    assert f"({hit.sum()} of {on.sum()})" in found["text"]
    assert found["faults"] == []
    series = live.get("/series", run="moe", metric="routing/agreement")["series"]
    assert series[0]["values"][0] == pytest.approx(same[on].mean())
    worst = found["worst"][0]
    row, position = int(worst["sample_uid"][1:]), worst["position"]
    differing = np.flatnonzero(~same[row, position])
    assert [each["layer"] for each in worst["differing"]] == differing.tolist()
    assert (
        worst["differing"][0]["rollout"] == step.of_tokens[0][row, position, differing[0]].tolist()
    )


def test_parts_add_up_to_the_step(live: Service) -> None:
    step = routed(flips=0.05, seed=1)
    whole = live.get(f"/steps/1/routing?run={run_of(live, 'whole', step)}")
    parts = live.get(f"/steps/1/routing?run={run_of(live, 'parts', step, parts=4)}")
    for name in ("rows", "rounds", "hit", "text", "lacking"):
        assert parts[name] == whole[name], name


def test_rows_that_repeat_others_count_once(live: Service) -> None:
    """A batch is filled up with copies of rows: no number depends on them."""
    step = routed(rows=4, flips=0.1, seed=2)
    once = live.get(f"/steps/1/routing?run={run_of(live, 'once', step)}")
    rank, rows = Rank(live, run="twice", world_size=1), [3, 0, 1, 2, 3]
    sent = step.of_rows(rows).payload()
    sent["strings"]["sample_ids"] = [f"g{row}" for row in rows]
    rank.stage(LOG_PROB, 1, sent)
    rank.begin(LOG_PROB, 2)
    twice = live.get("/steps/1/routing?run=twice")
    for name in ("rounds", "hit", "text", "lacking"):
        assert twice[name] == once[name], name
    for one, other in zip(once["rows"], twice["rows"], strict=True):
        exact = one.keys() - {"best_other", "best_other_agreement"}
        assert {name: other[name] for name in exact} == {name: one[name] for name in exact}


@pytest.mark.parametrize(
    ("fault", "rule", "says"),
    [
        ("empty", "routes_empty", "The rollout's routes are zeros in layer 1"),
        ("shifted", "routes_shifted", "The rollout's routes are one token late"),
        ("half shifted", "routes_shifted", "The rollout's routes are one token late in a part of"),
        ("swapped", "layers_swapped", "The rollout's routes of layers 1 and 2 are swapped"),
        ("missing", "routes_missing", "The rollout's routes are missing for 50% of the tokens"),
    ],
)
def test_a_planted_fault_is_the_doctor_s_first_line(
    live: Service, fault: Fault, rule: str, says: str
) -> None:
    run = run_of(live, f"moe-{fault.replace(' ', '-')}", routed(fault), steps=3)
    rows = live.get(f"/runs/{run}/diagnosis")["rows"]
    assert (rows[0]["rule"], rows[0]["verdict"]) == (rule, "found")
    assert rows[0]["sentence"].startswith(says)
    assert rows[0]["since_step"] == 1
    found = live.get(f"/steps/1/routing?run={run}")
    assert [each["text"].startswith(says) for each in found["faults"]] == [True]
    assert ("say nothing about the mismatch" in found["text"]) is (
        fault in ("shifted", "half shifted", "swapped")
    )


@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        ("shifted", "token before"),
        ("swapped", "other layer"),
        ("missing", "no route of the rollout"),
    ],
)
def test_text_shows_what_proves_the_fault(live: Service, fault: Fault, shows: str) -> None:
    run = run_of(live, f"text-{fault}", routed(fault, flips=0.2))
    with live.session("read") as session:
        routing = session.step(1, run=run).routing()
    lines = routing.lines(width=400)
    assert any(shows in line for line in lines)
    assert "The rollout&#x27;s routes" in routing._repr_html_()
    if fault == "swapped":
        assert [line.split("layer ")[-1][0] for line in lines if line.startswith("    1 ")] == ["2"]


def test_healthy_routes_are_silent(live: Service) -> None:
    run = run_of(live, "moe-healthy", routed(), steps=3)
    rows = live.get(f"/runs/{run}/diagnosis")["rows"]
    assert [row["sentence"] for row in rows if row["verdict"] == "found"] == []


def test_flips_that_explain_the_mismatch_are_a_cause(live: Service) -> None:
    run = run_of(live, "moe-flips", routed(flips=0.05, apart=0.6), steps=3)
    row = live.get(f"/runs/{run}/diagnosis")["rows"][0]
    assert row["rule"] == "routes_explain"
    assert row["sentence"].startswith("Tokens with another expert explain 8")


def test_one_side_alone_says_what_to_record(live: Service) -> None:
    step = routed()
    sent = {**step.tensors()}
    del sent["trainer_routed_experts"]
    from stagescope_workers import routing

    recorded = {n: (v.dtype.name, v.shape, v, None) for n, v in sent.items()}
    rest = {n: t for n, t in recorded.items() if not n.endswith("experts")}
    rank = Rank(live, run="one-side", world_size=1)
    payload = {"schema": 1, "tensors": rest | routing.count(recorded), "strings": {}, "meta": {}}
    rank.stage(LOG_PROB, 1, payload)
    rank.begin(LOG_PROB, 2)
    found = live.get("/steps/1/routing?run=one-side")
    assert "record trainer_routed_experts" in found["text"]
    assert found["faults"] == []


def test_the_picture_has_a_cell_for_each_layer_and_round(live: Service) -> None:
    step = routed("empty", flips=0.05, seed=2)
    drawn = live.get("/figures/routing", run=run_of(live, "drawn", step), step=1)
    (trace,) = drawn["figure"]["data"]
    shares = [1.0 - each[..., 0].mean() for each in (same_of(step)[:, :32], same_of(step)[:, 33:])]
    assert trace["z"][0] == pytest.approx(shares)
    assert trace["z"][1] == [None, None]  # a layer of zeros is not compared
    assert drawn["note"] == "The rollout's routes are zeros in layer 1."


def test_a_step_without_routes_says_what_to_record(live: Service) -> None:
    step = routed()
    sent = {n: (v.dtype.name, v.shape, v, None) for n, v in step.tensors().items()}
    tensors = {n: tensor for n, tensor in sent.items() if not n.endswith("experts")}
    rank = Rank(live, run="dense", world_size=1)
    rank.stage(LOG_PROB, 1, {"schema": 1, "tensors": tensors, "strings": {}, "meta": {}})
    rank.begin(LOG_PROB, 2)
    answer = live.read.get("/steps/1/routing?run=dense")
    assert answer.status_code == 404
    assert "trainer_routed_experts" in answer.json()["expected"]
