"""Rules held against step summaries: what is written, what follows, once, and over restarts."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from tests.support.chat_services import SECRET, TOKEN, chat_service
from tests.support.measure import payload
from tests.support.stores import evidence_of
from tests.support.triggering import PAGE, RuleBench, hook, rule, rules_of, run, training

from stagescope_service.coordinator.rules.watch import TriggerWatch
from stagescope_service.core.captures import agreement
from stagescope_service.core.findings import finding
from stagescope_service.core.instructions import NonFiniteScalars
from stagescope_service.rules import budget
from stagescope_service.rules.document import Rules, defaults
from stagescope_service.rules.replay import replay
from stagescope_service.rules.watch import REACH
from stagescope_service.store.contract import Put
from stagescope_service.store.ring import RingEntry
from stagescope_service.store.tables.findings import FiredActions
from stagescope_service.views.findings.groups import outcomes
from stagescope_wire.errors import Conflict, InvalidPlan, NotFound

PIN = {"finding": {}, "pin": 2}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[RuleBench]:
    with training(tmp_path) as opened:
        yield opened


def test_the_defaults_are_in_force_where_nothing_was_given(bench: RuleBench) -> None:
    async def work() -> None:
        await bench.triggers.open()
        for step in range(1, 6):
            await bench.step(step, 0.001)
        await bench.step(6, 1.0)
        await bench.step(7, 0.001, poison=math.nan)

    run(work)
    row = bench.catalogue.trigger_rules()
    assert row is not None
    assert (row["revision"], row["source"]) == (1, "defaults")
    fired = {(step, name) for _, step, name in bench.fired()}
    assert fired == {
        (6, "worst_round"), (6, "probs_diff_mean"), (6, "pearson"), (7, "non_finite_log_probs"),
    }  # fmt: skip
    (finding,) = bench.findings("trigger_non_finite_log_probs")
    assert (finding["severity"], finding["stage"]) == ("error", "actor_compute_log_prob")
    assert (finding["role"], finding["rank"]) == ("actor", 1)
    assert evidence_of(finding)["round"] == 1
    assert evidence_of(finding)["metric"] == "nonfinite/old_nan"
    token = evidence_of(finding)["token"]
    assert (token["sample_uid"], token["position"], token["p"]) == ("sample-6", 8, "nan")
    assert "token 8 of sample-6" in finding["message"]
    assert {entry.key.step for entry in pinned(bench)} == {5, 6, 7}
    assert {row["step"] for row in bench.catalogue.pinned_steps("r")} == {5, 6, 7}


def test_no_rule_fires_in_an_experiment(bench: RuleBench) -> None:
    async def work() -> None:
        await bench.triggers.put(rules_of(rule()), by="me")
        bench.run = "bisect-r-5"
        await bench.step(1, noise=1.0)
        assert bench.fired() == []
        bench.run = "r"
        await bench.step(1, noise=1.0, key="a2")

    run(work)
    assert [(step, name) for _, step, name in bench.fired()] == [(1, "mean")]


@pytest.mark.parametrize("stage", ["actor_compute_log_prob", "actor_update"])
def test_the_numbers_of_an_update_hold_its_own_steps(
    bench: RuleBench, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.triggering.STAGE", stage)

    async def work() -> None:
        await bench.triggers.open()
        await bench.step(1, noise=0.5)

    run(work)
    (found,) = bench.findings("trigger_probs_diff_mean")
    is_told = "these are numbers of actor_update: its mini-batches" in found["advice"]
    assert is_told is (stage == "actor_update")


def test_a_scalar_that_is_not_finite_is_found_where_it_was_logged(bench: RuleBench) -> None:
    async def work() -> None:
        await bench.triggers.open()
        await bench.step(1, scalars={0: {"loss": 0.5}, 1: {"loss": 0.5}})
        await bench.step(2, scalars={0: {"loss": 0.5}, 1: {"loss": math.nan, "kl": -math.inf}})

    run(work)
    assert bench.fired() == [(1, 2, "non_finite_scalars")]
    (finding,) = bench.findings("trigger_non_finite_scalars")
    assert (finding["severity"], finding["step"]) == ("error", 2)
    assert [finding[name] for name in ("stage", "role", "rank")] == ["actor_update", "actor", 1]
    assert finding["message"].endswith(
        "kl is -inf at step 2, stage actor_update, actor rank 1; also not finite: loss"
    )
    assert evidence_of(finding)["ranks"][0] == ["actor", 1]
    assert [(row["name"], row["value"]) for row in evidence_of(finding)["scalars"]] == [
        ("kl", "-inf"), ("loss", "nan"),
    ]  # fmt: skip
    assert [(link["noun"], link["step"]) for link in finding["see"] or ()] == [("scalars", 2)]


async def log_open(bench: RuleBench, step: int, rank: int, **scalars: float) -> None:
    """Log scalars in a stage of a step that stays open."""
    sender = bench._sender("a1", rank)
    work = {"step": step, "stage": "critic_update"}
    said = [bench._say(sender, "begin", work)]
    said.append(bench._say(sender, "end", {**work, "status": "ok", "scalars": scalars}))
    await bench.local.record(said)


def test_a_lasting_nan_is_not_said_again_after_a_restart(bench: RuleBench) -> None:
    async def work() -> None:
        await bench.triggers.open()
        await bench.step(1, scalars={0: {"loss": 0.5}, 1: {"loss": 0.5}})
        await bench.step(2, scalars={0: {"loss": math.nan}})
        await bench.restarted().open()
        await log_open(bench, 3, 0, loss=math.nan)
        assert bench.findings("non_finite_scalars") == []
        await log_open(bench, 3, 0, kl=math.nan)

    run(work)
    (finding,) = bench.findings("non_finite_scalars")
    assert "kl" in finding["message"]
    assert [(link["noun"], link["step"]) for link in finding["see"] or ()] == [("scalars", 3)]


def test_a_scalar_that_is_not_finite_is_said_before_its_step_closes(bench: RuleBench) -> None:
    early: list[list[tuple[object, ...]]] = []

    def now() -> None:
        rows = bench.findings("non_finite_scalars")
        early.append([(row["step"], row["rank"], row["severity"]) for row in rows])

    async def log(step: int, rank: int, **scalars: float) -> None:
        await log_open(bench, step, rank, **scalars)
        now()

    async def work() -> None:
        await bench.triggers.open()
        await bench.step(1, scalars={0: {"loss": 0.5}, 1: {"loss": 0.5}})
        await log(2, 1, loss=math.nan, kl=1.0)
        await log(2, 0, loss=math.nan)  # nothing new: the rule names every rank
        await log(2, 0, kl=math.inf)
        await bench.step(2, scalars={0: {"loss": 0.5}})
        now()
        await log(3, 1, loss=math.nan)

    run(work)
    first, second = (2, 1, "error"), (2, 0, "error")
    assert [sorted(rows) for rows in early] == [
        [first], [first], [second, first], [], [],
    ]  # fmt: skip
    (finding,) = bench.findings("trigger_non_finite_scalars")
    assert finding["step"] == 2


def test_the_first_scalar_that_arrived_is_said_also_where_many_arrive_at_once(
    bench: RuleBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, is_second = TriggerWatch._found_before, threading.Event()

    def overtaken(watch: TriggerWatch, attempt_id: int) -> set[str]:
        reads.append(attempt_id)
        is_second.wait(0.5) if len(reads) == 1 else is_second.set()
        return reading(watch, attempt_id)

    reads: list[int] = []
    monkeypatch.setattr(TriggerWatch, "_found_before", overtaken)

    async def work() -> None:
        await bench.triggers.open()
        await bench.step(1, scalars={0: {"loss": 0.5}, 1: {"loss": 0.5}})
        said = [
            finding("non_finite_scalars", "loss", run="r", attempt_id=1, wall=1.0, step=step)
            for step in (2, 3, 4)
        ]
        await asyncio.gather(
            *(
                bench.triggers.warn_non_finite(NonFiniteScalars(1, frozenset({"loss"}), each))
                for each in said
            )
        )

    run(work)
    assert [row["step"] for row in bench.findings("non_finite_scalars")] == [2]


def test_each_scalar_that_is_not_finite_is_said_with_its_own_ranks(bench: RuleBench) -> None:
    async def work() -> None:
        await bench.triggers.open()
        await bench.step(
            1, scalars={0: {"grad_norm": math.nan}, 1: {"grad_norm": 0.5, "kl": -math.inf}}
        )

    run(work)
    (finding,) = bench.findings("trigger_non_finite_scalars")
    assert "actor rank 0; also not finite: kl (actor rank 1)" in finding["message"]


def test_every_rank_with_something_not_finite_is_named(bench: RuleBench) -> None:
    poisoned = payload()["tensors"]["old_log_probs"]
    poisoned[2][1, 1] = math.nan
    nan = {"old_log_probs": poisoned}

    async def work() -> None:
        await bench.triggers.open()
        await bench.step(1, scalars={0: {"loss": math.nan}, 1: {"loss": math.nan}}, tensors=nan)
        await bench.step(2, scalars={1: {"loss": math.nan}})  # the rule cools down

    run(work)
    (finding,) = bench.findings("trigger_non_finite_scalars")
    assert (finding["step"], finding["role"], finding["rank"]) == (1, "actor", None)
    assert "loss is nan at step 1, stage actor_update, actor ranks 0-1" in finding["message"]
    (finding,) = bench.findings("trigger_non_finite_log_probs")
    assert (finding["role"], finding["rank"]) == ("actor", None)
    assert (
        "is up to 1 a rank at step 1, stage actor_compute_log_prob, actor ranks 0-1"
        in (finding["message"])
    )
    assert evidence_of(finding)["affected"] == [["actor", 0], ["actor", 1]]


@pytest.mark.parametrize("restarted", [False, True])
def test_what_begins_on_another_rank_or_in_another_scalar_is_said_at_once(
    bench: RuleBench, restarted: bool
) -> None:
    nan, both = {"loss": math.nan}, {"loss": math.nan, "grad_norm": math.nan}
    runs = {"r": {"capture": "auto", "budget": {"captures": 9}}}

    async def step(number: int, scalars: dict[int, dict[str, float]], poison: float | None) -> None:
        if restarted:
            await bench.restarted().open()
        await bench.step(number, 0.001, scalars=scalars, poison=poison)

    async def work() -> None:
        await bench.triggers.put(Rules.parse({**defaults().wire(), "runs": runs}), by="me")
        await step(1, {1: {"loss": 0.5}}, None)
        for number in (2, 3):
            await step(number, {1: nan}, None)
        await step(4, {1: nan, 0: nan}, math.nan)
        for number in range(5, 8):
            await step(number, {1: both, 0: nan}, math.nan)
        await bench.log(7, 0, grad_norm=math.inf)  # after its step closed
        for number in range(8, 16):
            await step(number, {1: both, 0: both}, math.nan)

    run(work)
    fired = [step for _, step, name in bench.fired() if name == "non_finite_scalars"]
    assert fired == [2, 4, 5, 7]
    findings = {row["step"]: row for row in bench.findings("trigger_non_finite_scalars")}
    assert [row["message"].partition(": ")[2] for row in findings.values()] == [
        "loss is nan at step 2, stage actor_update, actor rank 1",
        "loss is nan at step 4, stage actor_update, actor rank 0; already reported: loss on actor "
        "rank 1",
        "grad_norm is nan at step 5, stage actor_update, actor rank 1; already reported: loss on "
        "actor ranks 0-1",
        "grad_norm is inf at step 7, stage actor_update, actor rank 0; already reported: loss on "
        "actor ranks 0-1; grad_norm on actor rank 1",
    ]
    assert all("named" not in evidence_of(row) for row in findings.values())
    # What costs followed of the first alone, and says why it did not of the others.
    (spec,) = bench.orders.specs
    assert (spec["ranks"], spec["stages"]) == ([1], ["actor_update"])
    actions = [bench.actions(number, "non_finite_scalars") for number in fired]
    assert actions[0]["capture"] == {"capture_id": "capture-1"}
    assert actions[1:] == [{"cools_since": 2}] * 3
    TypeAdapter(FiredActions).validate_python(actions[1])  # as answers have it
    assert outcomes([actions[1]]) == ["not taken again: the rule cools down from those of step 2"]
    refused = {evidence_of(row)["rule"] for row in bench.findings("capture_refused")}
    assert refused == {"non_finite_log_probs"}  # while that of the scalars is under way
    # The ranks that log-probs concern are told apart, too.
    found = bench.findings("trigger_non_finite_log_probs")
    assert [(row["step"], row["rank"]) for row in found] == [(4, 1), (14, 1)]


def test_a_scalar_that_comes_after_its_step_closed(bench: RuleBench) -> None:
    rules = rules_of(
        rule("twice", metric="nonfinite_scalar/loss", by="rank", when={">": 0}, **{"for": 2}),
        rule("all", metric="nonfinite_scalar/*", when={">": 1}),
    )

    async def work() -> None:
        await bench.triggers.put(rules, by="me")
        await bench.step(1, scalars={0: {"loss": math.nan}})
        await bench.step(2, scalars={0: {"loss": 0.5}})
        await bench.step(3, scalars={0: {"loss": math.nan}})
        await bench.step(4)
        assert bench.fired() == []
        await bench.log(2, 0, loss=math.inf, other=math.nan)
        await bench.log(2, 1, other=math.nan)

    run(work)
    assert bench.fired() == [(1, 2, "all"), (1, 2, "twice"), (1, 3, "twice")]
    assert "loss is inf at step 2" in bench.firing(2, "twice")["message"]


def test_a_service_takes_newer_defaults_but_keeps_rules_that_were_given(bench: RuleBench) -> None:
    old = Rules(defaults().rules[:1])

    async def work() -> None:
        await bench.triggers._put(old, by="stagescope", source="defaults")
        await bench.restarted().open()
        assert bench.catalogue.trigger_rules()["document"] == defaults().wire()  # type: ignore[index]
        await bench.triggers.put(old, by="me")
        await bench.restarted().open()

    run(work)
    row = bench.catalogue.trigger_rules()
    assert row is not None
    assert (row["document"], row["revision"]) == (old.wire(), 3)


def pinned(bench: RuleBench) -> list[RingEntry]:
    return [
        entry for entry in bench.local.ingestors.worker(None).reader.ring.entries() if entry.pinned
    ]


def test_a_firing_says_where_and_with_which_numbers(bench: RuleBench) -> None:
    rules = rules_of(
        rule("rank", by="rank", when={">": 0.5, "median_ratio": 2}),
        rule("round", by="round"),
        rule("staleness", staleness=0),
        rule("stage", by="stage"),
    )

    async def work() -> None:
        await bench.triggers.put(rules, by="me")
        for step in range(1, 5):
            await bench.step(step, 0.01)
        await bench.step(5, 1.0)

    run(work)
    assert bench.fired() == [(1, 5, name) for name in ("rank", "round", "stage", "staleness")]
    of_rank = bench.firing(5, "rank")
    assert (of_rank["role"], of_rank["rank"]) == ("actor", of_rank["evidence"]["ranks"][0][1])
    assert of_rank["evidence"]["series"] == 2
    assert 0.0 < of_rank["evidence"]["median"] < 0.05 < of_rank["evidence"]["value"]
    of_round = bench.firing(5, "round")
    worst = max(of_round["evidence"]["hits"], key=lambda hit: hit["value"])
    assert of_round["round"] == worst["round"] == of_round["evidence"]["token"]["round"]
    (finding,) = bench.findings("trigger_rank")
    assert finding["message"] == of_rank["message"]
    assert "median" in finding["message"]


def test_missing_ranks_and_slow_stages(bench: RuleBench) -> None:
    rules = rules_of(
        rule("missing", metric="missing_ranks", when={">": 0}),
        rule("missing-twice", metric="missing_ranks", when={">": 0}, **{"for": 2}),
        rule("slow", metric="stage_seconds", when={"median_ratio": 3}, by="rank"),
    )

    async def work() -> None:
        await bench.triggers.put(rules, by="me")
        for step in range(1, 5):
            await bench.step(step)
        await bench.step(5, seconds=9.0)
        await bench.step(6, absent=[1])
        await bench.step(7)
        await bench.step(8, absent=[1])
        await bench.step(9, absent=[1])

    run(work)
    assert bench.fired() == [
        (1, 5, "slow"), (1, 6, "missing"), (1, 8, "missing"), (1, 9, "missing"),
        (1, 9, "missing-twice"),
    ]  # fmt: skip
    slow, missing = bench.firing(5, "slow"), bench.firing(6, "missing")
    assert (slow["role"], slow["rank"], slow["evidence"]["value"]) == ("actor", 1, 9.0)
    assert slow["evidence"]["median"] == 1.0
    assert slow["message"].endswith(" at step 5, stage actor_compute_log_prob, actor rank 1")
    assert (missing["stage"], missing["rank"]) == ("actor_compute_log_prob", 1)


def test_a_rank_that_never_runs_a_stage_is_not_missing_in_it(bench: RuleBench) -> None:
    rules = rules_of(rule("missing", metric="missing_ranks", when={">": 0}))

    async def work() -> None:
        await bench.triggers.put(rules, by="me")
        await bench.step(1)
        for step in range(2, 6):
            await bench.step(step, scalars={0: {"reward": 1.0}})  # in a stage of rank 0 alone
        await bench.step(6, absent=[1], scalars={0: {"reward": 1.0}})

    run(work)
    stored = [row["missing"] for row in bench.catalogue.steps(1, before=6, limit=3)]
    assert all(stored)
    # In the first step with the stage nobody knows yet whose it is.
    assert bench.fired() == [(1, 2, "missing"), (1, 6, "missing")]
    assert bench.firing(6, "missing")["stage"] == "actor_compute_log_prob"


def test_a_rank_that_is_missing_too_is_said_while_another_cools_down(bench: RuleBench) -> None:
    rules = rules_of(
        rule("missing", metric="missing_ranks", by="rank", when={">": 0}, cooldown=10),
        rule("twice", metric="missing_ranks", by="rank", when={">": 0}, **{"for": 2}),
    )

    async def work() -> None:
        await bench.triggers.put(rules, by="me")
        for step, absent in enumerate(([], [1], [0, 1], [1], [0], []), 1):
            await bench.step(step, absent=absent)
            await bench.restarted().open()
        await bench.step(7, absent=[0, 1])

    run(work)
    assert bench.fired() == [
        (1, 2, "missing"), (1, 3, "missing"), (1, 3, "twice"), (1, 4, "twice"),
    ]  # fmt: skip
    first, second = bench.firing(2, "missing"), bench.firing(3, "missing")
    assert (first["role"], first["rank"], first["stage"]) == ("actor", 1, "actor_compute_log_prob")
    assert (second["role"], second["rank"], second["evidence"]["value"]) == ("actor", 0, 1.0)
    assert "already reported: missing_ranks on actor rank 1" in second["message"]
    assert [bench.firing(step, "twice")["rank"] for step in (3, 4)] == [1, 1]


def test_a_noise_floor(bench: RuleBench) -> None:
    rules = rules_of(rule(when={"noise_ratio": 3}))

    async def work() -> None:
        await bench.triggers.put(rules, by="me")
        await bench.step(1, 1.0)  # without a noise floor nothing is over it
        for step, noise in ((2, 0.0), (3, 0.02), (4, 0.3)):
            same = payload(seed=7 * step, noise=noise)["tensors"]["old_log_probs"]
            await bench.step(step, noise, tensors={"recomputed_log_probs": same})

    run(work)
    found = {row["step"]: row["evidence"] for row in bench.catalogue.firings(run="r")}
    for evidence in found.values():
        assert evidence["value"] > 3 * evidence["noise_floor"]


def test_what_follows_happens_once_however_often_a_step_is_aggregated(bench: RuleBench) -> None:
    with hook() as server:
        actions = {"finding": {}, "pin": 1, "webhook": server.url, "capture": {"ranks": "worst(1)"}}
        runs = {"r": {"capture": "auto", "budget": {"captures": 5}}}
        rules = rules_of(rule(actions=actions), runs=runs)

        async def work() -> None:
            await bench.triggers.put(rules, by="me")
            await bench.step(1, 0.01)
            await bench.step(2, 1.0)
            for _ in range(3):
                await bench.triggers.aggregated(1, 2)
            for _ in range(2):
                await bench.restarted().open()
                await bench.triggers.aggregated(1, 2)
                await bench.triggers.aggregated(1, 1)

        run(work)
        assert len(server.told) == len(bench.orders.specs) == 1
        (told,) = server.told
    assert (told["run"], told["step"], told["rule"], told["attempt"]) == ("r", 2, "mean", 1)
    assert told["evidence"]["value"] > 0.5
    assert told["actions"]["capture"] == {"capture_id": "capture-1"}
    assert told["link"] == f"{PAGE}/#/runs/r/steps/2?attempt=1"
    (spec,) = bench.orders.specs
    worst = bench.firing(2)["evidence"]["ranks"][0][1]
    assert spec == {
        "run": "r", "stages": ["actor_compute_log_prob"], "roles": ["actor"], "ranks": [worst],
        "steps": "next", "task": "statistics", "level": "L0",
        "by": "trigger mean at step 2 of attempt 1",
    }  # fmt: skip
    assert bench.actions(2)["webhook"]["delivered"] is True


def test_a_coordinator_that_ends_before_all_followed_leaves_word_of_it(bench: RuleBench) -> None:
    rules = rules_of(rule(actions=PIN | {"capture": {}}), runs={
        "*": {"capture": "auto", "budget": {"captures": 5}}
    })  # fmt: skip

    async def ends(act: object, rules: object) -> None:
        raise asyncio.CancelledError

    async def work() -> None:
        await bench.triggers.put(rules, by="me")
        bench.triggers._acting.carry_out = ends  # type: ignore[method-assign,assignment]
        with pytest.raises(asyncio.CancelledError):
            await bench.step(1, 1.0)
        assert bench.fired() == [(1, 1, "mean")]
        assert not pinned(bench)
        await bench.restarted().open()
        await bench.step(2, 0.01)

    run(work)
    assert len(pinned(bench)) == 2
    assert len(bench.orders.specs) == 1
    assert bench.firing(1)["acted_wall"] is not None


def test_a_step_summary_that_no_longer_says_so_withdraws_its_firing(bench: RuleBench) -> None:
    async def work() -> None:
        rules = rules_of(rule("missing", metric="missing_ranks", when={">": 0}))
        await bench.triggers.put(rules, by="me")
        await bench.step(1, absent=[1])
        assert bench.fired() == [(1, 1, "missing")]
        assert len(bench.findings("trigger_missing")) == 1
        await bench.local.coordinator.parts.runner.write(
            [Put("steps", {"attempt_id": 1, "step": 1, "missing": []})]
        )
        await bench.triggers.aggregated(1, 1)

    run(work)
    assert bench.fired() == []
    assert bench.findings("trigger_missing") == []
    assert bench.firing(1, "missing")["withdrawn_wall"] is not None


@pytest.mark.parametrize("seed", range(3))
def test_a_dry_run_says_what_the_live_service_fired(bench: RuleBench, seed: int) -> None:
    rules = rules_of(
        rule("mean", cooldown=4, when={">": 0.2, "median_ratio": 1.5}),
        rule("z", when={"z_score": {"over": 2, "steps": 6}}, cooldown=0),
        rule("rounds", by="round", when={">": 0.2}, **{"for": 2}),
        *(each.wire(secrets=True) for each in defaults().rules),
        rule("slow", metric="stage_seconds", when={"median_ratio": 2}),
    )
    chance = random.Random(seed)

    async def work() -> None:
        await bench.triggers.put(rules, by="me")
        for key, steps in (("a1", range(1, 13)), ("a2", range(8, 18))):
            for step in steps:
                noise = chance.choice([0.01, 0.02, 0.3, 1.0])
                poison = math.inf if chance.random() < 0.1 else None
                await bench.step(
                    step, noise, key=key, poison=poison, hold=chance.random() < 0.3,
                    seconds=chance.choice([1.0, 5.0]),
                )  # fmt: skip
                if chance.random() < 0.2:
                    await bench.restarted().open()
            await bench.leave(key)
        for attempt_id, late in ((1, [*range(1, 13)]), (2, [*range(8, 18)])):
            for step in chance.sample(late, len(late)):  # what was held back comes late
                await bench.triggers.aggregated(attempt_id, step)

    run(work)
    fired, looked = replay(bench.catalogue, "r", rules, most=1000)
    assert looked == 22
    assert len(fired) > 5
    found = [(each["attempt_id"], each["step"], each["rule"]) for each in fired]
    assert sorted(found) == bench.fired()
    for each in fired:
        live = bench.firing_of(each["attempt_id"], each["step"], each["rule"])
        value = live["evidence"]["value"]
        assert float(value) == pytest.approx(each["evidence"]["value"])


def test_rules_that_are_given_later_hold_for_later_steps(bench: RuleBench) -> None:
    async def work() -> None:
        await bench.triggers.put(rules_of(), by="me")
        await bench.step(1, 1.0)
        await bench.triggers.put(rules_of(rule()), by="me")
        await bench.triggers.aggregated(1, 1)
        await bench.step(2, 1.0)

    run(work)
    assert bench.fired() == [(1, 2, "mean")]


def test_no_step_is_looked_at_before_its_turn(bench: RuleBench) -> None:
    async def work() -> None:
        await bench.triggers.put(rules_of(rule(cooldown=9)), by="me")
        for step, noise in ((1, 0.01), (2, 0.01), (3, 1.0), (4, 0.01), (5, 1.0), (6, 1.0)):
            await bench.step(step, noise, hold=True)
        await bench.triggers.aggregated(1, 2)  # of the later ones a payload may still be on its way
        assert bench.fired() == []
        await bench.triggers.aggregated(1, 4)
        assert bench.fired() == [(1, 3, "mean")]
        await bench.restarted().open()
        await bench.triggers.aggregated(1, 6)

    run(work)
    assert [row["step"] for row in bench.catalogue.firings(run="r")] == [3]


def test_steps_that_are_aggregated_before_the_first_has_its_turn_are_no_history(
    bench: RuleBench,
) -> None:
    """As where a new service compiles its kernels while a training does many short steps."""

    async def work() -> None:
        await bench.triggers.put(rules_of(rule(cooldown=2000)), by="me")
        for step in range(1, REACH + 10):
            await bench.step(step, 1.0 if step >= 6 else 0.01, hold=True)
        for step in range(1, 9):
            await bench.triggers.aggregated(1, step)

    run(work)
    assert bench.fired() == [(1, 6, "mean")]


def test_steps_that_wait_are_evaluated_together(
    bench: RuleBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where steps come faster than each could be evaluated alone."""
    evaluated: list[list[int]] = []
    evaluate = TriggerWatch._evaluate

    def evaluate_slowly(
        self: TriggerWatch, rules: Rules, attempt_id: int, steps: list[int]
    ) -> object:
        evaluated.append(steps)
        return evaluate(self, rules, attempt_id, steps)

    async def work() -> None:
        await bench.triggers.put(rules_of(rule(actions=PIN)), by="me")
        for step in range(1, REACH + 10):
            await bench.step(step, 1.0 if step in (3, 70) else 0.0, hold=True)
        tasks = [
            asyncio.create_task(bench.triggers.aggregated(1, step)) for step in range(1, REACH + 10)
        ]
        await asyncio.sleep(0.0)
        assert sum(not task.done() for task in tasks) == 1  # a task for each would pile up
        await asyncio.gather(*tasks)

    monkeypatch.setattr(TriggerWatch, "_evaluate", evaluate_slowly)
    run(work)
    assert evaluated == [[1], [*range(2, REACH + 2)], [*range(REACH + 2, REACH + 10)]]
    assert bench.fired() == [(1, 3, "mean"), (1, 70, "mean")]
    assert {entry.key.step for entry in pinned(bench)} == {2, 3, 69, 70}
    assert bench.actions(70)["pin"]


def test_a_step_of_history_that_cannot_be_read_ends_nothing(bench: RuleBench) -> None:
    async def work() -> None:
        await bench.triggers.put(rules_of(rule(when={">": 0.5, "median_ratio": 2})), by="me")
        for step in range(1, 6):
            await bench.step(step, 0.01)
        broken = {"attempt_id": 1, "step": 3, "step_summary": b"of another version"}
        await bench.local.coordinator.parts.runner.write([Put("steps", broken)])
        await bench.restarted().open()
        await bench.step(6, 1.0)

    run(work)
    assert bench.fired() == [(1, 6, "mean")]


# --- captures ---------------------------------------------------------------------------------
@pytest.mark.parametrize("by", ["document", "run", "nobody"])
def test_the_defaults_order_one_capture_where_a_budget_allows_it(bench: RuleBench, by: str) -> None:
    allowed = {"capture": "auto", "budget": {"captures": 3}}
    own = {"capture": "auto", "capture_budget": {"captures": 3}}

    async def work() -> None:
        await bench.triggers.open()
        if by == "document":
            document = {**defaults().wire(), "runs": {"r": allowed}}
            await bench.triggers.put(Rules.parse(document), by="me")
        for step in range(1, 6):
            await bench.step(step, 0.001)
        if by == "run":
            await bench.local.coordinator.parts.runner.write(
                [Put("runs", {"run": "r", "settings": own})]
            )
        await bench.step(6, 1.0, scalars={1: {"loss": math.nan}})

    run(work)
    fired = [name for _, step, name in bench.fired() if step == 6]
    assert len(fired) == 4
    assert bench.findings("capture_refused") == []
    actions = [bench.actions(6, name)["capture"] for name in fired]
    if by == "nobody":
        assert (bench.orders.specs, actions) == ([], [{}] * 4)
        return
    (spec,) = bench.orders.specs
    assert actions == [{"capture_id": "capture-1"}] * 4
    assert (spec["roles"], spec["steps"]) == (["actor"], "next")
    assert len(spec["ranks"]) == 1


def test_a_capture_is_of_ranks_that_can_capture(bench: RuleBench) -> None:
    async def work() -> None:
        await bench.triggers.put(
            rules_of(
                rule(actions={"capture": {"ranks": "worst(1)"}}, by="rank", cooldown=1),
                runs={"r": {"capture": "auto", "budget": {"captures": 3}}},
            ),
            by="me",
        )
        await bench.step(1, 0.001)
        idle = [
            Put("processes", {"incarnation": f"a1-{rank}", "hello": {"captures": False}})
            for rank in (0, 1)
        ]
        await bench.local.coordinator.parts.runner.write(idle)
        await bench.step(2, 1.0)

    run(work)
    (spec,) = bench.orders.specs
    assert (spec["ranks"], "roles" in spec) == ([0], False)


def test_no_capture_where_the_run_does_not_say_so(bench: RuleBench) -> None:
    async def work() -> None:
        await bench.triggers.put(rules_of(rule(actions={"capture": {}})), by="me")
        await bench.step(1, 1.0)

    run(work)
    assert bench.orders.specs == []
    (refused,) = bench.findings("capture_refused")
    assert "capture: auto" in refused["message"]
    assert "refused" in bench.actions(1)["capture"]


def test_budgets(bench: RuleBench) -> None:
    budget = {"captures": 3, "bytes": 1000}
    runs = {"r": {"capture": "auto", "budget": budget}}
    rules = rules_of(rule(actions={"capture": {"ranks": "worst(2)"}}), runs=runs)

    async def work() -> None:
        await bench.triggers.put(rules, by="me")
        await bench.step(1, 1.0)
        await bench.step(2, 1.0)
        bench.orders.end("capture-1", bytes=600, seconds=1.0)
        await bench.step(3, 1.0)
        bench.orders.end("capture-2", bytes=500, seconds=1.0)
        await bench.step(4, 1.0)

    run(work)
    assert [spec["limits"]["bytes"] for spec in bench.orders.specs] == [500, 200]
    assert bench.orders.specs[0]["ranks"] == [0, 1]
    reasons = [row["message"] for row in bench.findings("capture_refused")]
    assert "capture-1, which a trigger requested, is still under way" in reasons[0]
    assert "1100 of 1000 bytes" in reasons[1]


def test_captures_that_never_started_cost_nothing() -> None:
    ended = {agreement.REFUSED, agreement.GIVEN_UP, agreement.TOO_LATE}
    assert set(budget._NEVER_STARTED) == ended


def test_a_share_of_the_step_time(bench: RuleBench) -> None:
    runs = {"r": {"capture": "auto", "budget": {"captures": 9, "share": 0.2}}}
    rules = rules_of(rule(actions={"capture": {}}), runs=runs)

    async def work() -> None:
        await bench.triggers.put(rules, by="me")
        await bench.step(1, 1.0)
        bench.orders.end("capture-1", seconds=1e6)
        await bench.step(2, 1.0)
        assert len(bench.orders.specs) == 1
        await bench.leave()
        await bench.triggers.aggregated(1, 2)

    run(work)
    assert "over the share of 0.2" in bench.findings("capture_refused")[0]["message"]


def test_an_order_that_is_refused_and_an_attempt_that_is_over(bench: RuleBench) -> None:
    runs = {"r": {"capture": "auto", "budget": {"captures": 9}}}
    rules = rules_of(rule(actions={"capture": {}}), runs=runs)

    async def work() -> None:
        await bench.triggers.put(rules, by="me")
        bench.orders.error = Conflict("exactly this is requested")
        await bench.step(1, 1.0)
        bench.orders.error = None
        await bench.step(2, 1.0, hold=True)
        await bench.leave()
        await bench.triggers.aggregated(1, 2)

    run(work)
    reasons = [row["message"] for row in bench.findings("capture_refused")]
    assert "exactly this is requested" in reasons[0]
    assert "the attempt is over" in reasons[1]
    assert bench.orders.specs == []


# --- webhooks ---------------------------------------------------------------------------------
def test_a_webhook_is_tried_again_and_its_failure_is_a_finding_without_secrets(
    bench: RuleBench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with hook() as server:
        rules = rules_of(rule(actions={"webhook": server.url}))
        server.answers += [500, 429, 200, 500, 503, 500, 404, 302]

        async def work() -> None:
            await bench.triggers.put(rules, by="me")
            for step in range(1, 5):
                await bench.step(step, 1.0)

        run(work)
        assert len(server.told) == 3 + 3 + 1 + 1
        closed = rules_of(rule(actions={"webhook": "http://127.0.0.1:9/SECRET"}))

        async def nobody() -> None:
            await bench.triggers.put(closed, by="me")
            await bench.step(5, 1.0)

        run(nobody)
    failed = {row["step"]: row["message"] for row in bench.findings("webhook_failed")}
    assert set(failed) == {2, 3, 4, 5}
    assert "answered 500 (3 tries)" in failed[2]
    assert "answered 404 (1 try)" in failed[3]
    assert "answered 302" in failed[4]
    assert "cannot be reached: ConnectError" in failed[5]
    shown = str([bench.catalogue.findings(), bench.catalogue.audit(), bench.catalogue.firings()])
    for secret in ("SECRET", "HIDDEN", "pw"):
        assert secret not in caplog.text
        assert secret not in shown


def test_a_chat_tool_is_told_with_a_link_and_its_refusal_is_a_finding(bench: RuleBench) -> None:
    with chat_service("feishu", signed=True) as service:
        actions = {"finding": {"severity": "error", "advice": "look at {step}"}, "pin": 1}
        rules = rules_of(rule(actions={**actions, "webhook": service.webhook(signed=True)}))

        async def work() -> None:
            await bench.triggers.put(rules, by="me")
            await bench.step(1, 1.0)
            service.answers.append((200, {"code": 19022, "msg": "Ip Not Allowed"}))
            await bench.step(2, 1.0)
            tested = await bench.triggers.test_webhook("mean")
            assert (tested["delivered"], tested["answer"]) == (True, "200, code 0: success")
            assert (tested["run"], tested["attempt"], tested["step"]) == ("r", 1, 2)
            with pytest.raises(NotFound, match=r"'maen'.*did you mean mean\?"):
                await bench.triggers.test_webhook("maen")

        run(work)
        first, test = service.took
    texts = json.dumps(first)
    for word in ("look at 1", "pinned step 1", f"{PAGE}/#/runs/r/steps/1?attempt=1", "Open in"):
        assert word in texts
    assert "TEST" not in texts
    assert (
        test["card"]["header"]["title"]["content"] == "stagescope TEST, error: mean at step 2 of r"
    )
    (failed,) = bench.findings("webhook_failed")
    assert failed["step"] == 2
    assert "code 19022: Ip Not Allowed (1 try)" in failed["message"]
    shown = str([bench.catalogue.findings(), bench.catalogue.audit(), bench.catalogue.firings()])
    for secret in (TOKEN, SECRET):
        assert secret not in shown


def test_rules_that_call_other_hosts_than_allowed_are_refused(
    bench: RuleBench, tmp_path: Path
) -> None:
    bench.webhook_hosts = ("hooks.example.com",)
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"rules": [rule(actions={"webhook": "http://other/SECRET"})]}))
    good = rules_of(rule(actions={"webhook": "http://hooks.example.com/SECRET"}))

    async def work() -> None:
        await bench.restarted().open()
        await bench.triggers.put(good, by="me")
        await bench.restarted().open(file)
        assert bench.triggers.revision == 2
        with pytest.raises(InvalidPlan, match="has the host other"):
            await bench.triggers.put(rules_of(rule(actions={"webhook": "http://other/"})), by="me")

    run(work)
    refused = bench.catalogue.audit()[0]
    assert (refused["action"], refused["by"]) == ("triggers_refused", f"file {file}")
    assert "STAGESCOPE_WEBHOOK_HOSTS: hooks.example.com" in str(refused["detail"])
    assert "SECRET" not in str(bench.catalogue.audit())


# --- rules ------------------------------------------------------------------------------------
def test_a_file_stands_until_others_are_given_and_again_when_it_changes(
    bench: RuleBench, tmp_path: Path
) -> None:
    file = tmp_path / "rules.yaml"
    text = "rules:\n- {name: NAME, metric: counts/tokens, when: {'>': 1}}\n"

    def names() -> list[str]:
        row = bench.catalogue.trigger_rules()
        assert row is not None
        return [each["name"] for each in row["document"]["rules"]]

    async def work() -> None:
        file.write_text(text.replace("NAME", "first"))
        await bench.restarted().open(file)
        assert names() == ["first"]
        await bench.restarted().open(file)
        assert bench.triggers.revision == 1
        await bench.triggers.put(rules_of(rule("by-hand")), by="me")
        await bench.restarted().open(file)
        assert names() == ["by-hand"]
        file.write_text(text.replace("NAME", "second"))
        await bench.restarted().open(file)
        assert (names(), bench.triggers.revision) == (["second"], 3)
        file.write_text("rules: 7")
        await bench.restarted().open(file)
        assert names() == ["second"]

    run(work)
    done = [(row["action"], row["by"]) for row in bench.catalogue.audit()]
    assert done[0] == ("triggers_refused", f"file {file}")
    assert ("set_triggers", "me") in done
