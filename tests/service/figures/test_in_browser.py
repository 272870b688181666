"""Figures in a real browser: wide and light, narrow and dark."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.api import Service
from tests.support.browser import Scheme, opened
from tests.support.runs.drawn import UNMEASURED, page_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FIGURES: dict[str, tuple[str, dict[str, object]]] = {
    "overview": ("overview", {"run": "r"}),
    "rounds": ("rounds", {"run": "r", "step": 8}),
    "rank-rounds": ("rank-rounds", {"run": "r", "step": 8}),
    "rank-steps": ("rank-steps", {"run": "r"}),
    "distribution": ("distribution", {"run": "r", "step": 8}),
    "ratio": ("distribution", {"run": "r", "step": 8, "of": "ratio"}),
    "density": ("density", {"run": "r", "step": 8}),
    "timeline": ("timeline", {"run": "r", "step": 8}),
    "trouble": ("timeline", {"run": "trouble", "step": 4}),
    "comparison": ("comparison", {"run": "r"}),
    "empty": ("rounds", {"run": "r", "step": UNMEASURED}),
}  # fmt: skip


@pytest.fixture(scope="module")
def page(trained: Service, tmp_path_factory: pytest.TempPathFactory) -> Path:
    answers = {
        name: trained.get(f"/figures/{figure}", **query)
        for name, (figure, query) in FIGURES.items()
    }
    path = tmp_path_factory.mktemp("page") / "figures.html"
    path.write_text(page_of(answers), "utf-8")
    return path


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_they_can_be_read(browser: Browser, page: Path, width: int, scheme: Scheme) -> None:
    with opened(browser, page, width=width, scheme=scheme) as shown:
        look = shown.look
        assert shown.requests == [page.as_uri()]
        assert shown.messages == []
    assert look["scrolled"] <= look["width"]
    assert [each for each in look["contrasts"] if each[1] < 4.5] == []
    assert len(look["figures"]) == len(FIGURES)
    for name, figure in zip(FIGURES, look["figures"], strict=True):
        assert figure["caption"]
        assert [text for text in figure["axes"] if text], name
        assert (figure["marks"] > 0) == (name != "empty"), name
        texts, frame = figure["texts"], figure["figure"]
        for one, other in itertools.combinations(texts, 2):
            assert apart(texts[one], texts[other]), (name, one, other)
        for box in itertools.chain(*texts.values()):
            assert frame["left"] - 1 <= box["left"], name
            assert box["right"] <= frame["right"] + 1, name
        for box in texts["x"]:
            assert box["top"] < frame["bottom"], name


def apart(boxes: list[dict[str, float]], others: list[dict[str, float]]) -> bool:
    """Whether no box lies over one of the others by more than a pixel."""
    return not any(
        min(a["right"], b["right"]) - max(a["left"], b["left"]) > 1
        and min(a["bottom"], b["bottom"]) - max(a["top"], b["top"]) > 1
        for a, b in itertools.product(boxes, others)
    )
