"""The sections of a report that runs and steps share, and the order of all of them.

Numbers and figures are from the views that the API answers with, so the report cannot say anything
else than the page or a notebook.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final

from stagescope_service.figures import (
    distribution,
    heatmaps,
    rounds,
)  # fmt: skip
from stagescope_service.report import run_sections, step_sections
from stagescope_service.report.parts import (
    MAX_ROWS,
    ReportItem,
    ReportScope,
    ReportSection,
    ReportTable,
    body_of,
    figure_of,
    missing_text,
    short,
    shortened,
    table_of,
)
from stagescope_service.views.diagnosis import diagnosis_of
from stagescope_service.views.encoding import JsonObject, parse_nonfinite
from stagescope_service.views.findings import listing as findings
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.dependencies import ALL_RANKS, AttemptQuery
from stagescope_service.views.reading.step_summaries import Slice
from stagescope_service.views.samples import listing as samples
from stagescope_service.views.steps import numbers
from stagescope_wire.render import counted, format_value

MAX_ITEMS: Final = 40
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
_ROUND_COLUMNS: Final = "round tokens abs_diff_mean abs_diff_max k3_kl pearson nonfinite comparable"
_RANK_COLUMNS: Final = "role rank tokens abs_diff_mean abs_diff_max k3_kl nonfinite host comparable"


def _doctor(scope: ReportScope) -> ReportSection:
    fields, rows = diagnosis_of(scope.deps, scope.run, scope.attempt, scope.step)
    items, unknown = [], []
    found = [row for row in rows if row["verdict"] == "found"]
    causes = [row for row in found if row["cause"] is None]
    for cause in causes:
        lines = [f"prove it: {cause['next'][0]}", *(f"+ {text}" for text in cause["for"])]
        lines += [f"- {text}" for text in cause["against"]]
        lines += [str(cause["meaning"]), *(f"-> {text}" for text in cause["next"][1:])]
        explained = (row for row in found if row["cause"] == cause["rule"])
        lines += [f"it explains: {row['sentence']}" for row in explained]
        items.append(ReportItem(str(cause["sentence"]), lines))
    for row in rows:
        if row["verdict"] == "not measured":
            reasons = "; ".join(row["against"])
            record = "" if row["record"] is None else f" -> {row['record']}"
            unknown.append(f"{row['rule']} is not measured: {reasons}{record}")
    names = ", ".join(str(row["rule"]) for row in rows if row["verdict"] == "not found")
    texts = [str(fields["text"]), *([f"not found: {names}"] if names else [])]
    texts += [
        f"no symptom, but for a comparison of two runs: {note['text']}" for note in fields["notes"]
    ]
    parts = fields["mismatch"]
    title = "The newest measured step's mismatch by its parts"
    table = ReportTable(("name", "share", "text"), parts, title=title) if parts else None
    titles = "; ".join(str(row["sentence"]) for row in causes[:3])
    more = f"; and {len(causes) - 3} more" if len(causes) > 3 else ""
    scope.say(
        "doctor",
        counted(len(causes), "cause"),
        titles + more or str(fields["text"]),
        bad=fields["healthy"] is False,
    )
    return ReportSection(texts=texts, items=items[:MAX_ITEMS], table=table, gaps=unknown)


def _findings(scope: ReportScope) -> ReportSection:
    deps, step = scope.deps, scope.step
    if step is None:
        answer = body_of(findings.finding_groups(deps, Page(MAX_ROWS), scope.query))
        total = answer["groups"]
    else:
        attempt = AttemptQuery(scope.run, scope.target.number)
        answer = body_of(findings.findings(deps, Page(200), attempt, findings.EventQuery(step)))
        total = len(answer["rows"])
    items = []
    rows = sorted(answer["rows"], key=lambda row: _SEVERITIES.index(str(row["severity"])))
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
    return ReportSection(texts=texts, items=items)


def _losses(scope: ReportScope) -> ReportSection:
    deps, step = scope.deps, scope.step
    if step is None:
        answer = body_of(findings.loss_groups(deps, _ALL, scope.query))
        total, columns = answer["groups"], "kind reason where stage role count bytes"
    else:
        attempt = AttemptQuery(scope.run, scope.target.number)
        answer = body_of(findings.losses(deps, _ALL, attempt, findings.EventQuery(step)))
        total, columns = len(answer["rows"]), "kind reason stage role rank count bytes"
    count = sum(row["count"] or 1 for row in answer["rows"])
    text = "nothing that ranks announced was lost"
    if total:
        text = f"{counted(count, 'announced item')} lost or dropped"
    scope.say("lost data", str(count), text, bad=count > 0)
    return ReportSection(texts=[text], table=table_of(answer, columns, total))


def _metrics(scope: ReportScope) -> ReportSection:
    answer = numbers.metrics_of(scope.deps, scope.measured_step)
    answer = body_of(answer)
    comparable, cause = str(answer["comparable"]), answer["cause"]
    bad = _STREAMS.get(comparable, True)
    checks = [each for each in answer["comparability"] if each["verdict"] != "unknown"]
    undecided = [] if checks else answer["comparability"]
    is_unknown = comparable == "unknown"
    none = "not every check was made" if is_unknown else "no check speaks against it"
    reasons = [str(each["text"]) for each in checks] or [f"{none}, step {answer['step']}"]
    reasons += [f"{each['code']} is undecided: {each['text']}" for each in undecided]
    why = "; ".join(reasons[:1] if checks else reasons)
    scope.say("streams", comparable, why, bad=bad)
    published = answer["metrics"]
    rows: list[JsonObject] = [
        {"metric": name, "value": published[name]} for name in _METRICS if name in published
    ]
    coverage = answer["coverage"]
    pair = " against ".join(answer["pair"])
    texts = [
        f"step {answer['step']} of attempt {answer['attempt']}, stage {answer['stage']}: {pair}; "
        f"{counted(coverage['tokens'], 'token')} of {counted(coverage['sequences'], 'sequence')}",
        f"the streams: {comparable}" + (f" ({cause})" if cause else ""),
        *reasons,
    ]
    gaps = [str(answer["gap"])] if answer["gap"] else []
    if answer["complete"] != "complete":
        gaps.append(f"the step is {answer['complete']}")
    missing = answer["missing"]
    word = "waiting for" if answer["complete"] == "open" else "missing"
    gaps += [f"{word}: {missing_text(missing)}"] if missing else []
    worst = published.get("per_round/max_round_diff")
    if worst is not None:
        value = parse_nonfinite(published.get("per_round/max_diff_value", "nan"))
        text = f"mean |d| {short(value)} nat{_few_tokens(scope, published)}"
        scope.say("worst round", f"round {format_value(worst)}", text, bad=None)
    return ReportSection(texts=texts, table=ReportTable(("metric", "value"), rows), gaps=gaps)


def _few_tokens(scope: ReportScope, published: JsonObject) -> str:
    """Return how many tokens the worst round has, if they are too few for a verdict."""
    answer = body_of(numbers.rounds(scope.deps, scope.measured_step, Page(MAX_ROWS), ALL_RANKS))
    worst = parse_nonfinite(published["per_round/max_round_diff"])
    return "".join(
        f", of {counted(row['tokens'], 'token')}: too few to judge"
        for row in answer["rows"]
        if row["round"] == worst and row["comparable"] == "unknown"
    )


def _rounds(scope: ReportScope) -> ReportSection:
    deps, target = scope.deps, scope.measured_step
    answer = body_of(numbers.rounds(deps, target, Page(MAX_ROWS), ALL_RANKS))
    drawn = [
        figure_of("rounds", rounds.figure, rounds.info(deps, target, compare=3)),
        figure_of("distribution", distribution.figure, distribution.info(deps, target)),
    ]
    total = MAX_ROWS + 1 if answer["next"] else None
    return ReportSection(table=table_of(answer, _ROUND_COLUMNS, total), figures=drawn)


def _ranks(scope: ReportScope) -> ReportSection:
    deps, target = scope.deps, scope.measured_step
    measured, step = numbers.measure(deps, target, Slice())
    rows = numbers.rank_rows(measured, step, deps.catalogue.processes(target.attempt_id))
    rows = body_of(rows)
    rows.sort(key=lambda row: -_size(row["abs_diff_mean"]))
    texts = [f"{counted(len(rows), 'rank')}, the largest mean |d| first"] if rows else []
    drawn = [
        figure_of(
            "rank-rounds", heatmaps.figure, heatmaps.rounds_info(deps, target, heatmaps.DEFAULT)
        )
    ]
    table = table_of({"rows": rows}, _RANK_COLUMNS)
    return ReportSection(texts=texts, table=table, figures=drawn)


def _size(value: object) -> float:
    """Return a number for sorting: a non-finite one is largest."""
    number = parse_nonfinite(value)
    return number if isinstance(number, int | float) and number == number else float("inf")


def _tokens(scope: ReportScope) -> ReportSection:
    answer = body_of(numbers.tokens(scope.deps, scope.measured_step, Page(200), ALL_RANKS))
    rows = answer["rows"]
    for row in rows:  # as a literal: most texts begin with a space
        row["text"] = None if row["text"] is None else json.dumps(row["text"], ensure_ascii=False)
    columns = "token_id kind abs_diff p q round position sample_uid role rank"
    has_texts = any(row["text"] is not None for row in rows)
    table = table_of(answer, f"text {columns}" if has_texts else columns)
    return ReportSection(table=table)


def _loss(scope: ReportScope) -> ReportSection:
    found = samples.loss_of(scope.deps, scope.measured_step)
    rows = body_of(found.rows)
    columns = "fate tokens share_of_tokens sum_abs share_of_mismatch"
    return ReportSection(
        texts=[str(found.fields["note"]), *found.derived],
        table=table_of({"rows": rows}, columns),
        gaps=[shortened(text) for text in found.gaps[:MAX_ROWS]],
    )  # fmt: skip


_Makers = Mapping[str, tuple[str, Callable[[ReportScope], ReportSection | None]]]

OF_RUN: Final[_Makers] = {
    "doctor": ("What the doctor finds", _doctor),
    "course": ("The course of the run", run_sections.course_section),
    "attempts": ("Attempts and restarts", run_sections.attempts_section),
    "steps": ("Steps that lack something", run_sections.steps_section),
    "metrics": ("The newest step with numbers", _metrics),
    "rounds": ("Its mismatch, round by round", _rounds),
    "anatomy": ("Where its mismatch sits", step_sections.anatomy_section),
    "ranks": ("Its ranks", _ranks),
    "tokens": ("Its worst tokens", _tokens),
    "offenders": ("Prompts that differ more than their steps", step_sections.offenders_section),
    "loss": ("What the loss did with its tokens", _loss),
    "findings": ("Findings", _findings),
    "losses": ("What never arrived", _losses),
    "captures": ("Captures", run_sections.captures_section),
}
OF_STEP: Final[_Makers] = {
    "step": ("The step", step_sections.step_section),
    "metrics": ("Rollout against training", _metrics),
    "rounds": ("The mismatch, round by round", _rounds),
    "ranks": ("Ranks", _ranks),
    "spread": ("How far the tokens are apart", step_sections.spread_section),
    "anatomy": ("Where the mismatch sits", step_sections.anatomy_section),
    "tokens": ("Worst tokens", _tokens),
    "samples": ("Worst samples", step_sections.samples_section),
    "loss": ("What the loss did with the tokens", _loss),
    "scalars": ("Scalars", step_sections.scalars_section),
    "operators": ("Captured operators", step_sections.operators_section),
    "findings": ("Findings", _findings),
    "losses": ("What never arrived", _losses),
    "captures": ("Captures", run_sections.captures_section),
    "doctor": ("What the doctor finds up to this step", _doctor),
}
