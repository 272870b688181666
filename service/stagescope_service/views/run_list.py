"""The list of runs with what a reader chooses by, and the settings in which some runs differ."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, cast

from stagescope_service.compare.fingerprints import leaves
from stagescope_service.statistics.step_metrics import VERSION
from stagescope_service.store.queries.overview import ListedRun
from stagescope_service.store.queries.sparklines import SampledAttempt
from stagescope_service.views.diagnosis import diagnosis_of
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.runs import Judgement, ListedOverview, OpenFindings, Sparkline
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.rows import as_row
from stagescope_service.views.series import reward_of
from stagescope_wire.errors import InvalidInput

ABS_DIFF: Final = "logprob_abs_diff/mean"
POINTS: Final = 32
"""Steps of a sparkline: a run of any length takes as many."""
MAX_COMPARED: Final = 20
_AREAS: Final = ("config", "git", "packages", "environment")
"""Areas of fingerprints that people set."""
_CACHED: Final = 5000


def overview(deps: Dependencies, page: Page, *, hidden: bool) -> JsonObject:
    """List runs, the last active first, each with its verdict, findings and sparklines."""
    rows = deps.catalogue.runs(limit=page.limit + 1, offset=page.offset, hidden=hidden)
    kinds = deps.catalogue.open_kinds([row["run"] for row in rows[: page.limit]])
    sparks = _sparklines(deps, rows[: page.limit])
    listed: list[ListedOverview] = []
    for row in rows[: page.limit]:
        run = row["run"]
        findings = OpenFindings(
            error=kinds.get((run, "error"), 0), warning=kinds.get((run, "warning"), 0)
        )
        listed.append(
            as_row(
                ListedOverview, row,
                findings=findings, judgement=_judgement(deps, row, findings),
                spark=sparks.get(row["attempt_id"] or 0),
            )
        )  # fmt: skip
    return page.answer(listed, more=len(rows) > page.limit)


def _judgement(deps: Dependencies, row: ListedRun, findings: OpenFindings) -> Judgement | None:
    if row["deleting_wall"] is not None:
        return None
    state = (row["attempt_id"], row["last_closed_step"], row["live"], tuple(findings.values()))
    judge = functools.partial(_judge, deps, row["run"])
    return deps.judgements.of(row["run"], state, judge)


def _judge(deps: Dependencies, run: str) -> Judgement:
    found, rows = diagnosis_of(deps, run, None, None)
    causes: Iterator[JsonObject] = (
        each for each in rows
        if each["verdict"] == "found" and each["last_step"] is None and each["cause"] is None
    )  # fmt: skip
    first = next(causes, {})
    return Judgement(
        healthy=None if found["healthy"] and not found["measured"] else found["healthy"],
        current=True,
        title=first.get("title"),
        sentence=first.get("sentence"),
        since_step=first.get("since_step"),
        where=first.get("where"),
    )


def _sparklines(deps: Dependencies, rows: Sequence[ListedRun]) -> dict[int, Sparkline]:
    """Return attempt_id -> its sparkline; of one that has not gone on, the one of before."""
    last = {
        row["attempt_id"]: (row["first_step"] or 0, row["last_closed_step"])
        for row in rows
        if row["attempt_id"] is not None and row["last_closed_step"] is not None
    }
    known = {each: deps.sparklines.get(each) for each in last}
    new = [
        each for each, (_, step) in last.items() if (old := known[each]) is None or old[0] != step
    ]
    scalars = deps.catalogue.scalars_of(new)
    wanted = [
        SampledAttempt(each, _spread(*last[each]), reward_of(scalars.get(each, ()))) for each in new
    ]
    found = deps.catalogue.step_samples(wanted, metric=ABS_DIFF, version=VERSION)
    for each, samples in zip(wanted, found, strict=True):
        deps.sparklines[each.attempt_id] = (last[each.attempt_id][1], Sparkline(
            steps=each.steps,
            abs_diff=[cast("float | None", sample.metric) for sample in samples.values()],
            reward=[cast("float | None", sample.scalar) for sample in samples.values()],
            reward_name=each.scalar,
        ))  # fmt: skip
    drawn = {each: deps.sparklines[each][1] for each in last}
    while len(deps.sparklines) > _CACHED:
        deps.sparklines.pop(next(iter(deps.sparklines)), None)
    return drawn


def _spread(first: int, last: int) -> list[int]:
    """Return at most `POINTS` steps, evenly from the first to the last."""
    first = min(first, last)
    count = min(POINTS, last - first + 1)
    return [first + round(at * (last - first) / max(count - 1, 1)) for at in range(count)]


# --- settings -------------------------------------------------------------------------------
def settings(deps: Dependencies, runs: Sequence[str]) -> JsonObject:
    """Return the settings in which runs differ: the newest attempt of each counts.

    Raises:
        NotFound: no such run.
        InvalidInput: fewer than two runs, or too many.
    """
    names = compared(deps, runs)
    values = [_settings_of(deps, run) for run in names]
    keys = dict.fromkeys(key for of_run in values for key in of_run)
    by_key = {key: [of_run.get(key) for of_run in values] for key in keys}
    rows = [
        {"area": area, "name": name, "values": own}
        for (area, name), own in by_key.items()
        if any(each != own[0] for each in own)
    ]
    same = len(keys) - len(rows)
    return {"runs": names, "same": same, "rows": rows, "next": None}


def compared(deps: Dependencies, runs: Sequence[str]) -> list[str]:
    """Return the names of the runs that texts name, each once.

    Raises:
        NotFound: no such run.
        InvalidInput: none, or too many.
    """
    names = list(dict.fromkeys(deps.finder.attempt(run).run for run in runs))
    if not 1 <= len(names) <= MAX_COMPARED:
        raise InvalidInput(f"{len(names)} runs", expected=f"1 to {MAX_COMPARED}")
    return names


def _settings_of(deps: Dependencies, run: str) -> dict[tuple[str, str], object]:
    row = deps.catalogue.run(run)
    assert row is not None
    found: dict[tuple[str, str], object] = {}
    if row["attempt_id"] is not None:
        fingerprint = deps.catalogue.fingerprint(row["attempt_id"])
        for area in _AREAS if isinstance(fingerprint, Mapping) else ():
            found |= {(area, name): value for name, value in leaves(fingerprint.get(area) or {})}
    known = {name for area, name in found if area == "config"}
    found |= {
        ("settings", name): value
        for name, value in leaves(row["settings"] or {})
        if name not in known
    }
    return found
