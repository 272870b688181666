"""What the service's own settings have runs keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagescope_service.core.captures.active_plan import Plan
from stagescope_service.core.captures.keep_policy import (
    keep_policy_of,
    parse_keep_policy,
    read_keep_policy,
)
from stagescope_wire.errors import InvalidInput, InvalidPlan

FILE = """
runs:
  "qwen*": {every_n_steps: 10, what: {trajectory: true, loss: true}}
  "*": {steps: [0], what: all}
"""


def test_a_run_takes_the_first_pattern_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "keep.yaml"
    path.write_text(FILE)
    keep_policy = read_keep_policy(path)
    of_qwen, of_others = (
        keep_policy_of(keep_policy, "qwen3-8b"),
        keep_policy_of(keep_policy, "other"),
    )
    assert of_qwen is not None
    assert of_others is not None
    assert (of_qwen["every_n_steps"], of_qwen["what"]) == (10, ["trajectories", "loss"])
    assert of_others["steps"] == [0]
    assert (
        keep_policy_of(parse_keep_policy({"runs": {"qwen*": {"what": ["loss"]}}}), "other") is None
    )
    everyone = parse_keep_policy({"what": ["loss"]})
    assert keep_policy_of(everyone, "any") == everyone["*"]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[1, 2]", "what runs are to keep is"),
        ("what: [loss]\nruns: {}", "what runs are to keep is"),
        ("runs: {a: {wat: [loss]}}", "of runs 'a': keep has no field 'wat'"),
        ("runs: {1: {what: [loss]}}", "what runs are to keep is"),
        ("a: &x [b]\nc: *x", "not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "keep.yaml"
    path.write_text(text)
    with pytest.raises(InvalidPlan, match=wrong):
        read_keep_policy(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_keep_policy(tmp_path / "none.yaml")


def test_the_plan_keeps_it_and_tells_the_ranks() -> None:
    keep_policy = parse_keep_policy({"runs": {"r": {"every_n_steps": 2, "what": ["is_loss"]}}})
    plan = Plan(keep_policy=keep_policy, revision=3)
    place = {"stage": "actor_update", "role": "actor", "rank": 0}
    assert plan.keeps(run="r", step=4, **place) == ["is_loss"]  # type: ignore[arg-type]
    assert plan.keeps(run="r", step=5, **place) == []  # type: ignore[arg-type]
    assert plan.keeps(run="other", step=4, **place) == []  # type: ignore[arg-type]
    assert plan.wire("r") == {"revision": 3, "captures": [], "keep": keep_policy["r"]}
    assert "keep" not in plan.wire("other")
