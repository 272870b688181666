"""The actions of a rule that fires: a finding, pinned payloads, a webhook, a capture."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from typing import Final

from stagescope.wire.captures import validate_capture
from stagescope.wire.errors import Forbidden, InvalidPlan
from stagescope.wire.links import STEP_NOUNS
from stagescope.wire.nonfinite import Json, JsonObject
from stagescope_service.rules import fields
from stagescope_service.rules.webhooks import Webhook

SEVERITIES: Final = ("info", "warning", "error")
MAX_PINNED: Final = 100
_WORST: Final = re.compile(r"worst\((\d{1,6})\)")
_CAPTURE_FIELDS: Final = (
    "ranks", "stages", "steps", "config", "task", "level", "scope", "list", "data_mode", "keep",
    "parameters", "gradients", "limits", "timeout", "late", "if_allowed",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CaptureTemplate:
    """A capture to request: of the affected stage unless `stages` names others, from the next step.

    `request` holds the fields of `stagescope.wire.captures.CAPTURE_FIELDS` as they were given. With
    `if_allowed` it is requested if the run has a budget, and skipped silently otherwise.
    """

    ranks: str | list[int]
    request: JsonObject
    if_allowed: bool = False

    @classmethod
    def parse(cls, value: object, field: str) -> CaptureTemplate:
        """Parse a template.

        Raises:
            InvalidPlan: with the field that is wrong.
        """
        given = fields.mapping({} if value is True else value, field, _CAPTURE_FIELDS, "")
        steps = given.pop("steps", "next")
        if steps != "next":
            raise fields.wrong(f"{field}.steps", steps, "'next': the next common step")
        if_allowed = fields.flag(given.pop("if_allowed", False), f"{field}.if_allowed")
        ranks = given.pop("ranks", "worst(1)")
        is_list = isinstance(ranks, list) and ranks and all(_is_rank(rank) for rank in ranks)
        if ranks != "all" and not is_list and not _WORST.fullmatch(str(ranks)):
            raise fields.wrong(f"{field}.ranks", ranks, "'worst(k)', 'all' or a list of ranks")
        if not {"config", "task", "level", "keep", "parameters", "gradients"} & set(given):
            given |= {"task": "statistics", "level": "L0"}
        return cls(ranks, given, if_allowed)

    def check(self, field: str) -> None:
        """Refuse what no capture may request, but for the places of files, which runs decide.

        Raises:
            InvalidPlan: with the field that is wrong.
        """
        try:
            with contextlib.suppress(Forbidden):
                validate_capture(
                    {"stages": "all", "steps": "next", **self.request}, allowed_roots=()
                )
        except InvalidPlan as error:
            raise InvalidPlan(f"{field}: {error.wrong}", expected=error.expected) from error

    @property
    def worst(self) -> int | None:
        """The number of worst ranks; None if the ranks are named."""
        found = _WORST.fullmatch(str(self.ranks))
        return int(found[1]) if found else None

    def wire(self) -> dict[str, Json]:
        """Return the document form that `parse` reads."""
        document = {"ranks": self.ranks, "steps": "next", **self.request}
        return document | ({"if_allowed": True} if self.if_allowed else {})


@dataclasses.dataclass(frozen=True)
class Actions:
    """The actions of a rule; None (or 0) means no such action.

    Attributes:
        severity: of the finding, None for no finding.
        advice: what to try; `{step}` in it becomes the step.
        see: what of the step to look at: last words of paths below `/steps/{step}`.
        pin: number of last steps whose payloads are pinned in the ring.
        webhook: receives the firing.
        capture: requested if the run allows it and its budget suffices.
    """

    severity: str | None = None
    advice: str = ""
    see: tuple[str, ...] = ()
    pin: int = 0
    webhook: Webhook | None = None
    capture: CaptureTemplate | None = None

    @classmethod
    def parse(cls, value: object, field: str) -> Actions:
        """Parse the actions of a rule.

        Raises:
            InvalidPlan: with the field that is wrong.
        """
        given = fields.mapping(value, field, ("finding", "pin", "webhook", "capture"), "")
        if not given:
            raise fields.wrong(field, value, "at least one of finding, pin, webhook, capture")
        found = given.get("finding", None)
        if found is True:
            found = {}
        severity, advice = None, ""
        see: tuple[str, ...] = ()
        if found is not None:
            document = fields.mapping(found, f"{field}.finding", ("severity", "advice", "see"), "")
            severity = document.get("severity", "warning")
            if severity not in SEVERITIES:
                expected = f"one of {', '.join(SEVERITIES)}"
                raise fields.wrong(f"{field}.finding.severity", severity, expected)
            if document.get("advice"):
                advice = fields.text(document["advice"], f"{field}.finding.advice", 2000)
            see = _nouns(document.get("see") or (), f"{field}.finding.see")
        webhook, capture = given.get("webhook"), given.get("capture")
        return cls(
            severity=severity,
            advice=advice,
            see=see,
            pin=fields.count(given.get("pin", 0), f"{field}.pin", 0, MAX_PINNED),
            webhook=None if webhook is None else Webhook.parse(webhook, f"{field}.webhook"),
            capture=None if capture is None else CaptureTemplate.parse(capture, f"{field}.capture"),
        )

    @property
    def costs(self) -> bool:
        """Whether there are actions besides a finding, repeated only after the cooldown."""
        return bool(self.pin) or self.webhook is not None or self.capture is not None

    def wire(self, *, secrets: bool) -> dict[str, Json]:
        """Return the form that `parse` reads; without `secrets` no webhook's URL."""
        document: dict[str, Json] = {}
        if self.severity is not None:
            see = {"see": list(self.see)} if self.see else {}
            document["finding"] = {"severity": self.severity, "advice": self.advice, **see}
        if self.pin:
            document["pin"] = self.pin
        if self.webhook is not None:
            document["webhook"] = self.webhook.wire(secrets=secrets)
        if self.capture is not None:
            document["capture"] = self.capture.wire()
        return document


def _nouns(value: object, field: str) -> tuple[str, ...]:
    given: Sequence[object] = value if isinstance(value, list | tuple) else (value,)
    nouns = tuple(noun for noun in given if isinstance(noun, str) and noun in STEP_NOUNS)
    if len(nouns) < len(given):
        raise fields.wrong(field, value, f"a list of {', '.join(sorted(STEP_NOUNS))}")
    return nouns


def _is_rank(value: object) -> bool:
    return type(value) is int and value >= 0
