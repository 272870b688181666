"""Makes a report, and writes it as HTML, Markdown or JSON.

HTML opens without network access. The templates escape all text, in Markdown too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from markupsafe import Markup

import stagescope_wire
from stagescope_service.compare.report.html import PageFigures, as_page, environment
from stagescope_service.figure_style import COLOURS
from stagescope_service.redaction import Redactor
from stagescope_service.report.content import OF_RUN, OF_STEP
from stagescope_service.report.parts import (
    Report,
    ReportScope,
    ReportSection,
    ReportTable,
    redacted,
    short,
    shortened,
)
from stagescope_service.views.encoding import encode, parse_nonfinite
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_wire.errors import StagescopeError
from stagescope_wire.render import format_share, format_value, printable, unit_of

_MARKDOWN_ROWS: Final = 12

_MARKDOWN_LINES: Final = 3
"""Lines of an item: a pull request has the verdict and what to do, the file the rest."""

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
    """Return text as code that no markup can end."""
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


MAX_FIGURE_BYTES: Final = 2_500_000
"""Most bytes of all figures as JSON: with Plotly's 1.5 MB the file stays below 5 MB."""


def make_report(
    deps: Dependencies,
    run: str,
    *,
    attempt: int | None,
    step: int | None,
    at_step: Callable[[str], None] = lambda name: None,
) -> Report:
    """Return the report of a run, or of one of its steps.

    Args:
        deps: the collaborators.
        run: its name.
        attempt: its number; None: the current attempts.
        step: the trainer's step; None: the whole run.
        at_step: called with the name of each section before it is made.

    Raises:
        NotFound: there is no such run, attempt or step.
    """
    scope = ReportScope.find(deps, run, attempt, step)
    makers = OF_RUN if step is None else OF_STEP
    sections: list[ReportSection] = []
    for name, (title, make) in makers.items():
        at_step(name)
        try:
            section = make(scope)
        except StagescopeError as error:
            section = ReportSection(name, title, gaps=[shortened(str(error))])
        if section is not None:
            sections.append(dataclasses.replace(section, name=name, title=section.title or title))
    redactor = Redactor()
    number = scope.target.number if step is not None else attempt
    parts = {"": scope.run, "attempt ": number, "step ": step}
    return Report(
        title=", ".join(f"{what}{each}" for what, each in parts.items() if each is not None),
        run=scope.run,
        attempt=number,
        step=step,
        made_wall=deps.clock(),
        version=stagescope_wire.__version__,
        verdicts=redacted(scope.verdicts, redactor),
        sections=redacted(_within(sections, MAX_FIGURE_BYTES), redactor),
    )


def _within(sections: Iterable[ReportSection], most: int) -> list[ReportSection]:
    """Return sections without the figures that do not fit into `most` bytes; name these."""
    kept, used = [], 0
    for section in sections:
        figures, gaps = [], list(section.gaps)
        for figure in section.figures:
            size = len(encode(figure["figure"]))
            if used + size > most:
                gaps.append(
                    f"figure {figure['name']} has {size} bytes and is left out: "
                    f"GET /figures/{figure['name']} has it"
                )
                continue
            used += size
            figures.append(figure)
        kept.append(dataclasses.replace(section, figures=figures, gaps=gaps))
    return kept
