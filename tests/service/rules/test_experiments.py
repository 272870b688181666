"""What a bisection named, while the mismatch stays as large as in the step that was bisected."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from tests.service.rules.planted import (
    Batch,
    Change,
    cut_vocabulary,
    diagnosed,
    other_rows,
    report,
    shift,
    since,
    train,
)
from tests.support.api import Rank, Service

from stagescope_service.rules.evidence import Evidence, Series
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.symptoms.experiments import bisected


@dataclasses.dataclass
class History:
    """The part of a history that the rule reads."""

    values: list[float]
    bisections: list[dict[str, object]]
    run: str = "r"

    def metric(self, name: str) -> Series:
        steps = np.arange(1, len(self.values) + 1)
        return Series(name, steps, np.ones(len(steps), np.int64), np.array(self.values))


def found(values: list[float], step: int = 6, kind: str = "weights") -> Evidence:
    reported: dict[str, object] = {
        "run": "r", "attempt": None, "step": step, "kind": kind,
        "text": "The engine has other weights.",
    }  # fmt: skip
    history = History(values, [reported])
    return bisected(cast("RunHistory", history))


def test_the_cause_is_named_since_the_mismatch_rose() -> None:
    evidence = found([0.01] * 4 + [0.5] * 6)
    assert (evidence.verdict, evidence.since_step, evidence.last_step) == ("found", 5, None)
    assert evidence.headline == "The engine has other weights"
    assert evidence.where == "bisect-r-6"
    assert str(evidence.count) == "6 of 6 steps"


@pytest.mark.parametrize("later", [0.01, 2.0])
def test_a_mismatch_of_another_size_is_another_one(later: float) -> None:
    evidence = found([0.01] * 4 + [0.5] * 3 + [later] * 3)
    assert (evidence.since_step, evidence.last_step) == (5, 7)


@pytest.mark.parametrize("kind", ["none", "healthy"])
def test_a_bisection_without_a_cause_is_none(kind: str) -> None:
    evidence = found([0.5] * 8, kind=kind)
    assert evidence.verdict == "not found"
    assert evidence.against == ("step 6 was bisected: The engine has other weights.",)


# --- in the diagnosis of a training -------------------------------------------------------------
def bisect(live: Service, run: str, kind: str, text: str, ranks: Sequence[int] = ()) -> None:
    """Report the answer of a bisection of step 24."""
    about = {"run": run, "attempt": None, "step": 24, "kind": kind, "text": text, "advice": "",
             "ranks": [["actor", rank] for rank in ranks]}  # fmt: skip
    Rank(live, run=f"bisect-{run}-24", role="rollout", key="b", settings={"bisect": about})


def rank_one(change: Change, first: int = 8) -> Change:
    return since(first, lambda batch: change(batch) if batch.rank == 1 else None)


def lower(batch: Batch) -> None:
    batch.q = batch.q - 0.1


def further(batch: Batch) -> None:
    batch.add(0.1)
    batch.p = np.minimum(batch.p, -1e-6)


def causes(live: Service, run: str) -> list[dict[str, Any]]:
    rows = live.get(f"/runs/{run}/diagnosis")["rows"]
    return [row for row in rows if row["verdict"] == "found" and row["cause"] is None]


PROVEN: dict[str, tuple[Change, str, tuple[int, ...], str]] = {
    "shift": (rank_one(shift), "shifted", (1,), "streams_shifted"),
    "shift-of-all": (since(8, shift), "shifted", (), "streams_shifted"),
    "rows": (rank_one(other_rows), "reordered", (1,), "streams_unrelated"),
    "processed": (rank_one(cut_vocabulary), "processed", (1,), "sampling_differs"),
    "constant": (rank_one(lower), "constant", (1,), "sampling_differs"),
    "positions": (since(8, further), "positions", (), "mismatch_jump"),
}


@pytest.mark.parametrize("name", PROVEN)
def test_a_proven_cause_stands_once_with_the_symptoms_begin(name: str, live: Service) -> None:
    change, kind, ranks, symptom = PROVEN[name]
    run = f"proven-{name}"
    before = diagnosed(live, run, change)
    assert before[symptom]["verdict"] == "found"
    assert before[symptom]["since_step"] == 8
    bisect(live, run, kind, "It is so: 1 becomes 0.01.", ranks)
    first, *others = causes(live, run)
    assert (first["rule"], first["since_step"], others) == ("bisected", 8, [])
    assert symptom in first["explains"]
    assert f"bisect-{run}" not in first["sentence"]  # the proof names it
    assert (first["shown"], first["examined"]) == (17, 17)


@pytest.mark.parametrize("kind", ["changed", "weights", "dtype"])
@pytest.mark.parametrize("ranks", [(), (1,)])
def test_a_bisection_that_found_no_shift_does_not_precede_one(
    kind: str, ranks: tuple[int, ...], live: Service
) -> None:
    run = f"contradicted-{kind}-{len(ranks)}"
    train(live, run, rank_one(shift))
    bisect(live, run, kind, "The mismatch disappears when other weights score.", ranks)
    first, *others = causes(live, run)
    assert (first["rule"], first["since_step"], others) == ("streams_shifted", 8, [])
    assert "bisected" in first["explains"]
    (row,) = (
        row for row in live.get(f"/runs/{run}/diagnosis")["rows"] if row["rule"] == "bisected"
    )
    assert any(text.startswith("the recorded streams say otherwise: ") for text in row["against"])


def test_a_cause_that_was_proven_does_not_explain_the_fault_of_another_rank(live: Service) -> None:
    def change(batch: Batch) -> None:
        rank_one(shift)(batch)
        if batch.rank == 3 and batch.step >= 12:
            further(batch)

    train(live, "two-faults", change)
    bisect(live, "two-faults", "shifted", "On actor rank 1, the log-probs are shifted.", (1,))
    found = {row["rule"]: row for row in causes(live, "two-faults")}
    assert found["bisected"]["since_step"] == 8
    assert found["rank_apart"]["where"] == "actor rank 3"
    assert found["rank_apart"]["since_step"] == 12


def test_a_shift_says_nothing_of_the_engines_weights(live: Service) -> None:
    train(live, "two-sides", rank_one(shift))
    report(live, "two-sides", "canary_jump", "other weights",
           detail={"cause": "engine_weights", "engine": "e"})  # fmt: skip
    bisect(live, "two-sides", "shifted", "The log-probs are shifted.", (1,))
    found = {row["rule"]: row for row in causes(live, "two-sides")}
    assert "engine_weights" not in found["bisected"]["explains"]
