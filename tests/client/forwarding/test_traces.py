"""Traces over OTLP, received by a small collector."""

from __future__ import annotations

import pytest
from tests.support.api import Service
from tests.support.runs.forwarded import PAGE, RUN, Collector, Training, attributes

from stagescope import Session

# Clients of others: what they warn of is theirs.
pytestmark = pytest.mark.filterwarnings("default")


def test_stages_are_spans_below_their_step(
    live: Service, training: Training, asked: Session, collector: Collector
) -> None:
    failed = {"status": "failed", "error_type": "ValueError", "error_message": "no such file"}
    training.do(1, 1)
    training.do(2, 2, **failed)
    asked.forward(RUN, collector.target, page_url=PAGE)
    spans = collector.spans()
    steps = {each.name: each for each in spans if not each.parent_span_id}
    assert set(steps) == {"step 1", "step 2"}
    rows = [
        {**row, "step": step}
        for step in (1, 2)
        for row in live.get(f"/steps/{step}/stages", run=RUN)["rows"]
    ]
    assert len(spans) == len(rows) + 2
    for row in rows:
        step = steps[f"step {row['step']}"]
        (span,) = (
            each
            for each in spans
            if each.trace_id == step.trace_id
            and each.name == row["stage"]
            and attributes(each).get("stagescope.rank") == row["rank"]
        )
        assert span.parent_span_id == step.span_id
        assert span.start_time_unix_nano == round(row["begin_wall"] * 1e9)
        assert span.end_time_unix_nano == round(row["end_wall"] * 1e9)
        assert (
            step.start_time_unix_nano
            <= span.start_time_unix_nano
            <= span.end_time_unix_nano
            <= step.end_time_unix_nano
        )
        found = attributes(span)
        assert found["stagescope.run"] == RUN
        assert (found["stagescope.attempt"], found["stagescope.step"]) == (1, row["step"])
        assert (found["stagescope.role"], found["stagescope.status"]) == ("actor", row["status"])
        assert found["stagescope.page"] == f"{PAGE}/#/runs/{RUN}/steps/{row['step']}?attempt=1"
        is_failed = row["status"] == "failed"
        assert span.status.code == (2 if is_failed else 0)
        assert span.status.message == ("ValueError: no such file" if is_failed else "")
    assert steps["step 1"].status.code == 0
    assert steps["step 2"].status.message == "1 of 6 stages failed or are unfinished"


def test_a_process_that_is_gone_leaves_a_span_with_an_error(
    live: Service, training: Training, asked: Session, collector: Collector
) -> None:
    training.do(1, 1)
    for each in training.ranks:
        each.begin("actor_update", 2)
    training.restart(after=1).do(2, 2)
    asked.forward(RUN, collector.target)
    spans = [each for each in collector.spans() if each.name == "actor_update"]
    lost = [each for each in spans if each.status.code == 2]
    assert len(lost) == 2
    for span in lost:
        found = attributes(span)
        assert (found["stagescope.attempt"], found["stagescope.step"]) == (1, 2)
        assert found["stagescope.status"] == "unfinished"
        assert found["stagescope.end_is_known"] is False
        assert span.status.message == "its process is gone"
        assert span.end_time_unix_nano >= span.start_time_unix_nano
    # The step of the second attempt is a trace of its own.
    assert len({each.trace_id for each in spans}) == 3


def test_a_collector_that_refuses_gets_the_same_spans_later(
    training: Training, asked: Session, collector: Collector, said: list[str]
) -> None:
    training.do(1, 2)
    asked.forward(RUN, collector.target)
    first = sorted(each.span_id for each in collector.spans())
    collector.requests.clear()
    collector.status = 400
    outcome = asked.forward(RUN, collector.target, anew=True, report=said.append)
    assert outcome[0]["steps"] == 0
    assert "400" in said[0]
    collector.status = 200
    asked.forward(RUN, collector.target)
    assert sorted(each.span_id for each in collector.spans()) == first
