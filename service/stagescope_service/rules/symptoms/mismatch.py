"""Evidence of the mismatch: by rank, round, engine and staleness."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from stagescope.render import counted
from stagescope_service.rules.evidence import (
    ABS_DIFF,
    ENDED_AFTER,
    Evidence,
    not_found,
    not_measured,
    short,
    spearman,
)
from stagescope_service.rules.history import NEWEST, READ, RunHistory, StepInForce
from stagescope_service.rules.symptoms.trends import of_rate
from stagescope_service.statistics.cell import Field, Float64
from stagescope_service.statistics.step_metrics import Dimension, SliceKey

_FEW: Final = 8
"""Tokens that are few: those that carry a mean say nothing about the others."""
_CARRIED: Final = ": a few tokens carry it, and it says nothing about the others"


_Slices: TypeAlias = "Mapping[StepInForce, Mapping[SliceKey, float]]"


def _without_few(history: RunHistory, by: Dimension, metric: str) -> _Slices:
    """Return the mean |d| of slices without the tokens that are far off, where these are few.

    Each of them counts as the largest one, so that it is at most what the others have. Of other
    metrics it is the metric.
    """
    slices = dict(history.slices(by, metric))
    if metric != ABS_DIFF:
        return slices
    sizes, largest, far = (
        dict(history.slices(by, name))
        for name in ("counts/tokens", "logprob_abs_diff/max", "tail/abs_diff_over_0.5_count")
    )
    found: dict[StepInForce, Mapping[SliceKey, float]] = {}
    for step, means in slices.items():
        own = (sizes.get(step, {}), largest.get(step, {}), far.get(step, {}))
        found[step] = {
            key: _least_mean(mean, *(each.get(key, math.nan) for each in own))
            for key, mean in means.items()
        }
    return found


def _least_mean(mean: float, tokens: float, largest: float, far: float) -> float:
    count = max(far, 1.0)
    if not (count < _FEW and tokens > count and math.isfinite(largest)):
        return mean
    return max(0.0, mean * tokens - count * largest) / (tokens - count)


def rank_apart(
    history: RunHistory, *, metric: str = ABS_DIFF, factor: float = 3.0, least: int = 3
) -> Evidence:
    """Return the rank whose metric is `factor` times the others' median, step after step.

    Of two ranks it is the one with the higher value, in half of the steps at least.
    """
    slices = history.slices("rank", metric)
    slices = [(step, values) for step, values in slices if len(values) >= 2]
    if len(slices) < least:
        return not_measured(
            f"{len(slices)} of the newest steps have two or more ranks with {metric}"
        )
    least_of = _without_few(history, "rank", metric)
    apart: Counter[tuple[str | None, int]] = Counter()
    of_few: Counter[tuple[str | None, int]] = Counter()
    first: dict[tuple[str | None, int], int] = {}
    last: dict[tuple[str | None, int], int] = {}
    examined = 0
    for step, values in slices:
        known = {name: value for name, value in values.items() if not math.isnan(value)}
        if len(known) < 2:
            continue
        examined += 1
        key = max(known, key=lambda name: known[name])  # no other can be 1.5 times all others
        value = known.pop(key)
        others = np.array([*known.values()])
        bound = max(factor * float(np.median(others)), 1.5 * float(others.max()))
        if value > bound and not least_of[step][key] > bound:
            of_few[key] += 1
        elif value > bound:
            apart[key] += 1
            first.setdefault(key, step.step)
            last[key] = step.step
    if examined < least:
        return not_measured(f"{examined} of the newest steps have numbers of two or more ranks")
    if not apart:
        text = f"no rank is {factor:g} times the others in {examined} steps"
        for (role, rank), count in of_few.most_common(1):
            text += f"; in {count}, {role} {rank} is so by a few tokens alone"
        return not_found(text)
    (role, rank), count = apart.most_common(1)[0]
    step, values = slices[-1]
    rest = [value for key, value in values.items() if key != (role, rank)]
    newest = values.get((role, rank), math.nan)
    text = (
        f"{role} {rank} stands apart in {count} of {len(slices)} steps: {metric} is "
        f"{short(newest)} in step {step.step}, {short(_median(rest))} at the "
        f"other{'' if len(rest) == 1 else 's'}"
    )
    if count < least or (len(values) == 2 and 2 * count < len(slices)):
        return not_found(text)
    evidence = Evidence(
        "found", count / len(slices), first[role, rank], f"{role} rank {rank}", (text,)
    )
    after = sum(each.step > last[role, rank] for each, _ in slices)
    return evidence.ended(last[role, rank], after) if after > ENDED_AFTER else evidence


def _median(values: Sequence[float]) -> float:
    """Return the median of the values that are not NaN; NaN where there is none."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan


def rounds_rise(
    history: RunHistory,
    *,
    metric: str = ABS_DIFF,
    factor: float = 2.0,
    tokens: int = 64,
    share: float = 0.7,
) -> Evidence:
    """Return whether a metric rises with the round, and more than its tokens grow less sure.

    In `share` of the newest steps Spearman's rank correlation with the round is at least 0.8, and
    the last round has `factor` times the first one's; so does the metric divided by the mean of -q.
    The same noise of the logits makes |d| larger where a token is less sure (arXiv 2512.23087), and
    later rounds of a healthy run often are.
    """
    rises, explained, examined, since, newest = 0, 0, 0, None, ""
    counts = dict(history.slices("round", "counts/tokens"))
    rollout = "rollout" if history.newest is None else history.newest.summary.summary.pair[1]
    sampled = dict(history.slices("round", f"logprob/{rollout}_mean"))
    least_of = _without_few(history, "round", metric)
    for step, values in history.slices("round", metric):
        sizes, means = counts.get(step, {}), sampled.get(step, {})
        rounds = [key for key in sorted(values) if sizes.get(key, 0) >= tokens]
        numbers = np.array([values[key] for key in rounds])
        if len(rounds) < 3 or not np.isfinite(numbers).all():
            continue
        examined += 1
        newest = (
            f"step {step.step}: {short(float(numbers[0]))} in round {rounds[0][1]}, "
            f"{short(float(numbers[-1]))} in round {rounds[-1][1]}"
        )
        if not _rises(numbers, factor):
            continue
        if least_of[step][rounds[-1]] < factor * numbers[0]:
            newest += _CARRIED
            continue
        unsure = np.array([-means.get(key, math.nan) for key in rounds])
        if (unsure > 0.0).all() and not _rises(numbers / unsure, factor):
            explained += 1
            continue
        rises += 1
        since = step.step if since is None else since
    if not examined:
        return not_measured(f"no step has three rounds of {tokens} tokens")
    text = f"{metric} rises with the round in {rises} of {examined} steps; {newest}"
    if explained:
        text += f"; in {explained} more, as their tokens grow less sure"
    if rises < share * examined:
        return not_found(text)
    return Evidence("found", rises / examined, since, "the later rounds", (text,))


def _rises(numbers: Float64, factor: float) -> bool:
    return spearman(numbers) >= 0.8 and bool(numbers[-1] >= factor * numbers[0])


def noise_floor(history: RunHistory, *, factor: float = 1.5) -> Evidence:
    """Return whether the mismatch is no larger than the trainer's against itself."""
    newest = history.newest
    if newest is None or newest.noise is None:
        return not_measured("no recomputed log-probs: the trainer is not held against itself")
    mismatch, noise = newest.published[ABS_DIFF], newest.noise[ABS_DIFF]
    text = (
        f"step {newest.step.step}: mean |d| is {short(mismatch)}, that of the trainer against "
        f"itself {short(noise)}"
    )
    if math.isnan(mismatch) or math.isnan(noise):
        return not_measured(f"{text}: no token counts on one side")
    if not mismatch <= factor * noise:
        return not_found(text)
    sure = min(1.0, noise / mismatch) if mismatch else 1.0
    return Evidence("found", sure, newest.step.step, "", (text,))


def engine_apart(
    history: RunHistory, *, factor: float = 3.0, tokens: int = 256, least: int = 2
) -> Evidence:
    """Return the engine instance whose mean |d| is `factor` times the others', in each step.

    Each of the newest `READ` steps must show it, over `tokens` tokens of it and of the others, and
    more than a few of them must carry it.
    """
    apart: list[tuple[int, str, float, float]] = []
    examined = 0
    for step, summary in history.summaries:
        sums = {name: row for name, row in summary.engines.items() if row[0] >= tokens}
        if len(sums) < least:
            continue
        examined += 1
        means = {name: float(row[3] / row[0]) for name, row in sums.items()}
        worst = max(means, key=lambda name: means[name])
        carrying = float(sums[worst][3] ** 2 / sums[worst][4]) if sums[worst][4] else 0.0
        others = [row for name, row in sums.items() if name != worst]
        usual = float(sum(row[3] for row in others) / sum(row[0] for row in others))
        if means[worst] > factor * usual and not carrying < _FEW:
            apart.append((step.step, worst, means[worst], usual))
    if examined < READ:
        return not_measured(
            f"{examined} of the newest steps have {tokens} tokens of each of two engine instances"
        )
    if len(apart) < READ or len({name for _, name, *_ in apart}) > 1:
        return not_found(f"no engine instance is {factor:g} times the others in each step")
    step_number, name, mean, usual = apart[0]
    text = (
        f"step {step_number}: mean |d| is {short(mean)} over the tokens that {name} sampled, "
        f"{short(usual)} over the others'"
    )
    return Evidence("found", 1.0, apart[-1][0], name, (text,))


def hidden_tails(history: RunHistory, *, mean: float = 0.01, tail: float = 5.0) -> Evidence:
    """Return whether means look healthy while single tokens are far off.

    `training/rollout_probs_diff_mean` is below `mean` and `logprob_abs_diff/max` over `tail` nats:
    improbable tokens hardly move probabilities.
    """
    means, largest, share = (
        history.metric(name)
        for name in (
            "training/rollout_probs_diff_mean", "logprob_abs_diff/max",
            "tail/abs_diff_over_1_share",
        )
    )  # fmt: skip
    if not len(means) == len(largest) == len(share) > 0:
        return not_measured("no step has both streams")
    has_tokens = ~np.isnan(means.values) & ~np.isnan(largest.values)
    if not has_tokens.any():
        return not_measured("no step has a token that counts")
    means, largest, share = (each.where(has_tokens) for each in (means, largest, share))
    marks = (means.values < mean) & (largest.values > tail)
    text = (
        f"|d| is up to {short(float(largest.newest(NEWEST).values.max()))} nat while the "
        f"mean of |e^p - e^q| is {short(float(np.median(means.newest(NEWEST).values)))}; "
        f"{short(_median(share.newest(NEWEST).values.tolist()))} of the tokens are over 1 nat"
    )
    return of_rate(means.steps, marks, None, 0.5, NEWEST, text)


def stale(
    history: RunHistory, *, checks: Sequence[str], metric: str = ABS_DIFF, factor: float = 1.5
) -> Evidence:
    """Return whether tokens of older policy versions have a larger mismatch than fresh ones.

    Where no step has fresh tokens, the youngest of the newest steps are compared with the older.
    """
    slices = history.slices("staleness", metric)
    if not any(len(values) for _, values in slices):
        is_named = any({*checks} & {*step.suspects} for step in history.measured[-NEWEST:])
        return not_measured(
            "tokens come from several policy versions, but that of the stage that scores them is "
            "not recorded"
            if is_named
            else "policy versions of the tokens, or of the stage that scores them, are not "
            "recorded, or are texts that do not differ in one number"
        )
    counts = dict(history.slices("staleness", "counts/tokens"))
    least_of = _without_few(history, "staleness", metric)
    steps = [
        _Ages(
            step.step,
            {age: (counts[step][None, age], mean) for (_, age), mean in values.items()},
            {age: (counts[step][None, age], mean) for (_, age), mean in least_of[step].items()},
        )
        for step, values in slices
        if step in counts and not all(math.isnan(mean) for mean in values.values())
    ]
    old = [each for each in steps if max(each.sizes) > 0]
    if not old:
        return not_found("all tokens were sampled by the trainer's own version")
    share = float(np.median([each.share_over(0) for each in old]))
    text = f"{share:.0%} of the tokens are of an older version; "
    fresh = [each for each in old if not math.isnan(each.mean(0, 0))]
    if not fresh:
        return _by_age(old, factor, text)
    newest = fresh[-1]
    text += (
        f"in step {newest.step} their mean |d| is {short(newest.mean(1))}, that of fresh ones "
        f"{short(newest.mean(0, 0))}"
    )
    larger = [each for each in fresh if _is_larger(each.least(1), each.mean(0, 0), factor)]
    if 2 * len(larger) < len(fresh):
        is_of_few = _is_larger(newest.mean(1), newest.mean(0, 0), factor) and newest not in larger
        return not_found(text + (_CARRIED if is_of_few else ""))
    return Evidence("found", len(larger) / len(fresh), larger[0].step, "", (text,))


def versions_ahead(history: RunHistory) -> Evidence:
    """Return whether tokens are of policy versions that the trainer does not have yet, in one of
    the newest `READ` steps."""
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
    return Evidence("found", len(ahead) / len(looked), ahead[-1][0].step, "", (text,))


def _is_larger(mean: float, than: float, factor: float) -> bool:
    """Return whether a mean is `factor` times another; 0 is no larger than 0."""
    return mean > than and mean >= factor * than


class _Ages(NamedTuple):
    """A step's tokens by staleness: (how many, their mean)."""

    step: int
    sizes: Mapping[int, tuple[float, float]]
    least_sizes: Mapping[int, tuple[float, float]]
    """The same without the tokens that are far off, where these are few."""

    def least(self, first: int) -> float:
        """Return the mean over the tokens of a staleness or more, without a few far ones."""
        return _pooled([self._replace(sizes=self.least_sizes)], first)

    def mean(self, first: int, last: int | None = None) -> float:
        """Return the mean over the tokens of some stalenesses; NaN if there is none."""
        return _pooled([self], first, last)

    def share_over(self, age: int) -> float:
        """Return the share of the tokens that are older."""
        total = sum(size for size, _ in self.sizes.values())
        older = sum(size for key, (size, _) in self.sizes.items() if key > age)
        return older / total if total else math.nan


def _pooled(steps: Sequence[_Ages], first: int, last: int | None = None) -> float:
    found = [
        (size, mean)
        for each in steps
        for age, (size, mean) in each.sizes.items()
        if age >= first and (last is None or age <= last) and size and not math.isnan(mean)
    ]
    total = sum(size for size, _ in found)
    return sum(size * mean for size, mean in found) / total if total else math.nan


def _by_age(steps: Sequence[_Ages], factor: float, text: str) -> Evidence:
    """Compare the youngest of tokens that are all old with the older ones."""
    youngest = min(
        age for each in steps for age, (size, _) in each.sizes.items() if age > 0 and size
    )
    young, older = _pooled(steps, youngest, youngest), _pooled(steps, youngest + 1)
    if math.isnan(older) or math.isnan(young):
        return not_measured(
            f"{text}none is fresh, and all are {counted(youngest, 'version')} old: how much of "
            "their mismatch is drift is unknown"
        )
    text += (
        f"none is fresh: mean |d| is {short(young)} over those that are "
        f"{counted(youngest, 'version')} old, {short(older)} over older ones"
    )
    larger = [each for each in steps if _is_larger(each.least(youngest + 1), young, factor)]
    if not (_is_larger(older, young, factor) and larger):
        return not_found(text)
    return Evidence("found", len(larger) / len(steps), larger[0].step, "", (text,))
