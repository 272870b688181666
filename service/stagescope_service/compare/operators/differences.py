"""Differences between two operator tables, by row of paired calls.

Each row gets the first verdict that holds, in this order:

* `missing`: a tensor that only one side has
* `type`: a tensor on one side, something else on the other
* `shape`
* `non_finite`: NaN or infinities on one side only, or of another kind
* `checksum`: if there are no statistics (msprobe's xor), or with `exact`
* `value`: another number or text, for a value that is no tensor
* `statistics`: the relative difference is over the row's threshold

**Relative difference**: max(|dMax|, |dMin|, |dMean|) / max(|Max|, |Min|) or
|dNorm| / max(|Norm|), whichever is larger. Denominators are the larger of both sides. The mean is
divided by the extremes and not by itself, since a mean near zero is all noise. Numbers that are not
finite on both sides are left out (a Norm of float16 overflows on finite data). Extremes that are
the limit of their own dtype on both sides are left out: -FLT_MAX of a mask differs by dtype.

Some rows are no difference, and are counted separately:

* values that identify a process or a call and measure nothing (see `evidence.identifies`): process
  groups, peers, tags, addresses of objects, whether a call was recomputed;
* counts that differ only by rounding, such as tokens per expert (see `counts`);
* values that no call read (see `evidence`): memory before it is written, views of it;
* gradients that are zero except for rounding on both sides, such as a bias's before BatchNorm or
  those of an attention's keys. An element of a one-dimensional gradient is a sum of n gradients g
  of the call's results. Rounding explains it up to rms(g) x sqrt(n) x (t + t32 x sqrt(n)). Each g
  was rounded alone (t, the row's threshold). The sum and the inputs of g were rounded in float32
  (t32, the threshold of float32). The bound of a sum is eps x sum |g| (N. Higham, "Accuracy and
  Stability of Numerical Algorithms", 2002, 4.2).

**Threshold**: `factor` (4) times an eps. It is the eps of the coarsest floating dtype on either
side up to and including this call: a rounded value stays rounded. 0 for integers and booleans.
Integers of joined ranks have the threshold of float32: their mean and norm come from rounded ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_service.compare.operators.calls import Flags, Floats, OperatorColumns, PairedCalls
from stagescope_service.compare.operators.counts import (
    JoinedRows,
    join_rows,
    near_counts,
    near_sizes,
    tensor_size,
)
from stagescope_service.compare.operators.evidence import Use, differ_by_address, identifies

Verdicts = npt.NDArray[np.int8]
"""Indexes in `VERDICTS`."""

VERDICTS: Final = ("", "missing", "type", "shape", "non_finite", "checksum", "value", "statistics")
"""Verdicts by code; 0 is no difference."""

VALUE_VERDICTS: Final = ("non_finite", "checksum", "statistics")
"""Verdicts that rest on a tensor's values alone."""

EPS: Final[Mapping[str, float]] = {
    "float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3, "float8_e4m3fnuz": 2.0**-3, "float8_e5m2": 2.0**-2,
    "float8_e5m2fnuz": 2.0**-2, "complex64": 2.0**-23, "complex128": 2.0**-52,
}  # fmt: skip
_LIMITS: Final[Mapping[str, float]] = {
    "float64": 1.7976931348623157e308, "float32": 3.4028234663852886e38, "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds over which numbers are different.

    Attributes:
        factor: multiple of eps. Another device or kernel rounds in another order: use 100 or more
            for it.
        by_dtype: dtype -> threshold, instead of factor x eps.
        exact: every number and checksum must be equal, as of replicas and of repeated runs of a
            deterministic training.
    """

    factor: float = 4.0
    by_dtype: Mapping[str, float] = dataclasses.field(default_factory=dict)
    exact: bool = False

    def for_dtype(self, dtype: str) -> float:
        """Return the threshold of a dtype; 0 if it does not round."""
        if self.exact:
            return 0.0
        return self.by_dtype.get(dtype, self.factor * EPS.get(dtype, 0.0))


class RowDifferences(NamedTuple):
    """How each row of paired calls differs, in execution order."""

    rows: JoinedRows
    verdict: Verdicts
    relative: Floats
    threshold: Floats
    left_out: Mapping[str, int]
    """Field of `OperatorDivergence` -> number of rows that are left out or no difference."""


def differences(
    a: OperatorColumns,
    b: OperatorColumns,
    paired: PairedCalls,
    thresholds: Thresholds,
    *,
    skip_sharded: bool = False,
    not_joined: tuple[Flags, Flags] | None = None,
) -> RowDifferences:
    """Compare the rows of paired calls.

    Args:
        a, b: the tables.
        paired: their paired calls.
        thresholds: see `Thresholds`.
        skip_sharded: leave out tensors that are shards (DTensor): two ranks hold different ones.
        not_joined: rows of each table that could not be put together (see `joined_ranks`).
    """
    rows = join_rows(a, b, paired)
    apart = np.zeros(len(rows.pair), bool)
    for flags, of_side in zip(not_joined or (), (rows.row_a, rows.row_b), strict=False):
        apart |= np.append(flags, False)[of_side]
    rows = rows.select(~apart)
    sharded = np.logical_or(*rows.by_text("placements", _is_shard, False)) & skip_sharded
    rows = rows.select(~sharded)
    on_both = (rows.row_a >= 0) & (rows.row_b >= 0)
    shared = rows.select(on_both)
    coarsest = _coarsest(a, b, paired, thresholds)
    threshold = np.zeros(len(rows.pair))
    whole = 0.0 if not_joined is None else thresholds.for_dtype("float32")
    threshold[on_both] = _row_thresholds(shared, coarsest, whole)
    relative = np.full(len(rows.pair), np.nan)
    relative[on_both] = _relative_differences(shared)
    verdict = np.zeros(len(rows.pair), np.int8)
    verdict[~on_both & np.logical_or(*rows.are_tensors())] = VERDICTS.index("missing")
    verdict[on_both] = _verdicts(shared, relative[on_both], threshold[on_both], thresholds)
    checksums = np.zeros(len(verdict), bool)
    checksums[on_both] = _checksums_differ(shared)
    left_out = {"sharded": int(sharded.sum()), "not_joined": int(apart.sum())}
    healthy: dict[str, Callable[[], Flags]] = {
        "not_read": lambda: _not_read(rows, verdict),
        "zero_gradients": lambda: _zero_gradients(rows, verdict, threshold, thresholds),
        "identifiers": lambda: _identifiers(rows, verdict),
    }
    if not thresholds.exact:
        healthy["near_counts"] = lambda: _near_counts(rows, verdict, coarsest[rows.pair])
    for name, find in healthy.items():  # each looks at what the ones before it left
        found = find()
        verdict[found] = 0
        checksums &= ~found
        left_out[name] = int(found.sum())
    left_out.setdefault("near_counts", 0)
    left_out["other_checksums"] = int((checksums & (verdict == 0)).sum())
    return RowDifferences(rows, verdict, relative, threshold, left_out)


def _verdicts(
    rows: JoinedRows, relative: Floats, threshold: Floats, thresholds: Thresholds
) -> Verdicts:
    """Return the first verdict that holds of each row that both sides have."""
    tensor_a, tensor_b = rows.are_tensors()
    tensors = tensor_a & tensor_b
    checks = {
        "type": tensor_a != tensor_b,
        "shape": tensors & rows.texts_differ("shape"),
        "non_finite": tensors & rows.texts_differ("non_finite"),
        "checksum": tensors & _checksums_differ(rows) & _by_checksum(rows, thresholds),
        "value": ~tensor_a & ~tensor_b & _values_differ(rows, threshold),
        "statistics": tensors & (relative > threshold),
    }
    verdict = np.zeros(len(rows.pair), np.int8)
    for name in reversed(checks):
        verdict[checks[name]] = VERDICTS.index(name)
    return verdict


def _relative_differences(rows: JoinedRows) -> Floats:
    """Return the relative difference of each row; 0 where nothing can be compared."""
    limit_a, limit_b = rows.by_text("dtype", lambda dtype: _LIMITS.get(dtype, np.inf), np.inf)
    at_limit = np.zeros(len(rows.pair), bool)
    distance, scale = np.zeros((2, len(rows.pair)))
    with np.errstate(invalid="ignore", over="ignore"):
        for name in ("min", "max"):
            x, y = rows.numbers(name)
            limits = (np.abs(x) >= 0.999 * limit_a) & (np.abs(y) >= 0.999 * limit_b) & (x * y > 0)
            at_limit |= limits
            gap, _ = _distances(x, y, ~limits)
            # A sum of shards may have a mean alone; it is divided by the other side's extremes.
            largest = np.fmax(_finite(x), _finite(y))
            distance = np.maximum(distance, gap)
            scale = np.maximum(scale, np.where(limits, 0.0, largest))
        distance = np.maximum(distance, _distances(*rows.numbers("mean"), ~at_limit)[0])
        x, y = rows.numbers("norm")
        of_norm = _distances(np.abs(x), np.abs(y), ~at_limit)
        ratios = [
            np.divide(gap, largest, out=np.zeros(len(gap)), where=largest > 0)
            for gap, largest in ((distance, scale), of_norm)
        ]
    relative: Floats = np.maximum(*ratios)
    return relative


def _finite(x: Floats) -> Floats:
    """Return |x|, 0 where it is not finite."""
    return np.where(np.isfinite(x), np.abs(x), 0.0)


def _distances(x: Floats, y: Floats, usable: Flags) -> tuple[Floats, Floats]:
    """Return |x - y| and the larger of |x| and |y|; 0 where they are not usable or not finite."""
    usable = usable & np.isfinite(x) & np.isfinite(y)
    largest = np.maximum(np.abs(x), np.abs(y))
    return np.where(usable, np.abs(x - y), 0.0), np.where(usable, largest, 0.0)


def _coarsest(
    a: OperatorColumns, b: OperatorColumns, paired: PairedCalls, thresholds: Thresholds
) -> Floats:
    """Return the threshold of the coarsest dtype up to each pair of calls."""
    coarsest = np.zeros(len(paired.pairs))
    pairs = np.asarray(paired.pairs, np.int64).reshape(-1, 2)
    for side, calls in ((a, pairs[:, 0]), (b, pairs[:, 1])):
        of_call = np.zeros(side.calls)
        of_row = side.by_text("dtype", thresholds.for_dtype, 0.0)[:-1]
        np.maximum.at(of_call, side.call_of_row, of_row)
        coarsest = np.maximum(coarsest, np.maximum.accumulate(of_call)[calls])
    return coarsest


def _row_thresholds(rows: JoinedRows, coarsest: Floats, whole: float) -> Floats:
    """Return each row's threshold from the pairs' `coarsest`; `whole` for tensors of integers."""
    rounds = np.logical_or(*rows.by_text("dtype", EPS.__contains__, False))
    tensors = np.logical_or(*rows.are_tensors())
    threshold: Floats = np.where(rounds | ~tensors, coarsest[rows.pair], whole)
    return threshold


def _not_read(rows: JoinedRows, verdict: Verdicts) -> Flags:
    """Return which rows differ in values that are no evidence (see `evidence`)."""
    of_values = [VERDICTS.index(name) for name in VALUE_VERDICTS]
    at = np.flatnonzero(np.isin(verdict, of_values))
    row_a, row_b, pair = rows.row_a[at], rows.row_b[at], rows.pair[at]
    use = rows.a.uses(row_a)
    memory = use == Use.MEMORY
    carried = (use == Use.CARRIED) & np.isin(pair, pair[memory])
    by_infrastructure = rows.a.made_by_infrastructure(row_a) | rows.b.made_by_infrastructure(row_b)
    found = np.zeros(len(verdict), bool)
    found[at[memory | carried | by_infrastructure]] = True
    return found


def _identifiers(rows: JoinedRows, verdict: Verdicts) -> Flags:
    """Return which rows differ in what identifies a process or a call."""
    columns = ("kind", "operator", "section", "index", "type", "value")
    found = np.zeros(len(verdict), bool)
    for at in np.flatnonzero(verdict == VERDICTS.index("value")).tolist():
        sides = zip(*(rows.texts(column, at) for column in columns), strict=True)
        found[at] = differ_by_address(*rows.texts("value", at)) or any(
            identifies(*call, value_type=value_type, value=value)
            for *call, value_type, value in sides
        )
    return found


def _near_counts(rows: JoinedRows, verdict: Verdicts, coarsest: Floats) -> Flags:
    """Return which rows differ in counts and sizes by no more than rounding moves."""
    return near_counts(rows, verdict == VERDICTS.index("statistics"), coarsest) | near_sizes(
        rows, verdict == VERDICTS.index("value"), coarsest
    )


def _zero_gradients(
    rows: JoinedRows, verdict: Verdicts, threshold: Floats, thresholds: Thresholds
) -> Flags:
    """Return which rows differ in gradients that are zero except for rounding on both sides."""
    of_float32 = thresholds.for_dtype("float32")
    gradients_a, gradients_b = _ResultGradients(rows.a), _ResultGradients(rows.b)
    is_gradient = {"backward", "parameters_grad"}.__contains__
    found: Flags = (
        (verdict == VERDICTS.index("statistics"))
        & rows.by_text("shape", lambda shape: "," not in shape, False)[0]
        & rows.by_text("direction", is_gradient, False)[0]
    )
    for at in np.flatnonzero(found).tolist():
        limit = float(threshold[at])
        found[at] = gradients_a.sum_to_zero(int(rows.row_a[at]), limit, of_float32) and (
            gradients_b.sum_to_zero(int(rows.row_b[at]), limit, of_float32)
        )
    return found


class _ResultGradients:
    """Gradients of the results of calls in one table; gradients of parameters are sums of them."""

    def __init__(self, side: OperatorColumns) -> None:
        self._side = side

    def sum_to_zero(self, row: int, threshold: float, of_float32: float) -> bool:
        """Return whether a row is a gradient that is zero except for rounding."""
        side = self._side
        size = tensor_size(side, row)
        if size is None or size[0] != 1:
            return False
        squares, count = 0.0, 0
        for other in itertools.chain.from_iterable(map(side.rows_of, self._summed_calls(row))):
            other_size = tensor_size(side, other)
            if other_size is None or side.texts("section").text(other) != "input":
                continue
            norm = abs(float(side.numbers("norm")[other]))
            if not math.isfinite(norm):  # msprobe records none for float64
                norm = _largest(side, other) * math.sqrt(other_size[1])
            squares, count = squares + norm * norm, count + other_size[1]
        if not size[1] or count <= size[1]:
            return False
        root = math.sqrt(count / size[1])
        limit = math.sqrt(squares / count) * root * (threshold + of_float32 * root)
        return _largest(side, row) <= limit

    def _summed_calls(self, row: int) -> list[int]:
        """Return the backward calls of whose results' gradients a gradient is a sum."""
        side = self._side
        call = int(side.call_of_row[row])
        section, direction = side.texts("section").text(row), side.call_text("direction", call)
        if (section, direction) == ("output", "backward"):
            return [call]
        if section != "grad" or direction != "parameters_grad":
            return []
        return self._calls_of_modules.get(self._module(call), [])

    @functools.cached_property
    def _calls_of_modules(self) -> Mapping[tuple[str | None, str | None], list[int]]:
        """Backward calls of each module."""
        found = defaultdict(list)
        for call in range(self._side.calls):
            if self._side.call_text("direction", call) == "backward":
                found[self._module(call)].append(call)
        return found

    def _module(self, call: int) -> tuple[str | None, str | None]:
        side = self._side
        return side.call_text("operator", call), side.call_text("module_class", call)


def _largest(side: OperatorColumns, row: int) -> float:
    """Return the largest absolute value; infinite if it is unknown or not finite."""
    ends = [abs(float(side.numbers(name)[row])) for name in ("min", "max")]
    return max(ends) if all(map(math.isfinite, ends)) else math.inf


def _is_shard(placements: str) -> bool:
    return "Shard" in placements or "Partial" in placements


def _checksums_differ(rows: JoinedRows) -> Flags:
    known_a, known_b = rows.by_text("checksum", lambda _: True, False)
    differ: Flags = known_a & known_b & rows.texts_differ("checksum")
    return differ


def _by_checksum(rows: JoinedRows, thresholds: Thresholds) -> Flags:
    """Return where a checksum decides: in rows without statistics, or everywhere if `exact`."""
    known: Flags = rows.a.is_known("max")[rows.row_a] | rows.b.is_known("max")[rows.row_b]
    return ~known | thresholds.exact


def _values_differ(rows: JoinedRows, threshold: Floats) -> Flags:
    """Return where values differ: floats by their threshold, devices by type, others exactly."""
    differ = rows.texts_differ("value")
    for at in np.flatnonzero(differ).tolist():
        x, y = rows.texts("value", at)
        kind = rows.texts("type", at)[0]
        if kind == "float":
            differ[at] = not _is_close(x, y, float(threshold[at]))
        elif kind == "torch.device":
            differ[at] = not _same_device(x, y)
    return differ


def _same_device(x: str | None, y: str | None) -> bool:
    """Return whether devices have one kind; an index alone may be any accelerator."""
    kinds = {(device or "").partition(":")[0] for device in (x, y)}
    indexes = {kind for kind in kinds if kind.isdecimal()}
    return len(kinds) == 1 or (bool(indexes) and "cpu" not in kinds)


def _is_close(x: str | None, y: str | None, threshold: float) -> bool:
    try:
        one, other = float(x or ""), float(y or "")
    except ValueError:
        return False
    return abs(one - other) <= threshold * max(abs(one), abs(other))
