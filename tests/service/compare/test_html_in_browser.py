"""The report of a comparison in a browser: wide, narrow and dark."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.browser import Scheme, opened
from tests.support.memory_dumps import MemoryDump, Sample, batch, record, single, split

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.report import as_json
from stagescope_service.compare.report.html import as_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser

EVIL = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
LONG = "model.layers.0.a_module_of_quite_a_long_name." * 4
SHARES = [list(range(at, at + 5)) for at in range(0, 40, 5)]
Sides = tuple[MemoryDump, ...]


def dump(samples: list[Sample], name: str = "memory") -> MemoryDump:
    return split(samples, SHARES, microbatches=2, name=name)


def moved(samples: list[Sample]) -> list[Sample]:
    """The samples as another engine scores the same tokens."""
    noise = np.random.default_rng(7)
    name = "rollout_log_probs"
    return [
        each.with_values(**{
            name: each.values[name] + noise.normal(0, 0.02, len(each.response)).astype(np.float32)
        })
        for each in samples
    ]  # fmt: skip


def broken() -> MemoryDump:
    other = dump(moved(batch(40)))
    return dataclasses.replace(other, broken=frozenset(r.entry.path for r in other.records[::3]))


def long_names(by: float) -> MemoryDump:
    named = {f"{LONG}{at}": np.full((4, 4), 1 + at * by) for at in range(30)}
    return MemoryDump([record("gradients", named, rank=r) for r in range(4)], name="/data/" + LONG)


def hostile() -> Sides:
    samples = [dataclasses.replace(each, sample=f"{each.sample}{EVIL}") for each in batch(40)]
    return dump(samples, EVIL), dump(moved(samples), f"{EVIL}b")


def not_finite(x: float, y: float) -> MemoryDump:
    return single("other", {"x": x * np.array([math.nan, math.inf, 1.0]), "y": np.full(3, y)})


REPORTS: dict[str, Callable[[], Sides]] = {
    "same": lambda: (dump(batch(40)), dump(batch(40))),
    "values": lambda: (dump(batch(40)), dump(moved(batch(40)))),
    "tokens": lambda: (dump(batch(40)), dump(batch(40, seed=1))),
    "damaged": lambda: (dump(batch(40)), broken()),
    "long_names": lambda: (long_names(0.0), long_names(0.1)),
    "not_finite": lambda: (not_finite(1.0, 1.0), not_finite(-1.0, math.nan)),
    "hostile": hostile,
    "three": lambda: (dump(batch(40)), dump(batch(40)), dump(moved(batch(40)))),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reports")
    for name, sides in REPORTS.items():
        (directory / f"{name}.html").write_text(as_html(as_json(compare(sides()))), "utf-8")
    return directory


def apart(boxes: list[dict[str, float]], others: list[dict[str, float]]) -> bool:
    """Whether no box lies over one of the others by more than a pixel."""
    return not any(
        min(a["right"], b["right"]) - max(a["left"], b["left"]) > 1
        and min(a["bottom"], b["bottom"]) - max(a["top"], b["top"]) > 1
        for a, b in itertools.product(boxes, others)
    )


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
@pytest.mark.parametrize("name", REPORTS)
def test_a_report_can_be_read(
    browser: Browser, reports: Path, name: str, width: int, scheme: Scheme
) -> None:
    file = reports / f"{name}.html"
    with opened(browser, file, width=width, scheme=scheme) as page:
        look = page.look
        assert page.requests == [file.as_uri()]
        assert page.messages == []
    assert look["hacked"] is None
    assert look["scrolled"] <= look["width"]
    assert look["outside"] == 0
    assert look["clipped"] == []
    assert [each for each in look["contrasts"] if each[1] < 4.5] == []
    for figure in look["figures"]:
        assert figure["caption"]
        assert len(figure["axes"]) == 2
        assert all(figure["axes"])
        assert figure["marks"] > 0
        texts, frame = figure["texts"], figure["figure"]
        for one, other in itertools.combinations(texts, 2):
            assert apart(texts[one], texts[other]), (figure["caption"], one, other)
        for box in itertools.chain(*texts.values()):
            assert frame["left"] - 1 <= box["left"], figure["caption"]
            assert box["right"] <= frame["right"] + 1, figure["caption"]


def test_names_are_shown_as_they_are(browser: Browser, reports: Path) -> None:
    with opened(browser, reports / "hostile.html") as page:
        assert f"{EVIL}b" in page.look["text"]
        assert page.page.locator("img").count() == 0


def test_injected_scripts_do_not_run(browser: Browser, reports: Path, tmp_path: Path) -> None:
    file = tmp_path / "slipped.html"
    report = (reports / "values.html").read_text("utf-8")
    file.write_text(report.replace("<h1>", f"{EVIL}<h1>"), "utf-8")
    with opened(browser, file) as page:
        assert page.look["hacked"] is None
        assert len(page.look["figures"]) == 3
        assert any("Content Security Policy" in message for message in page.messages)


def test_folded_lists_open(browser: Browser, reports: Path) -> None:
    with opened(browser, reports / "values.html", width=390) as page:
        folded = page.page.locator("details", has_text="8 ranks and parts").first
        assert not folded.locator("li").first.is_visible()
        folded.locator("summary").click()
        assert folded.locator("li").count() == 8
        assert folded.locator("li").first.is_visible()
        assert page.look["scrolled"] <= page.look["width"]


def test_figures_follow_the_scheme(browser: Browser, reports: Path) -> None:
    with opened(browser, reports / "values.html") as page:
        page.page.emulate_media(color_scheme="dark")
        page.wait_until(
            "getComputedStyle(document.querySelector('.xtitle')).fill"
            " === getComputedStyle(document.body).color"
        )
        assert [each for each in page.look["contrasts"] if each[1] < 4.5] == []


def test_a_report_is_no_larger_than_it_must_be(reports: Path) -> None:
    sizes = {path.stem: path.stat().st_size for path in reports.iterdir()}
    assert sizes.pop("same") < 50_000  # without figures the library that draws them stays out
    assert max(sizes.values()) < 6_000_000
