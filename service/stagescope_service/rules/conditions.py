"""The conditions of a rule on a metric: bounds, previous steps, the noise floor.

Pure: arrays in, arrays out, one column per series (the metric of the step, of one round, of one
rank, ...). NaN means "no such value": no comparison with it holds.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from stagescope_service.rules import fields

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

HISTORY: Final = 256
"""Maximum previous steps that a condition uses; the run's median is over as many."""
MIN_FOR_MEDIAN: Final = 3
MIN_FOR_Z: Final = 5
MOST_ERRORS: Final = 30.0
"""Standard errors beyond which a normal number's chance is 0 in float64."""

COMPARISONS: Final[Mapping[str, Callable[[Float64, float], Bool]]] = {
    ">": lambda values, bound: values > bound,
    "<": lambda values, bound: values < bound,
    ">=": lambda values, bound: values >= bound,
    "<=": lambda values, bound: values <= bound,
}
EXPECTED: Final = (
    "'>', '<', '>=' or '<=' with a number, 'non_finite: true', 'median_ratio: k', "
    "'noise_ratio: k', 'z_score: {over: k, steps: n}', 'standard_errors: k'; all of them must hold"
)


@dataclasses.dataclass(frozen=True)
class ZScore(fields.Declared):
    """A distance from the mean of the last `steps` steps, in their standard deviations (n - 1)."""

    EXPECTED = "{over: k, steps: n}"

    over: Annotated[float, fields.ratio]
    steps: Annotated[int, fields.count(2, HISTORY)] = 50


@dataclasses.dataclass(frozen=True)
class When(fields.Declared):
    """The conditions of a rule; all given ones must hold.

    Attributes:
        non_finite: The value is NaN or infinite.
        median_ratio: The value exceeds this multiple of the median of the run's previous steps.
        noise_ratio: The value exceeds this multiple of the same metric of the noise floor.
        standard_errors: The value exceeds each bound above it ('>', the median's, the noise
            floor's) by this number of standard errors of a mean equal to the bound. If a step has
            several series, the number grows: normal noise of any series then exceeds it as rarely
            as noise of one alone.
        z_score: The value is further from the mean of the last steps than this, on either side.
    """

    EXPECTED = EXPECTED

    above: Annotated[float | None, fields.number, ">"] = None
    below: Annotated[float | None, fields.number, "<"] = None
    at_least: Annotated[float | None, fields.number, ">="] = None
    at_most: Annotated[float | None, fields.number, "<="] = None
    non_finite: Annotated[bool, fields.flag] = False
    median_ratio: Annotated[float | None, fields.ratio] = None
    noise_ratio: Annotated[float | None, fields.ratio] = None
    standard_errors: Annotated[float | None, fields.ratio] = None
    z_score: Annotated[ZScore | None, ZScore.parse] = None

    @classmethod
    def parse(cls, value: object, field: str) -> When:
        """Read the `when` of a rule."""
        made = super().parse(value, field)
        errors = made.standard_errors
        is_above = {">", ">="} & {name for name, _ in made.bounds}
        if errors is not None and not (
            errors <= MOST_ERRORS and (is_above or made.median_ratio or made.noise_ratio)
        ):
            expected = f"a number up to {MOST_ERRORS:g}, with '>', 'median_ratio' or 'noise_ratio'"
            raise fields.wrong(f"{field}.standard_errors", errors, expected)
        if made == cls():
            raise fields.wrong(field, value, EXPECTED)
        return made

    @property
    def bounds(self) -> list[tuple[str, float]]:
        """(comparison, number) of the given bounds."""
        given = zip(COMPARISONS, (self.above, self.below, self.at_least, self.at_most), strict=True)
        return [(name, bound) for name, bound in given if bound is not None]

    @property
    def needs_history(self) -> bool:
        """Whether the conditions use previous steps."""
        return self.median_ratio is not None or self.z_score is not None

    @property
    def lower_is_worse(self) -> bool:
        """Whether a smaller value is the worse one."""
        return bool(self.bounds) and self.bounds[0][0] in ("<", "<=")

    def evaluate(
        self, values: Float64, noise: Float64, history: Float64, errors: Float64 | None = None
    ) -> ConditionResult:
        """Evaluate the conditions for each series.

        Args:
            values: [series].
            noise: [series], the same metric of the noise floor.
            history: [steps, series], the previous steps, the newest last.
            errors: [series], the standard error of each value over the value; None: unknown.
        """
        numbers: dict[str, Float64] = {}
        holds = np.ones(values.shape, bool)
        for name, bound in self.bounds:
            holds &= COMPARISONS[name](values, bound)
        if self.non_finite:
            holds &= ~np.isfinite(values)
        if self.median_ratio is not None:
            median = numbers["median"] = _median(history)
            holds &= values > self.median_ratio * median
        if self.noise_ratio is not None:
            numbers["noise_floor"] = noise
            holds &= values > self.noise_ratio * noise
        if self.z_score is not None:
            z = numbers["z_score"] = _z_scores(values, history[-self.z_score.steps :])
            holds &= np.abs(z) > self.z_score.over
        if self.standard_errors is not None:
            relative = np.full(values.shape, np.nan) if errors is None else errors
            reference = self._largest_bound(numbers, noise)
            numbers["standard_error"] = reference * relative
            beyond = _for_each_of(self.standard_errors, int(np.isfinite(values).sum()))
            holds &= values > reference * (1.0 + beyond * relative)
        return ConditionResult(holds, numbers)

    def _largest_bound(self, numbers: Mapping[str, Float64], noise: Float64) -> Float64:
        """Return the largest number that the value of each series has to exceed."""
        found = np.full(noise.shape, -np.inf)
        for name, bound in self.bounds:
            found = np.maximum(found, bound) if name in (">", ">=") else found
        if self.median_ratio is not None:
            found = np.maximum(found, self.median_ratio * numbers["median"])
        if self.noise_ratio is not None:
            found = np.maximum(found, self.noise_ratio * noise)
        return found


def _for_each_of(standard_errors: float, series: int) -> float:
    """Return the number of standard errors for several series: normal noise of any of them exceeds
    it as rarely as noise of one exceeds `standard_errors`."""
    normal = NormalDist()
    return -normal.inv_cdf(normal.cdf(-standard_errors) / max(series, 1))


@dataclasses.dataclass(frozen=True)
class ConditionResult:
    """The series that meet a rule's conditions, and the reference numbers they were compared to."""

    holds: Bool
    numbers: Mapping[str, Float64]


def _median(history: Float64) -> Float64:
    """Return the median of each series' finite values, NaN if there are too few."""
    finite, enough = _finite(history, MIN_FOR_MEDIAN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # for series of NaN only
        median = np.nanmedian(finite, axis=0) if len(finite) else np.full(enough.shape, np.nan)
    return np.where(enough, median, np.nan)


def _z_scores(values: Float64, history: Float64) -> Float64:
    """Return each value's distance from the previous steps' mean, in standard deviations."""
    finite, enough = _finite(history, MIN_FOR_Z)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        if not len(finite):
            return np.full(values.shape, np.nan)
        off = values - np.nanmean(finite, axis=0)
        std = np.nanstd(finite, axis=0, ddof=1)
        # A change of a constant metric is infinitely many deviations; rounding of the
        # mean is not a change.
        still = np.nanmax(finite, axis=0) == np.nanmin(finite, axis=0)
        moved = values != finite[-1]
        score = np.where(still, np.where(moved, np.copysign(np.inf, off), 0.0), off / std)
    return np.where(enough & np.isfinite(values), score, np.nan)


def _finite(history: Float64, least: int) -> tuple[Float64, Bool]:
    finite = np.where(np.isfinite(history), history, np.nan)
    return finite, np.isfinite(finite).sum(axis=0) >= least
