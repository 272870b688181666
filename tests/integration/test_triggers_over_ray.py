"""A NaN in one layer of one rank, on a real cluster: found, pinned, and where allowed captured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagescope.session import Session

pytest.importorskip("ray")
pytest.importorskip("msprobe")
from tests.support.cluster import SECONDS, Service, answer, eventually
from tests.support.ranks import Process
from tests.support.triggering import Hook, hook

pytestmark = pytest.mark.ray

AT = 6
"""The step from which rank 1 holds a NaN."""
STAGE = "actor_compute_log_prob"
RULES = """
rules:
  - name: poison
    metric: nonfinite/*
    when: {">": 0}
    cooldown: 2000
    actions:
      finding: {severity: error, advice: look}
      pin: 2
      webhook: WEBHOOK
      capture: {ranks: worst(1), level: L0}
runs:
  "allowed-*": {capture: auto, budget: {captures: 1, bytes: 100000000}}
"""


def _rank_class() -> Any:
    """Return the class by value: the actor's process cannot import the tests."""

    class Rank:
        """A rank that takes log-probs with a model of three layers, in step with the others."""

        def __init__(self, run: str, rank: int, store: str) -> None:
            import torch

            from stagescope_workers import init

            torch.set_num_threads(1)
            torch.manual_seed(0)
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=2
            )
            self.middle = torch.nn.Linear(8, 8)
            self.model = torch.nn.Sequential(
                torch.nn.Embedding(16, 8), self.middle, torch.nn.Linear(8, 16)
            )
            self.torch, self.rank = torch, rank
            self.stopping = False
            self.probe = init(run=run, rank=rank, world_size=2)

        def train(self, first: int, last: int, poisoned_at: int, seconds: float) -> int:
            """Do steps of some length; from one on, rank 1's middle layer holds a NaN.

            Returns the last step that was done: `last`, or that in which somebody said `stop`.
            """
            import time

            torch = self.torch
            rows, tokens = 4, 10
            generator = torch.Generator().manual_seed(self.rank)
            ids = torch.randint(0, 16, (rows, tokens), generator=generator)
            mask = torch.ones(rows, tokens, dtype=torch.int64)
            mask[:, 4] = 0
            for step in range(first, last + 1):
                stopping = torch.tensor([float(self.stopping)])
                torch.distributed.all_reduce(stopping)
                if stopping.item():
                    return step - 1
                if step == poisoned_at and self.rank == 1:
                    with torch.no_grad():
                        self.middle.weight[0, 0] = float("nan")
                name = "actor_compute_log_prob"
                with self.probe.stage(name, step=step, model=self.model) as stage, torch.no_grad():
                    scores = torch.log_softmax(self.model(ids), dim=-1)
                    p = scores.gather(-1, ids[..., None])[..., 0]
                    stage.record(
                        old_log_probs=p,
                        rollout_log_probs=torch.nan_to_num(p, nan=-1.0) + 0.001,
                        response_mask=mask,
                        responses=ids,
                        sample_ids=[f"sample-{self.rank}-{row}" for row in range(rows)],
                    )
                time.sleep(seconds)
            return last

        def stop(self) -> None:
            """Let every rank end its training with the step that it is in."""
            self.stopping = True

    return Rank


class Poisoned:
    """Two ranks of a run, in whose model one weight becomes NaN on rank 1 at a step."""

    def __init__(self, run: str, store: Path) -> None:
        self.ranks = [
            Process(_rank_class(), run, rank, str(store), max_concurrency=2) for rank in (0, 1)
        ]
        assert all(rank.pid for rank in self.ranks), "they have met"

    def train(self, first: int, last: int, poisoned_at: int, seconds: float) -> list[object]:
        """Begin these steps; return the refs of the ends."""
        return [rank.begins("train", first, last, poisoned_at, seconds) for rank in self.ranks]

    def leave(self) -> None:
        """Take leave and end the processes."""
        for rank in self.ranks:
            rank.close()


@pytest.fixture(scope="module")
def told() -> Iterator[Hook]:
    with hook() as server:
        yield server


@pytest.fixture(scope="module")
def service(
    address: str, told: Hook, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    home: Path = tmp_path_factory.mktemp("triggers")
    file = home / "rules.yaml"
    file.write_text(RULES.replace("WEBHOOK", told.url))
    running = Service.start(home, address, lease_seconds=20.0, triggers=file, ring_bytes=400_000)
    yield running
    running.stop()


def found(session: Session, run: str, kind: str) -> list[Any]:
    return [row for row in session.findings(run) if row["kind"] == kind]


def _spent(session: Session) -> Any:
    """Return the budget once it says that its captures are spent."""
    budget = session.triggers().about["budgets"][0]
    return budget if "1 of 1 capture " in budget["refusal"] else None


def test_where_it_is_allowed_the_operator_is_named_without_anybody_asking(
    service: Service, told: Hook, tmp_path: Path
) -> None:
    run = "allowed-run"
    ranks = Poisoned(run, tmp_path / "store")
    trained = ranks.train(1, 2000, AT, 0.2)
    with service.session() as session:
        # The kernels may have to be compiled first.
        (fired,) = eventually(lambda: list(session.firings(run)), 3 * SECONDS)
        assert (fired["step"], fired["rank"], fired["stage"], fired["round"]) == (AT, 1, STAGE, 0)
        actions = eventually(lambda: session.firings(run)[0]["actions"])
        capture_id = actions["capture"]["capture_id"]
        captured = session.wait_for(capture_id, timeout=60)
        assert captured["state"] == "complete", captured
        (dump,) = captured.dumps()
        assert (dump["rank"], dump["stage"]) == (1, STAGE)
        assert dump["step"] > AT
        named = eventually(
            lambda: [
                row
                for row in session.step(dump["step"], run=run).non_finite()
                if row.get("name") is not None
            ]
        )
        first = named[0]
        assert first["rank"] == 1
        assert first["name"].startswith("Module.1.Linear.forward"), named
        ranks.ranks[0].ask("stop")
        answer(trained, 120)
        assert len(session.firings(run)) == 1
        # It counts as under way until every rank was told that it is done.
        budget = eventually(lambda: _spent(session))
        assert (budget["run"], budget["spent"]["captures"]) == (run, 1)
        tried = session.test_triggers(run)
        assert [(row["step"], row["rule"], row["fired_live"]) for row in tried] == [
            (AT, "poison", True)
        ]
        tested = session.test_webhook("poison")
        assert (tested["delivered"], tested["run"], tested["step"]) == (True, run, AT)
    body, test = [body for body in told.told if body["run"] == run]
    assert (test.pop("test"), test["link"]) == (True, body["link"])
    assert (body["step"], body["rank"]) == (AT, 1)
    assert body["link"] == f"{service.info.url}/#/runs/{run}/steps/{AT}?attempt=1"
    ranks.leave()


def test_where_it_is_not_the_token_is_named_and_its_payload_pinned(
    service: Service, tmp_path: Path
) -> None:
    run = "forbidden-run"
    ranks = Poisoned(run, tmp_path / "store")
    answer(ranks.train(1, 2 * AT, AT, 0.02), 120)
    with service.session() as session:
        (finding,) = eventually(lambda: found(session, run, "trigger_poison"))
        token = finding["evidence"]["token"]
        assert (finding["step"], finding["stage"], finding["rank"]) == (AT, STAGE, 1)
        assert (token["rank"], token["p"]) == (1, "nan")
        assert token["sample_uid"].startswith("sample-1-")
        (refused,) = eventually(lambda: found(session, run, "capture_refused"))
        assert "capture: auto" in refused["message"]
        eventually(lambda: len(session.triggers(run).about["pinned"]) == 2)
        service.kill_and_await("ingestor", lambda: service.pid("ingestor"))
        service.kill_and_await("coordinator")
        # Long enough for the ring to turn over several times.
        answer(ranks.train(2 * AT + 1, 200, AT, 0.02), 120)
        eventually(lambda: session.step(190, run=run).metrics())
        kept = [*service.settings.data_path.glob("ring/*/*.safetensors")]
        attempt = {path.name.split("~")[0] for path in kept}
        steps = {int(path.name.split("~")[1]) for path in kept if path.name[0] == max(attempt)}
        assert {AT - 1, AT} <= steps
        assert len(steps) < 150, "the ring did not turn over"
        assert session.unpin(AT, run=run)["unpinned"] is True
        assert [row["step"] for row in session.triggers(run).about["pinned"]] == [AT - 1]
        assert len(session.firings(run)) == 1
    ranks.leave()
