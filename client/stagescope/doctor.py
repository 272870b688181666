"""`Diagnosis`: the symptoms of a run with the evidence for and against them."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from stagescope import render
from stagescope.render import printable, wrapped
from stagescope.table import Row, Table

_COLOURS: Final = {"found": "#b3372b", "not measured": "#6e7278", "not found": "#2a8048"}
_LOG: Final = re.compile(r"log it: stage\.log\((\w+)=\.\.\.\)$")
_LOGGED: Final = "log it"


class Diagnosis(Table):
    """Symptoms, one row each: what was found first, the surest first.

    What another symptom explains comes after it, what ended comes last.

    Text and HTML display what was found as paragraphs; what was not measured and what was not found
    follow in short. Text counts what was not measured by what would record it.

    Usage:
        >>> diagnosis = session.doctor()
        >>> diagnosis.where(verdict="found")["title"]
        >>> diagnosis.about["mismatch"]        # the mismatch taken apart
        >>> diagnosis.all()                    # what was not measured, and why
    """

    __slots__ = ()

    def all(self) -> Diagnosis:
        """Return the same rows, displayed with what was not measured, and why."""
        return _FullDiagnosis.from_table(self)

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return the diagnosis as lines of at most `width` columns; of what was found nothing is
        cut."""
        lines = wrapped("", str(self.about.get("text") or ""), width)
        for row in self.found:
            lines += ["", *_paragraph(row, width)]
        lines += ["", *_parts(self.about.get("mismatch") or (), width)]
        if notes := self.about.get("notes"):
            lines += ["", "notes for a comparison of two runs, no symptoms"]
            for note in notes:
                lines += wrapped("  ", f"{note['rule']}: {note['text']}", width)
        if unknown := self._of("not measured"):
            lines += ["", *self._not_measured(unknown, width)]
        if healthy := self._of("not found"):
            names = ", ".join(str(row["rule"]) for row in healthy)
            lines += ["", *wrapped("", f"not found: {names}", width)]
        return [line for at, line in enumerate(lines) if line or (at and lines[at - 1])]

    def _not_measured(self, rows: Sequence[Row], width: int) -> list[str]:
        """Return how many rows there are, and how many each thing to record would add."""
        counts: Counter[str] = Counter()
        scalars: dict[str, None] = {}
        for row in rows:
            record = str(row["record"] or "more steps, or nothing that can be recorded")
            if scalar := _LOG.match(record):
                scalars[scalar[1]] = None
            counts[_LOGGED if scalar else record] += 1
        lines = [f"{len(rows)} not measured (doctor --all says why)"]
        for record, count in counts.most_common():
            text = f"log {', '.join(scalars)}" if record == _LOGGED else record
            tail = f": {render.counted(count, 'rule')}"
            lines.append(f"  {render.clip(text, max(width - 2 - len(tail), 20))}{tail}")
        return lines

    @property
    def found(self) -> list[Row]:
        """The symptoms that were found."""
        return self._of("found")

    def _of(self, verdict: str) -> list[Row]:
        return [row for row in self if row["verdict"] == verdict]

    def __repr__(self) -> str:
        return "\n".join([render.clip(self.heading, 80), *self.lines()])

    def _repr_html_(self) -> str:
        body = [f"<p>{html.escape(str(self.about.get('text') or ''))}</p>"]
        body += [
            f'<details open><summary style="color:{_COLOURS["found"]}"><b>'
            f"{html.escape(_title(row))}</b></summary>"
            + render.html_text("\n".join(_paragraph(row, 100)[1:]))
            + "</details>"
            for row in self.found
        ]
        for verdict in ("not measured", "not found"):
            rows = self._of(verdict)
            if not rows:
                continue
            items = "".join(
                f"<li>{html.escape(str(row['title']))}: {html.escape('; '.join(row['against']))}"
                + (f" &rarr; {html.escape(str(row['record']))}" if row["record"] else "")
                + "</li>"
                for row in rows
            )
            body.append(
                f'<details><summary style="color:{_COLOURS[verdict]}">{len(rows)} {verdict}'
                f"</summary><ul>{items}</ul></details>"
            )
        return render.html_block(self.heading, "".join(body))


class _FullDiagnosis(Diagnosis):
    __slots__ = ()

    def _not_measured(self, rows: Sequence[Row], width: int) -> list[str]:
        lines = ["not measured"]
        for row in rows:
            lines += wrapped("  ", f"{row['rule']}: {'; '.join(row['against'])}", width)
            if row["record"]:
                lines += wrapped("    -> ", str(row["record"]), width)
        return lines


def _title(row: Row) -> str:
    since = "" if row["since_step"] is None else f", since step {row['since_step']}"
    if row.get("last_step") is not None:  # a service of an earlier release has none
        since += f", last seen in step {row['last_step']}"
    where = f", {row['where']}" if row["where"] else ""
    return f"{row['title']}{since}{where} ({row['sure']:.0%} sure)"


def _paragraph(row: Row, width: int) -> list[str]:
    first, *more = wrapped("", _title(row), max(width - 4, 40))
    lines = [first, *(f"    {line}" for line in more)]
    for mark, texts in (("+ ", row["for"]), ("- ", row["against"])):
        for text in texts:
            lines += wrapped(f"  {mark}", str(text), width)
    lines += wrapped("  ", str(row["meaning"]), width)
    for step in row["next"]:
        command, mark, comment = str(step).partition("  # ")
        if command.startswith("stagescope "):  # on one line, to be pasted
            lines.append(printable(f"  -> {command}"))
            lines += wrapped("     # ", comment, width) if mark else []
        else:
            lines += wrapped("  -> ", str(step), width)
    return lines


def _parts(parts: Sequence[Row], width: int) -> list[str]:
    if not parts:
        return []
    lines = ["the mismatch of the newest measured step, taken apart"]
    for part in parts:
        share = "   -" if part["share"] is None else f"{part['share']:4.0%}"
        mark = "" if part["counted"] or part["name"] == "unexplained" else " (overlaps the others)"
        lines += wrapped("  ", f"{share}  {part['name']}: {part['text']}{mark}", width)
    return lines
