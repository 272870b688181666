"""The tab Routing of a step, in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.service.views.steps.test_routing import LOG_PROB, run_of
from tests.support.api import Rank, Service
from tests.support.page import visiting
from tests.support.routes import routed

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_routing_shows_the_answer_the_heat_map_and_the_layers(
    browser: Browser, live: Service
) -> None:
    run_of(live, "moe", routed(fault="swapped", flips=0.02))
    for name in ("plain", "one-sided"):
        rank = Rank(live, run=name, world_size=1)
        sent = routed().payload(without="trainer")
        if name == "plain":
            sent["tensors"] = {n: t for n, t in sent["tensors"].items() if "routing" not in n}
        rank.stage(LOG_PROB, 1, sent)
        rank.begin(LOG_PROB, 2)
    with visiting(browser, live) as visit:
        visit.page.wait_for_selector("#login")
        visit.log_in(live.tokens.read)
        visit.settle()
        visit.go("#/runs/moe/steps/1")
        visit.page.click(".parts >> text=Routing")
        visit.page.wait_for_selector("h2:text-is('Layers')")
        visit.settle()
        answer = live.get("/steps/1/routing", run="moe")
        shown = visit.page.inner_text("main")
        assert answer["text"] in shown
        assert "layers 1 and 2 are swapped" in shown
        visit.page.wait_for_selector("figure .heatmaplayer image")
        layers = visit.page.locator("table").first.locator("tbody tr").count()
        assert layers == len(answer["rows"]) == 4
        visit.go("#/runs/one-sided/steps/1?part=routing")
        visit.page.wait_for_selector("h2:text-is('Layers')")
        assert "The trainer's routes are not recorded" in visit.page.inner_text("main")
        visit.go("#/runs/plain/steps/1?part=routing")
        assert "No routes of experts are recorded" in visit.page.inner_text("main")
        assert not visit.page.query_selector("figure")
        assert not [url for url in visit.requests if "/routing?run=plain" in url]
        assert visit.messages == []
