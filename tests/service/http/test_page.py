"""The page in a real browser whose network is closed to all but the service."""

from __future__ import annotations

import contextlib
import math
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import numpy as np
import pytest
from tests.support.api import Rank, Service, service
from tests.support.measure import Handed
from tests.support.page import Visit, visiting
from tests.support.runs.investigated import STEPS, investigated
from tests.support.runs.shown import (
    BROKEN,
    HOT_RANK,
    LOG_PROB,
    NAN_RANK,
    RESTART,
    RUN,
    ShownRun,
    keep_tensors,
    payload,
)
from tests.support.stores import eventually

from stagescope_service.http.access_token_file import Token, add_token
from stagescope_wire.names import normal_run_name
from stagescope_wire.tensorfile import WireTensor

if TYPE_CHECKING:
    from playwright.sync_api import APIResponse, Browser, Response, Route

TOKENS: Final = 32_768
PASSES: Final = ((0.25, [0, 1, 0, 1, 0, 0, 0, 0]), (0.5, [0, 1, 0, 0, 0, 0, 0, 0]))
"""Of each pass over the rows: what it adds to the log-probs in nats, and the tokens it clips."""
OF_RUN: Final = f"#/runs/{RUN}"
STEP: Final = f"{OF_RUN}/steps/{STEPS}"
VIEWS: Final = {
    "runs": "#/",
    "run": OF_RUN,
    "steps": f"{OF_RUN}/steps",
    "step": STEP,
    "broken step": f"{OF_RUN}/steps/{BROKEN}",
    **{
        f"step, {part}": f"{STEP}?part={part}"
        for part in ("rounds", "routing", "ranks", "tokens", "gradient", "time", "numbers", "files")
    },
    "newest step": f"{OF_RUN}/steps/latest",
    "step of an earlier attempt": f"{OF_RUN}/steps/22?attempt=1",
    "rank": f"{STEP}/ranks/actor/{HOT_RANK}",
    "round": f"{STEP}/rounds/3",
    "samples": f"{STEP}/samples",
    "sample": f"{STEP}/samples/g36-0-0%2F1?at=100",
    "operators": f"{STEP}/operators?role=actor&rank=3",
    "captured operators": f"{OF_RUN}/steps/{BROKEN}/operators?role=actor&rank={NAN_RANK}",
    "findings": f"{OF_RUN}/findings",
    "captures": f"{OF_RUN}/captures",
    "arming": f"{OF_RUN}/captures/new?stages=actor_update&ranks=5",
    "triggers": f"{OF_RUN}/triggers",
    "hangs": f"{OF_RUN}/hangs",
    "weights": f"{OF_RUN}/weights",
    "canary": f"{OF_RUN}/canary",
    "lost": f"{OF_RUN}/lost",
    "comparisons": f"{OF_RUN}/comparisons?a={RUN}@1&b={RUN}@2",
    "doctor": f"{OF_RUN}/doctor",
    "engines": "#/engines",
    "devices": "#/devices",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with a training that nobody continues."""
    with service(tmp_path_factory.mktemp("home"), recorded=False) as running:
        investigated(running, rows=2, tokens=48)
        rank = Rank(running, run="long", world_size=1)
        rank.stage(LOG_PROB, 1, payload(1, 0, rows=1, rounds=8, tokens=TOKENS // 8))
        rank.begin(LOG_PROB, 2)
        _two_passes(running)
        yield running


def _two_passes(running: Service) -> None:
    """A run whose update goes twice over its rows: each clips tokens of its own."""
    rank = Rank(running, run="passes", world_size=1)
    streams = payload(1, 0, rows=1, rounds=1, tokens=8)
    streams["tensors"]["prompts"] = ("int64", (1, 3), np.array([[7, 8, 9]]), None)
    rank.stage(LOG_PROB, 1, streams)
    old, mask = (streams["tensors"][name] for name in ("old_log_probs", "response_mask"))
    for epoch, (moved, clipped) in enumerate(PASSES):
        tensors: dict[str, WireTensor] = {
            "response_mask": mask,
            "log_probs": ("float32", old[1], old[2] + np.float32(moved), None),
            "clipped": ("int8", mask[1], np.array([clipped], np.int8), None),
        }
        handed: Handed = {
            "schema": 1, "tensors": tensors, "strings": streams["strings"], "meta": {},
        }  # fmt: skip
        rank.hand("actor_update", 1, handed, epoch=epoch)
    rank.begin(LOG_PROB, 2)


@pytest.fixture
def training(live: Service) -> ShownRun:
    """A training of four ranks in its third step, which a test continues."""
    keep_tensors(live)
    run = ShownRun(live, ranks=4, steps=8, rows=2, tokens=16)
    run.train(1, 2)
    return run


def operator(live: Service) -> str:
    return live.tokens.operate


@contextlib.contextmanager
def logged_in(browser: Browser, live: Service, **window: Any) -> Iterator[Visit]:
    """A window in which somebody who may operate is logged in."""
    with visiting(browser, live, **window) as visit:
        visit.page.wait_for_selector("#login")
        visit.log_in(operator(live))
        yield visit


def links(visit: Visit) -> dict[str, str]:
    """The links of the view: text -> address."""
    found: dict[str, str] = visit.page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('main a')]"
        ".map(e => [e.textContent, decodeURIComponent(e.getAttribute('href'))]))"
    )
    return found


def text(visit: Visit, selector: str = "main") -> str:
    return str(visit.page.inner_text(selector))


def cells(visit: Visit, table: str) -> list[list[str]]:
    """The cells of a table by row, also where a narrow page stacks them; first its headings."""
    found: list[list[str]] = visit.page.locator(table).first.evaluate(
        "table => [...table.rows].map(row => [...row.cells].map(e => e.textContent))"
    )
    return found


# --- login ------------------------------------------------------------------------------------
def test_a_visitor_is_told_what_to_paste_and_where_to_find_it(
    browser: Browser, shared: Service
) -> None:
    with visiting(browser, shared) as visit:
        visit.page.wait_for_selector("#login")
        shown_text = text(visit)
        assert "read.token" in shown_text
        assert "operate.token" in shown_text
        assert "STAGESCOPE_HOME" in shown_text
        assert visit.page.evaluate("document.activeElement.id") == "token"
        assert visit.messages == []  # nobody is logged in yet, which is no error
        visit.page.fill("#token", "wrong")
        visit.page.keyboard.press("Enter")
        visit.wait_until("document.querySelector('#login [role=alert]').textContent")
        assert "not a token of this service" in text(visit)
        visit.log_in(shared.tokens.read)
        visit.settle()
        assert text(visit, "h1") == "Runs"
        assert "may read" in text(visit, "#session")
        everywhere = visit.page.evaluate(
            "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}, "
            "location.href, history.state, document.documentElement.outerHTML])"
        )
        assert shared.tokens.read not in everywhere
        assert not any(shared.tokens.read in url for url in visit.requests)
        visit.page.reload()
        visit.settle()
        assert text(visit, "h1") == "Runs"
        visit.page.click("text=Log out")
        visit.page.wait_for_selector("#login")
        visit.page.reload()
        visit.page.wait_for_selector("#login")


def test_a_login_shows_the_view_of_its_address(browser: Browser, shared: Service) -> None:
    with visiting(browser, shared) as visit:
        visit.page.goto(f"{shared.server.url}/{STEP}")
        visit.page.wait_for_selector("#login")
        visit.log_in(operator(shared))
        visit.settle()
        assert text(visit, "h1") == f"Step {STEPS} of {RUN}"


def test_an_admin_sees_who_is_logged_in_and_who_did_what(browser: Browser, live: Service) -> None:
    home = live.settings.home
    boss = add_token(home, Token("boss", "admin"))
    ada = add_token(home, Token("ada", "operate"))
    assert boss is not None
    assert ada is not None
    Rank(live, run="watched", world_size=1).stage(LOG_PROB, 1)
    eventually(lambda: live.client(ada).get("/runs").is_success)
    body = {"stages": "all", "steps": [900], "keep": ["old_log_probs"], "run": "watched"}
    assert live.client(ada).post("/captures", json=body).status_code == 201
    with visiting(browser, live) as visit:
        visit.page.wait_for_selector("#login")
        visit.log_in(boss)
        visit.settle()
        assert "boss, may operate" in text(visit, "#session")
        visit.page.click("#session >> text=audit")
        visit.wait_until("document.querySelector('main').innerText.includes('token ada')")
        visit.settle()
        assert "token ada (operate" in text(visit)
        assert "add_capture" in text(visit)
        assert visit.problems() == []
        visit.go("#/")
        visit.page.click("text=Log out")
        visit.page.wait_for_selector("#login")
        visit.log_in(ada)
        visit.settle()
        assert "ada, may operate" in text(visit, "#session")
        assert "audit" not in text(visit, "#session")
        assert "watched" in text(visit)
        assert visit.messages == []


def test_without_tokens_there_is_no_login(browser: Browser, tmp_path: Path) -> None:
    with service(tmp_path, auth=False) as running, visiting(browser, running) as visit:
        visit.settle()
        assert text(visit, "h1") == "Runs"
        visit.wait_until(
            "document.querySelector('main').textContent.includes('stagescope_workers.init')"
        )


# --- views ------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["wide light", "narrow dark"])
def entered(request: pytest.FixtureRequest, browser: Browser, shared: Service) -> Iterator[Visit]:
    """A window in which somebody is logged in."""
    width, scheme = request.param.split()
    with logged_in(browser, shared, width=1280 if width == "wide" else 400, scheme=scheme) as visit:
        yield visit


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_is_quiet_accessible_and_fits(entered: Visit, name: str) -> None:
    del entered.messages[:]
    entered.go(VIEWS[name])
    # To the end and back, so that what loads in sight has loaded.
    for _ in range(20):
        at_end = entered.page.evaluate(
            "() => { scrollBy(0, 700);"
            "return scrollY + innerHeight >= document.body.scrollHeight - 1 }"
        )
        entered.settle()
        if at_end:
            break
    entered.page.evaluate("scrollTo(0, 0)")
    entered.settle()
    assert entered.page.inner_text("h1")
    assert entered.page.title() != "stagescope"
    assert not entered.page.query_selector(".problem"), text(entered, ".problem")
    assert entered.foreign == []
    assert entered.messages == []
    assert entered.page.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    assert "no token counts" not in text(entered)
    # Tables scroll on their own, and can be scrolled by keyboard.
    assert entered.page.evaluate(
        "[...document.querySelectorAll('main table')].every(e => e.closest('.scroll[tabindex]'))"
    )
    assert entered.problems() == []


def test_from_the_runs_to_the_tokens_and_back(browser: Browser, shared: Service) -> None:
    with logged_in(browser, shared) as visit:
        visit.settle()
        way = []

        def follow(link: str, heading: str) -> None:
            visit.page.click(link)
            visit.wait_until(f"document.querySelector('h1').textContent.includes('{heading}')")
            visit.settle()
            way.append((visit.page.url, visit.page.inner_text("h1")))

        follow(f"main >> text={RUN}", RUN)
        follow(f"main table >> text=/^{STEPS}$/", f"Step {STEPS}")
        follow(".parts >> text=Tokens", f"Step {STEPS}")
        visit.page.wait_for_selector("h2:text-is('Worst tokens')")
        follow(f"main table >> text=actor {HOT_RANK} >> nth=0", f"actor rank {HOT_RANK}")
        follow("section:has(h2:text('Worst tokens')) tbody th a >> nth=0", "Sample ")
        follow("text=Operators of its rank", "Operators of step")
        # Each has an address of its own, by which somebody else sees the same.
        assert len({url for url, _ in way}) == 6
        for url, heading in reversed(way):
            assert visit.page.inner_text("h1") == heading
            visit.page.reload()
            visit.settle()
            assert (visit.page.url, visit.page.inner_text("h1")) == (url, heading)
            visit.page.go_back()
            visit.settle()
        assert visit.page.inner_text("h1") == "Runs"


def test_numbers_are_those_of_the_service_with_their_verdict(
    entered: Visit, shared: Service
) -> None:
    entered.go(f"{OF_RUN}/steps/{BROKEN}")
    metrics = shared.get(f"/steps/{BROKEN}/metrics")
    mean = metrics["metrics"]["logprob_abs_diff/mean"]
    verdict = text(entered, ".verdict")
    assert verdict.split("\n")[0].strip().startswith("✓ comparable")
    assert f"{metrics['coverage']['tokens']}".replace(",", "") in re.sub(r"\s", "", verdict)
    tile = text(entered, ".tile >> nth=0")
    assert f"{mean:.4g}" in tile
    assert "nat" in tile
    assert "noise floor not measured" in tile  # a gap with its reason, not a 0
    assert text(entered, ".tile:has(dt:text-is('not finite')) dd") == "3 NaN in old"
    entered.go(f"{OF_RUN}/steps/{BROKEN}?part=ranks")
    first = text(entered, "section:has(h2:text-is('Ranks')) tbody tr >> nth=0")
    assert first.startswith(f"actor {NAN_RANK}")  # what is not finite comes first


def test_its_links_download_a_report_and_a_bundle(
    browser: Browser, shared: Service, tmp_path: Path
) -> None:
    with logged_in(browser, shared) as visit:
        visit.go(STEP)
        for link, ending in (("the report of this step", "html"), ("a bundle with", "tar.gz")):
            with visit.page.expect_download() as caught:
                visit.page.click(f"a:has-text('{link}')")
            assert caught.value.suggested_filename == f"{RUN}-2-step{STEPS}.{ending}"
            caught.value.save_as(tmp_path / ending)
        assert visit.messages == []
    assert f"<h1>{RUN}, attempt 2, step {STEPS}</h1>" in (tmp_path / "html").read_text("utf-8")
    with tarfile.open(tmp_path / "tar.gz") as archive:
        assert any(name.endswith("manifest.json") for name in archive.getnames())


def test_what_is_not_measured_is_a_gap(entered: Visit) -> None:
    entered.go(f"{OF_RUN}/steps")
    died = text(entered, f'tr[data-key="1/{RESTART}"]')
    assert "not measured" in died
    assert "no rank handed over both streams" in died
    assert "comparable" in text(entered, f'tr[data-key="2/{RESTART}"]')
    open_row = text(entered, f'tr[data-key="2/{STEPS + 1}"]')
    assert "open" in open_row
    assert not re.search(r"\t0(\.0+)?\b", open_row)
    old = entered.page.query_selector_all("tr.old")
    assert len(old) == RESTART - 20  # the steps that the second attempt repeats
    assert "repeated by 2" in old[0].inner_text()
    entered.go(f"{OF_RUN}/steps/{RESTART}?attempt=1")
    assert text(entered, "main").count("no rank has handed over both streams") == 1
    assert "Mismatch" not in text(entered, "main")


def test_the_steps_of_an_attempt_lead_on_over_the_restart(
    browser: Browser, shared: Service
) -> None:
    with logged_in(browser, shared) as visit:
        visit.go(f"{OF_RUN}/steps/21?attempt=2")
        assert links(visit)["← step 20"] == f"{OF_RUN}/steps/20"  # of attempt 1
        assert links(visit)["step 22 →"] == f"{OF_RUN}/steps/22?attempt=2"
        visit.go(f"{OF_RUN}/steps/20?attempt=1")
        assert links(visit)["← step 19"] == f"{OF_RUN}/steps/19?attempt=1"
        visit.go(OF_RUN)
        visit.page.click("tr[data-key='1'] >> text=ask the doctor")
        visit.wait_until("document.querySelector('h1').textContent.startsWith('Doctor')")
        visit.settle()
        assert text(visit, "h1") == f"Doctor of {RUN}, attempt 1"
        assert visit.messages == []


def test_an_address_of_nothing_says_what_there_is(browser: Browser, shared: Service) -> None:
    with logged_in(browser, shared) as visit:
        del visit.messages[:]
        for view in ("", "/samples", "/ranks/actor/0", "/samples/g%2F0", "/operators"):
            visit.go(f"{OF_RUN}/steps/999{view}")
            assert text(visit, "h1") == f"Run {RUN} has no step 999"
            assert links(visit) == {
                "first: step 1": f"{OF_RUN}/steps/1", f"last: step {STEPS + 1}":
                f"{OF_RUN}/steps/{STEPS + 1}", "all its steps": f"{OF_RUN}/steps",
            }  # fmt: skip
        visit.go(f"{OF_RUN}/steps/abc")
        assert text(visit, "h1") == f"Run {RUN} has no step abc"
        visit.go(f"{OF_RUN}/steps/30?attempt=1")
        assert text(visit, "h1") == f"Attempt 1 of run {RUN} has no step 30"
        assert f"{OF_RUN}/steps/{RESTART}?attempt=1" in links(visit).values()
        visit.go(f"{OF_RUN}/steps/3?attempt=7")
        assert text(visit, "h1") == f"Run {RUN} has no attempt 7"
        for view in ("", "/captures", "/steps/3"):
            visit.go(f"#/runs/none{view}")
            assert text(visit, "h1") == "There is no run none in this service"
            assert links(visit).items() >= {"All runs": "#/", RUN: OF_RUN}.items()
            assert not visit.page.is_visible("#tabs")
        assert visit.messages == []  # nothing was asked that the service answers with an error
        visit.go("#/nonsense/x")
        assert text(visit, "h1") == "No such view"


def test_the_name_that_a_training_gave_leads_to_its_run(browser: Browser, live: Service) -> None:
    given, name = "qwen3/grpo 训练", normal_run_name("qwen3/grpo 训练")
    rank = Rank(live, run=name, display_name=given, world_size=1)
    for step in (1, 2):
        rank.stage(LOG_PROB, step, payload(step, 0))
    with logged_in(browser, live) as visit:
        del visit.messages[:]
        visit.go(f"#/runs/{quote(given, safe='')}/steps/1?attempt=1")
        visit.wait_until(f"location.hash === '#/runs/{name}/steps/1?attempt=1'")
        visit.settle()
        assert visit.messages == []


def test_a_step_that_was_not_there_is_shown_as_soon_as_it_is(
    browser: Browser, live: Service, training: ShownRun
) -> None:
    with logged_in(browser, live) as visit:
        visit.go(f"{OF_RUN}/steps/4")
        assert text(visit, "h1") == f"Run {RUN} has no step 4"
        visit.wait_until("document.querySelector('#session').textContent.includes('live')")
        training.train(3, 4)
        visit.wait_until(f"document.querySelector('h1').textContent === 'Step 4 of {RUN}'")


def test_a_point_of_the_course_leads_to_its_step(browser: Browser, shared: Service) -> None:
    with logged_in(browser, shared) as visit:
        for step, attempt, address in (
            (30, 2, f"{OF_RUN}/steps/30"),
            (22, 1, f"{OF_RUN}/steps/22?attempt=1"),  # which attempt 2 repeats
        ):
            visit.go(OF_RUN)
            visit.page.wait_for_selector(".plot .xtick text")
            x, y = visit.page.evaluate(
                "([step, attempt]) => {"
                "const plot = document.querySelector('.panel-plot .js-plotly-plot');"
                "const { xaxis, yaxis } = plot._fullLayout;"
                "const line = plot.data.find(e => e.meta?.attempt === attempt"
                " && [...e.x].includes(step));"
                "const { left, top } = plot.getBoundingClientRect();"
                "return [left + xaxis._offset + xaxis.d2p(step),"
                "top + yaxis._offset + yaxis.d2p(line.y[[...line.x].indexOf(step)])] }",
                [step, attempt],
            )
            visit.page.mouse.move(x, y)
            visit.page.wait_for_selector(".opens")
            visit.page.mouse.click(x, y)
            visit.wait_until(f"location.hash === '{address}'")
        # By keyboard: the numbers of the figure are links.
        visit.go(OF_RUN)
        visit.page.wait_for_selector(".plot .xtick text")
        visit.page.focus("figure summary")
        visit.page.keyboard.press("Enter")
        visit.page.focus(f"figure details td a[href='{OF_RUN}/steps/30']")
        visit.page.keyboard.press("Enter")
        visit.wait_until(f"location.hash === '{OF_RUN}/steps/30'")


def test_the_worst_round_is_said_and_marked(entered: Visit, shared: Service) -> None:
    entered.go(f"{STEP}?part=rounds")
    metrics = shared.get(f"/steps/{STEPS}/metrics", run=RUN)["metrics"]
    worst = metrics["per_round/max_round_diff"]
    entered.wait_until("document.querySelector('tr.marked')")
    assert text(entered, "tr.marked").split()[0] == f"{worst}"
    sentence = text(entered, "section:has(h2:text-is('Rounds')) p")
    assert sentence.startswith(f"Of 4 rounds, round {worst} is the worst: mean |d| ")
    assert f"{metrics['per_round/max_diff_value']:.4g}" in sentence


OUT_OF_SIGHT: Final = (
    "[...document.querySelectorAll('table.stacks td, table.stacks th')].filter(e => "
    "e.getClientRects().length && (e.getBoundingClientRect().right > innerWidth "
    "|| e.scrollWidth > e.clientWidth + 1)).map(e => e.textContent)"
)


def test_the_band_of_a_step_says_which_tokens_are_not_finite(entered: Visit) -> None:
    entered.go(VIEWS["broken step"])
    assert "3 tokens are NaN in old" in text(entered, ".verdict .badge.warn")
    border, warning = entered.page.evaluate(
        "[getComputedStyle(document.querySelector('.verdict')).borderLeftColor,"
        " getComputedStyle(document.querySelector('.verdict .badge.warn')).color]"
    )
    assert border == warning
    entered.go(STEP)
    assert not entered.page.query_selector(".verdict .badge.warn")


@pytest.mark.parametrize("entered", ["wide light"], indirect=True)
def test_a_table_of_many_columns_fits_a_wide_page(entered: Visit, shared: Service) -> None:
    engine = {
        "url": "http://10.0.0.7:8000", "name": "judge-72b", "run": RUN, "model":
        "/data/models/a-model-with-a-long-name/step_120", "note": "serves the reward model",
    }  # fmt: skip
    assert shared.operate.post("/engines", json=engine).status_code == 200
    for name in ("captured operators", "engines"):
        entered.go(VIEWS[name])
        entered.page.reload()  # an answer of the last second is not asked for again
        entered.wait_until("document.querySelector('main tbody td')")
        entered.settle()
        scrolled = "[...document.querySelectorAll('main .scroll')].map(e => [e.ariaLabel, "
        scrolled += "e.scrollWidth - e.clientWidth]).filter(([, by]) => by > 0)"
        assert entered.page.evaluate(scrolled) == []
    assert shared.operate.delete("/engines/judge-72b").status_code == 200


def test_a_finding_shows_its_evidence_in_lines_and_a_command_to_follow(
    entered: Visit, shared: Service
) -> None:
    rows = shared.get("/findings", run=RUN, kind="non_finite_operator")["rows"]
    entered.go(f"{OF_RUN}/findings/{rows[0]['finding_id']}")
    assert text(entered, "h1") == f"Finding of {RUN}"
    where = entered.page.get_attribute("main .command a", "href")
    assert where == f"{OF_RUN}/steps/{BROKEN}/operators"
    facts = entered.page.eval_on_selector_all(
        "h2:has-text('Evidence') + dl dt", "all => all.map(e => [e.innerText, "
        "e.nextSibling.innerText, e.getBoundingClientRect().top - "
        "e.nextSibling.getBoundingClientRect().top])"
    )  # fmt: skip
    assert {name: value for name, value, _ in facts}.items() >= {
        "section": "output", "non finite": "nan",
    }.items()  # fmt: skip
    assert all(abs(apart) < 1.0 for *_, apart in facts)  # a value stands beside its name
    assert cells(entered, "table")[1] == ["input_args", "1", "nan"]
    assert entered.problems() == []


@pytest.mark.parametrize("entered", ["narrow dark"], indirect=True)
def test_the_reasons_of_the_doctor_fit_a_narrow_page(entered: Visit) -> None:
    entered.go(f"{OF_RUN}/doctor")
    entered.wait_until("document.querySelector('table.stacks td')")
    entered.page.click("details summary")
    assert entered.page.evaluate(OUT_OF_SIGHT) == []


@pytest.mark.parametrize("entered", ["narrow dark"], indirect=True)
@pytest.mark.parametrize("name", ["step, ranks", "step, time", "samples", "comparisons"])
def test_the_tab_that_is_shown_and_the_tables_are_in_sight_on_a_narrow_page(
    entered: Visit, name: str
) -> None:
    entered.go(VIEWS[name])
    entered.wait_until(
        "[...document.querySelectorAll('nav > [aria-current]')].every(e => {"
        "const { left, right } = e.getBoundingClientRect();"
        "return left >= 0 && right <= innerWidth })"
    )
    entered.wait_until("document.querySelector('table.stacks td')")
    assert entered.page.evaluate(OUT_OF_SIGHT) == []


def test_a_rank_and_a_round_tell_their_own_tokens_from_those_of_the_step(entered: Visit) -> None:
    entered.go(VIEWS["round"])
    facts = text(entered, ".verdict").split("\n")
    assert "payloads of the step" in facts
    assert facts[facts.index("tokens") + 1] == "640 of 2688 of the step"
    assert "sequences" not in facts
    entered.go(VIEWS["rank"])
    facts = text(entered, ".verdict").split("\n")
    assert "ranks of the step" in facts
    assert facts[facts.index("tokens") + 1] == "336 of 336 sent"


def test_comparisons_offer_the_likely_pairs(entered: Visit) -> None:
    entered.go(f"{OF_RUN}/comparisons")
    entered.page.wait_for_selector("text=before and after a restart")
    offered = links(entered)
    assert offered[f"{RUN}@1 with {RUN}@2"] == f"{OF_RUN}/comparisons?a={RUN}@1&b={RUN}@2"
    steps = f"{RUN}@2:{STEPS - 1} with {RUN}@2:{STEPS}"
    assert steps in offered
    entered.page.click(f"text={steps}")
    entered.wait_until("document.querySelector('#b')?.value.endsWith(':36')")


COMMANDS: Final = {
    "tokens 22 --run r --attempt 2  # the worst": "#/runs/r/steps/22?attempt=2&part=tokens",
    "anatomy 3 --by end --run r": "#/runs/r/steps/3?part=rounds&by=end",
    "samples --run r": "#/runs/r/steps/latest/samples",
    "non-finite 33 --role actor --run 'a b'": "#/runs/a%20b/steps/33/operators?role=actor",
    "canary r": "#/runs/r/canary",
    "doctor r --attempt 1 --step 9": "#/runs/r/doctor?attempt=1&step=9",
    "findings --only stream_changed --run r": "#/runs/r/findings?only=stream_changed",
    "series reward --run r": "#/runs/r?metrics=reward",
    "stuck --run r": "#/runs/r/hangs",
    "diff r@1 r@2": "#/runs/r/comparisons?a=r%401&b=r%402",
    "capture --stages f --ranks 'worst(1)' --run r":
        "#/runs/r/captures/new?stages=f&ranks=worst%281%29",
    "capture --stages f --gradients '*' --run r": None,
    "tokens STEP --run r": None,
    "tokens 22": None,
    "bisect r:24 --engine URL --model DIR": None,
}  # fmt: skip


def test_a_command_leads_to_the_view_that_shows_the_same(entered: Visit, shared: Service) -> None:
    found = entered.page.evaluate(
        "lines => import('/static/commands.js').then(({ viewOf }) => lines.map(viewOf))",
        [f"stagescope {each}" for each in COMMANDS],
    )
    assert dict(zip(COMMANDS, found, strict=True)) == COMMANDS
    entered.go(f"{OF_RUN}/doctor")
    entered.wait_until("document.querySelector('.command a')")
    links = entered.page.eval_on_selector_all(".command a", "all => all.map(each => each.hash)")
    for link in dict.fromkeys(links):
        entered.go(link)
        assert text(entered, "h1") != "No such view"
    entered.go(f"{OF_RUN}/doctor")
    entered.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    entered.page.click(".symptom .command .copy")
    entered.page.wait_for_selector("text=copied")
    proof = shared.get(f"/runs/{RUN}/diagnosis")["rows"][0]["next"][0]
    assert proof.startswith(entered.page.evaluate("navigator.clipboard.readText()"))


DUMPS: Final = "table.stacks:has-text('/data/dumps') tbody"


def test_the_dumps_of_a_capture_fit_a_narrow_page(
    browser: Browser, live: Service, training: ShownRun
) -> None:
    capture_id = training.capture()
    training.acknowledge(capture_id, range(4))
    start = eventually(lambda: live.get(f"/captures/{capture_id}")["agreement"]["start"])
    for step in range(3, start + 1):
        training.do(step)
    training.dump(capture_id, start, 0)
    with logged_in(browser, live, width=400) as visit:
        visit.go(f"{OF_RUN}/captures/{capture_id}")
        row = visit.page.wait_for_selector(f"{DUMPS} tr")
        assert row is not None
        box = row.bounding_box()
        assert box is not None
        assert box["height"] < 110.0
        assert f"/data/dumps/step_{start}/" in row.inner_text()
        link = visit.page.get_attribute(f"{DUMPS} tr a", "href")
        assert link is not None
        assert link.startswith(f"{OF_RUN}/steps/{start}/operators?")
        assert "role=actor&rank=0&stage=actor_update" in link
        assert visit.page.evaluate(OUT_OF_SIGHT) == []


CHARTS: Final = (
    "[...document.querySelectorAll('.panel-plot h3')].map(e => e.firstChild.textContent)"
)


def test_charts_are_added_and_removed_by_the_address(browser: Browser, shared: Service) -> None:
    with logged_in(browser, shared) as visit:
        visit.go(OF_RUN)
        visit.wait_until(f"{CHARTS}.join() === 'logprob_abs_diff/mean,reward,loss,grad_norm'")
        visit.page.click(".picker summary")
        visit.wait_until("document.querySelectorAll('#numbers button').length > 80")
        visit.page.fill("#number", "rollout_corr/kl")
        visit.page.keyboard.press("Enter")
        visit.wait_until(f"{CHARTS}.length === 5 && {CHARTS}.includes('rollout_corr/kl')")
        visit.page.click("[aria-label='remove the chart of loss']")
        visit.wait_until(f"{CHARTS}.length === 4 && !{CHARTS}.includes('loss')")
        visit.page.fill("#smooth", "8")
        visit.page.keyboard.press("Enter")
        visit.wait_until("document.querySelector('.keys')?.textContent.includes('over 8 steps')")
        address = visit.page.url
        # It was drawn before it stood in the page, and has half of its width.
        visit.wait_until("document.querySelector('.panel-plot .main-svg').clientWidth > 500")
        visit.page.fill("#number", "grad_nrm")
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_selector(".problem")
        assert "did you mean grad_norm" in text(visit, ".problem")
        visit.page.reload()  # somebody else sees the same
        visit.wait_until(f"{CHARTS}.includes('rollout_corr/kl')")
        assert visit.page.url == address
        visit.page.click("text=the usual charts again")
        visit.wait_until(f"{CHARTS}.includes('loss')")


def test_charts_share_the_step_under_the_pointer_and_the_zoom(
    browser: Browser, shared: Service
) -> None:
    plots = "[...document.querySelectorAll('.panel-plot .js-plotly-plot')]"
    with logged_in(browser, shared) as visit:
        visit.go(OF_RUN)
        visit.wait_until(f"{plots}.length === 5")
        left, top, width = visit.page.evaluate(
            f"() => {{ const {{ left, top, width }} = {plots}[0].getBoundingClientRect();"
            "return [left, top, width] }"
        )
        visit.page.mouse.move(left + width / 2, top + 90)
        visit.wait_until(f"{plots}.slice(0, 4).every(e => e.querySelector('.hovertext'))")
        visit.page.mouse.down()
        visit.page.mouse.move(left + width * 0.75, top + 92, steps=5)
        visit.page.mouse.up()
        ranges = f"{plots}.map(e => e.layout.xaxis.range.map(Math.round).join())"
        visit.wait_until(f"new Set({ranges}).size === 1 && !{ranges}[0].startsWith('0')")
        visit.page.click(".panel-plot [data-title='Reset axes'] >> nth=0")
        visit.wait_until(f"new Set({ranges}).size === 1 && {ranges}[0].startsWith('0')")


def test_a_run_begins_with_its_state(entered: Visit, shared: Service) -> None:
    entered.go(OF_RUN)
    cause = next(row for row in shared.get(f"/runs/{RUN}/diagnosis")["rows"] if not row["cause"])
    worst = shared.get(f"/runs/{RUN}/worst")
    entered.page.wait_for_selector(".verdict")
    band = text(entered, ".verdict")
    assert band.split("\n")[0] == f"✕ sick {cause['sentence']}"
    assert f"step {worst['step']['step']}, mean |d| {worst['step']['abs_diff']:.4g}" in band
    assert f"token {worst['token']['position']} of step {worst['token']['step']}" in band
    entered.page.click(".verdict a:has-text('token ')")
    entered.wait_until("document.querySelector('h1').textContent.startsWith('Sample ')")


@pytest.mark.parametrize("entered", ["narrow light"], indirect=True)
def test_headings_and_legends_fit_a_narrow_page(entered: Visit) -> None:
    entered.go(OF_RUN)
    inside = "e => e.getBoundingClientRect().right <= innerWidth"
    texts = "[...document.querySelectorAll('.panel-plot h3, .keys span')]"
    entered.wait_until(f"{texts}.length > 3 && {texts}.every({inside})")
    entered.go(f"{STEP}?part=time")
    bars = "[...document.querySelectorAll('.plot .scrollbar')]"
    entered.wait_until("document.querySelector('.plot .legendtext') !== null")
    entered.wait_until(f"{bars}.every(e => e.getBoundingClientRect().height === 0)")


def test_a_figure_is_redrawn_in_the_colours_of_the_page(browser: Browser, shared: Service) -> None:
    with logged_in(browser, shared) as visit:
        visit.go(OF_RUN)
        visit.page.wait_for_selector(".plot .xtick text")
        ink = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
        light = visit.page.evaluate(ink)
        visit.page.emulate_media(color_scheme="dark")
        visit.wait_until(f"{ink} !== '{light}'")
        assert visit.page.evaluate(ink) == visit.page.evaluate(
            "getComputedStyle(document.body).color"
        )
        # Its numbers are there for those who do not see it.
        visit.page.click("figure summary")
        visit.wait_until(f"document.querySelectorAll('figure tbody tr').length >= {STEPS}")


# --- what changes -----------------------------------------------------------------------------
def test_a_new_step_appears_without_reload(
    browser: Browser, live: Service, training: ShownRun
) -> None:
    # So high that the table is in sight: what is far below waits until somebody scrolls to it.
    with logged_in(browser, live, height=1600) as visit:
        visit.go(OF_RUN)
        visit.page.wait_for_selector(".plot .xtick text")
        visit.wait_until("document.querySelector('#session').textContent.includes('live')")
        newest = "document.querySelector('tbody th a[href*=\"/steps/\"]')"
        visit.page.wait_for_selector("tr[data-key='1/2']", state="attached")
        visit.page.evaluate(
            "() => { window.same = document.querySelector('tr[data-key=\"1/2\"]');"
            "window.plot = document.querySelector('.plot svg');"
            "same.querySelector('a').focus(); scrollTo(0, 120); window.stays = scrollY }"
        )
        del visit.requests[:]
        training.train(3, 3)
        visit.wait_until(f"{newest}?.textContent === '4'")
        visit.wait_until(
            "document.querySelector('tr[data-key=\"1/3\"]')?.textContent.includes('comparable')"
        )
        # Nothing else moved: the same row, focused, at the same place; the same drawing, grown.
        assert visit.page.evaluate("same.isConnected && same.contains(document.activeElement)")
        assert visit.page.evaluate("scrollY === stays")
        assert visit.page.evaluate("plot.isConnected")
        plots = "[...document.querySelectorAll('.panel-plot .js-plotly-plot')]"
        visit.wait_until(f"{plots}[0].data[0].x.includes(3)")
        asked = [url.removeprefix(live.server.url) for url in visit.requests]

        def drawn() -> list[list[list[object]]]:
            """What has grown, and what is drawn anew: line by line and mark by mark."""
            found: list[list[list[object]]] = visit.page.evaluate(
                "async path => { const drawn = (data) => data.map("
                "({ uid, x, y, hovertext }) => [uid, [...x], [...y], hovertext]).sort();"
                "const anew = await (await fetch(path)).json();"
                f"return [drawn({plots}.flatMap(each => each.data)), drawn(anew.figure.data)] }}",
                f"/figures/overview?run={RUN}",
            )
            return found

        visit.run_until(lambda: drawn()[0] == drawn()[1])  # a scalar comes after the step's numbers
        grown, _ = drawn()
        assert len({uid for uid, *_ in grown}) == len(grown) > 4
        assert not [path for path in asked if "/static/" in path or path == "/runs"]
        # When it was last heard of, and its attempt's last step, are others now.
        assert [path for path in asked if path.startswith(f"/runs/{RUN}/attempts")]
        figures = [path for path in asked if path.startswith("/figures/overview")]
        assert figures
        assert all("from=2" in path for path in figures)  # not what was drawn long ago
        assert "step 3 is measured" in (visit.page.text_content("#said") or "")
        assert visit.messages == []


def test_an_answer_that_comes_late_hides_nothing_newer(
    browser: Browser, live: Service, training: ShownRun
) -> None:
    newest = "document.querySelector('tbody th a[href*=\"/steps/\"]')?.textContent"
    late: list[tuple[Route, APIResponse]] = []

    def hold_the_first(route: Route) -> None:
        if late:
            route.fallback()
        else:
            late.append((route, route.fetch()))

    with logged_in(browser, live, height=1600) as visit:
        visit.go(f"{OF_RUN}/steps")
        visit.wait_until(f"{newest} === '3'")
        visit.wait_until("document.querySelector('#session').textContent.includes('live')")
        visit.page.route(re.compile(r"/steps\?"), hold_the_first)
        training.train(3, 3)
        visit.run_until(lambda: late)
        training.train(4, 4)
        visit.wait_until("document.querySelector('#said').textContent.includes('step 4 is')")
        visit.page.wait_for_timeout(500)  # what would be asked beside the first is answered
        route, answer = late[0]
        route.fulfill(response=answer)
        visit.page.wait_for_timeout(500)
        visit.wait_until(f"{newest} === '5'")


def test_an_open_step_fills_while_it_is_looked_at(
    browser: Browser, live: Service, training: ShownRun
) -> None:
    with logged_in(browser, live) as visit:
        visit.go(f"{OF_RUN}/steps/latest")
        visit.wait_until("document.querySelector('#session').textContent.includes('live')")
        training.train(3, 3)
        visit.wait_until("document.querySelector('.verdict')?.textContent.includes('comparable')")
        visit.wait_until("document.querySelector('main').textContent.includes('stay at step')")


def test_the_newest_step_is_followed_while_it_is_scrolled_down(
    browser: Browser, live: Service, training: ShownRun
) -> None:
    training.train(3, 3)
    with logged_in(browser, live) as visit:
        visit.go(f"{OF_RUN}/steps/latest?part=rounds")
        visit.wait_until("document.querySelector('main').textContent.includes('Step 3')")
        visit.settle()
        visit.page.evaluate("scrollTo(0, 1500)")
        visit.wait_until("scrollY > 300")
        training.train(4, 4)
        visit.wait_until("document.querySelector('main').textContent.includes('Step 4')")


def test_what_has_not_changed_is_not_sent_again(browser: Browser, shared: Service) -> None:
    with logged_in(browser, shared) as visit:
        answers: list[tuple[str, int]] = []

        def note(answer: Response) -> None:
            if "/static/" not in answer.url and "/stream" not in answer.url:
                answers.append((answer.url, answer.status))

        visit.page.on("response", note)
        visit.go(OF_RUN)
        visit.page.wait_for_selector(".plot .xtick text")
        visit.settle()
        before = {url for url, status in answers if status == 200}
        visit.go("#/")
        visit.page.wait_for_timeout(1100)  # an answer of a second ago is not even asked for
        del answers[:]
        visit.go(OF_RUN)
        visit.page.wait_for_selector(".plot .xtick text")
        # What was known is drawn before the service has answered.
        visit.run_until(lambda: sum(url in before for url, _ in answers) >= 4)
        assert {status for url, status in answers if url in before} == {304}


def test_what_takes_long_is_asked_once(browser: Browser, shared: Service) -> None:
    with logged_in(browser, shared) as visit:
        visit.go(OF_RUN)
        del visit.requests[:]
        visit.page.reload()
        visit.page.wait_for_selector(".plot .xtick text")
        visit.settle()
        asked = [url for url in visit.requests if re.search("/diagnosis|/worst|/figures/ov", url)]
        assert len(asked) == 3


IDLE: Final = (
    "[...document.querySelectorAll('main [aria-busy=true], main .plot')].every(e => {"
    "const { top, bottom } = e.getBoundingClientRect();"
    "return !e.offsetParent || bottom < -400 || top > innerHeight + 400"
    " || e.matches('.empty') || e.querySelector('svg') })"
    " && !document.querySelector('main').textContent.includes('the doctor looks')"
)
"""Everything that is in sight, or nearly, is drawn."""


def test_no_view_asks_again_while_nothing_changes(browser: Browser, shared: Service) -> None:
    # Its runs are live, and report nothing.
    with visiting(browser, shared) as visit:
        visit.page.clock.install()
        visit.page.reload()
        visit.page.wait_for_selector("#login")
        visit.log_in(operator(shared))
        visit.run_until(lambda: any("plotly-cartesian.min.js" in url for url in visit.requests))
        asked: dict[str, list[str]] = {}
        for name, address in VIEWS.items():
            visit.go(address)
            visit.wait_until(IDLE)
            times = visit.page.locator("main time").all_inner_texts()
            del visit.requests[:]
            visit.page.clock.run_for(63_000)  # milliseconds: a minute, and its drawing
            # The browser itself asks for the page's icon, whenever it likes.
            asked[name] = [url for url in visit.requests if not re.search("/stream|icon.svg$", url)]
            if name == "runs":  # it is still up to date
                assert visit.page.locator("main time").all_inner_texts() != times
        assert {name: urls for name, urls in asked.items() if urls} == {}


def test_what_is_out_of_sight_is_not_asked_for(browser: Browser, shared: Service) -> None:
    with logged_in(browser, shared, height=300) as visit:
        visit.settle()
        del visit.requests[:]
        visit.go(STEP)
        visit.wait_until("document.querySelector('.verdict')")
        visit.settle()
        costly = re.compile(r"/steps/\d+/(tokens|scalars|stages)\b|density|anatomy")
        assert not [url for url in visit.requests if costly.search(url)]
        visit.go(f"{STEP}?part=rounds")
        visit.settle()
        assert not [url for url in visit.requests if "anatomy" in url]
        visit.page.evaluate("scrollTo(0, document.body.scrollHeight)")
        visit.run_until(lambda: any("anatomy" in url for url in visit.requests))


def test_a_service_that_restarts_is_followed_again(
    browser: Browser, live: Service, training: ShownRun
) -> None:
    with logged_in(browser, live) as visit:
        visit.go(f"{OF_RUN}/steps")
        is_live = "document.querySelector('#session').textContent.includes('live')"
        visit.wait_until(is_live)
        port = live.server.port
        live.server.stop()
        visit.wait_until(f"!{is_live}")
        visit.page.evaluate(
            f"location.hash = '{OF_RUN}'"
        )  # not seen before: it has nothing to show
        visit.page.wait_for_selector(".problem")
        training.train(3, 3)
        live.server._requested_port = port
        live.server.start(wait_for_port=10)
        visit.wait_until(is_live, seconds=60)
        visit.wait_until("!document.querySelector('.problem')")
        visit.go(f"{OF_RUN}/steps")
        # What happened meanwhile is there.
        visit.wait_until("document.querySelector('tr[data-key=\"1/3\"]')")


# --- captures ---------------------------------------------------------------------------------
def test_a_capture_is_armed_acknowledged_and_arrives(
    browser: Browser, live: Service, training: ShownRun
) -> None:
    with logged_in(browser, live) as visit:
        visit.go(f"{OF_RUN}/captures/new")
        visit.page.wait_for_selector("form.form")
        assert "actor_update" in text(visit, "fieldset")
        assert "live" in text(visit, "main .block")
        visit.page.select_option("#level", "L0")
        assert "no dump of this run yet with task statistics, level L0" in text(visit, ".price")
        assert visit.page.is_checked("input[name=every]")
        visit.page.check("input[value=actor_update]")
        assert not visit.page.is_checked("input[name=every]")  # the one stage, and no other
        visit.page.fill("#ranks", "0-99999999999999")
        visit.page.fill("#user", "ada")
        visit.page.click("text=Request the capture")
        visit.page.wait_for_selector(".form .problem")
        assert "ranks" in text(visit, ".form .problem")
        del visit.messages[:]
        visit.page.fill("#ranks", "0,2-3")
        visit.page.fill("#keep", "old_log_prob")
        visit.page.click("text=Request the capture")
        visit.page.wait_for_selector("progress")
        (capture,) = live.get("/captures")["rows"]
        assert capture["by"] == "ada (operate token, 127.0.0.1)"
        assert capture["spec"]["ranks"] == [0, 2, 3]
        assert capture["spec"]["stages"] == ["actor_update"]
        assert visit.page.url.endswith(f"/captures/{capture['capture_id']}")
        assert "0 of 3 ranks" in text(visit)
        assert "did you mean old_log_probs?" in text(visit)  # what the service noted of it
        assert "waiting for actor" not in text(visit)  # stood there for ever: the table tells it
        capture_id = capture["capture_id"]
        training.acknowledge(capture_id, range(1))
        visit.wait_until("document.querySelector('main').innerText.includes('1 of 3 ranks')")
        training.acknowledge(capture_id, range(1, 4))
        visit.wait_until("document.querySelector('.lead').innerText.includes('agreed')")
        start = live.get(f"/captures/{capture_id}")["agreement"]["start"]
        for step in range(3, start + 1):
            training.do(step)
        for rank in (0, 2):
            training.dump(capture_id, start, rank)
        visit.wait_until("document.querySelector('main').innerText.includes('2 ranks')")
        training.dump(capture_id, start, 3, "failed")
        training.train(start + 1, start + 2)
        visit.wait_until("document.querySelector('.lead').innerText.includes('partial')")
        assert "no space left on device" in text(visit)
        assert visit.problems() == []
        assert visit.messages == []


def test_the_form_of_a_capture_says_before_what_it_will_cost(
    entered: Visit, shared: Service
) -> None:
    (cost,) = shared.get(f"/runs/{RUN}/capture-costs")["rows"]
    entered.go(f"{OF_RUN}/captures/new?stages=actor_update&level=mix&ranks=0,2-4")
    entered.page.wait_for_selector(".price strong")
    size = f"{4 * cost['bytes'] / 1024:.3g} KiB"
    assert f"About {size} a step on 4 ranks, and each step takes 410 ms" in text(entered, ".price")
    entered.page.select_option("#task", "")
    assert "It collects nothing" in text(entered, ".price")


def test_a_capture_that_only_keeps_what_is_recorded_asks_no_rank(
    browser: Browser, live: Service, training: ShownRun
) -> None:
    spec = {"run": RUN, "stages": ["actor_update"], "steps": "next", "keep": ["advantages"]}
    capture_id = live.operate.post("/captures", json=spec).json()["capture_id"]
    start = eventually(lambda: live.get(f"/captures/{capture_id}")["agreement"]["start"])
    training.train(3, start + 1)
    with logged_in(browser, live) as visit:
        visit.go(f"{OF_RUN}/captures/{capture_id}")
        visit.page.wait_for_selector(".lead")
        assert "The service keeps advantages without asking any rank." in text(visit)
        assert "complete" in text(visit, ".lead")
        assert "all that was recorded of it is kept" in text(visit, ".lead")
        assert visit.problems() == []


def test_the_read_token_arms_nothing(browser: Browser, shared: Service) -> None:
    with visiting(browser, shared) as visit:
        visit.page.wait_for_selector("#login")
        visit.log_in(shared.tokens.read)
        visit.go(f"{OF_RUN}/captures/new")
        assert "operate.token" in text(visit)
        assert not visit.page.query_selector("form.form")
        visit.go(f"{STEP}?part=files")
        assert "The step is not pinned" in text(visit)
        assert not visit.page.query_selector("text=Pin the step")


def test_a_capture_is_withdrawn_and_a_step_pinned(
    browser: Browser, live: Service, training: ShownRun
) -> None:
    capture_id = training.capture()
    with logged_in(browser, live) as visit:
        visit.go(f"{OF_RUN}/captures/{capture_id}")
        visit.page.click("text=Withdraw")
        visit.wait_until("document.querySelector('.lead').innerText.includes('withdrawn')")
        visit.go(f"{OF_RUN}/steps/2?part=files")
        visit.page.click("text=Pin the step")
        visit.page.wait_for_selector("text=The step is pinned")
        assert live.get("/steps/2/kept")["pinned"] is True
        assert visit.messages == []


# --- keyboard and tokens ------------------------------------------------------------------------
def test_the_keyboard_reaches_everything(browser: Browser, shared: Service) -> None:
    with visiting(browser, shared) as visit:
        visit.page.wait_for_selector("#login")
        visit.page.keyboard.type(operator(shared))
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_selector("#login", state="detached")
        visit.go(f"{STEP}?part=ranks")
        # A new view is told to a screen reader by its heading, which has the focus.
        assert visit.page.evaluate("document.activeElement.tagName") == "H1"
        visit.page.reload()
        visit.settle()
        visit.page.keyboard.press("Tab")
        assert visit.page.evaluate("document.activeElement.textContent") == "Skip to the content"
        visit.page.keyboard.press("Enter")
        assert visit.page.evaluate("document.activeElement.id") == "main"
        assert visit.page.url.endswith(f"{STEP}?part=ranks")  # the address stays
        seen: set[str | None] = set()

        def reached() -> bool:
            visit.page.keyboard.press("Tab")
            focused = visit.page.evaluate(
                "() => { const e = document.activeElement; const s = getComputedStyle(e);"
                "return [e.tagName, e.innerText?.slice(0, 30), s.outlineStyle !== 'none'] }"
            )
            assert focused[2] or focused[0] == "BODY", focused  # what has the focus shows it
            seen.add(focused[1])
            return {"← step 35", f"actor {HOT_RANK}"} <= seen

        # Blocks come when they are scrolled to: the focus may go around before they are there.
        eventually(reached)


def test_tokens_by_keyboard(browser: Browser, shared: Service) -> None:
    with logged_in(browser, shared) as visit:
        visit.go(f"{STEP}/samples/g36-3-0%2F0")
        visit.page.focus(".tokens")
        at = "document.querySelector('.tokens').getAttribute('aria-activedescendant')"
        found = shared.get(f"/steps/{STEPS}/samples/g36-3-0%2F0", run=RUN)
        size = [
            math.inf if isinstance(each, str) else abs(each or 0.0) if is_model else -1.0
            for each, is_model in zip(found["d"], found["mask"], strict=True)
        ]
        assert visit.page.evaluate(at) == f"token-{size.index(max(size))}"  # its worst
        visit.page.keyboard.press("Home")
        assert visit.page.evaluate(at) == "token-0"
        visit.page.keyboard.press("ArrowRight")
        assert visit.page.evaluate(at) == "token-1"
        assert text(visit, ".panel h2") == "Token at 1"
        visit.page.keyboard.press("End")
        last = visit.page.evaluate(at)
        assert last == "token-191"  # four rounds of 48 tokens
        assert visit.page.get_attribute(f"#{last}", "aria-selected") == "true"
        assert "position" in (visit.page.get_attribute(f"#{last}", "aria-label") or "")
        visit.page.keyboard.press("Home")
        visit.page.keyboard.press("ArrowDown")
        visit.page.keyboard.press("n")
        marked = visit.page.evaluate(at)
        assert re.search(r"\bs[4-8]\b", visit.page.get_attribute(f"#{marked}", "class") or "")
        # The address names the token: who opens it sees the same.
        position = text(visit, ".panel h2").removeprefix("Token at ")
        assert f"at={position}" in visit.page.url
        visit.page.reload()
        visit.settle()
        assert text(visit, ".panel h2") == f"Token at {position}"
        assert visit.page.evaluate(at) == marked
        assert visit.messages == []


def test_what_the_loss_did_with_a_token(browser: Browser, shared: Service) -> None:
    found = {uid: shared.get(f"/steps/{STEPS}/samples/g36-3-0%2F{uid}", run=RUN) for uid in (0, 1)}
    with logged_in(browser, shared) as visit:
        for uid, fate, expected in (
            (0, "clipped high", ["clipped high", "on the high side", "raw", "applied", "round"]),
            (0, "environment", ["the environment's tokens", "no model token"]),
            (1, "zero advantage", ["zero advantage"]),
        ):
            at = found[uid]["fate"].index(fate)
            visit.go(f"{STEP}/samples/g36-3-0%2F{uid}?at={found[uid]['positions'][at]}")
            panel = text(visit, ".panel")
            assert panel.startswith(f"Token at {found[uid]['positions'][at]}")
            for words in expected:
                assert words in panel, (fate, panel)
        # By pointer, too.
        token = visit.page.locator(".t[data-at]:not(.chosen)").nth(40)
        token.hover()
        pointed = token.get_attribute("data-at")
        visit.wait_until(f"document.querySelector('.panel h2').textContent.includes('{pointed}')")


def test_the_ratio_that_is_clipped_is_shown_with_the_passes_that_clip_it(entered: Visit) -> None:
    for at, clipped, fate in (
        (1, "in 2 of 2 passes, on the high side", "clipped high in every one of 2 passes"),
        (3, "in 1 of 2 passes, on the high side", "trained"),
        (5, "in none of 2 passes", "trained"),
    ):
        entered.go(f"#/runs/passes/steps/1/samples/g1-0-0%2F0?at={at}")
        facts = dict(
            each.inner_text().split("\n", 1)
            for each in entered.page.query_selector_all(".panel .facts > div")
        )
        assert facts["the update's own ratio"] == "1.284, then 1.649"  # e^0.25 and e^0.5
        assert facts["that ratio is clipped"] == clipped
        assert facts["the loss"] == fate
    assert text(entered, ".prompt").split("\n") == ["Prompt, 3 tokens", "7 8 9"]
    entered.go("#/runs/passes/steps/1?part=gradient")
    section = "section:has(h2:text-is('Which tokens have a gradient'))"
    assert "On average a pass clips 18.8 %" in text(entered, section)
    assert "clipped high in every one of 2 passes" in text(entered, f"{section} table >> nth=0")
    assert cells(entered, f"{section} table >> nth=1")[1:] == [
        ["at least 1 of 2 passes", "2", "25.00"], ["1 of 2 passes", "1", "12.50"],
        ["2 of 2 passes", "1", "12.50"],
    ]  # fmt: skip
    entered.go(f"{STEP}/samples/g36-3-0%2F0?at=0")
    assert re.search(r"the update's own ratio\W*not recorded", text(entered, ".panel"))


def test_dumps_without_a_finding_are_one_line(entered: Visit) -> None:
    entered.go(f"{OF_RUN}/steps/{BROKEN}/operators")
    section = "section:has(h2:has-text('First result'))"
    assert "2 dumps: no non-finite value (in actor_update of actor 0-1)." in text(entered, section)
    assert [row[0] for row in cells(entered, f"{section} table")[1:]] == [f"actor {NAN_RANK}"]


def test_a_column_has_one_format_and_its_unit_in_the_header(entered: Visit) -> None:
    columns = entered.page.evaluate(
        "import('/static/format.js').then(({ columnFormat }) => ["
        "[0.01234, 0.000123456, 0, 12345.6], [0.5, 0.0000123, -2, null, 'nan']"
        "].map(column => column.map(columnFormat(column))))"
    )
    assert columns == [
        ["0.01234", "0.0001235", "0", "12\u202f346"],
        ["5.000e\u22121", "1.230e\u22125", "\u22122.000e0", None, "NaN"],
    ]
    entered.go(f"{STEP}?part=ranks")
    table = "section:has(h2:text-is('Ranks'))"
    heads = cells(entered, f"{table} table")[0]
    assert {"mean |d|, nat", "largest |d|, nat", "k3 KL, nat", "correlation"} <= {*heads}
    assert "nat" not in text(entered, f"{table} tbody")


def test_a_label_says_what_its_word_means(entered: Visit) -> None:
    page = entered.page
    entered.go(STEP)
    page.focus("dt abbr:text-is('k3')")  # as with the tabulator
    shown = page.wait_for_selector("#meaning:not([hidden])")
    assert shown is not None
    assert "mean of e^d" in shown.inner_text()
    box, window = shown.bounding_box(), page.viewport_size
    assert box is not None
    assert window is not None
    assert 0 <= box["x"] <= window["width"] - box["width"]
    assert entered.problems() == []
    page.keyboard.press("Escape")
    assert not shown.is_visible()
    page.hover("dt abbr:text-is('attempt')")
    assert "One start of a run" in shown.inner_text()
    page.hover("h1")
    assert not shown.is_visible()


def test_the_earlier_address_of_lost_data_opens_it(entered: Visit) -> None:
    entered.page.evaluate(f"location.hash = '{OF_RUN}/losses'")
    entered.wait_until(f"location.hash === '{OF_RUN}/lost'")
    entered.settle()
    assert text(entered, "h1") == f"Lost data of {RUN}"
    assert text(entered, "#tabs [aria-current]") == "Lost data"


def test_shares_and_parts_are_written_for_readers(entered: Visit) -> None:
    shares, parts = entered.page.evaluate(
        "import('/static/format.js').then(({ share, partOf }) => ["
        "[0, 1, 0.12345, 5.294e-7, 0.0001, 1e-12].map(share),"
        "[['0.0.0.0', '0.0.0.0'], ['0.0.0.0', '0.1.3.0']].map(all => {"
        "const rows = all.map(part => ({ part })); return rows.map(partOf(rows)) })])"
    )
    assert shares == ["0 %", "100 %", "12.3 %", "0.000053 %", "0.01 %", "below 0.000001 %"]
    assert parts == [["", ""], ["epoch 0, mini-batch 0", "epoch 1, mini-batch 3"]]


def test_only_the_tokens_in_sight_are_elements(browser: Browser, shared: Service) -> None:
    with logged_in(browser, shared) as visit:
        visit.go("#/runs/long/steps/1/samples/g1-0-0%2F0")
        visit.page.wait_for_selector(".token-line")
        assert len(visit.page.query_selector_all(".t[data-at]")) < 3_000
        visit.page.evaluate("document.querySelector('.tokens').scrollTop = 1e9")
        visit.wait_until(f"document.querySelector('#token-{TOKENS - 1}')")
        assert len(visit.page.query_selector_all(".t[data-at]")) < 3_000


# --- documentation ----------------------------------------------------------------------------
