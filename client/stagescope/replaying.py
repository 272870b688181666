"""`replay`: run a stored step through a loss function and compare with the stored results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from stagescope.rollouts import batch_of
from stagescope.table import Row, Table
from stagescope_wire import render
from stagescope_wire.batch import Batch, Tensor, check_rows, widened
from stagescope_wire.batch.data import flow_index
from stagescope_wire.errors import InvalidInput, NotFound
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.tensorfile import Array

if TYPE_CHECKING:
    from stagescope.step import Step


BITWISE: Final = "bitwise"
EQUAL: Final = "equal"
WITHIN: Final = "within tolerance"
DIFFERENT: Final = "different"
VERDICTS: Final = (BITWISE, EQUAL, WITHIN, DIFFERENT)
"""The best first. `equal`: equal values of another dtype."""

TOLERANCE: Final = {
    "float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2,
}  # fmt: skip
"""|d| <= tolerance * max(1, |stored|), of the coarser of two dtypes; integers must be equal."""

Intermediate: TypeAlias = Any
"""A torch tensor, numpy array or number; torch may not be installed, so it cannot be named here."""
Mask: TypeAlias = npt.NDArray[np.bool_]


class _Location(TypedDict):
    """Where a microbatch was recorded; None if the batch has no parts."""

    stage: str | None
    role: str | None
    rank: int | None
    part: str | None


def in_computed_dtype(stored: Tensor, computed: Tensor) -> Tensor:
    """Return a stored scalar in the dtype of the computed one, if that represents it exactly.

    Scalars are recorded as Python floats, whatever their original dtype.
    """
    if stored.values.ndim or computed.dtype == "bfloat16" or computed.values.dtype.kind != "f":
        return stored
    with np.errstate(over="ignore"):
        narrow = stored.values.astype(computed.values.dtype)
    is_exact = _equal(narrow.astype(np.float64), stored.values.astype(np.float64))
    return Tensor(computed.dtype, narrow) if is_exact.all() else stored


def computed_tensor(name: str, value: Intermediate) -> Tensor:
    """Return a result of a loss function as a `Tensor`; torch is not imported.

    Raises:
        InvalidInput: it is not numeric.
    """
    if hasattr(value, "detach"):
        tensor = value.detach().cpu().contiguous()
        if str(tensor.dtype) == "torch.bfloat16":
            torch = sys.modules[type(tensor).__module__.partition(".")[0]]
            return Tensor("bfloat16", tensor.view(torch.int16).numpy().view(np.uint16))
        value = tensor.numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise InvalidInput(
            f"{name} is a {type(value).__name__}", expected="a tensor, an array or a number"
        )
    return Tensor(array.dtype.name, array)


class TensorComparison(NamedTuple):
    """The comparison of two tensors in float64, or of integers exactly."""

    verdict: str
    compared: int
    differ: int
    max_abs: float
    mean_abs: float
    coordinate: tuple[int, ...] | None
    """Index of the largest |d|; None if nothing differs, or if the shapes do."""
    stored: float | None
    computed: float | None
    outside: int
    dtype: str
    dtype_stored: str


def compare(
    stored: Tensor, computed: Tensor, mask: Mask | None, tolerance: float | None = None
) -> TensorComparison:
    """Compare a computed tensor with the stored one.

    Args:
        stored, computed: tensors of one shape; other tensors are different.
        mask: restricts the comparison if it has the shape of the tensors.
        tolerance: replaces `TOLERANCE`.
    """
    dtypes = (computed.dtype, stored.dtype)
    if stored.values.shape != computed.values.shape:
        nothing = (0, 0, np.inf, np.inf, None, None, None, 0)
        return TensorComparison(DIFFERENT, *nothing, *dtypes)
    a, b = widened(stored), widened(computed)
    equal = _equal(a, b)
    counted = mask if mask is not None and mask.shape == a.shape else np.ones(a.shape, bool)
    outside = int((~equal & ~counted).sum())
    differ = ~equal & counted
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.where(equal, 0.0, np.abs(a.astype(np.float64) - b.astype(np.float64)))
    d = np.where(np.isnan(d), np.inf, d)  # exactly one of the two is NaN
    are_integers = a.dtype.kind in "iub" and b.dtype.kind in "iub"
    if are_integers:  # float64 cannot represent adjacent integers beyond 2^53
        d = np.where(equal, 0.0, np.maximum(d, 1.0))
    count = int(counted.sum())
    if not differ.any():
        exact = stored.dtype == computed.dtype and _bits(stored, counted) == _bits(
            computed, counted
        )
        verdict = BITWISE if exact else EQUAL
        return TensorComparison(verdict, count, 0, 0.0, 0.0, None, None, None, outside, *dtypes)
    worst = tuple(map(int, np.unravel_index(np.where(differ, d, -1.0).argmax(), a.shape)))
    allowed = _allowed(a, dtypes, tolerance)
    verdict = WITHIN if not are_integers and (d <= allowed)[differ].all() else DIFFERENT
    return TensorComparison(
        verdict, count, int(differ.sum()), float(d[worst]), float(d[counted].mean()), worst,
        float(a[worst]), float(b[worst]), outside, *dtypes,
    )  # fmt: skip


def _equal(a: Array, b: Array) -> Mask:
    """Return where two arrays have equal values; NaN equals NaN."""
    if a.dtype.kind in "iub" and b.dtype.kind in "iub":
        return np.asarray(a == b)  # exact also beyond 2^53
    return np.asarray((a == b) | (np.isnan(a) & np.isnan(b)))


def _bits(tensor: Tensor, counted: Mask) -> bytes:
    return np.ascontiguousarray(tensor.values)[counted].tobytes()


def _allowed(a: Array, dtypes: tuple[str, str], tolerance: float | None) -> npt.NDArray[np.float64]:
    result = max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
    if tolerance is not None:
        result = tolerance
    size = np.abs(a.astype(np.float64))
    # Non-finite values must be equal.
    return np.where(np.isfinite(size), result * np.maximum(size, 1.0), 0.0)


LossFunction: TypeAlias = Callable[[Batch], Mapping[str, Intermediate]]
"""Takes a microbatch and returns its intermediates by name: tensors, arrays or numbers."""

_ORDER: Final = (
    "name", "verdict", "max_abs", "mean_abs", "rank", "part", "sample_id", "coordinate", "stored",
    "computed",
)  # fmt: skip


class Replay(Table):
    """One row per intermediate of a microbatch, in the order in which data flow.

    Column `verdict` is explained at VERDICTS. `compared`, `differ` and `outside` count elements:
    those compared, those that differ, and those that differ outside of the mask. `max_abs` and
    `mean_abs` are of |d|. `coordinate`, `sample_id`, `stored` and `computed` describe the element
    with the largest |d|. The types are `dtype` and `dtype_stored`.

    Usage:
        >>> result = stagescope.replay(session.step(5), loss)
        >>> result.same, result.first
    """

    __slots__ = ()

    @property
    def first(self) -> Row | None:
        """The first intermediate that is different; else the first within tolerance; else None."""
        for verdict in (DIFFERENT, WITHIN):
            if verdict in self["verdict"]:
                return self[self["verdict"].index(verdict)]
        return None

    @property
    def same(self) -> bool:
        """Whether all differences are within the tolerance."""
        return DIFFERENT not in self["verdict"]

    @property
    def verdict(self) -> str:
        """The worst verdict of all intermediates."""
        return str(max(self["verdict"], key=VERDICTS.index))

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return the verdict, the first difference, and one line per name of an intermediate."""
        lines = render.wrapped("", _sentence(self.first, len(self)), width)
        names = dict.fromkeys(self["name"])
        summaries: list[Row] = []
        for name in names:
            microbatches = self.where(name=name)
            counts = np.array(microbatches["compared"])
            means = np.array(microbatches["mean_abs"])
            summaries.append(
                {
                    "name": name,
                    "verdict": max(microbatches["verdict"], key=VERDICTS.index),
                    "microbatches": len(microbatches),
                    "max_abs": max(microbatches["max_abs"], key=_nan_as_inf),
                    "mean_abs": float((counts * means).sum() / max(counts.sum(), 1)),
                }
            )
        columns = {column: [row[column] for row in summaries] for column in summaries[0]}
        lines += render.text_table(columns, units={}, width=width)
        for field in ("not_stored", "not_computed"):
            if listed := self.about.get(field):
                text = f"{field.replace('_', ' ')}: {', '.join(listed)}"
                lines += render.wrapped("", text, width)
        return lines


def replay(
    source: Batch | Step | str | Path, fn: LossFunction, *, stage: str | None = None,
    tolerance: float | None = None,
) -> Replay:  # fmt: skip
    """Call `fn` with each stored microbatch of a step and compare its results with the stored ones.

    Args:
        source: a batch, a step of a session, or a file of `stagescope batch --output`.
        fn: called with each microbatch (a `Batch`: `batch.as_tensors()`, `batch["advantages"]`);
            returns intermediates by the names under which they were recorded: torch tensors,
            numpy arrays or numbers. It runs in this process, on the host.
        stage: the stage of the microbatches; default: `actor_update`, else the last stage.
        tolerance: replaces `TOLERANCE` for every dtype.

    Returns:
        Every intermediate that both have; `first` is where they first differ.

    Raises:
        NotFound: nothing that `fn` returns is stored; the message lists what is.
        InvalidInput: `fn` does not return a mapping of names to numbers, an intermediate has not
            the stored shape, or tensors of the batch have the wrong rows.
    """
    batch = check_rows(batch_of(source))
    rows: list[Row] = []
    not_stored: dict[str, None] = {}
    not_computed: dict[str, None] = {}
    for location, micro, recorded in _microbatches(batch, stage):
        computed = fn(micro)
        if not isinstance(computed, Mapping):
            raise InvalidInput(
                f"the loss function returned a {type(computed).__name__}",
                expected="a mapping of names to intermediates",
            )
        for name, value in computed.items():
            stored = _stored(micro, name)
            if stored is None:
                not_stored[name] = None
                continue
            tensor = computed_tensor(name, value)
            _check_shape(name, location, stored, tensor)
            stored = in_computed_dtype(stored, tensor)
            result = compare(stored, tensor, _mask(micro), tolerance)
            rows.append({"name": name, **location, **_row(result, micro)})
        not_computed |= {name: None for name in recorded if name not in computed}
    if not rows:
        raise NotFound(
            f"nothing that the loss function returns is stored: {', '.join(not_stored) or 'none'}",
            expected=f"some of {', '.join(sorted(not_computed))}",
            advice="keep is_loss: init(keep={'what': ['is_loss', 'loss']})",
        )
    rows.sort(key=lambda row: flow_index(row["name"], row["stage"]))
    heading = {name: batch.source.get(name) for name in ("run", "attempt", "step")}
    about = {**heading, "not_stored": [*not_stored], "not_computed": [*not_computed]}
    return Replay.from_table(Table.from_rows(rows, order=_ORDER, title="replay", about=about))


def _microbatches(
    batch: Batch, stage: str | None
) -> Iterator[tuple[_Location, Batch, tuple[str, ...]]]:
    """Yield each microbatch's location, its rows, and the names of its recorded intermediates."""
    if not batch.parts:
        yield {"stage": None, "role": None, "rank": None, "part": None}, batch, ()
    for part in batch.parts_of(stage) if batch.parts else ():
        location = _Location(stage=part.stage, role=part.role, rank=part.rank, part=str(part.part))
        computed = [name for name in part.names if flow_index(name) >= flow_index("log_probs")]
        yield location, batch.microbatch(part), (*computed, *part.numbers)


def _stored(micro: Batch, name: str) -> Tensor | None:
    if name in micro:
        return micro.tensor(name)
    if name in micro.numbers:
        return Tensor("float64", np.array(micro.numbers[name], np.float64))
    return None


def _check_shape(name: str, location: _Location, stored: Tensor, computed: Tensor) -> None:
    """Raise InvalidInput if an intermediate has another shape than the stored one."""
    shapes = [list(tensor.values.shape) for tensor in (computed, stored)]
    if shapes[0] != shapes[1]:
        where = f"{location['stage']}, rank {location['rank']}, part {location['part']}"
        raise InvalidInput(
            f"{name} that the loss function returned has shape {shapes[0]} ({where})",
            expected=f"{shapes[1]}, as it is stored",
            advice="the function is called with the microbatch as it was kept: its result must "
            "have the same rows and width, with padding",
        )


def _mask(micro: Batch) -> Mask | None:
    if "response_mask" not in micro:
        return None
    return np.asarray(micro["response_mask"] != 0)


def _row(result: TensorComparison, micro: Batch) -> Row:
    index, ids = result.coordinate, micro.sample_ids or ()
    return result._asdict() | {
        "coordinate": None if index is None else list(index),
        "sample_id": ids[index[0]] if index and index[0] < len(ids) else None,
    }


def _nan_as_inf(value: float) -> float:
    return np.inf if np.isnan(value) else value


def _sentence(first: JsonObject | None, count: int) -> str:
    if first is None:
        return f"the same, bit by bit or in value: {count} intermediates"
    where = ", ".join(
        f"{label} {first[name]}"
        for name, label in (("stage", ""), ("rank", "rank"), ("part", "part"))
        if first[name] is not None
    ).strip()
    head = "first difference" if first["verdict"] == DIFFERENT else "same within tolerance; first"
    text = f"{head}: {first['name']} ({where})"
    sample = f" of sample {first['sample_id']}" if first["sample_id"] else ""
    return (
        f"{text} at {first['coordinate']}{sample}: stored {first['stored']:.9g}, computed "
        f"{first['computed']:.9g}; {first['differ']} of {first['compared']} differ, max |d| "
        f"{first['max_abs']:.3g}, mean |d| {first['mean_abs']:.3g}"
    )
