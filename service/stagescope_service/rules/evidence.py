"""Evidence for and against a symptom, and the statistics that it rests on.

The functions of `symptoms` that rules name return it. Each is pure in a run's history, and its
keyword parameters are what a rule's `evidence` may give.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from stagescope_service.statistics.cell import Bool, Float64, Int64
from stagescope_wire.render import counted, grouped, numbers_text
from stagescope_wire.schema import RankKey

ENDED_AFTER: Final = 3
"""Maximum number of steps without a symptom that may still continue."""
Verdict = Literal["found", "not found", "not measured"]
ABS_DIFF: Final = "logprob_abs_diff/mean"


class EarlierSymptom(NamedTuple):
    """A symptom in an earlier attempt."""

    attempt: int
    """The number of the newest attempt that showed it."""
    since_step: int | None
    """The first step of that attempt that showed it; None: it does not depend on steps."""
    text: str
    """The attempt, the steps, and the first sentence of its evidence."""
    is_end: bool
    """Whether the attempt ended with it."""
    is_cause: bool
    """Whether no other symptom of the attempt explains it."""


class Count(NamedTuple):
    """The number of items that show a symptom, of those that were examined."""

    shown: int
    examined: int
    unit: str = "step"

    def __str__(self) -> str:
        return f"{self.shown} of {counted(self.examined, self.unit)}"


class Example(NamedTuple):
    """A sample that shows a symptom, by its id."""

    step: int
    sample: str


class Firing(NamedTuple):
    """A firing of a trigger's rule."""

    finding_id: str
    step: int | None
    of_stages: bool
    """Whether its metric is of stage events: missing ranks, or seconds."""


class Proof(NamedTuple):
    """What an experiment on one step proves of other rules."""

    step: int
    proves: tuple[str, ...]
    """The rules that see the same cause."""
    explains: tuple[str, ...]
    """Rules that it explains, besides those that its own rule names."""
    yields_to: tuple[str, ...]
    """Rules whose evidence is better and contradicts it: if one is found, it explains this."""


class PresumedEnd(NamedTuple):
    """The end of what only captured steps show, unless a symptom that it explains lasts."""

    step: int
    """The last step that shows it."""
    why: str
    """Why it is over, as a sentence without a full stop."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The result of a rule.

    Attributes:
        verdict: 'not measured' where the history lacks what the rule needs.
        sure: share of the examined items that show the symptom, 0 to 1; or its strength.
        since_step: the first step that shows it; None: it does not depend on steps.
        where: the round, rank, operator or stage; '' if it concerns the whole step.
        supports: sentences with the numbers that speak for it.
        against: those that speak against it.
        last_step: the last step that shows it, if it ended; None: it lasts, or has no step.
        count: how many of the examined steps, samples or groups show it; None: it is no share.
        ranks: (role, rank) of the ranks that show it; empty: all of them, or unknown.
        headline: the symptom as a sentence with its numbers; '': the rule's title says it.
        likelier: a failed check of the same step's streams, or a kind of finding, that explains the
            rule's own checks.
        example: a sample that shows it; None: none has an id.
        firings: of triggers, each of which any cause that stands in its step explains.
        note: facts to know that are no symptom; '' if none. What was found, too, is a note alone
            unless it explains another symptom.
        before: the symptom in an earlier attempt; the sentences mention it, too, unless the
            symptom ended.
    """

    verdict: Verdict
    sure: float = 0.0
    since_step: int | None = None
    where: str = ""
    supports: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    last_step: int | None = None
    count: Count | None = None
    ranks: frozenset[RankKey] = frozenset()
    headline: str = ""
    likelier: str | None = None
    example: Example | None = None
    firings: tuple[Firing, ...] = ()
    note: str = ""
    before: EarlierSymptom | None = None
    beside: frozenset[str] = frozenset()
    """Rules whose tokens were left out of what was examined, so that they do not explain it."""
    captured_step: int | None = None
    """The first captured step that shows it, if it explains symptoms that began before."""
    presumed_end: PresumedEnd | None = None
    """Where it seems to have ended, though only captured steps show it; None: nothing says so."""
    is_about: bool = False
    """Whether `since_step` is only about where it began, as it came slowly."""
    proof: Proof | None = None
    """What an experiment proves of other rules; None: it is no experiment."""
    waits: bool = False
    """Whether only more steps or other tokens are lacking, and nothing that could be recorded."""

    def ended_after(self, steps: Iterable[int], last: int, silent: int = ENDED_AFTER) -> Evidence:
        """Return a copy that ended if more than `silent` of the steps follow the last one that
        shows it."""
        after = sum(step > last for step in steps)
        if after <= silent:
            return self
        text = f"last seen in step {last}; {counted(after, 'step')} without it"
        return dataclasses.replace(self, last_step=last, against=(*self.against, text))

    def with_before(self, before: EarlierSymptom) -> Evidence:
        """Return a copy that also names an earlier attempt with the symptom."""
        if self.last_step is not None:
            return dataclasses.replace(self, before=before)  # its sentences are of that time
        if self.verdict == "found":
            return dataclasses.replace(self, supports=(*self.supports, before.text), before=before)
        return dataclasses.replace(self, against=(*self.against, before.text), before=before)


def not_measured(reason: str, *, waits: bool = False) -> Evidence:
    """Return that the history lacks the data; `waits`: nothing more can be recorded."""
    return Evidence("not measured", against=(reason,), waits=waits)


def not_found(*against: str) -> Evidence:
    """Return that the symptom was not found, and why."""
    return Evidence("not found", against=against)


def listed(ranks: Iterable[RankKey]) -> str:
    """Return ranks as text, such as `actor 0-3, 7, critic 0`."""
    return ", ".join(
        f"{role} {numbers_text(sorted({*own}))}" for role, own in grouped(ranks).items()
    )


_SURE: Final = 2.0
"""Standard errors in Wilson's bounds of a rate (Probable Inference, 1927): 97.7 % on one side."""


class Period(NamedTuple):
    """The newest stretch of a series in which a symptom holds without a break."""

    first: int
    """Index of the first value that shows it."""
    share: float
    """Share of the newest trials that show it, 0 to 1."""
    last: int | None = None
    """Index of the last value that shows it, where it ended; None: it lasts."""


def rate_period(marked: Float64, trials: Float64, share: float, window: int) -> Period | None:
    """Return the newest period for which a rate was over a share; None: it never was.

    It begins where Wilson's lower bound of the rate over the newest `window` values exceeds the
    share. It ends where the upper bound is below the share, or no value is marked any more. Between
    the two it continues, so that a rate near the share does not flicker. Its first value lies in
    the window where it began: from there on, the marks exceed the share of the trials by most.
    Later values never move it while the period lasts.

    Args:
        marked: number of trials of each value that show the symptom.
        trials: number of trials of each value.
        share: the rate that is too high.
        window: number of values that a rate is taken over.
    """
    ends = np.arange(1, len(marked) + 1)
    begins = np.maximum(ends - window, 0)
    sums = [np.concatenate([[0.0], np.cumsum(each)]) for each in (marked, trials)]
    count, total = (each[ends] - each[begins] for each in sums)
    excess = sums[0] - share * sums[1]
    center, width = count + _SURE**2 / 2.0, total + _SURE**2
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = count * (total - count) / total + _SURE**2 / 4.0
    half = _SURE * np.sqrt(np.nan_to_num(spread))
    is_over = (total > 0.0) & (center - half > share * width)
    is_under = (count == 0.0) | (center + half < share * width)
    first, over_from, ended = None, 0, None
    for at in range(len(marked)):
        if first is None and is_over[at]:
            begin = max(int(begins[at]), over_from)
            first = at - int(np.argmin(excess[begin : at + 1][::-1]))
        elif first is not None and is_under[at]:
            last = first + int(np.flatnonzero(marked[first : at + 1])[-1])
            share = float(marked[first : last + 1].sum() / trials[first : last + 1].sum())
            ended = Period(first, share, last)
            first, over_from = None, at + 1
    return ended if first is None else Period(first, float(count[-1] / total[-1]))


def event_period(marks: Bool, window: int) -> Period | None:
    """Return the newest period with an event in each `window` values; None: there is no event."""
    events = np.flatnonzero(marks)
    if not len(events):
        return None
    breaks = np.flatnonzero(np.diff(events) > window)
    first, last = int(events[breaks[-1] + 1] if len(breaks) else events[0]), int(events[-1])
    if len(marks) - 1 - last >= window:
        return Period(first, float(marks[first : last + 1].mean()), last)
    return Period(first, float(marks[-window:].mean()))


@dataclasses.dataclass(frozen=True)
class Series:
    """A number over the steps that have it, ascending; arrays of one length.

    Attributes:
        name: of the metric or scalar.
        steps: the steps.
        attempts: the number of each step's attempt.
        values: float64, NaN and infinities included.
    """

    name: str
    steps: Int64
    attempts: Int64
    values: Float64

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> Series:
        """The steps whose value is finite."""
        return self.where(np.isfinite(self.values))

    def where(self, chosen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Series:
        """Return the steps for which `chosen` (bool, of the same length) is true."""
        return Series(self.name, self.steps[chosen], self.attempts[chosen], self.values[chosen])

    def of_attempt(self, attempt: int) -> Series:
        """Return the steps of one attempt."""
        return self.where(self.attempts == attempt)

    def newest(self, count: int) -> Series:
        """Return the newest `count` steps."""
        return Series(self.name, self.steps[-count:], self.attempts[-count:], self.values[-count:])


def beyond(series: Series, bound: float, steps: int, share: float) -> Evidence:
    """Return whether a number is over a bound in more than a share of the newest steps."""
    finite = series.finite
    if not len(finite):
        return not_measured(f"no step has a finite {series.name}")
    newest = finite.newest(steps)
    over = newest.values > bound
    text = (
        f"{series.name} is over {short(bound)} in {int(over.sum())} of the newest {len(newest)} "
        f"steps (median {short(float(np.median(newest.values)))}, largest "
        f"{short(float(newest.values.max()))} in step {newest.steps[newest.values.argmax()]})"
    )
    return of_rate(finite.steps, finite.values > bound, None, share, steps, text)


def of_rate(
    steps: Int64,
    marked: np.ndarray[tuple[int, ...], np.dtype[Any]],
    trials: np.ndarray[tuple[int, ...], np.dtype[Any]] | None,
    share: float,
    window: int,
    *texts: str,
    unit: str = "step",
) -> Evidence:
    """Return whether a rate is over a share, and since which step; see `rate_period`.

    Args:
        steps: the steps.
        marked: number of trials of each step that show the symptom.
        trials: number of trials of each step; None: one.
        share: the rate that is too high.
        window: number of newest steps that a rate is taken over.
        texts: sentences on the newest of them.
        unit: what a trial is.
    """
    given = np.ones(len(steps)) if trials is None else trials.astype(np.float64)
    period = rate_period(marked.astype(np.float64), given, share, window)
    if period is None:
        return not_found(*texts)
    since = int(steps[period.first])
    if period.last is not None:
        own = slice(period.first, period.last + 1)
        count = Count(int(marked[own].sum()), int(given[own].sum()), unit)
        evidence = Evidence("found", period.share, since, "", texts, count=count)
        return evidence.ended_after(steps.tolist(), int(steps[period.last]), 0)
    against: tuple[str, ...] = ()
    if period.share < share:
        against = (
            f"the share in the newest {counted(min(window, len(marked)), 'step')}, "
            f"{period.share:.0%}, is below the limit of {share:.0%}, but not by more than chance: "
            "the symptom continues",
        )
    count = Count(int(marked[period.first :].sum()), int(given[period.first :].sum()), unit)
    return Evidence("found", period.share, since, "", texts, against, count=count)


def kendall(values: Float64) -> float:
    """Return Kendall's tau of values and their order, ties counted as neither; NaN below two."""
    count = len(values)
    if count < 2:
        return math.nan
    if count > 500:  # of every k-th value: the sum is quadratic
        values = values[:: -(-count // 500)]
        count = len(values)
    signs = np.sign(values[None, :] - values[:, None])
    upper = np.triu_indices(count, 1)
    return float(signs[upper].sum() / (count * (count - 1) / 2))


def spearman(values: Float64) -> float:
    """Return Spearman's rank correlation of values and their order, ties at their mean rank."""
    order = np.arange(len(values), dtype=np.float64)
    ranks = _mean_ranks(values)
    spread = float(ranks.std() * order.std())
    if spread == 0.0:
        return 0.0
    return float(((ranks - ranks.mean()) * (order - order.mean())).mean() / spread)


def _mean_ranks(values: Float64) -> Float64:
    _unique, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means = ends - (counts + 1) / 2
    ranks: Float64 = means[where.reshape(-1)].astype(np.float64)
    return ranks


def spread(values: Float64) -> float:
    """Return a robust standard deviation: 1.4826 times the median absolute deviation."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values)))) if len(values) else 0.0


def median(values: Iterable[float]) -> float:
    """Return the median of the values that are not NaN; NaN where there is none."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan


def medians_of_others(values: Float64) -> Float64:
    """Return for each of several values the median of the others."""
    rest = len(values) - 1
    order = np.argsort(values)
    place = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values))
    ordered = values[order]

    def other(at: int) -> Float64:
        """Return the `at`-th of the others, ascending."""
        found: Float64 = np.where(place > at, ordered[at], ordered[at + 1])
        return found

    usual: Float64 = (other((rest - 1) // 2) + other(rest // 2)) / 2.0
    return usual


def short(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:.4g}"


def times(large: float, small: float) -> str:
    """Return how many times one number is another, as text."""
    return f"{large / small:.1f} times" if small else "from 0"
