"""Which symptom comes first: what explains another, what ended, what fired, and what is a note."""

from __future__ import annotations

import ast
import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import pytest
from tests.service.rules.planted import (
    STAGE,
    Batch,
    Change,
    diagnosed,
    found_in,
    healthy_scalars,
    last_tokens,
    last_tokens_of_shorter_rounds,
    make_batch,
    other_rows,
    report,
    rows_of,
    shift,
    shown_by,
    since,
    train,
    wire,
)
from tests.support.api import Rank, Service
from tests.support.stores import write

import stagescope_service
from stagescope_service.core.instructions import Put
from stagescope_service.rules.causes import FACTS, Diagnosis, link
from stagescope_service.rules.doctor import diagnose, rulebook, unexplained
from stagescope_service.rules.evidence import Evidence
from stagescope_service.rules.history import RunHistory
from stagescope_service.statistics.comparability import WHAT_TO_CHECK


# --- causes -----------------------------------------------------------------------------------
def test_every_cause_that_a_step_can_have_has_one_rule() -> None:
    causes = [cause for rule in rulebook() for cause in rule.causes]
    assert sorted(causes) == sorted(WHAT_TO_CHECK)


@pytest.mark.parametrize("cause", WHAT_TO_CHECK)
def test_a_cause_that_every_step_has_is_never_passed_over(cause: str, live: Service) -> None:
    """Its rule finds it, or the answer says that no rule could judge it."""
    run = f"every-{cause}"
    train(live, run, steps=range(1, 6))
    for step in range(1, 6):
        report(live, run, f"streams_{cause}", step=step)
    history = RunHistory(live.catalogue, run)
    steps = [step._replace(verdict="suspect", suspects=(cause,)) for step in history.steps]
    history.__dict__["steps"] = steps
    rows = diagnose(history)
    found = {row.rule.name for row in rows if row.evidence.verdict == "found"}
    left = unexplained(rows, history)
    assert found & {rule.name for rule in rulebook() if cause in rule.causes} or left == {
        f"streams_{cause}": 5
    }


def kinds_in_the_source() -> set[str]:
    """The kinds that calls of `finding` name, as they stand or by a constant."""
    trees = [
        ast.parse(file.read_text(encoding="utf-8"))
        for file in Path(stagescope_service.__file__).parent.rglob("*.py")
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    constants = {
        node.target.id: node.value.value
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    found = set()
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "finding" and node.args:
            kind = node.args[0]
            if isinstance(kind, ast.Constant):
                found.add(str(kind.value))
            elif isinstance(kind, ast.Name) and kind.id in constants:
                found.add(constants[kind.id])
    return found


def test_whatever_is_found_a_rule_looks_at_it_or_the_answer_names_it(live: Service) -> None:
    kinds = kinds_in_the_source()
    assert {"replicas_differ", "nonfinite_values", "webhook_failed", "refused_event"} <= kinds
    assert len(kinds) > 25
    train(live, "every-kind", steps=range(1, 6))
    for kind in kinds:
        report(live, "every-kind", kind)
    answer = live.get("/runs/every-kind/diagnosis")
    verdicts = {row["rule"]: row["verdict"] for row in answer["rows"]}
    looking = {
        kind: {
            rule.name for rule in rulebook()
            if any(fnmatch.fnmatchcase(kind, each) for each in rule.kinds)
        }
        for kind in kinds
    }  # fmt: skip
    assert answer["unexplained"] == {kind: 1 for kind, rules in looking.items() if not rules}
    by_numbers = {rule.name for rule in rulebook() if rule.findings}
    for kind, rules in looking.items():
        if rules and not rules & by_numbers:
            assert "found" in {verdicts[rule] for rule in rules}, kind
    count = len(answer["unexplained"])
    assert not answer["text"].startswith("Nothing is wrong")
    assert f". {count} warnings or errors stand that no rule explains: " in answer["text"]
    assert "(stagescope findings --run every-kind)" in answer["text"]
    earlier = live.get("/runs/every-kind/diagnosis", step=4)
    assert earlier["unexplained"] == {}
    assert "no rule explains" not in earlier["text"]


def test_a_note_and_what_is_over_are_not_unexplained(live: Service) -> None:
    train(live, "over", steps=range(1, 6))
    for kind, severity in (
        ("webhook_failed", "warning"), ("attempt_bundled", "info"), ("misspelt_tensor", "warning")
    ):  # fmt: skip
        report(live, "over", kind, severity=severity)
    (over,) = live.catalogue.findings(run="over", kind="webhook_failed")
    write(live.store, Put("findings", {"finding_id": over["finding_id"], "over_wall": 2.0}))
    answer = live.get("/runs/over/diagnosis")
    assert answer["unexplained"] == {"misspelt_tensor": 1}
    assert (
        ". 1 warning or error stands that no rule explains: misspelt_tensor "
        "(stagescope findings --only misspelt_tensor --run over)" in answer["text"]
    )


def test_what_explains_a_symptom_is_a_rule_and_nothing_explains_itself() -> None:
    """Rules may declare circles: where all of them are found at once, none is linked."""
    names = [rule.name for rule in rulebook()]
    assert all(fnmatch.filter(names, each) for rule in rulebook() for each in rule.explains)
    assert {each for rule in rulebook() for each in rule.contradicted_by} <= set(FACTS)
    history: Any = SimpleNamespace(compared_weights=lambda since: [])
    linked = link([Diagnosis(rule, Evidence("found", 1.0, 3)) for rule in rulebook()], history)
    above = {each.rule.name: [rule.name for rule in each.explained_by] for each in linked}

    def roots(name: str, passed: tuple[str, ...] = ()) -> set[str]:
        assert name not in passed, (*passed, name)
        return {root for each in above[name] for root in roots(each, (*passed, name))} or {name}

    causes = {each.rule.name for each in linked if each.is_cause}
    assert {root for name in names for root in roots(name)} == causes
    assert {each.cause.name for each in linked if each.cause is not None} <= causes


def test_the_first_thing_to_do_is_an_experiment() -> None:
    for rule in rulebook():
        assert rule.next[0].startswith("stagescope ") or rule.name == "verl_settings", rule.name


def answer_of(live: Service, run: str, **params: object) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = live.get(f"/runs/{run}/diagnosis", **params)["rows"]
    return rows


def one_shifted_rank(batch: Batch) -> None:
    if batch.rank == 2:
        shift(batch)


CAUSES: Final[dict[str, tuple[str, Change, set[str]]]] = {
    "last tokens": ("last_token", last_tokens_of_shorter_rounds, {"mismatch_rises_with_rounds"}),
    "last tokens, no sync reported": ("last_token", since(2, last_tokens), {"mismatch_jump"}),
    "other rows": ("streams_unrelated", since(8, other_rows), {"mismatch_jump"}),
    "a shift": ("streams_shifted", since(8, shift), {"mismatch_jump"}),
    "a shift on one rank": ("streams_shifted", one_shifted_rank, {"rank_apart"}),
}
"""Name -> the rule of the cause, the fault, and what else it must look like."""


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_stands_above_what_it_explains(name: str, live: Service) -> None:
    cause, change, also = CAUSES[name]
    run = "order-" + name.replace(" ", "-").replace(",", "")
    train(live, run, change, steps=range(1, 17))
    rows = [row for row in answer_of(live, run) if row["verdict"] == "found"]
    assert rows[0]["rule"] == cause, [(row["rule"], row["for"]) for row in rows]
    if change is one_shifted_rank:
        assert rows[0]["where"] == "actor rank 2"
    others = {row["rule"]: row for row in rows[1:]}
    assert also <= set(others), set(others)
    for row in others.values():
        assert (row["cause"], row["explains"]) == (cause, []), row
        first = row["explained_by"][0]
        assert row["against"][0].startswith(f"explained by {first}: ")
    assert sorted(rows[0]["explains"]) == sorted(others)
    answer = live.get(f"/runs/{run}/diagnosis")
    counted = "1 symptom" if len(others) == 1 else f"{len(others)} symptoms"
    assert answer["text"].startswith(
        f"1 cause in 16 closed steps of run {run} (explains {counted}, "
    )
    assert not answer["healthy"]


def test_a_cause_that_the_newest_steps_alone_do_not_show_is_found_by_its_check(
    live: Service,
) -> None:
    """Two steps: the profiles of three are needed, the checks need one."""
    row = diagnosed(live, "two-steps-last", last_tokens, steps=range(1, 3))["last_token"]
    assert (row["verdict"], row["since_step"]) == ("found", 1)
    assert (row["shown"], row["examined"]) == (2, 2)
    assert row["for"][0].startswith("step 2: the 48 last tokens of rounds differ by 0.")


def test_what_began_long_before_a_jump_does_not_explain_it(live: Service) -> None:
    def both(batch: Batch) -> None:
        last_tokens(batch)
        if batch.step >= 15:
            batch.add(0.2)

    row = diagnosed(live, "two-faults", both, steps=range(1, 25))["mismatch_jump"]
    assert (row["verdict"], row["since_step"], row["explained_by"]) == ("found", 15, [])


# --- what ended -------------------------------------------------------------------------------
def test_what_ended_says_so_and_comes_last(live: Service) -> None:
    """A NaN of one step, then a fault that lasts, and two restarts."""

    def change(batch: Batch) -> None:
        if batch.step == 5 and batch.rank == 1:
            batch.p[0, 3] = np.nan
        if batch.step >= 12 and batch.rank == 2:
            batch.add(0.1)

    def loss(step: int) -> dict[str, float]:
        return {**healthy_scalars(step), "loss": float("nan") if step == 5 else 1.0}

    for number, steps in enumerate((range(1, 9), range(9, 14), range(14, 30))):
        train(
            live, "ended", change, steps=steps, key=f"a{number}", start=1e3 + 1e4 * number,
            scalars=loss,
        )  # fmt: skip
    rows = [row for row in answer_of(live, "ended") if row["verdict"] == "found"]
    names = [row["rule"] for row in rows]
    assert names[0] == "rank_apart"
    ended = {row["rule"]: row for row in rows if row["last_step"] is not None}
    assert {"non_finite_log_probs", "non_finite_scalars"} <= set(ended)
    assert names[-len(ended) :] == [*ended]
    for row in ended.values():
        assert (row["since_step"], row["last_step"]) == (5, 5)
        assert "last seen in step 5; 24 steps without it" in row["against"]
    shown = " ".join(shown_by(live, "doctor", "ended").split())
    assert "since step 5, last seen in step 5" in shown
    # Soon after it, it may go on.
    assert rows_of(live, "ended", step=7)["non_finite_scalars"]["last_step"] is None


def test_a_crash_before_a_restart_is_over_when_steps_have_closed(live: Service) -> None:
    train(live, "crashed-once", steps=range(1, 6))
    for kind, step in (("process_crashed", None), ("stage_failed", 5)):
        report(live, "crashed-once", kind, step=step)
    assert rows_of(live, "crashed-once")["processes_failed"]["last_step"] is None
    train(live, "crashed-once", steps=range(6, 12), key="a2", start=9_000.0)
    row = rows_of(live, "crashed-once")["processes_failed"]
    assert (row["verdict"], row["last_step"]) == ("found", 5)


def test_a_jump_that_is_over_says_so(live: Service) -> None:
    def worse(batch: Batch) -> None:
        if 11 <= batch.step < 16:
            batch.add(0.05)

    train(live, "healed-jump", steps=range(1, 13))
    train(live, "healed-jump", worse, steps=range(11, 31), key="a2", start=9_000.0)
    row = rows_of(live, "healed-jump")["mismatch_jump_at_restart"]
    assert (row["verdict"], row["since_step"], row["last_step"]) == ("found", 11, 15)


# --- what fired, and what few steps show --------------------------------------------------------
SIZES: Final = {4: 0.01, 5: 0.03, 6: 0.06, 7: 0.08, 8: 0.1}
"""Step -> mean |d| after the engine's weights froze in step 3."""


def frozen(batch: Batch) -> None:
    """A weight sync is lost in step 3; before that the two sides nearly agree."""
    batch.p = batch.q.copy()
    batch.add(SIZES.get(batch.step, 0.0004))
    batch.p = np.minimum(batch.p, -1e-9)


@pytest.mark.parametrize("last", [6, 8])
def test_a_lost_weight_sync_is_found_in_few_steps(last: int, live: Service) -> None:
    run = f"frozen-{last}"
    train(live, run, frozen, steps=range(1, last + 1), syncs=True)
    report(live, run, "trigger_pearson")
    row = answer_of(live, run)[0]
    assert (row["rule"], row["verdict"]) == ("mismatch_grows", "found"), row
    assert row["since_step"] == 4
    fired = rows_of(live, run)["trigger_fired"]
    assert fired["verdict"] == "found"
    assert fired["explained_by"] == ["mismatch_grows"]


@pytest.mark.parametrize(("by", "last"), [(2.0, 5), (1.3, 10)])
def test_a_mismatch_that_grows_steadily_is_found_in_few_steps(
    by: float, last: int, live: Service
) -> None:
    """The two sides differ by a bfloat16 engine's noise before the engine's weights freeze."""

    def change(batch: Batch) -> None:
        if batch.step > 2:
            batch.add(0.01 * by ** (batch.step - 2))

    run = f"steady-{by}-{last}"
    train(live, run, change, steps=range(1, last + 1), syncs=True)
    row = answer_of(live, run)[0]
    assert (row["rule"], row["verdict"]) == ("mismatch_grows", "found"), row


def test_a_mismatch_that_varies_does_not_grow_in_few_steps(live: Service) -> None:
    for seed in range(8):
        sizes = 0.01 * np.exp(0.5 * np.random.default_rng(seed).standard_normal(8))

        def change(batch: Batch, sizes: Any = sizes) -> None:
            batch.add(sizes[batch.step])

        run = f"varies-{seed}"
        train(live, run, change, steps=range(1, 7), seed=seed)
        assert rows_of(live, run)["mismatch_grows"]["verdict"] == "not measured"


@pytest.mark.parametrize("steps", [5, 9])
def test_a_clear_jump_is_found_in_few_steps(steps: int, live: Service) -> None:
    def change(batch: Batch) -> None:
        batch.p = batch.q.copy()
        batch.add(0.0004 if batch.step < 4 else 0.06)

    rows = diagnosed(live, f"clear-{steps}", change, steps=range(1, steps + 1), syncs=True)
    assert (rows["mismatch_jump"]["verdict"], rows["mismatch_jump"]["since_step"]) == ("found", 4)
    assert rows["mismatch_grows"]["verdict"] != "found"


def test_what_fired_is_found_where_nothing_else_is(live: Service) -> None:
    train(live, "fired", steps=range(1, 6))
    where = {"role": "actor", "rank": 3, "evidence": {"cooldown": 20}}
    report(live, "fired", "trigger_mine", "mine: a number is 7", **where)
    rows = rows_of(live, "fired")
    assert found_in(rows) == {"trigger_fired"}
    assert (rows["trigger_fired"]["where"], rows["trigger_fired"]["for"]) == (
        "actor 3", ["mine: a number is 7"],
    )  # fmt: skip
    # While the rule cools down its silence says nothing.
    train(live, "fired", steps=range(6, 21), key="a2", start=9_000.0)
    assert rows_of(live, "fired")["trigger_fired"]["last_step"] is None
    train(live, "fired", steps=range(21, 28), key="a3", start=19_000.0)
    assert rows_of(live, "fired")["trigger_fired"]["last_step"] == 5


def test_what_fired_in_steps_of_no_cause_stays_one(live: Service) -> None:
    """The first firing is long before the fault; stage times have nothing to do with it."""
    train(live, "fired-before", since(20, shift), steps=range(1, 31))
    metric = "training/rollout_probs_diff_mean"
    for step, name in ((4, metric), (20, metric), (29, "stage_seconds")):
        evidence = {"cooldown": 20, "metric": name}
        report(live, "fired-before", "trigger_mine", f"in {step}", step=step, evidence=evidence)
    row = rows_of(live, "fired-before")["trigger_fired"]
    assert (row["for"], row["explained_by"]) == (["in 4", "in 29"], [])
    row = rows_of(live, "fired-before", step=22)["trigger_fired"]
    assert (row["for"], row["explained_by"]) == (["in 4"], [])


def test_checks_that_explain_each_other_make_no_circle() -> None:
    """In the last step of either symptom the other check was the likelier one."""
    rules = {rule.name: rule for rule in rulebook()}
    found = [
        Diagnosis(rules[name], Evidence("found", 1.0, 3, likelier=likelier))
        for name, likelier in (
            ("streams_unrelated", "coverage"), ("streams_lack_values", "unrelated"),
            ("staleness", "unrelated"), ("versions_impossible", None),
        )
    ]  # fmt: skip
    linked = {each.rule.name: each for each in link(found, cast("RunHistory", None))}
    assert linked["streams_lack_values"].is_cause
    assert linked["streams_unrelated"].cause == rules["streams_lack_values"]
    assert linked["staleness"].cause == rules["streams_lack_values"]
    assert linked["versions_impossible"].is_cause


def test_ranks_that_are_silent_are_named(live: Service) -> None:
    ranks = [Rank(live, run="silent", rank=rank, world_size=4) for rank in range(4)]
    for step in range(1, 41):
        reports = [
            rank.draft_stage(STAGE, step, wire(make_batch(step, at, 0), "silent"))
            for at, rank in enumerate(ranks)
            if not (at == 2 and step > 10) and not (at == 3 and step == 20)
        ]
        live.engine.take_together(reports)
        if step == 12:
            live.engine.fall_silent(ranks[2])
    for at in (0, 1, 3):
        ranks[at].begin(STAGE, 41)
    row = rows_of(live, "silent")["ranks_missing"]
    assert row["verdict"] == "found"
    assert "actor 2" in row["where"]
    assert f"actor rank 2 is missing in 30 steps from 11 to 40: {STAGE}" in row["for"]
    # What to do next shows it.
    command = row["next"][0].partition(" #")[0].split()[1:]
    shown = shown_by(live, *command)
    assert [line.split()[2] for line in shown.splitlines() if "not begun" in line] == ["2"]


# --- numbers that are none ----------------------------------------------------------------------
def test_tokens_that_are_all_old_are_no_sure_drift(live: Service) -> None:
    def all_old(batch: Batch) -> None:
        batch.versions = np.full(batch.q.shape, batch.step - 1)

    row = diagnosed(live, "all-old", all_old, steps=range(1, 13))["staleness"]
    assert row["verdict"] == "not measured"
    assert row["against"][0].startswith("100% of the tokens are of an older version; none is fresh")

    def older(batch: Batch) -> None:
        """Half of the tokens are one version old, half three: those drifted."""
        ages = np.where(np.arange(len(batch.q))[:, None] < 2, 1, 3)
        batch.versions = np.broadcast_to(batch.step - ages, batch.q.shape).copy()
        batch.add(0.1, ages == 3)

    row = diagnosed(live, "two-ages", older, steps=range(1, 13))["staleness"]
    assert row["verdict"] == "found"
    assert "1 version old" in row["for"][0]


@pytest.mark.parametrize("youngest", [0, 1])
def test_old_tokens_without_any_mismatch_did_not_drift(live: Service, youngest: int) -> None:
    def exact(batch: Batch) -> None:
        ages = np.where(np.arange(len(batch.q))[:, None] < 2, youngest, 3)
        batch.versions = np.broadcast_to(batch.step - ages, batch.q.shape).copy()
        batch.p = batch.q.copy()

    row = diagnosed(live, f"exact-{youngest}", exact, steps=range(1, 4))["staleness"]
    assert row["verdict"] == "not found", row


def test_growing_staleness_is_no_growing_mismatch(live: Service) -> None:
    def lags(batch: Batch) -> None:
        """Each step half of the tokens are older than in the one before, and drift more."""
        age = batch.step // 3
        old = np.arange(len(batch.q))[:, None] < 2
        versions = np.where(old, batch.step - age, batch.step)
        batch.versions = np.broadcast_to(versions, batch.q.shape).copy()
        batch.add(0.01 * batch.step, old)

    rows = diagnosed(live, "lags", lags, steps=range(1, 25), syncs=True)
    assert rows["staleness"]["verdict"] == "found"
    assert rows["mismatch_grows"]["verdict"] == "not found"
    assert "the tokens grow older: mean staleness " in rows["mismatch_grows"]["against"][1]


# --- notes ----------------------------------------------------------------------------------------
def test_settings_that_harm_no_training_are_a_note(live: Service) -> None:
    settings = {"verl": {"data.shuffle": True, "critic.shuffle": False}}
    train(live, "shuffled", steps=range(1, 4), settings=settings)
    answer = live.get("/runs/shuffled/diagnosis")
    rows = {row["rule"]: row for row in answer["rows"]}
    assert found_in(rows) == set()
    assert answer["text"].startswith("Nothing is wrong in 3 closed steps of run shuffled (")
    assert answer["healthy"]
    (note,) = answer["notes"]
    assert (note["rule"], note["text"]) == ("verl_settings", "data.shuffle is True, not False")
    assert "verl_settings: data.shuffle is True, not False" in shown_by(live, "doctor", "shuffled")
    train(live, "in-order", steps=range(1, 4), settings={"verl": {"data.shuffle": False}})
    assert live.get("/runs/in-order/diagnosis")["notes"] == []
