"""The rounds of a step: mean and quantiles of |d|, token counts, against the steps before."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_service.statistics.cell import Field
from stagescope_service.statistics.mismatch import non_finite
from stagescope_service.statistics.step_metrics import VERSION, SliceMetrics
from stagescope_service.statistics.summary import Summary
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.rows import Lineage
from stagescope_service.views.reading.target import Target
from stagescope_service.views.steps.numbers import doubt
from stagescope_wire.errors import NotFound

MAX_BEFORE: Final = 20
MEAN: Final = "logprob_abs_diff/mean"
UNIT: Final = "nat"


@dataclasses.dataclass(frozen=True)
class RoundNumbers:
    """|d| of the tokens of one round, in nats; None: no token counts."""

    round: int
    tokens: int
    mean: float | None
    p50: float | None
    p99: float | None
    largest: float | None
    nonfinite: int
    """Values under the mask that are not finite, of both streams."""


@dataclasses.dataclass(frozen=True)
class EarlierStep:
    """The means of |d| of an earlier step."""

    step: int
    attempt: int
    means: tuple[tuple[int, float], ...]
    """(round, mean), ascending."""


@dataclasses.dataclass(frozen=True)
class RoundsInfo:
    """The data of the figure."""

    run: str
    attempt: int
    step: int
    stage: str | None
    rounds: tuple[RoundNumbers, ...]
    before: tuple[EarlierStep, ...]
    """The newest first."""
    note: str | None


def info(deps: Dependencies, target: Target, *, compare: int = 3) -> RoundsInfo:
    """Read the rounds of a step, and the means of up to `compare` steps before it."""
    heading = (target.run, target.number, target.step_number)
    try:
        measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
    except NotFound as error:
        return RoundsInfo(*heading, None, (), (), error.wrong)
    summary = measured.summary.summary
    rounds = round_numbers(summary)
    none = None if rounds else "no token of the step is under its mask"
    return RoundsInfo(
        *heading,
        measured.summary.stage,
        rounds,
        _before(deps, target, compare),
        none or doubt(measured.comparability),
    )


def round_numbers(summary: Summary) -> tuple[RoundNumbers, ...]:
    """Return the numbers of each round of a summary."""
    found = []
    for key, cell in summary.rounds.items():
        histogram, zeros = summary.histogram.of_round(key), int(cell[Field.EQUAL])
        p50, p99 = (
            histogram.quantile(share, zeros=zeros, largest=cell.abs_max) for share in (0.5, 0.99)
        )
        found.append(
            RoundNumbers(
                round=key,
                tokens=cell.tokens,
                mean=_known(cell.mean(Field.D_ABS_SUM)),
                p50=_known(p50),
                p99=_known(p99),
                largest=_known(cell.abs_max),
                nonfinite=int(sum(non_finite(cell, *summary.pair).values())),
            )
        )
    return tuple(found)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _before(deps: Dependencies, target: Target, count: int) -> tuple[EarlierStep, ...]:
    """Return the current steps before a step, from its own attempt and earlier ones."""
    attempts = deps.catalogue.attempts(target.run)
    lineage = Lineage(attempts)
    ids = [int(row["attempt_id"]) for row in attempts if row["number"] <= target.number]
    states = deps.catalogue.step_states(
        ids, last=target.step_number - 1, limit=count * max(len(ids), 1)
    )
    keys: list[tuple[int, int]] = []
    seen: set[int] = set()
    for state in reversed(states) if count else ():
        by = state.superseded_by or lineage.repeated_by(state.attempt_id, state.step)
        # An attempt after the step's own repeats nothing for it.
        if state.step in seen or (by is not None and by <= target.number):
            continue
        seen.add(state.step)
        keys.append((state.attempt_id, state.step))
        if len(keys) >= count:
            break
    blobs = deps.catalogue.slices(keys, version=VERSION)
    found = []
    for key in keys:
        if key in blobs:
            column = SliceMetrics.from_bytes(blobs[key]).column("round", MEAN)
            means = tuple((at, mean) for (_, at), mean in column.items() if not math.isnan(mean))
            found.append(EarlierStep(key[1], lineage.numbers[key[0]], means))
    return tuple(found)


def figure(found: RoundsInfo) -> go.Figure:
    """Draw |d| by round above the number of tokens by round."""
    title = f"Rounds of step {found.step}"
    if not found.rounds:
        return style.empty(title, found.note or "", x="round", y="|d|, nat")
    drawn = go.Figure()
    domains = style.panels((240, 90), gap=34)
    for earlier in reversed(found.before):
        drawn.add_scatter(
            x=[at for at, _ in earlier.means], y=[mean for _, mean in earlier.means],
            mode="lines+markers", marker={"size": 4, "color": style.GREY},
            line={"color": style.GREY, "width": 1.2, "dash": "dot"}, legendgroup="before",
            name="steps before: mean", showlegend=earlier is found.before[0],
            hovertemplate=f"step {earlier.step}, attempt {earlier.attempt}, round %{{x}}: "
            "mean %{y:.4g} nat<extra></extra>",
        )  # fmt: skip
    known = [each for each in found.rounds if each.mean is not None]
    _draw_quantiles(drawn, known)
    worst = max(known, key=lambda each: each.mean or 0.0, default=None)
    drawn.add_scatter(
        x=[each.round for each in found.rounds], y=[each.mean for each in found.rounds],
        mode="lines+markers", name="mean", line={"color": style.BLUE, "width": 2},
        marker={
            "size": [11 if each is worst else 7 for each in found.rounds], "color": style.BLUE,
            "symbol": ["diamond" if each is worst else "circle" for each in found.rounds],
            "line": {"width": 0},
        },
        hoverinfo="text", hovertext=[_hover(each) for each in found.rounds],
    )  # fmt: skip
    bad = [each for each in found.rounds if each.nonfinite]
    if bad:
        drawn.add_scatter(
            x=[each.round for each in bad], y=[0] * len(bad), yaxis="y2", mode="markers",
            marker={"symbol": "x", "size": 10, "color": style.VERMILLION}, name=style.NOT_FINITE,
            hoverinfo="text", hovertext=[_hover(each) for each in bad],
        )  # fmt: skip
    drawn.add_bar(
        x=[each.round for each in found.rounds], y=[each.tokens for each in found.rounds],
        yaxis="y2", marker={"color": style.SKY}, name="tokens", showlegend=False,
        hovertemplate="round %{x}: %{y} tokens<extra></extra>",
    )  # fmt: skip
    values = [v for each in known for v in (each.mean, each.p50, each.p99) if v is not None]
    values += [mean for earlier in found.before for _, mean in earlier.means]
    drawn.update_layout(
        yaxis={
            "domain": domains[0], "title": {"text": "|d|, nat"},
            "type": "log" if style.spans_decades(values, 20.0) else "linear",
        },
        yaxis2={
            "domain": domains[1], "title": {"text": "tokens"}, "nticks": 4, "exponentformat": "SI",
        },
    )  # fmt: skip
    if not style.spans_decades(values, 20.0):
        drawn.update_layout(yaxis={"rangemode": "tozero"})
    low, high = found.rounds[0].round, found.rounds[-1].round
    drawn.update_xaxes(
        title={"text": "round"}, anchor="y2", tickformat="d", range=[low - 0.6, high + 0.6],
        dtick=1 if high - low < 24 else None,
    )  # fmt: skip
    return style.finished(drawn, title, 480)


def _draw_quantiles(drawn: go.Figure, rounds: Sequence[RoundNumbers]) -> None:
    """Draw the range from the median to the 99th percentile, one stroke a round."""
    rounds = [each for each in rounds if each.p50 is not None and each.p99 is not None]
    middle, top = (
        np.array([getattr(each, name) for each in rounds], np.float64) for name in ("p50", "p99")
    )
    drawn.add_scatter(
        x=[each.round for each in rounds], y=top, mode="markers", name="p50 to p99",
        marker={"symbol": "line-ew", "size": 12, "line": {"width": 2, "color": style.VERMILLION}},
        error_y={
            "type": "data", "symmetric": False, "array": [0.0] * len(rounds),
            "arrayminus": top - middle, "color": style.VERMILLION, "thickness": 2, "width": 5,
        },
        hoverinfo="text", hovertext=[_hover(each) for each in rounds],
    )  # fmt: skip


def _hover(each: RoundNumbers) -> str:
    lines = [f"round {each.round}: {each.tokens} tokens"]
    if each.mean is None:
        lines.append("no token counts: nothing was measured")
    else:
        numbers = {"mean": each.mean, "p50": each.p50, "p99": each.p99, "largest": each.largest}
        lines += [f"{name} |d| {style.number(value, UNIT)}" for name, value in numbers.items()]
    if each.nonfinite:
        lines.append(f"{each.nonfinite} values are not finite")
    return "<br>".join(lines)
