"""Checks of streams whose tokens older policy versions sampled, or versions that do not exist."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.service.statistics.test_causes import CASES, SHAPES, judged
from tests.service.statistics.test_comparability import assembled
from tests.support.sampler import NOISE, SHARPNESS, Batch, draw, other_model, temperature, top_p

from stagescope_service.statistics import Comparability, examine, examine_cell
from stagescope_service.statistics.comparability import examine_ranks
from stagescope_service.statistics.noise_checks import DRIFTED_SLOPE


def aged(batch: Batch, *versions: int, trainer: int = 5) -> Comparability:
    """Judge a batch whose rows were sampled by versions in turn."""
    rows = np.resize(np.array(versions), len(batch.p))
    return judged(batch, versions=rows, policy_version=trainer)


def has_small_slope(found: Comparability) -> bool:
    slope = found.suspects[0].values.get("slope", 2.0) if found.suspects else 2.0
    return abs(slope - 1.0) <= DRIFTED_SLOPE


@pytest.mark.parametrize("name", [*CASES])
def test_versions_of_one_age_make_no_verdict_weaker(name: str) -> None:
    for model in ("sure", "usual", "unsure"):
        batch = draw(np.random.default_rng(7), 32, 100, model=model, **CASES[name][1])
        unknown = judged(batch)
        for trainer in (4, 5, 9):
            known = aged(batch, 4, trainer=trainer)
            # Policy drift explains a low correlation, a small slope, and sure tokens that moved in
            # both directions beside a temperature.
            if trainer > 4 and (known.cause, unknown.cause) == ("temperature", "calibration"):
                assert unknown.suspects[0].text.endswith("scores of another model or adapter")
                continue
            if unknown.cause != "unrelated" and (trainer == 4 or not has_small_slope(unknown)):
                assert (known.verdict, known.cause) == (unknown.verdict, unknown.cause)


@pytest.mark.parametrize("fresh", [0, 1, 2])
def test_a_temperature_is_found_in_stale_tokens(fresh: int) -> None:
    """64 rows of 60 tokens, of which at most 120 are fresh: too few to judge alone."""
    batch = draw(np.random.default_rng(7), 64, 60, sampled=temperature(0.8))
    found = aged(batch, *[5] * fresh, *[4] * (64 - fresh))
    assert (found.verdict, found.cause) == ("suspect", "temperature")
    text = found.suspects[0].text
    assert f"(1 behind the trainer's) sampled {(64 - fresh) * 60} of the step's 3840 tokens" in text
    assert "only where it sharpens or flattens the policy" in text


def test_what_staleness_means_is_said_of_each_check() -> None:
    cut = aged(draw(np.random.default_rng(7), 64, 60, sampled=top_p(0.9)), 1, 3)
    assert cut.cause == "renormalised"
    assert "(2 to 4 behind the trainer's)" in cut.suspects[0].text
    assert cut.suspects[0].text.endswith("policy drift leaves this mean at 1")
    healthy = aged(draw(np.random.default_rng(7), 64, 60), 4)
    assert healthy.verdict == "comparable"
    (said,) = (check for check in healthy.checks if check.name == "versions")
    assert said.status == "unknown"
    assert "one policy version, 4, 1 behind the trainer's" in said.text


def joined(one: Batch, other: Batch) -> Batch:
    """The rows of both."""
    pairs = ((one.p, other.p), (one.q, other.q), (one.entropy, other.entropy))
    return Batch(*map(np.concatenate, pairs))


def test_one_rank_of_stale_tokens_is_named() -> None:
    batch = draw(np.random.default_rng(7), 64, 60)
    hot = draw(np.random.default_rng(8), 64, 60, sampled=temperature(0.8))
    batch.p[32:48], batch.q[32:48] = hot.p[32:48], hot.q[32:48]
    step = assembled(batch, 4, versions=np.full(64, 4), policy_version=5)
    found = examine(step.summary, step.ranks)
    assert found.verdict == "suspect"
    (said,) = (check for check in found.suspects if check.name == "temperature")
    assert "(actor 2)" in said.text
    verdicts = [each.verdict for each in examine_ranks(step.summary, step.ranks)]
    assert verdicts == ["comparable", "comparable", "suspect", "comparable"]
    assert [
        examine_cell(row.cell, step.summary, row.produced).verdict for row in step.ranks
    ] == verdicts


@pytest.mark.parametrize("model", ["sure", "usual", "unsure"])
@pytest.mark.parametrize("side", ["sampled", "trained"])
def test_sure_tokens_that_are_stale_alone_show_no_temperature(model: str, side: str) -> None:
    """No line shows so large an update, and fresh tokens, a half of all, show none of it."""
    how: dict[str, Any] = {side: temperature(0.4)}
    fresh = draw(np.random.default_rng(7), 64, 100, model=model)
    stale = draw(np.random.default_rng(8), 64, 100, model=model, **how)
    found = aged(joined(fresh, stale), *[5] * 64, *[4] * 64)
    assert "temperature" not in {check.name for check in found.suspects}


def test_policy_drift_that_sharpens_the_policy_is_no_temperature() -> None:
    """Half of the rows are fresh, and show no slope."""
    fresh = draw(np.random.default_rng(7), 64, 100)
    stale = draw(np.random.default_rng(8), 64, 100, trained=temperature(0.8))
    batch = joined(fresh, stale)
    assert judged(batch).cause == "temperature"
    found = aged(batch, *[5] * 64, *[4] * 64)
    assert {check.name for check in found.suspects} == {"versions"}
    (said,) = (check for check in found.checks if check.name == "temperature")
    assert said.text.endswith("and fresh ones show no slope")
    # The same in all tokens is none.
    hot = draw(np.random.default_rng(7), 128, 100, sampled=temperature(0.8))
    assert aged(hot, *[5] * 64, *[4] * 64).cause == "temperature"


@pytest.mark.parametrize("fresh", [0, 1])
@pytest.mark.parametrize("model", ["sure", "usual"])
def test_a_small_slope_without_fresh_tokens_may_be_policy_drift(model: str, fresh: int) -> None:
    batch = draw(np.random.default_rng(7), 64, 100, model=model, trained=temperature(0.95))
    assert judged(batch).cause == "temperature"
    found = aged(batch, *[5] * fresh, *[4] * (64 - fresh))
    assert {check.name for check in found.suspects} <= {"versions"}
    # It is not counted as fine.
    assert found.verdict == ("suspect" if fresh else "unknown")
    (said,) = found.undecided
    assert said.name == "temperature"
    assert said.text.startswith("not decided: old grows by ")
    assert "up to 0.115 from 1" in said.text
    assert said.text.endswith("and too few tokens are fresh to tell")
    # Versions of which a counter is wrong are no drift.
    assert aged(batch, 6).cause == "temperature"


def test_of_120_updates_that_sharpen_the_policy_none_is_suspect() -> None:
    kinds = list(itertools.product(SHARPNESS, NOISE))
    wrong = []
    for seed in range(120):
        (model, engine), by = kinds[seed % 15], (0.97, 0.95, 0.93, 0.9)[seed // 15 % 4]
        update = temperature(by)
        shape = SHAPES[seed % 4]
        rng = np.random.default_rng(seed)
        found = aged(draw(rng, *shape, model=model, engine=engine, trained=update), 4)
        if found.suspects:
            wrong.append((seed, model, engine, by, found.suspects))
    assert not wrong


@pytest.mark.parametrize("version", [6, 7, 210])
def test_versions_ahead_of_the_trainer_are_named_and_hide_no_cause(version: int) -> None:
    healthy = aged(draw(np.random.default_rng(7), 64, 60), version)
    assert (healthy.verdict, healthy.cause) == ("suspect", "versions")
    text = healthy.suspects[0].text
    assert f"3840 tokens are of policy versions up to {version - 5} ahead of the trainer's" in text
    assert f"the newest is {version}" in text
    hot = aged(draw(np.random.default_rng(7), 64, 60, sampled=temperature(0.8)), version)
    assert hot.cause == "temperature"
    assert {check.name for check in hot.suspects} == {"temperature", "versions"}
    few = aged(draw(np.random.default_rng(7), 64, 60), version, *[5] * 63)
    assert "60 tokens are of policy versions up to" in few.suspects[0].text
    assert "the tokens come from 2 policy versions" in few.suspects[0].text


def test_of_400_healthy_asynchronous_batches_none_is_suspect() -> None:
    """Each update moves the policy: from not at all to far."""
    kinds = list(itertools.product(SHARPNESS, NOISE))
    updates: list[dict[str, Any]] = [
        {}, *({"trained": other_model(size)} for size in (0.02, 0.1, 0.3)),
        *({"trained": other_model(size, rank=8)} for size in (0.05, 0.2)),
    ]  # fmt: skip
    wrong = []
    for seed in range(400):
        (model, engine), shape = kinds[seed % 15], SHAPES[seed % 4]
        update = updates[seed % len(updates)]
        batch = draw(np.random.default_rng(seed), *shape, model=model, engine=engine, **update)
        found = aged(batch, 4)
        if found.verdict != "comparable":
            wrong.append((seed, model, engine, found.suspects))
    assert not wrong
