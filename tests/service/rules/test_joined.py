"""Symptoms of one fault that are one cause, and what names it."""

from __future__ import annotations

import numpy as np
from tests.service.rules.planted import (
    Batch,
    and_scalars,
    diagnosed,
    found_in,
    proved_by,
    report,
    rows_of,
    since,
    train,
)
from tests.support.api import Service


def test_a_clamp_is_named_with_its_bound(live: Service) -> None:
    def clamp(batch: Batch) -> None:
        batch.q = np.where(batch.rounds >= 0, np.maximum(batch.q, -2.5), batch.q)

    rows = diagnosed(live, "clamp", since(8, clamp), steps=range(1, 15))
    row = rows["streams_lack_values"]
    assert (row["verdict"], row["cause"], row["since_step"]) == ("found", None, 8)
    assert row["sentence"].startswith(
        "The rollout log-probs are cut off at -2.5, or filled with it"
    )


def test_a_stream_that_nothing_fills_in_is_named_with_its_rank(live: Service) -> None:
    def unfilled(batch: Batch) -> None:
        if batch.rank == 1:
            batch.p = np.zeros_like(batch.p)

    rows = diagnosed(live, "unfilled", since(8, unfilled), steps=range(1, 15))
    row = rows["streams_lack_values"]
    text = "On actor rank 1 the old log-probs are 0 in every token, since step 8, in 7 of 7 steps"
    assert (row["cause"], row["sentence"]) == (None, text)


def test_a_nan_is_one_cause_and_its_operator_may_be_captured_later(live: Service) -> None:
    def not_finite(batch: Batch) -> None:
        if batch.rank == 1:
            batch.p[:, ::4] = np.nan

    rows = diagnosed(live, "nan", since(4, not_finite), steps=range(1, 13))
    assert rows["streams_lack_values"]["cause"] == "non_finite_log_probs"
    assert rows["non_finite_log_probs"]["cause"] is None
    report(live, "nan", "non_finite_operator", step=11, severity="error", role="actor", rank=1)
    rows = rows_of(live, "nan")
    operator = rows["non_finite_operator"]
    assert (operator["cause"], operator["since_step"]) == (None, 4)
    assert operator["sentence"] == (
        "An operator's result is not finite, actor 1, first captured in step 11; sick since step 4"
    )
    assert operator["next"][0].startswith("stagescope non-finite 11 ")
    assert rows["non_finite_log_probs"]["cause"] == "non_finite_operator"
    assert rows["streams_lack_values"]["cause"] == "non_finite_operator"


def test_a_captured_operator_begins_with_no_symptom_that_is_another_s(live: Service) -> None:
    def spikes(step: int) -> float:
        return 90.0 if step == 7 else 1.0

    def not_finite(batch: Batch) -> None:
        if batch.rank == 1:
            batch.p[:, ::4] = np.nan

    train(
        live, "spiked", since(13, not_finite), steps=range(1, 18),
        scalars=and_scalars(grad_norm=spikes),
    )  # fmt: skip
    report(live, "spiked", "non_finite_operator", step=16, severity="error", role="actor", rank=1)
    rows = rows_of(live, "spiked")
    assert rows["non_finite_operator"]["since_step"] == 13
    assert (rows["gradient_spikes"]["since_step"], rows["gradient_spikes"]["cause"]) == (7, None)


def test_equal_streams_are_shown_by_their_proof(live: Service) -> None:
    def copied(batch: Batch) -> None:
        batch.p = batch.q.copy()

    rows = diagnosed(live, "copied", copied, steps=range(1, 7))
    assert found_in(rows) == {"streams_copied"}
    assert "the same numbers in all" in " ".join(proved_by(live, rows["streams_copied"]).split())
