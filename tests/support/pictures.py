"""The pictures of docs/pictures/: page, terminal and notebook, of one investigated run.

    python -m tests.support.pictures [DIRECTORY]

draws them anew, by Chromium. The run is that of `investigated_run`, whose faults are planted.
"""

from __future__ import annotations

import base64
import html
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.api import Service, service
from tests.support.browser import chromium
from tests.support.command_line import invoke
from tests.support.investigated_run import STEPS, investigated
from tests.support.page import Visit, visiting
from tests.support.shown_run import HOT_RANK, RUN

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT: Final = Path(__file__).parents[2]
DIRECTORY: Final = ROOT / "docs/pictures"
QUALITY: Final = 80
STEP: Final = f"#/runs/{RUN}/steps/{STEPS}"
VIEWS: Final = {
    "page-run": (f"#/runs/{RUN}", 900),
    "page-step": (STEP, 1100),
    "page-sample": (f"{STEP}/samples/g{STEPS}-{HOT_RANK}-0%2F1?at=247", 760),
    "page-doctor": (f"#/runs/{RUN}/doctor", 700),
}
"""Name -> the view's address, and the height in pixels."""
COMMANDS: Final = {"terminal": ("doctor", 32), "terminal-rounds": (f"rounds {STEPS}", 14)}
"""Name -> the command, and how many of its lines are shown."""
NOTEBOOKS: Final = {"notebook": ("jump_at_the_restart", 1560)}
"""Name -> the notebook, and the height in pixels."""
_TERMINAL: Final = (
    '<body style="margin:0;background:#16181d"><pre style="color:#d8dce2;margin:0;padding:18px;'
    'font:14px/1.4 DejaVu Sans Mono,monospace">'
)


def saved(page: Page, path: Path, *, width: int, height: int) -> None:
    """Write the top of a page as WebP."""
    page.set_viewport_size({"width": width, "height": height})
    page.wait_for_timeout(500)  # Plotly draws again for the size
    session = page.context.new_cdp_session(page)
    answer = session.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
    path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def environment(live: Service) -> Iterator[None]:
    """Let clients find the service, and what they draw be whole in itself."""
    assert live.tokens is not None
    names = {
        "STAGESCOPE_URL": live.server.url, "STAGESCOPE_TOKEN": live.tokens.operate,
        "PLOTLY_RENDERER": "notebook",
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def pictured_views(visit: Visit, directory: Path) -> None:
    """Draw the page's views."""
    for name, (address, height) in VIEWS.items():
        visit.page.set_viewport_size({"width": 1280, "height": height})
        visit.go(address)
        visit.wait_until("[...document.querySelectorAll('main .plot')].filter("
                         "e => e.getBoundingClientRect().top < innerHeight)"
                         ".every(e => e.querySelector('svg'))")  # fmt: skip
        saved(visit.page, directory / f"{name}.webp", width=1280, height=height)


def pictured_commands(page: Page, directory: Path) -> None:
    """Draw what commands print."""
    for name, (command, lines) in COMMANDS.items():
        answer = invoke(*command.split(), env={"COLUMNS": "96"})
        assert answer.exit_code == 0, answer.stderr
        shown = [f"$ stagescope {command}", *answer.stdout.splitlines()]
        text = re.sub(r"/\S*/tests/support/", "", html.escape("\n".join(shown[:lines])))
        page.set_content(f"{_TERMINAL}{text}")
        height = int(page.evaluate("document.querySelector('pre').getBoundingClientRect().height"))
        saved(page, directory / f"{name}.webp", width=860, height=height)


def pictured_notebooks(page: Page, directory: Path) -> None:
    """Run notebooks, and draw them as nbconvert shows them."""
    # Neither has types; who does not draw notebooks needs neither.
    nbformat, nbclient, nbconvert = map(
        importlib.import_module, ("nbformat", "nbclient", "nbconvert")
    )
    for name, (notebook, height) in NOTEBOOKS.items():
        read = nbformat.read(ROOT / f"client/notebooks/{notebook}.ipynb", as_version=4)
        nbclient.NotebookClient(read, timeout=120).execute()
        # Its own scripts are from the network, and draw formulas: there are none.
        body = re.sub(r'<script src="https?://[^"]*"></script>', "",
                      nbconvert.HTMLExporter().from_notebook_node(read)[0])  # fmt: skip
        with tempfile.NamedTemporaryFile("w", suffix=".html") as file:
            file.write(body)
            file.flush()
            page.set_viewport_size({"width": 1000, "height": height})
            page.goto(Path(file.name).as_uri(), wait_until="domcontentloaded")
            page.wait_for_selector(".js-plotly-plot .xtick", state="attached")
            saved(page, directory / f"{name}.webp", width=1000, height=height)


def main(directory: Path) -> None:
    """Draw every picture."""
    directory.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as home,
        service(Path(home), recorded=False) as live,
        chromium() as browser,
        environment(live),
    ):
        investigated(live)
        assert live.tokens is not None
        with visiting(browser, live) as visit:
            visit.page.wait_for_selector("#login")
            visit.log_in(live.tokens.operate)
            visit.settle()
            pictured_views(visit, directory)
        with browser.new_context() as context:
            context.route("http*://**", lambda route: route.abort())
            page = context.new_page()
            pictured_commands(page, directory)
            pictured_notebooks(page, directory)
    for path in sorted(directory.glob("*.webp")):
        sys.stdout.write(f"{path.name}: {path.stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY)
