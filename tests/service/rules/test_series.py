"""Which values a rule sees in a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest
from tests.support.batches import batch_of, random_streams

from stagescope_service.rules.document import Rules
from stagescope_service.rules.facts import StepFacts
from stagescope_service.rules.series import Publisher, SeriesKey
from stagescope_service.statistics import (
    PartRecord,
    StepSummary,
    assemble,
    examine,
    publish,
    summarise,
)
from stagescope_service.statistics.mismatch import publish_cell
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.tables import UnfinishedRank
from stagescope_wire.policy_versions import encode_versions
from stagescope_wire.schema import Part

MEAN = "training/rollout_probs_diff_mean"


def step_summary_of(ages: list[int] | None, *, noise: float = 0.3) -> StepSummary:
    """A step of one rank: the i-th row of tokens was sampled `ages[i]` versions ago."""
    return assemble([record_of(ages, noise=noise)])


def record_of(
    ages: list[int] | None, *, rank: int = 0, noise: float = 0.3, names: tuple[str, ...] = ()
) -> PartRecord:
    """What a rank reports; `names` are the versions of its rows as texts."""
    p, q, mask = random_streams(np.random.default_rng(3), 4, 20, noise, share=1.0)
    mask[:] = 1
    mask[:, 9] = 0
    extra: dict[str, Any] = {}
    if ages is not None:
        extra = {"versions": np.repeat(10 - np.array(ages), 20).reshape(4, 20)}
        p[np.array(ages) > 0] -= 5.0  # drift, which is no mismatch
    version = None if ages is None else 10
    samples = [f"{name}{rank}" for name in "abcd"]
    texts: Mapping[str, str] = {}
    if names:
        codes, texts = encode_versions(names)
        version, extra = 10, {"versions": np.array(codes)}
    batch = batch_of(p, q, mask, samples=samples, policy_version=version, **extra)
    if names:
        named = {int(code): text for code, text in texts.items()}
        batch = dataclasses.replace(batch, version_names=named)
    stage, part = "actor_compute_log_prob", Part(rank, 0, 0, 0)
    return PartRecord(f"{rank}:1", summarise(batch), stage, "actor", rank, part, None, {}, "i")


def facts_of(step_summary: StepSummary) -> StepFacts:
    """Return the facts of a step whose one stage has these statistics."""
    facts = StepFacts(cast(Catalogue, None), "r", 1, 1, 5)
    facts.whole, facts.stages = step_summary, [step_summary.stage]
    return facts


def values(step_summary: StepSummary, **rule: object) -> dict[SeriesKey, float]:
    """What a rule sees."""
    made = Rules.parse({"rules": [{"name": "r", "metric": MEAN, "when": {">": 1}, **rule}]})
    facts = facts_of(step_summary)
    found = Publisher(facts).values(made.rules[0])
    return dict(zip(found.series, found.values.tolist(), strict=True))


def test_by_whole_round_rank_and_stage() -> None:
    step_summary = step_summary_of(None)
    assert values(step_summary) == {SeriesKey(MEAN): publish(step_summary.summary)[MEAN]}
    assert set(values(step_summary, by="rank")) == {SeriesKey(MEAN, role="actor", rank=0)}
    assert set(values(step_summary, by="stage")) == {SeriesKey(MEAN, step_summary.stage)}
    rounds = values(step_summary, by="round")
    assert rounds == {
        SeriesKey(MEAN, round=number): publish_cell(cell)[MEAN]
        for number, cell in step_summary.summary.rounds.items()
    }
    assert len(rounds) == 2
    assert values(step_summary, stage="another") == {}
    assert len(values(step_summary, metric="nonfinite/*", when={">": 0})) == 6


def test_drift_is_not_looked_at_where_versions_are_told() -> None:
    mixed = step_summary_of([0, 0, 1, 3])
    fresh = mixed.summary.staleness.get(0)
    assert fresh is not None
    (everything,) = values(mixed).values()
    (at_0,) = values(mixed, staleness=0).values()
    assert at_0 == publish_cell(fresh)[MEAN]
    assert at_0 < everything
    # What only whole steps have cannot be told of some of the tokens.
    assert values(mixed, metric="per_round/max_diff_value", staleness=0) == {}
    assert values(step_summary_of([2, 2, 1, 1]), staleness=0) == {}


@pytest.mark.parametrize("ages", [[-1, -1, -1, -1], [-205, 0, 0, 0], [-1, 0, 1, 3]])
def test_versions_that_do_not_exist_hide_no_token(ages: list[int]) -> None:
    """Their counter is another one: no token is known to be stale, as where none is told."""
    step_summary = step_summary_of(ages)
    for metric, by in ((MEAN, "whole"), (MEAN, "round")):
        found = values(step_summary, metric=metric, by=by, staleness=0)
        assert found == values(step_summary, metric=metric, by=by)
        assert found


@pytest.mark.parametrize(
    "names",
    [("step-10",) * 3 + ("default",), ("10", "10", "10", "default"), ()],
    ids=["a text among numbered ones", "a text among numbers", "a rank without versions"],
)
def test_a_rank_whose_tokens_have_no_age_is_looked_at_too(names: tuple[str, ...]) -> None:
    step = assemble([record_of([0, 0, 0, 0]), record_of(None, rank=1, noise=3.0, names=names)])
    assert [cell.masked for _, cell in step.summary.staleness.items()] == [76]
    assert step.total.masked == 152
    for by in ("whole", "round"):
        assert values(step, by=by, staleness=0) == values(step, by=by)
    assert step.summary.fresh.masked == 152
    (said,) = (each for each in examine(step.summary).checks if each.name == "versions")
    assert said.status == ("suspect" if names else "unknown")
    assert "how old 76 of the step's 152 tokens are is not known" in said.text
    assert "look at staleness 0" not in said.text
    if not names:
        assert "of 76 of 152 tokens is not recorded" in step.summary.why_no_staleness


@pytest.mark.parametrize("ages", [None, [0, 0, 0, 0]])
def test_a_synchronous_step_is_looked_at_whole(ages: list[int] | None) -> None:
    step_summary = step_summary_of(ages)
    for metric in (MEAN, "per_round/max_diff_value"):
        (value,) = values(step_summary, metric=metric, staleness=0).values()
        assert value == publish(step_summary.summary)[metric]
        assert math.isfinite(value)


def test_a_mean_of_few_large_tokens_is_as_uncertain_as_they_are() -> None:
    q = np.full((1, 41), -2.0)
    p = q.copy()
    p[0, :20] += 0.1 * np.where(np.arange(20) % 2, 1.0, -1.0)  # 20 of one size
    p[0, 21] += 3.0  # one of the 20 of the second round, and most of the sum of all squares
    mask = np.ones(q.shape, np.int64)
    mask[0, 20] = 0
    record = PartRecord("i:1", summarise(batch_of(p, q, mask)), "s", "actor", 0)
    step_summary = assemble([record])
    when = {">": 1, "standard_errors": 4}
    for by, errors in (("round", [20**-0.5, math.nan]), ("whole", None), ("rank", None)):
        rule = {"name": "r", "metric": "logprob_abs_diff/mean", "by": by, "when": when}
        facts = facts_of(step_summary)
        found = Publisher(facts).values(Rules.parse({"rules": [rule]}).rules[0])
        assert found.errors.tolist() == pytest.approx(errors or [math.nan], nan_ok=True)


def test_rounds_are_looked_at_where_all_tokens_have_the_staleness() -> None:
    metric = "logprob_abs_diff/mean"
    fresh, mixed = step_summary_of([0, 0, 0, 0]), step_summary_of([0, 0, 1, 3])
    rounds = values(fresh, metric=metric, by="round")
    assert len(rounds) == 2
    assert values(fresh, metric=metric, by="round", staleness=0) == rounds
    assert values(mixed, metric=metric, by="round", staleness=0) == {}
    assert len(values(mixed, metric=metric, by="round")) == 2


def test_a_rule_on_missing_ranks_sees_its_stage_alone() -> None:
    missing: list[UnfinishedRank] = [
        {"role": "actor", "rank": rank, "stage": stage, "status": "open"}
        for rank, stage in ((0, "actor_update"), (1, "actor_update"), (2, "weight_sync"))
    ]
    facts = StepFacts(cast(Catalogue, None), "r", 1, 1, 5)
    facts.missing = missing

    def seen(**rule: object) -> dict[SeriesKey, float]:
        one = {"name": "r", "metric": "missing_ranks", "when": {">": 0}, **rule}
        found = Publisher(facts).values(Rules.parse({"rules": [one]}).rules[0])
        return dict(zip(found.series, found.values.tolist(), strict=True))

    assert set(seen(stage="weight_sync").values()) == {1.0}
    assert set(seen(stage="actor_update").values()) == {2.0}
    by_rank = seen(stage="actor_update", by="rank")
    assert {(each.role, each.rank) for each in by_rank} == {("actor", 0), ("actor", 1)}
