"""What a firing says: which rank, stage, round and token, and with which numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from stagescope_service.statistics.summary import UNKNOWN, Summary, Tokens
from stagescope_service.statistics.whole import Whole
from stagescope_service.store.parts import incarnation_of
from stagescope_service.triggers import names
from stagescope_service.triggers.facts import Facts
from stagescope_service.triggers.rules import Rule
from stagescope_service.triggers.watch import Firing, Hit

Row = dict[str, Any]

LISTED: Final = 10
"""Series that evidence lists; it says how many there are."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Where and what a rule fired on; unknown is None.

    `ranks` are the (role, rank) whose own numbers are the worst there, the worst first.
    """

    message: str
    stage: str | None
    role: str | None
    rank: int | None
    round: int | None
    token: Row | None
    numbers: Row
    ranks: tuple[tuple[str, int], ...]


def explain(rule: Rule, firing: Firing, facts: Facts, processes: Iterable[Row]) -> Evidence:
    """Put a firing into words and numbers.

    Args:
        rule: that fired.
        firing: at this step, with at least one hit.
        facts: of the step.
        processes: rows of the attempt's processes, which say who handed a token over.
    """
    worst = firing.hits[0]
    series = worst.series
    whole = facts.wholes.get(rule.stage or series.stage)
    token = None
    if whole is not None and not rule.of_stages:
        token = _token(rule, worst, whole, processes)
    role, rank = series.role, series.rank
    if rule.of_stages:
        stage, role, rank = _slow_or_missing(worst, facts)
    else:
        stage = None if whole is None else whole.stage
    if rank is None and token is not None:
        role, rank = token["role"], token["rank"]
    number = series.round
    if number is None and token is not None:
        number = token["round"]
    return Evidence(
        message=_message(rule, firing, facts, token, (stage, role, rank, number)),
        stage=stage,
        role=role,
        rank=rank,
        round=number,
        token=token,
        numbers=_numbers(rule, firing),
        ranks=_worst_ranks(whole, role, rank),
    )


def _numbers(rule: Rule, firing: Firing) -> Row:
    return {
        "rule": rule.name,
        "metric": firing.hits[0].series.metric,
        "value": firing.hits[0].value,
        **firing.hits[0].numbers,
        "when": rule.when.wire(),
        "for": rule.consecutive,
        "series": len(firing.hits),
        "hits": [_hit(hit) for hit in firing.hits[:LISTED]],
    }


def _hit(hit: Hit) -> Row:
    place = {name: value for name, value in hit.series._asdict().items() if value is not None}
    return {**place, "value": hit.value, **hit.numbers}


def _message(
    rule: Rule,
    firing: Firing,
    facts: Facts,
    token: Row | None,
    place: tuple[str | None, str | None, int | None, int | None],
) -> str:
    stage, role, rank, number = place
    worst = firing.hits[0]
    against = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in worst.numbers.items()]
    text = f"{rule.name}: {worst.series.metric} is {worst.value:.6g}"
    text += f" ({', '.join(against)})" if against else ""
    text += f" at step {facts.step}"
    text += "" if stage is None else f", stage {stage}"
    text += "" if rank is None else f", {role} rank {rank}"
    text += "" if number is None else f", round {number}"
    if token is not None:
        sample = token["sample_uid"] or f"row {token['row']}"
        text += f", token {token['position']} of {sample}"
    return text


def _slow_or_missing(worst: Hit, facts: Facts) -> tuple[str | None, str | None, int | None]:
    """Return the (stage, role, rank) that a metric of stage events is about."""
    series = worst.series
    if series.metric == names.MISSING_RANKS:
        rows = [row for row in facts.missing if series.stage in (None, row["stage"])]
        first = min(rows, key=lambda row: (row["role"], row["rank"]), default=None)
        if first is None:
            return series.stage, None, None
        return first["stage"], first["role"], int(first["rank"])
    at_it = {
        place: seconds
        for place, seconds in facts.seconds.items()
        if place[0] == series.stage and series.rank in (None, place[2])
    }
    slowest = max(at_it, key=lambda place: (at_it[place], place), default=None)
    return (series.stage, None, None) if slowest is None else slowest


def _token(rule: Rule, worst: Hit, whole: Whole, processes: Iterable[Row]) -> Row | None:
    """Return the worst token of the series that fired, as far as the summary kept it."""
    places = {row["incarnation"]: (row["role"], row["rank"]) for row in processes}
    summary = whole.summary
    of_non_finite = worst.series.metric.startswith("nonfinite/") or rule.when.non_finite
    tokens = summary.non_finite if of_non_finite else summary.worst
    rows = (_token_row(tokens, at, summary, places) for at in range(len(tokens)))
    return next((row for row in rows if _is_of(row, worst, summary)), None)


def _is_of(row: Mapping[str, Any], worst: Hit, summary: Summary) -> bool:
    series = worst.series
    if series.round is not None and row["round"] != series.round:
        return False
    if series.rank is not None and (row["role"], row["rank"]) != (series.role, series.rank):
        return False
    if series.metric.startswith("nonfinite/"):
        stream, _, kind = series.metric.removeprefix("nonfinite/").rpartition("_")
        value = row["p"] if stream == summary.pair[0] else row["q"]
        return _kind(value) == kind
    return True


def _kind(value: float) -> str:
    if math.isnan(value):
        return "nan"
    return "" if math.isfinite(value) else "posinf" if value > 0 else "neginf"


def _token_row(
    tokens: Tokens, at: int, summary: Summary, places: Mapping[str, tuple[str, int]]
) -> Row:
    sequence = int(tokens.sequence[at])
    sequences = summary.sequences
    source = summary.sources[int(sequences.source[sequence])]
    role, rank = places.get(incarnation_of(source), (None, None))
    token_id = int(tokens.token_id[at])
    return {
        "sample_uid": sequences.samples[sequence] or None,
        "row": int(sequences.row[sequence]),
        "position": int(tokens.position[at]),
        "round": int(tokens.round[at]),
        "token_id": None if token_id == UNKNOWN else token_id,
        "p": float(tokens.p[at]),
        "q": float(tokens.q[at]),
        "role": role,
        "rank": rank,
    }


def _worst_ranks(
    whole: Whole | None, role: str | None, rank: int | None
) -> tuple[tuple[str, int], ...]:
    """Return the ranks by their own numbers, the one concerned first."""
    rows = () if whole is None else whole.ranks
    ordered = sorted(
        rows,
        key=lambda row: (
            (row.role, row.rank) != (role, rank),
            row.cell.tokens - row.cell.masked,  # most tokens that are not finite
            -row.cell.abs_max if math.isfinite(row.cell.abs_max) else 0.0,
            row.role,
            row.rank,
        ),
    )
    found = [(row.role, row.rank) for row in ordered]
    if rank is not None and role is not None and (role, rank) not in found:
        found.insert(0, (role, rank))
    return tuple(found)
