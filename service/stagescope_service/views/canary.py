"""The canary: verdicts by version, engine instance and pair of arms, and by sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from stagescope_service.core.canary.records import finding_id, record_of, scores_of
from stagescope_service.core.canary.verdicts import DIFFERS, EQUAL, NOT_COMPARED, VERDICTS
from stagescope_service.core.canary.versions import PAIR_NAMES
from stagescope_service.store.tables import CanaryVerdictRow
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.canary import CanaryScore, CanarySide, CanaryVersion
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_wire.errors import NotFound
from stagescope_wire.links import Link


def versions(deps: Dependencies, target: Target, page: Page) -> JsonObject:
    """List the versions of an attempt that a canary scored, newest first, by engine instance."""
    keys = deps.catalogue.judged_engines(
        target.attempt_id, limit=page.limit + 1, offset=page.offset
    )
    verdicts = deps.catalogue.canary_verdicts(target.attempt_id, {version for version, _ in keys})
    place = {key: at for at, key in enumerate(keys)}
    engines = _engines(deps, target, verdicts)
    rows = [row for row in engines if (row["version"], row["source"]) in place]
    rows.sort(key=lambda row: place[row["version"], row["source"]])
    return {**target.heading(), **page.first_of(rows)}


def of_version(deps: Dependencies, target: Target, version: int, page: Page) -> JsonObject:
    """List the sequences of a version in each pair of arms, the worst first."""
    verdicts = deps.catalogue.canary_verdicts(target.attempt_id, {version})
    if not verdicts:
        raise NotFound(
            f"no canary of version {version} was scored",
            advice="probe.canary(engine=...) after each weight sync",
            see=(Link("canary", run=target.run),),
        )
    rows = sorted(_scores(verdicts), key=_rank)
    return {
        **target.heading(),
        "version": version,
        "engines": [*_engines(deps, target, verdicts)],
        "recorded": [*_sides(deps, target, version)],
        **page.cut(rows),
    }


def _engines(
    deps: Dependencies, target: Target, verdicts: Sequence[CanaryVerdictRow]
) -> Iterator[CanaryVersion]:
    """Yield a row for each engine instance of each version; `verdicts` are sorted by both."""

    def ids(row: CanaryVerdictRow) -> list[str]:
        where = (target.attempt_id, row["version"], row["source"])
        return [finding_id(*where, code) for code in row["causes"]]

    wanted = {each for row in verdicts for each in ids(row)}
    found = deps.catalogue.findings(finding_id=[*wanted], limit=len(wanted)) if wanted else []
    messages = {row["finding_id"]: row["message"] for row in found}
    for _, group in groupby(verdicts, key=lambda row: (row["version"], row["source"])):
        rows = sorted(group, key=lambda row: PAIR_NAMES.index(row["pair"]))
        first = rows[0]
        worst = min((row["verdict"] for row in rows), key=VERDICTS.index)
        is_wrong = worst in (DIFFERS, EQUAL)
        yield {
            "version": first["version"],
            "source": first["source"],
            "step": first["step"],
            "problem": first["problem"],
            "seconds": first["seconds"],
            "wall": first["wall"],
            "verdict": DIFFERS if first["causes"] and not is_wrong else worst,
            "causes": first["causes"],
            "reasons": [messages[each] for each in ids(first) if each in messages],
            "pairs": [
                {
                    "pair": row["pair"],
                    "verdict": row["verdict"],
                    "cause": row["cause"],
                    "tokens": row["tokens"],
                    "mean": row["mean"],
                    "max": row["max"],
                    "bound": row["bound"],
                    "bound_of": row["bound_of"],
                    "usual": row["usual"],
                    "compared_with": row["compared_with"],
                    "error": row["error"],
                    "slope": row["slope"],
                    "unscored": row["unscored"],
                    "not_finite": row["not_finite"],
                    "odd_sequences": row["odd_sequences"],
                }
                for row in rows
                if row["tokens"] or row["not_finite"] or row["verdict"] != NOT_COMPARED
            ],
        }


def _scores(verdicts: Sequence[CanaryVerdictRow]) -> Iterator[CanaryScore]:
    for row in verdicts:
        for at, sequence in enumerate(row["sequences"]):
            yield {
                "source": row["source"],
                "pair": row["pair"],
                "sequence": at,
                "verdict": row["verdict"],
                "is_odd": at in row["odd_sequences"],
                **sequence,
            }


def _rank(row: CanaryScore) -> tuple[int, bool, float, str, int, int]:
    mean = row["mean"] or 0.0
    pair = PAIR_NAMES.index(row["pair"])
    odd = not row["is_odd"]
    return (VERDICTS.index(row["verdict"]), odd, -mean, row["source"], pair, row["sequence"])


def _sides(deps: Dependencies, target: Target, version: int) -> Iterator[CanarySide]:
    records = [record_of(row) for row in deps.catalogue.canaries(target.attempt_id, version)]
    scores = scores_of(records) if records else None
    sides = [] if scores is None else [scores.trainer, *scores.engines.values()]
    for side in sides:
        if side is not None:
            said = side.newest.canary
            arms = said.arms.values()
            yield {
                "side": said.side,
                "source": said.source,
                "seconds": None if said.seconds != said.seconds else said.seconds,
                "tokens": sum(len(row) for arm in arms for row in arm.log_probs),
                "checks": [
                    {"name": each.name, "ok": each.ok, "text": each.text} for each in said.checks
                ],
                "settings": dict(said.settings),
            }
