"""Groups of findings, losses and firings by their cause, and the outcomes of firings as texts.

A NaN that persists makes a finding for each rank and step. Rows of one attempt with the same stage
and role, whose texts are equal apart from numbers and ids, make one group. Groups of findings are
sorted by severity, then by how much they name: an operator, why streams cannot be compared, a rank,
a round. The row of a group is its first finding, where the problem began, with the extent of all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from stagescope_service.store.queries.findings import (
    FindingOutline,
    FiringOutline,
    LossOutline,
    Outline,
)
from stagescope_service.store.tables.findings import FiredActions, PinnedOf
from stagescope_service.views.models.findings import Extent
from stagescope_wire.render import ranges_text

SEVERITIES: Final = ("error", "warning", "info")
_MAX_CAPTURES: Final = 6
"""Most captures that a text lists."""

# Patterns of a text in which every digit is a zero.
_DIGITS: Final = str.maketrans("123456789", "0" * 9)
_NUMBERS: Final = r"(?:(?<!\w)-)?0+(?:\.0+)?(?:e[-+]?0+)?"
_IDS: Final = r"""'[^']*0[^']*'|"[^"]*0[^"]*"|\b(?=[a-f-]*0)[0a-f]{6}[0a-f-]*\b"""
_ID: Final = re.compile(_IDS)
_NUMBER: Final = re.compile(_NUMBERS)
_PLURAL: Final = re.compile(r"(\b0 [a-z]+?)s\b")
_LIST: Final = re.compile(r"\b(rank|step)s\b|0(?:(?:, ?| and | ?- ?)0)+\b")


def without_values(text: str | None) -> str:
    """Return a text without its values, which differ between texts of one cause."""
    return _without_numbers((text or "").translate(_DIGITS))


@functools.lru_cache(maxsize=4096)  # texts of one cause often differ in their digits alone
def _without_numbers(text: str) -> str:
    plain = _PLURAL.sub(r"\1", _NUMBER.sub("0", _ID.sub("0", text)))
    return _LIST.sub(lambda match: match[1] or "0", plain)


E = TypeVar("E", bound=Outline)


CauseKey = tuple[object, ...]


def group(rows: Iterable[E], key: Callable[[E], CauseKey]) -> list[list[E]]:
    """Return the rows by attempt and key, each group in the order of step and rank."""
    groups: dict[CauseKey, list[E]] = {}
    for row in rows:
        groups.setdefault((row["attempt_id"], *key(row)), []).append(row)
    for each in groups.values():
        each.sort(key=lambda row: (_last_if_none(row["step"]), _last_if_none(row["rank"])))
    return list(groups.values())


def _last_if_none(number: int | None) -> tuple[bool, int]:
    return (number is None, number or 0)


def finding_key(row: FindingOutline) -> CauseKey:
    """Return the cause of a finding."""
    # Findings of a trigger have the same cause by its rule and their evidence: messages name single
    # tokens.
    of_trigger = row["kind"].startswith("trigger_")
    text = None if of_trigger else without_values(row["message"])
    return (row["kind"], row["severity"], row["stage"], row["role"], text, *_subject(row))


def _subject(row: FindingOutline) -> tuple[object, object, object]:
    """Return the operator, the metric and why its streams cannot be compared, of a finding."""
    evidence = row["evidence"] or {}
    cause = evidence.get("cause")
    why = cause.get("name") if isinstance(cause, Mapping) else None
    return evidence.get("name"), evidence.get("metric"), why


def loss_key(row: LossOutline) -> CauseKey:
    """Return the cause of a loss."""
    return (row["kind"], without_values(row["reason"]), row["stage"], row["role"])


def firing_key(row: FiringOutline) -> CauseKey:
    """Return the rule and place of a firing."""
    return (row["rule"], row["stage"], row["role"])


_CAUSE: Final = "streams_"
"""Begins the kind of a finding that says why streams cannot be compared."""


def finding_order(
    group: Sequence[FindingOutline],
) -> tuple[int, bool, int, int, tuple[bool, int], str, str]:
    """Return the sort key of a group: severity, whether it persists, how much it names, ..."""
    first = group[0]
    severity = first["severity"]
    rank = SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)
    place = (first["rank"], first["stage"], first["step"])
    named = (4 if _subject(first)[0] else 0) + sum(each is not None for each in place)
    if first["kind"].startswith(_CAUSE):
        named += 3  # what rules say of the same streams follows from it
    return (
        rank, over_since(group) is not None, -named, -(first["attempt_id"] or 0),
        _last_if_none(first["step"]), first["kind"], first["finding_id"],
    )  # fmt: skip


def over_since(group: Sequence[FindingOutline]) -> float | None:
    """Return the time since when no finding of a group persists; None where one does."""
    ended = [row["over_wall"] for row in group if row["over_wall"] is not None]
    return max(ended) if len(ended) == len(group) else None


def extent(group: Sequence[Outline]) -> Extent:
    """Return the steps and ranks of a group, as numbers and as text."""
    steps = sorted({row["step"] for row in group if row["step"] is not None})
    ranks = sorted({row["rank"] for row in group if row["rank"] is not None})
    texts = [ranges_text("step", steps), ranges_text("rank", ranks)]
    return {
        "where": ", ".join(text for text in texts if text),
        "first_step": steps[0] if steps else None,
        "last_step": steps[-1] if steps else None,
        "steps": len(steps),
        "ranks": len(ranks),
    }


# --- outcomes of firings --------------------------------------------------------------------
def outcomes(fired: Sequence[FiredActions | None]) -> list[str]:
    """Return the results of the actions of firings as texts: captures, pins, webhooks.

    Args:
        fired: the actions of firings of one attempt; None: not taken yet.
    """
    results = [actions for actions in fired if actions is not None]
    since = [actions["cools_since"] for actions in results if "cools_since" in actions]
    texts = [*_capture_outcomes(results), *_pin_outcomes(results), *_webhook_outcomes(results)]
    if since:
        text = "not taken again: the rule cools down from those of "
        texts.append(text + ranges_text("step", sorted({*since})))
    if waiting := len(fired) - len(results):
        texts.append("actions are not taken yet" + (f" of {waiting}" if results else ""))
    return texts


def _capture_outcomes(results: Sequence[FiredActions]) -> list[str]:
    captures = [capture for actions in results if (capture := actions.get("capture"))]
    ids = [*dict.fromkeys(each for fired in captures if (each := fired.get("capture_id")))]
    more = f" and {len(ids) - _MAX_CAPTURES} more" if len(ids) > _MAX_CAPTURES else ""
    texts = [f"capture {', '.join(ids[:_MAX_CAPTURES])}{more} requested"] if ids else []
    refusals = [why for fired in captures if (why := fired.get("refused"))]
    return texts + [f"capture refused{times}: {why}" for why, times in _count_texts(refusals)]


def _pin_outcomes(results: Sequence[FiredActions]) -> list[str]:
    # Firings of neighbouring steps pin the same steps: each step counts once.
    pins: dict[int, PinnedOf] = {}
    for actions in results:
        pinned_by = actions.get("pin")
        for pin in pinned_by["steps"] if pinned_by else ():
            earlier = pins.get(pin["step"])
            if earlier is None or pin["payloads"] >= earlier["payloads"]:
                pins[pin["step"]] = pin
    if not pins:
        return []
    pinned = {step: pin["payloads"] for step, pin in pins.items() if pin["payloads"]}
    gone = sum(pin["gone"] for pin in pins.values())
    if not pinned:
        text = f"pinned no payload of {ranges_text('step', sorted(pins))}: none were left"
    else:
        payloads = sum(pinned.values())
        text = f"pinned {payloads} payload{'' if payloads == 1 else 's'} of "
        text += ranges_text("step", sorted(pinned))
    text += f" ({gone} had left the ring before)" if gone else ""
    reasons = [why for pin in pins.values() for why in pin["reasons"]]
    return [text, *(f"not pinned{times}: {why}" for why, times in _count_texts(reasons))]


def _webhook_outcomes(results: Sequence[FiredActions]) -> list[str]:
    calls = [webhook for actions in results if (webhook := actions.get("webhook"))]
    delivered = [f"webhook {call['host']} told" for call in calls if call["delivered"]]
    failed = [
        f"webhook {call['host']} not told: {call['reason']}"
        for call in calls
        if not call["delivered"]
    ]
    return [f"{text}{times}" for text, times in (*_count_texts(delivered), *_count_texts(failed))]


def _count_texts(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Return the first of the texts that differ in their values alone, each with ` 3 times`."""
    same: dict[str, list[str]] = {}
    for text in texts:
        same.setdefault(without_values(text), []).append(text)
    return [(each[0], f" {len(each)} times" if len(each) > 1 else "") for each in same.values()]
