"""Assemble the comparisons of all shards into one result a tensor, with its verdict.

A loss is a mean over tokens. If no log-prob differs by more than noise, the loss may still differ
by more than its tolerance of 1e-5, since it inherits the noise of its inputs. Let d be the
differences of n inputs, and a their weights (advantages). The mean moves by a * mean(d), and by a
random part of the order a * rms(d) / sqrt(n). A difference within these bounds is noise. A larger
difference, such as from another entropy coefficient, is not.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_service.compare import flow
from stagescope_service.compare.flow import LOG_PROBS, LOSSES, NUMBER_SECTIONS
from stagescope_service.compare.pairing.shard_comparison import ShardComparison
from stagescope_service.compare.pairing.shard_index import BY_GROUP_AND_RUN, BY_SAMPLE_ID
from stagescope_service.compare.pairing.token_alignment import (
    COMPARED,
    LENGTHS_DIFFER,
    TOKENS_DIFFER,
    ValueLocation,
)
from stagescope_service.compare.results import ShardResult, TensorResult, Verdict
from stagescope_service.compare.task_runner import BatchPass
from stagescope_service.compare.tolerances import (
    BY_DTYPE,
    COARSE_FIRST,
    EXACT,
    NoiseFloor,
    Tolerance,
    Tolerances,
    is_noise,
)
from stagescope_service.statistics.pairwise import Pairwise
from stagescope_wire.schema import Part

PAIRED: Final = ("compared", "tokens differ", "lengths differ")
"""Counts of `TensorResult.samples` that add up to the trajectories that both sides have."""


class _Criteria(NamedTuple):
    """Inputs of a verdict besides the numbers; see `assemble`."""

    tolerances: Tolerances
    noise_floor: NoiseFloor | None
    uncomparable_reason: str


class _TensorKey(NamedTuple):
    step: int | None
    section: str
    name: str


def assemble(
    comparisons: Iterable[ShardComparison],
    tolerances: Tolerances,
    noise_floor: NoiseFloor | None,
    *,
    uncomparable_reason: str = "",
) -> tuple[TensorResult, ...]:
    """Return a result for each tensor, by step and in the order of the flow.

    Args:
        comparisons: comparisons of all shards.
        tolerances: tolerances of the tensors.
        noise_floor: distance of log-probs that were computed twice, None if unknown.
        uncomparable_reason: why rows that are paired by their location alone cannot be compared,
            empty if they can.
    """
    criteria = _Criteria(tolerances, noise_floor, uncomparable_reason)
    grouped: dict[_TensorKey, list[ShardComparison]] = collections.defaultdict(list)
    for each in comparisons:
        grouped[_TensorKey(each.locations[0].step, each.section, each.name)].append(each)
    results = [_tensor_result(key, shards, criteria) for key, shards in grouped.items()]
    return tuple(sorted(results, key=_result_order))


def with_totals(
    tensors: Sequence[TensorResult], unmatched: Mapping[int | None, Collection[str]]
) -> tuple[tuple[TensorResult, ...], int]:
    """Add its step's total number of trajectories to each tensor; also return it for all steps.

    Args:
        tensors: tensors of all steps.
        unmatched: step -> trajectories that only one side has.
    """
    paired: dict[int | None, int] = {}
    for tensor in tensors:
        rows = sum(tensor.samples.get(name, 0) for name in PAIRED)
        paired[tensor.step] = max(rows, paired.get(tensor.step, 0))
    total = {step: count + len(unmatched.get(step, ())) for step, count in paired.items()}
    with_total = tuple(
        dataclasses.replace(t, samples={**t.samples, "total": total[t.step]}) if t.samples else t
        for t in tensors
    )
    return with_total, sum(total.values())


def heaviest(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the heaviest verdict, `same` if there are none."""
    return max(verdicts, key=list(Verdict).index, default=Verdict.SAME)


def _result_order(result: TensorResult) -> tuple[int, tuple[int, int, str]]:
    step = -1 if result.step is None else result.step
    return (step, flow.sort_key(result.section, result.name))


def _tensor_result(
    key: _TensorKey, comparisons: list[ShardComparison], criteria: _Criteria
) -> TensorResult:
    step, section, name = key
    comparisons.sort(key=_location_order)
    shards = tuple(ShardResult(_verdict(each, criteria), each) for each in comparisons)
    distinct = _without_replicas(comparisons)
    found = Pairwise.union([each.statistics for each in distinct])
    verdict = heaviest(each.verdict for each in shards)
    largest = max(
        (each for each in distinct if each.largest is not None),
        key=lambda each: each.statistics.max_abs, default=None,
    )  # fmt: skip
    samples = _samples(distinct)
    return TensorResult(
        step, section, name, flow.station(section, name), verdict,
        _reason(verdict, found, comparisons, samples, criteria.uncomparable_reason), found,
        criteria.tolerances.for_tensor(section, name, comparisons[0].dtypes), shards,
        first=_first(shards, verdict), largest=None if largest is None else largest.largest,
        samples=samples,
    )  # fmt: skip


def _verdict(comparison: ShardComparison, criteria: _Criteria) -> Verdict:
    if comparison.doubt and _differs(comparison):
        return Verdict.NOT_COMPARABLE
    if comparison.shapes_differ:
        return Verdict.DIFFERENT
    is_structural = flow.is_structural(comparison.name)
    by_location = comparison.rows is not None and not _is_paired_by_id(comparison)
    is_sampling = comparison.section in flow.SAMPLE_SECTIONS
    if criteria.uncomparable_reason and by_location and not is_structural and not is_sampling:
        return Verdict.NOT_COMPARABLE
    found, states = comparison.statistics, comparison.states
    has_other_lengths = bool((states == LENGTHS_DIFFER).any())
    if is_structural and has_other_lengths:
        return Verdict.DIFFERENT
    if found.unequal_count:
        tolerance = criteria.tolerances.for_tensor(
            comparison.section, comparison.name, comparison.dtypes
        )
        if not is_noise(found, tolerance, criteria.noise_floor, comparison.name):
            return Verdict.DIFFERENT
    if has_other_lengths or (len(states) and not (states == COMPARED).any()):
        return Verdict.NOT_COMPARABLE
    return Verdict.WITHIN_NOISE if found.unequal_count else Verdict.SAME


def _differs(comparison: ShardComparison) -> bool:
    has_unequal = comparison.shapes_differ or comparison.statistics.unequal_count > 0
    return has_unequal or bool((comparison.states != COMPARED).any())


def _is_paired_by_id(comparison: ShardComparison) -> bool:
    return comparison.key in (BY_SAMPLE_ID, BY_GROUP_AND_RUN)


def _without_replicas(comparisons: Sequence[ShardComparison]) -> list[ShardComparison]:
    """Leave out comparisons whose samples were all compared before in the same pass."""
    seen: dict[BatchPass, set[str]] = collections.defaultdict(set)
    first = []
    for comparison in comparisons:
        rows, location = comparison.rows, comparison.locations[0]
        if rows is not None and not comparison.has_fragments and _is_paired_by_id(comparison):
            samples = seen[BatchPass.of(location)]
            if rows.labels and samples.issuperset(rows.labels):
                continue
            samples.update(rows.labels)
        first.append(comparison)
    return first


def _samples(comparisons: Sequence[ShardComparison]) -> dict[str, int]:
    """Count trajectories, each once however many passes and fragments of it were compared."""
    tables = [each.rows for each in comparisons if each.rows is not None]
    if not tables:
        return {}
    states = np.concatenate([table.states for table in tables])
    unequal = np.concatenate([table.numbers[:, 1] for table in tables]) > 0
    labels = [label for table in tables for label in table.labels]
    index_of_label = {label: at for at, label in enumerate(dict.fromkeys(labels))}
    # Most often each label occurs once, and row i is trajectory i.
    trajectory_of_row = np.arange(len(labels))
    if len(index_of_label) < len(labels):
        trajectory_of_row = np.fromiter(map(index_of_label.__getitem__, labels), np.int64)

    def trajectories(rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        has_row = np.zeros(len(index_of_label), bool)
        has_row[trajectory_of_row[rows]] = True
        return has_row

    tokens, lengths = trajectories(states == TOKENS_DIFFER), trajectories(states == LENGTHS_DIFFER)
    return {
        "compared": int((trajectories(states == COMPARED) & ~tokens & ~lengths).sum()),
        "unequal": int(trajectories(unequal).sum()),
        "tokens differ": int(tokens.sum()),
        "lengths differ": int((lengths & ~tokens).sum()),
    }


def _first(shards: Sequence[ShardResult], verdict: Verdict) -> ValueLocation | None:
    """Return the first value over the tolerance in the first shard of this verdict."""
    if verdict is Verdict.SAME:
        return None
    of_verdict = (shard.comparison for shard in shards if shard.verdict is verdict)
    locations = (comparison.over or comparison.unequal for comparison in of_verdict)
    return next((location for location in locations if location is not None), None)


def _location_order(comparison: ShardComparison) -> tuple[int, Part, str, str, int]:
    location = comparison.locations[0]
    step = -1 if location.step is None else location.step
    rank = -1 if location.rank is None else location.rank
    return (step, location.part, location.stage or "", location.role or "", rank)


def _reason(
    verdict: Verdict,
    found: Pairwise,
    comparisons: Sequence[ShardComparison],
    samples: Mapping[str, int],
    uncomparable_reason: str,
) -> str:
    """Return why a tensor has its verdict, in clauses."""
    clauses = []
    if found.unequal_count:
        clauses.append(f"{found.unequal_count} of {found.pairs} values differ")
        if found.over_count != found.unequal_count:
            clauses.append(f"{found.over_count} by more than is allowed")
    if found.disagreeing_non_finite:
        clauses.append(
            f"{found.disagreeing_non_finite} disagree in being NaN or infinite, and distances are "
            "those of the finite pairs"
        )
    elif found.agreeing_non_finite:
        clauses.append(f"{found.agreeing_non_finite} are the same NaN or infinity on both sides")
    for state in ("tokens differ", "lengths differ"):
        if samples.get(state):
            total = sum(samples[name] for name in PAIRED)
            clauses.append(f"the {state} in {samples[state]} of {total} samples")
    clauses += dict.fromkeys(each.problem for each in comparisons if each.problem)
    if verdict is Verdict.NOT_COMPARABLE:
        doubts = (each.doubt for each in comparisons if each.doubt and _differs(each))
        clauses += [
            f"paired by location only, and {doubt.value}" for doubt in dict.fromkeys(doubts)
        ]
        if uncomparable_reason and not clauses:
            clauses.append(uncomparable_reason)
    if verdict is Verdict.DIFFERENT and not clauses:
        # Replicas count once, so the values that differ may be those that were left out.
        clauses.append("ranks or parts that hold the same samples differ among themselves")
    if not found.pairs and not clauses:
        clauses.append("no values")
    return "; ".join(clauses)


_INPUTS: Final = LOG_PROBS | {
    "entropy", "values", "advantages", "prob_ratio", "elementwise_loss", "returns",
}  # fmt: skip
"""Tensors by token; losses and metrics are means of them."""
_WEIGHTED: Final = LOG_PROBS | {"prob_ratio"}
"""Inputs that a policy loss multiplies by the advantages."""
_DEVIATIONS: Final = 4.0
"""Allowed multiple of the random part: tokens of short sequences may have larger weights."""
_METRICS: Final = "metrics"
_DOUBTFUL: Final = (Verdict.DIFFERENT, Verdict.NOT_COMPARABLE)


def judge_derived(tensors: Sequence[TensorResult]) -> tuple[TensorResult, ...]:
    """Return the results with losses and metrics judged by the noise of their inputs.

    This applies if all inputs of a step are the same or within noise, and not all are the same.
    Tolerances that the user set still apply.
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
    """Return how far noise may move the mean of one shard's values; `shards` counts the shards."""
    tokens = max(found.finite / shards, 1.0)
    return abs(found.mean_difference) + _DEVIATIONS * found.root_mean_square / math.sqrt(tokens)


def _largest(found: Pairwise) -> float:
    """Return the largest |value| of both sides."""
    if not found.finite:
        return 0.0
    return max(abs(found.side(side)[end]) for side in "xy" for end in ("min", "max"))
