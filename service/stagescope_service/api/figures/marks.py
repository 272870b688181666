"""Marks of what happened in steps: a row for each kind, below figures over the steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import plotly.graph_objects as go

from stagescope.render import stretches
from stagescope_service import figure_style as style
from stagescope_service.api.figures.lines import trace_id

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
        where = stretches("step", steps)
        lines.append(style.wrapped(f"{where}: {text}", 60))
    if len(texts) > _LISTED:
        lines.append(f"and {len(texts) - _LISTED} more")
    return "<br>".join(lines)
