"""The actions of a firing: pins, a webhook, a capture; an action that fails makes a finding."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypedDict

import httpx

from stagescope.wire import nonfinite
from stagescope.wire.errors import Conflict, NotReady, StagescopeError
from stagescope.wire.links import Link, with_links
from stagescope.wire.nonfinite import Json, JsonObject
from stagescope_service.core.catalogue_rows import row_id
from stagescope_service.core.findings import finding
from stagescope_service.core.instructions import Put
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.tables import ArtifactRow, CaptureRow
from stagescope_service.store.tables.findings import (
    FiredActions,
    FiredCapture,
    FiredPins,
    FiredWebhook,
    FiringColumns,
    PinOutcome,
)
from stagescope_service.triggers.budget import ORDERED_BY, Budget, spent
from stagescope_service.triggers.names import is_nonfinite, scalar_of
from stagescope_service.triggers.rules import Rule, Rules
from stagescope_service.triggers.series import shown

SECONDS: Final = 10.0
"""Time limit of one try, from the connection to the answer's head."""
_AT_ONE_TIME: Final = 4


class Webhooks:
    """Calls webhooks; used from one event loop.

    Args:
        seconds: time limit of one try.
        pauses: seconds before each further try.
    """

    def __init__(self, *, seconds: float = SECONDS, pauses: tuple[float, ...] = (1.0, 5.0)) -> None:
        self._seconds = seconds
        self._pauses = pauses
        self._room = asyncio.Semaphore(_AT_ONE_TIME)

    async def call(self, url: str, body: JsonObject) -> str:
        """Post a body; return why it did not arrive, empty if it did.

        It has arrived if the answer's status is 2xx. Redirects are not followed: they would send
        the body to another host than the configured one. Client errors (4xx) other than 408 and
        429 are not retried.
        """
        content = nonfinite.dumps(body).encode()
        async with self._room:
            reason, final = await self._try(url, content)
            tries = 1
            for pause in self._pauses:
                if not reason or final:
                    break
                await asyncio.sleep(pause)
                reason, final = await self._try(url, content)
                tries += 1
        return f"{reason} ({tries} {'try' if tries == 1 else 'tries'})" if reason else ""

    async def _try(self, url: str, content: bytes) -> tuple[str, bool]:
        """Return why a try failed (empty if it succeeded), and whether a retry is pointless."""
        try:
            status = await asyncio.wait_for(self._post(url, content), self._seconds)
        except asyncio.TimeoutError:
            return f"no answer in {self._seconds:g} s", False
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            # Only its type: the text of an error may contain the URL.
            return f"it cannot be reached: {type(error).__name__}", False
        if 200 <= status < 300:
            return "", True
        return f"it answered {status}", status < 500 and status not in (408, 429)

    async def _post(self, url: str, content: bytes) -> int:
        # A transport, since a client logs the URL of each request. Creating its TLS context takes
        # too long for the event loop.
        transport = await asyncio.to_thread(httpx.AsyncHTTPTransport)
        timeout = httpx.Timeout(self._seconds).as_dict()
        headers = {"content-type": "application/json", "user-agent": "stagescope"}
        request = httpx.Request(
            "POST", url, content=content, headers=headers, extensions={"timeout": timeout}
        )
        async with transport:
            response = await transport.handle_async_request(request)
            await response.aclose()
            return response.status_code


RequestCapture = Callable[[JsonObject, str], Awaitable[JsonObject]]
"""(spec, by) -> the capture; the function behind `POST /captures`."""

_PATIENCE: Final = 60.0
"""Seconds in which a request is repeated while the coordinator is not ready."""


class FiringKey(TypedDict):
    """The key of a firing."""

    attempt_id: int
    step: int
    rule: str


@dataclasses.dataclass(frozen=True)
class Act:
    """A firing with actions to take: its rule, and its row of the catalogue."""

    rule: Rule
    row: FiringColumns

    @property
    def key(self) -> FiringKey:
        """The key of the row."""
        row = self.row
        return {"attempt_id": row["attempt_id"], "step": row["step"], "rule": row["rule"]}

    @property
    def by(self) -> str:
        """The author of the capture that it requests."""
        return f"{ORDERED_BY}{self.rule.name}{self.at}"

    @property
    def at(self) -> str:
        """The end of `by`: the step and attempt."""
        return f" at step {self.row['step']} of attempt {self.row['evidence']['attempt']}"


@dataclasses.dataclass(frozen=True)
class PinAnswer:
    """The outcome of pinning a step, over all nodes."""

    payloads: int
    bytes: int
    gone: int
    """Payloads that the rings had deleted before."""
    reasons: tuple[str, ...] = ()
    """Reasons for which some payloads are not pinned."""


def gone_of(rows: Sequence[ArtifactRow], held: int) -> int:
    """Return the number of payloads that a ring has deleted.

    Args:
        rows: of its payloads of a step, deleted ones included.
        held: the number that it holds now, including some without a row yet.
    """
    deleted = sum(row["deleted_wall"] is not None for row in rows)
    return max(deleted, len(rows) - held)


PinStep = Callable[[int, int], Awaitable[PinAnswer]]
"""(attempt_id, step) -> the outcome of pinning its payloads on every node that has some."""


class Acting:
    """Takes the actions of firings.

    Args:
        catalogue: the store's reading side.
        pin: pins the payloads of a step.
        request_capture: requests a capture.
        webhooks: calls webhooks.
        wall: Unix seconds of the service.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        pin: PinStep,
        request_capture: RequestCapture,
        webhooks: Webhooks,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._catalogue = catalogue
        self._pin_step = pin
        self._request_capture = request_capture
        self._webhooks = webhooks
        self._wall = wall

    async def carry_out(self, act: Act, rules: Rules) -> list[Put]:
        """Take every action of a firing; return their outcomes."""
        actions = act.rule.actions
        done: FiredActions = {}
        rows: list[Put] = []
        if actions.pin:
            done["pin"] = await self._pin(act, rows)
        if actions.capture is not None:
            done["capture"] = await self._capture(act, rules, rows)
        if actions.webhook is not None:
            done["webhook"] = await self._call(act, actions.webhook, done, rows)
        fired = {**act.key, "actions": done, "acted_wall": self._wall()}
        return [*rows, Put("firings", fired)]

    # --- pins -----------------------------------------------------------------------------
    async def _pin(self, act: Act, rows: list[Put]) -> FiredPins:
        attempt_id, last = act.row["attempt_id"], act.row["step"]
        wanted = range(last, last - act.rule.actions.pin, -1)
        there = await asyncio.to_thread(
            self._catalogue.steps, attempt_id, before=last + 1, limit=len(wanted)
        )
        answers: list[PinOutcome] = []
        for number in sorted({row["step"] for row in there} & set(wanted)):
            answer = await self._pin_step(attempt_id, number)
            answers.append(
                {
                    "step": number,
                    "payloads": answer.payloads,
                    "bytes": answer.bytes,
                    "gone": answer.gone,
                    "reasons": [*answer.reasons],
                }
            )
            if answer.payloads:
                pinned = {"attempt_id": attempt_id, "step": number, "pinned": True}
                rows.append(Put("steps", pinned))
            if answer.gone or answer.reasons:
                rows.append(self._not_pinned(act, number, answer))
        return {"steps": answers}

    def _not_pinned(self, act: Act, step: int, answer: PinAnswer) -> Put:
        gone = f"{answer.gone} payloads had left the ring before" if answer.gone else ""
        return finding(
            "pin_not_kept",
            f"not all payloads of step {step} are pinned for {act.rule.name}: "
            + "; ".join(filter(None, (gone, *answer.reasons))),
            run=act.row["run"],
            attempt_id=act.row["attempt_id"],
            step=step,
            wall=self._wall(),
            evidence={"rule": act.rule.name, **dataclasses.asdict(answer)},
            advice="unpin steps (stagescope unpin STEP), or raise STAGESCOPE_RING_BYTES",
        )

    # --- webhooks -------------------------------------------------------------------------
    async def _call(self, act: Act, url: str, done: FiredActions, rows: list[Put]) -> FiredWebhook:
        host = act.rule.actions.webhook_host or ""
        columns: JsonObject = act.row
        body = {
            **{name: columns[name] for name in _SENT_COLUMNS},
            "evidence": shown(act.row["evidence"]),
            "attempt": act.row["evidence"]["attempt"],
            "severity": act.rule.actions.severity,
            "advice": with_links(_advice(act), _see(act)),
            "actions": dict(done),
        }
        reason = await self._webhooks.call(url, body)
        if reason:
            rows.append(
                finding(
                    "webhook_failed",
                    f"the webhook of {act.rule.name} at {host} was not told: {reason}",
                    run=act.row["run"],
                    attempt_id=act.row["attempt_id"],
                    step=act.row["step"],
                    wall=self._wall(),
                    evidence={"rule": act.rule.name, "host": host, "reason": reason},
                    advice="see whether the coordinator's node reaches that host, and whether its "
                    "URL is still good",
                )
            )
        return {"host": host, "delivered": not reason, "reason": reason}

    # --- captures -------------------------------------------------------------------------
    async def _capture(self, act: Act, rules: Rules, rows: list[Put]) -> FiredCapture:
        try:
            before = await asyncio.to_thread(self._ordered, act)
            if before is not None:
                return {"capture_id": before["capture_id"]}
            if not await asyncio.to_thread(self._is_meant, act, rules):
                return {}
            spec = await asyncio.to_thread(self._spec, act, rules)
            requested = await self._offer(spec, act.by)
        except StagescopeError as error:
            rows.append(self._refused(act, str(error)))
            return {"refused": str(error)}
        return {"capture_id": requested["capture_id"]}

    def _ordered(self, act: Act) -> CaptureRow | None:
        """Return the capture that was requested before a restart."""
        template = act.rule.actions.capture
        found = self._catalogue.captures(run=act.row["run"])
        own = next((row for row in found if row["by"] == act.by), None)
        if own is not None or template is None or not template.if_allowed:
            return own
        # Several default rules may fire at one step, each with a capture: one is enough.
        of_step = [row for row in found if str(row["by"]).endswith(act.at)]
        return next((row for row in of_step if str(row["by"]).startswith(ORDERED_BY)), None)

    def _is_meant(self, act: Act, rules: Rules) -> bool:
        """Return whether a capture is requested, or refused with a reason."""
        template = act.rule.actions.capture
        assert template is not None
        return not template.if_allowed or self._budget(act, rules) is not None

    def _budget(self, act: Act, rules: Rules) -> Budget | None:
        run = act.row["run"]
        row = self._catalogue.run(run)
        return rules.budget_of(run, None if row is None else row["settings"])

    def _spec(self, act: Act, rules: Rules) -> JsonObject:
        """Return the capture to request.

        Raises:
            Conflict: the run does not allow it, or its budget is exhausted.
        """
        template, run = act.rule.actions.capture, act.row["run"]
        assert template is not None
        budget = self._budget(act, rules)
        if budget is None:
            raise Conflict("the run does not say `capture: auto` with a budget")
        attempt = self._catalogue.attempt(act.row["attempt_id"])
        if attempt is None or attempt["ended_wall"] is not None:
            raise Conflict("the attempt is over: there is no next step to capture")
        cost = spent(self._catalogue, run)
        why = budget.refusal(cost)
        if why is not None:
            raise Conflict(f"the budget has no room: {why}")
        if not act.row["stage"] and "stages" not in template.request:
            raise Conflict("no stage is concerned, and the template names none")
        chosen = self._ranks(act, template.worst)
        spec: dict[str, Json] = {
            "run": run,
            "stages": [act.row["stage"]],
            **template.request,
            "steps": "next",
        }
        spec |= chosen or {"ranks": template.ranks}
        left = budget.bytes_left(cost)
        if left is not None:
            limits = dict(template.request.get("limits") or {})
            per_rank = max(left // self._count(act, spec["ranks"]), 1)
            given = limits.get("bytes")
            spec["limits"] = {**limits, "bytes": min(per_rank, given) if given else per_rank}
        return spec

    def _ranks(self, act: Act, worst: int | None) -> JsonObject:
        """Return the ranks of `worst(k)`: ranks of one role, the first one that the firing names.

        Only ranks that can capture: the streams of a step may have been recorded by a driver, which
        has no model. Then the worst ranks are unknown, and the first ranks of the stage are used.
        """
        if worst is None:
            return {}
        able = {
            (row["role"], row["rank"])
            for row in self._catalogue.processes_with_settings(act.row["attempt_id"])
            if not row["raw"] and (row["hello"] or {}).get("captures") is not False
        }
        named = [tuple(each) for each in act.row["evidence"]["ranks"]]
        ranks = [each for each in named if each in able]
        if not ranks:
            return {"ranks": list(range(worst))} if named else {}
        role = ranks[0][0]
        of_role = [rank for name, rank in ranks if name == role]
        return {"roles": [role], "ranks": sorted(of_role[:worst])}

    def _count(self, act: Act, ranks: Json) -> int:
        if isinstance(ranks, list):
            return len(ranks)
        processes = self._catalogue.processes(act.row["attempt_id"])
        return max(len({(row["role"], row["rank"]) for row in processes}), 1)

    async def _offer(self, spec: JsonObject, by: str) -> JsonObject:
        """Request a capture; repeat it while the coordinator is starting."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                return await self._request_capture(spec, by)
            except NotReady:  # noqa: PERF203
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)

    def _refused(self, act: Act, reason: str) -> Put:
        return finding(
            "capture_refused",
            f"{act.rule.name} requested no capture at step {act.row['step']}: {reason}",
            run=act.row["run"],
            attempt_id=act.row["attempt_id"],
            step=act.row["step"],
            stage=act.row["stage"],
            wall=self._wall(),
            severity="info",
            evidence={"rule": act.rule.name, "reason": reason},
            advice="`runs` in the triggers' document says what may be captured unasked; "
            "`stagescope capture` requests one by hand",
        )


_UPDATE: Final = "actor_update"
_OWN_UPDATES: Final = (
    "these are numbers of actor_update, whose mini-batches after the first differ by the step's "
    "own updates, too: record old_log_probs of the pass before it to tell them apart"
)

_SENT_COLUMNS: Final = (
    "rule", "run", "attempt_id", "step", "stage", "role", "rank", "round", "message", "wall",
)  # fmt: skip


def finding_of_firing(key: FiringKey) -> str:
    """Return the id of a firing's finding: one for each rule and step."""
    return row_id("trigger", key["rule"], key["attempt_id"], key["step"])


def _advice(act: Act) -> str:
    """Return the advice; if the rank's streams cannot be compared, it starts with that cause."""
    advice = act.rule.actions.advice.replace("{step}", str(act.row["step"]))
    metric = act.rule.metric
    is_mismatch = not (scalar_of(metric) or is_nonfinite(metric))
    if advice and act.row["stage"] == _UPDATE and is_mismatch:
        advice = f"{_OWN_UPDATES}; else {advice}"
    cause = act.row["evidence"].get("cause")
    if cause is None:
        return advice
    first = f"explain first why the streams cannot be compared ({cause['name']}, on "
    first += f"{act.row['role']} rank {act.row['rank']}): {cause['text']}"
    return f"{first}; once that is mended: {advice}" if advice else first


def _see(act: Act) -> list[Link]:
    """Return links to what the rule says to look at."""
    return [Link.to_step(noun, act.row["step"]) for noun in act.rule.actions.see]


def finding_of(act: Act) -> list[Put]:
    """Return the finding of a firing, if its rule makes one."""
    actions, row = act.rule.actions, act.row
    if actions.severity is None:
        return []
    made = finding(
        f"trigger_{act.rule.name}",
        row["message"],
        run=row["run"],
        attempt_id=row["attempt_id"],
        step=row["step"],
        stage=row["stage"],
        role=row["role"],
        rank=row["rank"],
        wall=row["wall"],
        severity=actions.severity,
        evidence={**shown(row["evidence"]), "round": row["round"]},
        advice=_advice(act),
        see=_see(act),
    )
    return [Put("findings", {**made.row, "finding_id": finding_of_firing(act.key)})]
