"""A drop-in for verl's `calculate_debug_metrics`, with the per-round numbers beside it.

    from stagescope_workers import calculate_debug_metrics

It returns the keys and values of verl's function (of probabilities, over the whole batch, NaN where
there is a NaN under the mask), but in float64. In addition it returns `per_round/*` as verl's pull
request 5229 defines them, and `nonfinite/*`, which explains why a value is NaN.

It runs in the training process, so it needs only numpy and compiles nothing; the service's own
numbers, over the finite tokens, come from its statistics.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_wire.errors import InvalidTensor
from stagescope_workers.payload import Array, IntArray, host_tensor

_logger = logging.getLogger(__name__)

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
Metrics = dict[str, float]

_PREFIX: Final = "training/rollout_probs_diff"
_PEARSON: Final = "training/rollout_actor_probs_pearson_corr"
_BLOCK: Final = 1 << 18
"""Tokens of a block."""
_SHORT: Final = 256
"""Mean tokens of a run below which a selection by token is faster than one by slices."""
_LINE: Final = 16
"""float32 values of a cache line."""
_ON_ONE_THREAD: Final = 8192
"""Products that OpenBLAS sums on the calling thread: it shares more than 10 000."""
_NEAR_ONE: Final = -1.0
"""A log-prob above which e^p - 1 keeps digits that e^p loses."""
_FEW: Final = 1024
"""Tokens of a block that mostly tell whether any is near 1."""
_KEPT: Final = 1e-3
"""The part of a product that its mean may leave: three of its 16 digits."""
_FLOATS: Final = ("float64", "float32", "bfloat16", "float16")


def calculate_debug_metrics(data: object) -> Metrics:
    """Compare the trainer's and the rollout's probabilities, and their log-probs by round.

    Args:
        data: A DataProto (anything with `.batch`), a TensorDict or a dict of torch or numpy
            tensors: `rollout_log_probs`, `old_log_probs`, `responses` (for its width) and
            `response_mask`, else `attention_mask` (its last columns), else every token counts.
            [rows, tokens], or rows of different lengths (nested, lists) throughout.

    Returns:
        verl's five keys, `per_round/*` and `nonfinite/{stream}_{nan,posinf,neginf}`.

    Raises:
        KeyError: a log-prob tensor is missing.
        InvalidTensor: shapes that cannot be compared.
    """
    batch = _tensors(data)
    train, rows = _values("old_log_probs", batch["old_log_probs"], _FLOATS)
    rollout, other_rows = _values("rollout_log_probs", batch["rollout_log_probs"], _FLOATS)
    mask, mask_rows = _mask(batch, rollout, other_rows)
    if rows is not None or other_rows is not None or mask_rows is not None:
        _check_rows({"old": rows, "rollout": other_rows, "mask": mask_rows})
    scan = _Scan()
    if not train.shape == rollout.shape == mask.shape:
        if mask.any():
            return _unequal_shapes(train, rollout, mask != 0)
    elif rows is None and train.ndim == 2:
        for block in _row_blocks(train.shape):
            scan.add(train[block], rollout[block], mask[block])
    else:
        scan.add(train, rollout, mask, None if rows is None else np.cumsum(rows))
    if not scan.tokens:
        _logger.warning("the mask covers no token: no mismatch is computed")
    return {**scan.probabilities(), **scan.per_round(), **scan.non_finite()}


def _find_contiguous_segments(mask_1d: object) -> list[tuple[int, int]]:
    """Find the runs of 1s of a row's mask.

    A 1 opens a run and a 0 closes it; any other value changes nothing.

    Returns:
        (start, end) of each run, end exclusive.
    """
    _, (inside,) = _runs(np.asarray(_values("mask_1d", mask_1d)[0]).reshape(1, -1))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _calculate_per_round_metrics(
    train_log_probs: object, rollout_log_probs: object, response_mask: object
) -> Metrics:
    """Compare log-probs by round: the i-th run of 1s of each row, over the whole batch.

    Args:
        train_log_probs, rollout_log_probs, response_mask: [rows, tokens], equally wide.

    Returns:
        `per_round/total_rounds`. If there are rounds, also `round_{i}_abs_diff_mean` (weighted
        by token), `round_{i}_token_count`, `max_round_diff` and `max_diff_value`. The last two are
        the round with the largest mean (the lowest of equals, -1 if all are NaN) and that mean.

    Raises:
        InvalidTensor: the shapes differ.
    """
    train, _ = _values("train_log_probs", train_log_probs, _FLOATS)
    rollout, _ = _values("rollout_log_probs", rollout_log_probs, _FLOATS)
    mask, _ = _values("response_mask", response_mask)
    if not train.shape == rollout.shape == mask.shape or mask.ndim != 2:
        raise InvalidTensor(
            f"train_log_probs {train.shape}, rollout_log_probs {rollout.shape} and response_mask "
            f"{mask.shape} differ",
            expected="three tensors [rows, tokens] of one shape",
        )
    scan = _Scan()
    for block in _row_blocks(train.shape):
        scan.add(train[block], rollout[block], mask[block], probabilities=False)
    return scan.per_round()


def _tensors(data: object) -> dict[str, object]:
    batch: Any = getattr(data, "batch", data)  # a dict or a TensorDict
    return {str(name): batch[name] for name in batch.keys()}  # noqa: SIM118 - TensorDict


def _values(
    name: str, value: object, dtypes: tuple[str, ...] | None = None
) -> tuple[Array, IntArray | None]:
    """Return a tensor as numpy (bfloat16 as float32), and its row lengths where it is ragged."""
    dtype, shape, buffer, offsets = host_tensor(name, value)
    if dtypes is not None and dtype not in dtypes:
        raise InvalidTensor(
            f"{name} of shape {shape} has dtype {dtype}", expected=f"one of {', '.join(dtypes)}"
        )
    array = np.asarray(buffer).reshape(shape)
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array, None if offsets is None else np.diff(offsets)


def _mask(
    batch: Mapping[str, object], rollout: Array, rows: IntArray | None
) -> tuple[Array, IntArray | None]:
    name = next((n for n in ("response_mask", "attention_mask") if n in batch), None)
    if name is None:
        _logger.warning("no response_mask and no attention_mask: every token counts")
        return np.ones(rollout.shape, np.int8), rows
    mask, lengths = _values(name, batch[name])
    if lengths is None and mask.ndim == 2 and "responses" in batch:
        shape = host_tensor("responses", batch["responses"])[1]
        # As verl slices: width 0 means the whole mask.
        mask = mask[:, -shape[1] :] if len(shape) == 2 else mask
    return mask, lengths


def _check_rows(lengths: Mapping[str, IntArray | None]) -> None:
    first = next(value for value in lengths.values() if value is not None)
    for name, value in lengths.items():
        if value is None or not np.array_equal(value, first):
            shown = {n: "padded" if v is None else v.tolist()[:8] for n, v in lengths.items()}
            raise InvalidTensor(
                f"{name} has other rows than the rest: {shown}",
                expected="old_log_probs, rollout_log_probs and the mask with rows of one length",
            )


def _unequal_shapes(train: Array, rollout: Array, selected: Bool) -> Metrics:
    """Treat different shapes as verl does: broadcast them, with a correlation of 0."""
    try:
        with np.errstate(all="ignore"):
            u, v = (np.expm1(values.astype(np.float64)) for values in (train, rollout))
            difference, mask = np.broadcast_arrays(np.abs(u - v), selected)
            metrics = _differences(difference[mask])
    except ValueError as error:
        raise InvalidTensor(
            f"old_log_probs {train.shape}, rollout_log_probs {rollout.shape} and their mask "
            f"{selected.shape} cannot be compared",
            expected="three tensors [rows, tokens] of one shape",
        ) from error
    return {**metrics, _PEARSON: 0}


def _differences(difference: Float64) -> Metrics:
    return {
        f"{_PREFIX}_valid": 1,
        f"{_PREFIX}_max": float(difference.max()),
        f"{_PREFIX}_mean": float(difference.mean()),
        f"{_PREFIX}_std": float(difference.std(ddof=1)) if difference.size > 1 else math.nan,
    }


def _runs(mask: Array) -> tuple[Bool, Bool]:
    """[rows, tokens]: whether a value is not 0, and whether a token is in a run, which only 1 opens
    and only 0 closes. The two are one object if all values are 0 or 1."""
    inside: Bool = mask == 1
    # Seen as unsigned, a negative value is a large one.
    if mask.dtype.kind in "iu" and mask.view(f"u{mask.itemsize}").max(initial=0) <= 1:
        return inside, inside
    nonzero: Bool = mask != 0
    if np.count_nonzero(nonzero) == np.count_nonzero(inside):
        return inside, inside
    events = np.where(inside | ~nonzero, np.arange(mask.shape[1]), -1)
    latest = np.maximum.accumulate(events, axis=1)
    found: Bool = (latest >= 0) & np.take_along_axis(inside, np.maximum(latest, 0), axis=1)
    return nonzero, found


class _Rounds(NamedTuple):
    """The runs of a block, in the order of their tokens."""

    starts: IntArray
    """The first token of each, as a flat index."""
    lengths: IntArray
    numbers: IntArray
    """How many runs of the same row are before it."""
    inside: Bool
    """[tokens], whether a token is in a run."""

    def select(self, values: Array, out: Float64) -> None:
        """Write the values of the runs' tokens; slices are faster if the runs are long."""
        if self.starts.size * _SHORT > out.size:
            out[:] = values[self.inside]
            return
        runs = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        pieces = [values[start : start + length] for start, length in runs]
        np.concatenate(pieces, out=out, casting="unsafe")


def _rounds(inside: Bool, row_starts: IntArray) -> _Rounds:
    """Find the runs of flat rows that begin at `row_starts`; a run ends with its row."""
    is_edge = np.empty(inside.size, np.bool_)
    np.not_equal(inside[1:], inside[:-1], out=is_edge[1:])
    is_edge[row_starts[row_starts < inside.size]] = True
    edges = np.flatnonzero(is_edge)
    on = inside[edges]
    starts, lengths = edges[on], np.diff(edges, append=inside.size)[on]
    row = np.searchsorted(row_starts, starts, "right")
    first = np.searchsorted(row, row)
    return _Rounds(starts, lengths, np.arange(starts.size) - first, inside)


def _row_blocks(shape: tuple[int, ...]) -> list[slice]:
    """Slices of few rows, so that numpy's intermediate arrays stay in the cache."""
    step = max(1, _BLOCK // max(1, shape[1]))
    return [slice(row, row + step) for row in range(0, shape[0], step)]


def _seconds(columns: tuple[Float64, Float64, Float64], totals: Float64) -> Float64:
    """Return the second moments [3, 3] of three columns, of which only those in use are right.

    Products of the columns as they are lose digits where a mean is large beside its deviation: then
    the columns are centred, in place.
    """
    means = totals / columns[0].size
    products = _products(columns)
    seconds: Float64 = products - np.outer(totals, means)
    if (np.diag(seconds) > _KEPT * np.diag(products)).all():
        return seconds
    for column, mean in zip(columns, means, strict=True):
        column -= mean
    return _products(columns)


def _products(columns: tuple[Float64, Float64, Float64]) -> Float64:
    found = np.zeros((3, 3))
    for i, j in ((0, 0), (1, 1), (2, 2), (1, 2)):
        found[i, j] = _dot(columns[i], columns[j])
    return found


def _dot(x: Float64, y: Float64) -> float:
    """Return the sum of products of two columns.

    The BLAS takes a quarter of einsum's time, but for long columns it would start its threads.
    """
    whole = x.size - x.size % _ON_ONE_THREAD
    left, right = (each[:whole].reshape(-1, _ON_ONE_THREAD) for each in (x, y))
    return float((left[:, None, :] @ right[:, :, None]).sum()) + float(x[whole:] @ y[whole:])


class _Scan:
    """Sums over blocks of rows; second moments merge by Chan's formulas."""

    def __init__(self) -> None:
        self.tokens = 0
        self._largest = -math.inf
        self._total = 0.0
        """Sum of |e^p - e^q|. Unlike the running mean it stays inf once a value is inf."""
        self._means = np.zeros(3)
        """Means of |e^p - e^q|, e^p and e^q, the last two less `_base`."""
        self._base = np.zeros(3)
        """1 for a stream that had a value near 1, since e^p - 1 has more digits there; else 0."""
        self._seconds = np.zeros((3, 3))
        self._low, self._high = np.full(2, np.inf), np.full(2, -np.inf)
        """Of each stream, until two of its values differ."""
        self._counts: IntArray = np.zeros(0, np.int64)
        self._sums = np.zeros(0)
        self._nonfinite = np.zeros((2, 3), np.int64)
        self._space = np.empty((3, 0))

    def add(
        self,
        train: Array,
        rollout: Array,
        mask: Array,
        row_ends: IntArray | None = None,
        *,
        probabilities: bool = True,
    ) -> None:
        """Add a block of rows, or one packed row of samples that end at `row_ends`."""
        with np.errstate(all="ignore"):
            rows = mask.reshape(1, -1) if row_ends is not None else mask
            nonzero, inside = _runs(rows)
            if row_ends is None:
                starts = np.arange(rows.shape[0]) * rows.shape[1]
            else:
                starts = np.concatenate([[0], row_ends[:-1]]).astype(np.int64)
            rounds = _rounds(inside.reshape(-1), starts)
            train, rollout = train.reshape(-1), rollout.reshape(-1)
            columns = self._columns(int(rounds.lengths.sum()))
            is_finite = False
            if rounds.starts.size:
                for values, column in ((train, columns[0]), (rollout, columns[1])):
                    # Load the block in order: the processor does not foresee the gaps between runs.
                    values[::_LINE].max()
                    rounds.select(values, column)
                is_finite = self._add_rounds(rounds, columns)
            if probabilities:
                # verl counts every value but 0; the rounds are of values 0 and 1.
                if nonzero is not inside:
                    selected = nonzero.reshape(-1)
                    columns = self._columns(int(np.count_nonzero(selected)))
                    columns[0], columns[1] = train[selected], rollout[selected]
                    is_finite = False
                self._add_probabilities(columns, is_finite)

    def _columns(self, tokens: int) -> Float64:
        """Return space [3, tokens]. It serves all blocks: the system would clear new pages for
        each."""
        if self._space.shape[1] < tokens:
            self._space = np.empty((3, tokens))
        return self._space[:, :tokens]

    def _add_rounds(self, rounds: _Rounds, columns: Float64) -> bool:
        """Add |p - q| by round; return whether all are finite."""
        p, q, difference = columns
        np.abs(np.subtract(p, q, out=difference), out=difference)
        firsts = np.cumsum(rounds.lengths) - rounds.lengths
        of_runs = np.add.reduceat(difference, firsts)
        counts = np.bincount(rounds.numbers, weights=rounds.lengths).astype(np.int64)
        sums = np.bincount(rounds.numbers, weights=of_runs)
        if counts.size > self._counts.size:
            more = counts.size - self._counts.size
            self._counts, self._sums = (
                np.pad(self._counts, (0, more)),
                np.pad(self._sums, (0, more)),
            )
        self._counts[: counts.size] += counts
        self._sums[: sums.size] += sums
        return bool(np.isfinite(of_runs).all())

    def _add_probabilities(self, columns: Float64, is_finite: bool) -> None:
        """Add the tokens of two streams; `is_finite`: it is known that all of them are."""
        p, q, difference = columns
        n = p.size
        if not n:
            return
        for side, x in enumerate((p, q)):
            if not self._low[side] < self._high[side]:
                self._low[side] = min(self._low[side], x.min())
                self._high[side] = max(self._high[side], x.max())
        if not is_finite:
            self._count_non_finite(p, q)
        # e^p - 1 is precise where e^p is close to 1, and e^p where all are close to 0.
        near = [x[:_FEW].max() > _NEAR_ONE or x.max() > _NEAR_ONE for x in (p, q)]
        base = np.array([0.0, *near])
        if base[1] != base[2]:
            np.subtract(np.exp(p), np.exp(q), out=difference)
        # In place: fewer columns compete for the cache.
        u, v = (
            (np.expm1 if near else np.exp)(x, out=x) for x, near in ((p, base[1]), (q, base[2]))
        )
        if base[1] == base[2]:
            np.subtract(u, v, out=difference)
        np.abs(difference, out=difference)
        self._largest = np.maximum(self._largest, difference.max())
        totals = np.array([difference.sum(), u.sum(), v.sum()])
        self._total += float(totals[0])
        means = totals / n
        seconds = _seconds((difference, u, v), totals)
        common = np.maximum(base, self._base)
        means -= common - base
        if self.tokens:
            self._means -= common - self._base
        self._base = common
        shift = means - self._means
        total = self.tokens + n
        self._seconds += seconds
        if self.tokens:
            self._seconds += np.outer(shift, shift) * (self.tokens * n / total)
        self._means += shift * (n / total)
        self.tokens = total

    def _count_non_finite(self, p: Float64, q: Float64) -> None:
        for side, values in enumerate((p, q)):
            self._nonfinite[side, 0] += np.isnan(values).sum()
            self._nonfinite[side, 1] += np.isposinf(values).sum()
            self._nonfinite[side, 2] += np.isneginf(values).sum()

    def probabilities(self) -> Metrics:
        """Return verl's keys."""
        if not self.tokens:
            names = (*(f"{_PREFIX}_{name}" for name in ("max", "mean", "std")), _PEARSON)
            return {f"{_PREFIX}_valid": 0, **dict.fromkeys(names, math.nan)}
        spread = float(self._seconds[0, 0])
        return {
            f"{_PREFIX}_valid": 1,
            f"{_PREFIX}_max": float(self._largest),
            f"{_PREFIX}_mean": self._total / self.tokens,
            f"{_PREFIX}_std": math.sqrt(spread / (self.tokens - 1))
            if self.tokens > 1
            else math.nan,
            _PEARSON: self._pearson(),
        }

    def _pearson(self) -> float:
        if not bool((self._low < self._high).all()):
            return math.nan
        with np.errstate(all="ignore"):
            scale = math.sqrt(self._seconds[1, 1]) * math.sqrt(self._seconds[2, 2])
        if not scale > 0.0:
            return math.nan
        value = float(self._seconds[1, 2]) / scale
        return value if math.isnan(value) else min(1.0, max(-1.0, value))

    def per_round(self) -> Metrics:
        """Return the keys of the pull request."""
        metrics: Metrics = {"per_round/total_rounds": self._counts.size}
        if not self._counts.size:
            return metrics
        largest, largest_round = -1.0, -1
        pairs = zip(self._counts.tolist(), self._sums.tolist(), strict=True)
        for number, (count, total) in enumerate(pairs):
            mean = total / count
            metrics[f"per_round/round_{number}_abs_diff_mean"] = mean
            metrics[f"per_round/round_{number}_token_count"] = count
            if mean > largest:
                largest, largest_round = mean, number
        metrics["per_round/max_round_diff"] = largest_round
        if largest_round >= 0:
            metrics["per_round/max_diff_value"] = largest
        return metrics

    def non_finite(self) -> Metrics:
        """Return how many values under the mask are not finite, by kind."""
        return {
            f"nonfinite/{stream}_{kind}": int(self._nonfinite[side, column])
            for side, stream in enumerate(("old", "rollout"))
            for column, kind in enumerate(("nan", "posinf", "neginf"))
        }
