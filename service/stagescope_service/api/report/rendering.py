"""A report as one HTML file, without network access, and as Markdown; all text escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from markupsafe import Markup

from stagescope.render import format_share, format_value, printable, unit_of
from stagescope_service.api.encoding import parse_nonfinite
from stagescope_service.api.report.parts import (
    Report,
    ReportTable,
    short,
)
from stagescope_service.compare.report.html import PageFigures, as_page, environment
from stagescope_service.figure_style import COLOURS

_MARKDOWN_ROWS: Final = 12
_MARKDOWN_LINES: Final = 3
"""Of an item: a pull request has the verdict and what to do, the file the rest."""
_MARKDOWN_GAPS: Final = 6
_OPEN_GAPS: Final = 3
"""Most gaps that are visible without unfolding."""
_SHARES: Final = ("share", "share_of_tokens", "share_of_mismatch")
_NOT_SHORT: Final = ("course",)
_COLOURS: Final[Mapping[bool | None, str]] = {
    True: COLOURS["different"], False: COLOURS["same"], None: COLOURS["not comparable"],
}  # fmt: skip
_MARKS: Final[Mapping[bool | None, str]] = {True: "✗", False: "✓", None: "•"}


def as_html(report: Report) -> str:
    """Return a report as a page that opens without network access."""
    figures = PageFigures()
    body = environment().get_template("report.html").render(
        report=report, made=format_value(report.made_wall, "unix"), colours=_COLOURS,
        figures=figures, open_gaps=_OPEN_GAPS, cell=_cell, heads=_heads,
        numeric_columns=_numeric_columns,
    )  # fmt: skip
    return as_page(f"stagescope: {report.title}", Markup(body), figures)


def as_markdown(report: Report) -> str:
    """Return a report as Markdown for a pull request: verdicts, tables and what to do."""
    markdown = environment().overlay(
        finalize=lambda value: value if isinstance(value, Markup) else Markup(_plain(value))
    )
    text = markdown.get_template("report.md").render(
        report=report, made=format_value(report.made_wall, "unix"), marks=_MARKS,
        separator=Markup(" | "), code=_code, cell=_cell, heads=_heads,
        most_rows=_MARKDOWN_ROWS, most_lines=_MARKDOWN_LINES, most_gaps=_MARKDOWN_GAPS,
    )  # fmt: skip
    return f"{text}\n"


_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>#|~!&@$])")


def _code(text: str) -> Markup:
    """Return text as code, which no markup ends."""
    return Markup(f"`{printable(' '.join(text.split())).replace('`', chr(39))}`")


def _plain(value: object) -> str:
    """Return text that Markdown shows as it is, on one line: no markup, no link, no mention."""
    text = _SPECIAL.sub(r"\\\1", printable(" ".join(str(value).split())))
    # A text that begins with these would begin a list, a rule or a heading.
    return re.sub(r"^([-+]|\d+[.)])(\s|$)", r"\\\1\2", text)


def _cell(name: str, value: object) -> str:
    """Return a value of a column for a reader."""
    number = parse_nonfinite(value)
    if isinstance(number, bool) or value is None:
        return format_value(number)
    if isinstance(number, float) and name in _SHARES:
        return format_share(number)
    if isinstance(number, float) and unit_of(name) in ("", "s"):
        return short(number) if abs(number) < 1e4 or not unit_of(name) else f"{number:.0f}"
    text = format_value(number, unit_of(name))
    return text if name in _NOT_SHORT or len(text) <= 300 else f"{text[:300]}..."


def _heads(names: Sequence[str]) -> list[str]:
    """Return the titles of columns."""
    return [name.replace("_", " ") for name in names]


def _numeric_columns(table: ReportTable) -> list[int]:
    """Return the indexes of the columns that hold numbers alone."""
    return [at for at, name in enumerate(table.columns) if _is_numeric(table, name)]


def _is_numeric(table: ReportTable, name: str) -> bool:
    values = [row.get(name) for row in table.rows]
    numbers = [
        isinstance(parse_nonfinite(value), int | float) and not isinstance(value, bool)
        for value in values if value is not None
    ]  # fmt: skip
    return bool(numbers) and all(numbers) and unit_of(name) != "unix"
