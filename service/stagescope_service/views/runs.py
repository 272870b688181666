"""Runs: the list, their attempts, and the steps in which both streams are equal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from stagescope_service.statistics.exact import NOT_KEPT, first_difference
from stagescope_service.statistics.step_metrics import VERSION
from stagescope_service.store.parts import incarnation_of
from stagescope_service.store.queries.measurements import StepNumbers
from stagescope_service.store.tables import ProcessColumns
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.runs import ExactRange
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.rows import (
    Lineage,
    attempt_row,
    superseded_steps,
    unreported_steps,
)
from stagescope_service.views.reading.step_summaries import MeasuredSummary
from stagescope_service.views.series import newest_metrics
from stagescope_wire.names import unit_of_metric
from stagescope_wire.render import counted, ranges_text

# --- exactness ------------------------------------------------------------------------------
Equality = Literal["exact", "differs", "not measured"]
EXACT: Final = "exact"
DIFFERS: Final = "differs"
NOT_MEASURED: Final = "not measured"
_COPY: Final = "equal, and one stream is a copy, or its producer is unknown"
_EMPTY: Final = "no token counts"
_REST_EQUAL: Final = "the others are equal"
_NAMED_RANGES: Final = 5
_SUSPECT: Final = "equal, and suspect: the comparability in the step's metrics has the reason"


class _StepVerdict(NamedTuple):
    """Whether the streams of a step are equal."""

    step: int
    attempt: int
    """Its number."""
    verdict: Equality
    tokens: int
    unequal: int
    non_finite: int
    reason: str | None
    """Why it is not measured, one of the texts above."""


class _FirstDifference(NamedTuple):
    """The first step that differs."""

    step: int
    text: str
    fields: JsonObject
    """Fields of the answer."""


def _judge(lineage: Lineage, row: StepNumbers) -> _StepVerdict:
    """Judge a step by its stored counts."""
    tokens, unequal = row["tokens"] or 0, row["unequal_tokens"] or 0
    verdict, suspects = row["verdict"], row["suspects"] or []
    judged: Equality = DIFFERS if unequal else EXACT if verdict == EXACT else NOT_MEASURED
    non_finite = (row["masked_tokens"] or 0) - tokens
    number = lineage.numbers[row["attempt_id"]]
    reason = None
    if judged == NOT_MEASURED:
        is_copy = verdict == NOT_MEASURED and "bitwise_equal" in suspects
        reason = _why_not_measured(tokens, non_finite, is_copy=is_copy)
    return _StepVerdict(row["step"], number, judged, tokens, unequal, non_finite, reason)


def _why_not_measured(tokens: int, non_finite: int, *, is_copy: bool) -> str:
    """Return why a step without unequal tokens proves nothing."""
    if not tokens:
        return _EMPTY
    if is_copy:
        return _COPY
    return _REST_EQUAL if non_finite else _SUSPECT


def _ranges(verdicts: Sequence[_StepVerdict]) -> Iterator[ExactRange]:
    for (attempt, verdict, reason), group in itertools.groupby(
        verdicts, key=lambda each: (each.attempt, each.verdict, each.reason)
    ):
        steps = list(group)
        non_finite = sum(each.non_finite for each in steps)
        yield ExactRange(
            from_step=steps[0].step,
            to_step=steps[-1].step,
            steps=len(steps),
            attempt=attempt,
            verdict=verdict,
            tokens=sum(each.tokens for each in steps),
            unequal=sum(each.unequal for each in steps),
            non_finite=non_finite,
            reason=None if reason is None else _with_non_finite(reason, non_finite),
        )


def _with_non_finite(reason: str, non_finite: int) -> str:
    """Add the number of tokens that are not finite to a reason."""
    if not non_finite:
        return reason
    neither = f"{counted(non_finite, 'token is', 'tokens are')} finite in neither stream"
    return f"{neither}; {reason}" if reason == _REST_EQUAL else f"{reason}; {neither}"


def _first_difference(
    differing: _StepVerdict, measured: MeasuredSummary, processes: Sequence[ProcessColumns]
) -> _FirstDifference:
    step, attempt = differing.step, differing.attempt
    token = first_difference(measured.summary.summary)
    if token is None:
        fields: JsonObject = {"step": step, "text": NOT_KEPT, "attempt": attempt}
        return _FirstDifference(step, NOT_KEPT, fields)
    incarnation = incarnation_of(token.source)
    process = next((row for row in processes if row["incarnation"] == incarnation), None)
    rank: JsonObject = {}
    pair = measured.summary.summary.pair
    text = token.text(pair)
    if process is not None:
        rank = {"role": process["role"], "rank": process["rank"]}
        text = token.text(pair, process["role"], process["rank"])
    fields = {"step": step, **token.to_json(), **rank, "text": text, "attempt": attempt}
    return _FirstDifference(step, text, fields)


def _text(ranges: Sequence[ExactRange], first: _FirstDifference | None) -> str:
    """Return the verdicts up to the first difference as one sentence."""
    if not ranges:
        return "no step was measured"
    clauses = []
    several = len({row["attempt"] for row in ranges}) > 1
    for row in ranges:
        of_attempt = f" of attempt {row['attempt']}" if several else ""
        if row["verdict"] == DIFFERS:
            assert first is not None
            clauses.append(f"step {row['from_step']}{of_attempt} first differs: {first.text}")
            break
        steps = ranges_text("step", range(row["from_step"], row["to_step"] + 1))
        reason = (
            f"proved on {counted(row['tokens'], 'token')}"
            if row["verdict"] == EXACT
            else row["reason"]
        )
        clauses.append(f"{steps}{of_attempt} {row['verdict']} ({reason})")
    if first is not None:
        differing = [row for row in ranges if row["verdict"] == DIFFERS]
        later_steps = sum(row["steps"] for row in ranges if row["from_step"] > first.step)
        since = later_steps + differing[0]["steps"] - 1
        if since:
            differ = sum(row["steps"] for row in differing) - 1
            unmeasured = sum(
                row["steps"]
                for row in ranges
                if row["from_step"] > first.step and row["verdict"] not in (EXACT, DIFFERS)
            )
            verb = "differs" if differ == 1 else "differ"
            text = f"of the {counted(since, 'step')} since then {differ} {verb}"
            clauses.append(f"{text}, {unmeasured} not measured" if unmeasured else text)
        later = [row for row in ranges if row["from_step"] > first.step]
        exact = [
            ranges_text("step", range(row["from_step"], row["to_step"] + 1))
            for row in later
            if row["verdict"] == EXACT
        ]
        if exact:
            more = f" and {len(exact) - _NAMED_RANGES} more" if len(exact) > _NAMED_RANGES else ""
            clauses.append(f"exact again: {', '.join(exact[:_NAMED_RANGES])}{more}")
    return "; ".join(clauses)


def attempts(deps: Dependencies, page: Page, run: str) -> JsonObject:
    """List a run's attempts, newest first: fingerprint, resumed step, repeated steps."""
    target = deps.finder.attempt(run)
    rows = deps.catalogue.described_attempts(target.run)
    discarded = deps.catalogue.superseded_steps(target.run)
    repeated = superseded_steps(rows, {each["attempt"]: each["last"] for each in discarded})
    listed = [attempt_row(row, repeated[row["number"]]) for row in rows]
    note = unreported_steps(deps.catalogue, rows)
    return {**target.run_heading(), "note": note, **page.cut(listed)}


def numbers(deps: Dependencies, page: Page, run: str) -> JsonObject:
    """List the names that `/series` and `/figures/overview` take: metrics and logged scalars."""
    target = deps.finder.attempt(run)
    ids = [int(row["attempt_id"]) for row in deps.catalogue.attempts(target.run)]
    published = newest_metrics(deps, ids)
    scalars = [name for name in deps.catalogue.scalar_names(ids) if name not in published]
    rows = [
        {"name": name, "kind": kind, "unit": unit_of_metric(name) if kind == "metric" else ""}
        for kind, names in (("metric", sorted(published)), ("scalar", scalars))
        for name in names
    ]
    return {**target.run_heading(), **page.cut(rows)}


def exact(deps: Dependencies, run: str | None = None, attempt: int | None = None) -> JsonObject:
    """List the steps in which trainer and rollout are equal, and the first difference."""
    target = deps.finder.attempt(run, attempt)
    attempts = deps.catalogue.attempts(target.run)
    lineage = Lineage(attempts)
    ids = [row["attempt_id"] for row in attempts if attempt in (None, row["number"])]
    steps: dict[int, StepNumbers] = {}
    seen: set[int] = set()
    # The newest attempt of a step comes first; a repeated step counts there only.
    for row in deps.catalogue.step_metrics(ids, version=VERSION, numbers=None):
        step = row["step"]
        if step in seen or (attempt is None and lineage.superseded_by(row) is not None):
            continue
        seen.add(step)
        if row["tokens"] is not None:
            steps[step] = row
    verdicts = [_judge(lineage, steps[step]) for step in sorted(steps)]
    ranges = list(_ranges(verdicts))
    differing = next((each for each in verdicts if each.verdict == DIFFERS), None)
    first = None
    if differing is not None:
        row = steps[differing.step]
        measured = deps.step_summaries.measure(row["attempt_id"], row)
        processes = deps.catalogue.processes(row["attempt_id"])
        first = _first_difference(differing, measured, processes)
    return {
        **target.heading(),
        "attempt": attempt,
        "text": _text(ranges, first),
        "first": None if first is None else first.fields,
        "rows": ranges,
        "next": None,
    }
