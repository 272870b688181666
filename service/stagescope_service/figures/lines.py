"""Lines of numbers over steps, and below them a row of marks for each kind."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_wire.render import ranges_text

_FEW: Final = 120
"""Most steps of a line whose points are all drawn."""


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
    """Return the vertical axis of a panel: logarithmic if its numbers span decades."""
    is_log = style.spans_decades([value for line in lines for value in line.values])
    return {
        "domain": domain,
        "title": {"text": unit},
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

    Its traces have the same `uid` in every range of steps, so a page can add new steps to them.
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
    drawn: go.Figure, marks: Sequence[NotFinite], lines: Sequence[Line], axis: str, *, first: bool
) -> None:
    """Mark values that are not finite, at the height of the largest finite one.

    The page adds new steps to them. It knows the values of all steps, so it moves the marks that
    `meta` names to the largest one.
    """
    if not marks:
        return
    top = max((v for line in lines for v in line.values if v is not None), default=1.0)
    drawn.add_scatter(
        uid=trace_id(axis, style.NOT_FINITE), x=[each.step for each in marks], y=[top] * len(marks),
        mode="markers", yaxis=axis, meta={"at_top": True},
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


Place = tuple[int, int]
"""(attempt_id, step)."""
MarkKind = Literal["finding", "capture", "weight sync", "no value"]
KINDS: Final[tuple[MarkKind, ...]] = ("finding", "capture", "weight sync", "no value")
ROW: Final = 22
"""Height of a row, in pixels."""
_LISTED: Final = 6


class Mark(NamedTuple):
    """Something that happened in some consecutive steps."""

    kind: MarkKind
    level: str
    """Severity of a finding, state of a capture; else empty."""
    first: int
    last: int
    text: str


def ranges(kind: MarkKind, level: str, texts: Mapping[Place, str]) -> list[Mark]:
    """Return a mark for each range of consecutive steps with the same text."""
    marks: list[Mark] = []
    for (_, step), text in sorted(texts.items(), key=lambda item: (item[0][1], item[0][0])):
        if marks and marks[-1].text == text and step <= marks[-1].last + 1:
            marks[-1] = marks[-1]._replace(last=step)
        else:
            marks.append(Mark(kind, level, step, step, text))
    return marks


class _Look(NamedTuple):
    symbol: str
    colour: str


_LOOKS: Final[Mapping[tuple[str, str], _Look]] = {
    ("finding", "error"): _Look("x", style.VERMILLION),
    ("finding", "warning"): _Look("triangle-up", style.ORANGE),
    ("finding", ""): _Look("circle", style.SKY),
    ("capture", ""): _Look("square", style.GREEN),
    ("weight sync", ""): _Look("line-ns", style.BLUE),
    ("no value", ""): _Look("line-ns", style.GREY),
}


def draw_marks(drawn: go.Figure, marks: Sequence[Mark], *, axis: str) -> None:
    """Draw a row of marks for each kind; several at one place of the screen are one mark."""
    low = min((mark.first for mark in marks), default=0)
    high = max((mark.last for mark in marks), default=0)
    width = max((high - low) / style.WIDTH, 1.0)
    for row, kind in enumerate(KINDS):
        own = [mark for mark in marks if mark.kind == kind]
        places: dict[int, list[Mark]] = defaultdict(list)
        for mark in own:
            # A long range is drawn as marks at each of its places.
            begin, end = int((mark.first - low) // width), int((mark.last - low) // width)
            for place in range(begin, end + 1):
                places[place].append(mark)
        by_look: dict[_Look, list[tuple[float, str]]] = defaultdict(list)
        for place, here in sorted(places.items()):
            looks = [_look(mark) for mark in here]
            worst = min(looks, key=list(_LOOKS.values()).index)
            x = here[0].first if len(here) == 1 and here[0].first == here[0].last else None
            by_look[worst].append((low + place * width if x is None else x, _hover(here)))
        for look, points in by_look.items():
            drawn.add_scatter(
                uid=trace_id(kind, look.symbol), x=[x for x, _ in points], y=[row] * len(points),
                yaxis=axis, mode="markers",
                marker={
                    "symbol": look.symbol, "size": 9, "color": look.colour,
                    "line": {"color": look.colour, "width": 1.5},
                },
                name=kind, showlegend=False, hoverinfo="text",
                hovertext=[text for _, text in points],
            )  # fmt: skip


def _look(mark: Mark) -> _Look:
    return _LOOKS.get((mark.kind, mark.level)) or _LOOKS[mark.kind, ""]


def _hover(marks: Sequence[Mark]) -> str:
    texts: dict[str, list[Mark]] = defaultdict(list)
    for mark in marks:
        texts[mark.text].append(mark)
    lines = []
    for text, same in list(texts.items())[:_LISTED]:
        steps = sorted(
            {step for mark in same for step in range(mark.first, mark.last + 1)}
            if same[0].last - same[0].first < 1000
            else {same[0].first, same[-1].last}
        )
        where = ranges_text("step", steps)
        lines.append(style.wrapped(f"{where}: {text}", 60))
    if len(texts) > _LISTED:
        lines.append(f"and {len(texts) - _LISTED} more")
    return "<br>".join(lines)
