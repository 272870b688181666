"""The evidence of a firing: its rank, stage, round and token, and the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypedDict

from stagescope_service.rules import names
from stagescope_service.rules.document import Rule
from stagescope_service.rules.facts import StepFacts
from stagescope_service.rules.series import NAMED, SeriesKey, bad_scalars, pack, scalar_series
from stagescope_service.rules.watch import Firing, Hit
from stagescope_service.statistics.comparability import causes_of_ranks
from stagescope_service.statistics.mismatch import publish_cell
from stagescope_service.statistics.step_summary import StepSummary
from stagescope_service.statistics.summary import UNKNOWN, Summary, Tokens
from stagescope_service.store.parts import incarnation_of
from stagescope_service.store.tables import ProcessColumns, ScalarRow
from stagescope_service.store.tables.findings import FiringColumns
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.render import ranges_text, ranks_text
from stagescope_wire.schema import PART_FIELDS, RankKey

LISTED: Final = 10
"""Maximum series that evidence lists; it also has their total number."""


class TokenEvidence(TypedDict):
    """A token: its sequence and place, its log-probs, and the rank that recorded it."""

    sample_uid: str | None
    row: int
    position: int
    round: int
    token_id: int | None
    p: float
    q: float
    role: str | None
    rank: int | None


def explain(
    rule: Rule,
    firing: Firing,
    facts: StepFacts,
    processes: Iterable[ProcessColumns],
    *,
    wall: float = 0.0,
    revision: int | None = None,
) -> FiringColumns:
    """Describe a firing: its message, location and numbers; unknown is None.

    If several ranks are affected and none is worse than another (all have a NaN, all are missing),
    `rank` is None. Among the evidence, `ranks` are those with the worst own numbers, worst first.

    Args:
        rule: the rule that fired.
        firing: its firing, with at least one hit.
        facts: the facts of the step.
        processes: of the attempt, to find the rank that recorded a token.
        wall: Unix seconds.
        revision: of the rules.
    """
    worst = firing.hits[0]
    series = worst.series
    step_summary = facts.of_stage(rule.stage or series.stage)
    stage = series.stage if step_summary is None else step_summary.stage
    token: TokenEvidence | None = None
    scalars: list[ScalarRow] = []
    if rule.of_scalars:
        hits = {hit.series for hit in firing.hits}
        scalars = [row for row in bad_scalars(rule, facts) if scalar_series(rule, row) in hits]
        stage = scalars[0]["stage"] if scalars else series.stage
        affected = _distinct((row["role"], row["rank"]) for row in scalars)
    elif rule.of_stages:
        stage, affected = _slow_or_missing(firing, facts)
    else:
        if step_summary is not None:
            token = _token(rule, firing, step_summary, processes)
        affected = _affected(firing, step_summary, token)
    role, rank = _one_of(affected, series)
    number = series.round if series.round is not None or token is None else token["round"]
    first = [row for row in scalars if row["name"] == scalars[0]["name"]]
    shown = _distinct((row["role"], row["rank"]) for row in first) or affected
    others = [each for each in shown if each != (role, rank)]
    where = f" at step {facts.step}" + ("" if stage is None else f", stage {stage}")
    where += _where(role, rank, others, number, token)
    what = f"{first[0]['name']} is {first[0]['value']}" if first else ""
    what = what or _metric_text(worst, rank, len(affected))
    return {
        "attempt_id": facts.attempt_id,
        "step": facts.step,
        "rule": rule.name,
        "run": facts.run,
        "revision": revision,
        "stage": stage,
        "role": role,
        "rank": rank,
        "round": number,
        "message": f"{rule.name}: {what}{where}{_other_scalars(scalars)}{_lasting(firing)}",
        "evidence": {
            **_numbers(rule, firing),
            "token": token,
            "affected": [list(each) for each in affected],
            **_cause(rule, series, step_summary, role, rank),
            **({"scalars": [_scalar(row) for row in scalars[:LISTED]]} if scalars else {}),
            "ranks": [list(each) for each in _worst_ranks(step_summary, affected)],
            NAMED: pack(hit.series for hit in (*firing.hits, *firing.lasting)),
            "attempt": facts.attempt,
        },
        "wall": wall,
        "withdrawn_wall": None,
    }


def _cause(
    rule: Rule,
    series: SeriesKey,
    step_summary: StepSummary | None,
    role: str | None,
    rank: int | None,
) -> dict[str, Json]:
    """Return why a rank's streams cannot be compared, if its own tokens show a cause."""
    is_count = rule.of_stages or names.is_nonfinite(series.metric)
    if step_summary is None or is_count:
        return {}  # a count is independent of whether the streams are comparable
    own = [row for row in step_summary.ranks if (row.role, row.rank) == (role, rank)]
    found = causes_of_ranks(step_summary.summary, own)
    return {"cause": {"name": found[0].check.name, "text": found[0].alone}} if found else {}


def _numbers(rule: Rule, firing: Firing) -> dict[str, Json]:
    return {
        "rule": rule.name,
        "metric": firing.hits[0].series.metric,
        "value": firing.hits[0].value,
        **firing.hits[0].numbers,
        "when": rule.when.wire(),
        "for": rule.consecutive,
        "cooldown": rule.cooldown,
        "series": len(firing.hits),
        "hits": [_hit(hit) for hit in firing.hits[:LISTED]],
        "lasting": [_hit(hit) for hit in firing.lasting[:LISTED]],
        "cools_since": None if firing.cools_since is None else firing.cools_since.step,
    }


def _hit(hit: Hit) -> JsonObject:
    location = {name: value for name, value in hit.series._asdict().items() if value is not None}
    return {**location, "value": hit.value, **hit.numbers}


def _scalar(row: ScalarRow) -> JsonObject:
    columns: JsonObject = row
    part = {name: columns[name] for name in PART_FIELDS if columns[name] is not None}
    return {**{name: columns[name] for name in ("name", "value", "stage", "role", "rank")}, **part}


# --- the message ------------------------------------------------------------------------------
def _where(
    role: str | None,
    rank: int | None,
    others: Sequence[RankKey],
    number: int | None,
    token: TokenEvidence | None,
) -> str:
    text = "" if not others else f", {ranks_text(others)}"
    if rank is not None:
        text = f", {role} rank {rank}" + (f" (also {ranks_text(others)})" if others else "")
    text += "" if number is None else f", round {number}"
    if token is not None:
        sample = token["sample_uid"] or f"row {token['row']}"
        text += f", token {token['position']} of {sample}"
        text += f" on {token['role']} rank {token['rank']}" if rank is None else ""
    return text


def _metric_text(worst: Hit, rank: int | None, affected: int) -> str:
    against = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in worst.numbers.items()]
    text = f"{worst.series.metric} is {worst.value:.6g}"
    if worst.series.rank is not None and worst.series.metric == names.MISSING_RANKS:
        text = f"{worst.series.metric} is {affected}"
    elif worst.series.rank is not None and rank is None:
        text = f"{worst.series.metric} is up to {worst.value:.6g} a rank"
    return text + (f" ({', '.join(against)})" if against else "")


def _other_scalars(rows: Sequence[ScalarRow]) -> str:
    """Name the scalars after the first, with their ranks where these differ from its ranks."""
    ranks: dict[str, list[RankKey]] = {}
    for row in rows:
        ranks.setdefault(row["name"], []).append((row["role"], row["rank"]))
    own, *others = ranks.values() or [[]]
    differ = any({*each} != {*own} for each in others)
    texts = [f"{name} ({ranks_text(each)})" if differ else name for name, each in ranks.items()][1:]
    return f"; also not finite: {', '.join(texts[:LISTED])}{_more(len(texts))}" if texts else ""


def _more(count: int) -> str:
    return f" and {count - LISTED} more" if count > LISTED else ""


def _lasting(firing: Firing) -> str:
    """Describe the series of a firing that an earlier one already reported."""
    by_metric: dict[str, list[SeriesKey]] = {}
    for hit in firing.lasting:
        metric = hit.series.metric.removeprefix(names.NONFINITE_SCALAR)
        by_metric.setdefault(metric, []).append(hit.series)
    parts = []
    for metric, series in [*by_metric.items()][:LISTED]:
        role_ranks = _distinct((one.role, one.rank) for one in series)
        rounds = sorted({one.round for one in series if one.round is not None})
        parts.append(metric + (f" on {ranks_text(role_ranks)}" if role_ranks else ""))
        parts[-1] += f" in {ranges_text('round', rounds)}" if rounds else ""
    return f"; already reported: {'; '.join(parts)}{_more(len(by_metric))}" if parts else ""


# --- the ranks --------------------------------------------------------------------------------
def _distinct(role_ranks: Iterable[tuple[str | None, int | None]]) -> tuple[RankKey, ...]:
    found = dict.fromkeys(role_ranks)
    return tuple((role, rank) for role, rank in found if role is not None and rank is not None)


def _one_of(affected: Sequence[RankKey], series: SeriesKey) -> tuple[str | None, int | None]:
    """Return the single (role, rank) of a firing; for several only their common role.

    A count of ranks has no worst rank.
    """
    metric = series.metric
    is_count = metric == names.MISSING_RANKS or metric.startswith(names.NONFINITE_SCALAR)
    is_count = is_count or names.is_nonfinite(metric)
    if series.rank is not None and (len(affected) == 1 or not is_count):
        return series.role, series.rank
    if len(affected) == 1:
        return affected[0]
    roles = {role for role, _ in affected}
    return (roles.pop() if len(roles) == 1 else None), None


def _affected(
    firing: Firing, step_summary: StepSummary | None, token: TokenEvidence | None
) -> tuple[RankKey, ...]:
    """Return the ranks whose own numbers meet the condition that fired."""
    of_ranks = _distinct((hit.series.role, hit.series.rank) for hit in firing.hits)
    metrics = {hit.series.metric for hit in firing.hits}
    if not of_ranks and step_summary is not None and all(map(names.is_nonfinite, metrics)):
        counts: dict[RankKey, float] = {}
        for row in step_summary.ranks:
            published = publish_cell(row.cell, step_summary.summary.pair)
            counts[row.role, row.rank] = sum(published.get(name, 0.0) for name in metrics)
        bad = [role_rank for role_rank, count in counts.items() if count]
        of_ranks = tuple(sorted(bad, key=lambda role_rank: (-counts[role_rank], role_rank)))
    return of_ranks or (() if token is None else _distinct([(token["role"], token["rank"])]))


def _slow_or_missing(firing: Firing, facts: StepFacts) -> tuple[str | None, tuple[RankKey, ...]]:
    """Return the stage and ranks of a firing on a metric of stage events."""
    series = firing.hits[0].series
    if series.metric != names.MISSING_RANKS:
        timings = {
            key: seconds
            for key, seconds in facts.seconds.items()
            if key[0] == series.stage and series.rank in (None, key[2])
        }
        slowest = max(timings, key=lambda key: (timings[key], key), default=None)
        return (series.stage, ()) if slowest is None else (slowest[0], (slowest[1:],))
    if series.rank is not None:
        of_hits = (hit.series for hit in firing.hits if hit.series.stage == series.stage)
        return series.stage, _distinct((one.role, one.rank) for one in of_hits)
    rows = [row for row in facts.missing if series.stage in (None, row["stage"])]
    rows.sort(key=lambda row: (row["role"], row["rank"]))
    stage = rows[0]["stage"] if rows else series.stage
    return stage, _distinct((row["role"], row["rank"]) for row in rows if row["stage"] == stage)


def _worst_ranks(
    step_summary: StepSummary | None, affected: Sequence[RankKey]
) -> tuple[RankKey, ...]:
    """Return the ranks by their own numbers, the affected ones first."""
    rows = () if step_summary is None else step_summary.ranks
    ordered = sorted(
        rows,
        key=lambda row: (
            row.cell.tokens - row.cell.masked,  # the most non-finite tokens first
            -row.cell.abs_max if math.isfinite(row.cell.abs_max) else 0.0,
            row.role,
            row.rank,
        ),
    )
    return tuple(dict.fromkeys([*affected, *((row.role, row.rank) for row in ordered)]))


# --- the token --------------------------------------------------------------------------------
def _token(
    rule: Rule, firing: Firing, step_summary: StepSummary, processes: Iterable[ProcessColumns]
) -> TokenEvidence | None:
    """Return the worst token of the first series with one in the summary.

    For ranks that hold the same rows the summary has the tokens of one.
    """
    worst = firing.hits[0]
    ranks = {row["incarnation"]: (row["role"], row["rank"]) for row in processes}
    summary = step_summary.summary
    of_non_finite = names.is_nonfinite(worst.series.metric) or rule.when.non_finite
    tokens = summary.non_finite if of_non_finite else summary.worst
    rows = [_token_row(tokens, at, summary, ranks) for at in range(len(tokens))]
    of_hits = (row for hit in firing.hits for row in rows if _is_of(row, hit, summary))
    return next(of_hits, None)


def _is_of(row: TokenEvidence, worst: Hit, summary: Summary) -> bool:
    series = worst.series
    if series.round is not None and row["round"] != series.round:
        return False
    if series.rank is not None and (row["role"], row["rank"]) != (series.role, series.rank):
        return False
    if names.is_nonfinite(series.metric):
        stream, _, kind = series.metric.removeprefix("nonfinite/").rpartition("_")
        value = row["p"] if stream == summary.pair[0] else row["q"]
        return _kind(value) == kind
    return True


def _kind(value: float) -> str:
    if math.isnan(value):
        return "nan"
    return "" if math.isfinite(value) else "posinf" if value > 0 else "neginf"


def _token_row(
    tokens: Tokens, at: int, summary: Summary, processes: Mapping[str, tuple[str, int]]
) -> TokenEvidence:
    sequence = int(tokens.sequence[at])
    sequences = summary.sequences
    source = summary.sources[int(sequences.source[sequence])]
    role, rank = processes.get(incarnation_of(source), (None, None))
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
