"""The parts of a step's mismatch."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.service.rules.planted import (
    Batch,
    Change,
    cut_vocabulary,
    noisy_trainer,
    old_versions,
    other_rows,
    train,
)
from tests.support.api import Service
from tests.support.batches import batch_of
from tests.support.sampler import Scores, as_is, draw, temperature, top_p

import stagescope
from stagescope_service.rules.parts import fitted_line
from stagescope_service.statistics import Comparability, examine, summarise
from stagescope_service.statistics.cell import Cell
from stagescope_service.views.diagnosis import diagnosis_of


def test_the_mismatch_is_taken_apart(live: Service) -> None:
    def both(batch: Batch) -> None:
        old_versions(batch)
        noisy_trainer(batch)

    train(live, "apart", both)
    parts = {each["name"]: each for each in live.get("/runs/apart/diagnosis")["mismatch"]}
    # Half of the tokens have a mean |d| of about 0.1, the other half of 0.01.
    assert 0.8 < parts["stale tokens"]["share"] < 0.95
    assert 0.1 < parts["noise floor"]["share"] < 0.4
    stale, noise = parts["stale tokens"]["share"], parts["noise floor"]["share"]
    line = parts["temperature or truncation"]["share"]
    assert 0.0 <= line < 0.02  # of fresh tokens, whose d is noise
    # The floor is held against the fresh half alone.
    floor = min(1.0, noise / (2 * (1 - stale)))
    rest = (1 - stale) * max(0.0, (1 - line) ** 0.5 - floor)
    p, q, _ = kept_pairs(live, "apart", 24)
    left = float(parts["unexplained"]["text"].split(", ")[1].split()[0])
    assert left == pytest.approx(rest * np.abs(p - q).mean(), rel=1e-3)
    # Policy drift is a cause that was found: the rest is no riddle.
    assert parts["unexplained"]["share"] is None
    assert "nat, is noise, or that of a cause that was found" in parts["unexplained"]["text"]


def test_the_rest_has_a_share_only_where_nothing_says_why_the_mismatch_rose(live: Service) -> None:
    def jumps(batch: Batch) -> None:
        batch.add(0.1 if batch.step > 10 else 0.0)

    train(live, "jumps", jumps, steps=range(1, 21))
    answer = live.get("/runs/jumps/diagnosis")
    assert answer["rows"][0]["rule"] == "mismatch_jump"
    (rest,) = (each for each in answer["mismatch"] if each["name"] == "unexplained")
    assert rest["share"] > 0.9
    train(live, "noise", steps=range(1, 4))
    (rest,) = (
        each
        for each in live.get("/runs/noise/diagnosis")["mismatch"]
        if each["name"] == "unexplained"
    )
    assert rest["share"] is None
    assert "is the noise of this run" in rest["text"]


def parts_of(
    live: Service, run: str, change: Change, settings: Mapping[str, object] | None = None
) -> dict[str, dict[str, Any]]:
    train(live, run, change, steps=range(1, 3), settings=settings)
    return {each["name"]: each for each in live.get(f"/runs/{run}/diagnosis")["mismatch"]}


def sampled(engine: Scores, trainer: Scores = as_is) -> Change:
    """Tokens that a softmax sampled at the engine's and scored at the trainer's settings."""

    def change(batch: Batch) -> None:
        drawn = draw(batch.random, *batch.q.shape, model="unsure", sampled=engine, trained=trainer)
        batch.q, batch.p = (
            np.where(batch.rounds >= 0, values, 0.0) for values in (drawn.q, drawn.p)
        )

    return change


def kept_pairs(live: Service, run: str, step: int) -> tuple[Any, Any, Any]:
    """p, q and the weights of a step's model tokens, from the file of its batch."""
    assert live.tokens is not None
    with stagescope.attach(live.server.url, token=live.tokens.read) as session:
        batch = session.step(step, run=run).batch()
    on = batch["response_mask"] != 0
    weights = batch["rollout_is_weights"][on] if "rollout_is_weights" in batch else None
    return (
        batch["old_log_probs"][on].astype(float),
        batch["rollout_log_probs"][on].astype(float),
        weights,
    )


@pytest.mark.parametrize(
    ("change", "least", "most"),
    [
        # By numpy's polyfit, 20 seeds of as many tokens lie in 0.416-0.452, 0.911-0.922, 0-0.0013.
        (sampled(temperature(0.7)), 0.38, 0.49),
        (sampled(top_p(0.9)), 0.89, 0.95),
        (sampled(as_is), 0.0, 0.01),
        (cut_vocabulary, 0.95, 1.0),
    ],
    ids=["temperature 0.7", "top-p 0.9", "healthy", "shifted by 0.1 nats"],
)
def test_temperature_and_truncation_explain_a_share(
    change: Change, least: float, most: float, live: Service, request: pytest.FixtureRequest
) -> None:
    run = f"line-{request.node.callspec.id.replace(' ', '-')}"
    part = parts_of(live, run, change)["temperature or truncation"]
    p, q, _ = kept_pairs(live, run, 2)
    squares = float(((p - q) ** 2).sum())
    lines = [
        float(((y - np.polyval(np.polyfit(x, y, 1), x)) ** 2).sum()) for x, y in ((q, p), (p, q))
    ]
    plain = 1.0 - max(lines) / squares
    # What two parameters fit by chance is taken off: 2 of the tokens that d is spread over.
    spread = float(np.abs(p - q).sum()) ** 2 / squares
    assert part["share"] == pytest.approx(
        max(0.0, 1 - (1 - plain) * spread / (spread - 2)), abs=1e-6
    )
    assert least <= part["share"] <= most
    assert part["text"].startswith("share of the sum of squares of d over 1536 fresh tokens")
    assert part["counted"]


@pytest.mark.parametrize("side", ["p", "q", "both"])
@pytest.mark.parametrize("size", [0.01, 0.1, 0.5])
def test_no_line_explains_independent_noise(side: str, size: float) -> None:
    random = np.random.default_rng(7)
    true = -6.0 - random.exponential(1.0, (16, 256))
    noise = random.normal(0.0, size, (2, *true.shape))
    p, q = true + noise[0] * (side != "q"), true + noise[1] * (side != "p")
    found = fitted_line(*examined(p, q))
    # Noise of variance s on both sides flattens both lines: s / 2(v + s), where true has v = 1.
    flattened = size**2 / (2.0 * (1.0 + size**2)) if side == "both" else 0.0
    assert found.share is not None
    assert 0.0 <= found.share <= flattened + 0.01


def examined(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> tuple[Cell, Comparability]:
    mask = np.ones(p.shape, np.int64)
    summary = summarise(batch_of(p.astype(np.float32), q.astype(np.float32), mask))
    return summary.fresh, examine(summary)


def test_no_line_is_drawn_through_few_tokens_or_other_tokens(live: Service) -> None:
    random = np.random.default_rng(3)
    q = -1.0 - random.exponential(1.0, (8, 8))
    assert fitted_line(*examined(q * 0.7, q)) == (None, "64 fresh tokens, 128 are needed")
    q = -1.0 - random.exponential(1.0, (16, 64))
    few = q.copy()
    few[0, :5] -= 3.0
    found = fitted_line(*examined(few, q))
    assert (found.share, found.text[:41]) == (None, "5 tokens hold most of d's sum of squares,")
    part = parts_of(live, "line-unrelated", other_rows)["temperature or truncation"]
    assert part["share"] is None
    assert part["text"].startswith("the streams are not of the same tokens (unrelated)")


def test_rejected_tokens_have_their_share_of_the_mismatch(live: Service) -> None:
    def rejected(batch: Batch) -> None:
        batch.add(0.1, np.arange(batch.p.shape[1]) % 10 == 0)

    def rejecting(batch: Batch) -> None:
        rejected(batch)
        ratio = np.exp(batch.p - batch.q)
        batch.is_weights = np.where((ratio > 0.9) & (ratio < 1.1), ratio, 0.0)

    part = parts_of(live, "rejecting", rejecting)["rejected tokens"]
    p, q, weights = kept_pairs(live, "rejecting", 2)
    expected = np.abs(p - q)[weights == 0].sum() / np.abs(p - q).sum()
    assert 0.2 < expected < 0.9
    assert part["share"] == pytest.approx(expected, rel=1e-6)
    assert not part["counted"]
    assert "over the 1536 tokens" in part["text"]
    assert "at least: it is not recorded whether the trainer rejected them" in part["text"]
    # Without weights and without the mask of the update nothing is known.
    unknown = parts_of(live, "not-rejecting", lambda batch: None)["rejected tokens"]
    assert unknown["share"] is None
    assert "record rollout_is_weights" in unknown["text"]
    assert "record response_mask as the update uses it" in unknown["text"]
    # Weights that follow from the settings.
    threshold = {"rollout_is": "token", "rollout_is_threshold": "0.9_1.1"}
    part = parts_of(live, "by-settings", rejected, threshold)["rejected tokens"]
    assert part["share"] == pytest.approx(expected, rel=1e-6)


def test_tensors_are_not_read_for_a_loss_that_is_not_recorded(live: Service) -> None:
    def weigh(batch: Batch) -> None:
        batch.is_weights = np.ones_like(batch.p)

    train(live, "without-loss", steps=range(1, 3))
    assert parts_of(live, "with-loss", weigh)["rejected tokens"]["share"] == 0.0
    shutil.rmtree(live.settings.data_path / "ring")
    for run, starts in (("without-loss", "not recorded: "), ("with-loss", "no tensors of step 2 ")):
        fields, _ = diagnosis_of(live.app.state.deps, run, None, None)
        (part,) = (each for each in fields["mismatch"] if each["name"] == "rejected tokens")
        assert part["text"].startswith(starts)
