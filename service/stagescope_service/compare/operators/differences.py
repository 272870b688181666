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
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_service.compare.operators.calls import (
    Codes,
    Flags,
    Floats,
    OperatorColumns,
    PairedCalls,
    shared_codes,
)
from stagescope_service.compare.operators.counts import (
    JoinedRows,
    is_tensor,
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

_OF_VALUES: Final = ("non_finite", "checksum", "statistics")
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
    """The rows of paired calls, in execution order; a row is -1 where a side lacks it."""

    row_a: Codes
    row_b: Codes
    verdict: Verdicts
    relative: Floats
    threshold: Floats
    sharded: int
    """Number of rows left out because they are shards."""
    not_read: int
    """Number of rows whose values differ in memory that no call read."""
    zero_gradients: int
    """Number of rows that differ in gradients that are zero except for rounding."""
    identifiers: int
    """Number of rows that differ in what identifies a process or a call."""
    near_counts: int
    """Number of rows that differ in counts by what rounding moves."""
    other_checksums: int
    """Number of rows without a difference whose checksums differ."""


def differences(
    a: OperatorColumns,
    b: OperatorColumns,
    paired: PairedCalls,
    thresholds: Thresholds,
    *,
    skip_sharded: bool = False,
) -> RowDifferences:
    """Compare the rows of paired calls.

    Args:
        a, b: the tables.
        paired: their paired calls.
        thresholds: see `Thresholds`.
        skip_sharded: leave out tensors that are shards (DTensor): two ranks hold different ones.
    """
    rows = join_rows(a, b, paired)
    sharded = (_is_shard(a)[rows.row_a] | _is_shard(b)[rows.row_b]) & skip_sharded
    rows = rows.select(~sharded)
    on_both = (rows.row_a >= 0) & (rows.row_b >= 0)
    shared = rows.select(on_both)
    coarsest = _coarsest(a, b, paired, thresholds)
    threshold = np.zeros(len(rows.pair))
    threshold[on_both] = _row_thresholds(shared, coarsest)
    relative = np.full(len(rows.pair), np.nan)
    relative[on_both] = _relative_differences(shared)
    verdict = np.zeros(len(rows.pair), np.int8)
    one_sided = np.where(rows.row_a >= 0, is_tensor(a)[rows.row_a], is_tensor(b)[rows.row_b])
    verdict[~on_both & one_sided] = VERDICTS.index("missing")
    verdict[on_both] = _verdicts(shared, relative[on_both], threshold[on_both], thresholds)
    not_read = _not_read(rows, verdict)
    verdict[not_read] = 0
    zero = _zero_gradients(rows, verdict, threshold, thresholds)
    verdict[zero] = 0
    identifiers = _identifiers(rows, verdict)
    verdict[identifiers] = 0
    near = np.zeros(len(verdict), bool)
    if not thresholds.exact:
        own = coarsest[rows.pair]
        near = near_counts(rows, verdict == VERDICTS.index("statistics"), own)
        near |= near_sizes(rows, verdict == VERDICTS.index("value"), own)
        verdict[near] = 0
    checksums = np.zeros(len(verdict), bool)
    checksums[on_both] = _checksums_differ(shared)
    other = checksums & (verdict == 0) & ~(not_read | zero | near)
    left_out = (int(flags.sum()) for flags in (sharded, not_read, zero, identifiers, near, other))
    return RowDifferences(rows.row_a, rows.row_b, verdict, relative, threshold, *left_out)


def _verdicts(
    rows: JoinedRows, relative: Floats, threshold: Floats, thresholds: Thresholds
) -> Verdicts:
    """Return the first verdict that holds of each row that both sides have."""
    tensor_a, tensor_b = is_tensor(rows.a)[rows.row_a], is_tensor(rows.b)[rows.row_b]
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
    columns = ("min", "max", "mean", "norm")
    numbers_a = {name: rows.a.numbers(name)[rows.row_a] for name in columns}
    numbers_b = {name: rows.b.numbers(name)[rows.row_b] for name in columns}
    limit_a = _by_dtype(rows.a, _LIMITS, np.inf)[rows.row_a]
    limit_b = _by_dtype(rows.b, _LIMITS, np.inf)[rows.row_b]
    scale, distance = np.zeros(len(rows.pair)), np.zeros(len(rows.pair))
    at_limit = np.zeros(len(rows.pair), bool)
    with np.errstate(invalid="ignore", over="ignore"):
        for name in ("min", "max"):
            x, y = numbers_a[name], numbers_b[name]
            limits = (np.abs(x) >= 0.999 * limit_a) & (np.abs(y) >= 0.999 * limit_b) & (x * y > 0)
            at_limit |= limits
            usable = np.isfinite(x) & np.isfinite(y) & ~limits
            scale = np.maximum(scale, np.where(usable, np.maximum(np.abs(x), np.abs(y)), 0.0))
            distance = np.maximum(distance, np.where(usable, np.abs(x - y), 0.0))
        x, y = numbers_a["mean"], numbers_b["mean"]
        usable = np.isfinite(x) & np.isfinite(y) & ~at_limit
        distance = np.maximum(distance, np.where(usable, np.abs(x - y), 0.0))
        x, y = np.abs(numbers_a["norm"]), np.abs(numbers_b["norm"])
        usable = np.isfinite(x) & np.isfinite(y) & ~at_limit
        largest = np.where(usable, np.maximum(x, y), 0.0)
        of_norm = np.divide(
            np.abs(x - y), largest, out=np.zeros(len(x)), where=usable & (largest > 0)
        )
        of_extremes = np.divide(distance, scale, out=np.zeros(len(distance)), where=scale > 0)
    relative: Floats = np.maximum(of_extremes, of_norm)
    return relative


def _coarsest(
    a: OperatorColumns, b: OperatorColumns, paired: PairedCalls, thresholds: Thresholds
) -> Floats:
    """Return the threshold of the coarsest dtype up to each pair of calls."""
    coarsest = np.zeros(len(paired.pairs))
    pairs = np.asarray(paired.pairs, np.int64).reshape(-1, 2)
    for side, calls in ((a, pairs[:, 0]), (b, pairs[:, 1])):
        dtypes = side.texts("dtype")
        of_dtype = np.asarray([*map(thresholds.for_dtype, dtypes.values), 0.0])
        of_call = np.zeros(side.calls)
        np.maximum.at(of_call, side.call_of_row, of_dtype[dtypes.codes])
        coarsest = np.maximum(coarsest, np.maximum.accumulate(of_call)[calls])
    return coarsest


def _row_thresholds(rows: JoinedRows, coarsest: Floats) -> Floats:
    """Return each row's threshold from the pairs' `coarsest`; 0 for dtypes that do not round."""
    rounds_a = _by_dtype(rows.a, EPS, 0.0)[rows.row_a] > 0
    rounds_b = _by_dtype(rows.b, EPS, 0.0)[rows.row_b] > 0
    tensors = is_tensor(rows.a)[rows.row_a] | is_tensor(rows.b)[rows.row_b]
    threshold: Floats = np.where(rounds_a | rounds_b | ~tensors, coarsest[rows.pair], 0.0)
    return threshold


def _not_read(rows: JoinedRows, verdict: Verdicts) -> Flags:
    """Return which rows differ in values that are no evidence (see `evidence`)."""
    of_values = [VERDICTS.index(name) for name in _OF_VALUES]
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
    found = np.zeros(len(verdict), bool)
    for at in np.flatnonzero(verdict == VERDICTS.index("value")).tolist():
        values = [
            side.texts("value").text(int(row))
            for side, row in ((rows.a, rows.row_a[at]), (rows.b, rows.row_b[at]))
        ]
        found[at] = differ_by_address(*values) or any(
            identifies(
                *(side.texts(name).text(row) for name in ("kind", "operator")),
                *(side.texts(name).text(row) for name in ("section", "index")),
                value_type=side.texts("type").text(row),
                value=side.texts("value").text(row),
            )
            for side, row in ((rows.a, int(rows.row_a[at])), (rows.b, int(rows.row_b[at])))
        )
    return found


def _zero_gradients(
    rows: JoinedRows, verdict: Verdicts, threshold: Floats, thresholds: Thresholds
) -> Flags:
    """Return which rows differ in gradients that are zero except for rounding on both sides."""
    found = np.zeros(len(verdict), bool)
    of_float32 = thresholds.for_dtype("float32")
    gradients_a, gradients_b = _ResultGradients(rows.a), _ResultGradients(rows.b)
    one_dimensional = _matches(rows.a, "shape", lambda shape: "," not in shape)[rows.row_a]
    directions = {"backward", "parameters_grad"}
    gradients = _matches(rows.a, "direction", directions.__contains__)[rows.row_a]
    differing = verdict == VERDICTS.index("statistics")
    for at in np.flatnonzero(differing & one_dimensional & gradients).tolist():
        own = float(threshold[at])
        found[at] = gradients_a.sum_to_zero(int(rows.row_a[at]), own, of_float32) and (
            gradients_b.sum_to_zero(int(rows.row_b[at]), own, of_float32)
        )
    return found


class _ResultGradients:
    """Gradients of the results of calls in one table; gradients of parameters are sums of them."""

    def __init__(self, side: OperatorColumns) -> None:
        self._side = side
        self._of_modules: defaultdict[tuple[str | None, str | None], list[int]] | None = None

    def sum_to_zero(self, row: int, threshold: float, of_float32: float) -> bool:
        """Return whether a row is a gradient that is zero except for rounding."""
        side = self._side
        size = tensor_size(side, row)
        calls = self._made_of(row) if size is not None and size[0] == 1 else []
        rows = [
            other
            for call in calls
            for other in side.rows_of(call)
            if side.texts("section").text(other) == "input" and tensor_size(side, other) is not None
        ]
        squares, count = 0.0, 0
        for other in rows:
            _, elements = tensor_size(side, other) or (0, 0)
            norm = abs(float(side.numbers("norm")[other]))
            if not math.isfinite(norm):  # msprobe records none for float64
                norm = _largest(side, other) * math.sqrt(elements)
            squares, count = squares + norm * norm, count + elements
        if size is None or not size[1] or count <= size[1]:
            return False
        root = math.sqrt(count / size[1])
        limit = math.sqrt(squares / count) * root * (threshold + of_float32 * root)
        return _largest(side, row) <= limit

    def _made_of(self, row: int) -> list[int]:
        """Return the backward calls of whose results' gradients a gradient is a sum."""
        side = self._side
        call = int(side.call_of_row[row])
        section, direction = side.texts("section").text(row), side.call_text("direction", call)
        if (section, direction) == ("output", "backward"):
            return [call]
        if section != "grad" or direction != "parameters_grad":
            return []
        if self._of_modules is None:
            self._of_modules = defaultdict(list)
            for other in range(side.calls):
                if side.call_text("direction", other) == "backward":
                    self._of_modules[self._module(other)].append(other)
        return self._of_modules.get(self._module(call), [])

    def _module(self, call: int) -> tuple[str | None, str | None]:
        side = self._side
        return side.call_text("operator", call), side.call_text("module_class", call)


def _largest(side: OperatorColumns, row: int) -> float:
    """Return the largest absolute value; infinite if it is unknown or not finite."""
    ends = [abs(float(side.numbers(name)[row])) for name in ("min", "max")]
    return max(ends) if all(map(math.isfinite, ends)) else math.inf


def _by_dtype(side: OperatorColumns, table: Mapping[str, float], otherwise: float) -> Floats:
    dtypes = side.texts("dtype")
    values = [table.get(dtype, otherwise) for dtype in dtypes.values]
    found: Floats = np.asarray([*values, otherwise])[dtypes.codes]
    return found


def _is_shard(side: OperatorColumns) -> Flags:
    return _matches(side, "placements", lambda text: "Shard" in text or "Partial" in text)


def _matches(side: OperatorColumns, column: str, predicate: Callable[[str], bool]) -> Flags:
    """Return for each row whether its text fulfils a predicate; False for row -1."""
    texts = side.texts(column)
    return np.append(np.asarray([*map(predicate, texts.values), False])[texts.codes], False)


def _checksums_differ(rows: JoinedRows) -> Flags:
    """Return where checksums differ."""
    codes_a, codes_b = shared_codes(rows.a.texts("checksum"), rows.b.texts("checksum"))
    codes_a, codes_b = codes_a[rows.row_a], codes_b[rows.row_b]
    differ: Flags = (codes_a >= 0) & (codes_b >= 0) & (codes_a != codes_b)
    return differ


def _by_checksum(rows: JoinedRows, thresholds: Thresholds) -> Flags:
    """Return where a checksum decides: in rows without statistics, or everywhere if `exact`."""
    known: Flags = rows.a.is_known("max")[rows.row_a] | rows.b.is_known("max")[rows.row_b]
    return ~known | thresholds.exact


def _values_differ(rows: JoinedRows, threshold: Floats) -> Flags:
    """Return where values differ: floats by their threshold, devices by type, others exactly."""
    differ = rows.texts_differ("value")
    types, values_a, values_b = (
        rows.a.texts("type"), rows.a.texts("value"), rows.b.texts("value"),
    )  # fmt: skip
    for at in np.flatnonzero(differ).tolist():
        x, y = values_a.text(int(rows.row_a[at])), values_b.text(int(rows.row_b[at]))
        kind = types.text(int(rows.row_a[at]))
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
