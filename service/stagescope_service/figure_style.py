"""The look of every figure: colours, fonts, axes, numbers, and figures without content.

Figures have a transparent background. Their colours have a contrast of 3:1 or more with light and
with dark pages. A page that knows which it is sets `layout.font.color` to the colour of its text.
No meaning rests on a colour alone: marks differ in shape, lines in dash, too.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]

COLOURS: Final = {
    "same": "#2a8048", "within noise": "#5f7d2c", "not comparable": "#6e7278",
    "different": "#c0392b",
}  # fmt: skip
"""Colours of a comparison's verdicts: contrast 3:1 with both pages, 4.5:1 with white text."""

PLOTLY: Final = Path(__file__).parent / "http" / "static" / "plotly-cartesian.min.js"
"""The published file, which the page loads and a report holds."""

BLUE: Final = "#0072b2"
VERMILLION: Final = "#d55e00"
GREEN: Final = "#009e73"
PURPLE: Final = "#c06c9b"
ORANGE: Final = "#b97f00"
SKY: Final = "#3b93c7"
GREY: Final = "#767c84"
SERIES: Final = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
"""Colours of series, in their order.

Those of M. Okabe and K. Ito ("Color Universal Design", 2008), which people without red or green
cones can distinguish; orange, sky blue and purple are darker, as the originals fade on white.
"""
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SCALE: Final = (
    (0.0, "#2f6c8e"), (1 / 6, "#25858d"), (1 / 3, "#21a087"), (0.5, "#39b977"), (2 / 3, "#72cf56"),
    (5 / 6, "#b7de2b"), (1.0, "#fde725"),
)  # fmt: skip
"""Colours of heat maps: Viridis, whose lightness rises evenly, for every colour vision and in grey.

Its darkest third is left out: on a dark page it would look like a gap.
"""

INK: Final = GREY
"""Colour of texts where no page sets one: readable on white and on black."""
GRID: Final = "rgba(128,128,128,0.3)"
CLEAR: Final = "rgba(0,0,0,0)"
WIDTH: Final = 800
"""Pixels of a curve for which it is thinned: more are not drawn on a page of 1280."""

NOT_FINITE: Final = "not finite"
HEADING: Final = "heading"
"""The name of annotations that are titles of panels; the page moves them where it is narrow."""
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_WRAPPED: Final = 46
"""Characters of a line of a sentence inside a figure that is 400 pixels wide."""


def finished(figure: go.Figure, title: str, height: int = 420) -> go.Figure:
    """Give a figure its title, height (pixels) and the common look; return it.

    The title is plain text.
    """
    line: dict[str, Any] = {"gridcolor": GRID, "linecolor": GRID, "zerolinecolor": GRID}
    figure.update_traces(marker_line_width=0, selector={"type": "bar"})
    figure.update_layout(
        title={"text": html.escape(title), "font": {"size": 15}}, template="none",
        height=height, margin={"l": 60, "r": 20, "t": 40, "b": 60}, showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        font={"family": _FONT, "size": 12, "color": INK}, colorway=list(SERIES),
        paper_bgcolor=CLEAR, plot_bgcolor=CLEAR, hovermode="closest", bargap=0.2,
        hoverlabel={"namelength": -1, "align": "left"},
    )  # fmt: skip
    line |= {"automargin": True, "zeroline": False, "title_standoff": 8}
    figure.update_xaxes(showgrid=False, ticks="outside", **line)
    figure.update_yaxes(showgrid=True, **line)
    # An axis of powers of ten labels these alone: 2 and 5 between them read like other numbers.
    axes: tuple[Any, ...] = (*figure.select_xaxes(), *figure.select_yaxes())
    for axis in axes:
        if axis.type == "log":
            axis.update(exponentformat="e", dtick=axis.dtick or 1, showexponent="all")
        elif axis.exponentformat is None:
            axis.update(exponentformat="e")
    return figure


def empty(title: str, sentence: str, *, x: str, y: str, height: int = 240) -> go.Figure:
    """Return axes with a sentence that says why there is nothing between them.

    Args:
        title: of the figure, plain text.
        sentence: plain text.
        x, y: titles of the axes.
        height: in pixels.
    """
    figure = go.Figure()
    figure.update_xaxes(title={"text": x}, range=[0, 1], showticklabels=False)
    figure.update_yaxes(title={"text": y}, range=[0, 1], showticklabels=False)
    say(figure, sentence)
    figure = finished(figure, title, height).update_layout(showlegend=False)
    return figure.update_yaxes(showgrid=False)


def traces(figure: go.Figure) -> tuple[Any, ...]:
    """Return the traces of a figure: plotly has no types, and is taken for other things."""
    return tuple(figure.select_traces())


def legend_below(figure: go.Figure) -> go.Figure:
    """Move the legend below the axes, with room for two entries a line; return the figure."""
    shown = [trace for trace in traces(figure) if trace.showlegend is not False]
    entries = {trace.legendgroup or trace.name for trace in shown}
    room = 24 * -(-len(entries) // 2)
    layout: Any = figure.layout
    figure.update_layout(
        legend={"y": 0, "yref": "container", "yanchor": "bottom"},
        margin={"b": 60 + room}, height=layout.height + room,
        showlegend=len(entries) > 1,
    )  # fmt: skip
    return figure


def say(figure: go.Figure, sentence: str, *, y: float = 0.5) -> None:
    """Write a sentence across the middle of a figure, `y` from its bottom (0) to its top (1)."""
    figure.add_annotation(
        text=wrapped(sentence), xref="paper", yref="paper", x=0.5, y=y, showarrow=False,
        font={"size": 13}, align="center",
    )  # fmt: skip


def wrapped(sentence: str, width: int = _WRAPPED) -> str:
    """Return plain text as plotly's markup, in lines of at most `width` characters."""
    lines: list[str] = [""]
    for word in sentence.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "<br>".join(map(html.escape, lines))


def heading(figure: go.Figure, text: str, top: float) -> None:
    """Write the title of a panel at its top left, at `top` of the figure's height (0 to 1)."""
    figure.add_annotation(
        text=f"<b>{html.escape(text)}</b>", xref="paper", yref="paper", x=0, y=top,
        xanchor="left", yanchor="bottom", showarrow=False, font={"size": 12}, name=HEADING,
    )  # fmt: skip


def panels(heights: Sequence[float], *, gap: float) -> list[tuple[float, float]]:
    """Return (bottom, top) of panels one below the other, in shares of the figure's height.

    Args:
        heights: of the panels, from the top, in pixels.
        gap: between two of them, in pixels.
    """
    total = sum(heights) + gap * (len(heights) - 1)
    domains, top = [], total
    for height in heights:
        domains.append((max((top - height) / total, 0.0), min(top / total, 1.0)))
        top -= height + gap
    return domains


def number(value: float | None, unit: str = "") -> str:
    """Return a number with three significant digits and its unit, for a reader."""
    if value is None:
        return "not measured"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    is_whole = value == int(value) and abs(value) < 1e6
    return f"{int(value) if is_whole else f'{value:.3g}'} {unit}".rstrip()


def thinned(values: Floats, most: int = WIDTH) -> Indexes:
    """Return indexes of the values of a curve that show on a screen, ascending.

    Each of `most` equal stretches gives its smallest and its largest value, so that no spike
    vanishes. A stretch without a number gives one index, which keeps the gap. The first and the
    last value stay. NaN means no value.
    """
    count = len(values)
    if count <= 2 * most:
        return np.arange(count)
    size = -(-count // most)
    padded = np.full(size * -(-count // size), np.nan)
    padded[:count] = values
    rows = padded.reshape(-1, size)
    starts = np.arange(len(rows)) * size
    lowest = np.where(np.isnan(rows), np.inf, rows).argmin(axis=1) + starts
    highest = np.where(np.isnan(rows), -np.inf, rows).argmax(axis=1) + starts
    found: Indexes = np.unique([0, count - 1, *lowest, *highest])
    return found[found < count]


def ticks_of_powers(
    values: Sequence[float | None], most: int = 6
) -> tuple[float, dict[float, str]]:
    """Return the position of 0 on an axis of powers of ten, and the ticks of the axis."""
    exponents = [math.log10(value) for value in values if value]
    low, high = math.floor(min(exponents, default=0)), math.ceil(max(exponents, default=0))
    every = -(-(high - low + 1) // most)
    ticks = {10.0**power: _power_text(power) for power in range(high, low - 1, -every)}
    zero = 10.0 ** (low - (every + 1) // 2)  # half as far as two ticks: their labels need the room
    return zero, {zero: "0", **ticks}


def _power_text(power: int) -> str:
    """Return the label of a power of ten, as plotly writes those that it places itself."""
    return f"{10.0**power:g}" if abs(power) <= 2 else f"1e{power}"


def spans_decades(values: Sequence[float | None] | Floats, least: float = 50.0) -> bool:
    """Return whether all numbers are positive, and so far apart that only powers show them."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return bool(finite) and min(finite) > 0.0 and max(finite) > least * min(finite)


def plotly_script() -> str:
    """Return Plotly's bundle for cartesian axes, without the style sheet of its maps.

    The bundle inside the wheel of plotly is three times as large and also draws maps and scenes. A
    browser without a cache needs 0.5 s longer to read it. The style sheet is left out because the
    policy of pages forbids it.
    """
    script = PLOTLY.read_text(encoding="utf-8")
    return re.sub(r'if\(!document\.getElementById\("[0-9a-f]{64}"\)\)', "if(!1)", script)
