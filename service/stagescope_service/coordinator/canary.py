"""Judges the stored records of a run's canary: verdicts, findings, and what is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from typing_extensions import Unpack

from stagescope_service.coordinator.version_checks import VersionChecks, failure_fields
from stagescope_service.core.canary.causes import (
    BASE_WEIGHTS,
    CAUSES,
    OLD_WEIGHTS,
    OTHER_WEIGHTS,
    TEMPERATURE,
    TRUNCATED,
    Cause,
    causes_of,
)
from stagescope_service.core.canary.records import (
    JUMP,
    Scores,
    VersionScores,
    finding_id,
    record_of,
    scores_of,
)
from stagescope_service.core.canary.texts import words_of
from stagescope_service.core.canary.verdicts import AGREES, DIFFERS, FIRST_VERSIONS, REMEMBERED
from stagescope_service.core.canary.versions import History, JudgedEngine, Version, judge_version
from stagescope_service.core.findings import FindingDetails, FindingFields, finding
from stagescope_service.core.instructions import Delete, JudgeCanary, Put
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Write, WriteRows
from stagescope_service.store.queries.canary import CanaryVersion
from stagescope_service.store.tables import CanaryVerdictRow
from stagescope_wire.links import Link

FAILED: Final = "canary_failed"
"""An engine could not score the canary."""
NOT_JUDGED: Final = "canary_not_judged"
"""A run's canary could not be judged; the next try that succeeds ends this."""

KEPT_VERSIONS: Final = 100
"""Number of versions of a run whose records are kept besides the first one."""
_OF_WEIGHTS: Final = (BASE_WEIGHTS, OLD_WEIGHTS, OTHER_WEIGHTS)
_ENDS_AFTER: Final = 4
"""Versions that agree after a cause of which a version may say nothing by chance: sampled tokens
show it, and no log-prob. Other causes end with the first that agrees."""
_NEARBY: Final = 8
"""Number of earlier versions with which a differing engine is compared."""


def judge(catalogue: Catalogue, order: JudgeCanary) -> list[Write]:
    """Return the rows of a run's versions from the first that is not judged.

    A version depends on those before it: a late record changes the verdicts on later versions.
    """
    chain = catalogue.scored_versions(order.run)
    begin = next((at for at, each in enumerate(chain) if each.records > each.judged), None)
    if begin is None:
        return []
    start = (order.run, chain[begin].attempt_id, chain[begin].version)
    history = History(
        catalogue.canary_verdicts_before(*start, FIRST_VERSIONS, newest=False),
        catalogue.canary_verdicts_before(*start, REMEMBERED, newest=True),
    )
    earlier = _Earlier(catalogue, history)
    out: list[Write] = []
    for each in chain[begin:]:
        rows = catalogue.canary_verdicts(each.attempt_id, [each.version])
        if each.records >= each.judged:
            judged = _judge(order.run, each, history, earlier)
            before, rows = rows, [*_rows(judged)]
            out += _written(judged, rows, before)
        history.add(rows)
    return [*out, *_too_old(chain)]


class _Earlier:
    """The records of versions, read when they are needed; see `versions.Earlier`."""

    def __init__(self, catalogue: Catalogue, history: History) -> None:
        self._catalogue = catalogue
        self._history = history
        self._read: dict[Version, VersionScores | None] = {}

    def of(self, version: Version) -> VersionScores | None:
        """Return the records of one version; None: none is kept."""
        if version not in self._read:
            records = [record_of(row) for row in self._catalogue.canaries(*version)]
            self._read[version] = scores_of(records) if records else None
        return self._read[version]

    def nearby(self) -> Iterator[tuple[Version, VersionScores]]:
        """Yield those of the first version and of the last ones, in order."""
        versions = self._history.versions()
        for version in (*versions[:1], *versions[1:][-_NEARBY:]):
            if (scores := self.of(version)) is not None:
                yield version, scores


def _judge(run: str, at: CanaryVersion, history: History, earlier: _Earlier) -> _Judged:
    scores = earlier.of((at.attempt_id, at.version))
    assert scores is not None
    engines = [
        (engine, causes_of(engine, scores, history, earlier))
        for engine in judge_version(scores, history, earlier)
    ]
    return _Judged(run, at.attempt_id, at.version, scores, engines)


def _too_old(chain: Sequence[CanaryVersion]) -> Iterator[Delete]:
    for each in chain[1:-KEPT_VERSIONS]:
        yield Delete("canaries", {"attempt_id": each.attempt_id, "version": each.version})


# --- what is written --------------------------------------------------------------------------


class _Judged(NamedTuple):
    """A version of a run, judged."""

    run: str
    attempt_id: int
    version: int
    scores: VersionScores
    engines: list[tuple[JudgedEngine, list[Cause]]]

    def key(self) -> dict[str, object]:
        """Return the columns that its rows share."""
        return {"attempt_id": self.attempt_id, "version": self.version}


def _rows(judged: _Judged) -> Iterator[CanaryVerdictRow]:
    for engine, causes in judged.engines:
        scores = judged.scores.engines.get(engine.source)
        record = None if scores is None else scores.newest.canary
        by_pair = {pair: each.code for each in reversed(causes) for pair in each.pairs}
        for name, pair in engine.pairs.items():
            measure, judgement = pair.measure, pair.judgement
            cause, verdict = by_pair.get(name), judgement.verdict
            yield {
                "attempt_id": judged.attempt_id,
                "version": judged.version,
                "source": engine.source,
                "pair": name,
                "step": judged.scores.step,
                "causes": [each.code for each in causes],
                "problem": "" if record is None else record.problem,
                "seconds": None if record is None or math.isnan(record.seconds) else record.seconds,
                "wall": judged.scores.wall,
                # A sync that changed nothing is seen before the difference is large.
                "verdict": DIFFERS if cause is not None and verdict == AGREES else verdict,
                "cause": cause,
                "tokens": measure.tokens,
                "mean": measure.mean,
                "max": measure.max,
                "bound": judgement.bound if judgement.bound_of else None,
                "bound_of": judgement.bound_of,
                "usual": judgement.usual,
                "compared_with": judgement.versions,
                "error": measure.error,
                "slope": measure.slope,
                "unscored": measure.unscored,
                "not_finite": measure.not_finite,
                "odd_sequences": list(judgement.sequences),
                "sequences": list(measure.sequences),
                "rows": engine.rows,
                "scores": engine.scores,
                "trained": engine.trained,
                "records": judged.scores.records,
            }


def _written(
    judged: _Judged, rows: Sequence[CanaryVerdictRow], before: Sequence[CanaryVerdictRow]
) -> Iterator[Write]:
    """Yield the writes of a version, which replace the rows of an earlier verdict, `before`."""
    if before:
        yield Delete("canary_verdicts", judged.key())
        made = {_finding_id(judged, *each) for each in _subjects(judged)}
        for source in {"", *(row["source"] for row in before), *judged.scores.engines}:
            for code in (*CAUSES, FAILED):
                own = _finding_id(judged, source, code)
                if own not in made:
                    yield Delete("findings", {"finding_id": own})
    for row in rows:
        yield Put("canary_verdicts", {**row})
    for engine, causes in judged.engines:
        for cause in causes:
            yield _jump(judged, engine, cause)
    for side in _failing(judged.scores):
        yield _failed(judged, side)


def _subjects(judged: _Judged) -> Iterator[tuple[str, str]]:
    """Yield (engine instance, code) of each finding."""
    for engine, causes in judged.engines:
        yield from ((engine.source, cause.code) for cause in causes)
    yield from ((side.newest.canary.source, FAILED) for side in _failing(judged.scores))


def _failing(scores: VersionScores) -> Iterator[Scores]:
    """Yield the sides that could not score everything."""
    for side in (scores.trainer, *scores.engines.values()):
        if side is not None and side.newest.canary.problem:
            yield side


def _finding_id(judged: _Judged, source: str, code: str) -> str:
    return finding_id(judged.attempt_id, judged.version, source, code)


def _jump(judged: _Judged, engine: JudgedEngine, cause: Cause) -> Put:
    words = words_of(cause, engine, judged.version)
    pairs = [engine.pairs[name] for name in cause.pairs]
    by_chance = not pairs and cause.code in (TEMPERATURE, TRUNCATED)
    evidence = {
        "cause": cause.code,
        "headline": words.headline,
        "version": judged.version,
        "engine": engine.source,
        "ends_after": _ENDS_AFTER if by_chance else 1,
        "served_version": cause.served_version,
        "temperature": cause.temperature,
        "check": cause.detail or None,
        "pairs": [
            {
                "pair": each.name,
                "tokens": each.measure.tokens,
                "mean": each.measure.mean,
                "max": each.measure.max,
                "slope": each.measure.slope,
                "bound": each.judgement.bound,
                "bound_of": each.judgement.bound_of,
                "usual": each.judgement.usual,
                "compared_with": each.judgement.versions,
                "sequences": each.judgement.sequences,
            }
            for each in pairs
        ],
    }
    shows = "each sequence"
    see = [Link("canary", name=str(judged.version), run=judged.run, shows=shows)]
    if cause.code in _OF_WEIGHTS:
        see.append(Link("weights", shows="whether the engine received what the trainer sent"))
    side = judged.scores.engines[engine.source]
    return _put(judged, side, cause.code, JUMP, words.message, severity="error",
                evidence=evidence, advice=words.advice, see=see)  # fmt: skip


def _failed(judged: _Judged, side: Scores) -> Put:
    said = side.newest.canary
    who = f"engine {said.source or 'unnamed'}" if said.side == "engine" else "the trainer"
    return _put(
        judged, side, FAILED, FAILED,
        f"version {judged.version}: {who} did not score all of the canary: {said.problem}",
        evidence={"version": judged.version, "engine": said.source, "problem": said.problem},
        advice="it is unknown whether this engine has the trainer's weights: see why it does not "
        "answer, with `stagescope engines`"
        if said.side == "engine"
        else "the engines are not compared with the trainer in this version: correct the error",
    )  # fmt: skip


def _put(
    judged: _Judged,
    side: Scores,
    code: str,
    kind: str,
    message: str,
    **details: Unpack[FindingDetails],
) -> Put:
    record = side.newest
    made = finding(
        kind, message, run=judged.run, attempt_id=judged.attempt_id, wall=judged.scores.wall,
        step=judged.scores.step, stage="weight_sync", **details,
    )  # fmt: skip
    own = _finding_id(judged, record.canary.source, code)
    return Put("findings", {**made.row, "finding_id": own})


class CanaryJudge(VersionChecks[JudgeCanary]):
    """Judges the canaries of one coordinator's runs; see `VersionChecks`."""

    def __init__(self, catalogue: Catalogue, write: WriteRows) -> None:
        super().__init__(catalogue, write, what="the judgement of canaries", failure=NOT_JUDGED)

    def rows_of(self, order: JudgeCanary) -> Sequence[Write]:
        """Return the rows of a run's versions that are not judged."""
        return judge(self._catalogue, order)

    def left_over(self) -> Sequence[JudgeCanary]:
        """Return the runs that have a canary."""
        return [JudgeCanary(run) for run in self._catalogue.runs_with_canaries()]

    def failed(self, order: JudgeCanary, reason: str, tried: int) -> tuple[str, FindingFields]:
        """Return the finding of a canary that could not be judged."""
        message = f"the canary of {order.run} could not be judged ({tried} tries): {reason}"
        return message, failure_fields(order.run, None, reason, tried)
