"""The evidence of a firing: its rank, stage, round and token, and the numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypedDict

from stagescope.wire.nonfinite import Json, JsonObject
from stagescope.wire.schema import PART_FIELDS, RankKey
from stagescope_service.rules import names
from stagescope_service.rules.document import Rule
from stagescope_service.rules.facts import Facts
from stagescope_service.rules.series import SeriesKey, bad_scalars, scalar_series
from stagescope_service.rules.watch import Firing, Hit
from stagescope_service.statistics.comparability import causes_of_ranks
from stagescope_service.statistics.mismatch import publish_cell
from stagescope_service.statistics.step_summary import StepSummary
from stagescope_service.statistics.summary import UNKNOWN, Summary, Tokens
from stagescope_service.store.parts import incarnation_of
from stagescope_service.store.tables import ProcessColumns, ScalarRow

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


class StreamCause(TypedDict):
    """Why a rank's streams cannot be compared: the name of the check, and a sentence."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class FiringEvidence:
    """The location and numbers of a firing; unknown is None.

    `ranks` are the (role, rank) with the worst own numbers, the worst first. `affected` are those
    that the firing concerns; if there are several and none is worse than another (all have a NaN,
    all are missing), `rank` is None.
    """

    message: str
    stage: str | None
    role: str | None
    rank: int | None
    round: int | None
    token: TokenEvidence | None
    numbers: dict[str, Json]
    ranks: tuple[RankKey, ...]
    affected: tuple[RankKey, ...]
    cause: StreamCause | None = None
    """Of the rank; None if unknown."""
    scalars: tuple[JsonObject, ...] = ()
    """Non-finite scalars in the order of their logging; the first `LISTED`."""

    def evidence(self) -> dict[str, Json]:
        """Return the numbers with their location."""
        found = {**self.numbers, "token": self.token}
        found["affected"] = [list(each) for each in self.affected]
        found |= {} if self.cause is None else {"cause": self.cause}
        return found | ({"scalars": list(self.scalars)} if self.scalars else {})


def explain(
    rule: Rule, firing: Firing, facts: Facts, processes: Iterable[ProcessColumns]
) -> FiringEvidence:
    """Describe a firing: its message and numbers.

    Args:
        rule: the rule that fired.
        firing: its firing, with at least one hit.
        facts: the facts of the step.
        processes: of the attempt, to find the rank that recorded a token.
    """
    worst = firing.hits[0]
    series = worst.series
    step_summary = facts.summaries.get(rule.stage or series.stage)
    token: TokenEvidence | None = None
    scalars: list[ScalarRow] = []
    stage = series.stage if step_summary is None else step_summary.stage
    if rule.of_scalars:
        scalars = _scalars(rule, firing, facts)
        stage = scalars[0]["stage"] if scalars else series.stage
        affected = _distinct((row["role"], row["rank"]) for row in scalars)
    elif rule.of_stages:
        stage, affected = _slow_or_missing(firing, facts)
    else:
        token = None if step_summary is None else _token(rule, firing, step_summary, processes)
        affected = _affected(firing, step_summary, token)
    role, rank = _one_of(affected, series)
    number = series.round
    if number is None and token is not None:
        number = token["round"]
    message = _Message(facts.step, stage, role, rank, number, affected, token)
    return FiringEvidence(
        message=f"{rule.name}: " + message.text(worst, scalars) + _lasting(firing),
        stage=stage,
        role=role,
        rank=rank,
        round=number,
        token=token,
        numbers=_numbers(rule, firing),
        ranks=_worst_ranks(step_summary, affected),
        affected=affected,
        cause=_cause(rule, firing, step_summary, role, rank),
        scalars=tuple(_scalar(row) for row in scalars[:LISTED]),
    )


def _cause(
    rule: Rule, firing: Firing, step_summary: StepSummary | None, role: str | None, rank: int | None
) -> StreamCause | None:
    """Return why a rank's streams cannot be compared, if its own tokens show a cause."""
    if step_summary is None or rule.of_scalars or rule.of_stages:
        return None
    if names.is_nonfinite(firing.hits[0].series.metric):
        return None  # a count, independent of whether the streams are comparable
    own = [row for row in step_summary.ranks if (row.role, row.rank) == (role, rank)]
    found = causes_of_ranks(step_summary.summary, own)
    return {"name": found[0].check.name, "text": found[0].alone} if found else None


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


@dataclasses.dataclass(frozen=True)
class _Message:
    """Formats the message of a firing: the location and the numbers."""

    step: int
    stage: str | None
    role: str | None
    rank: int | None
    round: int | None
    affected: Sequence[RankKey]
    token: TokenEvidence | None

    def text(self, worst: Hit, scalars: Sequence[ScalarRow]) -> str:
        return self._of_scalars(scalars) if scalars else self._of_metric(worst)

    def _of_metric(self, worst: Hit) -> str:
        against = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in worst.numbers.items()]
        text = f"{worst.series.metric} is {worst.value:.6g}"
        if worst.series.metric == names.MISSING_RANKS and worst.series.rank is not None:
            text = f"{worst.series.metric} is {len(self.affected)}"
        elif self.rank is None and worst.series.rank is not None:  # of the worst rank
            text = f"{worst.series.metric} is up to {worst.value:.6g} a rank"
        text += f" ({', '.join(against)})" if against else ""
        text += self._where()
        text += "" if self.round is None else f", round {self.round}"
        if self.token is not None:
            sample = self.token["sample_uid"] or f"row {self.token['row']}"
            text += f", token {self.token['position']} of {sample}"
            if self.rank is None:
                text += f" on {self.token['role']} rank {self.token['rank']}"
        return text

    def _of_scalars(self, rows: Sequence[ScalarRow]) -> str:
        first, *_ = rows
        ranks: dict[str, dict[RankKey, None]] = {}
        for row in rows:
            ranks.setdefault(row["name"], {})[row["role"], row["rank"]] = None
        own = ranks.pop(first["name"])
        others = [*ranks]
        where = self._where()
        if any(each.keys() != own.keys() for each in ranks.values()):  # each with its own
            where = dataclasses.replace(self, role=None, rank=None, affected=[*own])._where()
            others = [f"{name} ({ranks_text(ranks[name])})" for name in ranks]
        text = f"{first['name']} is {first['value']}{where}"
        if others:
            more = f" and {len(others) - LISTED} more" if len(others) > LISTED else ""
            text += f"; also not finite: {', '.join(others[:LISTED])}{more}"
        return text

    def _where(self) -> str:
        text = f" at step {self.step}"
        text += "" if self.stage is None else f", stage {self.stage}"
        others = [each for each in self.affected if each != (self.role, self.rank)]
        if self.rank is not None:
            text += f", {self.role} rank {self.rank}"
            text += f" (also {ranks_text(others)})" if others else ""
        elif others:
            text += f", {ranks_text(others)}"
        return text


def ranks_text(role_ranks: Iterable[RankKey]) -> str:
    """Name ranks in short: "actor ranks 0-3, 7, critic rank 0"."""
    by_role: dict[str, set[int]] = {}
    for role, rank in role_ranks:
        by_role.setdefault(role, set()).add(rank)
    parts = []
    for role, ranks in by_role.items():
        spans: list[list[int]] = []
        for rank in sorted(ranks):
            if spans and spans[-1][1] == rank - 1:
                spans[-1][1] = rank
            else:
                spans.append([rank, rank])
        shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:LISTED]]
        shown += [f"and {len(spans) - LISTED} more"] if len(spans) > LISTED else []
        parts.append(f"{role} rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}")
    return ", ".join(parts)


def _distinct(role_ranks: Iterable[tuple[str | None, int | None]]) -> tuple[RankKey, ...]:
    found = dict.fromkeys(role_ranks)
    return tuple((role, rank) for role, rank in found if role is not None and rank is not None)


def _one_of(affected: Sequence[RankKey], series: SeriesKey) -> tuple[str | None, int | None]:
    """Return the single (role, rank) of a firing; for several only their common role."""
    if series.rank is not None and (len(affected) == 1 or not _is_count(series.metric)):
        return series.role, series.rank
    if len(affected) == 1:
        return affected[0]
    roles = {role for role, _ in affected}
    return (roles.pop() if len(roles) == 1 else None), None


def _is_count(metric: str) -> bool:
    """Return whether all ranks with the metric are equally affected, so that none is the worst."""
    return (
        metric == names.MISSING_RANKS
        or names.is_nonfinite(metric)
        or metric.startswith(names.NONFINITE_SCALAR)
    )


def _affected(
    firing: Firing, step_summary: StepSummary | None, token: TokenEvidence | None
) -> tuple[RankKey, ...]:
    """Return the ranks whose own numbers meet the condition that fired."""
    of_ranks = _distinct((hit.series.role, hit.series.rank) for hit in firing.hits)
    if of_ranks:
        return of_ranks
    metrics = {hit.series.metric for hit in firing.hits}
    if step_summary is not None and all(names.is_nonfinite(metric) for metric in metrics):
        counts: dict[RankKey, float] = {}
        for row in step_summary.ranks:
            published = publish_cell(row.cell, step_summary.summary.pair)
            counts[row.role, row.rank] = sum(published.get(name, 0.0) for name in metrics)
        bad = [role_rank for role_rank, count in counts.items() if count]
        if bad:
            return tuple(sorted(bad, key=lambda role_rank: (-counts[role_rank], role_rank)))
    return () if token is None else _distinct([(token["role"], token["rank"])])


def _scalars(rule: Rule, firing: Firing, facts: Facts) -> list[ScalarRow]:
    """Return the scalars of a firing."""
    hits = {hit.series for hit in firing.hits}
    return [row for row in bad_scalars(rule, facts) if scalar_series(rule, row) in hits]


def _scalar(row: ScalarRow) -> JsonObject:
    columns: JsonObject = row
    part = {name: columns[name] for name in PART_FIELDS if columns[name] is not None}
    return {**{name: columns[name] for name in ("name", "value", "stage", "role", "rank")}, **part}


def _slow_or_missing(firing: Firing, facts: Facts) -> tuple[str | None, tuple[RankKey, ...]]:
    """Return the stage and ranks of a firing on a metric of stage events."""
    series = firing.hits[0].series
    if series.metric == names.MISSING_RANKS and series.rank is not None:
        of_hits = (hit.series for hit in firing.hits if hit.series.stage == series.stage)
        return series.stage, _distinct((one.role, one.rank) for one in of_hits)
    if series.metric == names.MISSING_RANKS:
        rows = [row for row in facts.missing if series.stage in (None, row["stage"])]
        if not rows:
            return series.stage, ()
        stage = min(rows, key=lambda row: (row["role"], row["rank"]))["stage"]
        of_stage = [row for row in rows if row["stage"] == stage]
        return stage, _distinct(sorted((row["role"], row["rank"]) for row in of_stage))
    timings = {
        key: seconds
        for key, seconds in facts.seconds.items()
        if key[0] == series.stage and series.rank in (None, key[2])
    }
    slowest = max(timings, key=lambda key: (timings[key], key), default=None)
    return (series.stage, ()) if slowest is None else (slowest[0], (slowest[1:],))


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
        parts[-1] += f" in rounds {', '.join(map(str, rounds[:LISTED]))}" if rounds else ""
        parts[-1] += f" and {len(rounds) - LISTED} more" if len(rounds) > LISTED else ""
    parts += [f"{len(by_metric) - LISTED} more"] if len(by_metric) > LISTED else []
    return f"; since before: {'; '.join(parts)}" if parts else ""


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
