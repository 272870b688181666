"""The list of runs in a real browser: filter, choose, rename, hide, delete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.api import Rank, Service, service
from tests.support.browser import chromium
from tests.support.measure import payload
from tests.support.page import Visit, visiting

from stagescope_service.store.contract import Put

pytest.importorskip("playwright.sync_api")

ROWS = (
    "[...document.querySelectorAll('.run-list tbody tr[data-key]')].map(e => e.dataset.key).join()"
)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "home") as running:
        for at, (run, noise) in enumerate({"fp8": 0.2, "bf16": 0.01, "old": 0.01}.items()):
            rank = Rank(running, run=run, world_size=1, start=9000.0 - 1000 * at,
                        settings={"dtype": run, "lr": 1e-6})  # fmt: skip
            for step in (1, 2, 3):
                rank.stage("actor_compute_log_prob", step, payload(seed=step, noise=noise))
                rank.say("log", step=step, scalars={"reward": step / 10})
            rank.say("finish")
        yield running


def _enter(visit: Visit, live: Service, address: str) -> None:
    visit.page.goto(f"{live.server.url}/{address}")
    visit.log_in(live.tokens.operate)
    visit.wait_until(f"{ROWS}.split(',').length >= 1 && {ROWS}")


def test_rows_are_drawn_where_somebody_scrolls(live: Service) -> None:
    live.store.submit(
        [Put("runs", {"run": f"many-{at:03}", "created_wall": 1.0 + at}) for at in range(250)]
    ).result(60)
    with chromium() as browser, visiting(browser, live) as visit:
        _enter(visit, live, "#/runs")
        visit.wait_until("document.querySelector('main').textContent.includes('253 of 253 runs')")
        visit.wait_until(f"{ROWS}.split(',').length === 100")
        # What is not drawn yet is found, too: the oldest run is the last one.
        visit.page.fill("#words", "many-000")
        visit.wait_until(f"{ROWS} === 'many-000'")
        visit.page.fill("#words", "")
        for drawn in (200, 253):
            visit.page.evaluate("scrollTo(0, document.body.scrollHeight)")
            visit.wait_until(f"{ROWS}.split(',').length === {drawn}")


def test_a_run_that_trains_is_healthy_again_soon_after_each_step(live: Service) -> None:
    rank = Rank(live, run="now", world_size=1)

    def train(step: int) -> None:
        rank.stage("actor_compute_log_prob", step, payload(seed=step, noise=0.01))
        rank.begin("actor_update", step)
        rank.end("actor_update", step)

    train(1)
    with chromium() as browser, visiting(browser, live) as visit:
        _enter(visit, live, "#/runs")
        row = "document.querySelector('tr[data-key=now]').textContent"
        for step in range(2, 8):
            train(step)
            visit.wait_until(
                f"/not measured.*{step - 1}|healthy.*{step - 1}|again.*{step - 1}/.test({row})"
            )
        visit.wait_until(f"{row}.includes('healthy')", seconds=12)


def test_runs_over_each_other_have_what_came_while_the_service_was_away(live: Service) -> None:
    rank = Rank(live, run="now", world_size=1)

    def train(step: int) -> None:
        rank.stage("actor_compute_log_prob", step, payload(seed=step, noise=0.01))
        rank.begin("actor_update", step)
        rank.end("actor_update", step)

    train(1)
    train(2)
    with chromium() as browser, visiting(browser, live) as visit:
        _enter(visit, live, "#/runs?runs=now")
        steps = "(document.querySelector('.compared .plot').data ?? []).flatMap(e => [...e.x])"
        visit.wait_until(f"{steps}.includes(1)")
        is_live = "document.querySelector('#session').textContent.includes('live')"
        visit.wait_until(is_live)
        port = live.server.port
        live.server.stop()
        visit.wait_until(f"!{is_live}")
        train(3)
        rank.say("finish")
        watcher = live.app.state.watcher  # another process knows nothing of what was sent
        watcher._name, watcher._recent = "other", None
        live.server._requested_port = port
        live.server.start(wait_for_port=10)
        visit.wait_until(is_live, seconds=60)
        visit.wait_until(f"{steps}.includes(3)")


def test_what_others_do_to_runs_is_seen(live: Service) -> None:
    with chromium() as browser, visiting(browser, live) as visit:
        _enter(visit, live, "#/runs?runs=fp8,bf16")
        visit.wait_until("document.querySelectorAll('.compared .legendtext').length === 2")
        visit.wait_until("document.querySelector('#session').textContent.includes('live')")
        assert live.operate.patch("/runs/old", json={"display_name": "base"}).status_code == 200
        visit.wait_until("document.querySelector(\"tr[data-key='old'] a\").textContent === 'base'")
        assert live.operate.delete("/runs/fp8?wait=10").json()["deleted"]
        visit.wait_until(f"{ROWS} === 'bf16,old'")
        visit.wait_until("location.hash === '#/runs?runs=bf16'")
        visit.go("#/runs/old/doctor")
        assert live.operate.patch("/runs/old", json={"display_name": "basis"}).status_code == 200
        visit.wait_until("document.querySelector('#where').textContent.includes('basis')")
        visit.wait_until("document.querySelector('h1').textContent === 'Doctor of basis'")
        assert live.operate.delete("/runs/old?wait=10").json()["deleted"]
        visit.wait_until("document.querySelector('h1').textContent.includes('There is no run old')")
        assert visit.messages == []


def test_runs_are_found_chosen_and_changed(live: Service) -> None:
    with chromium() as browser, visiting(browser, live) as visit:
        page = visit.page
        _enter(visit, live, "#/runs?runs=fp8,bf16")
        # The address alone draws both, and says in what they differ.
        visit.wait_until("document.querySelectorAll('.compared .legendtext').length === 2")
        visit.wait_until("document.querySelector('.settings tbody th')?.textContent === 'dtype'")
        visit.wait_until(f"{ROWS} === 'fp8,bf16,old'")
        visit.wait_until("document.querySelectorAll('.spark path').length === 6")
        visit.wait_until("!document.body.textContent.includes('the doctor looks')")
        headings = page.eval_on_selector_all(
            ".settings td", "all => all.map(e => e.dataset.heading)"
        )
        assert headings[:2] == ["fp8", "bf16"]  # what a narrow page shows beside the value
        assert visit.problems() == []
        page.get_by_label("draw old").check()
        assert page.evaluate("location.hash") == "#/runs?runs=fp8%2Cbf16%2Cold"
        page.fill("#words", "BF16")
        visit.wait_until(f"{ROWS} === 'bf16'")
        page.fill("#words", "")

        def act(run: str, word: str) -> None:
            page.locator(f"tr[data-key='{run}'] summary").click()
            page.locator(f"tr[data-key='{run}']").get_by_role("button", name=word).click()

        act("old", "Rename")
        page.fill("dialog input", "the baseline")
        page.click("dialog button.main")
        visit.wait_until(
            "document.querySelector(\"tr[data-key='old'] a\").textContent === 'the baseline'"
        )
        page.get_by_label("draw the baseline").uncheck()
        act("old", "Hide")
        visit.wait_until(f"{ROWS} === 'fp8,bf16'")
        page.get_by_label("hidden runs").check()
        visit.wait_until(f"{ROWS} === 'fp8,bf16,old'")
        act("fp8", "Delete…")
        visit.wait_until("document.querySelector('dialog')?.open")
        assert "3 steps" in page.inner_text("dialog")
        page.click("dialog button.main")
        visit.wait_until("document.querySelector('dialog input') !== null")
        page.fill("dialog input", "fp")
        page.click("dialog button.main")
        visit.wait_until("document.querySelector('dialog .problem') !== null")
        page.fill("dialog input", "fp8")
        page.click("dialog button.main")
        visit.wait_until(f"{ROWS} === 'bf16,old'")
        visit.wait_until("document.querySelector('main').textContent.includes('fp8 is deleted:')")
        assert [row["run"] for row in live.get("/runs", hidden=True)["rows"]] == ["bf16", "old"]
        assert visit.foreign == []
