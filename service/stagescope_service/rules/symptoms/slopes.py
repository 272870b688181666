"""Evidence from slopes of one stream on the other: a temperature, or updates that an engine lacks.

One step does not distinguish the two: an update that sharpens the policy scales log-probs as a
temperature does. Many steps do: updates add up, and a temperature does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from stagescope_service.rules.evidence import Count, Evidence, event_period, not_found, short
from stagescope_service.rules.facts import StepFacts
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.steps import CurrentStep
from stagescope_service.rules.symptoms.streams import suspect
from stagescope_service.statistics.cell import Float64
from stagescope_service.statistics.checks import Check, Status

_STEEPER: Final = math.log(2.0)
"""Logarithm of the steepness at which a policy's log-probs have another mean or spread."""
LASTING: Final = 6
"""Minimum steps of a slope that lasts, and how many of them are read."""
_FEW: Final = 3
"""Number of first and of last steps whose log-probs are compared."""
_MOVED: Final = 0.25
"""Minimum share of the change that updates would have made to the logarithm of the log-probs' mean
or spread. Logits that are twice as large change one of them by half of that or more."""
_GAP: Final = 3
"""Steps without a slope after which it ended."""
_OF_UPDATES: Final = 0.25
"""Maximum logarithm of a slope that the updates which an engine lacks may have made."""
_SUM: Final = 0.25
"""Minimum logarithm of the steepness that slopes of several steps add up to."""


def sampling(history: RunHistory, *, checks: Sequence[str]) -> Evidence:
    """Return whether the checks name one of these causes, or a temperature lasts that policy drift
    does not explain."""
    named = suspect(history, checks=checks)
    if named.verdict == "found":
        return named
    return _lasting_slope(history) or named


def _lasting_slope(history: RunHistory) -> Evidence | None:
    """Return a temperature that was undecided in each of the newest steps, if it is no update.
    Updates would have made log-probs `_STEEPER` or flatter by now."""
    undecided = itertools.takewhile(lambda each: each.verdict == "unknown", history.measured[::-1])
    run = [*undecided][::-1]
    if len(run) < LASTING:
        return None
    shown = _sample(history, run)
    summaries = [each.summary.summary for each in shown]
    if any(s.version_names or not s.has_stale_tokens for s in summaries):
        return None
    slopes = _slopes(shown, "unknown")
    if not _is_one_sided(slopes):
        return None
    oldest = max(int(each.staleness.keys[-1]) for each in summaries)
    updates = summaries[-1].versions[-1] - summaries[0].versions[-1]
    steeper = float(np.abs(np.log(slopes)).min()) * updates / oldest
    old, rollout = summaries[-1].pair
    of_mean, of_std = (
        _ends(history, f"logprob/{rollout}_{name}", run[0].step) for name in ("mean", "std")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes = np.log(np.abs([of_mean, of_std]))
        moved = float(np.abs(sizes[:, 1] - sizes[:, 0]).max())  # NaN where one is
    if steeper < _STEEPER or not moved < _MOVED * steeper:
        return None
    change = "steep" if slopes[0] > 1.0 else "flat"
    text = (
        f"in steps {run[0].step} to {run[-1].step} {old} grows by {slopes.min():.3f} to "
        f"{slopes.max():.3f} for each nat of {rollout}. Had {updates} updates done that, the "
        f"policy would be {math.exp(steeper):.1f} times as {change} by now; but the mean of "
        f"its log-probs was {short(of_mean[0])} and is {short(of_mean[1])}, their standard "
        f"deviation {short(of_std[0])} and {short(of_std[1])}: it is a temperature"
    )
    return Evidence("found", 1.0, run[0].step, "", (text,))


def behind(history: RunHistory) -> Evidence:
    """Return whether the engine samples with an older policy than its tokens say.

    Each step then shows the update that the engine lacks. If updates sharpen or flatten the policy,
    the check of a temperature fails with a small slope in one direction, though not in the first
    step. The sampled log-probs follow the sum of the slopes.
    """
    measured = history.measured
    marks = np.array(["temperature" in step.suspects for step in measured])
    period = event_period(marks, _GAP)
    if period is None or period.last is not None:
        return not_found("no slope of one stream on the other lasts")
    run = [measured[at] for at in np.flatnonzero(marks) if at >= period.first]
    if len(run) < LASTING or period.first == 0:
        return not_found("the slope is of too few steps, or of the first one, before any update")
    shown = _sample(history, run)
    slopes = _slopes(shown, "suspect")
    if not (_is_one_sided(slopes) and (np.abs(np.log(slopes)) <= _OF_UPDATES).all()):
        return not_found("the slopes are larger than those of updates, or of both directions")
    updates = run[-1].step - run[0].step
    steeper = float(np.log(slopes).mean()) * updates
    old, rollout = shown[-1].summary.summary.pair
    before, after = _ends(history, f"logprob/{rollout}_mean", run[0].step)
    text = (
        f"in steps {run[0].step} to {run[-1].step} {old} grows by {slopes.min():.3f} to "
        f"{slopes.max():.3f} for each nat of {rollout}, and step {measured[period.first - 1].step} "
        f"shows no slope; the mean of the sampled log-probs was {short(before)} and is "
        f"{short(after)}"
    )
    # A steeper policy finds its own tokens likelier.
    followed = -math.log(abs(after / before)) if before and after else math.nan
    if abs(steeper) < _SUM or not followed / steeper >= _MOVED:
        return not_found(f"{text}: the policy did not become as steep as these slopes add up to")
    count = Count(len(run), len(measured) - period.first)
    return Evidence(
        "found", period.share, run[0].step, "", (f"{text}, as these slopes add up to",), count=count
    )


def _sample(history: RunHistory, run: Sequence[CurrentStep]) -> list[StepFacts]:
    """Return the facts of `LASTING` of some steps; [] if one of them cannot be read."""
    at = np.unique(np.linspace(0, len(run) - 1, LASTING).astype(int)).tolist()
    read = [history.read(run[i]) for i in at]
    found = [each for each in read if each is not None]
    return found if len(found) == len(read) else []


def _slopes(shown: Sequence[StepFacts], status: Status) -> Float64:
    """Return the slope of each step whose check of a temperature has a status; NaN without one."""
    return np.array([_slope(each.comparability.checks, status) for each in shown])


def _slope(checks: Sequence[Check], status: Status) -> float:
    found = [
        each.values.get("slope")
        for each in checks
        if each.name == "temperature" and each.status == status
    ]
    return math.nan if not found or found[0] is None else found[0]


def _is_one_sided(slopes: Float64) -> bool:
    is_one = (slopes > 1.0).all() or ((slopes < 1.0) & (slopes > 0.0)).all()
    return bool(len(slopes) and is_one)


def _ends(history: RunHistory, name: str, since: int) -> tuple[float, float]:
    """Return the means of a number's first and of its last steps, beginning at a step."""
    series = history.metric(name).finite
    values = series.values[series.steps >= since]
    if len(values) < LASTING:
        return math.nan, math.nan
    return float(values[:_FEW].mean()), float(values[-_FEW:].mean())
