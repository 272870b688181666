"""A run in a real browser: its charts in groups, and the views of runs that measured little."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.support.api import Rank, Service, service
from tests.support.dumps import capture
from tests.support.measure import payload
from tests.support.page import Visit, visiting
from tests.support.runs.shown import RUN, ShownRun
from tests.support.stores import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LOG_PROB: Final = "actor_compute_log_prob"
SCALARS: Final = {
    "reward/mean": 0.4, "actor/loss": 0.1, "actor/grad_norm": 1.2, "timing_s/gen": 20.0,
    "timing_s/update": 9.0, "epoch": 1.0,
}  # fmt: skip
STAGES: Final = "stages"
"""A run that reported stages alone: no tensors, no numbers, no capture, no canary, no weights."""
RUNS: Final = (STAGES, "logged", "measured", "begun")
VIEWS: Final = (
    "", "/steps", "/steps/latest", "/steps/2", "/steps/2/samples", "/steps/2/operators",
    "/steps/2/ranks/actor/0", "/steps/2/rounds/0", "/findings", "/captures", "/captures/new",
    "/triggers", "/hangs", "/weights", "/canary", "/lost", "/comparisons", "/doctor",
    *(f"/steps/2?part={part}" for part in (
        "rounds", "ranks", "tokens", "gradient", "time", "numbers", "files")),
)  # fmt: skip


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home"), recorded=False) as running:
        for run in RUNS:
            rank = Rank(running, run=run, world_size=1)
            if run == "begun":
                continue  # no step has begun
            for step in (1, 2, 3):
                if run == "measured":
                    handed = payload(4, 16, seed=step, noise=0.01)
                    if step == 2:  # neither stream has a value for one token
                        for stream in ("old_log_probs", "rollout_log_probs"):
                            handed["tensors"][stream][2][0, 0] = math.nan
                    rank.stage(LOG_PROB, step, handed)
                fields: dict[str, Any] = {} if run == STAGES else {"scalars": SCALARS}
                rank.stage("actor_update", step, **fields)
            rank.begin("actor_update", 4)
        yield running


@pytest.fixture
def visit(browser: Browser, live: Service) -> Iterator[Visit]:
    with visiting(browser, live) as opened:
        opened.page.wait_for_selector("#login")
        opened.log_in(live.tokens.operate)
        opened.settle()
        yield opened


@pytest.mark.parametrize("run", RUNS)
def test_what_is_not_measured_is_no_error_of_the_browser(visit: Visit, run: str) -> None:
    refused: list[str] = []
    visit.page.on(
        "response", lambda answer: refused.append(answer.url) if answer.status >= 400 else None
    )
    for view in VIEWS:
        if run == "begun" and view.startswith("/steps/2"):
            continue  # the page says which steps there are; see test_page.py
        visit.go(f"#/runs/{run}{view}")
        for _ in range(8):
            at_end = visit.page.evaluate(
                "() => { scrollBy(0, 700);"
                "return scrollY + innerHeight >= document.body.scrollHeight - 1 }"
            )
            visit.settle()
            if at_end:
                break
        assert (view, refused, visit.messages) == (view, [], [])
        assert not visit.page.query_selector(".problem"), view
    if run == STAGES:
        visit.go(f"#/runs/{run}/steps/2")
        why = live_reason(visit)
        assert "no rank has handed over both streams" in why
        hrefs = visit.page.eval_on_selector_all("a[rel]", "all => all.map(e => e.hash)")
        assert hrefs == [f"#/runs/{run}/steps/{step}" for step in (1, 3)]


def live_reason(visit: Visit) -> str:
    """Why the step that is shown has no numbers."""
    visit.page.wait_for_selector(".verdict")
    return str(visit.page.inner_text(".verdict"))


def test_a_step_with_a_token_that_is_not_finite_is_not_good_in_the_list(visit: Visit) -> None:
    visit.go("#/runs/measured/steps")
    verdict = "tr[data-key='1/{}'] .badge"
    visit.page.wait_for_selector(verdict.format(2))
    assert visit.page.inner_text(verdict.format(2)).endswith("; 1 token not finite")
    assert "good" not in visit.page.eval_on_selector(verdict.format(2), "e => e.className")
    assert "not finite" not in visit.page.inner_text(verdict.format(1))


def test_marks_of_new_steps_stand_at_the_height_of_the_curve(visit: Visit, live: Service) -> None:
    rank = Rank(live, run="ill", world_size=1)

    def train(steps: range, loss: float) -> None:
        for step in steps:
            rank.stage(LOG_PROB, step, payload(4, 16, seed=step, noise=0.01))
            rank.stage("actor_update", step, scalars={"loss": loss / step})
        rank.begin("rollout_generate", steps.stop)

    train(range(1, 4), 0.5)
    visit.go("#/runs/ill")
    marks = (
        "[...document.querySelectorAll('.panel-plot .js-plotly-plot')].flatMap(each => each.data)"
        ".find(each => each.name === 'not finite')"
    )
    visit.page.wait_for_selector(".plot .xtick text")
    visit.wait_until("document.querySelector('#session').textContent.includes('live')")
    train(range(4, 5), math.nan)
    visit.wait_until(f"{marks}?.x.length === 1")
    train(range(5, 7), math.nan)
    visit.wait_until(f"{marks}?.x.length === 3")
    assert visit.page.evaluate(f"[...{marks}.y]") == [0.5, 0.5, 0.5]


def test_a_run_that_only_logs_numbers_is_followed(visit: Visit, live: Service) -> None:
    rank = Rank(live, run="plain", world_size=1)
    rank.begin("actor_update", 1)

    def train(*steps: int) -> None:
        for step in steps:
            rank.end("actor_update", step, scalars={"loss": 1.0 / step, "reward": 0.1 * step})
            rank.begin("actor_update", step + 1)

    def says(text: str) -> None:
        visit.wait_until(f"document.querySelector('main').textContent.includes('{text}')")

    train(1, 2, 3)
    visit.go("#/runs/plain")
    visit.page.wait_for_selector(".plot .xtick text")
    visit.wait_until("document.querySelector('#session').textContent.includes('live')")
    says("in 3 closed steps")
    train(4)
    says("in 4 closed steps")
    panels = "[...document.querySelectorAll('.panel-plot .js-plotly-plot')]"
    is_grown = "({ x, y }) => Number.isFinite(y[[...x].indexOf(4)])"
    visit.wait_until(f"{panels}.filter(e => e.data.some({is_grown})).length === 2")
    visit.go("#/runs/plain/doctor")
    says("in 4 closed steps")
    train(5)
    says("in 5 closed steps")
    visit.go("#/runs")
    row = "document.querySelector('tr[data-key=plain]')?.textContent"
    train(6)
    visit.wait_until(f"/live.*mismatch not measured.*0.6000.*6/.test({row})")
    visit.go("#/runs/plain/steps/latest")
    says("Step 7")
    train(7)
    says("Step 8")
    assert visit.messages == []


def test_numbers_that_come_late_or_under_a_new_name_are_drawn(visit: Visit, live: Service) -> None:
    rank = Rank(live, run="late", world_size=1)
    rank.begin("actor_update", 1)

    def train(step: int) -> None:
        rank.end("actor_update", step, scalars={"loss": 1.0 / step})
        rank.begin("actor_update", step + 1)

    train(1)
    rank.say("log", step=1, scalars={"reward": 1.0})
    visit.go("#/runs/late")
    visit.page.wait_for_selector(".plot .xtick text")
    visit.wait_until("document.querySelector('#session').textContent.includes('live')")
    visit.wait_until(f"{GROUPS}.length === 1")
    reward = (
        "[...document.querySelectorAll('.panel-plot .js-plotly-plot')].flatMap(e => e.data)"
        ".find(({ y }) => y.includes(1) && !y.includes(0.5))"
    )
    train(2)
    visit.wait_until(f"[...{reward}.x].includes(3)")  # as drawn once step 2 was over
    rank.say("log", step=2, scalars={"reward": 5.0, "val/score": 0.3})
    assert not visit.page.evaluate(f"[...{reward}.y].includes(5)")
    train(3)
    visit.wait_until(f"[...{reward}.y].includes(5)")
    visit.wait_until(f"{GROUPS}.includes('val')")
    assert visit.messages == []


GROUPS: Final = "[...document.querySelectorAll('.groups summary strong')].map(e => e.textContent)"
DRAWN: Final = "[...document.querySelectorAll('.groups h3')].map(e => e.firstChild.textContent)"
FIRST: Final = "[...document.querySelectorAll('figure:not(.groups *) .panel-plot h3')]"


def test_charts_are_grouped_by_prefix_and_groups_stay_folded_or_open(visit: Visit) -> None:
    page = visit.page
    visit.go("#/runs/logged")
    visit.wait_until(f"{FIRST}.map(e => e.firstChild.textContent).includes('reward/mean')")
    visit.wait_until(f"{GROUPS}.join() === 'without a prefix,actor,reward,timing_s'")
    assert "2 charts" in page.inner_text(".groups details:has-text('actor') summary")
    assert page.evaluate(DRAWN) == []  # what is folded is not asked for
    assert not [url for url in visit.requests if "timing_s" in url]
    page.click(".groups summary:has-text('timing_s')")
    visit.wait_until(f"{DRAWN}.join() === 'timing_s/gen,timing_s/update'")
    visit.page.wait_for_selector(".groups .xtick text")
    assert "timing_s" in page.url
    # Somebody else sees the same by the address, the reader without it.
    page.reload()
    visit.wait_until(f"{DRAWN}.join() === 'timing_s/gen,timing_s/update'")
    visit.go("#/runs/measured")
    # It is below what still grows: a chart is asked for where it is in sight.
    visit.wait_until(
        "(document.querySelector('.groups details[open]')?.scrollIntoView(), true)"
        f" && {DRAWN}.join() === 'timing_s/gen,timing_s/update'"
    )
    page.click(".groups summary:has-text('timing_s')")
    visit.wait_until(f"{DRAWN}.length === 0")
    assert "timing_s" not in page.url
    # A chart of a group moves to the first ones, and so does one of the picker.
    page.click(".groups summary:has-text('actor')")
    page.click("[aria-label='draw actor/loss among the first charts']")
    visit.go("#/runs/logged")
    page.click(".picker summary")
    page.fill("#number", "TIM")
    visit.wait_until("document.querySelectorAll('#numbers button').length === 2")
    assert page.inner_text("#numbers h3") == "timing_s"
    page.click("#numbers button:has-text('timing_s/gen')")
    visit.wait_until(f"{FIRST}.map(e => e.firstChild.textContent).includes('timing_s/gen')")
    assert visit.problems() == []
    assert visit.messages == []


def test_a_click_leads_from_an_arrived_dump_to_its_operators(visit: Visit, live: Service) -> None:
    training = ShownRun(live, ranks=2, steps=4, rows=1, tokens=16)
    training.train(1, 1)
    capture_id = training.capture()
    visit.go(f"#/runs/{RUN}/captures/{capture_id}")
    training.acknowledge(capture_id, range(2))
    start = eventually(lambda: live.get(f"/captures/{capture_id}")["agreement"]["start"])
    for step in range(2, start + 1):
        training.do(step)
    path = capture(live.settings.data_path / "dumps", level="mix")
    training.actors[1].say(
        "dump", stage="actor_update", step=start, capture_id=capture_id, state="complete",
        path=str(path), bytes=sum(each.stat().st_size for each in path.glob("*")), files=3,
        seconds=0.41, task="statistics", level="mix",
    )  # fmt: skip
    visit.page.click("table.stacks a:has-text('actor 1')")
    visit.wait_until("document.querySelector('h1').textContent.startsWith('Operators of step')")
    calls = "document.querySelector('table code')?.textContent.includes('embedding')"
    visit.wait_until(f"{calls} || document.querySelectorAll('main table').length > 1")
    assert "actor 1" in visit.page.inner_text("h1")
    assert "blocks.0" in visit.page.inner_text("main")
    scrolled = "e => e.scrollWidth > e.clientWidth"
    visit.page.evaluate("document.body.style.width = '1100px'")
    assert not visit.page.evaluate(f"[...document.querySelectorAll('.scroll')].some({scrolled})")
    assert visit.messages == []
