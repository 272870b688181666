"""The likeliest cause of what a canary shows, by the pattern of its pairs.

Pure: judged pairs in, causes out. A cause is a code; `texts` words it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_service.core.canary.measures import Change, distance, follows
from stagescope_service.core.canary.records import VersionScores
from stagescope_service.core.canary.verdicts import AGREES, DIFFERS, EQUAL, EXACT
from stagescope_service.core.canary.versions import (
    ADAPTER,
    AGAIN,
    BEFORE,
    CACHE,
    DECODE,
    ENGINES,
    REPEATED,
    TRAINER,
    Earlier,
    History,
    JudgedEngine,
    JudgedPair,
    Version,
    fixed_arm,
)

TOKENIZERS: Final = "tokenizers_differ"
NOT_FINITE: Final = "not_finite"
ADAPTER_MISSING: Final = "adapter_not_applied"
CACHE_STALE: Final = "prefix_cache_stale"
TEMPERATURE: Final = "sampling_temperature"
TRUNCATED: Final = "sampling_truncated"
DECODING: Final = "decode_differs"
BASE_WEIGHTS: Final = "base_weights"
OLD_WEIGHTS: Final = "old_weights"
OTHER_WEIGHTS: Final = "engine_weights"
UNSTABLE: Final = "engine_unstable"
CHECK_FAILED: Final = "check_failed"
CAUSES: Final = (
    TOKENIZERS, NOT_FINITE, ADAPTER_MISSING, CACHE_STALE, TEMPERATURE, TRUNCATED, DECODING,
    BASE_WEIGHTS, OLD_WEIGHTS, OTHER_WEIGHTS, UNSTABLE, CHECK_FAILED,
)  # fmt: skip
"""The codes of causes: a cause may explain pairs of those after it."""

_CHECKS: Final[Mapping[str, str]] = {
    "tokenizer": TOKENIZERS, "temperature": TEMPERATURE, "truncation": TRUNCATED,
}  # fmt: skip
"""Check -> the cause if it fails."""
_NEAR: Final = 0.5
"""Most of the distance from the trainer's own version that weights of an earlier one may have."""
_SURE: Final = 6.0
"""How surely an engine's change is that of an earlier version of the trainer: standard errors.

Measured with two layers: at most 3.5 in healthy versions with experts, below 0 in dense ones.
"""
_MOST_BEHIND: Final = 4
"""Versions that an engine may be behind in each version."""


class Cause(NamedTuple):
    """What is wrong with an engine instance in a version.

    Attributes:
        code: of `CAUSES`.
        pairs: the names of the pairs that show it; the first is the clearest.
        detail: of a check: what was compared. Else "".
        short: of a check: the rest of a sentence whose subject is the engine. Else "".
        served_version: the earlier version whose weights the engine serves; None: unknown.
        temperature: by which the engine divides its logits; None: unknown.
        is_growing: whether the difference from the trainer has grown with each version.
    """

    code: str
    pairs: tuple[str, ...] = ()
    detail: str = ""
    short: str = ""
    served_version: int | None = None
    temperature: float | None = None
    is_growing: bool = False


def causes_of(
    judged: JudgedEngine, scores: VersionScores, history: History, earlier: Earlier
) -> list[Cause]:
    """Return what is wrong with an engine instance, the cause that explains others first.

    Args:
        judged: its pairs.
        scores: the records of the version.
        history: the versions before.
        earlier: the records of some of them.
    """
    found = [*_checks(scores, judged.source)]
    wrong = {
        name: pair
        for name, pair in judged.pairs.items()
        if pair.judgement.verdict in (DIFFERS, EQUAL)
    }
    weights = tuple(name for name in (TRAINER, ENGINES, BEFORE, REPEATED) if name in wrong)
    if gaps := tuple(name for name, each in wrong.items() if each.judgement.is_not_finite):
        found.append(Cause(NOT_FINITE, gaps))
        weights = tuple(name for name in weights if name not in gaps)
    if AGAIN in wrong and AGAIN not in gaps:
        found.append(Cause(UNSTABLE, (AGAIN,)))
    if ADAPTER in wrong:
        found.append(Cause(ADAPTER_MISSING, (ADAPTER, *weights)))
        weights = ()
    if CACHE in wrong and CACHE not in gaps:
        found.append(Cause(CACHE_STALE, (CACHE,)))
    if DECODE in wrong and DECODE not in gaps:
        slope = wrong[DECODE].measure.slope
        temperature = 1.0 / slope if slope is not None and slope > 0.0 else None
        checked = [each.code for each in found if each.code in (TEMPERATURE, TRUNCATED)]
        if checked:  # a check is surer: it compares tokens of one context
            found.append(Cause(checked[0], (DECODE,)))
        else:
            code = DECODING if temperature is None else TEMPERATURE
            found.append(Cause(code, (DECODE,), temperature=temperature))
    if weights and any(each.code == TOKENIZERS for each in found):
        weights = ()
    if weights:
        found.append(_weights(judged, wrong, weights, scores, history, earlier))
    elif not found:
        of_old = (each(judged, scores, history, earlier) for each in (_unchanged, _behind))
        found += [each for each in of_old if each is not None][:1]
    return [_merged(code, found) for code in CAUSES if any(each.code == code for each in found)]


def _merged(code: str, found: Sequence[Cause]) -> Cause:
    """Return the causes of one code as one: a check and a pair may show the same."""
    same = [each for each in found if each.code == code]
    return Cause(
        code,
        tuple(dict.fromkeys(pair for each in same for pair in each.pairs)),
        "; ".join(dict.fromkeys(each.detail for each in same if each.detail)),
        # The last check is that of the rollout's own requests.
        next((each.short for each in reversed(same) if each.short), ""),
        next((each.served_version for each in same if each.served_version is not None), None),
        next((each.temperature for each in same if each.temperature is not None), None),
        any(each.is_growing for each in same),
    )


def _checks(scores: VersionScores, source: str) -> Iterator[Cause]:
    engine = scores.engines.get(source)
    for side in (scores.trainer, engine) if engine is not None else ():
        for check in side.newest.canary.checks if side is not None else ():
            if check.ok is False:
                code = _CHECKS.get(check.name, CHECK_FAILED)
                yield Cause(code, detail=f"{check.name}: {check.text}", short=check.short)


def _weights(
    judged: JudgedEngine,
    wrong: dict[str, JudgedPair],
    pairs: tuple[str, ...],
    scores: VersionScores,
    history: History,
    earlier: Earlier,
) -> Cause:
    """Return which weights an engine serves that differs from the trainer or the other engines."""
    unchanged = _unchanged(judged, scores, history, earlier)
    if unchanged is not None:
        return unchanged._replace(pairs=pairs)
    own = fixed_arm(scores.engines[judged.source])
    trainer = wrong.get(TRAINER)
    if own is not None and trainer is not None and trainer.measure.mean is not None:
        near = [
            (gap, version)
            for version, each in earlier.nearby()
            if (other := fixed_arm(each.trainer)) is not None
            if (gap := distance(own, other)) is not None
        ]
        bound = min(trainer.judgement.bound, _NEAR * trainer.measure.mean)
        if near and (nearest := min(near))[0] <= bound:
            return _served(nearest[1], history, pairs)
    behind = _behind(judged, scores, history, earlier)
    if behind is not None:
        return behind._replace(pairs=pairs)
    slope = None if trainer is None else trainer.measure.slope
    if slope is not None and judged.pairs[DECODE].judgement.verdict != AGREES:
        # The engine's log-probs are about those of the trainer, divided by its temperature.
        return Cause(TEMPERATURE, pairs, temperature=slope)
    mean = judged.pairs[TRAINER].measure.mean
    is_growing = mean is not None and history.is_rising(judged.source, mean)
    return Cause(OTHER_WEIGHTS, pairs, is_growing=is_growing)


def _served(version: Version, history: History, pairs: tuple[str, ...]) -> Cause:
    first, *later = history.versions()
    code = BASE_WEIGHTS if version == first and later else OLD_WEIGHTS
    return Cause(code, pairs, served_version=version[1])


def _behind(
    judged: JudgedEngine, scores: VersionScores, history: History, earlier: Earlier
) -> Cause | None:
    """Return the version that an engine serves if it changes as the trainer did versions before.

    This needs no bound: it also sees updates that move log-probs no more than the rounding does.
    """
    versions = history.versions()[-_MOST_BEHIND - 1 :]
    then = [None if (each := earlier.of(version)) is None else each for version in versions]
    trainer = [*(None if each is None else fixed_arm(each.trainer) for each in then),
               fixed_arm(scores.trainer)]  # fmt: skip
    last = then[-1] if then else None
    engine = [
        None if each is None else fixed_arm(each.engines.get(judged.source))
        for each in (last, scores)
    ]
    changes = [
        None if after is None or before is None else Change(after, before)
        for before, after in itertools.pairwise(trainer)
    ]
    if not changes or (newest := changes[-1]) is None or engine[0] is None or engine[1] is None:
        return None
    own = Change(engine[1], engine[0])
    found = [
        (sure, version)
        for version, change in zip(versions[1:], changes[:-1], strict=True)
        if change is not None and (sure := follows(own, newest, change)) > _SURE
    ]
    return _served(max(found)[1], history, (TRAINER,)) if found else None


def _unchanged(
    judged: JudgedEngine, scores: VersionScores, history: History, earlier: Earlier
) -> Cause | None:
    """Return the version since which an engine gives the same numbers, if the trainer moved on.

    The trainer's log-probs must have changed by more than trainer and engine usually differ.
    """
    since = history.since(judged.source, judged.scores) if judged.scores else None
    now = fixed_arm(scores.trainer)
    if since is None or now is None:
        return None
    before = earlier.of(since)
    then = None if before is None else fixed_arm(before.trainer)
    moved = None if then is None else distance(now, then)
    usual = history.healthy(TRAINER, judged.rows, judged.source, "mean")
    bound = judged.pairs[TRAINER].judgement.bound if usual is None else usual
    if moved is None or moved <= max(bound, EXACT):
        return None
    return _served(since, history, (TRAINER,))
