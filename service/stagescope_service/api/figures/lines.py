"""Lines over steps: a number by the steps of an attempt, and how it is drawn."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import plotly.graph_objects as go

from stagescope_service import figure_style as style

_FEW: Final = 120
"""Steps of a line whose points are drawn each."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A number over the steps of one attempt, ascending; None: the step has none."""

    attempt: int
    superseded: bool
    """Whether a later attempt did these steps again."""
    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @property
    def has_values(self) -> bool:
        """Whether any step has a finite value."""
        return any(value is not None for value in self.values)

    def smoothed(self, over: float) -> Line:
        """Return the exponential moving average: a step's value counts exp(-age / `over`) as much.

        Weights are normalised from the first value on, and a step without a value has none.
        """
        decay, total, weight, before = math.exp(-1.0 / over), 0.0, 0.0, 0
        found: list[float | None] = []
        for step, value in zip(self.steps, self.values, strict=True):
            faded = decay ** (step - before)
            total, weight, before = total * faded, weight * faded, step
            if value is not None:
                total, weight = total + value, weight + 1.0
            found.append(None if value is None else total / weight)
        return dataclasses.replace(self, values=tuple(found))


class NotFinite(NamedTuple):
    """A value that is not a finite number."""

    step: int
    attempt: int
    value: str
    """nan, inf or -inf."""


def axis_of(unit: str, lines: Sequence[Line], domain: tuple[float, float]) -> dict[str, object]:
    """Return the vertical axis of a panel: of powers of ten where its numbers span decades."""
    is_log = style.spans_decades([value for line in lines for value in line.values])
    return {
        "domain": domain,
        "title": {"text": unit or style.NO_UNIT},
        "type": "log" if is_log else "linear",
        "nticks": 5,
    }


class LineStyle(NamedTuple):
    """The name of a line, and how it is drawn."""

    name: str
    colour: str
    dash: str
    legend: bool
    """Whether the legend names it."""
    width: float = 1.6
    """In pixels."""


def draw_line(drawn: go.Figure, line: Line, axis: str, unit: str, line_style: LineStyle) -> None:
    """Draw one line, thinned so that every spike stays.

    Its traces have the same `uid` in every range of steps, by which a page adds new steps to them.
    """
    name, colour, dash, legend, width = line_style
    uid = trace_id(axis, name, line.attempt)
    values, steps = array_of(line.values), np.array(line.steps)
    kept = style.thinned(values)
    values, steps = values[kept], steps[kept]
    few = len(values) <= _FEW
    hover = f"step %{{x}}, attempt {line.attempt}: %{{y:.4g}} {unit}<extra>{name}</extra>"
    drawn.add_scatter(
        uid=uid, x=steps, y=values, yaxis=axis, mode="lines+markers" if few else "lines",
        meta={"attempt": line.attempt, "superseded": line.superseded},
        line={"color": colour, "width": width, "dash": dash}, marker={"size": 4, "color": colour},
        name=name, legendgroup=name, showlegend=legend, hovertemplate=hover,
        connectgaps=False,
    )  # fmt: skip
    alone = _alone(values)
    if not few and alone.any():  # a line through one point draws nothing
        drawn.add_scatter(
            uid=f"{uid}-alone", x=steps[alone], y=values[alone], yaxis=axis, mode="markers",
            legendgroup=name, meta={"attempt": line.attempt, "superseded": line.superseded},
            marker={"size": 4, "color": colour}, name=name, showlegend=False,
            hovertemplate=hover,
        )  # fmt: skip


def draw_not_finite(
    drawn: go.Figure,
    marks: Sequence[NotFinite],
    lines: Sequence[Line],
    axis: str,
    *,
    first: bool,
) -> None:
    """Mark values that are not finite, at the height of the largest finite one."""
    if not marks:
        return
    top = max((v for line in lines for v in line.values if v is not None), default=1.0)
    drawn.add_scatter(
        uid=trace_id(axis, style.NOT_FINITE), x=[each.step for each in marks], y=[top] * len(marks),
        mode="markers", yaxis=axis,
        marker={"symbol": "x", "size": 9, "color": style.VERMILLION}, name=style.NOT_FINITE,
        legendgroup=style.NOT_FINITE, showlegend=first, hoverinfo="text",
        hovertext=[
            f"step {each.step}, attempt {each.attempt}: {style.number(float(each.value))}"
            for each in marks
        ],
    )  # fmt: skip


def trace_id(*parts: object) -> str:
    """Return the `uid` of a trace; plotly also makes a class of CSS of it."""
    return "-".join(re.sub(r"\W+", "-", str(part)) for part in parts)


def array_of(values: Sequence[float | None]) -> style.Floats:
    """Return values as an array, NaN where there is none."""
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _alone(values: style.Floats) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which values have no neighbour."""
    missing = np.isnan(np.concatenate([[math.nan], values, [math.nan]]))
    alone: np.ndarray[tuple[int], np.dtype[np.bool_]] = ~missing[1:-1] & missing[:-2] & missing[2:]
    return alone
