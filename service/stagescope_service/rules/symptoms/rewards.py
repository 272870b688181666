"""Symptoms of groups of samples, and of their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from stagescope_service.rules.evidence import (
    Count,
    Evidence,
    beyond,
    not_found,
    not_measured,
    of_rate,
    short,
)
from stagescope_service.rules.history import NEWEST, RunHistory
from stagescope_service.statistics.cell import Float64
from stagescope_service.store.queries.rollouts import RewardGroupsRow
from stagescope_wire.render import counted

_SAMPLES: Final = 32
"""Minimum samples to say how many have the maximum length."""
_HALF: Final = 0.5
"""Share of the newest steps in which the trainer's own number must say so."""


def groups(
    history: RunHistory, *, kind: Literal["equal", "low", "high", "single"], share: float
) -> Evidence:
    """Return whether many groups of samples teach nothing.

    Args:
        history: of the run.
        kind: of these groups. In 'equal' ones all rewards are equal, so their advantages are 0.
            In 'low' or 'high' ones they also equal the lowest or highest reward of the steps up to
            there. A 'single' one has one sample.
        share: share of the groups above which they are many.
    """
    every = history.groups
    if not every:
        return not_measured("samples have no group_id")
    single = kind == "single"
    rows = every if single else [row for row in every if row["rewarded"]]
    if not rows:
        return not_measured("samples have no rewards, or groups of one sample")
    marked = np.array([row[kind] for row in rows], np.float64)
    of = np.array([row["groups" if single else "rewarded"] for row in rows], np.float64)
    edge = ""
    if kind in ("low", "high"):
        lows, highs = _reward_edges(rows)
        if lows[-1] == highs[-1]:
            return not_measured(
                f"every reward is {short(lows[-1])}: whether it is the lowest or the highest is "
                "unknown"
            )
        edges = lows if kind == "low" else highs
        own = [row["lowest"] if kind == "low" else row["highest"] for row in rows]
        is_edge = np.array(own, np.float64) == edges
        marked = np.where(is_edge & (lows < highs), marked, 0.0)
        edge = f" ({short(edges[-1])})"
    what = {"equal": "have equal rewards", "low": "have the lowest reward alone",
            "high": "have the highest reward alone", "single": "have one sample"}[kind]  # fmt: skip
    count, total = int(marked[-NEWEST:].sum()), int(of[-NEWEST:].sum())
    text = f"{count} of {total} groups of the newest {counted(len(of[-NEWEST:]), 'step')} {what}"
    steps = np.array([row["step"] for row in rows], np.int64)
    return of_rate(steps, marked, of, share, NEWEST, text + edge, unit="group")


def _reward_edges(rows: Sequence[RewardGroupsRow]) -> tuple[Float64, Float64]:
    """Return the lowest and highest reward of the `NEWEST` steps up to each step. If those have
    only one reward, all steps up to it count."""
    low = np.array([row["lowest"] for row in rows], np.float64)
    high = np.array([row["highest"] for row in rows], np.float64)
    begins = [max(0, at + 1 - NEWEST) for at in range(len(rows))]
    lows = np.array([np.fmin.reduce(low[begin : at + 1]) for at, begin in enumerate(begins)])
    highs = np.array([np.fmax.reduce(high[begin : at + 1]) for at, begin in enumerate(begins)])
    alone = lows == highs
    lows = np.where(alone, np.fmin.accumulate(low), lows)
    return lows, np.where(alone, np.fmax.accumulate(high), highs)


def truncated(history: RunHistory, *, names: Sequence[str], bound: float, share: float) -> Evidence:
    """Return whether many responses have the maximum length. The trainer's own scalar decides, else
    the share of samples that have exactly the largest number of tokens."""
    logged = history.logged.series(names)
    if logged:
        return beyond(logged[0], bound, NEWEST, _HALF)
    counts = history.token_counts
    samples = counts.total()
    if samples < _SAMPLES:
        return not_measured(f"neither such a scalar nor {_SAMPLES} samples with their token counts")
    longest = max(counts)
    cut = counts[longest] / samples
    text = f"{cut:.0%} of {samples} samples have exactly {longest} tokens, the most"
    if cut < share:
        return not_found(text)
    count = Count(counts[longest], samples, "sample")
    return Evidence("found", cut, None, "", (text,), count=count)
