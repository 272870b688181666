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
from tests.support.poisoned import Poisoned
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
    return budget if "1 of 1 captures" in budget["refusal"] else None


def test_where_it_is_allowed_the_operator_is_named_without_anybody_asking(
    service: Service, told: Hook
) -> None:
    run = "allowed-run"
    ranks = Poisoned(run)
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
        ranks.stop()
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


def test_where_it_is_not_the_token_is_named_and_its_payload_pinned(service: Service) -> None:
    run = "forbidden-run"
    ranks = Poisoned(run)
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
