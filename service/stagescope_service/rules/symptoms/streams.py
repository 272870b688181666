"""Evidence from the streams: what makes them incomparable, and what their values show."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from stagescope_service.rules.evidence import (
    ABS_DIFF,
    Evidence,
    event_period,
    not_found,
    not_measured,
    short,
)
from stagescope_service.rules.history import READ, RunHistory
from stagescope_service.statistics import Comparability
from stagescope_service.statistics.checks import few_carry
from stagescope_service.statistics.profiles import COARSEST, FINER, NOT_FINITE, ZERO, Edge, exponent
from stagescope_wire.render import ranks_text

_OF_THE_MEAN: Final = {"renormalised", "temperature", "calibration"}
"""Checks of whether another distribution sampled the tokens."""
_NAMED: Final = 20
"""Number of newest steps of which a text tells how many are suspect."""
_STEEPER: Final = math.log(2.0)
"""Logarithm of the steepness at which a policy's log-probs have another mean or spread."""
_EDGE_TOKENS: Final = 32
"""Minimum tokens at the edges of a step's rounds."""
_LATTICE_TOKENS: Final = 64
"""Minimum tokens that differ."""
_LASTING: Final = 3
"""Number of newest steps; one of them has to be suspect."""
LASTING: Final = 6
"""Minimum steps of a temperature that lasts, and how many of them are read."""
_FEW: Final = 3
"""Number of first and of last steps whose log-probs are compared."""
_MOVED: Final = 0.25
"""Minimum share of the change that updates would have made to the logarithm of the log-probs' mean
or spread. Logits that are twice as large change one of them by half of that or more."""
_AT_EDGES: Final = ("first_token", "last_token")
"""Checks of tokens at the edges of rounds; these tokens alone can make them fail."""


def suspect(history: RunHistory, *, checks: Sequence[str]) -> Evidence:
    """Return whether the stream checks of one of the newest three steps name one of these
    causes."""
    measured = history.measured
    newest = measured[-_NAMED:]
    if history.newest is None or not newest:
        return not_measured("no step has both streams")
    at_edges = [each.text for each in history.newest.comparability.checks if each.name in _AT_EDGES]
    if at_edges and set(checks) <= _OF_THE_MEAN:
        return not_found(f"step {history.newest.step}: {at_edges[0]}")
    marks = np.array([bool(set(checks) & set(step.suspects)) for step in measured])
    period = event_period(marks, _LASTING)
    if period is None:
        undecided = [
            f"{each.name} {each.text}"
            for each in history.newest.comparability.undecided
            if each.name in checks
        ]
        if undecided and all(step.verdict == "unknown" for step in newest):
            return not_measured(f"step {history.newest.step}: {'; '.join(undecided)}")
        verdicts = Counter(step.verdict for step in newest)
        listed = ", ".join(f"{verdict} {number}" for verdict, number in verdicts.items())
        return not_found(f"the streams of the newest {len(newest)} steps: {listed}")
    share = float(marks[-_NAMED:].mean())
    lines = [f"named in {int(marks[-_NAMED:].sum())} of the newest {len(newest)} steps"]
    likelier, where = None, ""
    shown = history.read(measured[int(np.flatnonzero(marks)[-1])])
    if shown is not None:
        named = [each for each in shown.comparability.suspects if each.name in checks]
        lines += [f"step {shown.step}: {each.text}" for each in named]
        where = ranks_text(sorted({rank for each in named for rank in each.ranks}))
        cause = shown.comparability.cause
        likelier = None if cause in checks else cause
    since = measured[period.first].step
    against = () if likelier is None else (f"{likelier} is the likelier cause",)
    return Evidence("found", share, since, where, tuple(lines), against, likelier=likelier)


def sampling(history: RunHistory, *, checks: Sequence[str]) -> Evidence:
    """Return whether the checks name one of these causes, or a temperature lasts that policy drift
    does not explain.

    One step of stale tokens does not distinguish a temperature from an update that sharpens the
    policy as much. Many steps do: updates add up. Once they make it twice as steep, its
    log-probs have another mean or another spread.
    """
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
    at = np.unique(np.linspace(0, len(run) - 1, LASTING).astype(int)).tolist()
    shown = [found for found in (history.read(run[i]) for i in at) if found is not None]
    slopes = np.array([_undecided_slope(each.comparability) for each in shown])
    summaries = [each.summary.summary for each in shown]
    if len(shown) < len(at) or any(s.version_names or not s.has_stale_tokens for s in summaries):
        return None
    logs = np.log(slopes)
    if not (logs > 0.0).all() and not (logs < 0.0).all():
        return None
    oldest = max(int(each.staleness.keys[-1]) for each in summaries)
    updates = summaries[-1].versions[-1] - summaries[0].versions[-1]
    steeper = float(np.abs(logs).min()) * updates / oldest
    old, rollout = summaries[-1].pair
    of_mean, of_std = (
        _ends(history, f"logprob/{rollout}_{name}", run[0].step) for name in ("mean", "std")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes = np.log(np.abs([of_mean, of_std]))
        moved = float(np.abs(sizes[:, 1] - sizes[:, 0]).max())  # NaN where one is
    if steeper < _STEEPER or not moved < _MOVED * steeper:
        return None
    change = "steep" if logs[0] > 0.0 else "flat"
    text = (
        f"in steps {run[0].step} to {run[-1].step} {old} grows by {slopes.min():.3f} to "
        f"{slopes.max():.3f} for each nat of {rollout}. Had {updates} updates done that, the "
        f"policy would be {math.exp(steeper):.1f} times as {change} by now; but the mean of "
        f"its log-probs was {short(of_mean[0])} and is {short(of_mean[1])}, their standard "
        f"deviation {short(of_std[0])} and {short(of_std[1])}: it is a temperature"
    )
    return Evidence("found", 1.0, run[0].step, "", (text,))


def _undecided_slope(found: Comparability) -> float:
    """Return the slope that policy drift explains as well; NaN if there is none."""
    slopes = [each.values.get("slope") for each in found.undecided if each.name == "temperature"]
    return math.nan if not slopes or slopes[0] is None else slopes[0]


def _ends(history: RunHistory, name: str, since: int) -> tuple[float, float]:
    """Return the means of a number's first and of its last steps, beginning at a step."""
    series = history.metric(name).finite
    values = series.values[series.steps >= since]
    if len(values) < LASTING:
        return math.nan, math.nan
    return float(values[:_FEW].mean()), float(values[-_FEW:].mean())


def _or_suspect(own: Evidence, history: RunHistory, checks: Sequence[str]) -> Evidence:
    """Return the own evidence if it was found, else the evidence of the stream checks."""
    if own.verdict == "found":
        return own
    named = suspect(history, checks=checks)
    if named.verdict != "found":
        return own
    return dataclasses.replace(named, against=(*named.against, *own.against))


def rounded(history: RunHistory, *, checks: Sequence[str], share: float) -> Evidence:
    """Return whether a stream's dtype explains the mismatch, or most of it, or the stream checks
    name it."""
    return _or_suspect(_rounded(history, share), history, checks)


def _rounded(history: RunHistory, share: float) -> Evidence:
    newest = history.newest
    if newest is None:
        return not_measured("no step has both streams")
    floor, mismatch = newest.published["rounding/abs_diff_floor"], newest.published[ABS_DIFF]
    dtypes = {name: ", ".join(each) for name, each in newest.summary.summary.dtypes.items()}
    listed = ", ".join(f"{name} in {dtype}" for name, dtype in dtypes.items())
    text = (
        f"step {newest.step}: rounding adds about {short(floor)} to a mean |d| of "
        f"{short(mismatch)} ({listed})"
    )
    if math.isnan(floor) or math.isnan(mismatch):
        return not_measured(f"step {newest.step}: no token counts, or a dtype is not known")
    if not (mismatch > 0 and floor >= share * mismatch):
        return not_found(text)
    return Evidence("found", min(1.0, floor / mismatch), newest.step, "", (text,))


def edge_token(
    history: RunHistory, *, edge: Edge, checks: Sequence[str], factor: float
) -> Evidence:
    """Return whether the tokens at one edge of rounds differ `factor` times as much as the others.

    Each of the newest `READ` steps must show it, over `_EDGE_TOKENS` tokens of the edge, and
    more than a few of them must carry it. The same holds if the stream checks name it.
    """
    return _or_suspect(_edge_token(history, edge, factor), history, checks)


def _edge_token(history: RunHistory, edge: Edge, factor: float) -> Evidence:
    rows = []
    for step, summary in history.summaries:
        found = summary.profiles.edge_tokens(edge)
        if found is not None and found[0].tokens >= _EDGE_TOKENS:
            mean, others = (each.d_abs_sum / each.tokens for each in found)
            rows.append((step.step, found[0].tokens, mean, others, few_carry(found[0])))
    if len(rows) < READ:
        return not_measured(
            f"{len(rows)} of the newest steps have {_EDGE_TOKENS} {edge} tokens of rounds with "
            "numbers"
        )
    newest, count, mean, others, is_of_few = rows[0]
    text = (
        f"step {newest}: mean |d| is {short(mean)} over the {count} {edge} tokens of rounds, "
        f"{short(others)} over the others"
    )
    if is_of_few and mean > factor * others:
        text += f": a few of the {count} carry it, and the rest are like all others"
    if not all(row[2] > factor * row[3] and not row[4] for row in rows):
        return not_found(text)
    return Evidence("found", 1.0, rows[-1][0], f"the {edge} token of each round", (text,))


def lattice(history: RunHistory, *, share: float) -> Evidence:
    """Return whether `share` of the differences are multiples of a power of two.

    Rounding to a narrow dtype causes such differences. Among float32 log-probs about one in 2000 is
    one by chance.
    """
    for step, summary in history.summaries:
        bins = summary.profiles.bins("lattice")
        bins = tuple(each for each in bins if each.key not in (ZERO, NOT_FINITE))
        count = sum(each.tokens for each in bins)
        if count < _LATTICE_TOKENS:
            continue
        on, power = 0, COARSEST
        coarsest_first = sorted(bins, key=lambda each: -each.key)
        for each in (each for each in coarsest_first if each.key > FINER):
            on, power = on + each.tokens, each.key
            if on >= share * count:
                break
        text = (
            f"step {step.step}: {on / count:.0%} of the {count} differences other than 0 are a "
            f"multiple of 2^{exponent(power)} = {2.0 ** exponent(power):g} nat"
        )
        if on < share * count:
            return not_found(text)
        return Evidence("found", on / count, step.step, "", (text,))
    return not_measured(f"no step has {_LATTICE_TOKENS} tokens that differ, with profiles of d")
