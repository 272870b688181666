"""Answers about triggers: the rules in force, and what rules would have fired."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypedDict

from stagescope import render
from stagescope.table import Row, Table
from stagescope.wire.nonfinite import JsonObject

_RULE_ORDER: Final = ("name", "metric", "when", "fired", "last_step", "last_value", "actions")
_TEST_ORDER: Final = (
    "step", "attempt", "rule", "value", "stage", "role", "rank", "round", "fired_live",
)  # fmt: skip
_DETAILS: Final = ("message", "evidence")
_SHOWN_STEPS: Final = 20


class _Amounts(TypedDict):
    """Captures, bytes and share of the time; None: without limit."""

    captures: int
    bytes: int | None
    share: float | None


class _Budget(TypedDict):
    run: str
    budget: _Amounts
    spent: _Amounts
    refusal: str | None


class Triggers(Table):
    """The rules in force, one row each: the metric and its bounds, and the last firing.

    `about` holds the `revision`, its author, and as in the answer `rules`, `runs`, `budgets` (of
    the runs that rules may capture) and `pinned` (steps whose payloads are kept). A webhook's URL
    is not shown: rules that have one are set again from the document that they came in.

    Usage:
        >>> triggers = session.triggers()
        >>> triggers.about["budgets"]
        >>> document = {"rules": [*triggers.about["rules"], {...}], "runs": triggers.about["runs"]}
        >>> session.set_triggers(document)
    """

    __slots__ = ()

    @classmethod
    def of_answer(cls, answer: JsonObject) -> Triggers:
        """Return the triggers in an answer of `GET /triggers`."""
        rows = [_rule_row(rule) for rule in answer["rules"]]
        rules = [{n: v for n, v in rule.items() if n not in _STATE} for rule in answer["rules"]]
        title = f"triggers, revision {answer['revision']} by {answer['by'] or 'nobody'}"
        about = {**answer, "rules": rules}
        return cls.from_table(Table.from_rows(rows, order=_RULE_ORDER, title=title, about=about))

    def _foot(self, rows: int | None) -> list[str]:
        foot = super()._foot(rows)
        foot += [_budget_line(budget) for budget in self.about.get("budgets") or ()]
        if not self.about.get("budgets"):
            patterns = ", ".join(self.about.get("runs") or ())
            foot.append(
                render.printable(f"no run here may be captured unasked; those that may: {patterns}")
                if patterns
                else "no run may be captured unasked"
            )
        pinned = self.about.get("pinned") or ()
        if pinned:
            steps = ", ".join(
                f"{row['run']}@{row['attempt']}:{row['step']}" for row in pinned[:_SHOWN_STEPS]
            )
            more = "" if len(pinned) <= _SHOWN_STEPS else f" and {len(pinned) - _SHOWN_STEPS} more"
            foot.append(render.printable(f"pinned steps: {steps}{more}"))
        foot += [render.printable(f"note: {note}") for note in self.about.get("notes") or ()]
        return foot


_STATE: Final = ("fired", "last_fired")


def dry_run(answer: JsonObject) -> Table:
    """Return the firings in an answer of `POST /triggers/test`."""
    rows = answer["rows"]
    steps = f"{answer['steps']} stored steps"  # `context` names their run
    times = f"{len(rows)} time{'s' if len(rows) > 1 else ''}"
    title = (
        f"would have fired {times} in {steps}" if rows else f"nothing would have fired in {steps}"
    )
    about = {name: value for name, value in answer.items() if name != "rows"}
    # Messages and evidence are long: they are the last columns, which a narrow terminal leaves out.
    rows = [
        {**{n: v for n, v in row.items() if n not in _DETAILS}, **{n: row[n] for n in _DETAILS}}
        for row in rows
    ]
    return Table.from_rows(rows, order=_TEST_ORDER, title=title, about=about)


def _rule_row(rule: JsonObject) -> Row:
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


def _bound(bound: object) -> str:
    if isinstance(bound, Mapping):
        return " ".join(f"{name} {value}" for name, value in bound.items())
    return render.format_value(bound)


def _budget_line(row: _Budget) -> str:
    budget, spent = row["budget"], row["spent"]
    parts = [f"{spent['captures']} of {budget['captures']} captures"]
    if budget["bytes"] is not None:
        parts.append(f"{spent['bytes']} of {budget['bytes']} bytes")
    if budget["share"] is not None:
        parts.append(f"{spent['share']:.2%} of {budget['share']:.2%} of the time")
    line = f"run {row['run']} may be captured: {', '.join(parts)}"
    return render.printable(line + (f"; no more: {row['refusal']}" if row["refusal"] else ""))
