"""A real browser that opens files: what it asked for, what it complained of, what it shows."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Scheme: TypeAlias = Literal["light", "dark"]
"""The colours that the reader prefers."""
CHROMIUM: Final = Path("/usr/bin/chromium")
_REQUIRED: Final = "TEST_BROWSER"
"""Set to `required` where a missing browser is a failure and not a reason to skip."""

# What a reader sees, in the page's own measures. Contrast is WCAG 2's of a text and the colours
# below it.
_LOOK: Final = """
() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const below = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const [r, g, b, a] = numbers(getComputedStyle(e).backgroundColor);
      if (a === undefined || a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const contrast = (element, property) => {
    const ink = light(numbers(getComputedStyle(element)[property]));
    const paper = light(below(element));
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  };
  const box = (element) => {
    const { left, right, top, bottom } = element.getBoundingClientRect();
    return { left, right, top, bottom };
  };
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const ownText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  const root = document.documentElement;
  const texts = all("body *").filter(
    (e) => !e.closest("script, svg") && ownText(e) && e.getClientRects().length
  );
  return {
    width: root.clientWidth, scrolled: root.scrollWidth,
    contrasts: [
      ...texts.map((e) => [e.textContent.slice(0, 60), contrast(e, "color")]),
      ...all("svg text").filter((e) => e.textContent.trim()).map(
        (e) => [e.textContent.slice(0, 60), contrast(e, "fill")]),
    ],
    clipped: all("td, th, code, li, p, figcaption, summary")
      .filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1)
      .map((e) => e.textContent.slice(0, 60)),
    outside: all("table").filter((e) => {
      const holder = e.parentElement;
      return e.scrollWidth > holder.clientWidth && getComputedStyle(holder).overflowX !== "auto";
    }).length,
    figures: all("figure").map((figure) => ({
      caption: figure.querySelector("figcaption").textContent,
      axes: all(".xtitle, .ytitle", figure).map((e) => e.textContent),
      marks: all(".bars path, .scatterlayer path, .heatmaplayer image", figure).length,
      figure: box(figure),
      texts: {
        caption: [box(figure.querySelector("figcaption"))],
        legend: all(".legend .legendtext, .cbtitle text, .cbaxis text", figure).map(box),
        titles: all(".xtitle, .ytitle", figure).map(box),
        x: all(".xtick text", figure).map(box),
        y: all(".ytick text", figure).map(box),
      },
    })),
    hacked: window.hacked ?? null,
    text: document.body.innerText,
  };
}
"""


_AXE: Final = "axe_playwright_python"
_SERIOUS: Final = ("serious", "critical")


def axe_problems(page: Page) -> list[str]:
    """What axe-core finds wrong with a page that keeps somebody from using it."""
    found = importlib.util.find_spec(_AXE)
    if found is None or found.origin is None:
        pytest.skip("axe-core is not installed: pip install axe-playwright-python")
    # Evaluated by the browser's debugger, which no policy of the page forbids.
    page.evaluate(Path(found.origin).with_name("axe.min.js").read_text(encoding="utf-8"))
    result = page.evaluate("() => axe.run(document)")
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:200]} {node['failureSummary']}"
        for each in result["violations"]
        if each["impact"] in _SERIOUS
        for node in each["nodes"]
    ]


@dataclasses.dataclass
class Opened:
    """A page that was opened: `look` is what a reader sees (see `_LOOK`)."""

    page: Page
    requests: list[str] = dataclasses.field(default_factory=list)
    messages: list[str] = dataclasses.field(default_factory=list)

    @property
    def look(self) -> dict[str, Any]:
        found: dict[str, object] = self.page.evaluate(_LOOK)
        return found

    def problems(self) -> list[str]:
        """What axe-core finds wrong with the page."""
        return axe_problems(self.page)

    def wait_until(self, condition: str) -> None:
        """Wait, frame by frame, until an expression is true."""
        # Playwright's wait_for_function evaluates inside the page, whose policy allows no eval.
        self.page.evaluate(
            f"() => new Promise(done => {{ const look = () => ({condition}) ? done() : "
            "requestAnimationFrame(look); look(); })"
        )


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a running Chromium; skip, or fail where it is required, saying what to install."""
    has_playwright = importlib.util.find_spec("playwright") is not None
    missing = [
        what for what, there in (
            ("`pip install playwright`", has_playwright),
            (f"`apt-get install chromium` ({CHROMIUM})", CHROMIUM.exists()),
        ) if not there
    ]  # fmt: skip
    if missing:
        (pytest.fail if os.environ.get(_REQUIRED) == "required" else pytest.skip)(
            f"no browser is installed: {', '.join(missing)}"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Where tests run as root, Chromium has no sandbox.
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Browser, path: Path, *, width: int = 1280, scheme: Scheme = "light"
) -> Iterator[Opened]:
    """Open a file in a window of `width` pixels with a `light` or `dark` scheme."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    try:
        found = Opened(context.new_page())
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("console", lambda message: found.messages.append(message.text))
        found.page.on("pageerror", lambda error: found.messages.append(str(error)))
        found.page.goto(path.as_uri())
        # Plotly draws, and draws again once it knows how wide texts are.
        found.wait_until(
            "[...document.querySelectorAll('figure > div')].every("
            "e => e.querySelector('.xtitle') && e.querySelector('.ytitle'))"
        )
        yield found
    finally:
        context.close()
