"""The actions of a rule that fires: a finding, pinned payloads, a webhook, a capture."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Final

from stagescope_service.rules import fields
from stagescope_service.rules.webhooks import Webhook
from stagescope_wire.captures import validate_capture
from stagescope_wire.errors import Forbidden, InvalidPlan
from stagescope_wire.links import STEP_NOUNS
from stagescope_wire.nonfinite import Json, JsonObject

SEVERITIES: Final = ("info", "warning", "error")
MAX_PINNED: Final = 100
_WORST: Final = re.compile(r"worst\((\d{1,6})\)")
_CAPTURE_FIELDS: Final = (
    "ranks", "stages", "steps", "config", "task", "level", "scope", "list", "data_mode", "keep",
    "parameters", "gradients", "limits", "timeout", "late", "if_allowed",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CaptureTemplate:
    """A capture to request from the next step: the affected stage, or the stages in `stages`.

    `request` holds the fields of `stagescope_wire.captures.CAPTURE_FIELDS` as they were given. With
    `if_allowed` it is requested if the run has a budget, and skipped silently otherwise.
    """

    ranks: str | list[int]
    request: JsonObject
    if_allowed: bool = False

    @classmethod
    def parse(cls, value: object, field: str) -> CaptureTemplate:
        """Parse a template."""
        given = fields.mapping({} if value is True else value, field, _CAPTURE_FIELDS)
        steps = given.pop("steps", "next")
        if steps != "next":
            raise fields.wrong(f"{field}.steps", steps, "'next': the next common step")
        if_allowed = fields.flag(given.pop("if_allowed", False), f"{field}.if_allowed")
        ranks = given.pop("ranks", "worst(1)")
        is_list = (
            isinstance(ranks, list)
            and ranks
            and all(type(rank) is int and rank >= 0 for rank in ranks)
        )
        if ranks != "all" and not is_list and not _WORST.fullmatch(str(ranks)):
            raise fields.wrong(f"{field}.ranks", ranks, "'worst(k)', 'all' or a list of ranks")
        if not {"config", "task", "level", "keep", "parameters", "gradients"} & set(given):
            given |= {"task": "statistics", "level": "L0"}
        return cls(ranks, given, if_allowed)

    def check(self, field: str) -> None:
        """Refuse an invalid request, except places of files, on which each run decides."""
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

    def wire(self, *, secrets: bool = True) -> dict[str, Json]:
        """Return the document form that `parse` reads."""
        document = {"ranks": self.ranks, "steps": "next", **self.request}
        return document | ({"if_allowed": True} if self.if_allowed else {})


def _nouns(value: object, field: str) -> tuple[str, ...]:
    given: Sequence[object] = value if isinstance(value, list | tuple) else (value,)
    given = given if value else ()
    nouns = tuple(noun for noun in given if isinstance(noun, str) and noun in STEP_NOUNS)
    if len(nouns) < len(given):
        raise fields.wrong(field, value, f"a list of {', '.join(sorted(STEP_NOUNS))}")
    return nouns


def _advice(value: object, field: str) -> object:
    return fields.text(2000)(value, field) if value else ""


@dataclasses.dataclass(frozen=True)
class FindingTemplate(fields.Declared):
    """The finding of a firing.

    Attributes:
        advice: what to try; `{step}` in it becomes the step.
        see: parts of the step to look at: last words of paths below `/steps/{step}`.
    """

    SHOWS_DEFAULTS = True

    severity: Annotated[str, fields.one_of(*SEVERITIES)] = "warning"
    advice: Annotated[str, _advice] = ""
    see: Annotated[tuple[str, ...], _nouns] = ()

    @classmethod
    def parse(cls, value: object, field: str) -> FindingTemplate:
        """Read a template; `true` means the default one."""
        return super().parse({} if value is True else value, field)

    def wire(self, *, secrets: bool = True) -> dict[str, Json]:
        """Return the document form that `parse` reads."""
        found = super().wire(secrets=secrets)
        return {name: value for name, value in found.items() if name != "see" or value}


@dataclasses.dataclass(frozen=True)
class Actions(fields.Declared):
    """The actions of a rule; None (or 0) means no such action.

    Attributes:
        pin: number of last steps whose payloads are pinned in the ring.
        webhook: receives the firing.
        capture: requested if the run allows it and its budget suffices.
    """

    finding: Annotated[FindingTemplate | None, FindingTemplate.parse] = None
    pin: Annotated[int, fields.count(0, MAX_PINNED)] = 0
    webhook: Annotated[Webhook | None, Webhook.parse] = None
    capture: Annotated[CaptureTemplate | None, CaptureTemplate.parse] = None

    @classmethod
    def parse(cls, value: object, field: str) -> Actions:
        """Read the actions of a rule."""
        if value == {}:
            raise fields.wrong(field, value, "at least one of finding, pin, webhook, capture")
        return super().parse(value, field)

    @property
    def costs(self) -> bool:
        """Whether there are actions besides a finding, repeated only after the cooldown."""
        return bool(self.pin) or self.webhook is not None or self.capture is not None
