"""A few tokens that are far off carry a mean, and say nothing about where they happen to lie."""

from __future__ import annotations

import numpy as np
import pytest
from tests.service.rules.planted import (
    TOKENS,
    Batch,
    Change,
    diagnosed,
    first_tokens,
    found_in,
    old_versions,
    rows_of,
    train,
)
from tests.support.api import Service


def one_bad(column: int, by: float, rank: int = 0) -> Change:
    """One token of one rank's first row is far off in every step."""

    def change(batch: Batch) -> None:
        if batch.rank == rank:
            batch.q[0, column] = batch.p[0, column] - by

    return change


def bad_round(batch: Batch) -> None:
    for round_number, by in ((1, 10.0), (2, 30.0)):
        one_bad(round_number * (TOKENS + 1) + 5, by)(batch)


def bad_engine(batch: Batch) -> None:
    batch.engine = f"replica {batch.rank % 2}"
    one_bad(5, 30.0, rank=1)(batch)


def bad_old(batch: Batch) -> None:
    """The last rows are of an older policy that has not moved."""
    old_versions(batch)
    batch.p = batch.q + batch.random.normal(0.0, 0.01, batch.q.shape)
    if batch.rank == 0:
        batch.q[-1, 5] = batch.p[-1, 5] - 30.0


FEW: dict[str, tuple[Change, str]] = {
    "first": (one_bad(0, 6.0), "first_token"),
    "far first": (one_bad(0, 30.0), "first_token"),
    "last": (one_bad(TOKENS - 1, 6.0), "last_token"),
    "far last": (one_bad(TOKENS - 1, 30.0), "last_token"),
    "rank": (one_bad(5, 30.0, rank=2), "rank_apart"),
    "round": (bad_round, "mismatch_rises_with_rounds"),
    "engine": (bad_engine, "engine_apart"),
    "old": (bad_old, "staleness"),
}
"""Name -> what is off, and the rule that it is no symptom of. One below -40 is a fill value."""


@pytest.mark.parametrize("name", FEW)
def test_a_token_that_is_far_off_makes_no_symptom_of_its_place(name: str, live: Service) -> None:
    change, rule = FEW[name]
    run = f"few-{name.replace(' ', '-')}"
    rows = diagnosed(live, run, change, steps=range(1, 13))
    assert rows[rule]["verdict"] == "not found", rows[rule]
    assert rows["hidden_tails"]["verdict"] == "found"
    assert {*rows["hidden_tails"]["explained_by"]} <= {"tokens_apart"}
    placed = {rule for _, rule in FEW.values()}
    assert not found_in(rows) & placed
    answer = live.get("/steps/12/metrics", run=run)
    codes = {each["code"] for each in answer["comparability"]}
    assert not {"first_token", "last_token"} & codes


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_edges_of_many_rounds_that_are_off_are_found(share: float, live: Service) -> None:
    def change(batch: Batch) -> None:
        plain = batch.p
        first_tokens(batch)
        of = np.arange(len(plain))[:, None] < share * len(plain)
        batch.p = np.where(of, batch.p, plain)

    train(live, f"many-edges-{share}", change, steps=range(1, 13))
    assert rows_of(live, f"many-edges-{share}")["first_token"]["verdict"] == "found"


@pytest.mark.parametrize("closed", [10, 14])
def test_a_few_values_that_are_not_finite_begin_in_their_own_step(
    closed: int, live: Service
) -> None:
    """A step has 64 tokens: the other checks add up several steps."""

    def change(batch: Batch) -> None:
        batch.rounds[:, 16:] = -1
        if batch.step in (9, 10):
            batch.p[:, :4] = np.nan

    rows = diagnosed(live, f"few-nan-{closed}", change, steps=range(1, closed + 1), ranks=1)
    cause = rows["non_finite_log_probs"]
    assert (cause["verdict"], cause["since_step"], cause["cause"]) == ("found", 9, None)
    row = rows["streams_lack_values"]
    if closed == 14:
        assert row["verdict"] == "not found"
        return
    assert (row["since_step"], row["cause"]) == (9, "non_finite_log_probs")
    assert (row["shown"], row["examined"]) == (2, 2)
