"""Evidence of the mismatch: by rank, round, engine and staleness."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from stagescope_service.rules.evidence import (
    ABS_DIFF,
    Count,
    Evidence,
    not_found,
    not_measured,
    short,
    spearman,
)
from stagescope_service.rules.history import NEWEST, READ, RunHistory
from stagescope_service.rules.steps import CurrentStep
from stagescope_service.rules.symptoms.ages import is_of_old
from stagescope_service.statistics.cell import Field, Float64
from stagescope_service.statistics.step_metrics import Dimension, SliceKey
from stagescope_wire.render import counted

_FEW: Final = 8
"""Number of tokens that are few: if they carry a mean, it says nothing about the others."""
_CARRIED: Final = ": a few tokens carry it, and it says nothing about the others"


class _Mean(NamedTuple):
    """Mean |d| of a slice of a step."""

    value: float
    tokens: float
    least: float
    """Mean |d| without the tokens that are far off, if these are few. Each of the few counts as the
    largest one, so this is a lower bound."""


_Slices: TypeAlias = "list[tuple[CurrentStep, dict[SliceKey, _Mean]]]"


def _means(history: RunHistory, by: Dimension, few: float = 0.0) -> _Slices:
    """Return mean |d| of the slices of the newest steps; `few` is the share of the tokens of a
    slice that are few, too."""
    names = ("counts/tokens", "logprob_abs_diff/max", "tail/abs_diff_over_0.5_count")
    others = [dict(history.slices(by, name)) for name in names]
    found: _Slices = []
    for step, means in history.slices(by, ABS_DIFF):
        own: dict[SliceKey, _Mean] = {}
        for key, mean in means.items():
            tokens, largest, far = (each.get(step, {}).get(key, math.nan) for each in others)
            count, least = max(far, 1.0), mean
            if count < max(_FEW, few * tokens) and tokens > count and math.isfinite(largest):
                least = max(0.0, mean * tokens - count * largest) / (tokens - count)
            own[key] = _Mean(mean, tokens, least)
        found.append((step, own))
    return found


def rank_apart(history: RunHistory, *, factor: float, least: int) -> Evidence:
    """Return the rank whose mean |d| is `factor` times the others' median, step after step.

    In `_STEADY_STEPS` of the newest steps, `_STEADY` times the median is enough. With two ranks,
    the one with the higher value must be the same in at least half of the steps.
    """
    slices = [each for each in _means(history, "rank") if len(each[1]) >= 2]
    if len(slices) < least:
        return not_measured(
            f"{len(slices)} of the newest steps have two or more ranks with {ABS_DIFF}"
        )
    apart: dict[SliceKey, list[int]] = {}
    steady: dict[SliceKey, list[int]] = {}
    of_few: Counter[SliceKey] = Counter()
    examined = 0
    for step, values in slices:
        known = {key: each.value for key, each in values.items() if not math.isnan(each.value)}
        if "bitwise_equal" in step.suspects:  # copies on one rank put no other apart
            known = {key: value for key, value in known.items() if value}
        if len(known) < 2:
            continue
        examined += 1
        while len(known) >= 2:
            key = max(known, key=lambda name: known[name])
            value = known.pop(key)
            usual, largest = float(np.median([*known.values()])), 1.5 * max(known.values())
            bound = max(factor * usual, largest)
            if values[key].least > max(_STEADY * usual, largest):
                steady.setdefault(key, []).append(step.step)
            if not value > bound:
                break
            if not values[key].least > bound:
                of_few[key] += 1
                break
            apart.setdefault(key, []).append(step.step)
    if examined < least:
        return not_measured(f"{examined} of the newest steps have numbers of two or more ranks")
    apart |= {key: steps for key, steps in steady.items() if len(steps) >= _STEADY_STEPS}
    if not apart:
        text = f"no rank is {factor:g} times the others in {examined} steps"
        for (role, rank), count in of_few.most_common(1):
            text += f"; in {count}, {role} {rank} is so only because of a few tokens"
        return not_found(text)
    # If several ranks differ, one whose streams have no cause of their own says more.
    caused = history.pooled.ranks_with_any if history.pooled is not None else ()
    enough = {key for key, own in apart.items() if len(own) >= least}
    worst = max(apart, key=lambda key: (key in enough and key not in caused, len(apart[key])))
    (role, rank), count, last = worst, len(apart[worst]), apart[worst][-1]
    step, values = slices[-1]
    rest = [each.value for key, each in values.items() if key != worst]
    newest = values[worst].value if worst in values else math.nan
    text = (
        f"{role} {rank} differs in {count} of {len(slices)} steps: {ABS_DIFF} is "
        f"{short(newest)} in step {step.step}, {short(_median(rest))} at the "
        f"other{'' if len(rest) == 1 else 's'}"
    )
    if count < least or (len(values) == 2 and 2 * count < len(slices)):
        return not_found(text)
    is_old = history.newest is not None and is_of_old(newest, history.newest.summary.summary)
    evidence = Evidence(
        "found", count / len(slices), apart[worst][0], f"{role} rank {rank}", (text,),
        count=Count(count, len(slices)), ranks=frozenset({(str(role), rank)}),
        likelier=_VERSIONS if is_old else None,
    )  # fmt: skip
    return evidence.ended_after([each.step for each, _ in slices], last)


def _median(values: Sequence[float]) -> float:
    """Return the median of the values that are not NaN; NaN where there is none."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan


_VERSIONS: Final = "versions"
"""The check of which policy versions sampled a step's tokens."""
_STEADY: Final = 2.0
_STEADY_STEPS: Final = 8
"""Ratio to the median of the others, and steps that must show it on one rank."""
_ROUND_TOKENS: Final = 64
"""Minimum tokens of a round that is compared with others."""
_FEW_OF_ROUND: Final = 0.05
"""Share of the tokens of a round that say nothing about its others."""
_ENGINE_TOKENS: Final = 256
"""Minimum tokens of an engine instance that is compared with others."""
_MOVED: Final = "tail/ratio_outside_0.9_1.1_share"


def rounds_rise(history: RunHistory, *, factor: float) -> Evidence:
    """Return whether mean |d| rises with the round, and more than its tokens grow less sure.

    In 70 % of the newest steps Spearman's rank correlation with the round is at least 0.8, and
    the last round has `factor` times the first one's. The ratio to the mean of -q does, too.
    The same noise of the logits makes |d| larger where a token is less sure (arXiv 2512.23087), and
    later rounds of a healthy run often are.
    """
    rises, explained, examined, since, newest = 0, 0, 0, None, ""
    rollout = "rollout" if history.newest is None else history.newest.summary.summary.pair[1]
    sampled = dict(history.slices("round", f"logprob/{rollout}_mean"))
    for step, values in _means(history, "round"):
        rounds = [key for key in sorted(values) if values[key].tokens >= _ROUND_TOKENS]
        numbers = np.array([values[key].value for key in rounds])
        if len(rounds) < 3 or not np.isfinite(numbers).all():
            continue
        examined += 1
        newest = (
            f"step {step.step}: {short(float(numbers[0]))} in round {rounds[0][1]}, "
            f"{short(float(numbers[-1]))} in round {rounds[-1][1]}"
        )
        if not _rises(numbers, factor):
            continue
        if values[rounds[-1]].least < factor * numbers[0]:
            newest += _CARRIED
            continue
        unsure = np.array([-sampled.get(step, {}).get(key, math.nan) for key in rounds])
        if (unsure > 0.0).all() and not _rises(numbers / unsure, factor):
            explained += 1
            continue
        rises += 1
        since = step.step if since is None else since
    if not examined:
        return not_measured(f"no step has three rounds of {_ROUND_TOKENS} tokens")
    text = f"{ABS_DIFF} rises with the round in {rises} of {examined} steps; {newest}"
    if explained:
        text += f"; in {explained} more, as their tokens grow less sure"
    if rises < 0.7 * examined:
        return not_found(text)
    count = Count(rises, examined)
    return Evidence("found", rises / examined, since, "the later rounds", (text,), count=count)


def _rises(numbers: Float64, factor: float) -> bool:
    return spearman(numbers) >= 0.8 and bool(numbers[-1] >= factor * numbers[0])


def round_apart(history: RunHistory, *, factor: float, least: int) -> Evidence:
    """Return the round whose mean |d| is `factor` times the others', step after step.

    Its ratio to the mean of -q must be `factor` times the others', too. At least `least` of the
    newest steps must show the same round. So must half of the steps that have two rounds of enough
    tokens.
    """
    apart: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    examined = []
    rollout = "rollout" if history.newest is None else history.newest.summary.summary.pair[1]
    sampled = dict(history.slices("round", f"logprob/{rollout}_mean"))
    for step, values in _means(history, "round", _FEW_OF_ROUND):
        sizes = {key: each for key, each in values.items() if each.tokens >= _ROUND_TOKENS}
        if len(sizes) < 2 or not all(math.isfinite(each.value) for each in sizes.values()):
            continue
        examined.append(step.step)
        worst = max(sizes, key=lambda key: sizes[key].value)
        of_others = _weighted([each for key, each in sizes.items() if key != worst])
        unsure = {key: -sampled.get(step, {}).get(key, math.nan) for key in sizes}
        others = [each._replace(value=unsure[key]) for key, each in sizes.items() if key != worst]
        surer = _weighted(others) / unsure[worst] if unsure[worst] > 0.0 else math.nan
        bound = factor * of_others
        if sizes[worst].least > bound and not sizes[worst].value * surer <= bound:
            apart.setdefault(worst[1], []).append(step.step)
            texts[worst[1]] = (
                f"step {step.step}: {ABS_DIFF} is {short(sizes[worst].value)} in round {worst[1]}, "
                f"{short(of_others)} in the others"
            )
    if len(examined) < least:
        return not_measured(
            f"{len(examined)} of the newest steps have two rounds of {_ROUND_TOKENS} tokens"
        )
    number = max(apart, key=lambda key: len(apart[key]), default=-1)
    count = len(apart.get(number, ()))
    if count < least or 2 * count < len(examined):
        return not_found(f"no round is {factor:g} times the others in {least} steps")
    text = f"round {number} differs in {count} of {len(examined)} steps; {texts[number]}"
    evidence = Evidence(
        "found", count / len(examined), apart[number][0], f"round {number}", (text,)
    )
    return evidence.ended_after(examined, apart[number][-1])


def _weighted(values: Sequence[_Mean]) -> float:
    """Return the mean over the tokens of several slices."""
    return sum(each.value * each.tokens for each in values) / sum(each.tokens for each in values)


def noise_floor(history: RunHistory, *, factor: float) -> Evidence:
    """Note that the mismatch is no larger than the trainer's against itself: that is no fault."""
    newest = history.newest
    floor = None if newest is None else newest.published_noise
    if newest is None or floor is None:
        return not_measured("no recomputed log-probs: the trainer cannot be compared with itself")
    mismatch, noise = newest.published[ABS_DIFF], floor[ABS_DIFF]
    text = (
        f"step {newest.step}: mean |d| is {short(mismatch)}, that of the trainer against "
        f"itself {short(noise)}"
    )
    if math.isnan(mismatch) or math.isnan(noise):
        return not_measured(f"{text}: no token counts on one side")
    if not mismatch <= factor * noise:
        return not_found(text)
    return dataclasses.replace(not_found(text), note=text)


def engine_apart(history: RunHistory, *, factor: float) -> Evidence:
    """Return the engine instance whose mean |d| is `factor` times the others', in each step.

    Each of the newest `READ` steps must show it, over `_ENGINE_TOKENS` tokens of each engine
    instance. More than a few tokens must carry it.
    """
    apart: list[tuple[int, str, float, float]] = []
    is_old = True
    examined = 0
    for step, summary in history.summaries:
        sums = {name: row for name, row in summary.engines.items() if row[0] >= _ENGINE_TOKENS}
        if len(sums) < 2:
            continue
        examined += 1
        means = {name: float(row[3] / row[0]) for name, row in sums.items()}
        worst = max(means, key=lambda name: means[name])
        carrying = float(sums[worst][3] ** 2 / sums[worst][4]) if sums[worst][4] else 0.0
        others = [row for name, row in sums.items() if name != worst]
        usual = float(sum(row[3] for row in others) / sum(row[0] for row in others))
        if means[worst] > factor * usual and not carrying < _FEW:
            apart.append((step.step, worst, means[worst], usual))
            is_old = is_old and is_of_old(means[worst], summary)
    if examined < READ:
        return not_measured(
            f"{examined} of the newest steps have {_ENGINE_TOKENS} tokens of each of two engine "
            "instances"
        )
    if len(apart) < READ or len({name for _, name, *_ in apart}) > 1:
        return not_found(f"no engine instance is {factor:g} times the others in each step")
    step_number, name, mean, usual = apart[0]
    text = (
        f"step {step_number}: mean |d| is {short(mean)} over the tokens that {name} sampled, "
        f"{short(usual)} over the others'"
    )
    count = Count(len(apart), examined)
    return Evidence(
        "found", 1.0, apart[-1][0], name, (text,), count=count,
        likelier=_VERSIONS if is_old else None,
    )  # fmt: skip


def mean_of_others(history: RunHistory, apart: Evidence) -> float:
    """Return the newest mean |d| without the ranks, or the engine, that differ; NaN if unknown."""
    newest = history.newest
    if newest is None:
        return math.nan
    if apart.ranks:
        rows = [
            (float(row.cell.tokens), float(row.cell[Field.D_ABS_SUM]))
            for row in newest.summary.ranks
            if (row.role, row.rank) not in apart.ranks
        ]
    else:
        engines = newest.summary.summary.engines
        rows = [
            (float(row[0]), float(row[3])) for name, row in engines.items() if name != apart.where
        ]
    tokens = sum(count for count, _ in rows)
    return sum(size for _, size in rows) / tokens if tokens else math.nan


def stale(history: RunHistory, *, checks: Sequence[str], factor: float, share: float) -> Evidence:
    """Return whether tokens of older policy versions have a larger mismatch than fresh ones.

    If no step has fresh tokens, the youngest ones of the newest steps are compared with the older.
    Asynchronous training expects small drift, so that is a note. Drift is large if it moves the
    ratio of at least `share` of the older tokens by more than 10 %. PPO clips twice as much.
    """
    slices = _means(history, "staleness")
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
        return _by_age(old, factor, share, text)
    pooled = [(_pooled([each], 1), _pooled([each], 0, 0)) for each in fresh]
    of_old, of_fresh = pooled[-1]
    text += (
        f"in step {fresh[-1].step} their mean |d| is {short(of_old.value)}, that of fresh ones "
        f"{short(of_fresh.value)}"
    )
    is_larger = [_is_larger(one.least, other.value, factor) for one, other in pooled]
    if 2 * sum(is_larger) < len(fresh):
        is_of_few = _is_larger(of_old.value, of_fresh.value, factor) and not is_larger[-1]
        return not_found(text + (_CARRIED if is_of_few else ""))
    larger = [each for each, is_one in zip(fresh, is_larger, strict=True) if is_one]
    return _drifted(larger, len(fresh), 0, share, text)


def _drifted(
    larger: Sequence[_Ages], examined: int, youngest: int, share: float, text: str
) -> Evidence:
    """Return the drift of the tokens older than `youngest`, with a note if it is small."""
    moved = [each.share_moved(youngest) for each in larger]
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
    by_age: Mapping[int, _Mean]
    moved: Mapping[int, float]
    """Age -> share of the tokens whose ratio of policy and rollout leaves 0.9 to 1.1."""

    def share_moved(self, youngest: int) -> float:
        """Return the share of the tokens older than `youngest` that drift moved; NaN if unknown.

        As many are moved by something else as of the tokens of that age.
        """
        old = {age: each.tokens for age, each in self.by_age.items() if age > youngest}
        count = sum(self.moved.get(age, math.nan) * tokens for age, tokens in old.items() if tokens)
        share = count / sum(old.values()) - self.moved.get(youngest, math.nan)
        return max(0.0, share) if math.isfinite(share) else math.nan

    @property
    def share_of_old(self) -> float:
        """The share of the tokens that an older version sampled."""
        total = sum(each.tokens for each in self.by_age.values())
        old = sum(each.tokens for age, each in self.by_age.items() if age > 0)
        return old / total if total else math.nan


def _pooled(steps: Sequence[_Ages], first: int, last: int | None = None) -> _Mean:
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
        return _Mean(math.nan, 0.0, math.nan)
    value = sum(each.tokens * each.value for each in found) / total
    return _Mean(value, total, sum(each.tokens * each.least for each in found) / total)


def _by_age(steps: Sequence[_Ages], factor: float, share: float, text: str) -> Evidence:
    """Compare the youngest tokens with the older ones, if none are fresh."""
    ages = [(age, mean.tokens) for each in steps for age, mean in each.by_age.items()]
    youngest = min(age for age, tokens in ages if age > 0 and tokens)
    young = _pooled(steps, youngest, youngest).value
    older = _pooled(steps, youngest + 1).value
    if math.isnan(older) or math.isnan(young):
        return not_measured(
            f"{text}none is fresh, and all are {counted(youngest, 'version')} old: how much of "
            "their mismatch is drift is unknown",
            waits=True,
        )
    text += (
        f"none is fresh: mean |d| is {short(young)} over those that are "
        f"{counted(youngest, 'version')} old, {short(older)} over older ones"
    )
    larger = [
        each for each in steps if _is_larger(_pooled([each], youngest + 1).least, young, factor)
    ]
    if not (_is_larger(older, young, factor) and larger):
        return not_found(text)
    return _drifted(larger, len(steps), youngest, share, text)
