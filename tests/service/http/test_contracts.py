"""The two that talk to the API, against it: the client's session and a worker's HTTP link."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.api import Rank, Service
from tests.support.measure import payload

import stagescope
from stagescope_service.store.tables import SummaryRow
from stagescope_wire import schema
from stagescope_wire.errors import Forbidden, NotFound, Unauthorized, Unreachable
from stagescope_workers.transport.http_link import HttpLink

STAGE = "actor_compute_log_prob"
Link = Callable[[str | None], HttpLink]


def token(live: Service, grade: str) -> str:
    return str(getattr(live.tokens, grade))


def filled(live: Service) -> None:
    for rank in (0, 1):
        one = Rank(live, rank=rank, fingerprint={"git": "abc"})
        one.stage(STAGE, 5, payload(seed=rank, first_sample=4 * rank), scalars={"loss": math.nan})
        one.begin(STAGE, 6)
        one.say("dropped", what="event", count=2, reason="full", step=5)


def test_every_question_of_a_session(live: Service) -> None:
    filled(live)
    with stagescope.attach(live.server.url, token=token(live, "read")) as session:
        assert session.status()["ready"] is True
        assert session.runs()["run"] == ("r",)
        attempts = session.attempts()
        assert attempts[0]["attempt"] == 1
        assert attempts[0]["fingerprint"] == {"git": "abc"}
        assert session.steps()["step"] == (6, 5)
        step = session.step(5)
        assert (step.step, step.run, step.attempt) == (5, "r", 1)
        metrics = step.metrics()
        assert metrics["counts/tokens"] == 88
        assert (metrics.complete, metrics.missing) == ("complete", [])
        assert not any(note.startswith("complete") for note in metrics.notes())
        rounds = step.rounds()
        assert sum(rounds["tokens"]) == metrics["counts/tokens"]
        assert step.ranks()["rank"] == (0, 1)
        tokens = step.tokens()
        assert tokens["abs_diff"][0] == metrics["logprob_abs_diff/max"]
        assert step.stages()["status"] == ("ok", "ok")
        assert all(math.isnan(value) for value in step.scalars()["value"])
        assert len(step.dumps()) == 0
        assert session.losses()["count"] == (2, 2)
        assert len(session.findings()) == 0
        assert len(session.plan()) == 0
        assert session.step("latest").step == 6
        with pytest.raises(NotFound, match="has no step 17"):
            session.step(17)
        with pytest.raises(Forbidden):
            session.capture(steps=5, stages="all", keep=["old_log_probs"])


def test_a_session_requests_a_capture(live: Service) -> None:
    with stagescope.attach(live.server.url, token=token(live, "operate")) as session:
        capture = session.capture(steps=7, stages="all", keep=["old_log_probs"])
        assert session.plan()["capture_id"] == (capture["capture_id"],)
        session.remove_capture(capture["capture_id"])
        assert len(session.plan()) == 0


def test_a_session_pages_through_more_than_it_asks_at_once(live: Service) -> None:
    rank = Rank(live, world_size=1)
    for step in range(1, 24):
        rank.begin("actor_update", step)
    with stagescope.attach(live.server.url, token=token(live, "read")) as session:
        assert session.steps(limit=10)["step"] == tuple(range(23, 13, -1))
        assert session.steps(limit=10).truncated
        assert session.steps()["step"] == tuple(range(23, 0, -1))


@pytest.fixture
def make_link(live: Service) -> Iterator[Link]:
    """Links with the token of a grade, closed at the end."""
    made: list[HttpLink] = []

    def make(grade: str | None) -> HttpLink:
        made.append(HttpLink(live.server.url, None if grade is None else token(live, grade)))
        return made[-1]

    yield make
    for link in made:
        link.close()


@pytest.mark.parametrize("grade", ["read", "operate"])
def test_metrics_of_an_open_step_over_a_worker_s_link(
    live: Service, make_link: Link, grade: str
) -> None:
    for number, key in enumerate(("first", "second")):
        Rank(live, key=key, world_size=1, start=1_000.0 + number).stage(STAGE, 5, payload(number))
    link = make_link(grade)
    for key in ("first", "second"):
        found = live.get("/steps/5/metrics", attempt_key=key)
        assert link.metrics("r", key, 5).result(30) == found
    assert link.metrics("r", None, 5).result(30) == found
    answer = link.metrics("r", "first", 5).result(30)
    assert (answer["attempt"], answer["complete"]) == (1, "open")
    assert answer["coverage"]["payloads_pending"] == 0


def test_a_rank_that_arrives_while_a_step_is_read_is_not_counted_without_its_tokens(
    live: Service, make_link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [Rank(live, rank=rank, world_size=2) for rank in (0, 1)]
    ranks[0].stage(STAGE, 5, payload(seed=0))
    read = live.catalogue.summaries

    def summaries(*args: Any, **kwargs: Any) -> list[SummaryRow]:
        rows = read(*args, **kwargs)
        if len(rows) == 1:
            ranks[1].stage(STAGE, 5, payload(seed=1, first_sample=4))
        return rows

    monkeypatch.setattr(live.catalogue, "summaries", summaries)
    link = make_link("read")
    before, after = (link.metrics("r", None, 5).result(30) for _ in range(2))
    assert [(row["rank"], row["status"]) for row in before["missing"]] == [(1, "not begun")]
    assert after["missing"] == []
    counts = [
        (each["coverage"]["tokens"], each["coverage"]["payloads_ingested"])
        for each in (before, after)
    ]
    assert counts == [(44, 1), (88, 2)]


def test_what_is_not_measured_fails_the_future(live: Service, make_link: Link) -> None:
    Rank(live, world_size=1).begin(STAGE, 5)
    link = make_link("read")
    for run, key, step in (("r", None, 5), ("r", None, 6), ("r", "other", 5), ("s", None, 5)):
        with pytest.raises(NotFound):
            link.metrics(run, key, step).result(30)
    with pytest.raises(Unauthorized):
        make_link(None).metrics("r", None, 5).result(30)
    live.server.stop()
    with pytest.raises(Unreachable):
        link.metrics("r", None, 5).result(30)


def test_a_batch_of_a_worker_without_ray(live: Service) -> None:
    sender = schema.Sender("http-0", "r", "a", "actor", 0, started=1_000.0).wire()
    taken = payload()
    offsets = np.arange(0, 49, 12, dtype=np.int64)
    for name, (dtype, _, buffer, _) in list(taken["tensors"].items()):
        taken["tensors"][name] = (dtype, (48,), buffer.reshape(-1), offsets)
    half = taken["tensors"]["old_log_probs"][2].view(np.uint32) >> 16
    taken["tensors"]["old_log_probs"] = ("bfloat16", (48,), half.astype(np.uint16), offsets)
    mask = taken["tensors"]["response_mask"][2].astype(bool)
    taken["tensors"]["response_mask"] = ("bool", (48,), mask, offsets)
    work = {"step": 5, "stage": STAGE, "scalars": {"loss": math.nan}}
    announced = {"tensors": {}, "bytes": 1, "meta": {}}
    events = [
        schema.Event("begin", 1, 1_000.0, 1.0, work).wire(),
        schema.Event("end", 2, 1_001.0, 2.0, {**work, "payload": announced}).wire(),
    ]
    link = HttpLink(live.server.url, token(live, "operate"))
    try:
        answer = link.record(sender, events, {2: taken}).result(30)
        assert answer["receipts"] == {2: "ingested"}
        polled = link.poll(sender, -1, [2], 1.0).result(30)
        assert polled["receipts"] == {2: "ingested"}
        assert polled["plan"] == {"revision": 0, "captures": []}
        live.engine.not_ready = "starting"
        assert "starting" in link.record(sender, events, {2: taken}).result(30)["not_ready"]
    finally:
        link.close()
    measured = live.get("/steps/5/metrics")
    assert measured["coverage"]["tokens"] == 44
    assert measured["streams"]["old"]["dtypes"] == ["bfloat16"]
    assert live.get("/steps/5/scalars")["rows"][0]["value"] == "nan"
