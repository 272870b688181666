"""The sections of a report: sentences, items, a table and figures.

Numbers and figures are from the views that the API answers with, so the report cannot say anything
else than the page or a notebook.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, cast

from stagescope_service.figures import (
    anatomy,
    density,
    distribution,
    heatmaps,
    offenders,
    overview,
    rounds,
    timeline,
)  # fmt: skip
from stagescope_service.figures import operators as operator_figures
from stagescope_service.report.parts import (
    MAX_ROWS,
    NEWEST_STEPS,
    ReportItem,
    ReportScope,
    ReportSection,
    ReportTable,
    body_of,
    figure_of,
    rows_of,
    short,
    shortened,
    table_of,
)
from stagescope_service.views import runs, series
from stagescope_service.views.captures import listing as captures
from stagescope_service.views.captures.progress import progress
from stagescope_service.views.comparisons import comparing as comparisons
from stagescope_service.views.diagnosis import diagnosis_of
from stagescope_service.views.encoding import JsonObject, parse_nonfinite
from stagescope_service.views.findings import listing as findings
from stagescope_service.views.operators import tables as operators
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.dependencies import ALL_RANKS, ALL_STEPS, AttemptQuery
from stagescope_service.views.reading.step_summaries import Slice
from stagescope_service.views.samples import listing as samples
from stagescope_service.views.steps import listing as steps
from stagescope_service.views.steps import numbers
from stagescope_wire.captures import needs_ranks
from stagescope_wire.errors import StagescopeError
from stagescope_wire.render import counted, format_value, ranges_text
from stagescope_wire.sparkline import sparkline

MAX_ITEMS: Final = 40
_TREND: Final = 40
"""Bars of a sparkline."""
_SCALARS: Final = ("reward", "loss", "grad_norm", "entropy", "response_length")
_METRICS: Final = (
    "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max",
    "training/rollout_actor_probs_pearson_corr", "rollout_corr/kl", "rollout_corr/k3_kl",
    "rollout_corr/chi2_token", "rollout_corr/ppl_ratio", "train_rollout_logprob_abs_diff",
    "token_mult_prob_error", "per_round/total_rounds", "per_round/max_round_diff",
    "per_round/max_diff_value",
)  # fmt: skip
_STREAMS: Final[Mapping[str, bool | None]] = {
    "exact": False, "comparable": False, "not measured": None, "unknown": None,
}  # fmt: skip
"""Verdict on a step's streams -> whether it is bad; every other verdict is."""
_ALL: Final = Page(findings.MAX_GROUPED)
_SEVERITIES: Final = ("error", "warning", "info")
_ROUND_COLUMNS: Final = (
    "round", "tokens", "abs_diff_mean", "abs_diff_max", "k3_kl", "pearson", "nonfinite",
    "comparable",
)  # fmt: skip
_RANK_COLUMNS: Final = (
    "role", "rank", "tokens", "abs_diff_mean", "abs_diff_max", "k3_kl", "nonfinite", "host",
    "comparable",
)  # fmt: skip


# --- what every report says -----------------------------------------------------------------
def _doctor(scope: ReportScope) -> ReportSection:
    fields, rows = diagnosis_of(scope.deps, scope.run, scope.attempt, scope.step)
    items, unknown = [], []
    found = [row for row in rows if row["verdict"] == "found"]
    for row in found:
        since = "" if row["since_step"] is None else f", since step {row['since_step']}"
        since += "" if row["last_step"] is None else f", last seen in step {row['last_step']}"
        where = "" if row["where"] is None else f", {row['where']}"
        lines = [f"+ {text}" for text in cast("list[str]", row["for"])]
        lines += [f"- {text}" for text in cast("list[str]", row["against"])]
        lines += [str(row["meaning"])]
        lines += [f"-> {text}" for text in cast("list[str]", row["next"])]
        sure = f"{float(cast('float', row['sure'])):.0%} sure"
        items.append(ReportItem(f"{row['title']}{since}{where} ({sure})", lines))
    for row in rows:
        if row["verdict"] == "not measured":
            reasons = "; ".join(cast("list[str]", row["against"]))
            record = "" if row["record"] is None else f" -> {row['record']}"
            unknown.append(f"{row['rule']} is not measured: {reasons}{record}")
    names = ", ".join(str(row["rule"]) for row in rows if row["verdict"] == "not found")
    texts = [str(fields["text"]), *([f"not found: {names}"] if names else [])]
    texts += [
        f"no symptom, but for a comparison of two runs: {note['text']}"
        for note in cast("list[JsonObject]", fields["notes"])
    ]
    parts = cast("list[JsonObject]", fields["mismatch"])
    title = "The newest measured step's mismatch, taken apart"
    table = ReportTable(("name", "share", "text"), parts, title=title) if parts else None
    titles = "; ".join(str(row["title"]) for row in found[:3])
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    scope.say(
        "doctor", f"{len(found)} found", titles + more or str(fields["text"]), bad=bool(found)
    )
    return ReportSection("", "", texts=texts, items=items[:MAX_ITEMS], table=table, gaps=unknown)


def _findings(scope: ReportScope) -> ReportSection:
    deps, step = scope.deps, scope.step
    if step is None:
        answer = body_of(findings.finding_groups(deps, Page(MAX_ROWS), scope.query))
        total = cast("int", answer["groups"])
    else:
        attempt = AttemptQuery(scope.run, scope.target.number)
        answer = body_of(findings.findings(deps, Page(200), attempt, findings.EventQuery(step)))
        total = len(rows_of(answer))
    items = []
    rows = sorted(rows_of(answer), key=lambda row: _SEVERITIES.index(str(row["severity"])))
    for row in rows[:MAX_ROWS]:
        where = row.get("where")
        title = f"{row['severity']}: {row['message']}" + (f" ({where})" if where else "")
        over = "" if row.get("over_wall") is None else "; over"
        advice = [f"-> {row['advice']}"] if row.get("advice") else []
        items.append(
            ReportItem(shortened(title), [f"{row['kind']}, {row['finding_id']}{over}", *advice])
        )
    errors = sum(row["severity"] == "error" for row in rows)
    where = "" if step is None else " of this step"
    text = counted(total, "kind of problem", "kinds of problems") if step is None else (
        counted(total, "finding")
    )  # fmt: skip
    text += f", {counted(errors, 'error')}"
    texts = [text] if total else [f"the service found nothing wrong{where}"]
    scope.say("findings", str(total), text if total else texts[0], bad=bool(errors))
    if total > len(items):
        texts.append(f"{total - len(items)} more are not listed: stagescope findings")
    return ReportSection("", "", texts=texts, items=items)


def _losses(scope: ReportScope) -> ReportSection:
    deps, step = scope.deps, scope.step
    if step is None:
        answer = body_of(findings.loss_groups(deps, _ALL, scope.query))
        total, columns = cast("int", answer["groups"]), "kind reason where stage role count bytes"
    else:
        attempt = AttemptQuery(scope.run, scope.target.number)
        answer = body_of(findings.losses(deps, _ALL, attempt, findings.EventQuery(step)))
        total, columns = len(rows_of(answer)), "kind reason stage role rank count bytes"
    count = sum(cast("int", row["count"] or 1) for row in rows_of(answer))
    text = "nothing that ranks announced was lost"
    if total:
        text = f"{counted(count, 'announced item')} lost or dropped"
    scope.say("losses", str(count), text, bad=count > 0)
    return ReportSection("", "", texts=[text], table=table_of(answer, columns, total))


def _metrics(scope: ReportScope) -> ReportSection:
    answer = numbers.metrics_of(scope.deps, scope.measured_step)
    answer = cast("JsonObject", body_of(answer))
    comparable, cause = str(answer["comparable"]), answer["cause"]
    bad = _STREAMS.get(comparable, True)
    checks = [each for each in rows_of(answer, "comparability") if each["verdict"] != "unknown"]
    undecided = [] if checks else rows_of(answer, "comparability")
    is_unknown = comparable == "unknown"
    none = "not every check was made" if is_unknown else "no check speaks against it"
    reasons = [str(each["text"]) for each in checks] or [f"{none}, step {answer['step']}"]
    reasons += [f"{each['code']} is undecided: {each['text']}" for each in undecided]
    why = "; ".join(reasons[:1] if checks else reasons)
    scope.say("streams", comparable, why, bad=bad)
    published = cast("JsonObject", answer["metrics"])
    rows: list[JsonObject] = [
        {"metric": name, "value": published[name]} for name in _METRICS if name in published
    ]
    coverage = cast("JsonObject", answer["coverage"])
    pair = " against ".join(cast("list[str]", answer["pair"]))
    texts = [
        f"step {answer['step']} of attempt {answer['attempt']}, stage {answer['stage']}: {pair}; "
        f"{coverage['tokens']} tokens of {coverage['sequences']} sequences",
        f"the streams: {comparable}" + (f" ({cause})" if cause else ""),
        *reasons,
    ]
    gaps = [str(answer["gap"])] if answer["gap"] else []
    if answer["complete"] != "complete":
        gaps.append(f"the step is {answer['complete']}")
    missing = cast("list[JsonObject]", answer["missing"])
    gaps += [f"missing: {_names(missing)}"] if missing else []
    worst = published.get("per_round/max_round_diff")
    if worst is not None:
        value = cast("float", parse_nonfinite(published.get("per_round/max_diff_value", "nan")))
        text = f"mean |d| {short(value)} nat{_few_tokens(scope, published)}"
        scope.say("worst round", f"round {format_value(worst)}", text, bad=None)
    return ReportSection(
        "", "", texts=texts, table=ReportTable(("metric", "value"), rows), gaps=gaps
    )


def _few_tokens(scope: ReportScope, published: JsonObject) -> str:
    """Return how many tokens the worst round has, if they are too few for a verdict."""
    answer = body_of(numbers.rounds(scope.deps, scope.measured_step, Page(MAX_ROWS), ALL_RANKS))
    worst = parse_nonfinite(published["per_round/max_round_diff"])
    return "".join(
        f", of {counted(cast('int', row['tokens']), 'token')}: too few to judge"
        for row in rows_of(answer, "rows")
        if row["round"] == worst and row["comparable"] == "unknown"
    )


def _names(missing: Sequence[Mapping[str, object]]) -> str:
    """Return the missing ranks, by stage and status."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for each in missing:
        key = (str(each["role"]), str(each["stage"]), str(each["status"]))
        groups.setdefault(key, []).append(cast("int", each["rank"]))
    return "; ".join(
        f"{role} {ranges_text('rank', sorted(ranks))} in {stage}: {status}"
        for (role, stage, status), ranks in groups.items()
    )


def _rounds(scope: ReportScope) -> ReportSection:
    deps, target = scope.deps, scope.measured_step
    answer = body_of(numbers.rounds(deps, target, Page(MAX_ROWS), ALL_RANKS))
    drawn = [
        figure_of("rounds", rounds.figure, rounds.info(deps, target, compare=3)),
        figure_of("distribution", distribution.figure, distribution.info(deps, target)),
    ]
    total = MAX_ROWS + 1 if answer["next"] else None
    return ReportSection(
        "", "", table=table_of(answer, " ".join(_ROUND_COLUMNS), total), figures=drawn
    )


def _ranks(scope: ReportScope) -> ReportSection:
    deps, target = scope.deps, scope.measured_step
    measured, step = numbers.measure(deps, target, Slice())
    rows = numbers.rank_rows(measured, step, deps.catalogue.processes(target.attempt_id))
    rows = cast("list[JsonObject]", body_of(rows))
    rows.sort(key=lambda row: -_size(row["abs_diff_mean"]))
    texts = [f"{len(rows)} ranks, the largest mean |d| first"] if rows else []
    drawn = [
        figure_of(
            "rank-rounds", heatmaps.figure, heatmaps.rounds_info(deps, target, heatmaps.DEFAULT)
        )
    ]
    table = table_of({"rows": rows}, " ".join(_RANK_COLUMNS))
    return ReportSection("", "", texts=texts, table=table, figures=drawn)


def _size(value: object) -> float:
    """Return a number for sorting: a non-finite one is largest."""
    number = parse_nonfinite(value)
    return number if isinstance(number, int | float) and number == number else float("inf")


def _tokens(scope: ReportScope) -> ReportSection:
    answer = body_of(numbers.tokens(scope.deps, scope.measured_step, Page(200), ALL_RANKS))
    rows = rows_of(answer)
    for row in rows:  # as a literal: most texts begin with a space
        row["text"] = None if row["text"] is None else json.dumps(row["text"], ensure_ascii=False)
    columns = "token_id kind abs_diff p q round position sample_uid role rank"
    has_texts = any(row["text"] is not None for row in rows)
    table = table_of(answer, f"text {columns}" if has_texts else columns)
    return ReportSection("", "", table=table)


def _loss(scope: ReportScope) -> ReportSection:
    found = samples.loss_of(scope.deps, scope.measured_step)
    rows = cast("list[JsonObject]", body_of(found.rows))
    columns = "fate tokens share_of_tokens sum_abs share_of_mismatch"
    return ReportSection(
        "", "", texts=[str(found.fields["note"]), *found.derived],
        table=table_of({"rows": rows}, columns),
        gaps=[shortened(text) for text in found.gaps[:MAX_ROWS]],
    )  # fmt: skip


# --- what is said of a run ------------------------------------------------------------------
def _attempts(scope: ReportScope) -> ReportSection:
    deps = scope.deps
    answer = body_of(runs.attempts(deps, Page(1000), scope.run))
    rows = rows_of(answer)
    columns = "attempt state begun ended end_reason resumed_from_step first_step last_closed_step"
    texts, items = [], []
    for row in rows[:MAX_ROWS]:
        texts += [
            f"steps of attempt {row['attempt']} from {part['from_step']} on are repeated by "
            f"attempt {part['by']}"
            for part in cast("list[JsonObject]", row["superseded"])
        ]
    restarts = len(rows) - 1
    newest = rows[0]
    since = newest["resumed_from_step"]
    text = "no restart"
    if restarts:
        resumed = "" if since is None else f"; attempt {newest['attempt']} resumed after {since}"
        text = f"{counted(restarts, 'restart')}{resumed}"
    scope.say("attempts", str(len(rows)), f"{text}; newest: {newest['state']}", bad=None)
    if restarts:
        a, b = (deps.finder.attempt(scope.run, cast("int", row["attempt"])) for row in rows[1::-1])
        changed = comparisons.attempt_differences(deps, a, b).rows
        lines = [
            f"{row['area']} {row['name']}: {format_value(row['a'])} -> {format_value(row['b'])}"
            for row in changed if row["weight"] == "numbers"
        ]  # fmt: skip
        title = f"what may change numbers, attempt {a.number} against {b.number}"
        items.append(
            ReportItem(title, [shortened(line) for line in lines[:MAX_ROWS]] or ["nothing known"])
        )
    items.append(
        ReportItem("fingerprint of the newest attempt", _fingerprint(newest["fingerprint"]))
    )
    return ReportSection("", "", texts=texts, items=items, table=table_of(answer, columns))


def _fingerprint(found: object) -> list[str]:
    """Return an attempt's fingerprint as lines; long parts as counts."""
    if not isinstance(found, Mapping) or not found:
        return ["none is known"]
    lines = []
    for name, value in found.items():
        if name in ("environment", "config", "code") and isinstance(value, Mapping):
            lines.append(f"{name}: {len(value)} values (stagescope attempts --json)")
        elif isinstance(value, Mapping):
            lines.append(f"{name}: {', '.join(f'{k} {format_value(v)}' for k, v in value.items())}")
        else:
            lines.append(f"{name}: {format_value(value)}")
    return [shortened(line) for line in lines]


def _course(scope: ReportScope) -> ReportSection:
    """Return the numbers over the steps."""
    deps = scope.deps
    request = overview.Request((), scope.attempt, ALL_STEPS, superseded=True, smooth=None)
    by_step = heatmaps.steps_info(deps, *scope.query, ALL_STEPS, heatmaps.DEFAULT)
    drawn = [
        figure_of("overview", overview.figure, overview.info(deps, scope.run, request)),
        figure_of("rank-steps", heatmaps.figure, by_step),
    ]
    rows: list[JsonObject] = []
    for metric in (*overview.DEFAULT, *_SCALARS):
        try:
            found = series.series(
                deps, {**ALL_RANKS, "metric": metric, "by": None}, scope.query, ALL_STEPS,
                limit=series.MAX_SERIES_STEPS,
            )  # fmt: skip
        except StagescopeError:  # it is not recorded
            continue
        rows += _trends(metric, body_of(found))
    columns = ("metric", "course", "last", "min", "max", "steps")
    text = (
        "a bar is a step; where there are more steps than bars, two bars are a stretch of steps: "
        "its smallest and its largest value; a space is a gap, ! is not finite"
    )
    return ReportSection("", "", texts=[text], table=ReportTable(columns, rows), figures=drawn)


def _trends(metric: str, answer: Mapping[str, object]) -> Iterator[JsonObject]:
    several = rows_of(answer, "series")
    for each in several:
        values = [
            cast("float | None", parse_nonfinite(value))
            for value in cast("list[object]", each["values"])
        ]
        known = [value for value in values if value is not None]
        if not known:
            continue
        finite = [value for value in known if abs(value) < float("inf")]
        stage = f" ({each['stage']})" if len(several) > 1 else ""
        yield {
            "metric": f"{metric}{stage}",
            "course": sparkline(values, _TREND, bars="▁▂▃▄▅▆▇█", extremes=True),
            "last": known[-1],
            "min": min(finite, default=None),
            "max": max(finite, default=None),
            "steps": len(known),
        }


def _steps(scope: ReportScope) -> ReportSection:
    answer = body_of(steps.steps(scope.deps, Page(NEWEST_STEPS), scope.run, scope.attempt))
    rows = rows_of(answer)
    counts: dict[str, int] = {}
    for row in rows:
        counts[str(row["complete"])] = counts.get(str(row["complete"]), 0) + 1
    text = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none yet"
    bad = [row for row in rows if row["complete"] in ("partial", "unknown") or row["gap"]]
    newest = f"the newest {len(rows)} steps" if answer["next"] else f"{len(rows)} steps"
    partial = counts.get("partial", 0)
    scope.say("steps", f"{partial} partial", f"{newest}: {text}", bad=partial > 0)
    listed: list[JsonObject] = [
        {**row, "missing": _names(cast("list[JsonObject]", row["missing"])) or None} for row in bad
    ]
    columns = "step attempt complete missing gap losses superseded_by"
    return ReportSection(
        "", "", texts=[f"{newest}: {text}"], table=table_of({"rows": listed}, columns)
    )


def _captures(scope: ReportScope) -> ReportSection | None:
    deps, step = scope.deps, scope.step
    answer = body_of(captures.captures(deps, Page(MAX_ROWS), scope.run))
    rows: list[JsonObject] = []
    for row in rows_of(answer):
        stored = deps.catalogue.capture(str(row["capture_id"]))
        if stored is None:
            continue
        found = progress(deps.catalogue, stored)
        of_steps = [each for each in found.steps if step in (None, each["step"])]
        if step is not None and not of_steps:
            continue
        stages = stored["spec"].get("stages") or ()  # a list of names, or "all"
        rows.append(
            {
                "capture_id": row["capture_id"],
                "state": found.state,
                "stages": stages if isinstance(stages, str) else ", ".join(stages),
                "steps": ", ".join(f"{each['step']} {each['state']}" for each in of_steps[:8]),
                "dumps": sum(each["collected"] for each in of_steps)
                if needs_ranks(stored["spec"])
                else 0,
                "created_wall": row["created_wall"],
                "by": row["by"],
            }
        )
    text = [] if rows else ["no capture was requested" + ("" if step is None else " of this step")]
    columns = "capture_id state stages steps dumps created_wall by"
    return ReportSection("", "", texts=text, table=table_of({"rows": rows}, columns))


# --- what is said of a step -----------------------------------------------------------------
def _step(scope: ReportScope) -> ReportSection:
    deps, target = scope.deps, scope.target
    rows, found = steps.progress_of(deps, target)
    missing = cast("list[JsonObject]", found.missing)
    gap = steps.gap_of(deps, target)
    text = f"the step is {found.complete}"
    scope.say("step", found.complete, gap or text, bad=found.complete in ("partial", "unknown"))
    superseded = target.superseded_by
    texts = [text] + ([] if superseded is None else [f"attempt {superseded} repeats this step"])
    times: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for row in rows:
        if row["begin_mono"] is not None and row["end_mono"] is not None:
            seconds = max(row["end_mono"] - row["begin_mono"], 0.0)
            times.setdefault((row["stage"], row["role"]), []).append((seconds, row["rank"]))
    table: list[JsonObject] = [
        {
            "stage": stage,
            "role": role,
            "parts": len(each),
            "mean_seconds": sum(seconds for seconds, _ in each) / len(each),
            "slowest_seconds": max(each)[0],
            "slowest_rank": max(each)[1],
        }
        for (stage, role), each in times.items()
    ]
    columns = "stage role parts mean_seconds slowest_seconds slowest_rank"
    gaps = [text for text in (gap, f"missing: {_names(missing)}" if missing else None) if text]
    return ReportSection(
        "", "", texts=texts, table=table_of({"rows": table}, columns), gaps=gaps,
        figures=[figure_of("timeline", timeline.figure, timeline.info(deps, target))],
    )  # fmt: skip


def _spread(scope: ReportScope) -> ReportSection:
    deps, target = scope.deps, scope.measured_step
    ratio = distribution.info(deps, target, of="ratio")
    return ReportSection(
        "", "",
        figures=[
            figure_of("distribution", distribution.figure, ratio),
            figure_of("density", density.figure, density.info(deps, target)),
        ],
    )  # fmt: skip


_PROPERTIES: Final = (
    "place", "end", "position", "probability", "staleness", "engine", "lattice",
)  # fmt: skip
"""The properties of tokens that a report draws the mismatch by, if they are known."""


def _anatomy(scope: ReportScope) -> ReportSection:
    deps, target = scope.deps, scope.measured_step
    drawn, gaps = [], []
    for by in _PROPERTIES:
        found = anatomy.info(deps, target, by)
        if found.bins:
            drawn.append(figure_of("anatomy", anatomy.figure, found))
        else:
            gaps.append(f"by {by}: {found.note}")
    return ReportSection("", "", figures=drawn, gaps=gaps)


def _offenders(scope: ReportScope) -> ReportSection:
    found = offenders.info(
        scope.deps, scope.run, scope.attempt, {"first": None, "last": scope.step}
    )
    if not found.rows:
        return ReportSection("", "", gaps=[found.note or "no prompt"])
    drawn = figure_of("offenders", offenders.figure, found)
    return ReportSection("", "", figures=[drawn])


def _samples(scope: ReportScope) -> ReportSection:
    answer = body_of(samples.samples(scope.deps, scope.measured_step, Page(MAX_ROWS + 1)))
    columns = "sample_uid group_id role rank rounds tokens mean_abs max_abs nonfinite reward"
    return ReportSection("", "", table=table_of(answer, columns))


def _scalars(scope: ReportScope) -> ReportSection | None:
    found: dict[tuple[str | None, str, str], list[float]] = {}
    target = scope.target
    rows = scope.deps.catalogue.scalars(target.attempt_id, target.step_number, limit=1_000_000)
    for row in rows:
        found.setdefault((row["stage"], row["role"], row["name"]), []).append(row["value"])
    if not found:
        return None
    table: list[JsonObject] = [
        {"name": name, "stage": stage, "role": role, "ranks_and_parts": len(values),
         "mean": sum(values) / len(values), "min": min(values), "max": max(values)}
        for (stage, role, name), values in found.items()
    ]  # fmt: skip
    table = cast("list[JsonObject]", body_of(table))
    columns = "name stage role ranks_and_parts mean min max"
    return ReportSection("", "", table=table_of({"rows": table}, columns))


def _operators(scope: ReportScope) -> ReportSection:
    deps, target = scope.deps, scope.target
    rows, earliest = operators.first_non_finite(deps, target, {})
    columns = "stage role rank part name index certain"
    texts = ["all results of the captured operators are finite"]
    if unmeasured := sum(cast("int | None", row["unmeasured"]) or 0 for row in rows):
        texts = [
            "no result of the captured operators is known to be NaN or infinite; of "
            f"{unmeasured} tensors no Min and Max were recorded"
        ]
    if earliest is not None:
        texts = [f"the first operator with a NaN or infinite result: {earliest['name']} of "
                 f"{earliest['role']} {earliest['rank']} in {earliest['stage']}"]  # fmt: skip
    listed = [row for row in rows if row.get("name") is not None]
    found = operator_figures.info(deps, target, {})
    return ReportSection(
        "", "", texts=texts, table=table_of({"rows": listed}, columns),
        figures=[figure_of("operators", operator_figures.figure, found)],
    )  # fmt: skip


_Makers = Mapping[str, tuple[str, Callable[[ReportScope], ReportSection | None]]]

OF_RUN: Final[_Makers] = {
    "doctor": ("What the doctor finds", _doctor),
    "course": ("The course of the run", _course),
    "attempts": ("Attempts and restarts", _attempts),
    "steps": ("Steps that lack something", _steps),
    "metrics": ("The newest step with numbers", _metrics),
    "rounds": ("Its mismatch, round by round", _rounds),
    "anatomy": ("Where its mismatch sits", _anatomy),
    "ranks": ("Its ranks", _ranks),
    "tokens": ("Its worst tokens", _tokens),
    "offenders": ("Prompts that differ more than their steps", _offenders),
    "loss": ("What the loss did with its tokens", _loss),
    "findings": ("Findings", _findings),
    "losses": ("What never arrived", _losses),
    "captures": ("Captures", _captures),
}
OF_STEP: Final[_Makers] = {
    "step": ("The step", _step),
    "metrics": ("Rollout against training", _metrics),
    "rounds": ("The mismatch, round by round", _rounds),
    "ranks": ("Ranks", _ranks),
    "spread": ("How far the tokens are apart", _spread),
    "anatomy": ("Where the mismatch sits", _anatomy),
    "tokens": ("Worst tokens", _tokens),
    "samples": ("Worst samples", _samples),
    "loss": ("What the loss did with the tokens", _loss),
    "scalars": ("Scalars", _scalars),
    "operators": ("Captured operators", _operators),
    "findings": ("Findings", _findings),
    "losses": ("What never arrived", _losses),
    "captures": ("Captures", _captures),
    "doctor": ("What the doctor finds up to this step", _doctor),
}
