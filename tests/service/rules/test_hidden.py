"""Two faults at once: the larger one does not hide the smaller one."""

from __future__ import annotations

import numpy as np
import pytest
from tests.service.rules.planted import (
    Batch,
    Change,
    copied,
    cut_vocabulary,
    first_tokens,
    report,
    shift,
    since,
    train,
)
from tests.support.api import Service


def on_rank(rank: int, change: Change) -> Change:
    return lambda batch: change(batch) if batch.rank == rank else None


def of_engine(name: str, change: Change) -> Change:
    """Every rank has rows of two engines; the change is of the rows of one."""

    def changed(batch: Batch) -> None:
        batch.engine = [f"engine-{row % 2}" for row in range(len(batch.q))]
        own = np.array([each == name for each in batch.engine])
        p, q = batch.p.copy(), batch.q.copy()
        change(batch)
        batch.p = np.where(own[:, None], batch.p, p)
        batch.q = np.where(own[:, None], batch.q, q)

    return changed


def noisy(batch: Batch) -> None:
    batch.add(0.1)


NONE = of_engine("", lambda batch: None)


@pytest.mark.parametrize(
    ("larger", "smaller", "first", "second", "where"),
    [
        (on_rank(1, shift), of_engine("engine-0", noisy), "streams_shifted", "engine_apart",
         "engine-0"),
        (of_engine("engine-0", shift), on_rank(3, noisy), "streams_shifted", "rank_apart",
         "actor rank 3"),
        (on_rank(1, shift), first_tokens, "streams_shifted", "first_token", "the first token"),
        (on_rank(0, copied), cut_vocabulary, "streams_copied", "sampling_differs", ""),
        (on_rank(1, shift), noisy, "streams_shifted", "mismatch_jump", "attempt 1"),
    ],
)  # fmt: skip
def test_the_smaller_fault_is_the_second_cause(
    larger: Change, smaller: Change, first: str, second: str, where: str, live: Service
) -> None:
    def both(batch: Batch) -> None:
        NONE(batch)
        since(10, smaller)(batch)
        since(6, larger)(batch)

    run = f"{first}-{second}"
    train(live, run, both)
    rows = live.get(f"/runs/{run}/diagnosis")["rows"]
    causes = [row for row in rows if row["verdict"] == "found" and not row["explained_by"]]
    assert [row["rule"] for row in causes] == [first, second]
    assert [row["since_step"] for row in causes] == [6, 10]
    assert where in str(causes[1]["where"])
    assert causes[1]["for"][-1].endswith("left out")


def test_a_fault_of_all_ranks_beside_one_of_a_rank_is_of_all_ranks(live: Service) -> None:
    """Rank 0 is shifted as well, so it cannot show the cut; the trigger's worst token is its."""

    def both(batch: Batch) -> None:
        cut_vocabulary(batch)
        since(10, on_rank(0, shift))(batch)

    train(live, "all-and-one", both)
    for step in (1, 11, 21):
        report(
            live, "all-and-one", "trigger_probs_diff_mean", step=step, role="actor", rank=0,
            evidence={"metric": "training/rollout_probs_diff_mean"},
        )  # fmt: skip
    rows = live.get("/runs/all-and-one/diagnosis")["rows"]
    causes = {row["rule"]: row for row in rows if row["verdict"] == "found" and not row["cause"]}
    assert [*causes] == ["streams_shifted", "sampling_differs"]
    assert causes["streams_shifted"]["where"] == "actor rank 0"
    assert causes["sampling_differs"]["where"] is None
    assert causes["sampling_differs"]["since_step"] == 1
    (fired,) = (row for row in rows if row["rule"] == "trigger_fired")
    assert fired["since_step"] == 1
    assert {"streams_shifted", "sampling_differs"} <= {*fired["explained_by"]}
