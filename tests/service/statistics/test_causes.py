"""Which cause comes first, of batches whose cause is known: their tokens were drawn from it."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.support.batches import Array, batch_of
from tests.support.sampler import (
    NOISE,
    SHARPNESS,
    Batch,
    as_is,
    draw,
    min_p,
    other_model,
    temperature,
    top_k,
    top_p,
)

from stagescope_service.statistics import Comparability, Summary, examine, summarise
from stagescope_service.statistics.coverage import missing_values

SHAPES = ((64, 60), (32, 100), (16, 200), (8, 300))
MODELS = [
    *itertools.product([model for model in SHARPNESS if model != "certain"], NOISE),
    ("usual", "bf16"),
]
KINDS = [(*kind, SHAPES[number % len(SHAPES)]) for number, kind in enumerate(MODELS)]
"""13 batches: of models from sure to vague, in each number format."""

OTHER_MODEL = {"calibration", "unrelated"}
CUT, SCALED = {"renormalised"}, {"temperature"}
Case = tuple[set[str], dict[str, Any]]
CASES: dict[str, Case] = {
    "older version": (OTHER_MODEL, {"reported": other_model(0.2)}),
    "much older version": (OTHER_MODEL, {"reported": other_model(0.6)}),
    "missing adapter": (OTHER_MODEL, {"reported": other_model(0.3, rank=8)}),
    "large missing adapter": (OTHER_MODEL, {"reported": other_model(1.0, rank=16)}),
    "draft model": (OTHER_MODEL, {"reported": other_model(1.5)}),
    "draft model that is less sure": (
        OTHER_MODEL, {"reported": other_model(1.0, sharpness=0.9)}
    ),
    "adapter missing in the trainer": (OTHER_MODEL, {"trained": other_model(1.0, rank=8)}),
    "5 % foreign ids": (OTHER_MODEL, {"foreign": 0.05}),
    "1 % foreign ids": (OTHER_MODEL, {"foreign": 0.01}),
    **{f"top-k {k}": (CUT, {"sampled": top_k(k)}) for k in (2, 4, 10, 20, 50)},
    **{f"top-p {share}": (CUT, {"sampled": top_p(share)}) for share in (0.5, 0.8, 0.9, 0.95)},
    **{f"min-p {share}": (CUT, {"sampled": min_p(share)}) for share in (0.05, 0.1)},
    **{
        f"temperature {by}": (SCALED, {"sampled": temperature(by)})
        for by in (0.4, 0.6, 0.8, 0.9, 1.1)
    },
    **{
        f"raw beside processed {by}": (
            SCALED, {"sampled": temperature(by), "reported": as_is, "trained": temperature(by)}
        )
        for by in (0.4, 0.5, 0.6, 0.8, 1.2, 1.5)
    },
    **{
        f"trainer of another model, sharpness {by}": (
            OTHER_MODEL, {"trained": other_model(0.5, sharpness=by)}
        )
        for by in (0.8, 1.25)
    },
}  # fmt: skip


def judged(batch: Batch, **others: Any) -> Comparability:
    return examine(summary_of(batch, **others))


def summary_of(batch: Batch, **others: Any) -> Summary:
    mask = np.ones(batch.p.shape, np.int64)
    samples = [f"s{row}" for row in range(len(batch.p))]
    return summarise(batch_of(batch.p, batch.q, mask, samples=samples, **others))


@pytest.mark.parametrize("name", [*CASES])
def test_the_right_cause_comes_first(name: str) -> None:
    right, how = CASES[name]
    found: Counter[str | None] = Counter()
    for number, (model, engine, shape) in enumerate(KINDS):
        rng = np.random.default_rng(number)
        found[judged(draw(rng, *shape, model=model, engine=engine, **how)).cause] += 1
    assert_first(right, found)


def assert_first(right: set[str], found: Counter[str | None]) -> None:
    detected = found.total() - found[None]
    assert sum(found[cause] for cause in right) >= 0.95 * detected, found
    assert detected, found


@pytest.mark.parametrize("by", [0.4, 0.5, 0.6, 0.8])
def test_a_temperature_is_found_where_contexts_hide_its_slope(by: float) -> None:
    """The mean ratio is 1, as the tokens were drawn from what is reported."""
    for number, (model, engine, shape) in enumerate(KINDS):
        rng = np.random.default_rng(100 + number)
        how: dict[str, Any] = {"model": model, "engine": engine, "sampled": temperature(by)}
        found = judged(draw(rng, *shape, **how))
        assert (found.verdict, found.cause) == ("suspect", "temperature"), (model, engine)


@pytest.mark.parametrize("engine", NOISE)
def test_tokens_of_which_a_few_are_scored_as_others_show_no_temperature(engine: str) -> None:
    """Of foreign ids all sure tokens move in one direction, and unlikely ones in the other."""
    for number, (model, shape) in enumerate(itertools.product(SHARPNESS, SHAPES)):
        rng = np.random.default_rng(number)
        drawn = draw(rng, *shape, model=model, engine=engine, foreign=0.02)
        assert judged(drawn).cause != "temperature", (model, shape)


def coarse(stream: Array, step: float) -> Array:
    """As a format has it without a number between 0 and -step."""
    return np.where(stream > -step, 0.0, stream).astype(np.float32)


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize(("of_p", "of_q"), [(0.0, 1e-4), (0.0, 1e-3), (0.0, 4e-3), (4e-3, 4e-3)])
def test_foreign_ids_beside_usual_zeros_are_no_missing_values(
    of_p: float, of_q: float, share: float
) -> None:
    found: Counter[str | None] = Counter()
    for number, (model, engine) in enumerate(itertools.product(SHARPNESS, NOISE)):
        rng = np.random.default_rng(number)
        shape = SHAPES[number % len(SHAPES)]
        drawn = draw(rng, *shape, model=model, engine=engine, foreign=share)
        found[judged(Batch(coarse(drawn.p, of_p), coarse(drawn.q, of_q), drawn.entropy)).cause] += 1
    assert_first(OTHER_MODEL, found)


@pytest.mark.parametrize("step", [1e-4, 1e-3, 4e-3, 2e-2])
@pytest.mark.parametrize("model", ["usual", "sure", "certain"])
def test_one_zero_that_no_noise_explains_is_found_among_usual_ones(model: str, step: float) -> None:
    """The trainer has -10.8 there, and almost 0 beside the other zeros, of which there are many."""
    for seed in range(10):
        drawn = draw(np.random.default_rng(seed), 32, 60, model=model)
        batch = Batch(drawn.p, coarse(drawn.q, step), drawn.entropy)
        assert missing_values(summary_of(batch)).status == "ok"
        batch.p[3, 7], batch.q[3, 7] = -10.8, 0.0
        found = judged(batch)
        assert (found.verdict, found.cause) == ("suspect", "coverage")
        assert "sample s3, token 7: -10.8" in found.suspects[0].text


@pytest.mark.parametrize("side", ["p", "q"])
@pytest.mark.parametrize("count", [1, 2, 3, 20])
@pytest.mark.parametrize("model", ["sure", "usual", "unsure"])
def test_a_few_values_that_were_filled_with_0_are_named(model: str, count: int, side: str) -> None:
    """As an engine does that returns no log-prob of a token; the other stream has -10.8."""
    batch = draw(np.random.default_rng(3), 32, 60, model=model)
    assert judged(batch).verdict == "comparable"
    places = np.random.default_rng(4).permutation(32 * 60)[:count]
    filled, other = (batch.p, batch.q) if side == "p" else (batch.q, batch.p)
    filled.reshape(-1)[places] = 0.0
    other.reshape(-1)[places] = -10.8 - 0.01 * np.arange(count)
    found = judged(batch)
    assert (found.verdict, found.cause) == ("suspect", "coverage")
    text = found.suspects[0].text
    assert text.startswith({"p": "old", "q": "rollout"}[side] + " is exactly 0 in ")
    if count < 20:
        for place, value in zip(places, other.reshape(-1)[places], strict=True):
            assert f"sample s{place // 60}, token {place % 60}: {value:.4g}" in text


@pytest.mark.parametrize("coarse", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("model", ["sure", "certain"])
def test_zeros_that_are_usual_are_no_values_that_were_filled_in(model: str, coarse: float) -> None:
    """Of a sure model's log-probs many are exactly 0; the trainer scores some tokens as others."""
    batch = draw(np.random.default_rng(3), 64, 100, model=model, foreign=0.05)
    batch.q[batch.q > -coarse] = 0.0
    assert missing_values(summary_of(batch)).status == "ok"
    healthy = draw(np.random.default_rng(3), 64, 100, model=model)
    healthy.q[healthy.q > -coarse] = 0.0
    assert missing_values(summary_of(healthy)).status == "ok"
    healthy.q[0, :60], healthy.p[0, :60] = 0.0, -10.8
    assert missing_values(summary_of(healthy)).status == "suspect"


def test_one_token_far_off_is_a_usual_zero_by_chance() -> None:
    """A third of a sure model's log-probs are 0, and so are those of a third of all outliers."""
    zeros = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        batch = draw(rng, 64, 100, model="sure")
        batch.q[batch.q > -2e-3] = 0.0
        batch.p[0, 0] = batch.q[0, 0] - 4.0
        zeros += batch.q[0, 0] == 0.0
        assert missing_values(summary_of(batch)).status == "ok"
    assert zeros > 5
