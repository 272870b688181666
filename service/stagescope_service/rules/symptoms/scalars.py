"""Evidence of logged numbers over the steps: bounds, falls, spikes, and what does not rise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from stagescope_service.rules.evidence import (
    Evidence,
    Series,
    beyond,
    event_period,
    kendall,
    not_found,
    not_measured,
    of_rate,
    short,
    spread,
    times,
)
from stagescope_service.rules.history import NEWEST, RunHistory
from stagescope_service.statistics.cell import Float64

_HALF: Final = 0.5
"""Share of the newest steps that must show it."""


def scalar_above(history: RunHistory, *, names: Sequence[str], bound: float) -> Evidence:
    """Return whether the first scalar whose name matches a pattern is over a bound in at least half
    of the newest steps."""
    found = _logged(history, names)
    return found if isinstance(found, Evidence) else beyond(found, bound, NEWEST, _HALF)


def scalar_below(history: RunHistory, *, names: Sequence[str], bound: float) -> Evidence:
    """Return whether the size of a scalar is below a bound in at least half of the newest steps."""
    series = _logged(history, names, 1)
    if isinstance(series, Evidence):
        return series
    newest = series.newest(NEWEST).values
    text = f"{series.name} is {short(float(newest[-1]))} in step {series.steps[-1]}"
    return of_rate(series.steps, np.abs(series.values) < bound, None, _HALF, NEWEST, text)


def scalar_falls(
    history: RunHistory, *, names: Sequence[str], share: float, steps: int
) -> Evidence:
    """Return whether a scalar fell below a share of its first steps' median, and stays there."""
    return _moved(history, names, steps, lambda values, first: values < share * first)


def scalar_rises(
    history: RunHistory, *, names: Sequence[str], factor: float, steps: int
) -> Evidence:
    """Return whether a scalar rose over `factor` times its first steps' median, and stays there."""
    return _moved(history, names, steps, lambda values, first: values > factor * first)


def _moved(
    history: RunHistory, names: Sequence[str], steps: int,
    marks: Callable[[Float64, float], NDArray[np.bool_]],
) -> Evidence:  # fmt: skip
    """Return whether a scalar left its first steps' median, which must be positive, and stays."""
    series = _logged(history, names, steps)
    if isinstance(series, Evidence):
        return series
    first = float(np.median(series.values[:steps]))
    last = float(np.median(series.values[-steps:]))
    text = f"{series.name} goes from {short(first)} to {short(last)} over {len(series)} steps"
    if not first > 0:
        return not_found(text)
    return of_rate(series.steps, marks(series.values, first), None, _HALF, steps, text)


def scalar_flat(history: RunHistory, *, names: Sequence[str], steps: int) -> Evidence:
    """Return whether a scalar does not rise: a training's reward.

    It rises if its median over the last quarter of the steps is clearly above the first quarter's:
    by `_PROGRESS` noise widths, which are the spread (1.48 MAD) between one step and the next.
    """
    series = _logged(history, names, steps)
    if isinstance(series, Evidence):
        return series
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
    if not math.isfinite(last - first + noise):
        return not_measured(f"{text}: too large for a difference")
    if last - first > _PROGRESS * noise and tau > _ORDERED:
        return not_found(text)
    sure = min(1.0, max(0.0, 0.5 * (1.0 - tau)))
    if first - last > _FALLS * noise and tau < 0.0:
        fell = f"{series.name} falls from {short(first)} to {short(last)}"
        return Evidence("found", sure, None, "", (text,), headline=fell)
    return Evidence("found", sure, None, "", (text,))


_PROGRESS: Final = 0.5
_ORDERED: Final = 0.1
"""Noise widths and Kendall's tau above which a scalar rises."""
_FALLS: Final = 3.0
"""Noise widths of a fall that is no lack of progress."""
_SURE_SPIKES: Final = 3
"""Number of spikes from which on the evidence is sure."""
_SPIKE_STEPS: Final = 50


def scalar_spike(history: RunHistory, *, names: Sequence[str], factor: float) -> Evidence:
    """Return whether a scalar exceeded `factor` times the median of the `_SPIKE_STEPS` steps up to
    there, in one of as many newest steps.

    Values that are not finite are no spikes: `scalars_not_finite` names them. If several roles log
    the scalar, the evidence names the first one that shows it.
    """
    logged = _logged(history, names)
    if isinstance(logged, Evidence):
        return logged
    looked = [_spike(series, factor, _SPIKE_STEPS) for series in history.logged.series(names)]
    return next((each for each in looked if each.verdict == "found"), looked[0])


_FEW: Final = 5
"""Minimum number of finite values for a median."""


def _spike(series: Series, factor: float, window: int) -> Evidence:
    is_finite = np.isfinite(series.values)
    if (known := int(is_finite.sum())) < _FEW:
        text = f"{series.name} has {known} finite steps, {_FEW} are needed"
        return not_measured(text, waits=True)
    sizes = np.where(is_finite, np.abs(series.values), np.nan)
    medians = _medians_up_to(sizes, window)
    over = sizes > factor * medians
    period = event_period(over, window)
    if period is None or period.last is not None:
        return not_found(
            f"{series.name} stays below {factor:g} times its median {short(float(medians[-1]))} in "
            f"the newest {min(window, len(series))} steps"
        )
    spikes = np.flatnonzero((np.arange(len(series)) >= period.first) & over)
    largest = spikes[sizes[spikes].argmax()]
    listed = ", ".join(f"step {step}" for step in series.steps[spikes[:5]])
    text = (
        f"{series.name} is up to {short(float(sizes[largest]))}, "
        f"{times(float(sizes[largest]), float(medians[largest]))} its median before "
        f"({listed}{', ...' if len(spikes) > 5 else ''})"
    )
    sure = min(1.0, len(spikes) / _SURE_SPIKES)
    evidence = Evidence("found", sure, int(series.steps[period.first]), "", (text,))
    return evidence.ended_after(series.steps.tolist(), int(series.steps[spikes[-1]]))


def _medians_up_to(values: Float64, window: int) -> Float64:
    """Return for each value the median of the newest `window` values up to it. Values with fewer
    than `_FEW` finite ones get NaN, which is no value."""
    before = np.full(window - 1, np.nan)
    windows = np.sort(sliding_window_view(np.concatenate([before, values]), window), axis=1)
    counts = (~np.isnan(windows)).sum(axis=1)  # NaN is sorted to the end
    rows = np.arange(len(values))
    middle = windows[rows, np.maximum(counts - 1, 0) // 2] + windows[rows, counts // 2 % window]
    return np.where(counts >= _FEW, middle / 2.0, np.nan)


def _logged(history: RunHistory, names: Sequence[str], steps: int = 0) -> Series | Evidence:
    """Return the first scalar whose name matches a pattern, or why it is not measured.

    With `steps`, only its finite values count, and that many are needed.
    """
    found = history.logged.series(names)
    if not found:
        return not_measured(f"no scalar {' or '.join(names[:4])} is logged")
    series = found[0].finite
    if len(series) < steps:
        return not_measured(
            f"{series.name} has {len(series)} finite steps, {steps} are needed", waits=True
        )
    return series if steps else found[0]
