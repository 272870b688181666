"""A training whose fault is on one rank of four: the doctor names it, bisect proves it, and the
doctor then names it once. transformers alone scores the kept tokens."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.api import Service, service
from tests.support.command_line import invoke
from tests.support.coordinators import wait_for

import stagescope_workers
from stagescope_workers.bisect.transformers_model import TransformersModel

pytestmark = pytest.mark.usefixtures("alone")
Log = npt.NDArray[np.float32]
STAGE: Final = "actor_compute_log_prob"
STEPS, SICK, RANKS, ROWS = range(1, 13), 6, 4, 6


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("service")) as running:
        running.use_ring()
        yield running


@pytest.fixture(scope="module")
def training(model: Path) -> list[list[dict[str, Any]]]:
    """What each rank records in each step of a healthy training."""
    exact, drawn = TransformersModel(model, "float32"), np.random.default_rng(3)

    def payload(step: int, rank: int) -> dict[str, Any]:
        prompts = [[0, *map(int, drawn.integers(2, 90, 6 + row))] for row in range(ROWS)]
        rows = [
            list(map(int, drawn.integers(2, 90, size))) for size in drawn.integers(20, 60, ROWS)
        ]
        trainer = [
            np.array(exact.score_as([*a, *b])[len(a) :], np.float32)
            for a, b in zip(prompts, rows, strict=True)
        ]
        return {
            "prompts": [np.array(each) for each in prompts],
            "responses": [np.array(each) for each in rows],
            "old_log_probs": trainer,
            "rollout_log_probs": [
                each + drawn.normal(0, 0.002, len(each)).astype(np.float32) for each in trainer
            ],
            "response_mask": [np.ones(len(each), np.int64) for each in rows],
            "sample_ids": [f"{step}-{rank}-{row}" for row in range(ROWS)],
        }

    return [[payload(step, rank) for rank in range(RANKS)] for step in STEPS]


def late(rows: Sequence[Log]) -> list[Log]:
    return [np.concatenate([row[:1], row[:-1]]) for row in rows]


def lower(rows: Sequence[Log]) -> list[Log]:
    return [row - np.float32(0.1) for row in rows]


def next_rows(rows: Sequence[Log]) -> list[Log]:
    others = [*rows[1:], rows[0]]
    return [np.resize(other, len(row)) for row, other in zip(rows, others, strict=True)]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [(late, "the rollout's log-probs are shifted: each stands 1 token later"),
     (lower, "the rollout's log-probs are 0.1 nat below the trainer's everywhere"),
     (next_rows, "the rows of the two sides are in another order")],
)  # fmt: skip
def test_bisect_proves_a_fault_of_one_rank(
    fault: Callable[[Sequence[Log]], list[Log]], cause: str, live: Service, model: Path,
    training: list[list[dict[str, Any]]],
) -> None:  # fmt: skip
    run = fault.__name__.replace("_", "-")
    assert live.tokens is not None
    url, token = live.server.url, live.tokens.operate
    with ExitStack() as stack:
        probes = [
            stack.enter_context(stagescope_workers.init(
                run, rank=rank, world_size=RANKS, attempt_key=run, url=url, token=token
            ))
            for rank in range(RANKS)
        ]  # fmt: skip
        for number, of_ranks in zip(STEPS, training, strict=True):
            for rank, (probe, payload) in enumerate(zip(probes, of_ranks, strict=True)):
                own = dict(payload)
                if rank == 1 and number >= SICK:
                    own["rollout_log_probs"] = fault(payload["rollout_log_probs"])
                with probe.stage(STAGE, step=number) as stage:
                    stage.record(**own)
                    stage.log(**{"response_length/clip_ratio": 0.0})  # no fault of this training
        for probe in probes:
            with probe.stage(STAGE, step=STEPS.stop):
                pass

    def typed(command: str) -> str:
        environment = {"STAGESCOPE_URL": url, "STAGESCOPE_TOKEN": token}
        return str(invoke(*shlex.split(command, comments=True), env=environment).stdout)

    wait_for(lambda: live.get(f"/runs/{run}/diagnosis")["measured"] == len(STEPS))
    symptom, proof, *_ = typed(f"doctor {run}").splitlines()
    assert "rank 1" in symptom
    assert f"since step {SICK}" in symptom
    assert proof.startswith(f"  prove it: stagescope bisect {run}:{STEPS[-1]} ")
    command = proof.partition("prove it: stagescope ")[2].replace("--engine URL ", "")
    shown = " ".join(typed(command.replace("DIR", str(model))).split())
    assert shown.startswith(f"On actor rank 1, {cause}")
    wait_for(lambda: live.get(f"/runs/{run}/diagnosis")["rows"][0]["rule"] == "bisected")
    first = typed(f"doctor {run}").splitlines()[0]
    assert first.startswith(f"On actor rank 1, {cause}")
    assert f"since step {SICK}" in first
    rows = live.get(f"/runs/{run}/diagnosis")["rows"]
    lasting = [row for row in rows if row["verdict"] == "found" and row["last_step"] is None]
    assert [row["rule"] for row in lasting if row["cause"] is None] == ["bisected"]
