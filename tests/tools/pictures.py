"""The pictures of docs/pictures/: page, terminal and notebook, of one investigated run.

    python -m tests.tools.pictures [DIRECTORY [NAME ...]]

draws them anew, or those that are named, by Chromium. The run is that of `runs.investigated`, whose
faults are planted; those of `pictured_scenes` lie in a service of their own.
"""

from __future__ import annotations

import base64
import html
import importlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.api import Service, service
from tests.support.browser import chromium
from tests.support.command_line import invoke
from tests.support.page import Visit, visiting
from tests.support.runs.investigated import STEPS, investigated
from tests.support.runs.shown import BROKEN, HOT_RANK, NAN_RANK, RUN
from tests.tools.pictured_scenes import (
    EXPERTS,
    HANGING,
    NEWEST_VERSION,
    SYNCED,
    captured,
    consistency_text,
    hanging,
    of_experts,
    set_rules,
    synced,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT: Final = Path(__file__).parents[2]
DIRECTORY: Final = ROOT / "docs/pictures"
QUALITY: Final = 80
OF_RUN: Final = f"#/runs/{RUN}"
STEP: Final = f"{OF_RUN}/steps/{STEPS}"
WIDTH: Final = 1280
VIEWS: Final = {
    "page-run": (OF_RUN, 900),
    "page-step": (f"{STEP}?part=rounds", 780),
    "page-sample": (f"{STEP}/samples/g{STEPS}-{HOT_RANK}-0%2F1?at=247", 760),
    "page-doctor": (f"{OF_RUN}/doctor", 700),
    "page-operators": (f"{OF_RUN}/steps/{BROKEN}/operators?role=actor&rank={NAN_RANK}", 900),
    "page-triggers": (f"{OF_RUN}/triggers", 820),
}
"""Name -> the view's address, and the height in pixels."""
SCENES: Final = {
    "page-hangs": (f"#/runs/{HANGING}/hangs", 700),
    "page-weights": (f"#/runs/{SYNCED}/weights/{NEWEST_VERSION}", 420),
    "page-routing": (f"#/runs/{EXPERTS}/steps/1?part=routing", 900),
}
"""The same of the runs in a service of their own."""
EVIDENCE: Final = ("page-doctor-evidence", "One rank's mismatch differs")
"""Name, and the symptom whose picture is drawn."""
COMMANDS: Final = {"terminal": ("doctor", 32), "terminal-rounds": (f"rounds {STEPS}", 14)}
"""Name -> the command, and how many of its lines are shown."""
FILES: Final = {
    "report": (("report", RUN, "--step", str(BROKEN), "-o"), 1100),
    "comparison": (("compare", f"{RUN}@1:22", f"{RUN}@2:22", "--html"), 1000),
}
"""Name -> the command that writes an HTML file, and the height in pixels."""
NOTEBOOKS: Final = {"notebook": ("jump_at_the_restart", 1560)}
"""Name -> the notebook, and the height in pixels."""
COLUMNS: Final = 96
SOURCES: Final = f"{ROOT}/"
"""What paths on a picture lack: it shows no machine's directories."""
_OPEN_STACKS: Final = (
    "for (const e of document.querySelectorAll('details[data-key]')) e.open = true"
)
_SHORTEN_PATHS: Final = """sources => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        texts.currentNode.data = texts.currentNode.data.replaceAll(sources, "");
    }
}"""
_TERMINAL: Final = (
    '<body style="margin:0;background:#16181d"><pre style="color:#d8dce2;margin:0;padding:18px;'
    'font:14px/1.4 DejaVu Sans Mono,monospace;white-space:pre-wrap">'
)


class Pictures:
    """Writes pictures as WebP.

    Args:
        directory: that they go to.
        names: of those that are wanted; empty: all.
    """

    def __init__(self, directory: Path, names: Collection[str]) -> None:
        self.directory = directory
        self._names = names

    def wants(self, name: str) -> bool:
        """Whether a picture is asked for."""
        return not self._names or name in self._names

    def save(self, page: Page, name: str, *, width: int, height: int) -> None:
        """Write the top of a page."""
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(500)  # Plotly draws again for the size
        page.evaluate(_SHORTEN_PATHS, SOURCES)
        session = page.context.new_cdp_session(page)
        answer = session.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
        (self.directory / f"{name}.webp").write_bytes(base64.b64decode(answer["data"]))


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


def pictured_views(visit: Visit, pictures: Pictures, views: Mapping[str, tuple[str, int]]) -> None:
    """Draw views of the page."""
    for name, (address, height) in views.items():
        if pictures.wants(name):
            visit.page.set_viewport_size({"width": WIDTH, "height": height})
            visit.go(address)
            visit.page.evaluate(_OPEN_STACKS)
            visit.wait_until(
                "[...document.querySelectorAll('main .plot')].filter("
                "e => e.getBoundingClientRect().top < innerHeight)"
                ".every(e => e.querySelector('svg'))"
            )
            pictures.save(visit.page, name, width=WIDTH, height=height)


def pictured_evidence(visit: Visit, pictures: Pictures) -> None:
    """Draw a symptom of the doctor, and the figure of its evidence."""
    name, title = EVIDENCE
    if not pictures.wants(name):
        return
    visit.page.set_viewport_size({"width": WIDTH, "height": 900})
    visit.go(f"{OF_RUN}/doctor")
    article = visit.page.locator("article.symptom", has_text=title)
    article.get_by_text("Show the picture").click()
    visit.page.wait_for_selector("main .plot svg")
    visit.page.wait_for_timeout(500)
    height = visit.page.evaluate(
        """article => {
            const figure = document.querySelector("main .plot").closest("section, figure");
            const view = document.querySelector("main > div");
            view.replaceChildren(article, figure);
            window.scrollTo(0, 0);
            return view.getBoundingClientRect().bottom;
        }""",
        article.element_handle(),
    )
    pictures.save(visit.page, name, width=WIDTH, height=math.ceil(height) + 20)


def pictured_commands(page: Page, pictures: Pictures) -> None:
    """Draw what commands print."""
    for name, (command, lines) in COMMANDS.items():
        if pictures.wants(name):
            answer = invoke(*command.split(), env={"COLUMNS": str(COLUMNS)})
            assert answer.exit_code == 0, answer.stderr
            terminal(page, pictures, name, command, answer.stdout.splitlines()[: lines - 1])


def terminal(page: Page, pictures: Pictures, name: str, command: str, lines: Iterable[str]) -> None:
    """Draw a command with what it printed."""
    shown = html.escape("\n".join([f"$ stagescope {command}", *lines]))
    page.set_viewport_size({"width": 860, "height": 600})
    page.set_content(f"{_TERMINAL}{shown}")
    height = int(page.evaluate("document.querySelector('pre').getBoundingClientRect().height"))
    pictures.save(page, name, width=860, height=height)


def pictured_files(page: Page, pictures: Pictures, folder: Path) -> None:
    """Draw the HTML files that commands write."""
    for name, (words, height) in FILES.items():
        if pictures.wants(name):
            path = folder / f"{name}.html"
            answer = invoke(*words, str(path))
            assert path.exists(), answer.output
            page.set_viewport_size({"width": WIDTH, "height": height})
            page.goto(path.as_uri(), wait_until="domcontentloaded")
            page.wait_for_selector(".js-plotly-plot .xtick", state="attached")
            pictures.save(page, name, width=WIDTH, height=height)


def pictured_notebooks(page: Page, pictures: Pictures) -> None:
    """Run notebooks, and draw them as nbconvert shows them."""
    wanted = {name: each for name, each in NOTEBOOKS.items() if pictures.wants(name)}
    if not wanted:
        return
    # Neither has types; who does not draw notebooks needs neither.
    nbformat, nbclient, nbconvert = map(
        importlib.import_module, ("nbformat", "nbclient", "nbconvert")
    )
    for name, (notebook, height) in wanted.items():
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
            pictures.save(page, name, width=1000, height=height)


@contextmanager
def entered(browser: Browser, live: Service) -> Iterator[Visit]:
    """Open the page of a service, and log in."""
    assert live.tokens is not None
    with visiting(browser, live, width=WIDTH) as visit:
        visit.page.wait_for_selector("#login")
        visit.log_in(live.tokens.operate)
        visit.settle()
        yield visit


def pictured_investigation(browser: Browser, pictures: Pictures, home: Path) -> None:
    """Draw what is seen of the investigated run."""
    with service(home, recorded=False) as live, environment(live):
        set_rules(live)
        training = investigated(live)
        with entered(browser, live) as visit:
            pictured_views(visit, pictures, VIEWS)
            pictured_evidence(visit, pictures)
        with browser.new_context() as context:
            context.route("http*://**", lambda route: route.abort())
            page = context.new_page()
            pictured_commands(page, pictures)
            pictured_files(page, pictures, home)
            pictured_notebooks(page, pictures)
        if pictures.wants("page-capture"):
            capture_id = captured(training, STEPS + 1)
            with entered(browser, live) as visit:
                view = {"page-capture": (f"{OF_RUN}/captures/{capture_id}", 760)}
                pictured_views(visit, pictures, view)


def pictured_scenes(browser: Browser, pictures: Pictures, home: Path) -> None:
    """Draw what needs another run."""
    with service(home, recorded=False) as live, environment(live):
        hanging(live)
        synced(live)
        of_experts(live)
        with entered(browser, live) as visit:
            pictured_views(visit, pictures, SCENES)
        if pictures.wants("terminal-consistency"):
            command = "consistency --model ./tiny-llama --engine ctranslate2:./int8"
            lines = consistency_text(home, COLUMNS).splitlines()[:30]
            with browser.new_context() as context:
                terminal(context.new_page(), pictures, "terminal-consistency", command, lines)


def main(directory: Path, names: Collection[str]) -> None:
    """Draw pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    pictures = Pictures(directory, names)
    with tempfile.TemporaryDirectory() as home, chromium() as browser:
        pictured_investigation(browser, pictures, Path(home) / "investigated")
        pictured_scenes(browser, pictures, Path(home) / "scenes")
    for path in sorted(directory.glob("*.webp")):
        sys.stdout.write(f"{path.name}: {path.stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY, sys.argv[2:])
