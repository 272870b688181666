"""`replay`: a stored step through the user's own loss function, held against what was stored."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from stagescope import render
from stagescope.batch import Batch, Tensor, check_rows, widened
from stagescope.flow import order_of
from stagescope.frames import Table
from stagescope.rollouts import batch_of
from stagescope.wire.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from stagescope.step import Step


BITWISE: Final = "bitwise"
EQUAL: Final = "equal"
WITHIN: Final = "within tolerance"
DIFFERENT: Final = "different"
VERDICTS: Final = (BITWISE, EQUAL, WITHIN, DIFFERENT)
"""The best first. `equal` are equal values of another dtype."""

TOLERANCE: Final = {
    "float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2,
}  # fmt: skip
"""|d| <= tolerance * max(1, |stored|), of the coarser of two dtypes; whole numbers are exact."""


def in_computed_dtype(stored: Tensor, made: Tensor) -> Tensor:
    """Return a stored number in the dtype that it was made in, if it is one of its values.

    Numbers are recorded as Python's floats, whatever they had been.
    """
    if stored.values.ndim or made.dtype == "bfloat16" or made.values.dtype.kind != "f":
        return stored
    with np.errstate(over="ignore"):
        narrow = stored.values.astype(made.values.dtype)
    exact = _equal(narrow.astype(np.float64), stored.values.astype(np.float64))
    return Tensor(made.dtype, narrow) if exact.all() else stored


def computed_tensor(name: str, value: Any) -> Tensor:
    """Return what a loss function gave as bits and dtype; torch is not imported for it.

    Raises:
        InvalidInput: no numbers.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().contiguous()
        if str(value.dtype) == "torch.bfloat16":
            library = sys.modules[type(value).__module__.partition(".")[0]]
            return Tensor("bfloat16", value.view(library.int16).numpy().view(np.uint16))
        value = value.numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise InvalidInput(
            f"{name} is a {type(value).__name__}", expected="a tensor, an array or a number"
        )
    return Tensor(array.dtype.name, array)


class TensorComparison(NamedTuple):
    """Two tensors held against each other, in float64; whole numbers exactly."""

    verdict: str
    compared: int
    differ: int
    max_abs: float
    mean_abs: float
    coordinate: tuple[int, ...] | None
    """Of the largest |d|; None where nothing differs, or shapes do."""
    stored: float | None
    computed: float | None
    outside: int
    dtype: str
    dtype_stored: str


def compare(
    stored: Tensor, computed: Tensor, mask: Array | None, tolerance: float | None = None
) -> TensorComparison:
    """Compare what was computed with what is stored.

    Args:
        stored, computed: of one shape, else they are different.
        mask: bool; where it has their shape, only what it marks is compared.
        tolerance: in the place of `TOLERANCE`.
    """
    dtypes = (computed.dtype, stored.dtype)
    if stored.values.shape != computed.values.shape:
        nothing = (0, 0, np.inf, np.inf, None, None, None, 0)
        return TensorComparison(DIFFERENT, *nothing, *dtypes)
    a, b = widened(stored), widened(computed)
    same = _equal(a, b)
    counted = mask if mask is not None and mask.shape == a.shape else np.ones(a.shape, bool)
    outside = int((~same & ~counted).sum())
    differ = ~same & counted
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.where(same, 0.0, np.abs(a.astype(np.float64) - b.astype(np.float64)))
    d = np.where(np.isnan(d), np.inf, d)  # one of them is no number
    are_integers = a.dtype.kind in "iub" and b.dtype.kind in "iub"
    if are_integers:  # float64 does not tell neighbours apart beyond 2^53
        d = np.where(same, 0.0, np.maximum(d, 1.0))
    count = int(counted.sum())
    if not differ.any():
        exact = stored.dtype == computed.dtype and _bits(stored, counted) == _bits(
            computed, counted
        )
        verdict = BITWISE if exact else EQUAL
        return TensorComparison(verdict, count, 0, 0.0, 0.0, None, None, None, outside, *dtypes)
    at = tuple(map(int, np.unravel_index(np.where(differ, d, -1.0).argmax(), a.shape)))
    allowed = _allowed(a, dtypes, tolerance)
    verdict = WITHIN if not are_integers and (d <= allowed)[differ].all() else DIFFERENT
    return TensorComparison(
        verdict, count, int(differ.sum()), float(d[at]), float(d[counted].mean()), at,
        float(a[at]), float(b[at]), outside, *dtypes,
    )  # fmt: skip


def _equal(a: Array, b: Array) -> Array:
    """Where two arrays hold the same value; NaN and NaN do."""
    if a.dtype.kind in "iub" and b.dtype.kind in "iub":
        return np.asarray(a == b)  # exact also beyond 2^53
    return np.asarray((a == b) | (np.isnan(a) & np.isnan(b)))


def _bits(tensor: Tensor, counted: Array) -> bytes:
    return np.ascontiguousarray(tensor.values)[counted].tobytes()


def _allowed(a: Array, dtypes: tuple[str, str], tolerance: float | None) -> Array:
    result = max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
    if tolerance is not None:
        result = tolerance
    size = np.abs(a.astype(np.float64))
    # What is not finite is either the same or it is not.
    return np.where(np.isfinite(size), result * np.maximum(size, 1.0), 0.0)


Array = np.ndarray[Any, Any]
LossFunction = Callable[[Batch], Mapping[str, Any]]
"""Takes a microbatch, returns its intermediates by name: tensors, arrays or numbers."""

_ORDER: Final = (
    "name", "verdict", "max_abs", "mean_abs", "rank", "part", "sample_id", "coordinate", "stored",
    "computed",
)  # fmt: skip


class Replay(Table):
    """A row an intermediate of a microbatch, in the order in which data flow.

    Columns: `verdict` (see VERDICTS), `compared` and `differ` (elements compared, and how many are
    not the same), `max_abs` and `mean_abs` of |d|, `coordinate` of the largest, its `sample_id`,
    `stored` and `computed` value, `dtype` and `dtype_stored`, `outside` (how many differ where the
    mask does not count).

    Usage:
        >>> found = stagescope.replay(session.step(5), loss)
        >>> found.same, found.first
    """

    __slots__ = ()

    @property
    def first(self) -> dict[str, Any] | None:
        """The first intermediate that is different; else the first within tolerance; else None."""
        for verdict in (DIFFERENT, WITHIN):
            if verdict in self["verdict"]:
                return self[self["verdict"].index(verdict)]
        return None

    @property
    def same(self) -> bool:
        """Whether nothing differs by more than the tolerance."""
        return DIFFERENT not in self["verdict"]

    @property
    def verdict(self) -> str:
        """The worst verdict of all intermediates."""
        return str(max(self["verdict"], key=VERDICTS.index))

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return the verdict, the first difference, and a line an intermediate's name."""
        lines = render.wrapped("", _sentence(self.first, len(self)), width)
        names = dict.fromkeys(self["name"])
        columns: dict[str, list[Any]] = {"name": [*names], "verdict": [], "microbatches": [],
                                         "max_abs": [], "mean_abs": []}  # fmt: skip
        for name in names:
            of_name = self.where(name=name)
            columns["verdict"].append(max(of_name["verdict"], key=VERDICTS.index))
            columns["microbatches"].append(len(of_name))
            columns["max_abs"].append(max(of_name["max_abs"], key=_largest))
            counts, means = np.array(of_name["compared"]), np.array(of_name["mean_abs"])
            columns["mean_abs"].append(float((counts * means).sum() / max(counts.sum(), 1)))
        lines += render.text_table(columns, units={}, width=width)
        for what in ("not_stored", "not_computed"):
            if names_of := self.about.get(what):
                text = f"{what.replace('_', ' ')}: {', '.join(names_of)}"
                lines += render.wrapped("", text, width)
        return lines


def replay(
    source: Batch | Step | str | Path,
    fn: LossFunction,
    *,
    stage: str | None = None,
    tolerance: float | None = None,
) -> Replay:
    """Put a stored step through `fn`, microbatch by microbatch as it was kept, and compare.

    Args:
        source: a batch, a step of a session, or a file of `stagescope batch --output`.
        fn: called with each microbatch (a `Batch`: `batch.as_tensors()`, `batch["advantages"]`);
            returns intermediates by the names under which they were recorded: torch tensors,
            numpy arrays or numbers. It runs here, on the host.
        stage: whose microbatches; default: `actor_update`, else the last stage there is.
        tolerance: in the place of `TOLERANCE`, of every dtype.

    Returns:
        Every intermediate that both have; `first` is where they first differ.

    Raises:
        NotFound: nothing that `fn` returns is stored; says what is.
        InvalidInput: `fn` returns no mapping of names to numbers, or an intermediate of another
            shape than the stored one; or a batch whose tensors have other rows than it says.
    """
    batch = check_rows(batch_of(source))
    rows: list[dict[str, Any]] = []
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
            made = computed_tensor(name, value)
            _check_shape(name, location, stored, made)
            result = compare(in_computed_dtype(stored, made), made, _mask(micro), tolerance)
            rows.append({"name": name, **location, **_row(result, micro)})
        not_computed |= {name: None for name in recorded if name not in computed}
    if not rows:
        raise NotFound(
            f"nothing that the loss function returns is stored: {', '.join(not_stored) or 'none'}",
            expected=f"some of {', '.join(sorted(not_computed))}",
            advice="keep is_loss: init(keep={'what': ['is_loss', 'loss']})",
        )
    rows.sort(key=lambda row: order_of(row["name"], row["stage"]))
    heading = {name: batch.source.get(name) for name in ("run", "attempt", "step")}
    about = {**heading, "not_stored": [*not_stored], "not_computed": [*not_computed]}
    return Replay.of(Table.from_rows(rows, order=_ORDER, title="replay", about=about))


def _microbatches(
    batch: Batch, stage: str | None
) -> Iterator[tuple[dict[str, Any], Batch, tuple[str, ...]]]:
    """Yield where each was recorded, what it holds, and which intermediates it recorded."""
    if not batch.parts:
        yield {"stage": None, "role": None, "rank": None, "part": None}, batch, ()
    for part in batch.parts_of(stage) if batch.parts else ():
        location = {
            "stage": part.stage,
            "role": part.role,
            "rank": part.rank,
            "part": str(part.part),
        }
        made = [name for name in part.names if order_of(name) >= order_of("log_probs")]
        yield location, batch.microbatch(part), (*made, *part.numbers)


def _stored(micro: Batch, name: str) -> Tensor | None:
    if name in micro:
        return micro.tensor(name)
    if name in micro.numbers:
        return Tensor("float64", np.array(micro.numbers[name], np.float64))
    return None


def _check_shape(name: str, location: Mapping[str, Any], stored: Tensor, made: Tensor) -> None:
    """Raise InvalidInput where an intermediate cannot be held against the stored one."""
    shapes = [list(tensor.values.shape) for tensor in (made, stored)]
    if shapes[0] != shapes[1]:
        where = f"{location['stage']}, rank {location['rank']}, part {location['part']}"
        raise InvalidInput(
            f"{name} that the loss function returned has shape {shapes[0]} ({where})",
            expected=f"{shapes[1]}, as it is stored",
            advice="the function is called with a microbatch as it was kept: keep its rows and "
            "its width, padding included",
        )


def _mask(micro: Batch) -> Array | None:
    if "response_mask" not in micro:
        return None
    return np.asarray(micro["response_mask"] != 0)


def _row(result: TensorComparison, micro: Batch) -> dict[str, Any]:
    at, ids = result.coordinate, micro.sample_ids
    row = result._asdict() | {"coordinate": None if at is None else list(at)}
    of_rows = at and ids is not None and at[0] < len(ids)
    return row | {"sample_id": ids[at[0]] if of_rows and ids and at else None}


def _largest(value: float) -> float:
    return np.inf if np.isnan(value) else value


def _sentence(first: Mapping[str, Any] | None, count: int) -> str:
    if first is None:
        return f"the same, bit by bit or in value: {count} intermediates"
    where = ", ".join(
        f"{word} {first[name]}"
        for name, word in (("stage", ""), ("rank", "rank"), ("part", "part"))
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
