"""Orders: captures on live runs, rules that fire, steps that stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal
from urllib.parse import urlencode

from stagescope.answers import Record
from stagescope.asking import LIMIT, Asking, segment, step_word
from stagescope.findings import FIRING_ORDER, FindingRows
from stagescope.frames import Table
from stagescope.progress import CaptureProgress, Progress
from stagescope.triggers import Triggers, dry_run

_BETWEEN_QUESTIONS: Final = 0.5
_PLAN_ORDER: Final = (
    "capture_id", "state", "start", "run", "steps", "stages", "ranks", "roles", "by", "created",
)  # fmt: skip


class CaptureRequests(Asking):
    """What changes while a run is live; most of it needs the operate token."""

    def plan(self, run: str | None = None) -> Table:
        """Return the captures in force, with `run` those that concern it.

        `about["revision"]` is the plan's revision.
        """
        answer = self.get("/plan")
        captures = answer.get("captures") or []
        if run is not None:
            captures = [each for each in captures if each.get("run") in (None, run)]
        rows = [{**each, **_reached(each)} for each in captures]
        about = {name: value for name, value in answer.items() if name != "captures"}
        title = f"plan, revision {answer.get('revision')}"
        return Table.from_rows(rows, order=_PLAN_ORDER, title=title, about=about)

    def captures(self, run: str | None = None, *, limit: int = LIMIT) -> Table:
        """Return the captures that were ever ordered, newest first, withdrawn ones too."""
        return self.table(
            "/captures", {"run": run}, title="captures", order=_PLAN_ORDER, limit=limit
        )

    def capture(
        self,
        *,
        stages: Sequence[str] | str | None = None,
        steps: int | Sequence[int] | str | Mapping[str, Any] = "next",
        run: str | None = None,
        roles: Sequence[str] | None = None,
        ranks: Sequence[int] | str | None = None,
        task: str | None = None,
        level: str | None = None,
        scope: Sequence[str] | None = None,
        list: Sequence[str] | None = None,
        data_mode: Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
        config_path: str | None = None,
        bench: Mapping[str, Any] | None = None,
        data_dir: str | None = None,
        keep: Sequence[str] | None = None,
        parameters: Sequence[str] | None = None,
        gradients: Sequence[str] | None = None,
        limits: Mapping[str, Any] | None = None,
        force: bool | None = None,
        strict: bool | None = None,
        timeout: float | None = None,
        late: Literal["wait", "go_on", "give_up"] | None = None,
        again: int | None = None,
    ) -> CaptureProgress:
        """Order a capture on a live run; needs the operate token.

        Without `steps` it is of the next, and without a word of what it is msprobe's statistics.
        Every asked rank acknowledges first, and then the step is fixed on which it starts: the
        answer is of the moment after, or of 2 s later; `wait_for` waits until the dumps lie there.

        Usage:
            >>> ordered = session.capture(stages=["actor_update"], level="L1")
            >>> session.wait_for(ordered["capture_id"]).dumps()

        Args:
            stages: names of stages, or "all".
            steps: numbers, "5,8-10", "next", {"next": k}, "all", or {"every": n, "start": s,
                "count": c}.
            run: of which run; default: of the one that is live.
            roles, ranks: of which; ranks as numbers, "0,4-7", "worst(2)" or "all".
            task, level, scope, list, data_mode: as msprobe has them.
            config, config_path: msprobe's config.json instead: its content, or a path that the
                ranks can read.
            bench: {"capture_id": id, "step": n}, an earlier capture with checksums: of task tensor
                only what differs from it is written.
            data_dir: where the dumps go; default: the service's.
            keep: names of payload tensors to keep.
            parameters, gradients: patterns of names of which to keep each rank's shards.
            limits: {"bytes", "seconds", "reserve_bytes", "tokens"} of a dump.
            force: also where it is estimated to cost too much, or a stage seems to be misspelt.
            strict: a failure is raised in the training process.
            timeout: seconds in which every rank is to acknowledge (60).
            late: what to do about ranks that do not.
            again: how often a step that a rank missed is repeated.

        Raises:
            InvalidPlan: a field that cannot be carried out.
            Conflict: the same order is in force, its steps have begun, or a stage seems to be a
                misspelling of one that is known.
            Forbidden: the token may only read, or a path lies outside the allowed roots.
        """
        one = isinstance(steps, int) and not isinstance(steps, bool)
        given = {
            "stages": stages, "steps": [steps] if one else steps, "run": run, "roles": roles,
            "ranks": ranks, "task": task, "level": level, "scope": scope, "list": list,
            "data_mode": data_mode, "config": config, "config_path": config_path, "bench": bench,
            "data_dir": data_dir, "keep": keep, "parameters": parameters, "gradients": gradients,
            "limits": limits, "force": force, "strict": strict, "timeout": timeout, "late": late,
            "again": again,
        }  # fmt: skip
        spec = {name: value for name, value in given.items() if value is not None}
        return CaptureProgress(self._transport.change("POST", "/captures", spec) or {})

    def progress(self, capture_id: str) -> Progress:
        """Return how far a capture has come.

        Raises:
            NotFound: no such capture.
        """
        return Progress(self.get(f"/captures/{segment(capture_id, 'capture_id')}"))

    def wait_for(
        self,
        capture_id: str,
        *,
        timeout: float | None = None,
        told: Callable[[Progress], None] = lambda progress: None,
    ) -> Progress:
        """Wait until a capture has collected all it will; return how far it has come.

        It returns as well where no rank that the capture asks is there (any more).

        Args:
            capture_id: the capture.
            timeout: seconds after which to return all the same; None: as long as it takes.
            told: called with each change.

        Raises:
            NotFound: no such capture.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        said: list[str] | None = None
        while True:
            found = self.progress(capture_id)
            if (now := found.lines()) != said:
                said = now
                told(found)
            over = found.ended or found.is_abandoned
            if over or (deadline is not None and time.monotonic() >= deadline):
                return found
            time.sleep(_BETWEEN_QUESTIONS)

    def remove_capture(self, capture_id: str) -> Record:
        """Take a capture out of the plan and return it; what it has collected stays.

        Raises:
            NotFound: no such capture is in force.
        """
        answer = self._transport.change("DELETE", f"/captures/{segment(capture_id, 'capture_id')}")
        return Record(answer or {"capture_id": capture_id}, title="withdrawn capture")

    def triggers(self, run: str | None = None) -> Triggers:
        """Return the rules in force, when each fired last (in `run`), budgets and pinned steps."""
        return Triggers.of_answer(self.get("/triggers", run=run))

    def set_triggers(self, document: Mapping[str, Any] | str) -> Record:
        """Put rules in force for the steps that close from now on; needs the operate token.

        Args:
            document: `{"rules": [...], "runs": {...}}`, or the same as YAML.

        Raises:
            InvalidPlan: with the field that is wrong.
        """
        body = {"yaml": document} if isinstance(document, str) else dict(document)
        return Record(self._transport.change("PUT", "/triggers", body) or {}, title="triggers")

    def test_triggers(
        self,
        run: str | None = None,
        document: Mapping[str, Any] | str | None = None,
        *,
        steps: int | None = None,
    ) -> Table:
        """Return which stored steps of a run would have fired, and with which values.

        Nothing follows of it. Without a `document` the rules in force are tried; `steps` says how
        many of the newest are looked at (1000).
        """
        body = {"yaml": document} if isinstance(document, str) else dict(document or {})
        asked = {"run": run, "steps": steps}
        body |= {name: value for name, value in asked.items() if value is not None}
        return dry_run(self._transport.ask("/triggers/test", body))

    def default_triggers(self) -> str:
        """Return the rules that ship, as YAML."""
        return str(self.get("/triggers/defaults")["yaml"])

    def firings(
        self,
        run: str | None = None,
        rule: str | None = None,
        *,
        only: str | None = None,
        limit: int = LIMIT,
    ) -> FindingRows:
        """Return what fired, the last first, with what became of its actions.

        It is shown by `groups`: one for what a rule said of a stage. `only` holds patterns of
        rules, joined by commas.
        """
        chosen = rule if rule is not None else only
        params = {"run": run, "only": chosen}
        return self._noticed("/triggers/firings", params, "firings", FIRING_ORDER, limit)

    def pin(self, step: int, *, run: str | None = None, attempt: int | None = None) -> Record:
        """Let the kept files and recent payloads of a step stay; needs the operate token."""
        path = _pin_path(step, run, attempt)
        return Record(self._transport.change("PUT", path) or {}, title="pinned")

    def unpin(self, step: int, *, run: str | None = None, attempt: int | None = None) -> Record:
        """Let what is held of a pinned step go when room is needed; needs the operate token."""
        path = _pin_path(step, run, attempt)
        return Record(self._transport.change("DELETE", path) or {}, title="unpinned")


def _reached(capture: Mapping[str, Any]) -> dict[str, Any]:
    """Return how far a capture of the plan has come; an older service says only its phase."""
    agreement = capture.get("agreement") or {}
    state = capture.get("state") or agreement.get("phase")
    return {"state": state, "start": agreement.get("start")}


def _pin_path(step: int, run: str | None, attempt: int | None) -> str:
    asked = {"run": run, "attempt": attempt}
    query = urlencode({name: value for name, value in asked.items() if value is not None})
    return f"/steps/{step_word(step)}/pin" + (f"?{query}" if query else "")
