from __future__ import annotations

import math

import pytest
from tests.support.answering import READ, RUN, Answering

import stagescope
from stagescope import InvalidInput, NotFound, Session
from stagescope_wire.captures import CAPTURE_FIELDS
from stagescope_wire.discovery import ServiceLocation
from stagescope_wire.nonfinite import Json


def test_a_run_that_is_not_there(client: Session) -> None:
    with pytest.raises(NotFound, match="there is no /runs/a"):
        client.attempts("a/../b")
    for name in ("", ".", ".."):
        with pytest.raises(InvalidInput, match="not a name"):
            client.attempts(name)


def test_a_step_stays_where_it_was_found(service: Answering, client: Session) -> None:
    step = client.step("latest")
    assert (step.step, step.run, step.attempt) == (5, RUN, 2)
    service.seen.clear()
    whole = step.rounds().about["whole"]
    assert math.isnan(whole["abs_diff_mean"])
    step.metrics(rank=1, stage="actor_update", round=0)
    assert service.seen[0][1] == "/steps/5/rounds"
    assert service.seen[0][2].items() >= {"run": RUN, "attempt": "2"}.items()
    assert service.seen[1][2].items() >= {"rank": "1", "stage": "actor_update"}.items()


@pytest.mark.parametrize("step", ["newest", 5.0, None, True, "5/../../runs"])
def test_what_is_not_a_step(client: Session, step: object) -> None:
    with pytest.raises(InvalidInput, match="'latest'"):
        client.step(step)  # type: ignore[arg-type]


def test_filters_that_are_not_given_are_not_sent(service: Answering, client: Session) -> None:
    client.step(5).tokens(round=0)
    assert set(service.seen[-1][2]) == {"run", "attempt", "round", "limit"}


def test_pages_are_followed_to_the_limit(service: Answering, client: Session) -> None:
    service.token_count = 1203
    step = client.step(5)
    service.seen.clear()
    table = step.tokens(limit=1100)
    assert len(table) == 1100
    assert table.truncated
    assert len(service.seen) == 3
    assert table["abs_diff"][-1] == 1 / 1100
    assert table["p"][3] == -math.inf
    whole = step.tokens(limit=2000)
    assert (len(whole), whole.truncated) == (1203, False)
    assert (len(step.tokens(limit=1203)), step.tokens(limit=1203).truncated) == (1203, False)
    with pytest.raises(InvalidInput, match="limit"):
        step.tokens(limit=0)


def test_a_service_that_repeats_its_pages_does_not_hold_the_client() -> None:
    client = Session(ServiceLocation("http://unused", "the test"))
    answers = iter([{"rows": [{"a": 1}], "next": "x"}] * 50)
    client._transport.get = lambda *_, **__: next(answers)  # type: ignore[method-assign]
    assert len(client.table("/runs")) <= 3
    client.close()


def test_every_field_of_a_capture_has_an_argument(client: Session) -> None:
    spec: dict[str, Json] = dict.fromkeys(CAPTURE_FIELDS, "x")
    record = client.capture(**{**spec, "steps": [1]})
    assert set(CAPTURE_FIELDS) <= set(record)


def test_losses_and_findings_and_status(client: Session) -> None:
    assert client.lost()["reason"] == client.losses()["reason"] == ("killed",)
    findings = client.findings()
    assert "<script>" not in findings._repr_html_()
    assert "\x1b" not in findings._repr_html_()
    assert "\x1b" not in repr(findings)
    assert client.status()["ready"] is True


def test_a_closed_session_says_so(service: Answering) -> None:
    with stagescope.attach(service.url, token=READ, timeout=5.0) as client:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        client.runs()


@pytest.mark.parametrize("noun", ["rounds", "ranks", "tokens", "stages", "dumps", "scalars"])
def test_each_noun_takes_its_filters(service: Answering, client: Session, noun: str) -> None:
    own: dict[str, dict[str, object]] = {
        "rounds": {"by": "turn"},
        "tokens": {"round": 1, "kind": "worst"},
        "scalars": {"name": "loss"},
    }
    filters = {"stage": "s", "role": "actor", "rank": 3, **own.get(noun, {})}
    getattr(client.step(5), noun)(**filters)
    sent = {name: str(value) for name, value in filters.items()}
    assert service.seen[-1][2].items() >= sent.items()
