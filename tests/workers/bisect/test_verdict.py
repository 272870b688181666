"""The ladder's logic on numbers alone: no engine, no model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from stagescope_workers.bisect import arms
from stagescope_workers.bisect.arms import NAMES, Scores
from stagescope_workers.bisect.kept import Float64
from stagescope_workers.bisect.verdict import Tried, Verdict, decide, ladder, needs_hypotheses

DRAWN = np.random.default_rng(5)
TRUE = DRAWN.normal(-3, 1, 400)
FAULT = DRAWN.normal(0, 0.3, 400)
ROUNDED = TRUE + DRAWN.normal(0, 0.01, 400)
"""What the engine's dtype makes of the true values, in another implementation ..."""
OWN_ROUNDED = TRUE + DRAWN.normal(0, 0.01, 400)
"""... and in transformers."""


def scored(values: Mapping[str, Float64], floor: float = 0.0) -> list[Scores]:
    return [Scores(arm=name, values=values[name], floor=floor) if name in values
            else Scores(arm=name, status="left out") for name in NAMES]  # fmt: skip


def healthy_below(swap: str) -> dict[str, Float64]:
    """The fault is in each arm before the swap, and in none from it on."""
    clean = {
        **dict.fromkeys((arms.RECORDED, *arms.ENGINE_ARMS), ROUNDED),
        arms.TRANSFORMERS: OWN_ROUNDED, arms.HEAD: OWN_ROUNDED,
        arms.FLOAT32: TRUE, arms.EAGER: TRUE + 1e-7, arms.CHECKPOINT: TRUE,
    }  # fmt: skip
    before = NAMES[: NAMES.index(swap)]
    return {name: each + FAULT if name in before else each for name, each in clean.items()}


def verdict(values: Mapping[str, Float64], p: Float64 = TRUE, *tried: Tried) -> Verdict:
    return decide(ladder(scored(values), p), tried)


@pytest.mark.parametrize(
    ("swap", "kind"),
    [(arms.DECODED, "changed"), (arms.UNCACHED, "prefix_cache"), (arms.PREFILL, "decode"),
     (arms.SINGLE, "batching"), (arms.TRANSFORMERS, "weights"), (arms.HEAD, "head_rounding"),
     (arms.FLOAT32, "dtype"), (arms.EAGER, "attention"), (arms.CHECKPOINT, "weights")],
)  # fmt: skip
def test_the_swap_at_which_the_mismatch_disappears_is_the_cause(swap: str, kind: str) -> None:
    found = verdict(healthy_below(swap))
    assert (found.kind, found.is_named) == (kind, True)
    assert arms.ARMS[swap].when in found.text
    assert "0.24 becomes " in found.text


def test_a_mismatch_of_the_size_of_the_rounding_is_healthy() -> None:
    found = verdict(healthy_below(arms.RECORDED))
    assert found.kind == "healthy"
    assert found.text.startswith("Nothing is wrong with this step")
    assert not found.is_named


def test_a_mismatch_within_the_noise_floor_is_healthy() -> None:
    noisy: dict[str, Float64] = dict.fromkeys((arms.RECORDED, arms.PREFILL), ROUNDED)
    floor = float(np.abs(ROUNDED - TRUE).mean())
    assert decide(ladder(scored(noisy, floor), TRUE), ()).kind == "healthy"
    # The same mismatch of an engine that repeats itself exactly is not explained by noise.
    assert decide(ladder(scored(noisy, 0.0), TRUE), ()).kind != "healthy"


def test_an_engine_in_float32_has_no_rounding_to_excuse_a_mismatch() -> None:
    exact = dict.fromkeys(arms.ENGINE_ARMS, TRUE + 1e-6)
    values = {**exact, arms.RECORDED: ROUNDED, arms.TRANSFORMERS: OWN_ROUNDED, arms.FLOAT32: TRUE}
    assert ladder(scored(values), TRUE).rounding == 0.0
    assert verdict(values).kind == "changed"


def test_a_rounding_that_was_not_measured_is_no_cause() -> None:
    values = {arms.RECORDED: ROUNDED, arms.PREFILL: ROUNDED, arms.TRANSFORMERS: TRUE}
    assert not decide(ladder(scored(values), TRUE), ()).is_named
    assert decide(ladder(scored(values), TRUE, "float32"), ()).kind == "weights"
    large = {**values, arms.RECORDED: TRUE + FAULT, arms.PREFILL: TRUE + FAULT}
    assert decide(ladder(scored(large), TRUE), ()).kind == "weights"


def test_the_trainer_alone_is_different() -> None:
    values = healthy_below(arms.RECORDED)
    found = ladder(scored(values), TRUE + FAULT)
    assert found.gap is not None
    assert (found.gap.arm, found.gap.side) == (arms.TRAINER, "trainer")
    assert needs_hypotheses(found)
    assert decide(found, ()).kind == "trainer_weights"


def test_a_hypothesis_that_reproduces_a_side_goes_before_the_swap() -> None:
    tried = Tried("temperature", "rollout", "The rollout's are at temperature 0.7", 0.24, 0.01, 99)
    near = Tried("positions", "rollout", "shifted", 0.24, 0.2, 99)
    found = verdict(healthy_below(arms.TRANSFORMERS), TRUE, near, tried)
    assert found.kind == "temperature"
    assert "0.24 becomes 0.01" in found.text
    assert verdict(healthy_below(arms.TRANSFORMERS), TRUE, near).kind == "weights"


def test_two_faults_are_named_by_the_larger() -> None:
    values = healthy_below(arms.UNCACHED)
    for name in NAMES[: NAMES.index(arms.CHECKPOINT)]:
        values[name] = values[name] + FAULT[::-1] / 3
    found = verdict(values)
    assert found.kind == "prefix_cache"
    assert found.text.startswith("Most of the mismatch disappears")


def test_nothing_is_named_where_no_arm_gives_either_side() -> None:
    other = TRUE + DRAWN.normal(0, 1, 400)
    values = dict.fromkeys(healthy_below(arms.RECORDED), other)
    found = verdict({**values, arms.RECORDED: TRUE + FAULT})
    assert (found.kind, found.is_named) == ("none", False)


def test_an_arm_that_scored_few_tokens_is_compared_over_its_own() -> None:
    """The fault is in the last tokens alone; the decoded arm scored the first ones."""
    values = healthy_below(arms.TRANSFORMERS)
    late = np.where(np.arange(400) < 200, 0.0, FAULT * 4)
    for name in (arms.RECORDED, arms.DECODED, arms.UNCACHED, arms.PREFILL, arms.SINGLE):
        values[name] = TRUE + late
    for name in (arms.DECODED, arms.UNCACHED):
        values[name] = np.where(np.arange(400) < 200, values[name], np.nan)
    found = ladder(scored(values), TRUE)
    assert found.gap is not None
    assert found.gap.arm == arms.TRANSFORMERS
    prefill = next(rung for rung in found.rungs if rung.arm == arms.PREFILL)
    assert prefill.was is not None
    assert (prefill.was.tokens, prefill.was.mean) == (200, 0.0)


def test_without_a_model_no_side_is_blamed() -> None:
    recorded = ROUNDED + FAULT
    found = verdict(dict.fromkeys((arms.RECORDED, *arms.ENGINE_ARMS), recorded))
    assert (found.kind, found.is_named) == ("none", False)
    assert found.advice == "give --model, so that transformers scores them, too"
