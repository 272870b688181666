from __future__ import annotations

import math

import pytest
from tests.support.answering import READ, RUN, Answering

import stagescope
from stagescope import Forbidden, InvalidInput, InvalidPlan, NotFound, Session
from stagescope_wire.captures import CAPTURE_FIELDS
from stagescope_wire.discovery import ServiceLocation
from stagescope_wire.nonfinite import Json


def test_runs_and_attempts_with_their_fingerprints(session: Session) -> None:
    assert session.runs()["run"] == (RUN, "nan")
    attempts = session.attempts()
    assert attempts["attempt"] == (2, 1)
    assert attempts[0]["fingerprint"]["git"]["commit"] == "0f3a"
    assert session.attempts(RUN).to_dicts() == attempts.to_dicts()
    assert "fingerprint" in session.attempts().to_polars().columns


def test_a_run_that_is_not_there(session: Session) -> None:
    with pytest.raises(NotFound, match="there is no /runs/a"):
        session.attempts("a/../b")
    for name in ("", ".", ".."):
        with pytest.raises(InvalidInput, match="not a name"):
            session.attempts(name)


def test_metrics_of_a_step(session: Session) -> None:
    metrics = session.step(5).metrics()
    assert metrics["training/rollout_probs_diff_mean"] == 0.00371
    assert math.isnan(metrics["training/rollout_probs_diff_std"])
    assert metrics["rollout_corr/training_ppl"] == math.inf
    assert (metrics.run, metrics.attempt, metrics.step) == (RUN, 2, 5)
    assert metrics.complete == "partial"


def test_a_step_stays_where_it_was_found(service: Answering, session: Session) -> None:
    step = session.step("latest")
    assert (step.step, step.run, step.attempt) == (5, RUN, 2)
    service.seen.clear()
    step.rounds()
    step.metrics(rank=1, stage="actor_update", round=0)
    assert service.seen[0][1] == "/steps/5/rounds"
    assert service.seen[0][2].items() >= {"run": RUN, "attempt": "2"}.items()
    assert service.seen[1][2].items() >= {"rank": "1", "stage": "actor_update"}.items()


def test_the_requested_attempt_answers(session: Session) -> None:
    step = session.step(5, run=RUN, attempt=1)
    assert (step.attempt, step.metrics().attempt) == (1, 1)
    assert "attempt 1" in repr(step)


@pytest.mark.parametrize("step", ["newest", 5.0, None, True, "5/../../runs"])
def test_what_is_not_a_step(session: Session, step: object) -> None:
    with pytest.raises(InvalidInput, match="'latest'"):
        session.step(step)  # type: ignore[arg-type]


def test_a_step_that_is_not_there(session: Session) -> None:
    with pytest.raises(NotFound, match="a step from 0 to 5"):
        session.step(99)


@pytest.mark.parametrize("noun", ["rounds", "ranks", "tokens", "stages", "dumps", "scalars"])
def test_each_noun_of_a_step_is_a_table(session: Session, noun: str) -> None:
    table = getattr(session.step(5), noun)()
    assert table.title == noun
    assert table.about["step"] == 5
    assert len(table) == len(table.to_pandas())


def test_filters_that_are_not_given_are_not_sent(service: Answering, session: Session) -> None:
    session.step(5).tokens(round=0)
    assert set(service.seen[-1][2]) == {"run", "attempt", "round", "limit"}


def test_pages_are_followed_to_the_limit(service: Answering, session: Session) -> None:
    service.token_count = 1203
    step = session.step(5)
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
    class Turning(Session):
        def get(self, path: str, **params: object) -> object:
            raise AssertionError("tables are read by their own route")

    service = Answering()
    session = Turning(ServiceLocation("http://unused", "the test"))
    answers = iter([{"rows": [{"a": 1}], "next": "x"}] * 50)
    session._transport.get = lambda *_, **__: next(answers)  # type: ignore[method-assign]
    assert len(session.table("/runs")) <= 3
    assert not service.seen
    session.close()


def test_plan_and_captures(session: Session) -> None:
    assert len(session.plan()) == 0
    capture = session.capture(steps=7, stages=["actor_update"], keep=["old_log_probs"])
    assert capture["steps"] == [7]
    plan = session.plan()
    assert plan["capture_id"] == (capture["capture_id"],)
    assert plan.about["revision"] == 1
    assert len(session.captures()) == 1
    assert session.remove_capture(capture["capture_id"])["steps"] == [7]
    with pytest.raises(NotFound, match="in force"):
        session.remove_capture(capture["capture_id"])


def test_a_capture_that_cannot_be(session: Session) -> None:
    with pytest.raises(InvalidPlan, match="say which") as caught:
        session.capture(stages="all", steps=[])
    assert caught.value.expected == "a list"


def test_every_field_of_a_capture_has_an_argument(session: Session) -> None:
    spec: dict[str, Json] = dict.fromkeys(CAPTURE_FIELDS, "x")
    record = session.capture(**{**spec, "steps": [1]})
    assert set(CAPTURE_FIELDS) <= set(record)


def test_the_read_token_cannot_request_captures(service: Answering) -> None:
    with (
        stagescope.attach(service.url, token=READ, timeout=5.0) as session,
        pytest.raises(Forbidden, match="read token"),
    ):
        session.capture(steps=[1])


def test_losses_and_findings_and_status(session: Session) -> None:
    assert session.losses()["reason"] == ("killed",)
    findings = session.findings()
    assert "<script>" not in findings._repr_html_()
    assert "\x1b" not in findings._repr_html_()
    assert "\x1b" not in repr(findings)
    assert session.status()["ready"] is True


def test_a_closed_session_says_so(service: Answering) -> None:
    with stagescope.attach(service.url, token=READ, timeout=5.0) as session:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        session.runs()


def test_rounds_have_the_totals_to_which_they_add_up(session: Session) -> None:
    rounds = session.step(5).rounds(by="round", role="actor")
    assert math.isnan(rounds.about["whole"]["abs_diff_mean"])
    assert sum(rounds["tokens"]) == rounds.about["whole"]["tokens"]


@pytest.mark.parametrize("noun", ["rounds", "ranks", "tokens", "stages", "dumps", "scalars"])
def test_each_noun_takes_its_filters(service: Answering, session: Session, noun: str) -> None:
    own: dict[str, dict[str, object]] = {
        "rounds": {"by": "turn"},
        "tokens": {"round": 1, "kind": "worst"},
        "scalars": {"name": "loss"},
    }
    filters = {"stage": "s", "role": "actor", "rank": 3, **own.get(noun, {})}
    getattr(session.step(5), noun)(**filters)
    sent = {name: str(value) for name, value in filters.items()}
    assert service.seen[-1][2].items() >= sent.items()
