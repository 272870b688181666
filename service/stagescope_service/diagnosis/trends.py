"""Evidence of numbers over the steps: jumps, growth, bounds, and what does not rise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from stagescope.render import counted
from stagescope_service.diagnosis.evidence import (
    ABS_DIFF,
    Evidence,
    event_period,
    kendall,
    not_found,
    not_measured,
    rate_period,
    short,
    spread,
    times,
)
from stagescope_service.diagnosis.history import NEWEST, RunHistory, Series
from stagescope_service.statistics.cell import Float64, Int64


def jump(
    history: RunHistory,
    *,
    at: str,
    metric: str = ABS_DIFF,
    factor: float = 2.0,
    least: float = 0.0,
    steps: int = 5,
) -> Evidence:
    """Return whether a metric rises at once where an attempt begins, or after its first step.

    Args:
        history: of the run.
        at: 'attempt', or 'first sync': between the first step of an attempt, which samples with
            the weights that the engine loaded, and the next ones.
        metric: a published name.
        factor: least ratio of the medians after and before.
        least: least median after.
        steps: most steps on either side.
    """
    series = history.metric(metric).finite
    if at == "first sync":
        return _jump_at_first_sync(series, factor, least, steps)
    numbers = sorted({int(number) for number in series.attempts})
    if len(numbers) < 2:
        return not_measured(f"{metric} is measured in {len(numbers) or 'no'} attempt: no restart")
    found: list[Evidence] = []
    against = []
    for number in numbers[1:]:
        own = after = series.of_attempt(number)
        first = int(after.steps[0])
        if len(own) == 1:  # it died at once: those that went on say whether its step was usual
            after = series.where(series.attempts >= number)
        before = series.where((series.steps < first) & (series.attempts < number)).newest(steps)
        if len(before) < 2 or len(after) < 2:
            against.append(f"attempt {number}: {_TOO_FEW}")
            continue
        head = after.where(np.arange(len(after)) < steps)
        low, high = float(np.median(before.values)), float(np.median(head.values))
        text = (
            f"{metric} is {short(low)} in the {len(before)} steps before attempt {number} and "
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
        if at_once and high > max(least, factor * low, low + 4 * spread(before.values)):
            beyond = float((head.values > before.values.max()).mean())
            lasts = after.newest(steps).values
            supports = [f"{text} ({times(high, low)})"]
            if len(after) > 2 * steps and float(np.median(lasts)) < factor * low:
                against.append(
                    f"it is back at {short(float(np.median(lasts)))} in the newest steps"
                )
            found.append(Evidence("found", beyond, first, f"attempt {number}", tuple(supports)))
        else:
            against.append(text)
    if not found and against[-1].endswith(_TOO_FEW):
        return not_measured(against[-1])
    if not found:
        return not_found(*against)
    return dataclasses.replace(found[-1], against=tuple(against))


_TOO_FEW: Final = "too few steps on one side of its begin"


def _jump_at_first_sync(series: Series, factor: float, least: float, steps: int) -> Evidence:
    found, against = None, []
    for number in sorted({int(number) for number in series.attempts}):
        own = series.of_attempt(number)
        if len(own) < 3:
            continue
        first, later = float(own.values[0]), own.values[1 : steps + 1]
        high, step = float(np.median(later)), int(own.steps[1])
        text = f"attempt {number}: {short(first)} in its first step, {short(high)} after it"
        if high > max(least, factor * first) and float(later.min()) > math.sqrt(first * high):
            sure = float((later > factor * first).mean())
            found = Evidence("found", sure, step, f"attempt {number}", (text,))
        else:
            against.append(text)
    if found is None:
        return not_found(*against) if against else not_measured("no attempt has three steps")
    return dataclasses.replace(found, against=tuple(against))


def step_change(
    history: RunHistory,
    *,
    metric: str = ABS_DIFF,
    factor: float = 2.0,
    least: float = 0.0,
    steps: int = 10,
) -> Evidence:
    """Return whether a metric rises at once inside an attempt, and stays there until now.

    The steps are split where the two medians leave the smallest sum of absolute deviations of the
    logarithms, each side with at least 3 of them (`steps` in all), and then before every value
    that lies above the geometric mean of the two without a break. The later median is `factor`
    times the earlier one, at least 80 % of it arises between the 3 steps (or 2, at the begin) on
    either side, and every later value lies above the geometric mean, those of later attempts
    included. The newest attempt that shows it is named, else nothing is found in the newest.
    """
    series = history.metric(metric).finite
    if not len(series):
        return not_measured(f"no step has {metric}")
    found: list[Evidence] = []
    for attempt in sorted({*series.attempts.tolist()}, reverse=True):
        own = series.of_attempt(attempt).newest(_MAX_SPLIT)
        after = series.values[series.attempts > attempt]
        if len(own) < steps:
            text = f"attempt {attempt} has {len(own)} steps, {steps} are needed"
            found.append(not_measured(text, waits=True))
        else:
            found.append(_change_in(own, after, metric, factor, least))
        if found[-1].verdict == "found":
            return found[-1]
    return found[0]


def _change_in(own: Series, after: Float64, metric: str, factor: float, least: float) -> Evidence:
    """Return whether the values of one attempt rise at once, and those after it stay as high."""
    at = _change_at(own.values)
    low, high = (float(np.median(part)) for part in (own.values[:at], own.values[at:]))
    near = [
        float(np.median(part))
        for part in (own.values[max(at - 3, 0) : at], own.values[at : at + 3])
    ]
    step = int(own.steps[at])
    text = (
        f"{metric} is {short(low)} in the {at} steps before step {step} and {short(high)} in the "
        f"{len(own) - at} from it on"
    )
    is_large = high > max(factor * low, least, 0.0)
    lowest = min(own.values[at:].min(), after.min(initial=math.inf))
    is_lasting = is_large and lowest > math.sqrt(low * high)
    if not is_lasting or near[1] - near[0] < 0.8 * (high - low):
        return not_found(text)
    beyond = float((own.values[at:] > own.values[:at].max()).mean())
    return Evidence("found", beyond, step, f"attempt {own.attempts[-1]}", (text,))


_MAX_SPLIT: Final = 400
"""Newest steps that are searched for a change."""


def _change_at(values: Float64) -> int:
    """Return the index of the first value after the change, from 2 on.

    A first value alone that is low is of the weights that the engine loaded: of `jump`.
    """
    split = at = _split(values)
    between = math.sqrt(max(float(np.median(values[:at]) * np.median(values[at:])), 0.0))
    while at > 1 and values[at - 1] > between:
        at -= 1
    return at if at > 1 else split


def _split(values: Float64) -> int:
    """Return the index of the first value after the change, from 3 to len(values) - 3."""
    logs = np.log(np.maximum(values, np.finfo(np.float64).tiny))
    costs = [
        float(np.abs(part - np.median(part)).sum())
        for at in range(3, len(logs) - 2)
        for part in (logs[:at], logs[at:])
    ]
    return 3 + int(np.argmin(np.add(costs[::2], costs[1::2])))


def growth(
    history: RunHistory,
    *,
    metric: str = ABS_DIFF,
    factor: float = 2.0,
    least: float = 0.0,
    steps: int = 12,
) -> Evidence:
    """Return whether a metric grows step by step since its attempt began.

    Kendall's tau of value and step is at least 0.5, and the median of the last quarter of the steps
    at least `factor` times that of the first (and at least `least`).
    """
    series = history.metric(metric).finite
    if not len(series):
        return not_measured(f"no step has {metric}")
    own = series.of_attempt(int(series.attempts[-1]))
    if len(own) < steps:
        return not_measured(
            f"attempt {own.attempts[-1]} has {len(own)} steps, {steps} are needed", waits=True
        )
    quarter = max(len(own) // 4, 1)
    first, last = (float(np.median(part)) for part in (own.values[:quarter], own.values[-quarter:]))
    tau = kendall(own.values)
    text = (
        f"{metric} grows from {short(first)} to {short(last)} over the {len(own)} steps of attempt "
        f"{own.attempts[-1]} (Kendall's tau {tau:.2f})"
    )
    if tau < 0.5 or last < max(factor * first, least):
        return not_found(text.replace("grows", "goes"))
    change = step_change(history, metric=metric)
    if change.verdict == "found" and change.since_step in own.steps:
        return not_found(f"it rises at once, in step {change.since_step}")
    earlier = [
        f"attempt {number} began at {short(float(series.of_attempt(number).values[0]))} again"
        for number in sorted({int(number) for number in series.attempts})[1:]
    ]
    return Evidence("found", tau, int(own.steps[0]), "", (text, *earlier))


def above(
    history: RunHistory, *, metric: str, bound: float, steps: int = NEWEST, share: float = 0.5
) -> Evidence:
    """Return whether a metric is over a bound in at least a share of the newest steps."""
    return beyond(history.metric(metric), bound, steps, share)


def scalar_above(
    history: RunHistory,
    *,
    names: Sequence[str],
    bound: float,
    steps: int = NEWEST,
    share: float = 0.5,
) -> Evidence:
    """The same of the first logged scalar whose name matches a pattern."""
    found = history.scalars(names)
    if not found:
        return no_scalar(names)
    return beyond(found[0], bound, steps, share)


def beyond(series: Series, bound: float, steps: int, share: float) -> Evidence:
    """Return whether a number is over a bound in more than a share of the newest steps."""
    finite = series.finite
    if not len(finite):
        return not_measured(f"no step has a finite {series.name}")
    newest = finite.newest(steps)
    over = newest.values > bound
    text = (
        f"{series.name} is over {short(bound)} in {int(over.sum())} of the newest {len(newest)} "
        f"steps (median {short(float(np.median(newest.values)))}, largest "
        f"{short(float(newest.values.max()))} in step {newest.steps[newest.values.argmax()]})"
    )
    return of_rate(finite.steps, finite.values > bound, None, share, steps, text)


def of_rate(
    steps: Int64,
    marked: np.ndarray[tuple[int, ...], np.dtype[Any]],
    trials: np.ndarray[tuple[int, ...], np.dtype[Any]] | None,
    share: float,
    window: int,
    *texts: str,
) -> Evidence:
    """Return whether a rate is over a share, and since which step; see `rate_period`.

    Args:
        steps: the steps.
        marked: of each step, how many of its trials show the symptom.
        trials: of each step; None: one.
        share: the rate that is too high.
        window: how many of the newest steps a rate is taken over.
        texts: what the newest of them show.
    """
    given = np.ones(len(steps)) if trials is None else trials.astype(np.float64)
    period = rate_period(marked.astype(np.float64), given, share, window)
    if period is None:
        return not_found(*texts)
    against: tuple[str, ...] = ()
    if period.share < share:
        against = (f"{period.share:.0%} of the newest are fewer than {share:.0%}, but not surely",)
    return Evidence("found", period.share, int(steps[period.first]), "", texts, against)


def scalar_falls(
    history: RunHistory, *, names: Sequence[str], share: float = 0.2, steps: int = 10
) -> Evidence:
    """Return whether a scalar fell below a share of its first steps' median, and stays there."""
    found = history.scalars(names)
    if not found:
        return no_scalar(names)
    series = found[0].finite
    if len(series) < steps:
        return not_measured(
            f"{series.name} has {len(series)} finite steps, {steps} are needed", waits=True
        )
    first = float(np.median(series.values[:steps]))
    last = float(np.median(series.values[-steps:]))
    text = f"{series.name} goes from {short(first)} to {short(last)} over {len(series)} steps"
    if not first > 0:
        return not_found(text)
    return of_rate(series.steps, series.values < share * first, None, 0.5, steps, text)


def scalar_flat(
    history: RunHistory, *, names: Sequence[str], steps: int = 20, rise: float = 0.5
) -> Evidence:
    """Return whether a scalar does not rise: a training's reward.

    It rises where the median of the last quarter of the steps exceeds that of the first by at
    least `rise` times the spread (1.48 MAD) of the steps around their local median.
    """
    found = history.scalars(names)
    if not found:
        return no_scalar(names)
    series = found[0].finite
    if len(series) < steps:
        return not_measured(
            f"{series.name} has {len(series)} finite steps, {steps} are needed", waits=True
        )
    quarter = len(series) // 4
    first, last = (
        float(np.median(part)) for part in (series.values[:quarter], series.values[-quarter:])
    )
    noise = spread(np.diff(series.values)) / math.sqrt(2)
    tau = kendall(series.values)
    text = (
        f"{series.name} goes from {short(first)} to {short(last)} over {len(series)} steps; one "
        f"step differs from the next by about {short(noise)} (Kendall's tau {tau:.2f})"
    )
    if last - first > rise * noise and tau > 0.1:
        return not_found(text)
    return Evidence("found", min(1.0, max(0.0, 0.5 * (1.0 - tau))), None, "", (text,))


def scalar_spike(
    history: RunHistory, *, names: Sequence[str], factor: float = 10.0, steps: int = 50
) -> Evidence:
    """Return whether a scalar exceeded `factor` times the median of the `steps` steps up to there,
    in one of the newest `steps`.

    Of several roles that log it the first one is told of which it is so.
    """
    looked = [_spike(series, factor, steps) for series in history.scalars(names)]
    if not looked:
        return no_scalar(names)
    return next((each for each in looked if each.verdict == "found"), looked[0])


_FEW: Final = 5
"""Finite values that a median is taken over at least."""


def _spike(series: Series, factor: float, window: int) -> Evidence:
    is_finite = np.isfinite(series.values)
    if is_finite.sum() < _FEW and is_finite.all():
        return not_measured(f"{series.name} has {len(series)} steps, {_FEW} are needed", waits=True)
    sizes = np.where(is_finite, np.abs(series.values), np.nan)
    medians = _medians_up_to(sizes, window)
    over = sizes > factor * medians
    period = event_period(over | ~is_finite, window)
    if period is None:
        return not_found(
            f"{series.name} stays below {factor:g} times its median {short(float(medians[-1]))} in "
            f"the newest {min(window, len(series))} steps"
        )
    lines = []
    own = np.arange(len(series)) >= period.first
    bad, spikes = series.steps[own & ~is_finite], np.flatnonzero(own & over)
    if len(bad):
        lines.append(f"{series.name} is not finite in {len(bad)} steps, from {bad[0]}")
    if len(spikes):
        largest = spikes[sizes[spikes].argmax()]
        listed = ", ".join(f"step {step}" for step in series.steps[spikes[:5]])
        lines.append(
            f"{series.name} is up to {short(float(sizes[largest]))}, "
            f"{times(float(sizes[largest]), float(medians[largest]))} its median before "
            f"({listed}{', ...' if len(spikes) > 5 else ''})"
        )
    last = int(np.flatnonzero(over | ~is_finite)[-1])
    after = len(series) - 1 - last
    against = (
        (f"the last is of step {series.steps[last]}: {counted(after, 'step')} without one since",)
        if after
        else ()
    )
    sure = min(1.0, (len(bad) + len(spikes)) / 3)
    return Evidence("found", sure, int(series.steps[period.first]), "", tuple(lines), against)


def _medians_up_to(values: Float64, window: int) -> Float64:
    """Return of each value the median of the newest `window` up to it; NaN, which is no value, for
    those that have fewer than `_FEW` finite ones."""
    found = np.full(len(values), np.nan)
    for at in range(len(values)):
        own = values[max(0, at + 1 - window) : at + 1]
        own = own[~np.isnan(own)]
        found[at] = np.median(own) if len(own) >= _FEW else np.nan
    return found


def no_scalar(names: Sequence[str]) -> Evidence:
    """Return that no scalar of these names is logged."""
    return not_measured(f"no scalar {' or '.join(names[:4])} is logged")
