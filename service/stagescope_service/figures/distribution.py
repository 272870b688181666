"""How |d| and the ratios of probabilities are distributed, from the counts of every step.

d = p - q in nats. |d| is counted in buckets whose edges are powers of 2^(1/8), zeros apart. The
ratio e^d is counted on both sides of 1 at the bounds of its tails; between them max(e^d, e^-d) has
the edges of |d|.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import numpy as np
import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_service.statistics.cell import RATIO_TAILS, Cell, Field
from stagescope_service.statistics.histogram import Histogram, bounds
from stagescope_service.statistics.summary import Summary
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_service.views.steps.numbers import doubt
from stagescope_wire.errors import NotFound
from stagescope_wire.render import counted

Of = Literal["abs", "ratio"]

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
_LABEL_ROW: Final = 11
"""Pixels of a label's row: each quantile has its own, so that close ones do not touch."""
_LARGEST: Final = 700.0
"""Nats: beyond this, e^d does not fit into a float."""


class Bar(NamedTuple):
    """The tokens between two values, in the unit of the axis: (low, high]."""

    low: float
    high: float
    tokens: int


@dataclasses.dataclass(frozen=True)
class DistributionInfo:
    """The data of the figure."""

    run: str
    attempt: int
    step: int
    of: Of
    round: int | None
    tokens: int
    zeros: int
    """Tokens whose p and q are the same number."""
    bars: tuple[Bar, ...]
    """|d| in nats, or max(e^d, e^-d), ascending."""
    sides: tuple[Bar, ...]
    """e^d by its tails, ascending; empty for |d|."""
    quantiles: tuple[tuple[str, float], ...]
    """(name, |d| in nats), within 4.5 %."""
    comparable: str
    note: str | None


def info(
    deps: Dependencies, target: Target, *, of: Of = "abs", round: int | None = None
) -> DistributionInfo:
    """Read the counts of a step, or of one of its rounds.

    Raises:
        NotFound: the step has no such round.
    """
    heading = (target.run, target.number, target.step_number, of, round)
    try:
        measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
    except NotFound as error:
        return DistributionInfo(*heading, 0, 0, (), (), (), "unknown", error.wrong)
    summary = measured.summary.summary
    cell, histogram = _chosen(summary, round)
    note = None
    if not cell.tokens:
        note = "no token counts: nothing was measured"
    elif cell[Field.EQUAL] == cell.tokens:
        note = f"all {cell.tokens} tokens have the same p and q"
    zeros = int(cell[Field.EQUAL])
    quantiles = tuple(
        (name, histogram.quantile(share, zeros=zeros, largest=cell.abs_max))
        for name, share in QUANTILES.items()
    )
    return DistributionInfo(
        *heading,
        cell.tokens,
        zeros,
        _bars(histogram, of, cell),
        _sides(cell) if of == "ratio" else (),
        quantiles if cell.tokens else (),
        measured.comparability.verdict,
        note or doubt(measured.comparability),
    )


def _chosen(summary: Summary, round: int | None) -> tuple[Cell, Histogram]:
    if round is None:
        return summary.total, summary.histogram.collapsed()
    cell = summary.rounds.get(round)
    if cell is None:
        keys = ", ".join(map(str, summary.rounds.keys.tolist()[:20]))
        raise NotFound(f"there is no round {round}", expected=f"one of {keys}" if keys else "")
    return cell, summary.histogram.of_round(round)


def _bars(histogram: Histogram, of: Of, cell: Cell) -> tuple[Bar, ...]:
    """Return the counts of |d| with the edges of their buckets; the last ends at the maximum."""
    order = np.argsort(histogram.buckets, kind="stable")
    found = []
    for bucket, count in zip(
        histogram.buckets[order].tolist(), histogram.counts[order].tolist(), strict=True
    ):
        low, high = bounds(int(bucket))
        high = min(high, max(cell.abs_max, low * (1 + 1e-9)))
        if of == "ratio":
            low, high = (math.exp(min(edge, _LARGEST)) for edge in (low, high))
        found.append(Bar(low, high, int(count)))
    return tuple(found)


def _sides(cell: Cell) -> tuple[Bar, ...]:
    """Return the counts of e^d at the bounds of its tails; equal tokens are in none of them."""
    if not cell.tokens:
        return ()
    least, most = (
        math.exp(max(min(cell[field], _LARGEST), -_LARGEST)) for field in (Field.D_MIN, Field.D_MAX)
    )
    below, above = int(cell[Field.Q_GREATER]), 0
    above = cell.tokens - int(cell[Field.EQUAL]) - below
    edges_below = [low for low, _ in RATIO_TAILS]
    edges_above = [high for _, high in RATIO_TAILS]
    tails_below = [int(cell[Field(Field.RATIO_BELOW_0 + 2 * at)]) for at in range(2)]
    tails_above = [int(cell[Field(Field.RATIO_ABOVE_0 + 2 * at)]) for at in range(2)]
    bars = []
    outer = [1.0, *edges_below]
    counts = [below, *tails_below, 0]
    for at, edge in enumerate(outer):
        low = outer[at + 1] if at + 1 < len(outer) else min(least, edge)
        bars.append(Bar(low, edge, counts[at] - counts[at + 1]))
    bars.reverse()
    outer, counts = [1.0, *edges_above], [above, *tails_above, 0]
    for at, edge in enumerate(outer):
        high = outer[at + 1] if at + 1 < len(outer) else max(most, edge)
        bars.append(Bar(edge, high, counts[at] - counts[at + 1]))
    return tuple(bar for bar in bars if bar.tokens or bar.low < bar.high)


def figure(found: DistributionInfo) -> go.Figure:
    """Draw the counts over an axis of powers of ten; equal tokens have a separate bar."""
    of_round = "" if found.round is None else f", round {found.round}"
    what = "|d|" if found.of == "abs" else "ratios of probabilities"
    title = f"Distribution of {what} in step {found.step}{of_round}"
    axis = "|d| = |p - q|, nat" if found.of == "abs" else "ratio e^(p - q)"
    if not found.tokens:
        return style.empty(title, found.note or "", x=axis, y="tokens")
    return _ratios(found, title, axis) if found.of == "ratio" else _differences(found, title, axis)


def _differences(found: DistributionInfo, title: str, axis: str) -> go.Figure:
    drawn = go.Figure()
    zero, ticks = style.ticks_of_powers([edge for bar in found.bars for edge in bar[:2]])
    _draw(drawn, found.bars, _hover(found.tokens, "nat"), "tokens by |d|", style.BLUE)
    if found.zeros:
        drawn.add_bar(
            x=[zero / 2**0.5], width=[zero * 2**0.5 - zero / 2**0.5], offset=0, y=[found.zeros],
            marker={"color": style.GREEN, "pattern": {"shape": "/"}}, name="exactly 0",
            hoverinfo="text",
            hovertext=[f"exactly 0: {_share(found.zeros, found.tokens)}"],
        )  # fmt: skip
    if not found.zeros:
        del ticks[zero]
    drawn.update_xaxes(
        title={"text": axis}, type="log", tickvals=list(ticks), ticktext=list(ticks.values()),
        range=[math.log10(min(ticks)) - 0.4, math.log10(max(ticks)) + 0.1],
    )  # fmt: skip
    for at, (name, value) in enumerate(found.quantiles):
        if value > 0.0:
            drawn.add_shape(
                type="line", x0=value, x1=value, y0=0, y1=1, yref="paper",
                line={"color": style.VERMILLION, "width": 1, "dash": "dot"},
            )  # fmt: skip
            drawn.add_annotation(
                x=math.log10(value), y=1, yref="paper", text=name, showarrow=False,
                yanchor="bottom", yshift=_LABEL_ROW * at, font={"size": 10},
                hovertext=f"{name}: {style.number(value, 'nat')}",
            )  # fmt: skip
    _counts(drawn, [*(bar.tokens for bar in found.bars), found.zeros])
    drawn = style.finished(drawn, title, 380)
    return drawn.update_layout(
        margin={"t": 60}, legend={"y": -0.28, "yanchor": "top"}, showlegend=bool(found.zeros)
    )


def _ratios(found: DistributionInfo, title: str, axis: str) -> go.Figure:
    """Draw the sides as bars with their bounds below them, and either side with all edges."""
    drawn = go.Figure()
    domains = style.panels((150, 170), gap=90)
    bars = [(f"{_edge(bar.low)} to {_edge(bar.high)}", bar.tokens, bar) for bar in found.sides]
    names = [name for name, _, _ in bars]
    drawn.add_bar(
        x=names, y=[tokens or None for _, tokens, _ in bars], name="p below q, or above",
        marker={"color": [style.BLUE if bar.high <= 1.0 else style.PURPLE for *_, bar in bars]},
        hoverinfo="text", showlegend=False,
        hovertext=[f"{name}: {_share(tokens, found.tokens)}" for name, tokens, _ in bars],
    )  # fmt: skip
    middle = sum(bar.high <= 1.0 for bar in found.sides)
    if found.zeros:
        names.insert(middle, "exactly 1")
        drawn.add_bar(
            x=["exactly 1"], y=[found.zeros], name="exactly 1", showlegend=False,
            marker={"color": style.GREEN, "pattern": {"shape": "/"}}, hoverinfo="text",
            hovertext=[f"exactly 1: {_share(found.zeros, found.tokens)}"],
        )  # fmt: skip
    drawn.update_layout(
        xaxis={
            "title": {"text": axis}, "anchor": "y", "type": "category", "tickfont": {"size": 10},
            "categoryorder": "array", "categoryarray": names,
        },
        xaxis2={
            "title": {"text": "max(ratio, 1/ratio) - 1"}, "type": "log", "anchor": "y2",
        },
        yaxis={"domain": domains[0]}, yaxis2={"domain": domains[1]},
    )  # fmt: skip
    _draw(
        drawn, [Bar(bar.low - 1.0, bar.high - 1.0, bar.tokens) for bar in found.bars],
        _hover(found.tokens, base=1.0), "either side", style.SKY, axes=("x2", "y2"),
    )  # fmt: skip
    _counts(drawn, [*(bar.tokens for bar in found.sides), found.zeros], axis="yaxis")
    _counts(drawn, [bar.tokens for bar in found.bars], axis="yaxis2")
    return style.finished(drawn, title, 520).update_layout(showlegend=False, margin={"t": 20})


def _edge(value: float) -> str:
    return style.number(value) if 1e-3 <= value < 1e4 else f"{value:.0e}"


def _draw(
    drawn: go.Figure,
    bars: tuple[Bar, ...] | list[Bar],
    hover: Callable[[Bar], str],
    name: str,
    colour: str,
    axes: tuple[str, str] = ("x", "y"),
) -> None:
    """Draw bars from edge to edge; `hover` makes the text of a bar."""
    bars = [bar for bar in bars if bar.low > 0.0 and bar.high > bar.low]
    drawn.add_bar(
        x=[bar.low for bar in bars], width=[bar.high - bar.low for bar in bars], offset=0,
        y=[bar.tokens or None for bar in bars], name=name, marker={"color": colour},
        xaxis=axes[0], yaxis=axes[1], hoverinfo="text",
        hovertext=[hover(bar) for bar in bars],
    )  # fmt: skip


def _hover(tokens: int, unit: str = "", base: float = 0.0) -> Callable[[Bar], str]:
    """Return the function that makes a bar's text; the axis leaves `base` out of a value."""

    def text(bar: Bar) -> str:
        ends = style.number(bar.low + base), style.number(bar.high + base, unit)
        return f"{' to '.join(ends)}: {_share(bar.tokens, tokens)}"

    return text


def _counts(drawn: go.Figure, counts: list[int], axis: str = "yaxis") -> None:
    """Give an axis of tokens powers of ten: a tail of one token among a million shows."""
    most = max(counts, default=1)
    drawn.update_layout({axis: {
        "title": {"text": "tokens"}, "type": "log",
        "range": [math.log10(0.5), math.log10(max(most, 1)) + 0.1],
    }})  # fmt: skip


def _share(count: int, tokens: int) -> str:
    return (
        f"{count} of {tokens} tokens ({count / tokens:.3%})"
        if tokens
        else counted(int(count), "token")
    )
