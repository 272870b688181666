"""The service below a path of a real nginx, which removes the path or keeps it."""

from __future__ import annotations

import contextlib
import gzip
import logging
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import httpx
import pytest
from tests.support.api import Service, service
from tests.support.command_line import ask
from tests.support.nginx import PATH, Front, Style, front, nginx
from tests.support.page import Visit, visiting
from tests.support.runs.shown import RUN, ShownRun, keep_tensors
from tests.support.stores import eventually
from tests.support.triggering import hook, rule

import stagescope
from stagescope_service.http.auth import COOKIE
from stagescope_workers.probe.options import checked_options
from stagescope_workers.probe.probe import Probe

if TYPE_CHECKING:
    from playwright.sync_api import Browser

OF_RUN: Final = f"#/runs/{RUN}"
STEP: Final = f"{OF_RUN}/steps/2"
LOG_PROB: Final = "actor_compute_log_prob"
REMOVES: Final = pytest.mark.parametrize("served", ["removes"], indirect=True)
"""For what takes long and asks nothing that differs if the proxy keeps the path."""


class Served:
    """A service behind nginx, with a training that has done two steps."""

    def __init__(self, live: Service, at: Front) -> None:
        self.live, self.at, self.url = live, at, at.url
        keep_tensors(live)
        self.training = ShownRun(live, ranks=2, steps=8, rows=2, tokens=16)
        self.step = 0
        self.train(2)

    def train(self, steps: int) -> int:
        """Do more steps, and begin the one after; return the last of them."""
        self.step += steps
        self.training.train(self.step - steps + 1, self.step)
        return self.step

    def client(self, token: str | None = None, **headers: str) -> httpx.Client:
        """A program that asks nginx."""
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        trusted = ssl.create_default_context(cafile=self.at.certificate)
        return httpx.Client(base_url=self.url, headers=headers, verify=trusted, trust_env=False)


@pytest.fixture(scope="module", params=["removes", "keeps"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    style: Style = request.param
    at = front(tmp_path_factory.mktemp("nginx"))
    home = tmp_path_factory.mktemp("home")
    with (
        service(home, recorded=False, public_url=f"{at.url}/") as live,
        nginx(live.server.url, at, style),
    ):
        yield Served(live, at)


@contextlib.contextmanager
def logged_in(browser: Browser, served: Served) -> Iterator[Visit]:
    with visiting(browser, served.live, url=served.url) as visit:
        visit.page.wait_for_selector("#login")
        visit.log_in(served.live.tokens.operate)
        yield visit


def test_the_page_asks_and_leads_nowhere_else(browser: Browser, served: Served) -> None:
    with logged_in(browser, served) as visit:
        for address in (
            "#/", OF_RUN, f"{OF_RUN}/steps", STEP, f"{STEP}?part=time", f"{STEP}?part=files",
            f"{STEP}/ranks/actor/1", f"{STEP}/samples", f"{OF_RUN}/doctor", f"{OF_RUN}/captures",
            f"{OF_RUN}/findings", f"{OF_RUN}/triggers", f"{OF_RUN}/comparisons?a={RUN}&b={RUN}",
        ):  # fmt: skip
            visit.go(address)
            links = visit.page.eval_on_selector_all("a[href]", "all => all.map(a => a.href)")
            assert links
            assert [link for link in links if not link.startswith(f"{served.url}/")] == [], address
        assert visit.foreign == visit.messages == []


def test_a_deep_link_opens_its_view_after_the_login(browser: Browser, served: Served) -> None:
    with visiting(browser, served.live, url=served.url) as visit:
        visit.page.goto(f"{served.url}/{STEP}")
        visit.page.wait_for_selector("#login")
        visit.log_in(served.live.tokens.read)
        visit.wait_until(f"document.querySelector('h1')?.textContent === 'Step 2 of {RUN}'")


def test_the_cookie_is_sent_below_the_path_alone(browser: Browser, served: Served) -> None:
    with logged_in(browser, served) as visit:
        (cookie,) = visit.page.context.cookies()
        kept = cookie["name"], cookie["path"], cookie["secure"], cookie["httpOnly"]
        assert kept == (COOKIE, PATH, True, True)
        asked = visit.page.context.request
        assert asked.get(f"{served.url}/v1/runs").status == 200
        assert visit.page.context.cookies(served.url.removesuffix(PATH)) == []
        visit.page.click("text=Log out")
        visit.page.wait_for_selector("#login")
        assert asked.get(f"{served.url}/v1/runs").status == 401


def test_without_the_slash_the_page_opens(browser: Browser, served: Served) -> None:
    with visiting(browser, served.live, url=served.url) as visit:
        visit.page.goto(served.url)
        visit.page.wait_for_selector("#login")
        assert visit.page.url.partition("#")[0] == f"{served.url}/"


def test_events_arrive_as_they_happen(served: Served) -> None:
    with (
        served.client(served.live.tokens.read) as client,
        client.stream("GET", "/stream", timeout=30.0) as answer,
    ):
        events = (line for line in answer.iter_lines() if line.startswith("event: "))
        assert next(events) == "event: hello"
        served.train(1)
        assert next(events) != "event: hello"  # at once: nothing is buffered


@REMOVES
def test_files_are_downloaded(served: Served) -> None:
    with served.client(served.live.tokens.read) as client:
        report = client.get(f"/runs/{RUN}/report?format=html&step=2", timeout=60.0)
        assert "step 2</h1>" in report.text
        bundle = client.get(f"/runs/{RUN}/bundle?step=2", timeout=60.0)
        assert bundle.headers["content-type"] == "application/gzip"
        assert gzip.decompress(bundle.content)


@REMOVES
def test_the_documentation_of_the_api_opens(browser: Browser, served: Served) -> None:
    with logged_in(browser, served) as visit:
        visit.page.click("text=API")
        visit.page.wait_for_selector(".swagger-ui .info")
        assert visit.foreign == []


@pytest.mark.parametrize("version", ["", "/v1"])
def test_the_api_answers_compressed_and_leads_back(served: Served, version: str) -> None:
    with served.client(served.live.tokens.read) as client:
        answer = client.get(f"{version}/steps/2/metrics?run={RUN}")
        assert answer.headers["content-encoding"] == "gzip"
        again = client.get(answer.url, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        slashes = client.get(f"{version}/steps/2/metrics/?run={RUN}")
        assert slashes.next_request is not None
        assert slashes.next_request.url == answer.url
    with served.client() as nobody:
        guide = nobody.get(f"{version}/guide")
        assert guide.next_request is not None
        assert str(guide.next_request.url) == f"{served.url}{version}/guide/"


def test_a_webhook_links_to_what_people_open(served: Served) -> None:
    with hook() as told, served.client(served.live.tokens.operate) as client:
        always = rule(when={">": -1.0}, actions={"webhook": told.url})
        assert client.put("/triggers", json={"rules": [always], "runs": {}}).status_code == 200
        step = served.train(1)
        eventually(lambda: told.told)
        assert client.put("/triggers", json={"rules": [], "runs": {}}).status_code == 200
    assert told.told[0]["link"] == f"{served.url}/{OF_RUN}/steps/{step}?attempt=1"


@pytest.fixture
def environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A terminal that knows the public address, the token and who signed the certificate."""
    monkeypatch.setenv("SSL_CERT_FILE", str(served.at.certificate))
    monkeypatch.setenv("STAGESCOPE_URL", served.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", served.live.tokens.operate)
    return served


def test_commands_and_python_reach_it(environment: Served) -> None:
    for url in ((), ("--url", f"{environment.url}/")):
        done = ask("runs", *url)
        assert (done.exit_code, RUN in done.stdout) == (0, True), done.stderr
    doctor = ask("doctor", RUN)
    assert RUN in doctor.stdout, doctor.stderr
    with stagescope.attach(environment.url) as session:
        assert session.step(2, run=RUN).metrics()["counts/tokens"] > 0


def test_a_training_reports_through_it(
    environment: Served, caplog: pytest.LogCaptureFixture
) -> None:
    run = f"through-{environment.at.port}"  # a process names the page of each run once
    options = {"run": run, "url": environment.url, "token": environment.live.tokens.operate}
    with caplog.at_level(logging.INFO):
        probe = Probe(checked_options(options))
        probe.start()
        with probe.stage(LOG_PROB, step=1):
            pass
        assert probe.close(30.0)
    (said,) = [text for text in caplog.messages if "connected to" in text]
    assert said.endswith(f"; its page: {environment.url}/#/runs/{run}")
    assert any(row["run"] == run for row in environment.live.get("/runs")["rows"])
