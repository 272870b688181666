"""The feed of a step's numbers against a service that is late, partial, dead, hung or absent."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.coordinators import FakeApi, FakeCoordinator, FakeService, wait_for

from stagescope_wire.errors import Unreachable
from stagescope_workers import metrics_feed
from stagescope_workers.metrics_feed import KEPT_STEPS, MetricsFeed
from stagescope_workers.probe.probe import Probe

MakeProbe = Callable[..., Probe]
MakeFeed = Callable[..., MetricsFeed]
LOG_PROB = "actor_compute_log_prob"


def answer(
    value: object = 0.25,
    *,
    pending: int = 0,
    complete: str = "open",
    missing: object = (),
    sequences: int = 4,
    empty_rows: int = 0,
) -> dict[str, object]:
    return {
        "stage": LOG_PROB,
        "complete": complete,
        "missing": missing,
        "coverage": {"payloads_pending": pending, "sequences": sequences, "empty_rows": empty_rows},
        "metrics": {"rollout_corr/kl": value},
    }


@pytest.fixture
def api(service: FakeService) -> FakeApi:
    return service.api


@pytest.fixture
def make_feed(make_probe: MakeProbe, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeFeed]:
    monkeypatch.setattr(metrics_feed, "_MAX_BACKOFF", 0.05)
    made: list[MetricsFeed] = []

    def make(probe: Probe | None = None) -> MetricsFeed:
        made.append(MetricsFeed(probe or make_probe()))
        return made[-1]

    yield make
    for feed in made:
        feed.close()
        ended(feed)


def ended(feed: MetricsFeed) -> None:
    if feed._thread is not None:
        feed._thread.join(10.0)
        assert not feed._thread.is_alive()


def test_numbers_arrive_for_exactly_the_step_that_was_requested(
    make_feed: MakeFeed, api: FakeApi
) -> None:
    api.answers = {1: answer(0.5), 2: answer(0.75)}
    feed = make_feed()
    assert feed.get(1) == {}
    feed.request(2)
    wait_for(lambda: feed.get(2))
    assert feed.get(2) == {"rollout_corr/kl": 0.75}
    assert feed.get(1) == {}
    assert set(api.asked) == {("test-run", "attempt-a", 2)}


def test_it_connects_before_the_first_request(make_feed: MakeFeed, api: FakeApi) -> None:
    api.answers[0] = answer(0.125)
    feed = make_feed()
    feed.prepare()
    wait_for(lambda: len(api.asked) == 1)
    assert feed.get(0) == {}  # of no step that was asked for
    api.answers = {1: answer(0.5)}
    feed.request(1)
    wait_for(lambda: feed.get(1))
    assert [step for _, _, step in api.asked] == [0, 1]


def test_numbers_keep_their_kind(make_feed: MakeFeed, api: FakeApi) -> None:
    metrics = {"a": "nan", "b": "-inf", "c": 3, "d": 0.5, "e": None, "f": "text", "g": [1]}
    api.answers[1] = {**answer("nan"), "metrics": metrics}
    feed = make_feed()
    feed.request(1)
    wait_for(lambda: feed.get(1))
    taken = dict(feed.get(1))
    assert math.isnan(taken.pop("a"))
    assert taken == {"b": -math.inf, "c": 3, "d": 0.5}


@pytest.mark.parametrize(
    "partial",
    [
        answer(pending=1),
        answer(missing=[{"stage": LOG_PROB, "rank": 1, "status": "open"}]),
        answer(missing=[{"stage": LOG_PROB, "rank": 1, "status": "not begun"}]),
        Unreachable("the API is dead"),
        ValueError("not JSON"),
    ],
    ids=["payload pending", "rank inside", "rank absent", "API dead", "no answer of ours"],
)
def test_what_does_not_cover_the_step_is_requested_again(
    make_feed: MakeFeed, api: FakeApi, partial: Any
) -> None:
    api.answers[1] = partial
    feed = make_feed()
    feed.request(1)
    wait_for(lambda: len(api.asked) > 2)
    assert feed.get(1) == {}
    api.answers[1] = answer(0.5)
    wait_for(lambda: feed.get(1))
    count = len(api.asked)
    feed.request(2)
    wait_for(lambda: len(api.asked) > count + 1)
    assert {step for _, _, step in api.asked[count:]} == {2}


def test_rows_that_ranks_have_not_announced_yet_are_waited_for(
    make_feed: MakeFeed, api: FakeApi
) -> None:
    api.answers[1] = answer(0.001, sequences=4)  # the first mini-batch of two, received
    feed = make_feed()
    feed.request(1, rows=8)
    wait_for(lambda: len(api.asked) > 2)
    assert feed.get(1) == {}
    api.answers[1] = answer(0.002, sequences=7, empty_rows=1)
    wait_for(lambda: feed.get(1))
    assert feed.get(1) == {"rollout_corr/kl": 0.002}


@pytest.mark.parametrize(
    "covering",
    [
        answer(missing=[{"stage": "actor_update", "rank": 1, "status": "open"}]),
        answer(missing=[{"stage": LOG_PROB, "rank": 1, "status": "unfinished"}]),
        answer(complete="partial", missing=[{"stage": LOG_PROB, "rank": 1, "status": "open"}]),
        answer(complete="partial", sequences=1),
    ],
    ids=["another stage goes on", "rank is gone", "step is closed", "closed without all rows"],
)
def test_what_will_not_change_is_used(
    make_feed: MakeFeed, api: FakeApi, covering: dict[str, Any]
) -> None:
    api.answers[1] = covering
    feed = make_feed()
    feed.request(1, rows=4)
    wait_for(lambda: feed.get(1))


def test_own_payload_is_received_before_the_service_is_asked(
    make_probe: MakeProbe, make_feed: MakeFeed, api: FakeApi, coordinator: FakeCoordinator
) -> None:
    api.answers = {1: answer(0.5), 2: answer(0.5)}
    probe = make_probe()
    feed = make_feed(probe)
    with probe.stage(LOG_PROB, step=1) as stage:
        stage.record(rewards=[1.0])
    feed.request(1)
    feed.request(2)
    wait_for(lambda: feed.get(2))
    assert {step for _, _, step in api.asked} == {2}
    coordinator.settle({3: "ingested"})
    wait_for(lambda: feed.get(1))


def waiting(feed: MetricsFeed) -> threading.Thread:
    thread = threading.Thread(target=feed.wait, args=(600.0,), daemon=True)
    thread.start()
    return thread


def test_the_end_waits_for_no_step_that_cannot_be_measured(
    make_probe: MakeProbe, make_feed: MakeFeed, api: FakeApi, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    feed = make_feed(probe)
    with probe.stage(LOG_PROB, step=1) as stage:
        stage.record(rewards=[1.0])
    feed.request(1)
    wait_for(lambda: coordinator.events)
    thread = waiting(feed)
    # The service has no numbers of the step, but has not received all of it either.
    thread.join(0.2)
    assert thread.is_alive()
    coordinator.settle({3: "ingested"})
    thread.join(60.0)
    assert not thread.is_alive()
    assert feed.get(1) == {}
    # Another process may still hand over the other stream.
    api.answers[1] = answer(0.5)
    wait_for(lambda: feed.get(1))


def test_the_end_waits_for_a_step_of_which_more_was_recorded(
    make_feed: MakeFeed, api: FakeApi
) -> None:
    feed = make_feed()
    feed.request(1)
    feed.wait(60.0)
    api.hangs = True
    feed.request(1)
    wait_for(lambda: api.hanging)
    thread = waiting(feed)
    thread.join(0.2)
    assert thread.is_alive()
    api.hangs = False
    for each in api.hanging:
        each.set_result(answer(0.5))
    thread.join(60.0)
    assert not thread.is_alive()


def test_wanting_again_requests_again(make_feed: MakeFeed, api: FakeApi) -> None:
    api.answers[1] = answer(0.5)
    feed = make_feed()
    feed.request(1)
    wait_for(lambda: feed.get(1))
    api.answers[1] = answer(0.75)
    feed.request(1)
    wait_for(lambda: feed.get(1))
    assert feed.get(1) == {"rollout_corr/kl": 0.75}


def test_answer_to_a_question_before_more_was_recorded_does_not_count(
    make_feed: MakeFeed, api: FakeApi
) -> None:
    api.hangs = True
    feed = make_feed()
    feed.request(1)
    wait_for(lambda: api.hanging)
    feed.request(1)
    api.hangs = False
    api.answers[1] = answer(0.75)
    api.hanging[0].set_result(answer(0.5))
    wait_for(lambda: feed.get(1))
    assert feed.get(1) == {"rollout_corr/kl": 0.75}


def test_hung_service_is_called_once_and_holds_up_nobody(make_feed: MakeFeed, api: FakeApi) -> None:
    api.hangs = True
    feed = make_feed()
    for step in range(100):
        feed.request(step)
        assert feed.get(step) == {}
    wait_for(lambda: api.hanging)
    assert len(api.asked) == 1
    feed.close()
    ended(feed)
    assert len(api.asked) == 1


def test_only_the_newest_steps_are_remembered(make_feed: MakeFeed, api: FakeApi) -> None:
    feed = make_feed()
    steps = range(3 * KEPT_STEPS)
    for step in steps:
        feed.request(step)
    api.answers = {step: answer(float(step)) for step in steps}
    newest = steps[-KEPT_STEPS:]
    wait_for(lambda: all(feed.get(step) for step in newest))
    feed.request(steps[-1] + 1)
    api.answers[steps[-1] + 1] = answer(0.5)
    wait_for(lambda: feed.get(steps[-1] + 1))
    assert len(feed._arrived) == KEPT_STEPS
    assert not feed._requests


def test_service_that_comes_late_is_called_then(
    make_probe: MakeProbe, make_feed: MakeFeed, service: FakeService, api: FakeApi
) -> None:
    late, service.coordinator = service.coordinator, None
    api.answers[1] = answer(0.5)
    feed = make_feed()
    feed.request(1)
    wait_for(lambda: service.looked > 1)
    assert not api.asked
    service.coordinator = late
    wait_for(lambda: feed.get(1))


@pytest.mark.parametrize("step", ["five", 1.5, None, [1], object()])
def test_nonsense_is_refused_without_an_exception(make_probe: MakeProbe, step: Any) -> None:
    probe = make_probe(strict=True)
    feed = MetricsFeed(probe)
    feed.request(step)
    assert feed.get(step) == {}
    assert feed._thread is None
    assert probe.refused["metrics feed"] == (step is not None)


def test_nothing_is_requested_after_close(make_feed: MakeFeed, api: FakeApi) -> None:
    api.answers = {1: answer(0.5), 2: answer(0.5)}
    feed = make_feed()
    feed.request(1)
    wait_for(lambda: feed.get(1))
    feed.close()
    ended(feed)
    feed.request(2)
    ended(feed)
    assert {step for _, _, step in api.asked} == {1}
    assert feed.get(1) == {"rollout_corr/kl": 0.5}


def test_thread_ends_with_the_probe(
    make_probe: MakeProbe, make_feed: MakeFeed, api: FakeApi
) -> None:
    probe = make_probe()
    feed = make_feed(probe)
    feed.request(1)
    wait_for(lambda: api.asked)
    probe.close(0.0)
    ended(feed)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # this process has threads
def test_forked_child_is_silent(make_feed: MakeFeed, api: FakeApi) -> None:
    api.answers[1] = answer(0.5)
    feed = make_feed()
    feed.request(1)
    wait_for(lambda: feed.get(1))
    threads = threading.active_count()
    # Held by a thread that the child does not have: whoever takes it there waits for ever.
    with feed._condition:
        child = os.fork()
        if child == 0:
            feed.request(2)
            silent = feed.get(1) == {} and threading.active_count() == 1
            feed.close()
            os._exit(0 if silent else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert threading.active_count() == threads
