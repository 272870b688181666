"""Judgement of a pair of arms: is its difference above what is usual?

Pure: a measure and those of earlier versions in, a verdict out. Four references exist, and the
first of these that is known decides:

- the same pair of the same engine instance in earlier versions;
- the same pair of other engine instances, in earlier versions and in this one;
- the rounding of the dtypes, where a version is the first.

In addition, the first versions of a run limit what grows slowly, and the engine's own noise, from
scoring the same tokens twice, is never a difference. Versions that differ are no reference.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_service.core.canary.measures import Measure

AGREES, DIFFERS, EQUAL, NOT_COMPARED = "agrees", "differs", "equal", "not compared"
VERDICTS: Final = (DIFFERS, EQUAL, AGREES, NOT_COMPARED)
"""The worst first; `equal`: two arms that should differ do not."""

HISTORY, ENGINES, ROUNDING, FIRST, NOISE = (
    "earlier versions", "other engines", "rounding", "first versions", "engine twice",
)  # fmt: skip
"""What a bound was derived from."""

EXACT: Final = 1e-5
"""Mean |d| in nats up to which log-probs are equal. Float32 log-probs of -16 are 1e-6 apart. Two
float32 implementations of a model of two layers were measured 7e-7 apart."""

ROUNDING_BOUNDS: Final[Mapping[str, float]] = {
    "float32": 0.01, "float16": 0.03, "bfloat16": 0.15, "8 bits": 0.4,
}  # fmt: skip
"""Dtype -> mean |d| in nats above which no rounding of it explains a difference. In bfloat16, vLLM
and transformers were measured 0.008 apart (dense) and 0.012 (mixture of experts) with two layers;
whole models are published at 0.01 to 0.05. Other weights make it 0.3 and more."""

_DTYPES: Final[Mapping[str, str]] = {
    "float64": "float32", "float32": "float32", "fp32": "float32", "float16": "float16",
    "fp16": "float16", "half": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16",
}  # fmt: skip

_TYPICAL: Final = 0.2
"""Share of a bound of `ROUNDING_BOUNDS` that rounding alone usually reaches."""

REMEMBERED: Final = 32
"""Number of earlier versions that a version is compared with."""
FIRST_VERSIONS: Final = 8
"""Number of versions at a run's begin that limit slow growth."""
_GROWN: Final = 4.0
"""How many times the median of the first versions a later one may reach."""
_FEW: Final[Mapping[int, float]] = {1: 4.0, 2: 3.0, 3: 3.0}
_USUAL: Final = 2.0
"""How many times the largest earlier mean a version may reach; `_FEW`: after so few versions."""
_MANY: Final = 4
"""Number of earlier versions from which their spread narrows the bound."""
_SPREADS: Final = 6.0
_LEAST: Final = 1.25
_OF_NOISE: Final = 2.0
_OF_SEQUENCE: Final = 1.5
_UNMEASURED_SEQUENCE: Final = 3.0
_OWN: Final = 3
"""Earlier versions of an engine instance that suffice without those of the others."""


class Past(NamedTuple):
    """A pair in an earlier version that did not differ.

    Attributes:
        mean: mean |d| in nats.
        error: its standard error; None: unknown.
        sequences: mean |d| of each sequence; None: no token counted.
        has_gaps: whether some log-probs were not finite.
    """

    mean: float
    error: float | None
    sequences: tuple[float | None, ...]
    has_gaps: bool


class Reference(NamedTuple):
    """What a pair is compared with.

    Attributes:
        own: of the same engine instance, the newest last.
        others: of other instances in earlier versions.
        beside: mean |d| of other instances in the same version.
        first: of the first versions.
        noise: mean |d| of the engine scoring twice; None: not measured.
        rounding: a key of `ROUNDING_BOUNDS`.
    """

    own: Sequence[Past] = ()
    others: Sequence[Past] = ()
    beside: Sequence[float] = ()
    first: Sequence[Past] = ()
    noise: float | None = None
    rounding: str = "bfloat16"


class Judgement(NamedTuple):
    """The verdict on a pair.

    Attributes:
        verdict: of `VERDICTS`.
        bound: mean |d| in nats above which the pair differs.
        bound_of: what the bound was derived from.
        usual: median of the mean |d| that it is compared with; None: there is none.
        versions: number of earlier versions that it is compared with.
        sequences: the sequences that alone are above their bound.
        is_not_finite: whether log-probs are missing that earlier versions had.
    """

    verdict: str
    bound: float
    bound_of: str
    usual: float | None
    versions: int
    sequences: tuple[int, ...] = ()
    is_not_finite: bool = False


class _Bound(NamedTuple):
    value: float
    of: str


def rounding_of(*dtypes: object) -> str:
    """Return the coarsest of some dtypes as a key of `ROUNDING_BOUNDS`; unknown ones are left out.

    Without a known one it is bfloat16, in which models usually run.
    """
    order = [*ROUNDING_BOUNDS]
    found = []
    for dtype in dtypes:
        text = str(dtype or "").lower().removeprefix("torch.")
        if text in _DTYPES:
            found.append(_DTYPES[text])
        elif "8" in text and ("int" in text or "fp" in text or "float" in text):
            found.append("8 bits")
    return max(found, key=order.index, default="bfloat16")


def judge(measure: Measure, against: Reference) -> Judgement:
    """Judge two arms that should be equal."""
    own = against.own if len(against.own) >= _OWN else [*against.own, *against.others]
    bound = _bound(own, against, has_slope=measure.slope is not None)
    usual = statistics.median(each.mean for each in own) if own else None
    judged = Judgement(NOT_COMPARED, bound.value, bound.of, usual, len(own))
    is_new_gap = bool(own) and not any(each.has_gaps for each in own)
    is_not_finite = measure.not_finite > 0 and (is_new_gap or measure.mean is None)
    if is_not_finite:
        return judged._replace(verdict=DIFFERS, is_not_finite=True)
    if measure.mean is None:
        return judged
    is_exact = usual is not None and usual <= EXACT
    odd = tuple(
        at
        for at, each in enumerate(measure.sequences)
        if _size(each["tokens"], each["mean"], each["max"], is_exact=is_exact)
        > _sequence_bound(at, own, bound)
    )
    size = _size(measure.tokens, measure.mean, measure.max, is_exact=is_exact)
    differs = size > bound.value or odd
    return judged._replace(verdict=DIFFERS if differs else AGREES, sequences=odd)


def _size(tokens: int, mean: float | None, worst: float | None, *, is_exact: bool) -> float:
    """Return mean |d|, without the worst token unless earlier versions were exact.

    Where there is noise, one token may be far off: with another expert, it gets other log-probs.
    """
    if mean is None or worst is None:
        return 0.0
    if is_exact:
        return mean
    return (mean * tokens - worst) / (tokens - 1) if tokens > 1 else 0.0


def typical(rounding: str) -> float:
    """Return the mean |d| in nats that rounding usually reaches between two implementations."""
    return _TYPICAL * ROUNDING_BOUNDS[rounding]


def _bound(own: Sequence[Past], against: Reference, *, has_slope: bool) -> _Bound:
    # Rounding has no slope.
    rounding = typical if has_slope else ROUNDING_BOUNDS.__getitem__
    found = _Bound(rounding(against.rounding), ROUNDING)
    if own:
        found = _Bound(_above(own), HISTORY)
    elif against.beside:
        found = min(found, _Bound(_FEW[1] * max(against.beside), ENGINES))
    if len(against.first) >= _OWN:
        found = min(
            found, _Bound(_GROWN * statistics.median(each.mean for each in against.first), FIRST)
        )
    if against.noise is not None:
        found = max(found, _Bound(_OF_NOISE * against.noise, NOISE))
    return max(found, _Bound(EXACT, ROUNDING))


def _above(past: Sequence[Past]) -> float:
    means = [each.mean for each in past]
    top = max(means)
    bound = _factor(past) * top
    if len(past) >= _MANY:
        middle = statistics.median(means)
        # 1.4826 of it is the standard deviation of a normal distribution.
        spread = 1.4826 * statistics.median(abs(mean - middle) for mean in means)
        errors = [each.error for each in past if each.error is not None]
        spread = max(spread, statistics.median(errors) if errors else 0.0)
        bound = min(bound, max(_LEAST * top, middle + _SPREADS * spread))
    return bound


def _factor(past: Sequence[Past]) -> float:
    return _FEW.get(len(past), _USUAL)


def _sequence_bound(at: int, past: Sequence[Past], bound: _Bound) -> float:
    """Return the mean |d| above which one sequence differs, though the mean of all may not."""
    if not past:
        return _UNMEASURED_SEQUENCE * bound.value
    own = [each.sequences[at] for each in past if at < len(each.sequences)]
    top = max(
        max((mean for mean in own if mean is not None), default=0.0), max(p.mean for p in past)
    )
    return max(_OF_SEQUENCE * _factor(past) * top, bound.value)


def judge_unequal(measure: Measure, expected: float | None, against: Reference) -> Judgement:
    """Judge the engine's arms with and without its adapter, which must differ.

    Equal arms are wrong if earlier versions differed, or if the trainer's log-probs differ from
    those without the adapter. Otherwise the adapter may not have learned anything yet.

    Args:
        measure: of the two arms.
        expected: mean |d| in nats between the trainer and the engine without the adapter, less what
            is usual between trainer and engine; None: unknown.
        against: earlier versions, and the engine's noise.
    """
    bound = max(EXACT, _OF_NOISE * (against.noise or 0.0))
    usual = statistics.median(each.mean for each in against.own) if against.own else None
    judged = Judgement(NOT_COMPARED, bound, NOISE, usual, len(against.own))
    if measure.mean is None:
        return judged
    if measure.mean > bound:
        return judged._replace(verdict=AGREES)
    differed = usual is not None and usual > bound
    is_wrong = differed or (expected is not None and expected > 0.0)
    return judged._replace(verdict=EQUAL if is_wrong else NOT_COMPARED)
