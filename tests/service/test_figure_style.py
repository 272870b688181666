"""The look of figures: colours that show on both pages, numbers, and curves without lost spikes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagescope_service import figure_style as style

WHITE, DARK = "#ffffff", "#16181d"
NAMED = {
    name: getattr(style, name)
    for name in ("BLUE", "VERMILLION", "GREEN", "PURPLE", "ORANGE", "SKY", "GREY", "INK")
}
# M. Machado, M. Oliveira, L. Fernandes, "A Physiologically-based Model for Simulation of Color
# Vision Deficiency", 2009: matrices for linear RGB at severity 1.
NO_RED = np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]])  # fmt: skip
NO_GREEN = np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]])  # fmt: skip


def linear(colour: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    channels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2's."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted(float(weights @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(
    rgb: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """CIE L*a*b* of linear sRGB, white point D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722],
                       [0.0193, 0.1192, 0.9505]])  # fmt: skip
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("name", NAMED)
def test_every_colour_shows_on_a_light_and_on_a_dark_page(name: str) -> None:
    assert contrast(NAMED[name], WHITE) >= 3.0
    assert contrast(NAMED[name], DARK) >= 3.0


def test_no_figure_fades_a_colour() -> None:
    """At half its opacity a blue of 3.5:1 on a dark page has 1.7:1."""
    folder = Path(style.__file__).parent / "api" / "figures"
    faded = [path.name for path in folder.glob("*.py") if "opacity" in path.read_text("utf-8")]
    assert faded == []


@pytest.mark.parametrize("matrix", [np.eye(3), NO_RED, NO_GREEN], ids=["all", "no red", "no green"])
def test_series_differ_for_every_kind_of_colour_vision(
    matrix: np.ndarray[tuple[int, int], np.dtype[np.float64]],
) -> None:
    seen = [lab(matrix @ linear(colour)) for colour in style.SERIES]
    closest = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen[:4], 2))
    assert closest > 15.0  # 2.3 is a difference that is just noticed
    assert len(set(style.DASHES)) == len(style.DASHES) >= len(style.SERIES)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.000123456, "0.000123 nat"), (12.0, "12 nat"), (1234567.0, "1.23e+06 nat"),
        (math.nan, "NaN"), (math.inf, "∞"), (-math.inf, "-∞"), (None, "not measured"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits_and_their_unit(value: float | None, text: str) -> None:
    assert style.number(value, "nat") == text


def test_a_sentence_is_wrapped_and_no_markup() -> None:
    text = style.wrapped("a <b>bold</b> sentence of several words", 16)
    assert text == "a &lt;b&gt;bold&lt;/b&gt;<br>sentence of<br>several words"
    assert style.wrapped("x" * 99, 10) == "x" * 99


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=3000),
    st.integers(1, 50),
)
def test_a_thinned_curve_keeps_every_spike_and_every_gap(values: list[float], most: int) -> None:
    array = np.array(values)
    kept = style.thinned(array, most)
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert len(kept) <= max(2 * most + 2, 1)
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    if len(values) > 2 * most:
        size = -(-len(values) // most)
        for begin in range(0, len(values), size):
            stretch = array[begin : begin + size]
            here = array[[at for at in kept if begin <= at < begin + size]]
            if np.isnan(stretch).all():
                assert len(here) >= 1
                assert np.isnan(here).all()
            else:
                assert np.nanmax(here) == np.nanmax(stretch)
                assert np.nanmin(here) == np.nanmin(stretch)


def test_panels_fill_the_figure_from_the_top() -> None:
    first, second = style.panels((300, 100), gap=40)
    assert first == pytest.approx((140 / 440, 1.0))
    assert second == pytest.approx((0.0, 100 / 440))


def test_empty_is_axes_and_a_sentence() -> None:
    drawn: Any = style.empty("Title <x>", "nothing was measured", x="step", y="nat")
    assert drawn.layout.title.text == "Title &lt;x&gt;"
    assert drawn.layout.annotations[0].text == "nothing was measured"
    assert (drawn.layout.xaxis.title.text, drawn.layout.yaxis.title.text) == ("step", "nat")
    assert not drawn.data


def test_powers_are_for_positive_numbers_far_apart() -> None:
    assert style.spans_decades([0.001, 1.0])
    assert not style.spans_decades([0.5, 1.0])
    assert not style.spans_decades([0.0, 1.0])
    assert not style.spans_decades([-1.0, 100.0])
    assert not style.spans_decades([])
    assert style.spans_decades([0.001, None, math.nan, 1.0])


def test_the_scale_of_heat_maps_begins_visibly_off_both_pages() -> None:
    """A cell of one token in the darkest of Viridis cannot be told from a dark page."""
    places, colours = zip(*style.SCALE, strict=True)
    assert (places[0], places[-1]) == (0.0, 1.0)
    assert contrast(colours[0], WHITE) >= 3.0
    assert contrast(colours[0], DARK) >= 3.0
    # In grey, and for every kind of colour vision, more is lighter.
    for matrix in (np.eye(3), NO_RED, NO_GREEN):
        lightness = [float(lab(matrix @ linear(colour))[0]) for colour in colours]
        assert all(b - a > 4.0 for a, b in itertools.pairwise(lightness))
