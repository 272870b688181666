"""A report as one HTML file, without network access, and as Markdown; all text escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from stagescope.render import format_share, format_value, printable, unit_of
from stagescope_service.api.encoding import parse_nonfinite
from stagescope_service.api.report.parts import (
    Report,
    ReportItem,
    ReportSection,
    ReportTable,
    ReportVerdict,
    short,
)
from stagescope_service.compare.report.html import PageFigures, as_page, html_table
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


# --- HTML -----------------------------------------------------------------------------------
def as_html(report: Report) -> str:
    """Return a report as a page that opens without network access."""
    figures = PageFigures()
    body = "\n".join(_page(report, figures))
    return as_page(f"stagescope: {report.title}", f"<main>{body}</main>", figures)


def _page(report: Report, figures: PageFigures) -> Iterator[str]:
    yield f"<h1>{_text(report.title)}</h1>"
    made = format_value(report.made_wall, "unix")
    yield f"<p>Made by stagescope {_text(report.version)} at {made}.</p>"
    heads = ("verdict", "what", "says")
    rows = [[_badge(each), _text(each.name), _text(each.text)] for each in report.verdicts]
    yield html_table(heads, rows, "narrow")
    links = " · ".join(
        f'<a href="#{_text(each.name)}">{_text(each.title)}</a>' for each in report.sections
    )
    yield f'<nav aria-label="Sections"><p>{links}</p></nav>'
    for section in report.sections:
        yield f'<section id="{_text(section.name)}" aria-label="{_text(section.title)}">'
        yield from _section(section, figures)
        yield "</section>"


def _section(section: ReportSection, figures: PageFigures) -> Iterator[str]:
    yield f"<h2>{_text(section.title)}</h2>"
    yield from (f"<p>{_text(text)}</p>" for text in section.texts)
    for item in section.items:
        lines = "".join(f"<li>{_line(text)}</li>" for text in item.lines)
        yield f"<details open><summary><b>{_text(item.title)}</b></summary>"
        yield f"<ul>{lines}</ul></details>"
    if section.table is not None:
        yield f"<h3>{_text(section.table.title)}</h3>" if section.table.title else ""
        yield _html_rows(section.table)
    for figure in section.figures:
        yield figures.add_answer(figure)
        if figure["note"]:
            yield f"<p>{_text(figure['note'])}</p>"
    if section.gaps:
        lines = "".join(f"<li>{_text(text)}</li>" for text in section.gaps)
        is_open = " open" if len(section.gaps) <= _OPEN_GAPS else ""
        yield f'<details class="box"{is_open}>'
        yield f"<summary><b>Missing: {len(section.gaps)}</b></summary>"
        yield f"<ul>{lines}</ul></details>"


def _html_rows(table: ReportTable) -> str:
    numeric = [at for at, name in enumerate(table.columns) if _is_numeric(table, name)]
    rows = [[_text(_cell(name, row.get(name))) for name in table.columns] for row in table.rows]
    more = f"<p>and {table.more} more</p>" if table.more else ""
    return html_table([_head(name) for name in table.columns], rows, "narrow", numeric) + more


def _line(text: str) -> str:
    """Return a line of an item; what is to be done stands out."""
    return f"<code>{_text(text[3:])}</code>" if _is_command(text) else _text(text)


def _is_command(text: str) -> bool:
    return text.startswith("-> stagescope ")


def _badge(verdict: ReportVerdict) -> str:
    colour = _COLOURS[verdict.bad]
    return f'<span class="verdict" style="background:{colour}">{_text(verdict.verdict)}</span>'


def _text(value: object) -> str:
    return html.escape(printable(str(value)))


# --- Markdown -------------------------------------------------------------------------------
_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>#|~!&@$])")


def as_markdown(report: Report) -> str:
    """Return a report as Markdown for a pull request: verdicts, tables and what to do."""
    return "\n".join(_document(report)) + "\n"


def _document(report: Report) -> Iterator[str]:
    yield f"## stagescope: {_plain(report.title)}"
    yield ""
    rows = [
        (f"{_MARKS[each.bad]} {_plain(each.verdict)}", _plain(each.name), _plain(each.text))
        for each in report.verdicts
    ]
    yield from _markdown_table(("verdict", "what", "says"), rows)
    for section in report.sections:
        yield from _markdown_section(section)
    made = format_value(report.made_wall, "unix")
    yield f"<sub>stagescope {_plain(report.version)}, {made}</sub>"


def _markdown_section(section: ReportSection) -> Iterator[str]:
    if section.table is None and not section.items and not section.texts and not section.gaps:
        return  # it has figures alone
    yield f"### {_plain(section.title)}"
    yield ""
    for text in section.texts:
        yield _plain(text)
        yield ""
    for item in section.items:
        yield from _markdown_item(item)
    if section.items:
        yield ""
    if section.table is not None:
        if section.table.title:
            yield f"**{_plain(section.table.title)}**"
            yield ""
        names = section.table.columns
        shown = section.table.rows[:_MARKDOWN_ROWS]
        cells = [[_plain(_cell(name, row.get(name))) for name in names] for row in shown]
        yield from _markdown_table([_plain(_head(name)) for name in names], cells)
        if more := section.table.more + len(section.table.rows) - len(shown):
            yield f"and {more} more"
            yield ""
    yield from (f"* missing: {_plain(text)}" for text in section.gaps[:_MARKDOWN_GAPS])
    if (more := len(section.gaps) - _MARKDOWN_GAPS) > 0:
        yield f"* and {more} more are missing"
    if section.gaps:
        yield ""


def _markdown_item(item: ReportItem) -> Iterator[str]:
    yield f"* **{_plain(item.title)}**"
    facts = [text for text in item.lines if not text.startswith("-> ")]
    commands = [text[3:] for text in item.lines if text.startswith("-> ")]
    for text in facts[:_MARKDOWN_LINES]:
        yield f"  * {_plain(text)}"
    for text in commands[:_MARKDOWN_LINES]:
        yield f"  * → {_code(text) if text.startswith('stagescope ') else _plain(text)}"


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def _code(text: str) -> str:
    """Return text as code, which no markup ends."""
    return f"`{printable(' '.join(text.split())).replace('`', chr(39))}`"


def _plain(value: object) -> str:
    """Return text that Markdown shows as it is, on one line: no markup, no link, no mention."""
    text = _SPECIAL.sub(r"\\\1", printable(" ".join(str(value).split())))
    # A text that begins with these would begin a list, a rule or a heading.
    return re.sub(r"^([-+]|\d+[.)])(\s|$)", r"\\\1\2", text)


# --- values ---------------------------------------------------------------------------------
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


def _head(name: str) -> str:
    """Return the title of a column."""
    return name.replace("_", " ")


def _is_numeric(table: ReportTable, name: str) -> bool:
    values = [row.get(name) for row in table.rows]
    numbers = [
        isinstance(parse_nonfinite(value), int | float) and not isinstance(value, bool)
        for value in values if value is not None
    ]  # fmt: skip
    return bool(numbers) and all(numbers) and unit_of(name) != "unix"
