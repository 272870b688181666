"""Rules are data: read, written, refused with the field that is wrong; secrets stay inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.stores import opened, write

from stagescope_service.rules.actions import FindingTemplate
from stagescope_service.rules.budget import Budget, Spent
from stagescope_service.rules.budget import spent as spent_by
from stagescope_service.rules.document import Rules, defaults, defaults_text, read_yaml
from stagescope_service.store.contract import Put
from stagescope_wire.errors import InvalidPlan

RULE: dict[str, object] = {
    "name": "mean",
    "metric": "training/rollout_probs_diff_mean",
    "when": {">": 0.01},
    "actions": {"finding": {}},
}


def rules_of(**changes: object) -> Rules:
    return Rules.parse({"rules": [{**RULE, **changes}]})


def test_the_defaults_make_findings_pin_and_capture_only_within_a_budget() -> None:
    found = defaults()
    assert [rule.name for rule in found.rules] == [
        "non_finite_log_probs", "non_finite_scalars", "worst_round", "probs_diff_mean", "pearson",
    ]  # fmt: skip
    for rule in found.rules:
        assert rule.actions.finding is not None
        assert rule.actions.finding.advice
        assert rule.actions.pin
        assert rule.actions.webhook is None
        assert rule.actions.capture is not None
        assert rule.actions.capture.if_allowed
        # Level L0 would need the model, which not every stage names.
        assert rule.actions.capture.request["level"] == "L1"
        assert rule.staleness == (None if rule.name.startswith("non_finite") else 0)
    assert found.runs == {}
    assert "verl's own line" in defaults_text()


def test_a_document_is_written_as_it_is_read() -> None:
    text = """
    rules:
      - name: slow
        metric: stage_seconds
        by: rank
        stage: actor_update
        when: {median_ratio: 2.5, z_score: {over: 4, steps: 20}}
        for: 3
        cooldown: 0
        actions:
          pin: 4
          webhook: https://user:pass@hooks.example.com/T0/secret?token=hidden
          capture: {ranks: worst(2), steps: next, level: mix, keep: [responses]}
      - name: worse than itself
        metric: logprob_abs_diff/mean
        by: round
        when: {noise_ratio: 10, ">=": 1e-3, non_finite: false}
    runs:
      "qwen-*": {capture: auto, budget: {captures: 2, bytes: 1000000, share: 0.05}}
      other: {capture: none}
    """
    with pytest.raises(InvalidPlan, match=r"rules\[1\].name"):
        read_yaml(text)
    found = read_yaml(text.replace("worse than itself", "worse-than-itself"))
    assert Rules.parse(found.wire()) == found
    assert found.rules[0].actions.capture is not None
    assert found.rules[0].actions.capture.worst == 2
    assert found.rules[1].actions.finding == FindingTemplate("warning")
    assert found.runs == {"qwen-*": Budget(2, 1_000_000, 0.05)}
    shown = str(found.wire(secrets=False))
    assert "hooks.example.com" in shown
    for secret in ("T0", "pass", "hidden"):
        assert secret not in shown


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metric": "training/rollout_prob_diff_mean"}, "one of training/rollout_probs_diff_mean"),
        ({"metric": "rollout_corr/*nothing"}, r"rules\[0\].metric"),
        ({"metric": "rollout_corr/chi2_seq", "by": "round"}, "by round"),
        ({"metric": "nonfinite_scalar/"}, r"rules\[0\].metric"),
        ({"metric": 3}, r"rules\[0\].metric is 3"),
        ({"by": "token"}, "whole, round, rank, stage"),
        ({"by": "rank", "metric": "logprob_abs_diff/mean", "staleness": 0}, "staleness"),
        ({"metric": "logprob_abs_diff/mean", "when": {"standard_errors": 4}}, "standard_errors"),
        (
            {"metric": "logprob_abs_diff/mean", "when": {"<": 1, "standard_errors": 4}},
            "with '>', 'median_ratio' or 'noise_ratio'",
        ),
        ({"metric": "logprob_abs_diff/mean", "when": {">": 1, "standard_errors": 31}}, "up to 30"),
        (
            {"metric": "rollout_corr/kl", "when": {">": 1, "standard_errors": 4}},
            "only with metric: logprob_abs_diff/mean or",
        ),
        ({"when": {}}, "median_ratio: k"),
        ({"when": {"=>": 1}}, r"rules\[0\].when has no field '=>'"),
        ({"when": {">": "0.1"}}, r"rules\[0\].when.> is '0.1'"),
        ({"when": {">": float("nan")}}, "a finite number"),
        ({"when": {">": True}}, "a finite number"),
        ({"when": {"median_ratio": 0}}, "a number over 0"),
        ({"when": {"z_score": {"steps": 5}}}, r"z_score"),
        ({"when": {"z_score": {"over": 3, "steps": 100_000}}}, "from 2 to 256"),
        ({"when": {"non_finite": False}}, "all of them must hold"),
        ({"for": 0}, r"rules\[0\].for is 0; expected an integer from 1"),
        ({"cooldown": -1}, r"rules\[0\].cooldown"),
        ({"actions": {}}, "at least one of finding, pin, webhook, capture"),
        ({"actions": {"finding": {"severity": "panic"}}}, "info, warning, error"),
        ({"actions": {"finding": {"see": ["roundz"]}}}, r"finding.see .* a list of dumps, kept"),
        ({"actions": {"finding": {"see": [{"rounds": 1}]}}}, "a list of dumps, kept"),
        ({"actions": {"finding": {"see": 5}}}, "a list of dumps, kept"),
        ({"actions": {"pin": 1.5}}, r"actions.pin"),
        ({"actions": {"exec": "rm"}}, r"no field 'exec'"),
        ({"actions": {"capture": {"ranks": "best(2)"}}}, r"worst\(k\)"),
        ({"actions": {"capture": {"steps": [5]}}}, "'next'"),
        ({"condition": "value > 1"}, r"rules\[0\] has no field 'condition'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(changes: Mapping[str, object], said: str) -> None:
    with pytest.raises(InvalidPlan, match=said):
        rules_of(**changes)


@pytest.mark.parametrize(
    "text",
    [
        "rules: [", "just text", "", "rules: {}", "rules: []\nruns: []", "extra: 1\nrules: []",
        "rules: []\nruns: {r: {capture: auto}}", "rules: []\nruns: {r: {capture: sometimes}}",
        "rules: []\nruns: {r: {capture: auto, budget: {captures: 0}}}",
        "rules: []\nruns: {r: {capture: auto, budget: {captures: 1, share: 5}}}",
        "rules: &all [*all]", "rules: !!python/object/apply:os.system [ls]", "[" * 5000,
        " " * 300_000,
    ],
    ids=range(14),
)  # fmt: skip
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(InvalidPlan):
        read_yaml(text)


def test_yaml_that_cannot_be_read_is_told_by_its_line_and_not_by_its_text() -> None:
    with pytest.raises(InvalidPlan, match="line 2") as caught:
        read_yaml("rules:\n  - webhook: https://host/SECRET: x")
    assert "SECRET" not in str(caught.value)


def test_two_rules_have_two_names() -> None:
    with pytest.raises(InvalidPlan, match="two rules are called 'mean'"):
        Rules.parse({"rules": [RULE, RULE]})


def test_a_run_has_a_budget_only_where_somebody_gave_one() -> None:
    found = Rules.parse(
        {
            "rules": [],
            "runs": {
                "qwen-*": {"capture": "auto", "budget": {"captures": 1}},
                "qwen-8b": {"capture": "auto", "budget": {"captures": 3}},
            },
        }
    )
    assert found.budget_of("qwen-8b") == Budget(3)
    assert found.budget_of("qwen-0.5b") == Budget(1)
    assert found.budget_of("other") is None
    said = {"capture": "auto", "capture_budget": {"captures": 2, "share": 0.1}}
    assert found.budget_of("other", said) == Budget(2, None, 0.1)
    for settings in (None, {"capture": "auto"}, {**said, "capture": "on"}, "auto"):
        assert found.budget_of("other", settings) is None


def test_a_budget_says_why_there_is_no_more() -> None:
    budget = Budget(captures=2, bytes=1000, share=0.1)
    assert budget.refusal(Spent()) is None
    assert budget.refusal(Spent(1, 999, 9.9, 100.0)) is None
    assert budget.bytes_left(Spent(bytes=400)) == 600
    assert Budget(1).bytes_left(Spent(bytes=400)) is None
    for spent, why in (
        (Spent(captures=2), "2 of 2 captures"),
        (Spent(bytes=1000), "1000 of 1000 bytes"),
        (Spent(seconds=11.0, run_seconds=100.0), "over the share of 0.1"),
        (Spent(under_way=("c1",)), "capture c1"),
    ):
        assert why in str(budget.refusal(spent))


COSTS = st.tuples(st.integers(0, 400), st.floats(0, 5), st.floats(0.1, 50))


@given(
    st.builds(
        Budget, st.integers(1, 5), st.none() | st.integers(1, 1000), st.none() | st.floats(0.01, 1)
    ),
    st.lists(COSTS, max_size=20),
)
def test_no_budget_is_spent_twice(budget: Budget, asked: list[tuple[int, float, float]]) -> None:
    spent = Spent()
    for size, seconds, between in asked:
        spent = dataclasses.replace(spent, run_seconds=spent.run_seconds + between + seconds)
        if budget.refusal(spent) is not None:
            continue
        left = budget.bytes_left(spent)
        size = size if left is None else min(size, left)
        spent = dataclasses.replace(
            spent,
            captures=spent.captures + 1,
            bytes=spent.bytes + size,
            seconds=spent.seconds + seconds,
            under_way=("c",),
        )
        assert budget.refusal(spent) is not None
        spent = dataclasses.replace(spent, under_way=())
    assert spent.captures <= budget.captures
    assert budget.bytes is None or spent.bytes <= budget.bytes


def test_the_seconds_of_a_run_are_those_of_its_attempts(tmp_path: Path) -> None:
    walls = ((100.0, 150.0, 140.0), (200.0, None, 260.0))
    with opened(tmp_path) as (store, catalogue):
        rows = [
            Put("attempts", {"attempt_id": number, "run": "r", "number": number,
                             "key": str(number), "opened_wall": began, "ended_wall": ended})
            for number, (began, ended, _) in enumerate(walls, 1)
        ]  # fmt: skip
        rows += [
            Put("processes", {"incarnation": str(number), "attempt_id": number, "role": "actor",
                              "rank": 0, "last_wall": last})
            for number, (_, _, last) in enumerate(walls, 1)
        ]  # fmt: skip
        write(store, Put("runs", {"run": "r", "created_wall": 0.0}), *rows)
        assert spent_by(catalogue, "r").run_seconds == 50.0 + 60.0


@pytest.mark.parametrize(
    ("capture", "wrong"),
    [
        ({"level": "L9"}, "config.level is 'L9'"),
        ({"task": "foo"}, "config.task is 'foo'"),
        ({"keep": 5}, "keep"),
        ({"config": {"task": "tensor", "dump_path": "/anywhere"}}, None),  # runs decide where
        (True, None),
    ],
)
def test_a_capture_that_could_not_be_requested_is_refused_with_its_rule(
    capture: object, wrong: str | None
) -> None:
    rule = {"name": "r", "metric": "counts/tokens", "when": {">": 1}}
    rules = Rules.parse({"rules": [{**rule, "actions": {"capture": capture}}]})
    if wrong is None:
        rules.check_captures()
        return
    with pytest.raises(InvalidPlan, match=r"rules\[0\].actions.capture: .*" + wrong):
        rules.check_captures()


@pytest.mark.parametrize("metric", ["stage_seconds", "nonfinite_scalar/loss"])
@pytest.mark.parametrize("more", [{"by": "round"}, {"staleness": 0}, {"when": {"noise_ratio": 2}}])
def test_what_a_number_of_stages_cannot_have_is_refused(
    metric: str, more: dict[str, object]
) -> None:
    rule = {"name": "r", "metric": metric, "when": {">": 1}, **more}
    with pytest.raises(InvalidPlan, match=r"rules\[0\]\.metric"):
        Rules.parse({"rules": [rule]})
