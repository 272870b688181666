"""Answers about triggers: the rules in force, what fired, and what would have fired."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stagescope import render
from stagescope.frames import Table

_RULE_ORDER: Final = ("name", "metric", "when", "fired", "last_step", "last_value", "actions")
_TEST_ORDER: Final = ("step", "rule", "value", "stage", "role", "rank", "round", "fired_live")
_DETAILS: Final = ("message", "evidence")
_SHOWN_STEPS: Final = 20


class Triggers(Table):
    """The rules in force, a row each: what it looks at, and when it fired last.

    `about` holds the `revision`, who gave it, and as the service said them `rules`, `runs`,
    `budgets` (of the runs that may be captured unasked) and `pinned` (steps whose payloads stay).

    Usage:
        >>> triggers = session.triggers()
        >>> triggers.about["budgets"]
        >>> document = {"rules": [*triggers.about["rules"], {...}], "runs": triggers.about["runs"]}
        >>> session.set_triggers(document)
    """

    __slots__ = ()

    @classmethod
    def of_answer(cls, answer: Mapping[str, Any]) -> Triggers:
        """Return what `GET /triggers` answered."""
        given = answer["rules"]
        rows = [_rule_row(rule) for rule in given]
        plain = [{n: v for n, v in rule.items() if n not in _STATE} for rule in given]
        title = f"triggers, revision {answer['revision']} by {answer['by'] or 'nobody'}"
        about = {**answer, "rules": plain}
        found = cls.from_rows(rows, order=_RULE_ORDER, title=title, about=about)
        assert isinstance(found, Triggers)
        return found

    def _foot(self, rows: int | None) -> list[str]:
        foot = super()._foot(rows)
        foot += [_budget_line(budget) for budget in self.about.get("budgets") or ()]
        if not self.about.get("budgets"):
            foot.append("no run may be captured unasked")
        pinned = self.about.get("pinned") or ()
        if pinned:
            named = ", ".join(f"{row['run']} {row['step']}" for row in pinned[:_SHOWN_STEPS])
            more = "" if len(pinned) <= _SHOWN_STEPS else f" and {len(pinned) - _SHOWN_STEPS} more"
            foot.append(render.printable(f"pinned steps: {named}{more}"))
        return foot


_STATE: Final = ("fired", "last_fired")


def dry_run(answer: Mapping[str, Any]) -> Table:
    """Return what `POST /triggers/test` answered."""
    rows = answer["rows"]
    steps = f"{answer['steps']} stored steps of run {answer['run']}"
    times = f"{len(rows)} time{'s' if len(rows) > 1 else ''}"
    title = (
        f"would have fired {times} in {steps}" if rows else f"nothing would have fired in {steps}"
    )
    about = {name: value for name, value in answer.items() if name != "rows"}
    # The words and numbers of each are long: they come last, and a narrow terminal leaves them out.
    ordered = [
        {**{n: v for n, v in row.items() if n not in _DETAILS}, **{n: row[n] for n in _DETAILS}}
        for row in rows
    ]
    return Table.from_rows(ordered, order=_TEST_ORDER, title=title, about=about)


def _rule_row(rule: Mapping[str, Any]) -> dict[str, Any]:
    last = rule["last_fired"] or {}
    when = [f"{name} {_bound(bound)}" for name, bound in rule["when"].items()]
    if rule["for"] > 1:
        when.append(f"for {rule['for']} steps")
    if rule["by"] != "whole":
        when.append(f"by {rule['by']}")
    return {
        "name": rule["name"],
        "metric": rule["metric"],
        "when": ", ".join(when),
        "fired": rule["fired"],
        "last_step": last.get("step"),
        "last_value": (last.get("evidence") or {}).get("value"),
        "last_run": last.get("run"),
        "actions": ", ".join(rule["actions"]),
        "cooldown": rule["cooldown"],
    }


def _bound(bound: Any) -> str:
    if isinstance(bound, Mapping):
        return " ".join(f"{name} {value}" for name, value in bound.items())
    return render.format_value(bound)


def _budget_line(said: Mapping[str, Any]) -> str:
    budget, spent = said["budget"], said["spent"]
    parts = [f"{spent['captures']} of {budget['captures']} captures"]
    if budget["bytes"] is not None:
        parts.append(f"{spent['bytes']} of {budget['bytes']} bytes")
    if budget["share"] is not None:
        parts.append(f"{spent['share']:.2%} of {budget['share']:.2%} of the time")
    line = f"run {said['run']} may be captured: {', '.join(parts)}"
    return render.printable(line + (f"; no more: {said['refusal']}" if said["refusal"] else ""))
