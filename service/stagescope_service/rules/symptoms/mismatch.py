"""Evidence of the mismatch: by rank, round and engine, and against the trainer itself."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from stagescope_service.rules.evidence import (
    ABS_DIFF,
    Count,
    Evidence,
    median,
    not_found,
    not_measured,
    short,
    spearman,
)
from stagescope_service.rules.history import READ, RunHistory
from stagescope_service.rules.symptoms.ages import is_of_old
from stagescope_service.rules.symptoms.slices import CARRIED, FEW, Mean, Slices, means_by
from stagescope_service.statistics.cell import Field, Float64
from stagescope_service.statistics.profile_bins import add_bins
from stagescope_service.statistics.step_metrics import SliceKey

_OVER_NEXT: Final = 1.5
"""Minimum ratio to the next lower rank: where the ranks only spread, none is apart."""
_STEADY: Final = 2.0
"""Ratio to the median of the others that is enough in `_STEADY_STEPS` steps of one rank."""
_STEADY_STEPS: Final = 8


def rank_apart(history: RunHistory, *, factor: float, least: int) -> Evidence:
    """Return the rank whose mean |d| is `factor` times the others' median, step after step.

    In `_STEADY_STEPS` of the newest steps, `_STEADY` times the median is enough. With two ranks,
    the one with the higher value must be the same in at least half of the steps.
    """
    slices = [each for each in means_by(history, "rank") if len(each[1]) >= 2]
    if len(slices) < least:
        return not_measured(
            f"{len(slices)} of the newest steps have two or more ranks with {ABS_DIFF}",
            waits=bool(slices),
        )
    found = _ranks_apart(slices, factor)
    if found.examined < least:
        return not_measured(
            f"{found.examined} of the newest steps have numbers of two or more ranks", waits=True
        )
    apart = found.steps
    if not apart:
        text = f"no rank is {factor:g} times the others in {found.examined} steps"
        for (role, rank), count in found.of_few.most_common(1):
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
        f"{short(newest)} in step {step.step}, {short(median(rest))} at the "
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


class _RanksApart(NamedTuple):
    """The ranks that differ from the others."""

    steps: dict[SliceKey, list[int]]
    """Rank -> the steps in which it differs, ascending."""
    of_few: Counter[SliceKey]
    """Rank -> number of steps in which it differs only because of a few tokens."""
    examined: int
    """Number of steps with two ranks or more."""


def _ranks_apart(slices: Slices, factor: float) -> _RanksApart:
    """Return the ranks that differ in each step, the largest first, until one does not."""
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
            usual, next_lower = float(np.median([*known.values()])), max(known.values())
            bound = max(factor * usual, _OVER_NEXT * next_lower)
            if values[key].least > max(_STEADY * usual, _OVER_NEXT * next_lower):
                steady.setdefault(key, []).append(step.step)
            if not value > bound:
                break
            if not values[key].least > bound:
                of_few[key] += 1
                break
            apart.setdefault(key, []).append(step.step)
    apart |= {key: steps for key, steps in steady.items() if len(steps) >= _STEADY_STEPS}
    return _RanksApart(apart, of_few, examined)


_VERSIONS: Final = "versions"
"""The check of which policy versions sampled a step's tokens."""
_ROUND_TOKENS: Final = 64
"""Minimum tokens of a round that is compared with others."""
_FEW_OF_ROUND: Final = 0.05
"""Share of the tokens of a round that say nothing about its others."""
_ENGINE_TOKENS: Final = 256
"""Minimum tokens of an engine instance that is compared with others."""
_ROUNDS: Final = 3
"""Minimum rounds of a step for a rise over the rounds."""
_RISING: Final = 0.8
"""Minimum rank correlation of a rise over the rounds."""
_RISING_STEPS: Final = 0.7
"""Minimum share of the newest steps that must show a rise over the rounds."""


def rounds_rise(history: RunHistory, *, factor: float) -> Evidence:
    """Return whether mean |d| rises with the round, and more than its tokens grow less sure.

    In `_RISING_STEPS` of the newest steps Spearman's rank correlation with the round is at least
    `_RISING`, and the last round has `factor` times the first one's. The ratio to the mean of -q
    does, too. The same noise of the logits makes |d| larger where a token is less sure (arXiv
    2512.23087), and later rounds of a healthy run often are.
    """
    rises, explained, examined, since, newest = 0, 0, 0, None, ""
    rollout = "rollout" if history.newest is None else history.newest.summary.summary.pair[1]
    sampled = dict(history.slices("round", f"logprob/{rollout}_mean"))
    for step, values in means_by(history, "round"):
        rounds = [key for key in sorted(values) if values[key].tokens >= _ROUND_TOKENS]
        numbers = np.array([values[key].value for key in rounds])
        if len(rounds) < _ROUNDS or not np.isfinite(numbers).all():
            continue
        examined += 1
        newest = (
            f"step {step.step}: {short(float(numbers[0]))} in round {rounds[0][1]}, "
            f"{short(float(numbers[-1]))} in round {rounds[-1][1]}"
        )
        if not _rises(numbers, factor):
            continue
        if values[rounds[-1]].least < factor * numbers[0]:
            newest += CARRIED
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
    if rises < _RISING_STEPS * examined:
        return not_found(text)
    count = Count(rises, examined)
    return Evidence("found", rises / examined, since, "the later rounds", (text,), count=count)


def _rises(numbers: Float64, factor: float) -> bool:
    return spearman(numbers) >= _RISING and bool(numbers[-1] >= factor * numbers[0])


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
    for step, values in means_by(history, "round", _FEW_OF_ROUND):
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
            f"{len(examined)} of the newest steps have two rounds of {_ROUND_TOKENS} tokens",
            waits=bool(examined),
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


def _weighted(values: Sequence[Mean]) -> float:
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
        engines = {
            name: each
            for name, each in summary.of_engines().items()
            if each.tokens >= _ENGINE_TOKENS
        }
        if len(engines) < 2:
            continue
        examined += 1
        means = {name: each.d_abs_sum / each.tokens for name, each in engines.items()}
        worst = max(means, key=lambda name: means[name])
        others = add_bins([each for name, each in engines.items() if name != worst])
        usual = others.d_abs_sum / others.tokens
        if means[worst] > factor * usual and not engines[worst].carrying < FEW:
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
        engines = newest.summary.summary.of_engines()
        rows = [
            (float(each.tokens), each.d_abs_sum)
            for name, each in engines.items()
            if name != apart.where
        ]
    tokens = sum(count for count, _ in rows)
    return sum(size for _, size in rows) / tokens if tokens else math.nan
