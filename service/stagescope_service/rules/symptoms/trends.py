"""Evidence of the mismatch over the steps: jumps, growth, and what is over."""

from __future__ import annotations

import dataclasses
import math
from bisect import insort
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from stagescope_service.rules.evidence import (
    ABS_DIFF,
    ENDED_AFTER,
    Count,
    Evidence,
    Series,
    kendall,
    not_found,
    not_measured,
    short,
    spread,
    times,
)
from stagescope_service.rules.history import NEWEST, RunHistory
from stagescope_service.rules.symptoms.ages import drift
from stagescope_service.statistics.cell import Float64
from stagescope_service.statistics.step_metrics import staleness_name

_BESIDE: Final = 5
"""Maximum steps on either side of the begin of an attempt that are compared."""
_WIDTHS: Final = 4.0
"""Noise widths over a median that noise does not reach."""


def jump(history: RunHistory, *, at: str, factor: float, least: float) -> Evidence:
    """Return whether mean |d| rises at once where an attempt begins, or after its first step.

    Args:
        history: of the run.
        at: 'attempt', or 'first sync': between the first step of an attempt, which samples with
            the weights that the engine loaded, and the next ones.
        factor: minimum ratio of the medians after and before.
        least: minimum median after.

    Policy drift must not explain the rise, see `drift`.
    """
    series = history.metric(ABS_DIFF).finite
    if at == "first sync":
        return _jump_at_first_sync(history, series, factor, least)
    numbers = sorted({int(number) for number in series.attempts})
    if len(numbers) < 2:
        measured = f"{ABS_DIFF} is measured in {len(numbers) or 'no'} attempt"
        return not_measured(f"{measured}: no restart")
    found: list[Evidence] = []
    against = []
    for number in numbers[1:]:
        own = after = series.of_attempt(number)
        first = int(after.steps[0])
        if len(own) == 1:  # it died at once: those that went on say whether its step was usual
            after = series.where(series.attempts >= number)
        before = series.where((series.steps < first) & (series.attempts < number)).newest(_BESIDE)
        if len(before) < 2 or len(after) < 2:
            against.append(f"attempt {number}: {_TOO_FEW}")
            continue
        head = after.where(np.arange(len(after)) < _BESIDE)
        low, high = float(np.median(before.values)), float(np.median(head.values))
        text = (
            f"{ABS_DIFF} is {short(low)} in the {len(before)} steps before attempt {number} and "
            f"{short(high)} in the first {len(head)} of it"
            + ("" if len(own) > 1 else " and the next")
        )
        # Its first step may be healthy: the engine's own weights sampled it. A later rise is not
        # of the restart.
        between = math.sqrt(low * high)
        at_once = float(head.values[:2].max()) > between
        if found:  # the attempt before may have begun with it, and have few steps
            of_last = before.of_attempt(int(before.attempts[-1])).values
            at_once = at_once and float(np.median(of_last)) < between
        clear = low + _WIDTHS * spread(before.values)
        if at_once and high > max(least, factor * low, clear):
            is_beyond = head.values > before.values.max()
            supports = (f"{text} ({times(high, low)})",)
            evidence = Evidence(
                "found", float(is_beyond.mean()), first, f"attempt {number}", supports,
                count=Count(int(is_beyond.sum()), len(head)),
            )  # fmt: skip
            evidence = _unless_drift(history, series, evidence, factor)
            if evidence.verdict == "found":
                since = series.where(series.steps >= first)
                found.append(_while_above(evidence, since, between))
            else:
                against += evidence.against
        else:
            against.append(text)
    if not found and against[-1].endswith(_TOO_FEW):
        return not_measured(against[-1], waits=True)
    if not found:
        return not_found(*against)
    return dataclasses.replace(found[-1], against=(*found[-1].against, *against))


def _while_above(evidence: Evidence, series: Series, bound: float) -> Evidence:
    """Return the evidence of a rise, ended where the newest values are below a bound."""
    over = np.flatnonzero(series.values > bound)
    last = int(series.steps[over[-1] if len(over) else -1])
    ended = evidence.ended_after(series.steps.tolist(), last)
    if ended is evidence:
        return evidence
    newest = float(np.median(series.values[series.steps > last]))
    return dataclasses.replace(
        ended, against=(*ended.against, f"{series.name} is back at {short(newest)}")
    )


_TOO_FEW: Final = "too few steps on one side of its begin"


def _jump_at_first_sync(
    history: RunHistory, series: Series, factor: float, least: float
) -> Evidence:
    found: Evidence | None = None
    against: list[str] = []
    unknown: list[str] = []
    for number in sorted({int(number) for number in series.attempts}):
        own = series.of_attempt(number)
        if len(own) < 3:
            continue
        if not history.has_syncs(number):
            unknown.append(f"attempt {number} reported no weight sync")
            continue
        first, later = float(own.values[0]), own.values[1 : _BESIDE + 1]
        high, step = float(np.median(later)), int(own.steps[1])
        text = f"attempt {number}: {short(first)} in its first step, {short(high)} after it"
        if high > max(least, factor * first) and float(later.min()) > math.sqrt(first * high):
            is_over = later > factor * first
            evidence = Evidence(
                "found", float(is_over.mean()), step, f"attempt {number}", (text,),
                count=Count(int(is_over.sum()), len(later)),
            )  # fmt: skip
            evidence = _unless_drift(history, own, evidence, factor)
            if evidence.verdict == "found":
                since = series.where(series.steps >= step)
                found = _while_above(evidence, since, math.sqrt(first * high))
            else:
                against += evidence.against
        else:
            against.append(text)
    if found is not None:
        return dataclasses.replace(found, against=(*found.against, *against))
    if against:
        return not_found(*against)
    reason = unknown[-1] if unknown else "no attempt has three steps"
    return not_measured(reason, waits=not unknown)


def _unless_drift(
    history: RunHistory, series: Series, evidence: Evidence, factor: float
) -> Evidence:
    """Return the evidence of a rise; not found if policy drift explains it, see `drift`."""
    if evidence.since_step is None:
        return evidence
    before = series.where(series.steps < evidence.since_step).newest(NEWEST)
    after = series.where(series.steps >= evidence.since_step)
    after = after.where(np.arange(len(after)) < NEWEST)
    rise = float(np.median(after.values)) - float(np.median(before.values))
    text = drift(history, before.steps.tolist(), after.steps.tolist(), factor, rise)
    return evidence if text is None else not_found(*evidence.supports, text)


def step_change(history: RunHistory, *, factor: float) -> Evidence:
    """Return whether mean |d| rises at once inside an attempt, and stays there until now.

    The steps are split where the two medians leave the smallest sum of absolute deviations of the
    logarithms, with at least 3 steps on each side (`_ENOUGH` in all). The split then moves before
    every value that lies above the geometric mean of the two without a break. The later median is
    `factor` times the earlier one. At least 80 % of the rise lies between the 3 steps (or 2, at the
    begin) on either side. Nearly every later value (`_STAYS`), also of later attempts, lies above
    the geometric mean.
    The newest attempt that shows it is named. A rise of over `_CLEAR` noise widths needs `_FEWEST`
    steps. Policy drift must not explain the rise, see `drift`.
    """
    series = history.metric(ABS_DIFF).finite
    if not len(series):
        return not_measured(f"no step has {ABS_DIFF}")
    found: list[Evidence] = []
    for attempt in sorted({*series.attempts.tolist()}, reverse=True):
        own = series.of_attempt(attempt).newest(_MAX_SPLIT)
        after = series.values[series.attempts > attempt]
        # A first value alone that is low is of the weights that the engine loaded: of `jump`.
        first = 2 if history.has_syncs(attempt) else 1
        change = _change_in(own, first, after, factor, is_short=len(own) < _ENOUGH)
        found.append(_unless_drift(history, own, change, factor))
        if found[-1].verdict == "found":
            return found[-1]
        if len(own) < _ENOUGH:
            text = f"attempt {attempt} has {len(own)} steps, {_ENOUGH} are needed"
            found[-1] = not_measured(text, waits=True)
    ended = (_raised_at_once(history, series, stretch, factor) for stretch in raised(history))
    return next((each for each in ended if each is not None), found[0])


class Stretch(NamedTuple):
    """Steps in a row."""

    first: int
    last: int


def raised(history: RunHistory) -> list[Stretch]:
    """Return the steps in a row in which mean |d| was higher than in the newest steps, and that are
    over; the newest stretch first.

    They are candidates for what ended: the bound is low, and only drift of the policy also exceeds
    it.
    """
    series = history.metric(ABS_DIFF).finite
    now = series.newest(NEWEST).values
    if len(series) < NEWEST:
        return []
    low = float(np.median(now))
    bound = low + _CANDIDATE * max(spread(now), _LEAST_NOISE * low)
    over = np.flatnonzero(series.values > bound)
    parts = np.split(over, np.flatnonzero(np.diff(over) > _GAP) + 1)
    newest = len(series) - 1 - ENDED_AFTER
    found = [
        Stretch(int(series.steps[part[0]]), int(series.steps[part[-1]]))
        for part in parts
        if len(part) >= _SHORTEST and part[-1] < newest
    ]
    return found[: -_STRETCHES - 1 : -1]


_CANDIDATE: Final = 4.0
_LEAST_NOISE: Final = 0.03
"""Noise widths by which mean |d| was higher, and minimum width relative to the median."""
_GAP: Final = 2
"""Maximum distance of two high steps of one stretch: one step between them may be low."""
_SHORTEST: Final = 3
"""Minimum steps of what ended."""
_STRETCHES: Final = 3
"""Maximum number of stretches that are looked at."""


def _raised_at_once(
    history: RunHistory, series: Series, stretch: Stretch, factor: float
) -> Evidence | None:
    """Return that mean |d| rose at once to `factor` times and fell back, in one attempt."""
    inside = (series.steps >= stretch.first) & (series.steps <= stretch.last)
    own = series.where(inside)
    attempt = int(own.attempts[0])
    before = series.where((series.steps < stretch.first) & (series.attempts == attempt))
    before, after = before.newest(NEWEST), series.where(series.steps > stretch.last)
    if len(own) <= _SHORTEST or len(before) < _SHORTEST or attempt != int(own.attempts[-1]):
        return None
    low = float(np.median(np.concatenate([before.values, after.values[:NEWEST]])))
    high = float(np.median(own.values))
    between = math.sqrt(max(low * high, 0.0))
    is_high = high > factor * low > 0.0 and float(own.values[[0, -1]].min()) > between
    if not is_high or float(before.values[-1]) > between:
        return None
    text = (
        f"{series.name} was {short(high)} in steps {stretch.first} to {stretch.last}, and "
        f"{short(low)} before and after them"
    )
    evidence = Evidence("found", 1.0, stretch.first, f"attempt {attempt}", (text,))
    until = series.where((series.steps <= stretch.last) & (series.attempts == attempt))
    if _unless_drift(history, until, evidence, factor).verdict != "found":
        return None
    return evidence.ended_after([each.step for each in history.steps], stretch.last)


_CLEAR: Final = 100.0
"""Noise widths of a rise that few steps show: chance makes no rise as large."""
_STEADY: Final = 30.0
_ORDERED: Final = 0.8
"""Noise widths and Kendall's tau of a growth that few steps show. Chance orders four values so in 1
of 6 runs, but does not also make two of them four times as large as the first."""
_NOISE: Final = 0.1
"""Minimum noise width of healthy steps, over their median, as their samples differ."""
_ENOUGH: Final = 10
"""Steps of an attempt in which any rise is looked for."""
_FEWEST: Final = 4
"""Steps of such a rise, two on either side."""
_STAYS: Final = 0.9
"""Minimum share of the later values that are high: a step of few or short samples may lie lower."""
_AT_ONCE: Final = 0.8
"""Minimum share of a rise that lies between two steps, if it comes at once."""


def _is_clear(before: Float64, lowest: float, widths: float = _CLEAR) -> bool:
    """Return whether a value lies over so many noise widths above those before."""
    low = float(np.median(before))
    return lowest - low > widths * max(spread(before), _NOISE * abs(low))


def _change_in(
    own: Series, first: int, after: Float64, factor: float, *, is_short: bool
) -> Evidence:
    """Return whether the values of one attempt rise at once, and those after it stay as high.

    Args:
        own: the values of the attempt.
        first: the first index at which a change is looked for.
        after: the values of later attempts.
        factor: minimum ratio of the medians after and before.
        is_short: whether the attempt has few steps: they must rise by many noise widths.
    """
    if len(own) < _FEWEST:
        return not_found()
    at = _change_at(own.values, 2 if is_short else 3, first)
    before, later = own.values[:at], own.values[at:]
    low, high = float(np.median(before)), float(np.median(later))
    lowest = min(later.min(), after.min(initial=math.inf))
    if is_short:
        is_lasting = high > 0.0 and _is_clear(before, lowest)
        rise = own.values[at] - low
    else:
        stays = np.concatenate([later, after]) > math.sqrt(max(low * high, 0.0))
        is_lasting = high > max(factor * low, 0.0) and float(stays.mean()) >= _STAYS
        rise = float(np.median(later[:3])) - float(np.median(before[-3:]))
    step = int(own.steps[at])
    text = (
        f"{own.name} is {short(low)} in the {at} steps before step {step} and {short(high)} in the "
        f"{len(own) - at} from it on"
    )
    if not is_lasting or rise < _AT_ONCE * (high - low):
        return not_found(text)
    is_beyond = later > before.max()
    count = Count(int(is_beyond.sum()), len(later))
    where = f"attempt {own.attempts[-1]}"
    return Evidence("found", float(is_beyond.mean()), step, where, (text,), count=count)


_MAX_SPLIT: Final = 400
"""Newest steps that are searched for a change."""


def _change_at(values: Float64, least: int, first: int) -> int:
    """Return the index of the first value after the change.

    Args:
        values: of an attempt.
        least: minimum number of values on either side of the split.
        first: the first index at which a change is looked for; 1: only one value lies before it.
    """
    split = at = _split(values, 1 if first == 1 else least, least)
    between = math.sqrt(max(float(np.median(values[:at]) * np.median(values[at:])), 0.0))
    while at > 1 and values[at - 1] > between:
        at -= 1
    return at if at >= first else split


def _split(values: Float64, before: int, after: int) -> int:
    """Return the index of the first value after the change, with so many values on either side."""
    logs = np.log(np.maximum(values, np.finfo(np.float64).tiny)).tolist()
    earlier, later = _deviations(logs), _deviations(logs[::-1])
    splits = range(before, len(logs) - after + 1)
    return min(splits, key=lambda at: earlier[at - 1] + later[len(logs) - at - 1])


def _deviations(values: Sequence[float]) -> list[float]:
    """Return the sum of |value - median| of the first value, of the first two, and so on."""
    ascending: list[float] = []
    found = []
    for value in values:
        insort(ascending, value)
        half = len(ascending) // 2
        found.append(sum(ascending[-half:]) - sum(ascending[:half]) if half else 0.0)
    return found


def growth(history: RunHistory, *, factor: float, least: float, steps: int) -> Evidence:
    """Return whether mean |d| grows step by step in the newest attempt, beside its staleness.

    Kendall's tau of value and step is at least `_GROWS`. The median of the last quarter of the
    steps is at least `factor` times the first quarter's, and at least `least`. A growth of over
    `_CLEAR` noise widths, or a steady one of over `_STEADY`, needs `_FEWEST` steps. If the tokens
    grow older, the mean of staleness 0 has to grow so.
    """
    series = history.metric(ABS_DIFF).finite
    if not len(series):
        return not_measured(f"no step has {ABS_DIFF}")
    own = series.of_attempt(int(series.attempts[-1]))
    if len(own) < steps and not _grows_clearly(own.values):
        return not_measured(
            f"attempt {own.attempts[-1]} has {len(own)} steps, {steps} are needed", waits=True
        )
    evidence = _growth_of(own, factor, least)
    if evidence.verdict != "found":
        return evidence
    change = step_change(history, factor=factor)
    if change.verdict == "found" and change.since_step in own.steps:
        return not_found(f"it rises at once, in step {change.since_step}")
    quarter = max(len(own) // 4, 1)
    ages = [
        history.mean_staleness(part.tolist())
        for part in (own.steps[:quarter], own.steps[-quarter:])
    ]
    if ages[1] >= ages[0] + _OLDER:
        older = f"the tokens grow older: mean staleness {short(ages[0])} to {short(ages[1])}"
        fresh = history.metric(staleness_name(0, ABS_DIFF)).finite.of_attempt(int(own.attempts[-1]))
        of_fresh = _growth_of(fresh, factor, least) if len(fresh) >= _FEWEST else None
        if of_fresh is None or of_fresh.verdict != "found":
            return not_found(evidence.supports[0], older)
        evidence = of_fresh
    earlier = [
        f"attempt {number} began at {short(float(series.of_attempt(number).values[0]))} again"
        for number in sorted({int(number) for number in series.attempts})[1:]
    ]
    return dataclasses.replace(evidence, supports=(*evidence.supports, *earlier))


def has_grown(history: RunHistory, mean: float) -> bool:
    """Return whether a mean |d| lies over the newest attempt's first steps, as after a growth."""
    series = history.metric(ABS_DIFF).finite
    return bool(len(series)) and mean > _over_first(series.of_attempt(int(series.attempts[-1])))


def _over_first(own: Series) -> float:
    """Return what lies `_WIDTHS` noise widths over the median of the first steps.

    Only the first steps decide the level: one of later steps would move the begin with each step.
    """
    return (1.0 + _WIDTHS * _NOISE) * float(np.median(own.values[:_FIRST]))


_OLDER: Final = 0.5
"""Rise of the mean staleness, in versions, that means that tokens grow older."""


def _grows_clearly(values: Float64) -> bool:
    """Return whether few values grow by many noise widths, and not at once."""
    if len(values) < _FEWEST:
        return False
    widths = _STEADY if kendall(values) >= _ORDERED else _CLEAR
    if not _is_clear(values[:1], float(values[-2:].min()), widths):
        return False
    return float(np.diff(values).max()) < _AT_ONCE * float(values[-1] - values[0])


def _growth_of(own: Series, factor: float, least: float) -> Evidence:
    """Return whether the values of one attempt grow."""
    quarter = max(len(own) // 4, 1)
    first, last = (float(np.median(part)) for part in (own.values[:quarter], own.values[-quarter:]))
    tau = kendall(own.values)
    text = (
        f"{own.name} grows from {short(first)} to {short(last)} over the {len(own)} steps of "
        f"attempt {own.attempts[-1]} (Kendall's tau {tau:.2f})"
    )
    if not (tau >= _GROWS and last >= max(factor * first, least)):
        return not_found(text.replace("grows", "goes"))
    below = np.flatnonzero(own.values <= _over_first(own))
    since = int(own.steps[below[-1] + 1 if len(below) and below[-1] + 1 < len(own) else 0])
    return Evidence("found", tau, since, "", (text,), is_about=True)


_FIRST: Final = 3
"""First steps of an attempt whose median a growth begins above."""
_GROWS: Final = 0.5
"""Minimum Kendall's tau of a growth."""
