"""Evidence of the mismatch: by rank, round and staleness, and of the streams themselves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from stagescope_service.diagnosis.evidence import (
    ABS_DIFF,
    Evidence,
    not_found,
    not_measured,
    short,
    spearman,
)
from stagescope_service.diagnosis.history import NEWEST, RunHistory


def rank_apart(
    history: RunHistory, *, metric: str = ABS_DIFF, factor: float = 3.0, least: int = 3
) -> Evidence:
    """Return the rank whose metric is `factor` times the others' median, step after step."""
    slices = history.slices("rank", metric)
    slices = [(step, values) for step, values in slices if len(values) >= 3]
    if len(slices) < least:
        return not_measured(f"{len(slices)} of the newest steps have three ranks with {metric}")
    apart: Counter[tuple[str | None, int]] = Counter()
    first: dict[tuple[str | None, int], int] = {}
    for step, values in slices:
        for key, value in values.items():
            others = [other for name, other in values.items() if name != key]
            usual = float(np.nanmedian(others))
            if value > factor * usual and value > 1.5 * float(np.nanmax(others)):
                apart[key] += 1
                first.setdefault(key, step.step)
    if not apart:
        return not_found(f"no rank is {factor:g} times the others in {len(slices)} steps")
    (role, rank), count = apart.most_common(1)[0]
    step, values = slices[-1]
    others = [value for key, value in values.items() if key != (role, rank)]
    newest = values.get((role, rank), math.nan)
    text = (
        f"{role} {rank} stands apart in {count} of {len(slices)} steps: {metric} is "
        f"{short(newest)} in step {step.step}, {short(float(np.nanmedian(others)))} at the others"
    )
    if count < least:
        return not_found(text)
    since = first[role, rank]
    return Evidence("found", count / len(slices), since, f"{role} rank {rank}", (text,))


def rounds_rise(
    history: RunHistory, *, metric: str = ABS_DIFF, factor: float = 2.0, tokens: int = 64
) -> Evidence:
    """Return whether a metric rises with the round: Spearman's rank correlation of at least 0.8,
    and `factor` times more in the last round than in the first, in most of the newest steps."""
    rises, examined, since, newest = 0, 0, None, ""
    counts = dict(history.slices("round", "counts/tokens"))
    for step, values in history.slices("round", metric):
        sizes = counts.get(step, {})
        rounds = [key for key in sorted(values) if sizes.get(key, 0) >= tokens]
        numbers = np.array([values[key] for key in rounds])
        if len(rounds) < 3 or not np.isfinite(numbers).all():
            continue
        examined += 1
        newest = (
            f"step {step.step}: {short(float(numbers[0]))} in round {rounds[0][1]}, "
            f"{short(float(numbers[-1]))} in round {rounds[-1][1]}"
        )
        if spearman(numbers) >= 0.8 and numbers[-1] >= factor * numbers[0]:
            rises += 1
            since = step.step if since is None else since
    if not examined:
        return not_measured(f"no step has three rounds of {tokens} tokens")
    text = f"{metric} rises with the round in {rises} of {examined} steps; {newest}"
    if rises * 2 < examined or not rises:
        return not_found(text)
    return Evidence("found", rises / examined, since, "the later rounds", (text,))


def suspect(history: RunHistory, *, checks: Sequence[str], steps: int = 20) -> Evidence:
    """Return whether the checks of a step's streams name one of these causes."""
    newest = history.measured[-steps:]
    if history.newest is None or not newest:
        return not_measured("no step has both streams")
    marks = [bool(set(checks) & set(step.suspects)) for step in newest]
    count = sum(marks)
    if not count or not any(marks[-3:]):
        verdicts = Counter(step.verdict for step in newest)
        listed = ", ".join(f"{verdict} {number}" for verdict, number in verdicts.items())
        return not_found(f"the streams of the newest {len(newest)} steps: {listed}")
    found = history.newest.comparability
    texts = [
        check.text for check in found.checks if check.name in checks and check.status == "suspect"
    ]
    since = next(step.step for step, mark in zip(newest, marks, strict=True) if mark)
    lines = (f"named in {count} of the newest {len(newest)} steps", *texts)
    likelier = [] if found.cause in (*checks, None) else [f"{found.cause} is the likelier cause"]
    where = ", ".join(sorted(set(_ranks_named(texts))))
    return Evidence("found", count / len(newest), since, where, lines, tuple(likelier))


def _ranks_named(texts: Sequence[str]) -> list[str]:
    return [word for text in texts for word in text.split("; ") if word.startswith("rank ")]


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
    if not mismatch <= factor * noise:
        return not_found(text)
    return Evidence("found", min(1.0, noise / mismatch), newest.step.step, "", (text,))


def rounded(history: RunHistory, *, share: float = 0.5) -> Evidence:
    """Return whether a stream's dtype alone explains the mismatch, or most of it."""
    newest = history.newest
    if newest is None:
        return not_measured("no step has both streams")
    floor, mismatch = newest.published["rounding/abs_diff_floor"], newest.published[ABS_DIFF]
    dtypes = {name: ", ".join(each) for name, each in newest.summary.summary.dtypes.items()}
    listed = ", ".join(f"{name} in {dtype}" for name, dtype in dtypes.items())
    text = (
        f"step {newest.step.step}: rounding adds about {short(floor)} to a mean |d| of "
        f"{short(mismatch)} ({listed})"
    )
    if not (mismatch > 0 and floor >= share * mismatch):
        return not_found(text)
    return Evidence("found", min(1.0, floor / mismatch), newest.step.step, "", (text,))


def hidden_tails(history: RunHistory, *, mean: float = 0.01, tail: float = 5.0) -> Evidence:
    """Return whether means look healthy while single tokens are far off.

    `training/rollout_probs_diff_mean` is below `mean` and `logprob_abs_diff/max` over `tail` nats:
    improbable tokens hardly move probabilities.
    """
    means, largest = (
        history.metric(name).newest(NEWEST)
        for name in ("training/rollout_probs_diff_mean", "logprob_abs_diff/max")
    )
    if not len(means) or len(means) != len(largest):
        return not_measured("no step has both streams")
    marks = (means.values < mean) & (largest.values > tail)
    share = history.metric("tail/abs_diff_over_1_share").newest(NEWEST)
    text = (
        f"|d| is up to {short(float(np.nanmax(largest.values)))} nats while the mean of "
        f"|e^p - e^q| is {short(float(np.nanmedian(means.values)))}; "
        f"{short(float(np.nanmedian(share.values)))} of the tokens are over 1 nat"
    )
    if marks.mean() < 0.5:
        return not_found(text)
    return Evidence("found", float(marks.mean()), int(means.steps[marks][0]), "", (text,))


def stale(history: RunHistory, *, metric: str = ABS_DIFF, factor: float = 1.5) -> Evidence:
    """Return whether tokens of older policy versions have a larger mismatch than fresh ones."""
    slices = history.slices("staleness", metric)
    counts = dict(history.slices("staleness", "counts/tokens"))
    rows = []
    for step, values in slices:
        sizes = counts.get(step, {})
        fresh = values.get((None, 0), math.nan)
        old = [(sizes[key], value) for key, value in values.items() if key[1] > 0]
        total = sum(sizes.values())
        if old and total:
            weight = sum(size for size, _ in old)
            mean = sum(size * value for size, value in old) / weight if weight else math.nan
            rows.append((step.step, weight / total, mean, fresh))
    if not slices or not any(len(values) for _, values in slices):
        return not_measured("policy versions of the tokens are not recorded")
    if not rows:
        return not_found("all tokens were sampled by the trainer's own version")
    share = float(np.median([row[1] for row in rows]))
    newest, _, mean, fresh = rows[-1]
    text = (
        f"{share:.0%} of the tokens are of an older version; in step {newest} their mean |d| is "
        f"{short(mean)}, that of fresh ones {short(fresh)}"
    )
    larger = [row for row in rows if not row[3] * factor > row[2]]
    if len(larger) * 2 < len(rows):
        return not_found(text)
    return Evidence("found", len(larger) / len(rows), rows[0][0], "", (text,))
