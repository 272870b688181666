"""Evidence of the streams themselves: what makes them incomparable, and what their values show."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from stagescope_service.diagnosis.evidence import (
    ABS_DIFF,
    Evidence,
    event_period,
    not_found,
    not_measured,
    short,
)
from stagescope_service.diagnosis.history import READ, RunHistory
from stagescope_service.statistics.checks import few_carry
from stagescope_service.statistics.profiles import (
    COARSEST,
    FINER,
    NOT_FINITE,
    ZERO,
    Edge,
    exponent,
)

_OF_THE_MEAN: Final = {"renormalised", "temperature", "calibration"}
"""Checks of whether another distribution sampled the tokens."""
_LASTING: Final = 3
"""Newest steps of which one has to be suspect."""
_AT_EDGES: Final = ("first_token", "last_token")
"""Checks of the tokens at the edges of rounds, which alone can fail those."""


def suspect(history: RunHistory, *, checks: Sequence[str], steps: int = 20) -> Evidence:
    """Return whether the checks of a step's streams name one of these causes, in one of the newest
    three steps."""
    measured = history.measured
    newest = measured[-steps:]
    if history.newest is None or not newest:
        return not_measured("no step has both streams")
    at_edges = [each.text for each in history.newest.comparability.checks if each.name in _AT_EDGES]
    if at_edges and set(checks) <= _OF_THE_MEAN:
        return not_found(f"step {history.newest.step.step}: {at_edges[0]}")
    marks = np.array([bool(set(checks) & set(step.suspects)) for step in measured])
    period = event_period(marks, _LASTING)
    if period is None:
        verdicts = Counter(step.verdict for step in newest)
        listed = ", ".join(f"{verdict} {number}" for verdict, number in verdicts.items())
        return not_found(f"the streams of the newest {len(newest)} steps: {listed}")
    share = float(marks[-steps:].mean())
    lines = [f"named in {int(marks[-steps:].sum())} of the newest {len(newest)} steps"]
    likelier, where = None, ""
    shown = history.read(measured[int(np.flatnonzero(marks)[-1])])
    if shown is not None:
        texts = [each.text for each in shown.comparability.suspects if each.name in checks]
        lines += [f"step {shown.step.step}: {text}" for text in texts]
        where = ", ".join(sorted(set(_ranks_named(texts))))
        cause = shown.comparability.cause
        likelier = None if cause in checks else cause
    since = measured[period.first].step
    against = () if likelier is None else (f"{likelier} is the likelier cause",)
    return Evidence("found", share, since, where, tuple(lines), against, likelier=likelier)


def _or_suspect(own: Evidence, history: RunHistory, checks: Sequence[str]) -> Evidence:
    """Return what was found, else what the checks of the streams name."""
    if own.verdict == "found":
        return own
    named = suspect(history, checks=checks)
    if named.verdict != "found":
        return own
    return dataclasses.replace(named, against=(*named.against, *own.against))


def _ranks_named(texts: Sequence[str]) -> list[str]:
    return [word for text in texts for word in text.split("; ") if word.startswith("rank ")]


def rounded(history: RunHistory, *, checks: Sequence[str], share: float = 0.5) -> Evidence:
    """Return whether a stream's dtype alone explains the mismatch, or most of it, or whether the
    checks of the streams name it."""
    return _or_suspect(_rounded(history, share), history, checks)


def _rounded(history: RunHistory, share: float) -> Evidence:
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
    if math.isnan(floor) or math.isnan(mismatch):
        return not_measured(f"step {newest.step.step}: no token counts, or a dtype is not known")
    if not (mismatch > 0 and floor >= share * mismatch):
        return not_found(text)
    return Evidence("found", min(1.0, floor / mismatch), newest.step.step, "", (text,))


def edge_token(
    history: RunHistory, *, edge: Edge, checks: Sequence[str], factor: float = 3.0, tokens: int = 32
) -> Evidence:
    """Return whether the tokens at one edge of rounds differ `factor` times as much as the others.

    Each of the newest `READ` steps must show it, over `tokens` tokens of the edge at least of which
    more than a few carry it, or the checks of the streams name it.
    """
    return _or_suspect(_edge_token(history, edge, factor, tokens), history, checks)


def _edge_token(history: RunHistory, edge: Edge, factor: float, tokens: int) -> Evidence:
    rows = []
    for step, summary in history.summaries:
        found = None if summary.profiles is None else summary.profiles.edge_tokens(edge)
        if found is not None and found[0].tokens >= tokens:
            mean, others = (each.d_abs_sum / each.tokens for each in found)
            rows.append((step.step, found[0].tokens, mean, others, few_carry(found[0])))
    if len(rows) < READ:
        return not_measured(
            f"{len(rows)} of the newest steps have {tokens} {edge} tokens of rounds with numbers"
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


def lattice(history: RunHistory, *, share: float = 0.5, tokens: int = 64) -> Evidence:
    """Return whether `share` of the differences are multiples of a power of two.

    Differences of values that were rounded to a narrow dtype are; of float32 log-probs about one in
    2000 is by chance.
    """
    for step, summary in history.summaries:
        bins = () if summary.profiles is None else summary.profiles.bins("lattice")
        bins = tuple(each for each in bins if each.key not in (ZERO, NOT_FINITE))
        count = sum(each.tokens for each in bins)
        if count < tokens:
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
    return not_measured(f"no step has {tokens} tokens that differ, with profiles of d")
