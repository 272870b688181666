"""What policy drift of tokens of recorded versions explains is no fault."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.service.rules.planted import (
    Batch,
    Change,
    diagnosed,
    found_in,
    proved_by,
    since,
    versions_ahead,
)
from tests.support.api import Service

Ages = Callable[[int], int]


def one_step_off(begin: int = 2) -> Ages:
    """All tokens are fresh at first, and one version old from a step on."""
    return lambda step: int(step >= begin)


def aged(age: Ages, drift: float = 0.06) -> Change:
    """Tokens have recorded versions, and differ more the older they are."""

    def change(batch: Batch) -> None:
        batch.versions = np.full(batch.q.shape, batch.step - age(batch.step))
        batch.add(drift * age(batch.step), batch.versions < batch.step)

    return change


def mixed(batch: Batch) -> None:
    """All tokens are fresh in the first step, and half of them one or two versions old later."""
    age = np.minimum(np.array([0, 0, 1, 2])[:, None], batch.step - 1)
    batch.versions = np.broadcast_to(batch.step - age, batch.q.shape).copy()
    for own in (1, 2):
        batch.add(0.1 * own, batch.step - batch.versions == own)


def both(*changes: Change) -> Change:
    def change(batch: Batch) -> None:
        for each in changes:
            each(batch)

    return change


@pytest.mark.parametrize(
    ("begin", "syncs", "rule"),
    [
        (2, True, "mismatch_jump_at_first_sync"), (2, False, "mismatch_jump"),
        (13, False, "mismatch_jump"),
    ],
)  # fmt: skip
def test_one_step_off_is_healthy(begin: int, syncs: bool, rule: str, live: Service) -> None:
    change = aged(one_step_off(begin))
    rows = diagnosed(live, f"off-{begin}-{syncs}", change, syncs=syncs)
    assert found_in(rows) == set()
    assert "mean staleness 0 to 1" in rows[rule]["against"][1]
    assert rows["staleness"]["record"] is None


def test_an_engine_that_gets_no_weights_any_more_is_named(live: Service) -> None:
    def stuck(batch: Batch) -> None:
        age = max(0, batch.step - 8)
        batch.versions = np.full(batch.q.shape, batch.step - age)
        batch.add(0.06 * age, bool(age))

    row = diagnosed(live, "stuck", stuck, steps=range(1, 17))["staleness"]
    assert (row["verdict"], row["since_step"], row["cause"]) == ("found", 9, None)
    text = "All tokens are of one policy version, which is 8 versions old in step 16, since step 9"
    assert row["sentence"].startswith(text)
    [evidence] = row["for"]
    assert "no step has fresh ones beside them" in evidence
    assert "nan" not in evidence
    assert "8" in [line.split()[0] for line in proved_by(live, row).splitlines() if line]


def test_mixed_ages_are_drift_alone(live: Service) -> None:
    rows = diagnosed(live, "mixed", mixed, syncs=True)
    assert found_in(rows) == {"staleness"}
    of_sync = rows["mismatch_jump_at_first_sync"]["against"]
    assert "of staleness 0 is 0.0" in of_sync[1]


@pytest.mark.parametrize(
    ("run", "change", "rule", "begin"),
    [
        ("of-tokens-as-old", both(aged(one_step_off()), since(15, lambda batch: batch.add(0.2))),
         "mismatch_jump", 15),
        ("more-than-drift", both(aged(one_step_off()), since(2, lambda batch: batch.add(0.6))),
         "mismatch_jump_at_first_sync", 2),
        ("of-fresh-tokens", both(mixed, since(2, lambda batch: batch.add(0.1))),
         "mismatch_jump_at_first_sync", 2),
    ],
)  # fmt: skip
def test_a_jump_beside_drift_is_found(
    run: str, change: Change, rule: str, begin: int, live: Service
) -> None:
    row = diagnosed(live, run, change, syncs=True)[rule]
    assert (row["verdict"], row["since_step"]) == ("found", begin)


def lagging(batch: Batch) -> None:
    """The engine of odd ranks is one version behind."""
    batch.engine = f"replica {batch.rank % 2}"
    batch.versions = np.full(batch.q.shape, batch.step - batch.rank % 2)
    batch.add(0.1 * (batch.rank % 2), batch.versions < batch.step)


def test_old_tokens_explain_the_engine_that_sampled_them(live: Service) -> None:
    rows = diagnosed(live, "lagging", lagging)
    assert rows["engine_apart"]["explained_by"] == ["staleness"]
    assert rows["staleness"]["explained_by"] == []


def test_old_tokens_explain_the_rank_that_got_them(live: Service) -> None:
    def one_rank(batch: Batch) -> None:
        batch.versions = np.full(batch.q.shape, batch.step - int(batch.rank == 2))
        batch.add(0.1, batch.versions < batch.step)

    rows = diagnosed(live, "one-rank", one_rank)
    assert rows["rank_apart"]["explained_by"] == ["staleness"]


def test_an_engine_that_differs_more_than_old_tokens_is_a_cause(live: Service) -> None:
    def change(batch: Batch) -> None:
        mixed(batch)
        batch.engine = f"replica {batch.rank % 2}"
        batch.add(0.4, bool(batch.rank % 2))

    rows = diagnosed(live, "engine", change)
    assert rows["engine_apart"]["verdict"] == "found"
    assert "staleness" not in rows["engine_apart"]["explained_by"]


def test_versions_that_do_not_exist_are_shown_as_ages_below_zero(live: Service) -> None:
    row = diagnosed(live, "ahead-shown", versions_ahead, steps=range(1, 7))["versions_impossible"]
    rows = [line.split() for line in proved_by(live, row).splitlines()]
    assert ["-1", "384"] in [line[:2] for line in rows]
