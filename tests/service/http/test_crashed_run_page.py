"""The page of a run that restarted and then crashed: what its views say, and what they offer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.support.api import Rank, Service, service
from tests.support.page import Visit, visiting

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STAGE: Final = "actor_update"
BAD: Final[dict[str, Any]] = {"scalars": {"loss": math.nan}}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home"), recorded=False) as running:
        resumed: dict[str, Any] = {"resumed_from_step": 1, "start": 5_000.0}
        for key, steps, fields in (("one", (1, 2), {}), ("two", (2, 3), resumed)):
            ranks = [Rank(running, rank=at, key=key, world_size=2, **fields) for at in (0, 1)]
            for step in steps:
                for rank in ranks:
                    for epoch in range(4):
                        rank.stage(STAGE, step, epoch=epoch, **BAD)
            for rank in ranks:
                rank.say("finish", error_type="ValueError", error_message="no data")
        order = {"run": "r", "stages": [STAGE], "steps": [9], "task": "statistics"}
        answer = running.operate.post("/captures", json=order)
        running.operate.delete(f"/captures/{answer.json()['capture_id']}")
        yield running


@pytest.fixture
def visit(browser: Browser, live: Service) -> Iterator[Visit]:
    with visiting(browser, live) as opened:
        opened.page.wait_for_selector("#login")
        opened.log_in(live.tokens.operate)
        yield opened


def shown(visit: Visit, address: str) -> str:
    """Return the text of a view of the run."""
    visit.go(f"#/runs/r{address}")
    visit.page.evaluate("scrollTo(0, document.body.scrollHeight)")
    visit.settle()
    return visit.page.inner_text("main")


def test_ranks_whose_numbers_are_not_finite_are_named_once(visit: Visit) -> None:
    shown(visit, "/steps/3?part=numbers")
    visit.wait_until("document.querySelector('td:last-child .bad')")
    assert visit.page.inner_text("td:last-child .bad") == "actor 0-1"


def test_a_finding_offers_a_capture_and_evidence_only_where_it_has_some(
    visit: Visit, live: Service
) -> None:
    found = live.get("/findings", run="r", kind="process_crashed")["rows"][0]
    assert (found["stage"], found["step"]) == (None, 3)
    text = shown(visit, f"/findings/{found['finding_id']}")
    assert "no data" in text
    assert "Evidence" not in text
    assert "Request a capture" not in text


def test_that_nobody_is_stuck_is_no_good_news_of_a_crash(visit: Visit) -> None:
    text = shown(visit, "/hangs")
    assert "the attempt ended in step 3: no process is left: an exception ended" in text
    assert visit.page.query_selector("main .badge.good") is None


def test_a_withdrawn_capture_does_not_read_as_removed_data(visit: Visit) -> None:
    text = shown(visit, "/captures")
    assert "over since" in text
    assert "step 9" in text
    assert "removed" not in text


def test_a_repeated_step_leads_to_its_earlier_version(visit: Visit) -> None:
    assert "it repeats that of attempt 1" in shown(visit, "/steps/2")
    assert "attempt=1" in str(visit.page.get_attribute("main p.row span a", "href"))
    assert "it repeats" not in shown(visit, "/steps/3")


def test_an_error_leads_to_the_view_that_it_names(visit: Visit) -> None:
    assert "/captures" not in shown(visit, "/captures/none")
    visit.page.click(".problem a")
    visit.wait_until("location.hash.startsWith('#/runs/r/captures')")
    visit.wait_until("document.querySelector('h1').textContent === 'Captures of r'")


def test_who_is_stuck_names_no_step_before_the_first_one(visit: Visit, live: Service) -> None:
    first = Rank(live, run="starting", key="one", world_size=1)
    for step in (1, 2):
        first.stage(STAGE, step)
    first.say("finish")
    Rank(live, run="starting", key="two", world_size=1, start=5_000.0)
    visit.go("#/runs/starting/hangs")
    visit.settle()
    text = visit.page.inner_text("main")
    assert "nobody is stuck: attempt 2 is live, and no rank has begun a step yet" in text
