"""Findings, losses and firings by what they say: one row for what lasts over steps and ranks.

A NaN that lasts makes a finding a rank and step. Rows of one attempt that say the same of the same
stage and role, apart from numbers and ids, make one group; the most severe stand first, then those
that name most: an operator, a rank, a round. A group's own row is its first finding, where the
trouble began.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query

from stagescope.wire.errors import InvalidInput, NotFound
from stagescope_service.api import rows as shape
from stagescope_service.api.dependencies import (
    RUN_PATTERN,
    AttemptNumber,
    Dependencies,
    Deps,
    Row,
    Run,
)
from stagescope_service.api.models import runs as models
from stagescope_service.api.requests import Answer, PageOf, pattern
from stagescope_service.store.queries.findings import Noticed

router = APIRouter(tags=["runs"])

MOST_ROWS: Final = 50_000
"""How many rows are grouped, the newest; more are said to be left out."""
SEVERITIES: Final = ("error", "warning", "info")
_STRETCHES: Final = 6
"""How many stretches of steps or ranks a group names."""
_DIGITS: Final = str.maketrans("123456789", "0" * 9)
_ID: Final = re.compile(r"""'[^']*0[^']*'|"[^"]*0[^"]*"|\b(?=[a-f-]*0)[0a-f]{6}[0a-f-]*\b""")
"""A quoted name that holds a digit (of a sample), or hex digits (of a capture), all digits 0."""
_NUMBER: Final = re.compile(r"(?:(?<!\w)-)?0+(?:\.0+)?(?:e[-+]?0+)?")
_LIST: Final = re.compile(r"\b(rank|step)s\b|0(?:(?:, ?| and | ?- ?)0)+\b")

Only = Annotated[
    str | None,
    Query(
        max_length=500,
        description="Only these: severities (error, warning, info) and patterns of kinds "
        "(of rules, for firings), joined by commas: `error`, `streams_*,warning`.",
    ),
]


@router.get("/findings/groups", response_model=models.FindingGroups)
def finding_groups(
    deps: Deps, page: PageOf, run: Run = None, attempt: AttemptNumber = None, only: Only = None
) -> Answer:
    """List what was noticed to be wrong, a row a kind of trouble, the most severe first.

    A row is the first of its findings, with `where` (steps and ranks in words), `first_step`,
    `last_step`, `ranks` and `steps` (how many of each), `findings` (how many rows of `/findings`)
    and `count` (how often seen). `truncated`: there were more findings than are looked at.
    """
    scope, numbers, said = scope_of(deps, run, attempt)
    chosen = only_of(deps, "findings", scope, only)
    found = deps.catalogue.outline("findings", **scope, **chosen, limit=MOST_ROWS)
    groups = sorted(_grouped(found, _finding_key), key=_finding_order)
    shown = groups[page.offset : page.offset + page.limit]
    ids = [group[0]["finding_id"] for group in shown]
    by_id = {row["finding_id"]: row for row in deps.catalogue.findings(finding_id=ids)}
    rows = [
        {
            **by_id[group[0]["finding_id"]],
            **_extent(group),
            "findings": len(group),
            "count": sum(row["count"] or 1 for row in group),
            "first_wall": min(row["first_wall"] for row in group),
            "last_wall": max(row["last_wall"] for row in group),
            "over_wall": _over(group),
        }
        for group in shown
        if group[0]["finding_id"] in by_id  # else it was taken back meanwhile
    ]
    answer = page.answer(shape.numbered(rows, numbers), more=len(groups) > page.offset + page.limit)
    return Answer({**said, **_counted(found, groups), **answer})


@router.get("/findings/{finding_id}", response_model=models.Finding)
def finding(
    deps: Deps,
    finding_id: Annotated[str, Path(max_length=100, description="Its id, or how it begins.")],
) -> Answer:
    """Return one finding whole, and in `group` what others of its attempt say the same."""
    found = deps.catalogue.finding(finding_id)
    if not found:
        raise NotFound(f"there is no finding {finding_id!r:.100}", advice="see /findings")
    if len(found) > 1 and found[0]["finding_id"] != finding_id:
        raise InvalidInput(
            f"several findings begin with {finding_id!r:.100}", expected="more of its id"
        )
    row = found[0]
    numbers = {each["attempt_id"]: each["number"] for each in deps.catalogue.attempts(row["run"])}
    alike = deps.catalogue.outline(
        "findings", run=row["run"], attempt_id=row["attempt_id"], kind=row["kind"], limit=MOST_ROWS
    )
    own = next(
        (group for group in _grouped(alike, _finding_key)
         if any(each["finding_id"] == row["finding_id"] for each in group)),
        [row],
    )  # fmt: skip
    group = {**_extent(own), "findings": len(own), "first_id": own[0]["finding_id"]}
    (answer,) = shape.numbered([row], numbers)
    return Answer({**answer, "group": group})


@router.get("/losses/groups", response_model=models.LossGroups)
def loss_groups(
    deps: Deps, page: PageOf, run: Run = None, attempt: AttemptNumber = None, only: Only = None
) -> Answer:
    """List what never arrived, a row a kind, reason, stage and role; most lost first."""
    scope, numbers, said = scope_of(deps, run, attempt)
    chosen = only_of(deps, "losses", scope, only)
    found = deps.catalogue.outline("losses", **scope, **chosen, limit=MOST_ROWS)
    groups = _grouped(found, _loss_key)
    rows = [
        {
            **group[0],
            **_extent(group),
            "losses": len(group),
            "count": sum(row["count"] or 1 for row in group),
            "bytes": sum(row["bytes"] or 0 for row in group),
            "first_wall": min(row["wall"] for row in group),
            "last_wall": max(row["wall"] for row in group),
        }
        for group in groups
    ]
    rows.sort(key=lambda row: (-row["count"], str(row["kind"]), str(row["reason"])))
    return Answer({**said, **_counted(found, groups), **page.cut(shape.numbered(rows, numbers))})


@router.get("/triggers/firings/groups", response_model=models.FiringGroups, tags=["triggers"])
def firing_groups(
    deps: Deps,
    page: PageOf,
    run: Annotated[
        str | None,
        Query(
            description="Only of this run; default: of all.", json_schema_extra=pattern(RUN_PATTERN)
        ),
    ] = None,
    only: Only = None,
) -> Answer:
    """List what fired, a row a rule, stage and role; those that were taken back are left out."""
    scope: Row = {} if run is None else {"run": deps.finder.attempt(run).run}
    numbers = {row["attempt_id"]: row["number"] for row in deps.catalogue.attempts(run)}
    said = {"run": run}
    chosen = only_of(deps, "firings", scope, only)
    found = deps.catalogue.outline("firings", **scope, **chosen, limit=MOST_ROWS)
    found = [row for row in found if row["withdrawn_wall"] is None]
    groups = _grouped(found, _firing_key)
    rows = [
        {
            **group[0],
            **_extent(group),
            "outcomes": outcomes(group),
            "firings": len(group),
            "first_wall": min(row["wall"] for row in group),
            "last_wall": max(row["wall"] for row in group),
        }
        for group in groups
    ]
    rows.sort(key=lambda row: (-row["last_wall"], row["rule"]))
    return Answer({**said, **_counted(found, groups), **page.cut(shape.numbered(rows, numbers))})


def scope_of(
    deps: Dependencies, run: str | None, attempt: int | None
) -> tuple[Row, dict[int, int], Row]:
    """Return the filters, attempt_id -> number, and what the answer says first."""
    target = deps.finder.attempt(run, attempt)
    numbers = {row["attempt_id"]: row["number"] for row in deps.catalogue.attempts(target.run)}
    said = {**target.heading(), "attempt": attempt}
    if attempt is None:
        return {"run": target.run}, numbers, said
    return {"attempt_id": target.attempt_id}, numbers, said


def only_of(deps: Dependencies, name: Noticed, scope: Row, only: str | None) -> dict[str, Any]:
    """Return the filters that `only` stands for.

    Raises:
        NotFound: no kind matches, with those that there are.
    """
    words = [word.strip() for word in (only or "").split(",") if word.strip()]
    severities = [word for word in words if name == "findings" and word in SEVERITIES]
    patterns = [word for word in words if word not in severities]
    chosen: dict[str, Any] = {"severity": severities} if severities else {}
    if patterns:
        there = deps.catalogue.kinds(name, **scope)
        kinds = [kind for kind in there if any(fnmatch.fnmatchcase(kind, p) for p in patterns)]
        if there and not kinds:
            what = {"findings": "finding", "losses": "loss", "firings": "firing"}[name]
            raise NotFound(
                f"no {what} is of {', '.join(patterns)!r:.200}",
                expected=f"one of {', '.join(there[:30])}"
                + (f", or {', '.join(SEVERITIES)}" if name == "findings" else ""),
            )
        chosen["rule" if name == "firings" else "kind"] = kinds
    return chosen


def _grouped(rows: Iterable[Row], key: Callable[[Row], tuple[Any, ...]]) -> list[list[Row]]:
    """Return the rows by key, each group in the order of attempt, step and rank."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["attempt_id"], *key(row)), []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: (*map(_last_if_none, (row["step"], row["rank"])),))
    return list(groups.values())


def _last_if_none(number: int | None) -> tuple[bool, int]:
    return (number is None, number or 0)


def _finding_key(row: Row) -> tuple[Any, ...]:
    # A trigger says the same by its rule and metric; its message names each time another token.
    of_trigger = row["kind"].startswith("trigger_")
    text = None if of_trigger else _wording(row["message"])
    return (row["kind"], row["severity"], row["stage"], row["role"], text, *_subject(row))


def _wording(text: str | None) -> str:
    """Return a text without its numbers and ids: equal where two texts say the same.

    A shape, a number of bytes or seconds, a list of ranks is another each time.
    """
    return _without_numbers((text or "").translate(_DIGITS))


@functools.lru_cache(maxsize=4096)  # what lasts repeats the same text with other digits
def _without_numbers(text: str) -> str:
    plain = _NUMBER.sub("0", _ID.sub("0", text))
    return _LIST.sub(lambda found: found[1] or "0", plain)


def _subject(row: Row) -> tuple[Any, Any]:
    """Return the operator or the metric that a finding names."""
    evidence = row.get("evidence") or {}
    return evidence.get("name"), evidence.get("metric")


def _loss_key(row: Row) -> tuple[Any, ...]:
    return (row["kind"], _wording(row["reason"]), row["stage"], row["role"])


def _firing_key(row: Row) -> tuple[Any, ...]:
    return (row["rule"], row["stage"], row["role"])


def outcomes(group: Sequence[Row]) -> list[str]:
    """Return what became of the actions of firings, in words: captures, pins, webhooks.

    Args:
        group: rows of firings of one attempt, with their `actions`; None: not taken yet.
    """
    taken = [row["actions"] for row in group if row["actions"] is not None]
    since = [actions["cools_since"] for actions in taken if "cools_since" in actions]
    said = [*_capture_outcomes(taken), *_pin_outcomes(taken), *_webhook_outcomes(taken)]
    if since:
        text = "not taken again: the rule cools down from those of "
        said.append(text + _stretches("step", sorted({*since})))
    if waiting := len(group) - len(taken):
        said.append("actions are not taken yet" + (f" of {waiting}" if taken else ""))
    return said


def _capture_outcomes(taken: Sequence[Row]) -> list[str]:
    captures = [actions.get("capture") or {} for actions in taken]
    ids = [*dict.fromkeys(each["capture_id"] for each in captures if each.get("capture_id"))]
    more = f" and {len(ids) - _STRETCHES} more" if len(ids) > _STRETCHES else ""
    said = [f"capture {', '.join(ids[:_STRETCHES])}{more} ordered"] if ids else []
    refusals = [each["refused"] for each in captures if each.get("refused")]
    return said + [f"capture refused{times}: {why}" for why, times in _tallied(refusals)]


def _pin_outcomes(taken: Sequence[Row]) -> list[str]:
    # Firings of neighbouring steps pin the same steps: each counts once.
    steps: dict[int, Row] = {}
    for actions in taken:
        for pin in (actions.get("pin") or {}).get("steps") or ():
            known = steps.get(pin["step"])
            if known is None or pin["payloads"] >= known["payloads"]:
                steps[pin["step"]] = pin
    if not steps:
        return []
    pinned = {step: pin["payloads"] for step, pin in steps.items() if pin["payloads"]}
    gone = sum(pin["gone"] for pin in steps.values())
    if not pinned:
        text = f"pinned no payload of {_stretches('step', sorted(steps))}: none were left"
    else:
        payloads = sum(pinned.values())
        text = f"pinned {payloads} payload{'' if payloads == 1 else 's'} of "
        text += _stretches("step", sorted(pinned))
    text += f" ({gone} had left the ring before)" if gone else ""
    reasons = [why for pin in steps.values() for why in pin["reasons"]]
    return [text, *(f"not pinned{times}: {why}" for why, times in _tallied(reasons))]


def _webhook_outcomes(taken: Sequence[Row]) -> list[str]:
    calls = [actions["webhook"] for actions in taken if actions.get("webhook")]
    told = [f"webhook {call['host']} told" for call in calls if call["delivered"]]
    failed = [
        f"webhook {call['host']} not told: {call['reason']}"
        for call in calls
        if not call["delivered"]
    ]
    return [f"{text}{times}" for text, times in (*_tallied(told), *_tallied(failed))]


def _tallied(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Return each text that says something else, the first of its kind, and ` 3 times`."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(_wording(text), []).append(text)
    return [(said[0], f" {len(said)} times" if len(said) > 1 else "") for said in alike.values()]


def _finding_order(group: Sequence[Row]) -> tuple[Any, ...]:
    first = group[0]
    severity = first["severity"]
    rank = SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)
    named = (4 if _subject(first)[0] else 0) + sum(
        first[name] is not None for name in ("rank", "stage", "step")
    )
    return (
        rank, _over(group) is not None, -named, -(first["attempt_id"] or 0),
        _last_if_none(first["step"]), first["kind"], first["finding_id"],
    )  # fmt: skip


def _over(group: Sequence[Row]) -> float | None:
    """Return since when none of a group is so any more; None where one still is."""
    ended = [row["over_wall"] for row in group]
    return None if any(wall is None for wall in ended) else max(ended)


def _extent(group: Sequence[Row]) -> Row:
    """Return over which steps and ranks a group stretches, in numbers and in words."""
    steps = sorted({row["step"] for row in group if row["step"] is not None})
    ranks = sorted({row["rank"] for row in group if row["rank"] is not None})
    words = [_stretches("step", steps), _stretches("rank", ranks)]
    return {
        "where": ", ".join(word for word in words if word),
        "first_step": steps[0] if steps else None,
        "last_step": steps[-1] if steps else None,
        "steps": len(steps),
        "ranks": len(ranks),
    }


def _stretches(noun: str, numbers: Sequence[int]) -> str:
    """Return `steps 10-25, 30`: what follows on each other as one stretch."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    if not found:
        return ""
    words = [str(a) if a == b else f"{a}-{b}" for a, b in found[:_STRETCHES]]
    left = sum(b - a + 1 for a, b in found[_STRETCHES:])
    more = f" and {left} more" if left else ""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {', '.join(words)}{more}"


def _counted(rows: Sequence[Row], groups: Sequence[Any]) -> Mapping[str, Any]:
    return {"groups": len(groups), "grouped": len(rows), "truncated": len(rows) >= MOST_ROWS}
