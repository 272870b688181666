"""The methods of `Session` that change a live run: captures, triggers and pinned steps.

`Triggers` are the rules that are active, and `dry_run` shows what rules would have fired.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal
from urllib.parse import urlencode

from stagescope.answers import Record
from stagescope.connection import LIMIT, Connection, OptInt, OptStr, segment, step_segment
from stagescope.findings import FIRING_ORDER, FindingRows
from stagescope.progress import CaptureProgress, RequestedCapture
from stagescope.table import Row, Table
from stagescope.transport import given
from stagescope_wire import render
from stagescope_wire.nonfinite import Json, JsonObject

_RULE_ORDER: Final = ("name", "metric", "when", "fired", "last_step", "last_value", "actions")
_TEST_ORDER: Final = (
    "step", "attempt", "rule", "value", "stage", "role", "rank", "round", "fired_live",
)  # fmt: skip
_DETAILS: Final = ("message", "evidence")
_SHOWN_STEPS: Final = 20


class Triggers(Table):
    """The active rules, one row each: the metric and its bounds, and the last firing.

    `about` holds the `revision`, its author, `rules`, `runs`, `budgets` (of the runs that rules may
    capture) and `pinned` (steps whose payloads are kept). It does not show a webhook's URL: to set
    a rule with a webhook again, use your own document.

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
            only = f", because none matches {patterns}" if patterns else ""
            foot.append(render.printable(f"rules may capture none of the known runs{only}"))
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
    fired = f"would have fired {render.counted(len(rows), 'time')}"
    # `context` names the run of the steps.
    title = f"{fired if rows else 'nothing would have fired'} in {answer['steps']} stored steps"
    about = {name: value for name, value in answer.items() if name != "rows"}
    # Messages and evidence are long: they are the last columns, which a narrow terminal leaves out.
    rows = [{n: row[n] for n in sorted(row, key=lambda name: name in _DETAILS)} for row in rows]
    return Table.from_rows(rows, order=_TEST_ORDER, title=title, about=about)


def _rule_row(rule: JsonObject) -> Row:
    last = rule["last_fired"] or {}
    when = [f"{name} {_bound(bound)}" for name, bound in rule["when"].items()]
    if rule["for"] > 1:
        when.append(f"for {rule['for']} steps")
    if rule["by"] != "whole":
        when.append(f"by {rule['by']}")
    return {
        "name": rule["name"], "metric": rule["metric"], "when": ", ".join(when),
        "fired": rule["fired"], "last_step": last.get("step"),
        "last_value": (last.get("evidence") or {}).get("value"), "last_run": last.get("run"),
        "actions": ", ".join(rule["actions"]), "cooldown": rule["cooldown"],
    }  # fmt: skip


def _bound(bound: object) -> str:
    if isinstance(bound, Mapping):
        return " ".join(f"{name} {value}" for name, value in bound.items())
    return render.format_value(bound)


def _budget_line(row: JsonObject) -> str:
    budget, spent = row["budget"], row["spent"]
    parts = [f"{spent['captures']} of {render.counted(budget['captures'], 'capture')}"]
    if budget["bytes"] is not None:
        parts.append(f"{spent['bytes']} of {budget['bytes']} bytes")
    if budget["share"] is not None:
        parts.append(f"{spent['share']:.2%} of {budget['share']:.2%} of the time")
    line = f"run {row['run']} may be captured: {', '.join(parts)}"
    return render.printable(line + (f"; no more: {row['refusal']}" if row["refusal"] else ""))


_POLL_INTERVAL: Final = 0.5
"""Seconds between two requests for the progress of a capture."""
UNKNOWN_SECONDS: Final = 60.0
"""How long `wait_for` waits for ranks that never reported: the run's name may be misspelt."""
_READING_SECONDS: Final = 30.0
"""How long `wait_for` waits for the service to read the dumps of a capture that has ended."""
_PLAN_ORDER: Final = (
    "capture_id", "state", "attempt", "start", "run", "steps", "stages", "ranks", "roles", "by",
    "created",
)  # fmt: skip

_REQUESTED: Final = ("steps", "stages", "ranks", "roles")


class CaptureRequests(Connection):
    """Captures, triggers and pinned steps; most methods need the operate token."""

    def plan(self, run: str | None = None) -> Table:
        """Return the active captures, or with `run` those that apply to that run.

        `about["revision"]` is the plan's revision.
        """
        answer = self.get("/plan")
        captures = answer.get("captures") or []
        if run is not None:
            captures = [capture for capture in captures if capture.get("run") in (None, run)]
        rows = [
            {**capture, "start": (capture.get("agreement") or {}).get("start")}
            for capture in captures
        ]
        about = {name: value for name, value in answer.items() if name != "captures"}
        title = f"plan, revision {answer.get('revision')}"
        return Table.from_rows(rows, order=_PLAN_ORDER, title=title, about=about)

    def captures(self, run: str | None = None, *, limit: int = LIMIT) -> Table:
        """Return all captures that were ever requested, newest first, also withdrawn ones."""
        found = self.table("/captures", {"run": run}, title="captures", limit=limit)
        requested = [row.get("spec") or {} for row in found]
        rows = [
            {
                **{name: spec[name] for name in _REQUESTED if name in spec},
                "start": (spec.get("agreement") or {}).get("start"),
                **row,
            }
            for spec, row in zip(requested, found, strict=True)
        ]
        return Table.from_rows(rows, order=_PLAN_ORDER, title="captures", about=found.about)

    def capture(
        self, *, stages: Sequence[str] | str | None = None,
        steps: int | Sequence[int] | str | Mapping[str, OptInt] = "next", run: OptStr = None,
        roles: Sequence[str] | None = None, ranks: Sequence[int] | str | None = None,
        task: OptStr = None, level: OptStr = None, scope: Sequence[str] | None = None,
        list: Sequence[str] | None = None, data_mode: Sequence[str] | None = None,
        config: JsonObject | None = None, config_path: OptStr = None,
        bench: Mapping[str, str | int] | None = None, data_dir: OptStr = None,
        keep: Sequence[str] | None = None, parameters: Sequence[str] | None = None,
        gradients: Sequence[str] | None = None, limits: Mapping[str, float] | None = None,
        force: bool | None = None, strict: bool | None = None, timeout: float | None = None,
        late: Literal["wait", "go_on", "give_up"] | None = None, again: OptInt = None,
    ) -> RequestedCapture:  # fmt: skip
        """Request a capture on a live run; needs the operate token.

        The default captures msprobe's statistics of the next step. The service first waits until
        every requested rank has acknowledged, then fixes the step on which the capture starts. The
        answer comes once that step is fixed, at most 2 s later; `wait_for` waits for the dumps.

        Usage:
            >>> capture = session.capture(stages=["actor_update"], level="L1")
            >>> session.wait_for(capture["capture_id"]).dumps()

        Args:
            stages: names of stages, or "all".
            steps: numbers, "5,8-10", "next", {"next": k}, "all", or {"every": n, "start": s,
                "count": c}.
            run: the run; default: the live one.
            roles, ranks: only these; ranks as numbers, "0,4-7", "worst(2)" or "all".
            task, level, scope, list, data_mode: msprobe's settings of these names.
            config, config_path: msprobe's config.json instead: its content, or a path that the
                ranks can read.
            bench: {"capture_id": id, "step": n}, an earlier capture with checksums: with task
                tensor, msprobe writes only what differs from it.
            data_dir: directory of the dumps; default: the service's.
            keep: names of payload tensors to keep.
            parameters, gradients: patterns of names; each rank's matching shards are kept.
            limits: {"bytes", "seconds", "reserve_bytes", "tokens"} of a dump.
            force: start even if the estimated cost is too high or a stage seems to be misspelt.
            strict: raise failures in the training process.
            timeout: seconds within which every rank must acknowledge (60).
            late: what to do about ranks that have not acknowledged by then.
            again: how often to repeat a step that a rank missed.

        Raises:
            InvalidPlan: a field has a value that cannot be carried out.
            Conflict: an equal request is active, its steps have begun, or a stage seems to be a
                misspelling of a known one.
            Forbidden: the token allows only reading, or a path is outside the allowed roots.
        """
        spec = given(**{name: value for name, value in locals().items() if name != "self"})
        if isinstance(steps, int) and not isinstance(steps, bool):
            spec["steps"] = [steps]
        return RequestedCapture(self._transport.change("POST", "/captures", spec) or {})

    def progress(self, capture_id: str) -> CaptureProgress:
        """Return the progress of a capture.

        Raises:
            NotFound: there is no such capture.
        """
        return CaptureProgress(self.get(f"/captures/{segment(capture_id, 'capture_id')}"))

    def wait_for(
        self, capture_id: str, *, timeout: float | None = None,
        told: Callable[[CaptureProgress], None] = lambda progress: None,
    ) -> CaptureProgress:  # fmt: skip
        """Wait until a capture has ended and its operators can be read; return its progress.

        The service reads the dumps after the end; this method waits for it for half a minute. It
        also returns once no requested rank is alive any more. Without `timeout` it also returns
        once none of them has reported for a minute, because the run may not exist.

        Args:
            capture_id: the capture.
            timeout: seconds after which to return in any case; None: no limit for ranks that
                report.
            told: callback for each change of the progress.

        Raises:
            NotFound: there is no such capture.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        unknown_until = time.monotonic() + UNKNOWN_SECONDS if deadline is None else deadline
        read_until = None
        last_lines: list[str] | None = None
        while True:
            progress = self.progress(capture_id)
            if (lines := progress.lines()) != last_lines:
                last_lines = lines
                told(progress)
            until = unknown_until if progress.is_unknown else deadline
            if progress.ended or progress.is_abandoned:
                if not progress.is_unread:
                    return progress
                read_until = read_until or time.monotonic() + _READING_SECONDS
                until = min(each for each in (deadline, read_until) if each is not None)
            if until is not None and time.monotonic() >= until:
                return progress
            time.sleep(_POLL_INTERVAL)

    def remove_capture(self, capture_id: str) -> Record:
        """Withdraw a capture from the plan and return it; its dumps are kept.

        Raises:
            NotFound: no such capture is active.
        """
        answer = self._transport.change("DELETE", f"/captures/{segment(capture_id, 'capture_id')}")
        return Record(answer or {"capture_id": capture_id}, title="withdrawn capture")

    def triggers(self, run: str | None = None) -> Triggers:
        """Return the active rules with their last firing (in `run`), budgets, pinned steps."""
        return Triggers.of_answer(self.get("/triggers", run=run))

    def set_triggers(self, document: JsonObject | str) -> Record:
        """Replace the rules, for steps that close from now on; needs the operate token.

        Args:
            document: `{"rules": [...], "runs": {...}}`, or the same as YAML.

        Raises:
            InvalidPlan: a field is wrong; the message names it.
        """
        answer = self._transport.change("PUT", "/triggers", _rules_body(document))
        return Record(answer or {}, title="triggers")

    def test_triggers(
        self, run: OptStr = None, document: JsonObject | str | None = None, *, steps: OptInt = None
    ) -> Table:
        """Return the stored steps of a run in which rules would have fired, with the values.

        No action is taken. The default `document` is the active rules; `steps` is how many of the
        newest steps are evaluated (1000).
        """
        body = _rules_body(document or {}) | given(run=run, steps=steps)
        return dry_run(self._transport.query("/triggers/test", body))

    def test_webhook(self, rule: str) -> Record:
        """Send a test message to the webhook of a rule; needs the operate token.

        The message describes the rule's newest firing, or a made-up one. `delivered` says whether
        the receiver accepted it. `answer` is its reply, `reason` why the message did not arrive.

        Raises:
            NotFound: no active rule has this name.
            InvalidInput: the rule has no webhook.
        """
        answer = self._transport.change("POST", f"/triggers/{segment(rule, 'rule')}/test") or {}
        word = "delivered" if answer.get("delivered") else "NOT delivered"
        return Record(answer, title=f"test message of {rule}: {word}")

    def default_triggers(self) -> str:
        """Return the default rules as YAML."""
        return str(self.get("/triggers/defaults")["yaml"])

    def firings(
        self, run: OptStr = None, rule: OptStr = None, *, only: OptStr = None, limit: int = LIMIT
    ) -> FindingRows:
        """Return the firings of rules, the last first, with the outcomes of their actions.

        They are displayed in `groups`, one per rule and stage. `only` holds patterns of rules,
        joined by commas.
        """
        params = {"run": run, "only": rule if rule is not None else only}
        return self._findings_table("/triggers/firings", params, "firings", FIRING_ORDER, limit)

    def pin(self, step: int, *, run: str | None = None, attempt: int | None = None) -> Record:
        """Exempt the kept files and recent payloads of a step from deletion; operate token."""
        path = _pin_path(step, run, attempt)
        return Record(self._transport.change("PUT", path) or {}, title="pinned")

    def unpin(self, step: int, *, run: str | None = None, attempt: int | None = None) -> Record:
        """Allow the files of a pinned step to be deleted again; needs the operate token."""
        path = _pin_path(step, run, attempt)
        answer = self._transport.change("DELETE", path) or {}
        return Record(answer, title="unpinned" if answer.get("unpinned") else "not unpinned")


def _rules_body(document: JsonObject | str) -> dict[str, Json]:
    return {"yaml": document} if isinstance(document, str) else dict(document)


def _pin_path(step: int, run: str | None, attempt: int | None) -> str:
    query = urlencode(given(run=run, attempt=attempt))
    return f"/steps/{step_segment(step)}/pin" + (f"?{query}" if query else "")
