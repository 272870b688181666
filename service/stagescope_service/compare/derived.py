"""Judge losses and metrics by the noise of the tensors that they are computed from.

A loss is a mean over tokens. If no log-prob differs by more than noise, the loss may still differ
by more than its tolerance of 1e-5, since it inherits the noise of its inputs. With differences d of
n inputs and weights a (advantages), the mean moves by a * mean(d), and by a random part of the
order a * rms(d) / sqrt(n). A difference within these bounds is noise; a difference beyond them,
such as from another entropy coefficient, is not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from stagescope_service.compare.flow import LOG_PROBS, LOSSES, NUMBER_SECTIONS
from stagescope_service.compare.results import ShardResult, TensorResult, Verdict
from stagescope_service.compare.tolerances import BY_DTYPE, COARSE_FIRST, EXACT, Tolerance
from stagescope_service.statistics.pairwise import Pairwise

_INPUTS: Final = LOG_PROBS | {
    "entropy", "values", "advantages", "prob_ratio", "elementwise_loss", "returns",
}  # fmt: skip
"""Tensors by token of which losses and metrics are means."""
_WEIGHTED: Final = LOG_PROBS | {"prob_ratio"}
"""Inputs that a policy loss multiplies by the advantages."""
_DEVIATIONS: Final = 4.0
"""Allowed multiple of the random part: tokens of short sequences may have larger weights."""
_METRICS: Final = "metrics"
_DOUBTFUL: Final = (Verdict.DIFFERENT, Verdict.NOT_COMPARABLE)


def judge_derived(tensors: Sequence[TensorResult]) -> tuple[TensorResult, ...]:
    """Return the results with losses and metrics judged by the noise of their inputs.

    This applies if all inputs of a step are the same or within noise, and not all are the same.
    Tolerances that the user set stay in force.
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
        (tensor.section in NUMBER_SECTIONS or tensor.name in LOSSES)
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
    count = max(len(tensor.shards), 1)
    bounds = [
        _expected_shift(each.found, count) * (weight if each.name in _WEIGHTED else 1.0)
        for each in noisy
    ]
    shift = max(bounds)
    source = noisy[bounds.index(shift)]
    tags = {tag for each in noisy for pair in each.dtypes for tag in pair}
    coarse = EXACT
    if tensor.section == _METRICS:  # they may be means of more than these
        coarse = next((BY_DTYPE[tag] for tag in COARSE_FIRST if tag in tags), EXACT)
    allowed = Tolerance(
        tensor.tolerance.atol + shift + coarse.atol, max(tensor.tolerance.rtol, coarse.rtol),
        reason=f"{tensor.tolerance.reason}, and the noise of {source.section}/{source.name}",
    )  # fmt: skip
    shards = tuple(_judged_shard(each, allowed) for each in tensor.shards)
    if any(each.verdict is Verdict.DIFFERENT for each in shards):
        return tensor
    reason = (
        f"{tensor.reason}; its inputs are within noise, which explains the difference "
        f"({source.section}/{source.name}: mean |d| {source.found.mean_abs:.3g})"
    )
    return dataclasses.replace(
        tensor, verdict=Verdict.WITHIN_NOISE, reason=reason, tolerance=allowed, shards=shards
    )


def _judged_shard(shard: ShardResult, allowed: Tolerance) -> ShardResult:
    found = shard.comparison.statistics
    bound = allowed.atol + allowed.rtol * _largest(found)
    is_noise = not found.disagreeing_non_finite and found.max_abs <= bound
    if shard.verdict is not Verdict.DIFFERENT or not is_noise:
        return shard
    return ShardResult(Verdict.WITHIN_NOISE, shard.comparison)


def _expected_shift(found: Pairwise, shards: int) -> float:
    """Return how far noise may move the mean of a shard's values, of which there are `shards`."""
    tokens = max(found.finite / shards, 1.0)
    return abs(found.mean_difference) + _DEVIATIONS * found.root_mean_square / math.sqrt(tokens)


def _largest(found: Pairwise) -> float:
    """Return the largest |value| of both sides."""
    if not found.finite:
        return 0.0
    return max(abs(found.side(side)[end]) for side in "xy" for end in ("min", "max"))
