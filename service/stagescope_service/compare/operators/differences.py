"""How far two operator tables are apart, row by row of paired calls.

Each row gets the first verdict that holds, in this order:

* `missing`: a tensor that only one side has
* `type`: a tensor on one side, something else on the other
* `shape`
* `non_finite`: NaN or infinities on one side only, or of another kind
* `checksum`: where it is all that there is (msprobe's xor), or with `exact`
* `value`: of a number or text that is no tensor
* `statistics`: the relative difference is over the row's threshold

**Relative difference**: max(|dMax|, |dMin|, |dMean|) / max(|Max|, |Min|) or
|dNorm| / max(|Norm|), whichever is larger; denominators are the larger of both sides. Mean is held
against the extremes and not against itself, since a mean near zero is all noise. What is not
finite on both sides is left out (a Norm of float16 overflows on finite data), and so are extremes
that are the limit of their own dtype on both sides: -FLT_MAX of a mask differs per dtype.

Two kinds of rows are no difference, and are counted apart:

* values that no call read (see `evidence`): memory before it is written, views of it;
* gradients that are zero but for rounding on both sides, such as that of a bias before BatchNorm
  or of the keys of an attention. An element of a one-dimensional gradient is a sum of n gradients
  g of the call's results. It is zero but for rounding up to rms(g) x sqrt(n) x (t + t32 x sqrt(n)):
  each g was rounded on its own (t, the row's threshold), and the sum and what g was made from in
  float32 (t32, that of float32; the bound of a sum is eps x sum |g|: N. Higham, "Accuracy and
  Stability of Numerical Algorithms", 2002, 4.2).

**Threshold**: `factor` (4) times the eps of the coarsest floating dtype that either side had up to
and with this call: what was rounded once stays rounded. 0 for integers and booleans.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from stagescope_service.compare.operators.calls import OperatorColumns, PairedCalls, shared_codes
from stagescope_service.compare.operators.evidence import Use
from stagescope_service.compare.operators.sequences import Codes

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Flags: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"

VERDICTS: Final = ("", "missing", "type", "shape", "non_finite", "checksum", "value", "statistics")
"""By code; 0 is no difference."""

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
    """What counts as different.

    Attributes:
        factor: times eps. Another device or kernel rounds in another order: take 100 and more
            there.
        by_dtype: dtype -> threshold, in the place of factor x eps.
        exact: every number and checksum must be equal: replicas, and repeated runs of a
            deterministic training.
    """

    factor: float = 4.0
    by_dtype: Mapping[str, float] = dataclasses.field(default_factory=dict)
    exact: bool = False

    def for_dtype(self, dtype: str) -> float:
        """Return the threshold of a dtype; 0 where it does not round."""
        if self.exact:
            return 0.0
        return self.by_dtype.get(dtype, self.factor * EPS.get(dtype, 0.0))


class RowDifferences(NamedTuple):
    """The rows of paired calls, in execution order; -1 where a side has no such row."""

    row_a: Codes
    row_b: Codes
    verdict: np.ndarray[Any, np.dtype[np.int8]]
    relative: Floats
    threshold: Floats
    sharded: int
    """Rows left out because they are shards."""
    not_read: int
    """Rows whose values differ in memory that no call read."""
    zero_gradients: int
    """Rows that differ in gradients that are zero but for rounding."""


def differences(
    a: OperatorColumns,
    b: OperatorColumns,
    paired: PairedCalls,
    thresholds: Thresholds,
    *,
    skip_sharded: bool = False,
) -> RowDifferences:
    """Hold the rows of paired calls against each other.

    Args:
        a, b: the tables.
        paired: their calls.
        thresholds: see the class.
        skip_sharded: leave out tensors that are shards (DTensor): two ranks hold different ones.
    """
    row_a, row_b, pair = _join(a, b, paired)
    sharded = (_shards(a)[row_a] | _shards(b)[row_b]) & skip_sharded
    row_a, row_b, pair = row_a[~sharded], row_b[~sharded], pair[~sharded]
    both = (row_a >= 0) & (row_b >= 0)
    threshold = np.zeros(len(pair))
    threshold[both] = _threshold(a, b, paired, thresholds, row_a[both], row_b[both], pair[both])
    verdict = np.zeros(len(pair), np.int8)
    tensors_alone = np.where(row_a >= 0, _tensors(a)[row_a], _tensors(b)[row_b])
    verdict[~both & tensors_alone] = VERDICTS.index("missing")
    relative = np.full(len(pair), np.nan)
    relative[both] = _relative(a, b, row_a[both], row_b[both])
    verdict[both] = _verdicts(
        a, b, row_a[both], row_b[both], relative[both], threshold[both], thresholds
    )
    not_read = _not_read(a, b, row_a, row_b, pair, verdict)
    verdict[not_read] = 0
    zero = _zero_gradients(a, b, row_a, row_b, verdict, threshold, thresholds)
    verdict[zero] = 0
    left_out = (int(flags.sum()) for flags in (sharded, not_read, zero))
    return RowDifferences(row_a, row_b, verdict, relative, threshold, *left_out)


def _join(
    a: OperatorColumns, b: OperatorColumns, paired: PairedCalls
) -> tuple[Codes, Codes, Codes]:
    """Outer join of the rows of paired calls on (section, index), in order; and their pairs."""
    key_a, key_b = _keys(a, b)
    pair_of_a, pair_of_b = np.full(a.calls, -1, np.int64), np.full(b.calls, -1, np.int64)
    for number, (i, j) in enumerate(paired.pairs):
        pair_of_a[i] = pair_of_b[j] = number
    of_a, of_b = pair_of_a[a.call_of_row], pair_of_b[b.call_of_row]
    width = max(key_a.max(initial=0), key_b.max(initial=0)) + 1
    rows_a, rows_b = np.flatnonzero(of_a >= 0), np.flatnonzero(of_b >= 0)
    joined_a, joined_b = of_a[rows_a] * width + key_a[rows_a], of_b[rows_b] * width + key_b[rows_b]
    sort = np.argsort(joined_b, kind="stable")
    place = np.searchsorted(joined_b[sort], joined_a)
    place[place == len(sort)] = 0
    partner = np.full(len(rows_a), -1, np.int64)
    if len(sort):
        is_match = joined_b[sort][place] == joined_a
        partner[is_match] = rows_b[sort[place[is_match]]]
    alone = np.setdiff1d(rows_b, partner)
    row_a = np.concatenate([rows_a, np.full(len(alone), -1, np.int64)])
    row_b = np.concatenate([partner, alone])
    pair = np.concatenate([of_a[rows_a], of_b[alone]])
    order = np.argsort(pair, kind="stable")
    return row_a[order], row_b[order], pair[order]


def _keys(a: OperatorColumns, b: OperatorColumns) -> tuple[Codes, Codes]:
    section_a, section_b = shared_codes(a.texts("section"), b.texts("section"))
    index_a, index_b = shared_codes(a.texts("index"), b.texts("index"))
    width = max(index_a.max(initial=0), index_b.max(initial=0)) + 2
    return (section_a + 1) * width + index_a + 1, (section_b + 1) * width + index_b + 1


def _verdicts(
    a: OperatorColumns,
    b: OperatorColumns,
    row_a: Codes,
    row_b: Codes,
    relative: Floats,
    threshold: Floats,
    thresholds: Thresholds,
) -> np.ndarray[Any, np.dtype[np.int8]]:
    tensor_a, tensor_b = _tensors(a)[row_a], _tensors(b)[row_b]
    tensors = tensor_a & tensor_b
    checks = {
        "type": tensor_a != tensor_b,
        "shape": tensors & _texts_differ(a, b, "shape", row_a, row_b),
        "non_finite": tensors & _texts_differ(a, b, "non_finite", row_a, row_b),
        "checksum": tensors & _checksums_differ(a, b, row_a, row_b, thresholds),
        "value": ~tensor_a & ~tensor_b & _values_differ(a, b, row_a, row_b, threshold),
        "statistics": tensors & (relative > threshold),
    }
    verdict = np.zeros(len(row_a), np.int8)
    for name in reversed(checks):
        verdict[checks[name]] = VERDICTS.index(name)
    return verdict


def _relative(a: OperatorColumns, b: OperatorColumns, row_a: Codes, row_b: Codes) -> Floats:
    """Return the relative difference of each pair of rows; 0 where nothing can be compared."""
    columns_a = {name: a.numbers(name)[row_a] for name in ("min", "max", "mean", "norm")}
    columns_b = {name: b.numbers(name)[row_b] for name in ("min", "max", "mean", "norm")}
    limit_a, limit_b = _by_dtype(a, _LIMITS, np.inf)[row_a], _by_dtype(b, _LIMITS, np.inf)[row_b]
    scale, apart = np.zeros(len(row_a)), np.zeros(len(row_a))
    at_limit = np.zeros(len(row_a), bool)
    with np.errstate(invalid="ignore", over="ignore"):
        for name in ("min", "max"):
            x, y = columns_a[name], columns_b[name]
            limits = (np.abs(x) >= 0.999 * limit_a) & (np.abs(y) >= 0.999 * limit_b) & (x * y > 0)
            at_limit |= limits
            usable = np.isfinite(x) & np.isfinite(y) & ~limits
            scale = np.maximum(scale, np.where(usable, np.maximum(np.abs(x), np.abs(y)), 0.0))
            apart = np.maximum(apart, np.where(usable, np.abs(x - y), 0.0))
        x, y = columns_a["mean"], columns_b["mean"]
        usable = np.isfinite(x) & np.isfinite(y) & ~at_limit
        apart = np.maximum(apart, np.where(usable, np.abs(x - y), 0.0))
        x, y = np.abs(columns_a["norm"]), np.abs(columns_b["norm"])
        usable = np.isfinite(x) & np.isfinite(y) & ~at_limit
        largest = np.where(usable, np.maximum(x, y), 0.0)
        of_norm = np.divide(
            np.abs(x - y), largest, out=np.zeros(len(x)), where=usable & (largest > 0)
        )
        of_extremes = np.divide(apart, scale, out=np.zeros(len(apart)), where=scale > 0)
    relative: Floats = np.maximum(of_extremes, of_norm)
    return relative


def _threshold(
    a: OperatorColumns,
    b: OperatorColumns,
    paired: PairedCalls,
    thresholds: Thresholds,
    row_a: Codes,
    row_b: Codes,
    pair: Codes,
) -> Floats:
    """The threshold of the coarsest dtype up to each pair; 0 for tensors that do not round."""
    coarsest = np.zeros(len(paired.pairs))
    pairs = np.asarray(paired.pairs, np.int64).reshape(-1, 2)
    for side, calls in ((a, pairs[:, 0]), (b, pairs[:, 1])):
        of_row = np.asarray([*map(thresholds.for_dtype, side.texts("dtype").values), 0.0])
        of_call = np.zeros(side.calls)
        np.maximum.at(of_call, side.call_of_row, of_row[side.texts("dtype").codes])
        coarsest = np.maximum(coarsest, np.maximum.accumulate(of_call)[calls])
    rounds = (_by_dtype(a, EPS, 0.0)[row_a] > 0) | (_by_dtype(b, EPS, 0.0)[row_b] > 0)
    tensors = _tensors(a)[row_a] | _tensors(b)[row_b]
    threshold: Floats = np.where(rounds | ~tensors, coarsest[pair], 0.0)
    return threshold


def _not_read(
    a: OperatorColumns,
    b: OperatorColumns,
    row_a: Codes,
    row_b: Codes,
    pair: Codes,
    verdict: np.ndarray[Any, np.dtype[np.int8]],
) -> Flags:
    """Return which rows differ in values that are no evidence (see `evidence`)."""
    rows = np.flatnonzero(np.isin(verdict, [VERDICTS.index(name) for name in _OF_VALUES]))
    use = a.uses(row_a[rows])
    memory = use == Use.MEMORY
    carried = (use == Use.CARRIED) & np.isin(pair[rows], pair[rows[memory]])
    of_infrastructure = a.made_by_infrastructure(row_a[rows]) | b.made_by_infrastructure(
        row_b[rows]
    )
    found = np.zeros(len(verdict), bool)
    found[rows[memory | carried | of_infrastructure]] = True
    return found


def _zero_gradients(
    a: OperatorColumns,
    b: OperatorColumns,
    row_a: Codes,
    row_b: Codes,
    verdict: np.ndarray[Any, np.dtype[np.int8]],
    threshold: Floats,
    thresholds: Thresholds,
) -> Flags:
    """Return which rows differ in gradients that are zero but for rounding on both sides."""
    found = np.zeros(len(verdict), bool)
    of_float32 = thresholds.for_dtype("float32")
    gradients_a, gradients_b = _ResultGradients(a), _ResultGradients(b)
    one_dimensional = _matches(a, "shape", lambda shape: "," not in shape)[row_a]
    gradients = _matches(a, "direction", {"backward", "parameters_grad"}.__contains__)[row_a]
    differing = verdict == VERDICTS.index("statistics")
    for at in np.flatnonzero(differing & one_dimensional & gradients).tolist():
        own = float(threshold[at])
        found[at] = gradients_a.sum_to_zero(int(row_a[at]), own, of_float32) and (
            gradients_b.sum_to_zero(int(row_b[at]), own, of_float32)
        )
    return found


class _ResultGradients:
    """The gradients of calls' results in one table: those of parameters are sums of them."""

    def __init__(self, side: OperatorColumns) -> None:
        self._side = side
        self._of_modules: defaultdict[tuple[str | None, str | None], list[int]] | None = None

    def sum_to_zero(self, row: int, threshold: float, of_float32: float) -> bool:
        """Return whether a row is a gradient that is zero but for rounding."""
        side = self._side
        size = _size(side, row)
        calls = self._made_of(row) if size is not None and size[0] == 1 else []
        rows = [
            other
            for call in calls
            for other in side.rows_of(call)
            if side.texts("section").text(other) == "input" and _size(side, other) is not None
        ]
        squares, count = 0.0, 0
        for other in rows:
            _, elements = _size(side, other) or (0, 0)
            norm = abs(float(side.numbers("norm")[other]))
            if not math.isfinite(norm):  # not recorded for float64
                norm = _largest(side, other) * math.sqrt(elements)
            squares, count = squares + norm * norm, count + elements
        if size is None or not size[1] or count <= size[1]:
            return False
        root = math.sqrt(count / size[1])
        limit = math.sqrt(squares / count) * root * (threshold + of_float32 * root)
        return _largest(side, row) <= limit

    def _made_of(self, row: int) -> list[int]:
        """Return the backward calls whose results' gradients a gradient is a sum of."""
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


def _size(side: OperatorColumns, row: int) -> tuple[int, int] | None:
    """Return the number of dimensions and of elements of a tensor."""
    text = side.texts("shape").text(row)
    if text is None:
        return None
    shape = json.loads(text)
    return len(shape), math.prod(shape)


def _largest(side: OperatorColumns, row: int) -> float:
    """Return the largest absolute value; infinite where it is unknown or not finite."""
    ends = [abs(float(side.numbers(name)[row])) for name in ("min", "max")]
    return max(ends) if all(map(math.isfinite, ends)) else math.inf


def _by_dtype(side: OperatorColumns, table: Mapping[str, float], otherwise: float) -> Floats:
    dtypes = side.texts("dtype")
    values = [table.get(dtype, otherwise) for dtype in dtypes.values]
    found: Floats = np.asarray([*values, otherwise])[dtypes.codes]
    return found


def _tensors(side: OperatorColumns) -> Flags:
    return np.append(side.texts("dtype").codes >= 0, False)


def _shards(side: OperatorColumns) -> Flags:
    return _matches(side, "placements", lambda text: "Shard" in text or "Partial" in text)


def _matches(side: OperatorColumns, column: str, holds: Callable[[str], bool]) -> Flags:
    """Return for each row whether its text is one that `holds`; False for row -1."""
    texts = side.texts(column)
    return np.append(np.asarray([*map(holds, texts.values), False])[texts.codes], False)


def _texts_differ(
    a: OperatorColumns, b: OperatorColumns, column: str, row_a: Codes, row_b: Codes
) -> Flags:
    codes_a, codes_b = shared_codes(a.texts(column), b.texts(column))
    differ: Flags = codes_a[row_a] != codes_b[row_b]
    return differ


def _checksums_differ(
    a: OperatorColumns, b: OperatorColumns, row_a: Codes, row_b: Codes, thresholds: Thresholds
) -> Flags:
    codes_a, codes_b = shared_codes(a.texts("checksum"), b.texts("checksum"))
    codes_a, codes_b = codes_a[row_a], codes_b[row_b]
    differ: Flags = (codes_a >= 0) & (codes_b >= 0) & (codes_a != codes_b)
    if not thresholds.exact:
        differ &= ~a.is_known("max")[row_a] & ~b.is_known("max")[row_b]
    return differ


def _values_differ(
    a: OperatorColumns, b: OperatorColumns, row_a: Codes, row_b: Codes, threshold: Floats
) -> Flags:
    """Numbers are held to their threshold, devices to their type, all else to equality."""
    differ = _texts_differ(a, b, "value", row_a, row_b)
    types, values_a, values_b = a.texts("type"), a.texts("value"), b.texts("value")
    for at in np.flatnonzero(differ).tolist():
        x, y = values_a.text(int(row_a[at])), values_b.text(int(row_b[at]))
        kind = types.text(int(row_a[at]))
        if kind == "float":
            differ[at] = not _close(x, y, float(threshold[at]))
        elif kind == "torch.device":
            differ[at] = (x or "").partition(":")[0] != (y or "").partition(":")[0]
    return differ


def _close(x: str | None, y: str | None, threshold: float) -> bool:
    try:
        one, other = float(x or ""), float(y or "")
    except ValueError:
        return False
    return abs(one - other) <= threshold * max(abs(one), abs(other))
