"""How long the page takes in a real browser: a large step, a long run, a long sample.

    python -m tests.benchmarks.bench_page [RANKS [STEPS [TOKENS]]]

Times are from the click to the verdict, and to everything in sight, of views that neither the
browser nor the service has seen before (but for the last overview); Plotly is loaded, as it is
once somebody has looked at a run. The frames of scrolling are those of the browser's own clock;
the work of a frame is the time that its main thread was busy, which says something on a shared
machine too.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.bench_series import fill as fill_long_run
from tests.support.api import Rank, Service, service
from tests.support.browser import chromium
from tests.support.page import Visit, visiting
from tests.support.runs.shown import LOG_PROB, keep_tensors, payload

from stagescope_service.statistics.summarise import warm

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROUNDS = 16
LARGE_STEPS = 4
FRAME = 1000 / 60


def fill_large(live: Service, ranks: int) -> None:
    """Four closed steps of many ranks with 16 rounds each."""
    actors = [Rank(live, run="large", rank=rank, world_size=ranks) for rank in range(ranks)]
    for step in range(1, LARGE_STEPS + 1):
        for rank, actor in enumerate(actors):
            actor.stage(LOG_PROB, step, payload(step, rank, rows=1, rounds=ROUNDS, tokens=16))
    for actor in actors:
        actor.begin(LOG_PROB, LARGE_STEPS + 1)


def opened(visit: Visit, address: str, first: str) -> tuple[float, float]:
    """Milliseconds until an element of a view is there, and until all in sight is."""
    visit.go("#/")
    visit.page.evaluate(
        "address => { window.begun = performance.now(); location.hash = address }", address
    )
    visit.wait_until(f"document.querySelector({first!r})")
    there = float(visit.page.evaluate("performance.now() - begun"))
    visit.settle()
    visit.wait_until(
        "[...document.querySelectorAll('main .plot')].filter("
        "e => e.getBoundingClientRect().top < innerHeight).every(e => e.querySelector('svg'))"
    )
    return there, float(visit.page.evaluate("performance.now() - begun"))


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


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def show(name: str, times: list[tuple[float, float]]) -> None:
    """Print the first and the middle of some openings."""
    for at, part in ((0, "the verdict"), (1, "all in sight")):
        found = [each[at] for each in times]
        rest = f", again {statistics.median(found[1:]):.0f} ms" if found[1:] else ""
        say(f"{name}, {part}: first {found[0]:.0f} ms{rest}")


def main(ranks: int, steps: int, tokens: int) -> None:
    """Print times of views and of frames."""
    warm()
    with (
        tempfile.TemporaryDirectory() as home,
        service(Path(home), recorded=False, auth=False) as live,
        chromium() as browser,
    ):
        keep_tensors(live)
        fill_long_run(live, steps)  # first: it takes the first attempt for its own
        fill_large(live, ranks)
        rank = Rank(live, run="long", world_size=1)
        rank.stage(LOG_PROB, 1, payload(1, 0, rows=1, rounds=8, tokens=tokens // 8))
        rank.begin(LOG_PROB, 2)
        measure(browser, live, ranks, steps, tokens)


def measure(browser: Browser, live: Service, ranks: int, steps: int, tokens: int) -> None:
    """Open each view in a window."""
    with visiting(browser, live) as visit:
        visit.settle()
        visit.go("#/runs/large")
        visit.wait_until("document.querySelector('.plot .xtick')")  # Plotly is there
        long = [opened(visit, "#/runs/r", ".plot .xtick") for _ in range(3)]
        show(f"overview of {steps} steps", long)
        large = [
            opened(visit, f"#/runs/large/steps/{step}", ".verdict")
            for step in range(LARGE_STEPS, 0, -1)
        ]
        show(f"step of {ranks} ranks x {ROUNDS} rounds", large)
        # The service still reads the tensors of all their ranks, for what the loss did.
        show("overview, while tensors are read", [opened(visit, "#/runs/r", ".plot .xtick")])
        visit.go("#/runs/long/steps/1/samples/g1-0-0%2F0")
        visit.page.wait_for_selector(".token-line")
        # The wheel of a mouse brings about 100 pixels a frame, a dragged scroll bar thousands.
        for pixels in (100, 1000, 5000):
            frames, work = scrolled(visit, ".tokens", pixels, 4.0)
            late = sum(frame > 1.5 * FRAME for frame in frames) / len(frames)
            say(
                f"{tokens} tokens at {pixels} pixels a frame: {1000 / statistics.mean(frames):.0f} "
                f"frames/s, median {statistics.median(frames):.1f} ms, 99 % below "
                f"{sorted(frames)[int(0.99 * len(frames))]:.1f} ms, {late:.1%} late; "
                f"{work:.1f} ms of work a frame"
            )


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    main(*(given + [1024, 10_000, 32_768][len(given) :]))
