"""Losses and metrics beside the tensors that they are computed from.

A loss is a mean over tokens. Where no log-prob differs by more than noise, the loss may still be
over its line of 1e-5: it inherits the noise of its inputs. How much of it, their own differences d
tell: with weights a (advantages) the mean moves by a * mean(d), and by a random part of the order
a * rms(d) / sqrt(n). What is within these bounds is no difference of its own; what is beyond them,
such as another entropy coefficient, is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from stagescope_service.compare.flow import COUNTED, LOG_PROBS
from stagescope_service.compare.results import PlaceResult, TensorResult, Verdict
from stagescope_service.compare.tolerances import BY_DTYPE, COARSE_FIRST, EXACT, Tolerance
from stagescope_service.statistics.pairwise import Pairwise

_INPUTS: Final = LOG_PROBS | {
    "entropy", "values", "advantages", "prob_ratio", "elementwise_loss", "returns",
}  # fmt: skip
"""Tensors by token that losses and metrics are means of."""
_WEIGHTED: Final = LOG_PROBS | {"prob_ratio"}
"""Those that a policy loss multiplies by the advantages."""
_DEVIATIONS: Final = 4.0
"""Of the random part: tokens of short sequences may weigh more than others."""
_LOSS: Final = "loss"
_DOUBTFUL: Final = (Verdict.DIFFERENT, Verdict.NOT_COMPARABLE)


def judge_derived(tensors: Sequence[TensorResult]) -> tuple[TensorResult, ...]:
    """Return the results with losses and metrics judged by the noise of their inputs.

    Only where a step's inputs are there, all of them are the same or within noise, and not all are
    the same; a tolerance that the user gave stands.
    """
    inputs: dict[int | None, list[TensorResult]] = {}
    for tensor in tensors:
        if tensor.name in _INPUTS and tensor.samples:
            inputs.setdefault(tensor.step, []).append(tensor)
    return tuple(
        _judged(tensor, inputs.get(tensor.step, ())) if _is_in_question(tensor) else tensor
        for tensor in tensors
    )


def _is_in_question(tensor: TensorResult) -> bool:
    return (
        tensor.section in COUNTED
        and not tensor.samples
        and tensor.verdict is Verdict.DIFFERENT
        and not tensor.tolerance.is_given
    )


def _judged(tensor: TensorResult, inputs: Sequence[TensorResult]) -> TensorResult:
    noisy = [each for each in inputs if each.verdict is Verdict.WITHIN_NOISE]
    if not noisy or any(each.verdict in _DOUBTFUL for each in inputs):
        return tensor
    largest = [_largest(each.found) for each in inputs if each.name == "advantages"]
    weight = max(1.0, *largest) if largest else 1.0
    count = max(len(tensor.places), 1)
    bounds = [
        _moved(each.found, count) * (weight if each.name in _WEIGHTED else 1.0) for each in noisy
    ]
    moved = max(bounds)
    source = noisy[bounds.index(moved)]
    tags = {tag for each in noisy for pair in each.dtypes for tag in pair}
    coarse = EXACT
    if tensor.section != _LOSS:  # other metrics are not means of these alone
        coarse = next((BY_DTYPE[tag] for tag in COARSE_FIRST if tag in tags), EXACT)
    allowed = Tolerance(
        tensor.tolerance.atol + moved + coarse.atol, max(tensor.tolerance.rtol, coarse.rtol),
        reason=f"{tensor.tolerance.reason}, and the noise of {source.section}/{source.name}",
    )  # fmt: skip
    places = tuple(_place(each, allowed) for each in tensor.places)
    if any(each.verdict is Verdict.DIFFERENT for each in places):
        return tensor
    reason = (
        f"{tensor.reason}; what it is computed from is within noise, which moves it so far "
        f"({source.section}/{source.name}: mean |d| {source.found.mean_abs:.3g})"
    )
    return dataclasses.replace(
        tensor, verdict=Verdict.WITHIN_NOISE, reason=reason, tolerance=allowed, places=places
    )


def _place(place: PlaceResult, allowed: Tolerance) -> PlaceResult:
    found = place.piece.found
    bound = allowed.atol + allowed.rtol * _largest(found)
    is_noise = not found.disagreeing_non_finite and found.max_abs <= bound
    if place.verdict is not Verdict.DIFFERENT or not is_noise:
        return place
    return PlaceResult(Verdict.WITHIN_NOISE, place.piece)


def _moved(found: Pairwise, places: int) -> float:
    """Return by how much the mean of one of `places` parts of the values may have moved."""
    tokens = max(found.finite / places, 1.0)
    return abs(found.mean_difference) + _DEVIATIONS * found.root_mean_square / math.sqrt(tokens)


def _largest(found: Pairwise) -> float:
    """Return the largest |value| of both sides."""
    if not found.finite:
        return 0.0
    return max(abs(found.side(side)[end]) for side in "xy" for end in ("min", "max"))
