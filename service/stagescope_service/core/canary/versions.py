"""Judgement of a version: each pair of each engine instance, against the versions before it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from stagescope_service.core.canary.measures import Measure, Repeated, distance, measure, repeated
from stagescope_service.core.canary.records import Scores, VersionScores, digest
from stagescope_service.core.canary.verdicts import (
    AGREES,
    DIFFERS,
    FIRST_VERSIONS,
    HISTORY,
    NOT_COMPARED,
    REMEMBERED,
    Judgement,
    Past,
    Reference,
    judge,
    judge_unequal,
    rounding_of,
    typical,
)
from stagescope_wire.canary import BASE, FIXED, NOISE, PAIRS, Arm, Pair

if TYPE_CHECKING:
    from stagescope_service.store.tables import CanaryVerdictRow

TRAINER, DECODE, CACHE, ADAPTER, AGAIN = (pair.name for pair in PAIRS)
ENGINES: Final = "engine vs engines"
"""The fixed sequences against the median of all engine instances, where three or more report."""
BEFORE: Final = "engine vs before"
"""The fixed sequences against an earlier version whose trainer has the same weights."""
REPEATED: Final = "difference vs before"
"""The part of the difference from the trainer that is the same as in an earlier version, while the
trainer's weights moved on."""
PAIR_NAMES: Final = (*(pair.name for pair in PAIRS), ENGINES, BEFORE, REPEATED)
"""The names of all pairs, in the order in which they are shown."""
_MAJORITY: Final = 3
_OF_USUAL: Final = 0.125
"""Share of the usual difference from the trainer that an engine's batches may explain. Four times
as much is a difference."""
_MOVED: Final = 4.0
"""How many times its usual difference from the engine a trainer moves between two versions, so that
the rounding of one says nothing of the other."""
_BACK: Final = (1, 2, 4, 8, 16)
"""How many versions back those lie of which one is compared; the run's first one is the last."""
_SHARED: Final = 0.3
"""How far the correlation of two versions' differences lies above the usual one if weights differ.

Measured with two layers, dense or with experts: at most 0.3 in healthy versions. With one expert of
eight scaled by 1.05 it was 0.53 to 0.64, with one tensor that stays old 0.4 and more.
"""
_ERRORS: Final = 4.0
"""The same, at least, in standard errors of the correlation of that many unrelated tokens."""
_TREND: Final = 5
"""Number of versions whose differences tell whether they grow."""
_RISING: Final = 0.8
"""Least share of pairs of them of which the later one is larger."""
_AT_ONCE: Final = 0.75
"""Maximum share of a rise that one version may make, unless the difference rises after it."""
_RISE: Final = 1.2
"""How many times the first of them the last one is."""
_IS_ZERO: Final = "adapter_is_zero"
"""The trainer's setting: whether its adapter changes nothing yet."""


Version = tuple[int, int]
"""Attempt id, version."""


class Earlier(Protocol):
    """The records of earlier versions, as far as they are kept."""

    def of(self, version: Version) -> VersionScores | None:
        """Return those of one version."""
        ...

    def nearby(self) -> Iterable[tuple[Version, VersionScores]]:
        """Return those of the first version and of the last ones, in order."""
        ...


class JudgedPair(NamedTuple):
    """A pair of an engine instance in one version.

    Attributes:
        name: of the pair.
        measure: its statistics.
        judgement: its verdict.
    """

    name: str
    measure: Measure
    judgement: Judgement


class JudgedEngine(NamedTuple):
    """All pairs of an engine instance in one version.

    Attributes:
        source: the instance's name; "" where only the trainer has reported.
        pairs: by name.
        rows: digest of its fixed sequences; "" where it has none.
        scores: digest of their log-probs.
        trained: digest of the trainer's log-probs; "" where it has none.
    """

    source: str
    pairs: dict[str, JudgedPair]
    rows: str
    scores: str
    trained: str


class History:
    """The verdicts of the versions before, in order.

    Args:
        first: rows of the run's first versions.
        recent: rows of the versions just before.
    """

    def __init__(
        self, first: Iterable[CanaryVerdictRow] = (), recent: Iterable[CanaryVerdictRow] = ()
    ) -> None:
        self._first = _by_version(first)
        self._recent = _by_version(recent)
        self._past: dict[tuple[str, str], list[tuple[str, Past]]] = {}

    def add(self, rows: Sequence[CanaryVerdictRow]) -> None:
        """Add the rows of the version that follows."""
        for target in (self._first, self._recent):
            target.update(_by_version(rows))
        self._first = dict([*self._first.items()][:FIRST_VERSIONS])
        self._recent = dict([*self._recent.items()][-REMEMBERED:])
        self._past.clear()

    def own(self, pair: str, rows: str, source: str) -> list[Past]:
        """Return the earlier versions of an engine instance in which a pair agreed."""
        return [past for name, past in self._agreed(pair, rows) if name == source]

    def others(self, pair: str, rows: str, source: str) -> list[Past]:
        """Return those of all other engine instances."""
        return [past for name, past in self._agreed(pair, rows) if name != source]

    def _agreed(self, pair: str, rows: str) -> list[tuple[str, Past]]:
        if (pair, rows) not in self._past:
            self._past[pair, rows] = [*_past(self._recent, pair, rows)]
        return self._past[pair, rows]

    def first(self, pair: str, rows: str) -> list[Past]:
        """Return those of all engine instances in the run's first versions."""
        return [past for _, past in _past(self._first, pair, rows)]

    def since(self, source: str, scores: str) -> Version | None:
        """Return (attempt id, version) of the earliest version with the same log-probs that did not
        differ from the trainer's."""
        for key, rows in (*self._first.items(), *self._recent.items()):
            for row in rows:
                is_same = row["source"] == source and row["scores"] == scores
                if is_same and row["pair"] == TRAINER and row["verdict"] != DIFFERS:
                    return key
        return None

    def with_same_trainer(self, source: str, trained: str) -> Version | None:
        """Return the newest version in which trainer and engine agreed, and the trainer gave the
        same log-probs: its weights have not changed since."""
        for key, rows in reversed(self._recent.items()):
            for row in rows:
                is_same = row["source"] == source and row["trained"] == trained
                if is_same and row["pair"] == TRAINER and row["verdict"] == AGREES:
                    return key
        return None

    def is_rising(self, source: str, mean: float) -> bool:
        """Return whether an engine's difference from the trainer has grown step by step.

        It has if nearly each of the last versions was worse than the one before, whatever their
        verdicts. In this version it is `mean` nats.
        """
        means = [
            row["mean"]
            for of_version in self._recent.values()
            for row in of_version
            if row["pair"] == TRAINER and row["source"] == source and row["mean"] is not None
        ]
        last = [*means[1 - _TREND :], mean]
        pairs = [later > one for at, one in enumerate(last) for later in last[at + 1 :]]
        is_long = len(last) > _MAJORITY and last[-1] > _RISE * last[0]
        largest, after = max(
            ((later - one, later) for one, later in pairwise(last)), default=(0, 0)
        )
        if largest > _AT_ONCE * (last[-1] - last[0]) and last[-1] <= _RISE * after:
            return False
        return is_long and sum(pairs) >= _RISING * len(pairs)

    def healthy(
        self, pair: str, rows: str, source: str, column: Literal["mean", "slope"]
    ) -> float | None:
        """Return what a number of a pair of an engine instance is while nothing is wrong.

        It is the lower quartile, and the lower one of the first and of the recent versions. So a
        fault that grows slowly does not become usual. None: fewer than three versions are known.
        """
        found = []
        for versions in (self._first, self._recent):
            own = [
                value
                for of_version in versions.values()
                for row in of_version
                if row["pair"] == pair and row["rows"] == rows and row["source"] == source
                if row["verdict"] == AGREES and (value := row[column]) is not None
            ]
            if len(own) >= _MAJORITY:
                found.append(statistics.quantiles(own, n=4, method="inclusive")[0])
        return min(found, default=None)

    def versions(self) -> list[Version]:
        """Return (attempt id, version) of the first version and the recent ones, in order."""
        return [*dict.fromkeys([*[*self._first][:1], *self._recent])]


_Versions = dict[Version, list["CanaryVerdictRow"]]


def _by_version(rows: Iterable[CanaryVerdictRow]) -> _Versions:
    found: _Versions = {}
    for row in rows:
        found.setdefault((row["attempt_id"], row["version"]), []).append(row)
    return found


def _past(versions: _Versions, pair: str, rows: str) -> Iterator[tuple[str, Past]]:
    """Yield (engine instance, a pair of it) of the versions in which the pair agreed.

    Where the engine had wrong weights by `REPEATED`, its difference from the trainer is none.
    """
    for of_version in versions.values():
        wrong = {
            row["source"]
            for row in of_version
            if pair == TRAINER and row["pair"] == REPEATED and row["verdict"] == DIFFERS
        }
        for row in of_version:
            is_same = row["pair"] == pair and row["rows"] == rows and row["source"] not in wrong
            if is_same and row["verdict"] == AGREES and row["mean"] is not None:
                means = tuple(each["mean"] for each in row["sequences"])
                gaps = bool(row["not_finite"])
                yield row["source"], Past(row["mean"], row["error"], means, gaps)


def judge_version(scores: VersionScores, history: History, earlier: Earlier) -> list[JudgedEngine]:
    """Judge each pair of each engine instance of a version, in the order of their names.

    Args:
        scores: the records of the version.
        history: the versions before.
        earlier: their records.
    """
    trained = _digest(fixed_arm(scores.trainer))
    if not scores.engines:
        return [JudgedEngine("", {TRAINER: _unmeasured(TRAINER)}, "", "", trained)]
    measured = {name: _measures(scores, name) for name in scores.engines}
    return [_judged(scores, name, measured, history, earlier) for name in scores.engines]


def fixed_arm(scores: Scores | None) -> Arm | None:
    """Return a side's fixed sequences; None: it has not scored them."""
    return None if scores is None else scores.arm(FIXED)


def _digest(arm: Arm | None) -> str:
    return "" if arm is None else digest(arm.log_probs)


def _measures(scores: VersionScores, source: str) -> dict[str, Measure]:
    engine, found = scores.engines[source], {}
    for pair in PAIRS:
        arms = _arms(pair, scores.trainer, engine)
        if arms:
            found[pair.name] = measure(*arms)
    own = engine.arm(FIXED)
    if own is not None and (middle := _median(scores.engines.values(), own)) is not None:
        found[ENGINES] = measure(own, middle)
    return found


def _arms(pair: Pair, trainer: Scores | None, engine: Scores) -> Sequence[Arm]:
    if pair.first[0] == pair.second[0]:
        return engine.arms(pair.first[1], pair.second[1])
    arms = [None if trainer is None else trainer.arm(pair.first[1]), engine.arm(pair.second[1])]
    return [arm for arm in arms if arm is not None] if None not in arms else []


def _median(engines: Iterable[Scores], own: Arm) -> Arm | None:
    """Return the median log-prob of each fixed token; None: fewer than three scored these rows."""
    sizes = [*map(len, own.log_probs)]
    alike = [
        arm
        for each in engines
        if (arm := each.arm(FIXED)) is not None
        and arm.rows == own.rows
        and [*map(len, arm.log_probs)] == sizes
    ]
    if len(alike) < _MAJORITY:
        return None
    rows = zip(*(arm.log_probs for arm in alike), strict=True)
    return own._replace(
        log_probs=tuple(tuple(map(_finite_median, zip(*row, strict=True))) for row in rows)
    )


def _finite_median(values: Iterable[float]) -> float:
    return statistics.median([*filter(math.isfinite, values)] or [math.nan])


def _judged(
    scores: VersionScores,
    source: str,
    measured: dict[str, dict[str, Measure]],
    history: History,
    earlier: Earlier,
) -> JudgedEngine:
    engine = scores.engines[source]
    fixed = engine.arm(FIXED)
    rows = "" if fixed is None else digest(fixed.rows)
    own = measured[source]
    noise = own[NOISE.name].mean if NOISE.name in own else None
    trained = None if scores.trainer is None else scores.trainer.settings.get("dtype")

    def reference(pair: str) -> Reference:
        beside = [
            mean
            for name, of_engine in measured.items()
            if name != source and pair in of_engine
            if (mean := of_engine[pair].mean) is not None
        ]
        return Reference(
            own=history.own(pair, rows, source),
            others=history.others(pair, rows, source),
            beside=beside,
            first=history.first(pair, rows),
            noise=None if pair == NOISE.name else noise,
            rounding=rounding_of(engine.settings.get("dtype"), trained),
        )

    pairs = {name: _unmeasured(name) for name in (pair.name for pair in PAIRS)}
    for name, each in own.items():
        if name != ADAPTER:
            pairs[name] = JudgedPair(name, each, judge(each, reference(name)))
    if ADAPTER in own:
        is_exact = own[ADAPTER].max == 0.0
        expected = _expected(scores, engine, pairs[TRAINER], is_exact=is_exact)
        judgement = judge_unequal(own[ADAPTER], expected, reference(ADAPTER))
        pairs[ADAPTER] = JudgedPair(ADAPTER, own[ADAPTER], judgement)
    judged = JudgedEngine(source, pairs, rows, _digest(fixed), _digest(fixed_arm(scores.trainer)))
    before = _before(judged, scores, history, earlier, noise)
    if before is None:
        before = _repeated(judged, scores, history, earlier)
    return judged if before is None else judged._replace(pairs={**pairs, before.name: before})


def _repeated(
    judged: JudgedEngine, scores: VersionScores, history: History, earlier: Earlier
) -> JudgedPair | None:
    """Compare the engine's difference from the trainer with that in an earlier version.

    This sees wrong weights that change less than the rounding does, and those of which the
    difference grows slowly. It is the newest version from which the trainer has moved far enough.
    """
    own = judged.pairs[TRAINER]
    now = _both(scores, judged.source)
    if own.judgement.verdict != AGREES or own.measure.mean is None or now is None:
        return None
    usual = history.healthy(TRAINER, judged.rows, judged.source, "mean")
    far = _MOVED * (own.measure.mean if usual is None else usual)
    versions = history.versions()
    places = [-back for back in _BACK if back < len(versions)]
    for at in (*places, *([0] if versions else [])):
        before = earlier.of(versions[at])
        then = None if before is None else _both(before, judged.source)
        moved = None if then is None else distance(now[0], then[0])
        if then is not None and moved is not None and moved >= far:
            found = repeated(now, then)
            expected = history.healthy(REPEATED, judged.rows, judged.source, "slope")
            return None if found is None else _of_repeated(found, expected, len(versions))
    return None


def _both(scores: VersionScores, source: str) -> tuple[Arm, Arm] | None:
    """Return the fixed sequences of the trainer and of an engine; None: one has not scored."""
    trainer, engine = fixed_arm(scores.trainer), fixed_arm(scores.engines.get(source))
    return None if trainer is None or engine is None else (trainer, engine)


def _of_repeated(found: Repeated, expected: float | None, versions: int) -> JudgedPair:
    bound = max(_SHARED, _ERRORS / math.sqrt(found.tokens)) + max(0.0, expected or 0.0)
    verdict = DIFFERS if expected is not None and found.correlation > bound else AGREES
    usual = None if expected is None else found.nats(expected)
    shared = found.nats(found.correlation)
    measure = Measure(found.tokens, 0, 0, shared, None, None, found.correlation, ())
    return JudgedPair(
        REPEATED, measure, Judgement(verdict, found.nats(bound), HISTORY, usual, versions)
    )


def _before(
    judged: JudgedEngine,
    scores: VersionScores,
    history: History,
    earlier: Earlier,
    noise: float | None,
) -> JudgedPair | None:
    """Compare an engine with itself in an earlier version, if the trainer's weights are the same.

    Then the rounding of both sides is the same, too: this sees differences far below it. An engine
    may compute in other batches than before, which is a part of the rounding.
    """
    now = fixed_arm(scores.engines[judged.source])
    usual = judged.pairs[TRAINER].judgement.usual
    key = history.with_same_trainer(judged.source, judged.trained) if judged.trained else None
    then = None if key is None else earlier.of(key)
    before = None if then is None else fixed_arm(then.engines.get(judged.source))
    if now is None or before is None or usual is None:
        return None
    found = measure(now, before)
    expected = Past(max(noise or 0.0, _OF_USUAL * usual), None, (), has_gaps=False)
    return JudgedPair(BEFORE, found, judge(found, Reference(own=[expected])))


def _expected(
    scores: VersionScores, engine: Scores, trainer: JudgedPair, *, is_exact: bool
) -> float | None:
    """Return what `judge_unequal` expects of an adapter, by the trainer's own log-probs.

    Args:
        scores: of the version.
        engine: of the instance.
        trainer: its pair with the trainer.
        is_exact: whether the arms with and without the adapter are equal in every bit.
    """
    base = engine.arm(BASE)
    fixed = None if scores.trainer is None else scores.trainer.arm(FIXED)
    gap = None if base is None or fixed is None else distance(fixed, base)
    if scores.trainer is None or gap is None:
        return None
    is_zero = scores.trainer.settings.get(_IS_ZERO)
    if is_zero is True or (is_zero is False and is_exact):
        return 0.0 if is_zero else gap
    judged = trainer.judgement
    rounding = rounding_of(scores.trainer.settings.get("dtype"), engine.settings.get("dtype"))
    return gap - (judged.bound if judged.versions else min(judged.bound, typical(rounding)))


def _unmeasured(name: str) -> JudgedPair:
    nothing = Measure(0, 0, 0, None, None, None, None, ())
    return JudgedPair(name, nothing, Judgement(NOT_COMPARED, 0.0, "", None, 0))
