"""Findings, lost data and firings of triggers as rows in groups, and `Diagnosis`: a run's symptoms.

A NaN that persists makes one finding per rank and step. As text and as HTML these are one paragraph
with the steps and ranks, the advice, and the id for `stagescope finding ID`.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stagescope.answers import Record
from stagescope.link_text import session_call
from stagescope.table import RAISE_LIMIT, Row, Table
from stagescope_wire import render
from stagescope_wire.links import Link, LinkText, links_from_json, reworded
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render import printable, wrapped
from stagescope_wire.render_html import escaped, html_block, html_text

FINDING_ORDER: Final = ("kind", "step", "rank", "message", "stage", "severity", "role", "count")
FIRING_ORDER: Final = (
    "run", "step", "attempt", "rule", "message", "stage", "role", "rank", "round", "wall",
)  # fmt: skip
LOSS_ORDER: Final = ("step", "stage", "role", "rank", "kind", "count", "reason", "run", "attempt")
GROUP_ORDER: Final = (
    "severity", "kind", "rule", "run", "where", "message", "reason", "advice", "attempt", "stage",
    "role",
)  # fmt: skip
_ID: Final = 10
"""Characters of an id that are displayed: enough to identify it."""
_SHOWN: Final = 50


class FindingRows(Table):
    """Findings, lost data or firings, one row each; `groups` has one row per group of them.

    Text and HTML display the groups, the most severe and most specific first.

    Usage:
        >>> findings = session.findings()
        >>> findings.groups.select("severity", "kind", "where", "message")
        >>> findings.where(kind="non_finite_operator")["message"]
        >>> session.finding(findings[0]["finding_id"])     # one of them, with its evidence
    """

    __slots__ = ("_groups", "_link_text")

    _groups: Table
    _link_text: LinkText

    @classmethod
    def of_answers(
        cls, rows: Table, groups: Table, *, link_text: LinkText = session_call
    ) -> FindingRows:
        """Return the rows of a route with those of its `/groups`."""
        table = cls.from_table(rows)
        table._groups = groups
        table._link_text = link_text
        return table

    @property
    def groups(self) -> Table:
        """One row per group of alike findings; see `GET /findings/groups`."""
        return self._groups

    @property
    def heading(self) -> str:
        """The title, the run, and the number of rows and groups."""
        about = {**self._groups.about, "attempt": self.about.get("attempt")}
        grouped = int(about.get("grouped") or 0)
        groups = int(about.get("groups") or 0)
        count = f" ({grouped} in {render.counted(groups, 'group')})" if groups < grouped else ""
        return f"{super().heading}{count}"

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return a paragraph per group, as lines of at most `width` columns; nothing is cut."""
        if not len(self._groups):
            return ["(none)"]
        lines: list[str] = []
        for group in self._groups[:rows]:
            lines += self._paragraph(group, width)
        return lines + [line for note in self._notes(rows) for line in wrapped("", note, width)]

    def _paragraph(self, group: Row, width: int) -> list[str]:
        first, *more = wrapped("", self._titled(group), max(width - 4, 40))
        lines = [first, *(f"    {line}" for line in more)]
        text = group.get("message") or group.get("reason")
        if text:
            lines += wrapped("  ", str(text), width)
        for outcome in group.get("outcomes") or ():
            lines += wrapped("  => ", str(outcome), width)
        if group.get("advice"):
            lines += wrapped("  -> ", _advice(group, self._link_text), width)
        return lines

    def _titled(self, group: Row) -> str:
        # The heading names the run if one was requested.
        is_named = self._groups.about.get("run") is not None
        return _title({**group, "run": None} if is_named else group)

    def _notes(self, rows: int | None) -> list[str]:
        shown = len(self._groups[:rows])
        total = int(self._groups.about.get("groups") or len(self._groups))
        hidden = render.counted(total - shown, "more group")
        notes = [f"... {hidden}{RAISE_LIMIT}"] if total > shown else []
        if self._groups.about.get("truncated"):
            notes.append(f"only the newest {self._groups.about['grouped']} were looked at")
        if "finding_id" in self._groups.names:
            one = self._link_text(Link("findings", name="ID"))
            notes.append(f"one of them with its evidence: {one}")
        return notes

    def __repr__(self) -> str:
        return "\n".join([render.clip(self.heading, 80), *self.lines(rows=_SHOWN)])

    def _repr_html_(self) -> str:
        body = "".join(self._html_group(group) for group in self._groups[:_SHOWN])
        lines = self._notes(_SHOWN) if len(self._groups) else []
        notes = "".join(f"<div>{escaped(note)}</div>" for note in lines)
        empty = "" if len(self._groups) else "<div>(none)</div>"
        return html_block(self.heading, f"{body}{empty}{notes}")

    def _html_group(self, group: Row) -> str:
        colour = _COLOURS.get(str(group.get("severity")), "inherit")
        lines = [str(group.get("message") or group.get("reason") or "")]
        lines += [str(outcome) for outcome in group.get("outcomes") or ()]
        text = "".join(f"<div>{escaped(line)}</div>" for line in lines)
        advice = _advice(group, self._link_text) if group.get("advice") else ""
        text += f"<div><i>{escaped(advice)}</i></div>" if advice else ""
        return (
            f'<div style="border-left:3px solid {colour};padding-left:.6em;margin:.4em 0">'
            f"<b>{escaped(self._titled(group))}</b>{text}</div>"
        )


class Finding(Record):
    """One finding: what, where, since when, what to try, and its evidence."""

    __slots__ = ("_link_text",)

    def __init__(self, answer: JsonObject, *, link_text: LinkText = session_call) -> None:
        # The severity comes last: a first word `error:` reads as a failure of the command.
        title = f"finding {answer.get('finding_id')}: {answer.get('kind')}"
        severity = answer.get("severity")
        super().__init__(answer, title=f"{title} (severity {severity})" if severity else title)
        self._link_text = link_text

    def lines(self, *, width: int = 80) -> list[str]:
        """Return it as lines of at most `width` columns; nothing is cut."""
        lines = wrapped("", str(self.get("message") or ""), width)
        for name, text in self._facts():
            lines += wrapped(f"{name:<9} ", text, width)
        if self.get("advice"):
            lines += wrapped("try       ", _advice(self, self._link_text), width)
        if self.get("evidence"):
            lines.append("evidence")
            evidence = Record(self["evidence"]).lines(width=max(width - 2, 38))
            lines += [f"  {line}" for line in evidence]
        return lines

    def _facts(self) -> list[tuple[str, str]]:
        where = [f"{n} {self[n]}" for n in ("run", "attempt", "step") if self.get(n) is not None]
        rank = " rank ".join(str(self[n]) for n in ("role", "rank") if self.get(n) is not None)
        where += [text for text in (str(self.get("stage") or ""), rank) if text]
        facts = [("where", ", ".join(where))]
        times = {"first": "first_wall", "last": "last_wall", "over": "over_wall"}
        facts += [
            (label, render.format_value(self[name], "unix"))
            for label, name in times.items()
            if self.get(name) is not None and (label != "last" or self[name] != self["first_wall"])
        ]
        if (self.get("count") or 1) > 1:
            facts.append(("seen", f"{self['count']} times"))
        group = self.get("group") or {}
        if (group.get("findings") or 1) > 1:
            is_first = group["first_id"] == self["finding_id"]
            first = "this is the first" if is_first else f"the first is {group['first_id']}"
            facts.append(("alike", f"{group['findings']} findings, {group['where']}; {first}"))
        return facts


def _advice(row: Mapping[str, Any], link_text: LinkText) -> str:
    """Return the advice of a finding or of a group, with its links in the words of `link_text`."""
    return reworded(str(row["advice"]), links_from_json(row.get("see")), link_text)


def _title(group: JsonObject) -> str:
    """Return `error non_finite_operator: step 10, actor rank 1, actor_update, attempt 1`."""
    words = (group.get("severity"), group.get("rule") or group.get("kind"))
    head = " ".join(str(word) for word in words if word)
    steps, comma, ranks = str(group.get("where") or "").partition(", rank")
    role = str(group.get("role") or "")
    rank = f"{role} rank{ranks}".strip() if comma else role
    if steps.startswith("rank"):
        steps, rank = "", f"{role} {steps}".strip()
    parts = [f"run {group['run']}" if group.get("run") else "", steps, rank, group.get("stage")]
    if group.get("attempt") is not None:
        parts.append(f"attempt {group['attempt']}")
    number = group.get("findings") or group.get("firings") or group.get("count") or 1
    if number > 1:
        parts.append(f"{number} lost" if "losses" in group else f"{number} times")
    if group.get("bytes"):
        parts.append(render.format_bytes(group["bytes"]))
    if group.get("over_wall") is not None:
        parts.append("over")
    name = f"{str(group['finding_id'])[:_ID]} " if group.get("finding_id") else ""
    return f"{name}{head}: {', '.join(str(part) for part in parts if part)}"


_COLOURS: Final = {"error": "#d13438", "warning": "#b8860b"}


_OF_VERDICT: Final = {"found": "#b3372b", "not measured": "#6e7278", "not found": "#2a8048"}
_LOG: Final = re.compile(r"log it: stage\.log\((\w+)=\.\.\.\)$")
_LOGGED: Final = "log it"
_WAIT: Final = "more steps are needed"
_NOTHING: Final = "no recording would help: they need what the training has not done so far"
_SHOWN_SHARE: Final = 0.01
"""Minimum share of a part of the mismatch that is displayed without `all()`."""


class Diagnosis(Table):
    """Symptoms, one row each: causes come first, the likeliest first.

    The symptoms that a cause explains come after the causes, and symptoms that ended come last.

    Text and HTML display each cause as a paragraph with the symptoms that it explains. The
    unmeasured and the absent ones follow in short. Text counts the unmeasured symptoms by what
    would record them.

    Usage:
        >>> diagnosis = session.doctor()
        >>> diagnosis.causes[0]["sentence"]    # what is wrong, where, since when
        >>> diagnosis.causes[0]["next"][0]     # the experiment that proves it
        >>> diagnosis.about["mismatch"]        # the parts of the mismatch
        >>> diagnosis.all()                    # what was not measured, and why
    """

    __slots__ = ()

    def all(self) -> Diagnosis:
        """Return the same rows, displayed with what was not measured, and why."""
        return _FullDiagnosis.from_table(self)

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return the diagnosis as lines of at most `width` columns.

        The first line is the likeliest cause, the second one the experiment that proves it. Both
        are whole, to be read and pasted. If nothing is wrong, the first line says so.
        """
        summary = wrapped("", str(self.about.get("text") or ""), width)
        lasting = [row for row in self.causes if row["last_step"] is None]
        lines = [] if lasting else summary
        for row in lasting:
            lines += ["", *_paragraph(row, self._explained_by(row), width)]
        if lasting:
            lines = [*lines[1:], "", *summary]
        for row in self.causes:
            lines += ["", *_ended(row, width)] if row["last_step"] is not None else []
        lines += ["", *self._parts(width)]
        if notes := self.about.get("notes"):
            lines += ["", "notes for a comparison of two runs, no symptoms"]
            for note in notes:
                lines += wrapped("  ", f"{note['rule']}: {note['text']}", width)
        if unknown := self._of("not measured"):
            lines += ["", *self._not_measured(unknown, width)]
        return [line for at, line in enumerate(lines) if line or (at and lines[at - 1])]

    def _parts(self, width: int) -> list[str]:
        """Return the parts that have a share of a mismatch that is wrong."""
        if self.about.get("healthy"):
            return []
        parts = self.about.get("mismatch") or ()
        return _parts([part for part in parts if (part["share"] or 0.0) >= _SHOWN_SHARE], width)

    def _not_measured(self, rows: Sequence[Row], width: int) -> list[str]:
        """Return how many rows there are, and how many each thing to record would add."""
        counts: Counter[str] = Counter()
        scalars: dict[str, None] = {}
        for row in rows:
            record = str(row["record"] or (_WAIT if row["waits"] else _NOTHING))
            if scalar := _LOG.match(record):
                scalars[scalar[1]] = None
            counts[_LOGGED if scalar else record] += 1
        lines = [f"{len(rows)} not measured (doctor --all says why)"]
        for record, count in counts.most_common():
            text = f"log {', '.join(scalars)}" if record == _LOGGED else record
            lines += wrapped("  ", f"{text}: {render.counted(count, 'rule')}", width)
        return lines

    @property
    def found(self) -> list[Row]:
        """The symptoms that were found."""
        return self._of("found")

    @property
    def causes(self) -> list[Row]:
        """The found symptoms that no other one explains; ended ones are the last."""
        return [row for row in self.found if row["cause"] is None]

    def _body(self, cause: Row) -> list[str]:
        if cause["last_step"] is not None:
            return _ended(cause, 100)[1:]
        return _paragraph(cause, self._explained_by(cause), 100)[1:]

    def _explained_by(self, cause: Row) -> list[Row]:
        return [row for row in self.found if row["cause"] == cause["rule"]]

    def _of(self, verdict: str) -> list[Row]:
        return [row for row in self if row["verdict"] == verdict]

    @property
    def heading(self) -> str:
        """Empty: the lines begin with the first cause."""
        return ""

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        body = [f"<p>{html.escape(str(self.about.get('text') or ''))}</p>"]
        body += [
            f'<details open><summary style="color:{_OF_VERDICT["found"]}"><b>'
            f"{html.escape(str(row['sentence']))}</b></summary>"
            + html_text("\n".join(self._body(row)))
            + "</details>"
            for row in self.causes
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
                f'<details><summary style="color:{_OF_VERDICT[verdict]}">{len(rows)} {verdict}'
                f"</summary><ul>{items}</ul></details>"
            )
        return html_block(super().heading, "".join(body))


class _FullDiagnosis(Diagnosis):
    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        lines = super().lines(width=width, rows=rows)
        names = ", ".join(str(row["rule"]) for row in self._of("not found"))
        return [*lines, "", *wrapped("", f"not found: {names}", width)] if names else lines

    def _parts(self, width: int) -> list[str]:
        return _parts(self.about.get("mismatch") or (), width)

    def _not_measured(self, rows: Sequence[Row], width: int) -> list[str]:
        lines = ["not measured"]
        for row in rows:
            lines += wrapped("  ", f"{row['rule']}: {'; '.join(row['against'])}", width)
            if advice := row["record"] or (row["waits"] and _WAIT):
                lines += wrapped("    -> ", str(advice), width)
        return lines


def _ended(cause: Row, width: int) -> list[str]:
    """Return a cause that ended, and why it is known to have ended."""
    texts = (line for text in cause["against"] for line in wrapped("  - ", text, width))
    return [printable(f"Ended: {cause['sentence']}"), *texts]


def _paragraph(cause: Row, explained: Sequence[Row], width: int) -> list[str]:
    """Return a cause, the experiment that proves it, its evidence, and what it explains."""
    lines = [printable(str(cause["sentence"]))]
    proof, *rest = cause["next"] or [""]
    is_command = str(proof).startswith("stagescope ")
    lines += [printable(f"  prove it: {proof}")] if is_command else []  # on one line, to be pasted
    for mark, texts in (("+ ", cause["for"]), ("- ", cause["against"])):
        for text in texts:
            lines += wrapped(f"  {mark}", str(text), width)
    lines += wrapped("  ", str(cause["meaning"]), width)
    for step in rest if is_command else cause["next"]:
        command, mark, comment = str(step).partition("  # ")
        if command.startswith("stagescope "):
            lines.append(printable(f"  -> {command}"))
            lines += wrapped("     # ", comment, width) if mark else []
        else:
            lines += wrapped("  -> ", str(step), width)
    if explained:
        lines.append(f"  it explains {render.counted(len(explained), 'symptom')}:")
        for row in explained:
            lines += wrapped("  * ", _explained(row), width)
    return lines


def _explained(row: Row) -> str:
    """Return the sentence of an explained symptom; without a first step its evidence follows."""
    evidence = row["for"] if row["since_step"] is None else ()
    return f"{row['sentence']}: {evidence[0]}" if evidence else str(row["sentence"])


def _parts(parts: Sequence[Row], width: int) -> list[str]:
    if not parts:
        return []
    lines = ["the mismatch of the newest measured step by its parts"]
    for part in parts:
        share = "   -" if part["share"] is None else f"{part['share']:4.0%}"
        mark = "" if part["counted"] or part["name"] == "unexplained" else " (overlaps the others)"
        lines += wrapped("  ", f"{share}  {part['name']}: {part['text']}{mark}", width)
    return lines
