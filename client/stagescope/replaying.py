"""`replay`: a stored step through the user's own loss function, held against what was stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from stagescope import render
from stagescope.batch import Batch, Tensor, check_rows
from stagescope.differences import (
    DIFFERENT,
    VERDICTS,
    WITHIN,
    Comparison,
    as_made,
    compare,
    computed_tensor,
)
from stagescope.errors import InvalidInput, NotFound
from stagescope.flow import order_of
from stagescope.frames import Table
from stagescope.rollouts import batch_of

if TYPE_CHECKING:
    from stagescope.step import Step

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
                told = f"{what.replace('_', ' ')}: {', '.join(names_of)}"
                lines += render.wrapped("", told, width)
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
    for place, micro, recorded in _microbatches(batch, stage):
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
            _check_shape(name, place, stored, made)
            found = compare(as_made(stored, made), made, _mask(micro), tolerance)
            rows.append({"name": name, **place, **_row(found, micro)})
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
        place = {"stage": part.stage, "role": part.role, "rank": part.rank, "part": str(part.part)}
        made = [name for name in part.names if order_of(name) >= order_of("log_probs")]
        yield place, batch.microbatch(part), (*made, *part.numbers)


def _stored(micro: Batch, name: str) -> Tensor | None:
    if name in micro:
        return micro.tensor(name)
    if name in micro.numbers:
        return Tensor("float64", np.array(micro.numbers[name], np.float64))
    return None


def _check_shape(name: str, place: Mapping[str, Any], stored: Tensor, made: Tensor) -> None:
    """Raise InvalidInput where an intermediate cannot be held against the stored one."""
    shapes = [list(tensor.values.shape) for tensor in (made, stored)]
    if shapes[0] != shapes[1]:
        where = f"{place['stage']}, rank {place['rank']}, part {place['part']}"
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


def _row(found: Comparison, micro: Batch) -> dict[str, Any]:
    at, ids = found.coordinate, micro.sample_ids
    row = found._asdict() | {"coordinate": None if at is None else list(at)}
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
    said = f"{head}: {first['name']} ({where})"
    sample = f" of sample {first['sample_id']}" if first["sample_id"] else ""
    return (
        f"{said} at {first['coordinate']}{sample}: stored {first['stored']:.9g}, computed "
        f"{first['computed']:.9g}; {first['differ']} of {first['compared']} differ, max |d| "
        f"{first['max_abs']:.3g}, mean |d| {first['mean_abs']:.3g}"
    )
