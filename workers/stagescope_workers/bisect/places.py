"""Finds in which part of a step the mismatch is: ranks, engines, rounds or trajectories.

A fault of one rank of several is no fault of the pooled tokens: a shift, other rows or a constant
show only in the rank's own tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from stagescope_wire.schema import RankKey
from stagescope_workers.bisect.kept import Bool, Float64, Kept, Place, Row

_RATIO: Final = 2.0
"""The least ratio of the medians of mean |d| between a part and the rest."""
_APART: Final = 0.9
"""Share of the pairs (one of the part, one of the rest) in which the part's mean |d| is larger."""
_LEAST: Final = 3
"""Trajectories that a part, and the rest, must have."""
_TOKENS: Final = 16
_ROWS: Final = 8
"""Trajectories below which two kinds of them cannot be distinguished."""
_ROW_RATIO: Final = 3.0
_TWO_KINDS: Final = 0.8
"""Share of the variance of log(mean |d|) that lies between two kinds; of one normal it is 0.64."""
_SMALLEST: Final = 1e-6
_SOME: Final = 0.1


class _Unit(NamedTuple):
    """The tokens of a row with one label."""

    label: RankKey | str | int
    row: int
    counted: Bool
    mean: float


def found_place(kept: Kept) -> Kept:
    """Return the tokens of the part of the step that has the mismatch; all, if all have it."""
    best: tuple[float, list[_Unit], list[_Unit], str] | None = None
    for units, name in _labelled(kept.rows):
        part, rest = _split(units)
        if part:
            apart = round(_share_above(part, rest), 2)
            if best is None or apart > best[0]:
                best = apart, part, rest, name
    if best is None:
        part, rest = _two_kinds(_units(kept.rows, lambda row: [(0, row.counted)]))
        if not part:
            return kept
        best = 1.0, part, rest, "rows"
    _, part, rest, name = best
    masks: dict[int, Bool] = {}
    for each in part:
        masks[each.row] = masks.get(each.row, np.False_) | each.counted
    rows = tuple(
        dataclasses.replace(kept.rows[index], counted=mask) for index, mask in masks.items()
    )
    place = Place(
        text=f"In {len(rows)} of {len(kept.rows)} trajectories"
        if name == "rows"
        else _text(name, sorted({each.label for each in part}, key=str)),
        mean=_pooled(kept.rows, part),
        rest=_pooled(kept.rows, rest),
        ranks=tuple(dict.fromkeys(each.label for each in part if isinstance(each.label, tuple))),
    )
    return dataclasses.replace(kept, rows=rows, place=place)


def _text(name: str, labels: Sequence[object]) -> str:
    if name == "rank":
        named = [f"{label[0]} rank {label[1]}" for label in labels if isinstance(label, tuple)]
        return f"On {_listed(named)}"
    named = [str(label) for label in labels]
    return f"In {name}{'s' if len(named) > 1 else ''} {_listed(named)}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _labelled(rows: Sequence[Row]) -> Iterator[tuple[list[_Unit], str]]:
    """Yield the tokens by rank, by engine and by round, where they are known of all rows."""
    if all(row.rank is not None for row in rows):
        yield _units(rows, lambda row: [(row.rank or ("", 0), row.counted)]), "rank"
    if all(row.engine for row in rows):
        yield _units(rows, lambda row: [(row.engine, row.counted)]), "engine"
    if all(row.rounds is not None for row in rows):
        yield _units(rows, _rounds), "round"


def _rounds(row: Row) -> list[tuple[int, Bool]]:
    assert row.rounds is not None
    return [(int(each), row.counted & (row.rounds == each)) for each in np.unique(row.rounds)]


def _units(
    rows: Sequence[Row], labels: Callable[[Row], Sequence[tuple[RankKey | str | int, Bool]]]
) -> list[_Unit]:
    return [
        _Unit(label, index, mask, float(np.abs(row.q - row.p)[mask].mean()))
        for index, row in enumerate(rows)
        for label, mask in labels(row)
        if mask.any()
    ]


def _split(units: Sequence[_Unit]) -> tuple[list[_Unit], list[_Unit]]:
    """Return the units of the labels that have the mismatch, and the others; none, if all do."""
    by_label: dict[RankKey | str | int, list[float]] = {}
    for unit in units:
        by_label.setdefault(unit.label, []).append(unit.mean)
    medians = {label: max(float(np.median(own)), _SMALLEST) for label, own in by_label.items()}
    labels = sorted(medians, key=lambda label: -medians[label])
    if len(labels) < 2:
        return [], []
    steps = [medians[one] / medians[other] for one, other in itertools.pairwise(labels)]
    at = int(np.argmax(steps))
    chosen = set(labels[: at + 1])
    part = [unit for unit in units if unit.label in chosen]
    rest = [unit for unit in units if unit.label not in chosen]
    is_apart = steps[at] >= _RATIO and min(len(part), len(rest)) >= _LEAST
    if not is_apart or _count(part) < _TOKENS or _share_above(part, rest) < _APART:
        return [], []
    return part, rest


def _share_above(part: Sequence[_Unit], rest: Sequence[_Unit]) -> float:
    one = np.array([unit.mean for unit in part])
    other = np.sort([unit.mean for unit in rest])
    return float(np.searchsorted(other, one).mean() / len(other))


def _two_kinds(units: Sequence[_Unit]) -> tuple[list[_Unit], list[_Unit]]:
    """Return the rows that have the mismatch, and the others.

    log(mean |d|) is split so that most of its variance lies between the two (Otsu, A Threshold
    Selection Method, 1979).
    """
    if len(units) < _ROWS:
        return [], []
    ordered = sorted(units, key=lambda unit: unit.mean)
    logs: Float64 = np.log(np.maximum([unit.mean for unit in ordered], _SMALLEST))
    variance = float(logs.var())
    if variance == 0.0:
        return [], []
    count = len(logs)
    lows = np.arange(_LEAST, count - max(_LEAST, round(_SOME * count)) + 1)
    gaps = np.array([logs[at:].mean() - logs[:at].mean() for at in lows])
    between = gaps**2 * lows * (count - lows) / count**2 / variance
    best = int(np.argmax(between))
    part = ordered[lows[best] :]
    is_two = between[best] >= _TWO_KINDS and gaps[best] >= np.log(_ROW_RATIO)
    if not is_two or _count(part) < _TOKENS:
        return [], []
    return part, ordered[: lows[best]]


def _count(units: Sequence[_Unit]) -> int:
    return sum(int(unit.counted.sum()) for unit in units)


def _pooled(rows: Sequence[Row], units: Sequence[_Unit]) -> float:
    gaps = [np.abs(rows[u.row].q - rows[u.row].p)[u.counted] for u in units]
    return float(np.concatenate(gaps).mean())
