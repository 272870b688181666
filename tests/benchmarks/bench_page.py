"""How long the page takes in a real browser until it can be used, for large runs and many of them.

    python -m tests.benchmarks.bench_page [HOME]

A home that is given keeps its data, so that the next measurement need not make them. Every view is
opened in a new window of a service that just started and prepared itself (cold), and reloaded
there (warm). The
time ends when all that the view shows in sight is drawn and the browser's main thread is idle. The
reference is an address without a view: the page alone, without data. Of several openings the best
counts, because the machine may be busy; CPU times depend less on that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import psutil
from tests.support.api import Rank, service
from tests.support.browser import chromium
from tests.support.page import Visit
from tests.support.runs.crowd import crowd
from tests.support.runs.long import RUN, train_long
from tests.support.runs.shown import LOG_PROB, keep_tensors, payload

from stagescope_service.http.app import make_app, prepare
from stagescope_service.http.server import ApiServer
from stagescope_service.settings import Settings
from stagescope_service.statistics.summarise import warm
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.views.reading.dependencies import Commands
from stagescope_wire.errors import Unreachable

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, CDPSession

RUNS: Final = 500
STEPS: Final = 10_000
RANKS: Final = 1_024
TOKENS: Final = 32_768
TIMES: Final = 3
"""Openings of a view, cold and warm."""
ROUNDS: Final = 16
LARGE_STEPS: Final = 4
FRAME: Final = 1000 / 60
_ROWS: Final = "document.querySelectorAll('.run-list tbody tr[data-key]').length"
_OF_LARGE: Final = f"#/runs/large/steps/{LARGE_STEPS}"
REFERENCE: Final = "no view"
VIEWS: Final = {
    REFERENCE: ("#/none", "document.querySelector('h1')"),
    f"{RUNS} runs, the first": ("#/", f"{_ROWS} >= 20"),
    f"{RUNS} runs, all": (
        "#/",
        "[...document.querySelectorAll('[role=status]')]"
        f".some(each => each.textContent.includes('of {RUNS + 3} runs'))",
    ),
    f"run of {STEPS} steps": (
        f"#/runs/{RUN}",
        "document.querySelector('.verdict') && document.querySelector('.panel-plot .xtick')",
    ),
    f"step of {RANKS} ranks": (_OF_LARGE, "document.querySelector('.tiles')"),
    "its rounds": (f"{_OF_LARGE}?part=rounds", "document.querySelector('tr.marked')"),
    "its ranks": (f"{_OF_LARGE}?part=ranks", "document.querySelector('tbody tr')"),
    "its time": (f"{_OF_LARGE}?part=time", "document.querySelector('.plot .xtick')"),
    f"sample of {TOKENS} tokens": (
        "#/runs/long/steps/1/samples/g1-0-0%2F0",
        "document.querySelector('.verdict') && document.querySelector('.token-line')"
        " && document.querySelector('.panel h2')",
    ),
}  # fmt: skip
"""Name -> the address of a view, and what must hold before it can be used."""
_DRAWN: Final = """
[...document.querySelectorAll('main [aria-busy=true], main .plot')]
  .filter(e => e.getBoundingClientRect().top < innerHeight)
  .every(e => e.classList.contains('empty') || e.querySelector('svg'))
"""


# --- data -------------------------------------------------------------------------------------
def fill(home: Path) -> None:
    """Make what the views show."""
    train_long(home, STEPS, ranks=8)
    with service(home, recorded=False, resumes=True) as live:
        keep_tensors(live)
        crowd(live, RUNS)
        actors = [
            Rank(live, run="large", rank=rank, world_size=RANKS, greets=False)
            for rank in range(RANKS)
        ]
        live.engine.take_together([actor.hello for actor in actors])
        for step in range(1, LARGE_STEPS + 1):
            live.engine.take_together([
                actor.draft_stage(
                    LOG_PROB, step, payload(step, rank, rows=1, rounds=ROUNDS, tokens=16)
                )
                for rank, actor in enumerate(actors)
            ])  # fmt: skip
        live.engine.take_together(
            [actor.draft("begin", stage=LOG_PROB, step=LARGE_STEPS + 1) for actor in actors]
        )
        rank = Rank(live, run="long", world_size=1)
        rank.stage(LOG_PROB, 1, payload(1, 0, rows=1, rounds=8, tokens=TOKENS // 8))
        rank.begin(LOG_PROB, 2)


class NoCoordinator:
    """All that a view may ask of a coordinator: files on other nodes, of which there are none."""

    def read_artifact(self, **_: object) -> bytes:
        raise Unreachable("there is no other node")


def serve(home: Path, pipe: Connection) -> None:
    """Serve a home's catalogue, without a coordinator; its URL goes into the pipe."""
    settings = Settings(home=home, port=0, auth=False)
    app = make_app(
        catalogue=Catalogue(settings.catalogue_url),
        commands=cast(Commands, NoCoordinator()),
        settings=settings,
        tokens=None,
    )
    server = ApiServer(app, port=0, header_seconds=settings.header_seconds)
    server.start()
    prepare(app)
    pipe.send(server.url)
    threading.Event().wait()


class Serving(NamedTuple):
    """An API in a process of its own."""

    url: str
    process: psutil.Process

    def used(self) -> float:
        """Return milliseconds of CPU time so far."""
        times = self.process.cpu_times()
        return 1000.0 * (times.user + times.system)


@contextlib.contextmanager
def serving(home: Path) -> Iterator[Serving]:
    """Start an API on a home, and kill it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(home, there))
    process.start()
    try:
        url = here.recv()
        yield Serving(url, psutil.Process(process.pid))
    finally:
        process.kill()
        process.join()


# --- measuring --------------------------------------------------------------------------------
class Cost(NamedTuple):
    """What an opening takes, in milliseconds."""

    wall: float
    """Until the view can be used."""
    server: float
    """CPU of the service."""
    browser: float
    """CPU of all processes of the browser."""
    requests: int
    size: float
    """KiB that came, as they were sent."""


def opened(context: BrowserContext, session: CDPSession, live: Serving, name: str) -> Cost:
    """Open a view in a window, or reload it there."""
    address, holds = VIEWS[name]
    page = context.pages[0]
    server, browser = live.used(), browser_used(session)
    page.goto("about:blank")
    page.goto(f"{live.url}/{address}", wait_until="commit")
    visit = Visit(page, live.url)
    visit.wait_until(f"({holds}) && ({_DRAWN})", seconds=60.0)
    wall = page.evaluate(
        "() => new Promise(done => requestIdleCallback(() => done(performance.now())))"
    )
    server, browser = live.used() - server, browser_used(session) - browser
    sizes = page.evaluate("performance.getEntriesByType('resource').map(each => each.transferSize)")
    return Cost(wall, server, browser, len(sizes), sum(sizes) / 1024)


def browser_used(session: CDPSession) -> float:
    """Return milliseconds of CPU time of the browser's processes."""
    found = session.send("SystemInfo.getProcessInfo")["processInfo"]
    return 1000.0 * sum(float(each["cpuTime"]) for each in found)


def best(costs: list[Cost]) -> Cost:
    """Return the least of each figure."""
    return Cost(*(min(each) for each in zip(*costs, strict=True)))


def measure_views(home: Path, browser: Browser) -> None:
    """Print the costs of each view."""
    session = browser.new_browser_cdp_session()
    say(f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores; best of {TIMES}, ms")
    say(f"{'':28}{'usable':>8}{'ratio':>7}{'server':>8}{'browser':>9}{'requests':>10}{'KiB':>8}")
    reference: tuple[Cost, Cost] | None = None
    for name in VIEWS:
        both: tuple[list[Cost], list[Cost]] = ([], [])
        for _ in range(TIMES):
            with (
                serving(home) as live,
                contextlib.closing(
                    browser.new_context(viewport={"width": 1280, "height": 900})
                ) as context,
            ):
                context.new_page()
                for costs in both:
                    costs.append(opened(context, session, live, name))
        found = best(both[0]), best(both[1])
        reference = reference or found
        for state, cost, least in zip(("cold", "warm"), found, reference, strict=True):
            say(
                f"{f'{name}, {state}':28}{cost.wall:8.0f}{cost.wall / least.wall:7.1f}"
                f"{cost.server:8.0f}{cost.browser:9.0f}{cost.requests:10d}{cost.size:8.0f}"
            )
    say(f"load {os.getloadavg()[0]:.1f}")


def scrolled(visit: Visit, selector: str, pixels: int, seconds: float) -> tuple[list[float], float]:
    """Scroll by so many pixels a frame; return the milliseconds between frames, and of work."""
    session = visit.page.context.new_cdp_session(visit.page)
    session.send("Performance.enable")

    def busy() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    before = busy()
    frames: list[float] = visit.page.evaluate(
        """([selector, pixels, seconds]) => new Promise((done) => {
          const element = document.querySelector(selector), frames = [];
          let last = performance.now();
          const until = last + 1000 * seconds;
          const step = (now) => {
            frames.push(now - last);
            last = now;
            element.scrollTop += pixels;
            if (now < until) requestAnimationFrame(step);
            else done(frames.slice(1));
          };
          requestAnimationFrame(step);
        })""",
        [selector, pixels, seconds],
    )
    return frames, 1000 * (busy() - before) / len(frames)


def measure_scrolling(home: Path, browser: Browser) -> None:
    """Print the frames of scrolling through the long sample."""
    with serving(home) as live, contextlib.closing(browser.new_context()) as context:
        visit = Visit(context.new_page(), live.url)
        visit.page.goto(f"{live.url}/#/runs/long/steps/1/samples/g1-0-0%2F0")
        visit.page.wait_for_selector(".token-line")
        # The wheel of a mouse brings about 100 pixels a frame, a dragged scroll bar thousands.
        for pixels in (100, 1000, 5000):
            frames, work = scrolled(visit, ".tokens", pixels, 4.0)
            late = sum(frame > 1.5 * FRAME for frame in frames) / len(frames)
            say(
                f"{TOKENS} tokens at {pixels} pixels a frame: {1000 / statistics.mean(frames):.0f} "
                f"frames/s, median {statistics.median(frames):.1f} ms, 99 % below "
                f"{sorted(frames)[int(0.99 * len(frames))]:.1f} ms, {late:.1%} late; "
                f"{work:.1f} ms of work a frame"
            )


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(place: str | None) -> None:
    """Print times of views and of frames."""
    warm()
    with contextlib.ExitStack() as stack:
        home = Path(place or stack.enter_context(tempfile.TemporaryDirectory()))
        if not (home / "data").exists():
            fill(home)
        browser = stack.enter_context(chromium())
        measure_views(home, browser)
        measure_scrolling(home, browser)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
