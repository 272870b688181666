from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.api import Rank, Service, service
from tests.support.runs.drawn import LOG_PROB, RANKS, train

from stagescope_service.store.contract import Put
from stagescope_service.views.reading.dependencies import Dependencies

FINDINGS = (
    ("f1", 4, "warning", "rank_apart", "rank 5 is apart"),
    ("f2", 4, "error", "non_finite_scalars", "loss is inf"),
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Attempt 1 did steps 1 to 8, attempt 2 resumed after 5 and did 6 to 10; 10 is open.

    In step 4 of run `trouble` rank 2 failed, rank 6 is still in its stage, rank 7 has not begun.
    """
    with service(tmp_path_factory.mktemp("home")) as running:
        running.engine.keep("old_log_probs", "rollout_log_probs", "response_mask")
        train(running, range(1, 9))
        train(running, range(6, 11), attempt=2, resumed_from_step=5)
        _mark(running)
        _trouble(running)
        yield running


@pytest.fixture(scope="session")
def deps(trained: Service) -> Dependencies:
    found: Dependencies = trained.app.state.deps
    return found


def _mark(running: Service) -> None:
    about = {"run": "r", "attempt_id": 1, "count": 1, "first_wall": 1.0, "last_wall": 2.0}
    puts = [
        Put("findings", {
            **about, "finding_id": name, "step": step, "severity": severity, "kind": kind,
            "message": message,
        })
        for name, step, severity, kind, message in FINDINGS
    ]  # fmt: skip
    dump = {"incarnation": "x", "attempt_id": 1, "step": 5, "stage": "actor_update",
            "role": "actor", "state": "complete", "capture_id": "cap-1"}  # fmt: skip
    puts += [Put("dumps", {**dump, "work_key": f"k{at}", "rank": at}) for at in range(2)]
    running.store.submit(puts).result(30)


def _trouble(running: Service) -> None:
    ranks = [
        Rank(running, run="trouble", rank=at, key="t", start=9000.0, world_size=RANKS)
        for at in range(RANKS)
    ]
    for step in (3, 4):
        for at, rank in enumerate(ranks):
            rank.clock = 9000.0 + 20.0 * (step - 3)
            if step == 4 and at == 7:
                continue
            rank.stage("rollout_generate", step, seconds=4.0 + at / 10)
            rank.begin(LOG_PROB, step)
            rank.clock += 2.0
            if step == 4 and at == 2:
                error = {"error_type": "RuntimeError", "error_message": "<b>out of memory</b>"}
                rank.end(LOG_PROB, step, status="failed", **error)
            elif step == 3 or at != 6:
                rank.end(LOG_PROB, step)
    running.now = 9000.0 + 40.0
