"""Evidence of staleness: tokens of older policy versions, and of versions ahead of the trainer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from stagescope_service.rules.evidence import Count, Evidence, not_found, not_measured, short
from stagescope_service.rules.history import NEWEST, RunHistory
from stagescope_service.rules.symptoms.slices import CARRIED, Mean, means_by
from stagescope_service.statistics.cell import Field
from stagescope_wire.render import counted

_MOVED: Final = "tail/ratio_outside_0.9_1.1_share"


def stale(history: RunHistory, *, checks: Sequence[str], factor: float, share: float) -> Evidence:
    """Return whether tokens of older policy versions have a larger mismatch than fresh ones.

    If no step has fresh tokens, the youngest ones of the newest steps are compared with the older.
    Asynchronous training expects small drift, so that is a note. Drift is large if it moves the
    ratio of at least `share` of the older tokens by more than 10 %. PPO clips twice as much.
    """
    slices = means_by(history, "staleness")
    if not any(len(values) for _, values in slices):
        is_named = any({*checks} & {*step.suspects} for step in history.measured[-NEWEST:])
        return not_measured(
            "tokens come from several policy versions, but the version of the stage that scores "
            "them is not recorded"
            if is_named
            else "policy versions of the tokens, or of the stage that scores them, are not "
            "recorded, or are texts that do not differ in one number"
        )
    moved = dict(history.slices("staleness", _MOVED))
    steps = [
        _Ages(
            step.step,
            {age: each for (_, age), each in values.items()},
            {age: each for (_, age), each in moved.get(step, {}).items()},
        )
        for step, values in slices
        if not all(math.isnan(each.value) for each in values.values())
    ]
    old = [each for each in steps if max(each.by_age) > 0]
    if not old:
        return not_found("all tokens were sampled by the trainer's own version")
    of_older = float(np.median([each.share_of_old for each in old]))
    text = f"{of_older:.0%} of the tokens are of an older version; "
    fresh = [each for each in old if not math.isnan(_pooled([each], 0, 0).value)]
    if not fresh:
        return _by_age(steps, factor, share, text)
    pooled = [(_pooled([each], 1), _pooled([each], 0, 0)) for each in fresh]
    of_old, of_fresh = pooled[-1]
    text += (
        f"in step {fresh[-1].step} their mean |d| is {short(of_old.value)}, that of fresh ones "
        f"{short(of_fresh.value)}"
    )
    is_larger = [_is_larger(one.least, other.value, factor) for one, other in pooled]
    if 2 * sum(is_larger) < len(fresh):
        is_of_few = _is_larger(of_old.value, of_fresh.value, factor) and not is_larger[-1]
        return not_found(text + (CARRIED if is_of_few else ""))
    larger = [each for each, is_one in zip(fresh, is_larger, strict=True) if is_one]
    shares = [each.share_moved(0, each.moved.get(0, math.nan)) for each in larger]
    return _drifted(larger, shares, len(fresh), share, text)


def _drifted(
    larger: Sequence[_Ages], moved: Sequence[float], examined: int, share: float, text: str
) -> Evidence:
    """Return the drift of older tokens, with a note if it is small.

    Args:
        larger: the steps that show it.
        moved: the share of their older tokens that drift moved.
        examined: the steps that could show it.
        share: of the tokens, from which on drift is large.
        text: what was measured.
    """
    if math.isfinite(moved[-1]):
        text += f"; drift moves the ratio of {moved[-1]:.1%} of them by more than 10 %"
    is_small = 2 * sum(each >= share for each in moved) < len(moved)
    count = Count(len(larger), examined)
    return Evidence(
        "found", len(larger) / examined, larger[0].step, "", (text,), count=count,
        note=text if is_small else "",
    )  # fmt: skip


def versions_ahead(history: RunHistory) -> Evidence:
    """Return whether tokens in one of the newest `READ` steps have policy versions that the trainer
    has not reached yet."""
    looked = [(step, summary.staleness) for step, summary in history.summaries]
    known = [(step, ages) for step, ages in looked if ages.keys.size]
    if not known:
        return not_measured(
            "policy versions of the tokens, or of the stage that scores them, are not recorded, or "
            "are texts that do not differ in one number"
        )
    ahead = [(step, ages) for step, ages in known if ages.keys[0] < 0]
    if not ahead:
        return not_found(f"no token of {counted(len(known), 'step')} is ahead of the trainer")
    step, ages = ahead[0]
    tokens = int(ages.cells[ages.keys < 0, Field.MASKED].sum())
    text = (
        f"step {step.step}: {counted(tokens, 'token')} of policy versions up to "
        f"{-int(ages.keys[0])} ahead of the trainer's, in {len(ahead)} of the newest {len(looked)} "
        "steps"
    )
    count = Count(len(ahead), len(looked))
    share = len(ahead) / len(looked)
    return Evidence("found", share, ahead[-1][0].step, "", (text,), count=count)


def _is_larger(mean: float, than: float, factor: float) -> bool:
    """Return whether a mean is `factor` times another; 0 is no larger than 0."""
    return mean > than and mean >= factor * than


class _Ages(NamedTuple):
    """A step's tokens by staleness."""

    step: int
    by_age: Mapping[int, Mean]
    moved: Mapping[int, float]
    """Age -> share of the tokens whose ratio of policy and rollout leaves 0.9 to 1.1."""

    @property
    def only(self) -> int | None:
        """The staleness of all tokens; None: they have several."""
        found = [age for age, each in self.by_age.items() if each.tokens]
        return found[0] if len(found) == 1 else None

    def share_moved(self, youngest: int, usual: float) -> float:
        """Return the share of the tokens older than `youngest` that drift moved; NaN if unknown.

        Something else moves the share `usual` of them.
        """
        old = {age: each.tokens for age, each in self.by_age.items() if age > youngest}
        count = sum(self.moved.get(age, math.nan) * tokens for age, tokens in old.items() if tokens)
        share = count / sum(old.values()) - usual
        return max(0.0, share) if math.isfinite(share) else math.nan

    @property
    def share_of_old(self) -> float:
        """The share of the tokens that an older version sampled."""
        total = sum(each.tokens for each in self.by_age.values())
        old = sum(each.tokens for age, each in self.by_age.items() if age > 0)
        return old / total if total else math.nan


def _pooled(steps: Sequence[_Ages], first: int, last: int | None = None) -> Mean:
    """Return the mean over the tokens of some stalenesses; NaN if there are none."""
    found = [
        mean
        for each in steps
        for age, mean in each.by_age.items()
        if age >= first and (last is None or age <= last)
        if mean.tokens and not math.isnan(mean.value)
    ]
    total = sum(each.tokens for each in found)
    if not total:
        return Mean(math.nan, 0.0, math.nan)
    value = sum(each.tokens * each.value for each in found) / total
    return Mean(value, total, sum(each.tokens * each.least for each in found) / total)


def _by_age(steps: Sequence[_Ages], factor: float, share: float, text: str) -> Evidence:
    """Compare the youngest tokens with the older ones, if no step has fresh tokens beside old ones.

    Tokens of several ages are compared with the fresh ones of other steps, if there are any.
    """
    old = [each for each in steps if max(each.by_age) > 0]
    ages = {age for each in old for age, mean in each.by_age.items() if age > 0 and mean.tokens}
    youngest = min(ages)
    if len(ages) > 1 and not math.isnan(_pooled(steps, 0, 0).value):
        youngest = 0
    young = _pooled(steps, youngest, youngest).value
    older = _pooled(old, youngest + 1).value
    if math.isnan(older) or math.isnan(young):
        return not_measured(
            f"{text}none is fresh, and all are {counted(youngest, 'version')} old: how much of "
            "their mismatch is drift is unknown",
            waits=True,
        )
    of_young = f"those that are {counted(youngest, 'version')} old" if youngest else "fresh ones"
    text += (
        f"{'none is fresh' if youngest else 'no step has fresh ones beside them'}: mean |d| is "
        f"{short(young)} over {of_young}, {short(older)} over older ones"
    )
    larger = [
        each for each in old if _is_larger(_pooled([each], youngest + 1).least, young, factor)
    ]
    if not (_is_larger(older, young, factor) and larger):
        return not_found(text)
    same = [(each.by_age[youngest].tokens, each.moved[youngest]) for each in steps
            if youngest in each.by_age and youngest in each.moved]  # fmt: skip
    total = sum(tokens for tokens, _ in same)
    usual = sum(tokens * each for tokens, each in same) / total if total else math.nan
    moved = [each.share_moved(youngest, usual) for each in larger]
    return _stuck(old, _drifted(larger, moved, len(old), share, text))


_STUCK: Final = 3
"""Number of newest steps whose tokens are of one version, if a sentence says so."""


def _stuck(old: Sequence[_Ages], drift: Evidence) -> Evidence:
    """Return the evidence; it says so if all tokens of the newest steps are of one version."""
    first = len(old) - 1
    while first and _is_next(old[first - 1], old[first]):
        first -= 1
    age, count = old[-1].only, len(old) - first
    if count < _STUCK or age is None:
        return drift
    text = f"all tokens are of one policy version, which is {counted(age, 'version')} old"
    return dataclasses.replace(
        drift,
        headline=f"{text[0].upper()}{text[1:]} in step {old[-1].step}",
        since_step=old[first].step,
        count=Count(count, count),
    )


def _is_next(one: _Ages, other: _Ages) -> bool:
    """Return whether the tokens of two steps are of one version, which is older in the second."""
    older = other.step - one.step
    return one.only is not None and other.only == one.only + older
