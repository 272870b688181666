"""Symptoms of one fault that are one cause, and what names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.service.rules.planted import (
    Batch,
    and_scalars,
    diagnosed,
    found_in,
    proved_by,
    put_operators,
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


def test_a_captured_operator_ends_with_its_symptoms(live: Service) -> None:
    """Nobody captured a step after the restart, and all values are finite again."""

    def not_finite(batch: Batch) -> None:
        if batch.rank == 1:
            batch.p[:, ::4] = np.nan

    train(live, "mended", since(4, not_finite), steps=range(1, 13))
    report(live, "mended", "non_finite_operator", step=8, severity="error", role="actor", rank=1)
    train(live, "mended", steps=range(13, 24), key="a2", start=9_000.0)
    assert not live.get("/runs/mended/diagnosis", step=15)["healthy"]
    answer = live.get("/runs/mended/diagnosis")
    assert answer["healthy"]
    operator = next(row for row in answer["rows"] if row["rule"] == "non_finite_operator")
    assert (operator["since_step"], operator["last_step"]) == (4, 12)
    assert operator["sentence"].endswith("sick since step 4, last seen in step 12")
    assert operator["against"] == ["last seen in step 12; its symptoms ended"]


@pytest.mark.parametrize(("calls", "last_step"), [(40, 14), (10, None)])
def test_a_later_capture_of_the_same_calls_ends_an_operator(
    calls: int, last_step: int | None, live: Service
) -> None:
    """A capture of a few modules says nothing about the others."""
    run = f"again-{calls}"
    place: dict[str, Any] = {"role": "actor", "rank": 1, "stage": "actor_update"}
    train(live, run, steps=range(1, 20))
    report(live, run, "non_finite_operator", step=14, severity="error", **place)
    put_operators(live, run, 14, calls=40, first_non_finite={"name": "x"}, **place)
    mask = {"name": "a mask"}  # an infinity that is perhaps none
    put_operators(live, run, 17, calls=calls, first_non_finite=mask, certain=False, **place)
    put_operators(live, run, 18, calls=40, **(place | {"stage": "rollout_generate"}))
    row = rows_of(live, run)["non_finite_operator"]
    assert (row["verdict"], row["last_step"]) == ("found", last_step)
    if last_step:
        why = "the operators of these ranks are finite in step 17"
        assert row["against"] == [f"last seen in step 14; {why}"]


def test_an_operator_of_an_earlier_attempt_is_not_that_of_the_newest(live: Service) -> None:
    """Nothing but the capture ever showed it, and the restart changed the processes."""
    train(live, "old", steps=range(1, 10))
    report(live, "old", "non_finite_operator", step=8, severity="error", role="actor", rank=1)
    train(live, "old", steps=range(10, 16), key="a2", start=9_000.0)
    row = rows_of(live, "old", step=12)["non_finite_operator"]
    assert row["last_step"] is None
    assert row["against"] == ["no capture of attempt 2 shows that these ranks are finite"]
    row = rows_of(live, "old")["non_finite_operator"]
    assert (row["last_step"], row["sentence"].split(", ")[-1]) == (8, "last seen in step 8")


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
