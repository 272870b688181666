"""Render tables, texts and small pictures as HTML for a notebook; no I/O.

HTML has no script and takes the colours of the page, so that it is readable on dark and light ones;
all content is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Final

from stagescope_wire.nonfinite import Json
from stagescope_wire.render import Columns, as_json, format_value, is_numeric, printable

_PICTURE_WIDTH: Final = 480
_PICTURE_HEIGHT: Final = 48
_MARGIN: Final = 4
"""Size of a picture and its margin, in CSS pixels."""


def escaped(text: str) -> str:
    """Return `text` as HTML, with control characters escaped."""
    return html.escape(printable(text))


def html_table(
    columns: Columns, *, units: Mapping[str, str], caption: str, foot: Sequence[str] = ()
) -> str:
    """Return a table as HTML with `caption` above it and the lines of `foot` below it."""
    rule = "border-bottom:1px solid rgba(128,128,128,.5)"
    style = "padding:.2em .8em .2em 0;color:inherit;background:transparent;vertical-align:top"
    align = {name: "right" if is_numeric(columns[name]) else "left" for name in columns}
    head = "".join(
        f'<th style="{style};text-align:{align[name]};{rule}">{_header(name, units)}</th>'
        for name in columns
    )
    count = len(next(iter(columns.values()), ()))
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td style="{style};text-align:{align[name]}{_no_break(units.get(name, ""))}">'
            f"{_html_cell(columns[name][row], units.get(name, ''))}</td>"
            for name in columns
        )
        + "</tr>"
        for row in range(count)
    )
    notes = "".join(f"<div>{escaped(line)}</div>" for line in foot)
    return (
        '<div style="overflow-x:auto;color:inherit">'
        f"{_html_heading(caption)}"
        f'<table style="border-collapse:collapse;color:inherit"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{notes}</div>"
    )


def html_bars(names: Sequence[str], values: Sequence[Json], what: str) -> str:
    """Return a small picture of bars as HTML; a value that is missing or not finite is a gap.

    It has no script and has the colour of the text around it. A bar shows its name and value while
    the pointer rests on it.

    Args:
        names: of the bars.
        values: their heights; negative ones are drawn by their magnitude.
        what: the values' name.
    """
    numbers = [
        abs(float(value)) if isinstance(value, int | float) and math.isfinite(value) else None
        for value in values
    ]
    most = max((number for number in numbers if number is not None), default=0.0) or 1.0
    width = min(max(_PICTURE_WIDTH / max(len(numbers), 1), 2.0), 24.0)
    bars = "".join(
        f'<rect x="{at * width:.1f}" y="{_PICTURE_HEIGHT * (1 - (number or 0.0) / most):.1f}" '
        f'width="{width * 0.85:.1f}" height="{_PICTURE_HEIGHT * (number or 0.0) / most:.1f}" '
        f'fill="currentColor" fill-opacity="0.6"><title>{escaped(name)}: '
        f"{html.escape(format_value(value))}</title></rect>"
        for at, (name, value, number) in enumerate(zip(names, values, numbers, strict=True))
    )
    size = f'width="{len(numbers) * width:.0f}" height="{_PICTURE_HEIGHT}"'
    label = html.escape(f"{what}, largest {format_value(most)}")
    return (
        f'<svg {size} role="img" aria-label="{label}" style="display:block;color:inherit">'
        f"{bars}</svg><div><small>{label}</small></div>"
    )


def html_line(
    values: Sequence[float | None], *, what: str, rules: Sequence[int] = (),
    marks: Sequence[int] = (),
) -> str:  # fmt: skip
    """Return a small picture of a line as HTML; a missing value is a gap.

    It has no script and has the colour of the text around it. If values share a pixel, the picture
    shows the least and the greatest, so that no peak is hidden. A non-finite value is a red bar of
    the full height, whatever else is in its pixel.

    Args:
        values: from left to right.
        what: their name, for those who hear the page.
        rules: positions before which a dashed vertical line stands.
        marks: positions with a triangle below the line.
    """
    numbers = [None if value is None else float(value) for value in values]
    finite = [value for value in numbers if value is not None and math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (_PICTURE_HEIGHT - 2 * _MARGIN) / ((high - low) or 1.0)
    wide = (_PICTURE_WIDTH - 2 * _MARGIN) / max(len(numbers) - 1, 1)
    base = _PICTURE_HEIGHT - _MARGIN if high > low else _PICTURE_HEIGHT / 2

    columns: dict[int, list[float]] = {}
    bad: dict[int, None] = {}
    pieces: list[list[str]] = [[]]
    for at, value in enumerate(numbers):
        if value is None:
            pieces.append([])
            continue
        x = round(_MARGIN + at * wide)
        if not math.isfinite(value):
            bad[x] = None
            pieces.append([])
            continue
        extremes = columns.setdefault(x, [value, value])
        if extremes[0] < value < extremes[1]:
            continue
        columns[x] = [min(extremes[0], value), max(extremes[1], value)]
        pieces[-1].append(f"{x},{base - (value - low) * scale:.1f}")

    shapes = [
        f'<polyline points="{" ".join(piece if len(piece) > 1 else piece * 2)}"/>'
        for piece in pieces
        if piece
    ]
    shapes += [
        f'<path d="M{x} 0V{_PICTURE_HEIGHT}" stroke="#c62828" stroke-width="2"/>' for x in bad
    ]
    shapes += [
        f'<path d="M{_MARGIN + (at - 0.5) * wide:.1f} 0V{_PICTURE_HEIGHT}" stroke-width="1" '
        'stroke-dasharray="3 3" stroke-opacity="0.7"/>'
        for at in rules
    ]
    shapes += [
        f'<path d="M{_MARGIN + at * wide:.1f} {_PICTURE_HEIGHT - 5}l3 5h-6z" fill="currentColor" '
        'stroke="none"/>'
        for at in marks
    ]
    label = escaped(what)
    return (
        f'<svg width="{_PICTURE_WIDTH}" height="{_PICTURE_HEIGHT}" role="img" '
        f'aria-label="{label}" style="display:block;color:inherit" fill="none" '
        f'stroke="currentColor" stroke-width="1.5" stroke-linecap="round"><title>{label}</title>'
        f"{''.join(shapes)}</svg>"
    )


def html_text(text: str) -> str:
    """Return lines of text as HTML in a font of fixed width, as a terminal shows them."""
    style = "white-space:pre-wrap;font-family:monospace;color:inherit;background:transparent"
    return f'<pre style="{style}">{html.escape(text)}</pre>'


def html_block(heading: str, body: str) -> str:
    """Return a heading with `body` below it; `body` is HTML."""
    return f'<div style="overflow-x:auto;color:inherit">{_html_heading(heading)}{body}</div>'


def _html_heading(text: str) -> str:
    return f"<div><b>{escaped(text)}</b></div>" if text else ""


def _no_break(unit: str) -> str:
    return ";white-space:nowrap" if unit else ""


def _header(name: str, units: Mapping[str, str]) -> str:
    unit = {"s": " [s]"}.get(units.get(name, ""), "")
    return html.escape(printable(name) + unit)


def _html_cell(value: Json, unit: str) -> str:
    text = html.escape(format_value(value, unit))
    if not isinstance(value, Mapping) or len(value) <= 3:
        return text
    body = html_text(as_json(value, indent=2))
    return f"<details><summary>{text}</summary>{body}</details>"
