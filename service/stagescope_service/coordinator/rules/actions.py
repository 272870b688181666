"""The actions of a firing: pins, a webhook, a capture; an action that fails makes a finding."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from stagescope_service.coordinator.answers import WebhookTest
from stagescope_service.coordinator.rules.firings import DueFiring, example_firing, message_of
from stagescope_service.coordinator.rules.webhooks import Webhooks
from stagescope_service.core.findings import finding
from stagescope_service.core.instructions import Put
from stagescope_service.rules.budget import ORDERED_BY, Budget, spent
from stagescope_service.rules.document import Rule, Rules
from stagescope_service.rules.webhooks import Webhook
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.tables import ArtifactRow, CaptureRow
from stagescope_service.store.tables.findings import (
    FiredActions,
    FiredCapture,
    FiredPins,
    FiredWebhook,
    PinnedOf,
)
from stagescope_wire.errors import Conflict, InvalidInput, NotReady, StagescopeError
from stagescope_wire.nonfinite import Json, JsonObject

_TEST_SECONDS: Final = 8.0
"""Time limit of a test message: its caller waits for it."""
_NEWEST: Final = 50
"""A test message tells the newest valid one among this many firings of a rule."""

RequestCapture = Callable[[JsonObject, str], Awaitable[JsonObject]]
"""(spec, by) -> the capture; the function behind `POST /captures`."""

_PATIENCE: Final = 60.0
"""Seconds in which a request is repeated while the coordinator is not ready."""


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
        rows: the rows of its payloads of a step, deleted ones included.
        held: the number of payloads that it holds now, including some without a row yet.
    """
    deleted = sum(row["deleted_wall"] is not None for row in rows)
    return max(deleted, len(rows) - held)


PinStep = Callable[[int, int], Awaitable[PinAnswer]]
"""(attempt_id, step) -> the outcome of pinning its payloads on every node that has some."""


class TriggerActions:
    """Takes the actions of firings.

    Args:
        catalogue: the store's reading side.
        pin: pins the payloads of a step.
        request_capture: requests a capture.
        webhooks: calls webhooks.
        page: returns the address of the service's page, None if it is unknown.
        wall: Unix seconds of the service.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        pin: PinStep,
        request_capture: RequestCapture,
        webhooks: Webhooks,
        *,
        page: Callable[[], str | None] = lambda: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._catalogue = catalogue
        self._pin_step = pin
        self._request_capture = request_capture
        self._webhooks = webhooks
        self._page = page
        self._wall = wall

    async def carry_out(self, due: DueFiring, rules: Rules) -> list[Put]:
        """Take every action of a firing; return their outcomes."""
        actions = due.rule.actions
        done: FiredActions = {}
        rows: list[Put] = []
        if actions.pin:
            done["pin"] = await self._pin(due, rows)
        if actions.capture is not None:
            done["capture"] = await self._capture(due, rules, rows)
        if actions.webhook is not None:
            done["webhook"] = await self._call(due, actions.webhook, done, rows)
        fired = {**due.key, "actions": done, "acted_wall": self._wall()}
        return [*rows, Put("firings", fired)]

    # --- pins -----------------------------------------------------------------------------
    async def _pin(self, due: DueFiring, rows: list[Put]) -> FiredPins:
        attempt_id, last = due.row["attempt_id"], due.row["step"]
        wanted = range(last, last - due.rule.actions.pin, -1)
        there = await asyncio.to_thread(
            self._catalogue.steps, attempt_id, before=last + 1, limit=len(wanted)
        )
        answers: list[PinnedOf] = []
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
                rows.append(self._not_pinned(due, number, answer))
        return {"steps": answers}

    def _not_pinned(self, due: DueFiring, step: int, answer: PinAnswer) -> Put:
        gone = f"{answer.gone} payloads had left the ring before" if answer.gone else ""
        return finding(
            "pin_not_kept",
            f"not all payloads of step {step} are pinned for {due.rule.name}: "
            + "; ".join(filter(None, (gone, *answer.reasons))),
            run=due.row["run"],
            attempt_id=due.row["attempt_id"],
            step=step,
            wall=self._wall(),
            evidence={"rule": due.rule.name, **dataclasses.asdict(answer)},
            advice="unpin steps (stagescope unpin STEP), or raise STAGESCOPE_RING_BYTES",
        )

    # --- webhooks -------------------------------------------------------------------------
    async def _call(
        self, due: DueFiring, webhook: Webhook, done: FiredActions, rows: list[Put]
    ) -> FiredWebhook:
        reason = await self._webhooks.call(webhook, message_of(due, done, await self._address()))
        if reason:
            rows.append(
                finding(
                    "webhook_failed",
                    f"the webhook of {due.rule.name} at {webhook.host} did not accept the firing: "
                    f"{reason}",
                    run=due.row["run"],
                    attempt_id=due.row["attempt_id"],
                    step=due.row["step"],
                    wall=self._wall(),
                    evidence={"rule": due.rule.name, "host": webhook.host, "reason": reason},
                    advice="see whether the coordinator's node reaches that host, and whether its "
                    f"URL is still good: `stagescope triggers test {due.rule.name}` tries it",
                )
            )
        return {"host": webhook.host, "delivered": not reason, "reason": reason}

    async def test_webhook(self, rule: Rule) -> WebhookTest:
        """Send a rule's newest firing, or a made-up one, to its webhook, marked as a test.

        Raises:
            InvalidInput: the rule has no webhook.
        """
        webhook = rule.actions.webhook
        if webhook is None:
            raise InvalidInput(
                f"the rule {rule.name} has no webhook",
                expected="a rule with `webhook` among its actions",
            )
        fired = await asyncio.to_thread(self._catalogue.firings, rule=rule.name, limit=_NEWEST)
        newest = next((row for row in fired if row["withdrawn_wall"] is None), None)
        page = await self._address()
        if newest is None:
            message = message_of(DueFiring(rule, example_firing(rule, self._wall())), {}, None)
            message["link"] = page
        else:
            message = message_of(DueFiring(rule, newest), newest["actions"] or {}, page)
        message["test"] = True
        delivery = await self._webhooks.try_once(webhook, message, _TEST_SECONDS)
        return {
            "rule": rule.name,
            "host": webhook.host,
            "format": webhook.format,
            "delivered": not delivery.reason,
            "answer": delivery.answer,
            "reason": delivery.reason,
            "run": None if newest is None else newest["run"],
            "attempt": None if newest is None else message["attempt"],
            "step": None if newest is None else newest["step"],
            "link": message["link"],
        }

    async def _address(self) -> str | None:
        return await asyncio.to_thread(self._page)

    # --- captures -------------------------------------------------------------------------
    async def _capture(self, due: DueFiring, rules: Rules, rows: list[Put]) -> FiredCapture:
        try:
            before = await asyncio.to_thread(self._ordered, due)
            if before is not None:
                return {"capture_id": before["capture_id"]}
            if not await asyncio.to_thread(self._is_meant, due, rules):
                return {}
            spec = await asyncio.to_thread(self._spec, due, rules)
            requested = await self._offer(spec, due.by)
        except StagescopeError as error:
            rows.append(self._refused(due, str(error)))
            return {"refused": str(error)}
        return {"capture_id": requested["capture_id"]}

    def _ordered(self, due: DueFiring) -> CaptureRow | None:
        """Return the capture that was requested before a restart."""
        template = due.rule.actions.capture
        found = self._catalogue.captures(run=due.row["run"])
        own = next((row for row in found if row["by"] == due.by), None)
        if own is not None or template is None or not template.if_allowed:
            return own
        # Several default rules may fire at one step, each with a capture: one is enough.
        of_step = [row for row in found if str(row["by"]).endswith(due.at)]
        return next((row for row in of_step if str(row["by"]).startswith(ORDERED_BY)), None)

    def _is_meant(self, due: DueFiring, rules: Rules) -> bool:
        """Return whether a capture is requested, or refused with a reason."""
        template = due.rule.actions.capture
        assert template is not None
        return not template.if_allowed or self._budget(due, rules) is not None

    def _budget(self, due: DueFiring, rules: Rules) -> Budget | None:
        run = due.row["run"]
        row = self._catalogue.run(run)
        return rules.budget_of(run, None if row is None else row["settings"])

    def _spec(self, due: DueFiring, rules: Rules) -> JsonObject:
        """Return the capture to request.

        Raises:
            Conflict: the run does not allow it, or its budget is exhausted.
        """
        template, run = due.rule.actions.capture, due.row["run"]
        assert template is not None
        budget = self._budget(due, rules)
        if budget is None:
            raise Conflict("the run does not say `capture: auto` with a budget")
        attempt = self._catalogue.attempt(due.row["attempt_id"])
        if attempt is None or attempt["ended_wall"] is not None:
            raise Conflict("the attempt is over: there is no next step to capture")
        cost = spent(self._catalogue, run)
        why = budget.refusal(cost)
        if why is not None:
            raise Conflict(f"the budget has no room: {why}")
        if not due.row["stage"] and "stages" not in template.request:
            raise Conflict("no stage is concerned, and the template names none")
        chosen = self._ranks(due, template.worst)
        spec: dict[str, Json] = {
            "run": run,
            "stages": [due.row["stage"]],
            **template.request,
            "steps": "next",
        }
        spec |= chosen or {"ranks": template.ranks}
        left = budget.bytes_left(cost)
        if left is not None:
            limits = dict(template.request.get("limits") or {})
            per_rank = max(left // self._count(due, spec["ranks"]), 1)
            given = limits.get("bytes")
            spec["limits"] = {**limits, "bytes": min(per_rank, given) if given else per_rank}
        return spec

    def _ranks(self, due: DueFiring, worst: int | None) -> JsonObject:
        """Return the ranks of `worst(k)`: ranks of one role, the first one that the firing names.

        Only ranks that can capture: the streams of a step may have been recorded by a driver, which
        has no model. Then the worst ranks are unknown, and the first ranks of the stage are used.
        """
        if worst is None:
            return {}
        able = {
            (row["role"], row["rank"])
            for row in self._catalogue.processes_with_settings(due.row["attempt_id"])
            if not row["raw"] and (row["hello"] or {}).get("captures") is not False
        }
        named = [tuple(each) for each in due.row["evidence"]["ranks"]]
        ranks = [each for each in named if each in able]
        if not ranks:
            return {"ranks": list(range(worst))} if named else {}
        role = ranks[0][0]
        of_role = [rank for name, rank in ranks if name == role]
        return {"roles": [role], "ranks": sorted(of_role[:worst])}

    def _count(self, due: DueFiring, ranks: Json) -> int:
        if isinstance(ranks, list):
            return len(ranks)
        processes = self._catalogue.processes(due.row["attempt_id"])
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

    def _refused(self, due: DueFiring, reason: str) -> Put:
        return finding(
            "capture_refused",
            f"{due.rule.name} requested no capture at step {due.row['step']}: {reason}",
            run=due.row["run"],
            attempt_id=due.row["attempt_id"],
            step=due.row["step"],
            stage=due.row["stage"],
            wall=self._wall(),
            severity="info",
            evidence={"rule": due.rule.name, "reason": reason},
            advice="`runs` in the triggers' document says what may be captured unasked; "
            "`stagescope capture` requests one by hand",
        )
