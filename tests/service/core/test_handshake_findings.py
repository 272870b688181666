"""What is said of settings that are not known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.support.trainings import Bench, Rank

AUTO = {"capture": "auto", "capture_budget": {"captures": 2}}


def said(settings: Mapping[str, object]) -> list[tuple[str, str]]:
    bench = Bench()
    for rank in (0, 1):  # the same of both is said once
        bench.give(*[Rank(rank).hello(settings=settings, world_size=2)])
        bench.give(*Rank(rank).work(1))
    found = bench.rows.of("findings")
    assert all((row["role"], row["rank"], row["attempt_id"]) == (None, None, 1) for row in found)
    return [(row["kind"], row["message"]) for row in found]


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        (
            {"expct": "bitwise"},
            "misspelt",
            "'expct', which is no known setting: did you mean expect?",
        ),
        ({"capture-budget": {}}, "misspelt", "did you mean capture_budget?"),
        ({"producer": {}}, "misspelt", "did you mean producers?"),
        ({"rollout_is_treshold": 2.0}, "misspelt", "did you mean rollout_is_threshold?"),
        ({"rollout_iss": "token"}, "misspelt", "did you mean rollout_is?"),
        ({"expects": "bitwise"}, "misspelt", "did you mean expect?"),
        ({"captures": "auto"}, "misspelt", "did you mean capture?"),
        ({"capture_budgets": {}}, "misspelt", "did you mean capture_budget?"),
        (
            {"expct": "bitwise", "expect": "bitwise"},
            "misspelt",
            "did you mean expect? expect stands beside it, and is read",
        ),
        ({"rollout_iss": 1, "rollout_is": "token"}, "misspelt", "did you mean rollout_is?"),
        (
            {"producers": {"rolout": "a", "rollout": "b"}},
            "misspelt",
            "did you mean rollout? rollout stands beside it",
        ),
        (
            {**AUTO, "capture_budget": {"captures": 2, "capturs": 3}},
            "misspelt",
            "'capturs': did you mean captures?",
        ),
        (
            {"capture": "auto", "capture_budget": {"captures": 2, "shares": 0.1}},
            "misspelt",
            "'shares': did you mean share?",
        ),
        ({"expect": "bitwsie"}, "refused", "settings.expect is 'bitwsie': expected 'bitwise'"),
        ({"capture": "atuo"}, "refused", "settings.capture is 'atuo': expected 'auto'"),
        (
            {"capture": "auto"},
            "refused",
            "settings.capture_budget is missing: rules request no capture in this run, unless they "
            "name it with a budget; for example settings={'capture': 'auto', 'capture_budget': "
            "{'captures': 2}}",
        ),
        ({"capture_budget": {"captures": 2}}, "refused", "not read without settings.capture"),
        (
            {"capture": "auto", "capture_budget": {"captres": 2}},
            "misspelt",
            "'captres': did you mean captures? Rules request no capture",
        ),
        ({**AUTO, "capture_budget": {"captures": 0}}, "refused", "capture_budget.captures"),
        (
            {"producers": {"rollout_logprobs": "engine"}},
            "misspelt",
            "'rollout_logprobs', which is no stream: did you mean rollout_log_probs?",
        ),
        ({"producers": {"rolout": "engine"}}, "misspelt", "did you mean rollout?"),
        ({"producers": "engine"}, "refused", "settings.producers is 'engine'"),
        ({"keep": {"what": ["trajectores"]}}, "misspelt", "did you mean trajectories?"),
        ({"keep": {"what": ["old_logprobs"]}}, "misspelt", "did you mean old_log_probs?"),
        ({"keep": {"wat": ["loss"]}}, "refused", "keep has no field 'wat'"),
        ({"rollout_is": "tokn"}, "refused", "settings.rollout_is is 'tokn'"),
        (
            {"rollout_is": "token", "rollout_is_threshold": "abc"},
            "refused",
            "settings.rollout_is_threshold is 'abc'",
        ),
    ],
)
def test_what_is_meant_to_be_read_and_is_not_is_a_finding(
    settings: dict[str, Any], kind: str, text: str
) -> None:
    [(found, message)] = said(settings)
    assert found == f"{kind}_setting"
    assert text in message


@pytest.mark.parametrize(
    "settings",
    [
        {},
        AUTO,
        {"expect": "bitwise", "capture": None},
        {"expect": None, "capture": "none"},
        {"producers": {"rollout": "engine", "old_log_probs": "trainer", "teacher": "x"}},
        {"keep": {"what": ["trajectories", "is_loss", "my_tensor", "policy_loss", "param"],
                  "parameters": ["*"]}},
        {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True},
        # the user's own, and verl's
        {"rollout_n": 8, "rollout_rs_threshold": 1, "lr": 1e-6, "verl": {"trainer.n": 4}},
        {"expert": 1, "except": 2, "expected": 3, "captured": 5, "peek": 6},
        {"keep": {"what": ["losses", "others"]}},
        {"seed": 3, "capture_every": 5, "max_expect": 1, "rollouts_per_prompt": 4, "n": 1},
    ],
)  # fmt: skip
def test_what_is_the_users_own_or_right_is_not(settings: Mapping[str, object]) -> None:
    assert said(settings) == []
