"""Evidence from the streams: what makes them incomparable, and what their values show."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple, get_args

import numpy as np

from stagescope_service.rules.evidence import (
    ABS_DIFF,
    Count,
    Evidence,
    event_period,
    not_found,
    not_measured,
    short,
)
from stagescope_service.rules.facts import StepFacts
from stagescope_service.rules.history import READ, RunHistory
from stagescope_service.rules.pooled import PooledSteps
from stagescope_service.rules.steps import CurrentStep
from stagescope_service.statistics.cell import Field
from stagescope_service.statistics.checks import ROUNDED_SHARE, Check, held_by_bfloat16
from stagescope_service.statistics.comparability import Comparability
from stagescope_service.statistics.noise_checks import few_carry
from stagescope_service.statistics.profile_bins import (
    COARSEST,
    FINER,
    NOT_FINITE,
    ZERO,
    Bin,
    Edge,
    add_bins,
    exponent,
)
from stagescope_service.statistics.summary import Summary
from stagescope_wire.render import counted, ranks_text
from stagescope_wire.schema import RankKey

_OF_THE_MEAN: Final = {"renormalised", "temperature", "calibration"}
"""Checks of whether another distribution sampled the tokens."""
_NAMED: Final = 20
"""Number of newest steps of which a text tells how many are suspect."""
_EDGE_TOKENS: Final = 32
"""Minimum tokens at the edges of a step's rounds."""
_LATTICE_TOKENS: Final = 64
"""Minimum tokens that differ."""
_LASTING: Final = 3
"""Number of newest steps; one of them has to be suspect."""
_OF_EDGE: Final = 10.0
"""Ratio of mean |d| of edge tokens to that of the others if only they lack a value."""
_ABOUT: Final = 0.1
"""Share of the sum of |d| of tokens without a value by which that of edge tokens may differ."""
_AT_EDGES: Final = ("first_token", "last_token")
"""Checks of tokens at the edges of rounds; these tokens alone can make them fail."""


def suspect(history: RunHistory, *, checks: Sequence[str]) -> Evidence:
    """Return whether the stream checks of steps name one of these causes, one of the newest three,
    or several that ended; or those of several steps' tokens together.

    If the own tokens of the ranks have other causes, these explain the failed checks.
    """
    measured, pooled = history.measured, history.pooled
    newest = measured[-_NAMED:]
    if history.newest is None or pooled is None or not newest:
        return not_measured("no step has both streams")
    at_edges = [each.text for each in history.newest.comparability.checks if each.name in _AT_EDGES]
    if at_edges and set(checks) <= _OF_THE_MEAN:
        return not_found(f"step {history.newest.step}: {at_edges[0]}")
    marks = np.zeros(len(measured), bool)
    for check in {*checks} & history.suspects.keys():
        marks[history.suspects[check]] = True
    period = event_period(marks, _LASTING)
    if period is not None and period.last is not None:
        is_short = marks[period.first :].sum() < _LASTING
        period = None if is_short else period
    lasts = period is not None and period.last is None
    of_pool = _named(pooled.comparability, checks) if pooled.is_needed and not lasts else []
    if of_pool and pooled.comparability.cause in checks and not _are_not_finite(of_pool):
        return _of_pool(pooled, of_pool, checks)
    if period is None:
        return _not_suspect(history.newest, newest, checks)
    last = measured[int(np.flatnonzero(marks)[-1])]
    if period.last is not None:
        pooled = history.until(last.step).pooled or pooled
    causes = pooled.causes
    shown = history.read(last)
    if causes and not {*checks} & {*causes.values()} and not _is_filled(shown, checks):
        others = ", ".join(sorted({str(cause) for cause in causes.values()}))
        return not_found(
            f"{pooled.text}: the own tokens of {ranks_text(sorted(causes))} show another cause: "
            f"{others}"
        )
    evidence = _named_by(shown, checks, last.step, pooled.ranks_alone_with(checks))
    since = measured[period.first].step
    of_one = shown is not None and _are_not_finite(_named(shown.comparability, checks))
    if len(pooled.steps) > 1 and not of_one:
        since = min(since, pooled.begin([*evidence.ranks]))
    inside = np.array([since <= step.step <= last.step for step in measured])
    inside[-1] |= period.last is None
    evidence = dataclasses.replace(
        evidence,
        sure=float(marks[-_NAMED:].mean()) if period.last is None else period.share,
        since_step=since,
        count=Count(int(marks[inside].sum()), int(inside.sum())),
    )
    return evidence.ended_after([step.step for step in measured], last.step)


def _not_suspect(shown: StepFacts, steps: Sequence[CurrentStep], checks: Sequence[str]) -> Evidence:
    """Return that no step fails the checks, or that they are undecided in the newest one."""
    undecided = [
        f"{each.name} {each.text}" for each in shown.comparability.undecided if each.name in checks
    ]
    if undecided and all(step.verdict == "unknown" for step in steps):
        return not_measured(f"step {shown.step}: {'; '.join(undecided)}")
    verdicts = Counter(step.verdict for step in steps)
    listed = ", ".join(f"{verdict} {number}" for verdict, number in verdicts.items())
    return not_found(f"the streams of the newest {len(steps)} steps: {listed}")


_NON_FINITE: Final = "nonfinite_log_probs"
"""Kind of the finding that log-probs are not finite."""


def _named(found: Comparability, checks: Sequence[str]) -> list[Check]:
    return [each for each in found.suspects if each.name in checks]


def _are_not_finite(named: Sequence[Check]) -> bool:
    """Return whether all that the checks name is not finite: each step shows that alone."""
    return bool(named) and all(each.values.get("zeros") == 0.0 for each in named)


def _is_filled(shown: StepFacts | None, checks: Sequence[str]) -> bool:
    """Return whether one of the checks names a value that was filled in, which only the tokens of
    the whole step show."""
    suspects = () if shown is None else shown.comparability.suspects
    return any(each.name in checks and "filled" in each.values for each in suspects)


def _of_pool(pooled: PooledSteps, named: Sequence[Check], checks: Sequence[str]) -> Evidence:
    """Return the evidence of a check that only several steps' tokens together fail."""
    ranks = pooled.ranks_alone_with(checks) or [rank for each in named for rank in each.ranks]
    lines = tuple(f"{pooled.text}: {each.text}" for each in named)
    since = pooled.begin(ranks)
    own = sum(step >= since for step, _ in pooled.steps)
    return Evidence(
        "found", 1.0, since, ranks_text(sorted({*ranks})), lines, count=Count(own, own),
        ranks=frozenset(ranks), headline=_headline(named, ranks, pooled.summary),
    )  # fmt: skip


def _named_by(
    shown: StepFacts | None, checks: Sequence[str], step: int, alone: Sequence[RankKey]
) -> Evidence:
    """Return what the checks of one step say: ranks, texts, and a likelier cause.

    Args:
        shown: the step.
        checks: the checks that count.
        step: its number.
        alone: the ranks whose own tokens fail them in several steps, if no others do.
    """
    if shown is None:
        return Evidence("found")
    named = _named(shown.comparability, checks)
    ranks = sorted({*alone} or {rank for each in named for rank in each.ranks})
    cause = shown.comparability.cause
    likelier = None if cause in checks else cause
    if _are_not_finite(named):
        likelier = likelier or _NON_FINITE  # what a stream lacks is not finite
    return Evidence(
        "found",
        where=ranks_text(ranks),
        supports=tuple(f"step {step}: {each.text}" for each in named),
        against=() if likelier in (None, _NON_FINITE) else (f"{likelier} is the likelier cause",),
        ranks=frozenset(ranks),
        headline=_headline(named, ranks, shown.summary.summary),
        likelier=likelier,
    )


def _headline(named: Sequence[Check], ranks: Sequence[RankKey], summary: Summary) -> str:
    """Return a constant, a shift, a clamp, or a mask beside the rounds, as a sentence; "" if no
    check names one."""
    place = f"on {ranks_text(sorted({*ranks}))} " if ranks else ""
    for each in named:
        if "flat" in each.values:
            at = int(each.values["flat"])
            value = short(each.values["pq"[at]])
            text = f"{place}the {summary.pair[at]} log-probs are {value} in every token"
            return text[0].upper() + text[1:]
        if "cut_off" in each.values:
            stream = summary.pair[int(each.values["cut_off"])]
            text = f"{place}the {stream} log-probs are cut off at {short(each.values['filled'])}"
            return text[0].upper() + text[1:] + ", or filled with it"
    if any(each.name == "coverage" for each in named) and (edge := _lacking_edge(summary)):
        text = f"{place}the mask covers the {edge} token of each round, where a stream has no value"
        return text[0].upper() + text[1:]
    lag = next((int(each.values["lag"]) for each in named if "lag" in each.values), 0)
    if not lag:
        return ""
    return (
        f"{place}the {summary.pair[1]} log-probs are {counted(abs(lag), 'token')} "
        f"{'late' if lag > 0 else 'early'}"
    ).capitalize()


def _lacking_edge(summary: Summary) -> Edge | None:
    """Return the edge of rounds whose tokens alone differ, if they are those without a value."""
    lacks = summary.total[Field.P_LACKS_ABS] + summary.total[Field.Q_LACKS_ABS]
    edges: tuple[Edge, ...] = get_args(Edge)
    for edge in edges:
        found = summary.profiles.edge_tokens(edge)
        if found is None or not lacks or few_carry(found[0]):
            continue
        size, others = (each.d_abs_sum / max(each.tokens, 1) for each in found)
        if size > _OF_EDGE * others and abs(found[0].d_abs_sum / lacks - 1.0) < _ABOUT:
            return edge
    return None


_NOTED: Final = 0.1
"""Minimum share of the mismatch that rounding adds, if a note says so."""


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
    summary = newest.summary.summary
    held = {
        name: held_by_bfloat16(summary.total, side) >= ROUNDED_SHARE
        for name, side in zip(summary.pair, ("P", "Q"), strict=True)
    }
    listed = ", ".join(
        f"{name} in {', '.join(dtypes)}"
        + (", only bfloat16 values" if held.get(name) and "bfloat16" not in dtypes else "")
        for name, dtypes in summary.dtypes.items()
    )
    text = (
        f"step {newest.step}: rounding adds about {short(floor)} to a mean |d| of "
        f"{short(mismatch)} ({listed})"
    )
    if math.isnan(floor) or math.isnan(mismatch):
        return not_measured(f"step {newest.step}: no token counts, or a dtype is not known")
    if not (mismatch > 0 and floor >= share * mismatch):
        note = f"{text}: a part of it" if mismatch > 0 and floor >= _NOTED * mismatch else ""
        return dataclasses.replace(not_found(text), note=note)
    ranks = _coarse_ranks(history.pooled)
    return Evidence(
        "found", min(1.0, floor / mismatch), newest.step, ranks_text(ranks), (text,),
        ranks=frozenset(ranks),
    )  # fmt: skip


def _coarse_ranks(pooled: PooledSteps | None) -> list[RankKey]:
    """Return the ranks with a stream of bfloat16 values; [] if none or all have one."""
    rows = () if pooled is None else pooled.ranks
    found = [
        (row.role, row.rank)
        for row in rows
        if max(held_by_bfloat16(row.cell, side) for side in ("P", "Q")) >= ROUNDED_SHARE
    ]
    return sorted(found) if len(found) < len(rows) else []


def edge_token(
    history: RunHistory, *, edge: Edge, checks: Sequence[str], factor: float
) -> Evidence:
    """Return whether the tokens at one edge of rounds differ `factor` times as much as the others.

    Each of the newest `READ` steps must show it, over `_EDGE_TOKENS` tokens of the edge, and
    more than a few of them must carry it. Steps with fewer tokens are added up. The same holds if
    the stream checks name it.
    """
    return _or_suspect(_edge_token(history, edge, factor), history, checks)


def _edge_token(history: RunHistory, edge: Edge, factor: float) -> Evidence:
    rows: list[_EdgeTokens] = []
    for step in reversed(history.measured[-_POOLED:]):
        shown = history.read(step)
        found = None if shown is None else shown.summary.summary.profiles.edge_tokens(edge)
        if found is None:
            continue
        if rows and rows[-1].found.tokens < _EDGE_TOKENS:
            rows[-1] = rows[-1].with_earlier(step.step, *found)
        elif len(rows) < READ:
            rows.append(_EdgeTokens(step.step, step.step, *found))
        if len(rows) == READ and rows[-1].found.tokens >= _EDGE_TOKENS:
            break
    rows = [row for row in rows if row.found.tokens >= _EDGE_TOKENS]
    steps = sum(row.last - row.first + 1 for row in rows)
    if steps < READ or not rows:
        return not_measured(
            f"the newest steps lack {_EDGE_TOKENS} {edge} tokens of rounds with numbers",
            waits=bool(rows),
        )
    newest = rows[0]
    text = (
        f"{newest.text}: mean |d| is {short(newest.mean)} over the {newest.found.tokens} {edge} "
        f"tokens of rounds, {short(newest.usual)} over the others"
    )
    is_of_few = few_carry(newest.found)
    if is_of_few and newest.mean > factor * newest.usual:
        text += f": a few of the {newest.found.tokens} carry it, and the rest are like all others"
    if not all(row.mean > factor * row.usual and not few_carry(row.found) for row in rows):
        return not_found(text)
    where = f"the {edge} token of each round"
    return Evidence("found", 1.0, rows[-1].first, where, (text,), count=Count(steps, steps))


_POOLED: Final = 10
"""Maximum number of newest steps whose edge tokens are added up, if a step has too few."""


class _EdgeTokens(NamedTuple):
    """The edge tokens of rounds, and the others, of a step or of several."""

    first: int
    last: int
    found: Bin
    others: Bin

    def with_earlier(self, step: int, found: Bin, others: Bin) -> _EdgeTokens:
        """Return them with those of an earlier step."""
        return _EdgeTokens(
            step, self.last, add_bins((self.found, found)), add_bins((self.others, others))
        )

    @property
    def mean(self) -> float:
        """Mean |d| of the edge tokens."""
        return self.found.d_abs_sum / self.found.tokens

    @property
    def usual(self) -> float:
        """Mean |d| of the others."""
        return self.others.d_abs_sum / self.others.tokens

    @property
    def text(self) -> str:
        """Which steps they are."""
        one = self.first == self.last
        return f"step {self.last}" if one else f"steps {self.first} to {self.last}"


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
