"""What the service noticed, what was lost and what fired: rows, shown by what they say.

A NaN that lasts makes a finding a rank and step; as text and as HTML it is one paragraph, with its
steps and ranks, its advice and the id by which `stagescope finding ID` shows it whole.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any, Final

from stagescope import render
from stagescope.answers import Record
from stagescope.frames import Table
from stagescope.render import wrapped

FINDING_ORDER: Final = ("kind", "step", "rank", "message", "stage", "severity", "role", "count")
FIRING_ORDER: Final = ("run", "step", "rule", "message", "stage", "role", "rank", "round", "wall")
LOSS_ORDER: Final = ("step", "stage", "role", "rank", "kind", "count", "reason", "run", "attempt")
GROUP_ORDER: Final = (
    "severity", "kind", "rule", "run", "where", "message", "reason", "advice", "attempt", "stage",
    "role",
)  # fmt: skip
_ID: Final = 10
"""Characters of an id that are shown: enough to name it."""
_SHOWN: Final = 50

Say = Callable[[str], str]


class FindingRows(Table):
    """Findings, losses or firings: a row each; `groups` holds a row for what lasts.

    Text and HTML show the groups, the most severe and most specific first.

    Usage:
        >>> findings = session.findings()
        >>> findings.groups.select("severity", "kind", "where", "message")
        >>> findings.where(kind="non_finite_operator")["message"]
        >>> session.finding(findings[0]["finding_id"])     # one whole, with its evidence
    """

    __slots__ = ("_groups", "_say")

    _groups: Table
    _say: Say

    @classmethod
    def of_answers(cls, rows: Table, groups: Table) -> FindingRows:
        """Return the rows of a list, shown by the rows of its `/groups`."""
        found = cls.of(rows)
        found._groups = groups
        found._say = str
        return found

    @property
    def groups(self) -> Table:
        """One row for what lasts over steps and ranks; see `GET /findings/groups`."""
        return self._groups

    def saying(self, say: Say) -> FindingRows:
        """Return the same, its advice in other words (the command line's)."""
        found = self.of_answers(self, self._groups)
        found._say = say
        return found

    @property
    def heading(self) -> str:
        """What they are, of which run, and how many."""
        about = {**self._groups.about, "attempt": self.about.get("attempt")}
        found = int(about.get("grouped") or 0)
        groups = int(about.get("groups") or 0)
        count = f" ({found} in {render.counted(groups, 'group')})" if groups < found else ""
        return f"{super().heading}{count}"

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return a paragraph a group, as lines of at most `width` columns; nothing is cut."""
        if not len(self._groups):
            return ["(none)"]
        lines: list[str] = []
        for group in self._groups[: _SHOWN if rows is None else rows]:
            lines += self._paragraph(group, width)
        return lines + [line for note in self._notes(rows) for line in wrapped("", note, width)]

    def _paragraph(self, group: Mapping[str, Any], width: int) -> list[str]:
        first, *more = wrapped("", self._titled(group), max(width - 4, 40))
        lines = [first, *(f"    {line}" for line in more)]
        text = group.get("message") or group.get("reason")
        if text:
            lines += wrapped("  ", str(text), width)
        for outcome in group.get("outcomes") or ():
            lines += wrapped("  => ", str(outcome), width)
        if group.get("advice"):
            lines += wrapped("  -> ", self._say(str(group["advice"])), width)
        return lines

    def _titled(self, group: Mapping[str, Any]) -> str:
        # The heading names the run, where one was asked for.
        several = self._groups.about.get("run") is None
        return _title(group, str(group["run"]) if several and group.get("run") else "")

    def _notes(self, rows: int | None) -> list[str]:
        shown = min(len(self._groups), _SHOWN if rows is None else rows)
        total = int(self._groups.about.get("groups") or len(self._groups))
        notes = [f"... {total - shown} more groups (see limit)"] if total > shown else []
        if self._groups.about.get("truncated"):
            notes.append(f"only the newest {self._groups.about['grouped']} were looked at")
        if "finding_id" in self._groups.names:
            notes.append("one whole, with its evidence: stagescope finding ID")
        return notes

    def __repr__(self) -> str:
        return "\n".join([render.clip(self.heading, 80), *self.lines()])

    def _repr_html_(self) -> str:
        body = "".join(_html_group(group, self._titled(group)) for group in self._groups[:_SHOWN])
        said = self._notes(None) if len(self._groups) else []
        notes = "".join(f"<div>{_escaped(note)}</div>" for note in said)
        empty = "" if len(self._groups) else "<div>(none)</div>"
        return render.html_block(self.heading, f"{body}{empty}{notes}")


class Finding(Record):
    """One finding whole: what, where, since when, what to try, and its evidence."""

    __slots__ = ("_say",)

    def __init__(self, answer: Mapping[str, Any], *, say: Say = str) -> None:
        severity, kind = answer.get("severity") or "finding", answer.get("kind")
        super().__init__(answer, title=f"{severity}: {kind} ({answer.get('finding_id')})")
        self._say = say

    def saying(self, say: Say) -> Finding:
        """Return the same, its advice in other words (the command line's)."""
        return Finding(self, say=say)

    def lines(self, *, width: int = 80) -> list[str]:
        """Return it as lines of at most `width` columns; nothing is cut."""
        lines = wrapped("", str(self.get("message") or ""), width)
        for name, text in self._facts():
            lines += wrapped(f"{name:<9} ", text, width)
        if self.get("advice"):
            lines += wrapped("try       ", self._say(str(self["advice"])), width)
        if self.get("evidence"):
            lines.append("evidence")
            evidence = Record(self["evidence"]).lines(width=max(width - 2, 38))
            lines += [f"  {line}" for line in evidence]
        return lines

    def _facts(self) -> list[tuple[str, str]]:
        place = [f"{n} {self[n]}" for n in ("run", "attempt", "step") if self.get(n) is not None]
        who = " rank ".join(str(self[n]) for n in ("role", "rank") if self.get(n) is not None)
        place += [text for text in (str(self.get("stage") or ""), who) if text]
        facts = [("where", ", ".join(place))]
        times = {"first": "first_wall", "last": "last_wall", "over": "over_wall"}
        facts += [
            (word, render.format_value(self[name], "unix"))
            for word, name in times.items()
            if self.get(name) is not None and (word != "last" or self[name] != self["first_wall"])
        ]
        if (self.get("count") or 1) > 1:
            facts.append(("seen", f"{self['count']} times"))
        group = self.get("group") or {}
        if (group.get("findings") or 1) > 1:
            own = group["first_id"] == self["finding_id"]
            first = "this is the first" if own else f"the first is {group['first_id']}"
            facts.append(("alike", f"{group['findings']} findings, {group['where']}; {first}"))
        return facts


def _title(group: Mapping[str, Any], run: str) -> str:
    """Return `error non_finite_operator: step 10, actor rank 1, actor_update, attempt 1`.

    Args:
        group: a row of groups.
        run: named first, where several are listed; else empty.
    """
    head = " ".join(
        str(word)
        for word in (group.get("severity"), group.get("rule") or group.get("kind"))
        if word
    )
    steps, comma, ranks = str(group.get("where") or "").partition(", rank")
    role = str(group.get("role") or "")
    who = f"{role} rank{ranks}".strip() if comma else role
    if steps.startswith("rank"):
        steps, who = "", f"{role} {steps}".strip()
    words = [f"run {run}" if run else "", steps, who, group.get("stage")]
    if group.get("attempt") is not None:
        words.append(f"attempt {group['attempt']}")
    number = group.get("findings") or group.get("firings") or group.get("count") or 1
    if number > 1:
        words.append(f"{number} lost" if "losses" in group else f"{number} times")
    if group.get("bytes"):
        words.append(render.format_bytes(group["bytes"]))
    if group.get("over_wall") is not None:
        words.append("over")
    name = f"{str(group['finding_id'])[:_ID]} " if group.get("finding_id") else ""
    return f"{name}{head}: {', '.join(str(word) for word in words if word)}"


_COLOURS: Final = {"error": "#d13438", "warning": "#b8860b"}


def _html_group(group: Mapping[str, Any], title: str) -> str:
    colour = _COLOURS.get(str(group.get("severity")), "inherit")
    text = group.get("message") or group.get("reason") or ""
    done = "".join(f"<div>{_escaped(str(each))}</div>" for each in group.get("outcomes") or ())
    advice = f"<div><i>{_escaped(str(group['advice']))}</i></div>" if group.get("advice") else ""
    return (
        f'<div style="border-left:3px solid {colour};padding-left:.6em;margin:.4em 0">'
        f"<b>{_escaped(title)}</b><div>{_escaped(str(text))}</div>{done}{advice}</div>"
    )


def _escaped(text: str) -> str:
    return html.escape(render.printable(text))
