"""The site of docs/: `make docs` fails for what is wrong, and the service serves it at /guide/."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from stagescope_service.http import guide
from stagescope_service.settings import Settings
from tests.support.api import Service, service
from tests.support.browser import chromium
from tests.support.nginx import front, nginx
from tests.support.stores import eventually

pytest.importorskip("mkdocs", reason="the extra `docs`")

pytest.importorskip("griffe", reason="the extra `docs`")
from tests.tools import reference

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = sorted((ROOT / "docs").glob("*.md"))
WRITTEN: Final = [page for page in PAGES if not page.name.startswith("reference-")]
"""The pages but for those that `tests.tools.reference` makes, which are complete tables."""
MOST_WORDS: Final = 900
FIRST_SCREEN: Final = 25  # lines


def build(source: Path, into: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-d", str(into)], cwd=source,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def shared(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guide, "FOLDER", site)
        with service(tmp_path_factory.mktemp("home")) as running:
            yield running


def test_it_has_every_page_and_a_search(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    for page in PAGES:
        assert (site / f"{page.stem}.html").is_file(), page.name
        assert f"{page.stem}.html" in found, page.name


def test_agents_find_every_page_in_llms_txt(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    assert text.startswith("# stagescope\n\n> ")
    for page in PAGES:
        assert f"]({page.stem}.html)" in text, page.name


def test_a_bar_in_the_code_of_a_table_is_a_bar(site: Path) -> None:
    assert "<code>Path | None</code>" in (site / "reference-settings.html").read_text()


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = (
        r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href|srcset)=\"?(?:https?:)?//[^ >]*"
    )
    for file in site.glob("*.html"):
        assert re.findall(loaded, file.read_text()) == [], file.name
    for file in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)[\"']?(?:https?:)?//", file.read_text()) == [], (
            file.name
        )
    assert "```mermaid" not in "".join(page.read_text() for page in PAGES), (
        "draw an SVG: its script is remote"
    )


def by_name(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", WRITTEN, ids=by_name)
class TestPage:
    def test_is_short(self, page: Path) -> None:
        words = len(page.read_text().split())
        assert words <= MOST_WORDS, "split it"

    def test_shows_something_on_its_first_screen(self, page: Path) -> None:
        screen = page.read_text().splitlines()[:FIRST_SCREEN]
        has = any(line.startswith(("```", "![", "| ", "<img", "<p")) for line in screen)
        assert has, "a picture, a transcript or a table"

    def test_ends_with_what_to_read_next(self, page: Path) -> None:
        last = page.read_text().rstrip().splitlines()[-1]
        links = len(re.findall(r"\]\(", last))
        assert last.startswith("Next: [")
        assert 1 <= links <= 3


@pytest.mark.parametrize("name", reference.PAGES)
def test_reference_is_what_the_code_declares(name: str) -> None:
    made = reference.PAGES[name]()
    assert (ROOT / "docs" / name).read_text() == made, "run: python -m tests.tools.reference"


def test_reference_has_every_environment_variable() -> None:
    named = {f"STAGESCOPE_{name.upper()}" for name in Settings.model_fields}
    named |= reference.VARIABLES.keys()
    read = set()
    for folder in ("client", "service/stagescope_service", "workers/stagescope_workers"):
        for file in (ROOT / folder).rglob("*.py"):
            read |= set(re.findall(r"STAGESCOPE_[A-Z0-9_]*[A-Z0-9]", file.read_text()))
    assert read - named == set()
    assert reference.VARIABLES.keys() - read == set()


def test_groups_of_pages_are_the_four_kinds() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    groups = [name for each in nav for name, pages in each.items() if pages != "index.md"]
    assert groups == ["Tutorial", "How-to", "Reference", "Explanation"]


def test_the_build_fails_for_what_leads_nowhere(tmp_path: Path) -> None:
    for name in ("docs", "tests/tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for name in (
        "client",
        "service",
        "workers",
        "deploy",
        *(each.name for each in ROOT.glob("*.md")),
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    targets = ("no-such-page.md", "metrics.md#no-such-heading", "../no-such-file.md")
    with (tmp_path / "docs/api.md").open("a") as file:
        file.writelines(f"\n[gone]({each})\n" for each in targets)
    (tmp_path / "docs/lost.md").write_text("# A page in no group\n")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode != 0
    for each in ("no-such-page.md", "no-such-heading", "no-such-file.md", "  - lost.md"):
        assert each in done.stderr
    assert "Aborted with 4 warnings" in done.stdout + done.stderr


class TestServed:
    def test_it_is_open_and_every_file_of_a_page_is_there(self, shared: Service) -> None:
        nobody = shared.client(None)
        page = nobody.get("/guide/")
        assert page.status_code == 200
        for path in re.findall(r'(?:src|href)="([^"#:]+\.\w+)"', page.text):
            assert nobody.get(f"/guide/{path}").status_code == 200, path
        assert nobody.get("/guide").headers["location"] == "guide/"  # a proxy may add a path
        assert nobody.get("/guide/search/search_index.json").status_code == 200

    def test_the_browser_runs_its_scripts_and_asks_nobody_else(self, shared: Service) -> None:
        headers = shared.client(None).get("/guide/api.html").headers
        parts = [part.split() for part in headers["content-security-policy"].split(";")]
        policy = {name: sources for name, *sources in parts}
        assert policy["default-src"] == ["'self'"]
        assert policy["script-src"][0] == "'self'"
        assert all(each.startswith("'sha256-") for each in policy["script-src"][1:])
        assert "http" not in headers["content-security-policy"]

    @pytest.mark.parametrize("path", ["none.html", "..%2f..%2fauth.py", "%2e%2e/auth.py"])
    def test_other_files_are_not_there(self, shared: Service, path: str) -> None:
        answer = shared.client(None).get(f"/guide/{path}")
        assert answer.status_code in (401, 404)

    def test_what_was_not_built_says_how_to(
        self, shared: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(guide, "FOLDER", tmp_path / "none")
        answer = shared.client(None).get("/guide/")
        assert answer.status_code == 404
        assert "Run `make docs`" in answer.text


QUESTIONS: Final = {
    "what is a run?": "glossary",
    "what is an attempt": "glossary",
    "what is a stage": "glossary",
    "what is a part": "glossary",
    "what is a round": "glossary",
    "what is a stream": "glossary",
    "what does superseded mean?": "glossary",
    "what does partial mean": "glossary",
    "what does comparable* mean": "glossary",
    "what does suspect mean": "glossary",
    "what does not measured mean": "glossary",
    "what does unfinished mean": "glossary",
    "what is a finding": "glossary",
    "where do I see lost data": "glossary",
    "what is the ring": "service-words",
    "what is a bundle": "service-words",
    "what is a canary": "service-words",
    "what is data_rank": "service-words",
    "what is k3": "field-words",
    "what is mean |d|": "field-words",
    "what is the mismatch": "field-words",
    "what is staleness": "field-words",
    "what is the noise floor": "field-words",
    "how do I delete a run": "manage-runs",
    "how do I rename a run": "manage-runs",
    "how do I compare two runs": "keep-and-compare",
    "how do I change the port": "operations troubleshooting",
    "how do I stop the service": "operations",
    "what if the service dies": "operations",
    "torchrun without Ray": "connect",
    "keep the tensors of a step": "keep-and-compare",
    "how do I upgrade": "backup",
    "how do I deploy it on Kubernetes": "deploy",
    "how do I protect it with a token": "trust",
    "who changed what": "trust",
    "why are there no numbers for this step?": "troubleshooting",
    "two attempts became one": "troubleshooting",
    "where are the files on disk": "data-flow run-lifecycle",
    "how much disk does it need": "sizing",
    "how long is data kept": "run-lifecycle",
    "what does it cost my training": "cost",
    "how do I capture an operator": "capture",
    "which rank is stuck": "hangs",
    "how do I get a Slack message": "webhooks",
    "how do I install it": "versions",
    "how do I use it without Ray": "connect",
    "how do I use it from my laptop": "remote-notebook",
    "how do I see the text of a sample": "samples",
    "how do I see the numbers in wandb": "trackers",
    "does it work offline": "page",
    "does it work with Megatron": "trainers",
    "does it work with FSDP": "trainers",
    "which token is worst": "mismatch-places samples",
    "my run does not show up": "troubleshooting",
    "how do I see which rank is slow": "hangs",
    "how do I get an alert": "webhooks",
}
"""What a newcomer types -> the pages that answer it."""


def test_the_search_finds_the_answers_to_questions(shared: Service) -> None:
    """Of each, one of its pages is among the first three results."""
    lost = {}
    with chromium() as browser, browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{shared.server.url}/guide/")
        search = page.locator(".md-search__input").first
        results = page.locator(".md-search-result__item")
        for question, pages in QUESTIONS.items():
            search.fill("")
            search.press("End")  # it listens to keys
            results.first.wait_for(state="detached")
            search.fill(question)
            search.press("End")
            results.first.wait_for(timeout=60_000)  # the index is read and searched by a worker
            links = [each.locator("a").first.get_attribute("href") for each in results.all()[:3]]
            found = {Path(str(link).partition("?")[0].partition("#")[0]).stem for link in links}
            if not found & set(pages.split()):
                lost[question] = links
    assert lost == {}


@pytest.fixture(params=["alone", "below a path of nginx"])
def address(request: pytest.FixtureRequest, shared: Service, tmp_path: Path) -> Iterator[str]:
    """Where people open the service."""
    if request.param == "alone":
        yield shared.server.url
        return
    at = front(tmp_path)
    with nginx(shared.server.url, at):
        yield at.url


def test_a_browser_searches_it_and_asks_nobody_else(address: str) -> None:
    with chromium() as browser, browser.new_context(ignore_https_errors=True) as context:
        page = context.new_page()
        asked: list[str] = []
        said: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.goto(f"{address}/guide/api.html")
        search = page.locator(".md-search__input").first
        search.fill("mismatch")
        found = page.locator(".md-search-result__link").first

        def is_found() -> bool:
            search.press("End")  # it listens to keys, once its worker has read the index
            return found.is_visible()

        eventually(is_found, seconds=60)
        found.click()
        page.wait_for_url(re.compile(r"/guide/(?!api)\w[\w-]*\.html"))
        assert said == []
        assert [url for url in asked if not url.startswith(f"{address}/")] == []
