"""Where in the tokens the mismatch lies: |d| and d by place, position, probability, staleness.

d = p - q. Stalenesses are stored of every step. The others are counted from the step's tensors
while they are there (kept, or in the ring): a bin of places and positions holds indexes from a
power of two to the next, so that the first tokens stand alone.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from stagescope.render import counted
from stagescope.wire.errors import NotFound, StagescopeError
from stagescope_service import figure_style as style
from stagescope_service.api.dependencies import Dependencies
from stagescope_service.api.kept import local_file, payload_artifacts
from stagescope_service.api.step_summaries import MeasuredStep
from stagescope_service.api.target import Target
from stagescope_service.statistics.batch import TokenBatch
from stagescope_service.statistics.cell import Cell, Field, Float64, Int64
from stagescope_service.statistics.summarise import widened
from stagescope_service.store.parts import part_key
from stagescope_service.store.tables import ArtifactRow
from stagescope_service.store.tensorfile import map_tensors

By = Literal["place", "end", "position", "probability", "staleness"]
AXES: Final[dict[By, str]] = {
    "place": "tokens since the round's first",
    "end": "tokens until the round's last",
    "position": "position in the sample",
    "probability": "probability that the rollout gave the token",
    "staleness": "staleness (policy versions)",
}
MOST_TOKENS: Final = 4_000_000
"""Tokens that are counted for one figure; of a larger step some payloads are left out."""
UNKNOWN: Final = "unknown"
"""Label of tokens of a round whose begin or end lies in another piece of the sample."""
LAST: Final = "last of the sample"
CHANCES: Final = (1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
"""Bounds of the bins of probabilities, ascending; a bin holds its lower bound."""
UNIT: Final = "nat"

Bools = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Bin:
    """The tokens of one bin; means are over those with both values finite, in nats."""

    label: str
    tokens: int
    nonfinite: int
    mean_abs: float | None
    mean: float | None


@dataclasses.dataclass(frozen=True)
class AnatomyInfo:
    """What the figure shows."""

    run: str
    attempt: int
    step: int
    by: By
    bins: tuple[Bin, ...]
    """In the order of the axis."""
    mean_abs: float | None
    """Of all tokens of the step, nats."""
    note: str | None


def info(deps: Dependencies, target: Target, by: By) -> AnatomyInfo:
    """Read or count the mismatch of a step by one property of its tokens."""
    heading = (target.run, target.number, target.step_number, by)
    try:
        measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
    except NotFound as error:
        return AnatomyInfo(*heading, (), None, error.wrong)
    total = measured.summary.total
    mean = total.mean(Field.D_ABS_SUM) if total.tokens else None
    if by == "staleness":
        found = tuple(
            _of_cell(key, cell) for key, cell in measured.summary.summary.staleness.items()
        )
        note = None if found else "the policy versions of the tokens are not recorded (versions)"
    else:
        found, note = _counted(deps, target, measured, by)
    return AnatomyInfo(*heading, found, mean, note)


def _of_cell(staleness: int, cell: Cell) -> Bin:
    has = bool(cell.tokens)
    return Bin(
        str(staleness), cell.tokens, cell.masked - cell.tokens,
        cell.mean(Field.D_ABS_SUM) if has else None, cell.mean(Field.D_SUM) if has else None,
    )  # fmt: skip


def _counted(
    deps: Dependencies, target: Target, measured: MeasuredStep, by: By
) -> tuple[tuple[Bin, ...], str | None]:
    """Count the payloads that count in the step; return also what is missing."""
    wanted, sums, read = set(measured.summary.counted), Sums(by), 0
    for batch in _batches(deps, target, measured):
        sums.add(batch)
        read += 1
        if sums.tokens >= MOST_TOKENS:
            break
    if not read:
        return (), (
            "the tensors of this step are no longer there (the ring keeps the newest steps, and "
            "pinned ones), and this version stores no profile by token beside its statistics"
        )
    lacking = f"counted are {read} of {counted(len(wanted), 'payload')} of the step"
    return sums.bins(), lacking if read < len(wanted) else None


def _batches(deps: Dependencies, target: Target, measured: MeasuredStep) -> Iterator[TokenBatch]:
    wanted = set(measured.summary.counted)
    rows: dict[str, list[ArtifactRow]] = {}
    for row in payload_artifacts(deps, target, target.step_number):
        key = part_key(row["incarnation"], row["seq"])
        if key in wanted:
            rows.setdefault(key, []).append(row)
    directory = deps.settings.data_path / "copies"
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as copies:
        for key in sorted(rows):
            for row in rows[key]:
                try:
                    kept = map_tensors(local_file(deps, row, Path(copies)))
                    batch = TokenBatch.from_tensors(
                        kept.tensors, pair=measured.summary.summary.pair
                    )
                except StagescopeError:  # gone, or it holds one stream alone
                    continue
                yield batch
                break


class Sums:
    """Sums of d by bin, over batches: any split of the rows of a batch gives the same sums."""

    def __init__(self, by: By) -> None:
        self._by: By = by
        self._sums: dict[int, Float64] = {}
        self.tokens = 0

    def add(self, batch: TokenBatch) -> None:
        """Add the tokens under the mask of a batch."""
        on = np.asarray(batch.mask == batch.mask_one)
        at = np.flatnonzero(on)
        self.tokens += len(at)
        p, q = widened(batch.p[at], batch.p_dtype), widened(batch.q[at], batch.q_dtype)
        finite = np.isfinite(p) & np.isfinite(q)
        keys = _KEYS[self._by](batch, on, at, q)
        d = np.subtract(p, q, out=np.zeros(len(at)), where=finite)
        unique, where = np.unique(keys, return_inverse=True)
        where = where.reshape(-1)
        columns = (finite, ~finite, d, np.abs(d))
        found = np.stack([np.bincount(where, each, len(unique)) for each in columns], axis=1)
        for key, row in zip(unique.tolist(), found, strict=True):
            self._sums[key] = self._sums.get(key, np.zeros(4)) + row

    def bins(self) -> tuple[Bin, ...]:
        """Return the bins that hold a token, in the order of the axis."""
        found = []
        for key, (tokens, bad, total, absolute) in sorted(self._sums.items()):
            label = _probability(key) if self._by == "probability" else _span(key)
            means = (absolute / tokens, total / tokens) if tokens else (None, None)
            found.append(Bin(label, int(tokens), int(bad), *means))
        return tuple(found)


_LAST_KEY: Final = -1
_UNKNOWN_KEY: Final = 100
"""After all bins of indexes, of which there are 64."""


def _index_bins(index: Int64) -> Int64:
    """Return 0 for index 0, b for the indexes 2^(b-1) to 2^b - 1; below 0: unknown."""
    bins = np.frexp(index.astype(np.float64))[1].astype(np.int64)
    return np.where(index < 0, _UNKNOWN_KEY, bins)


def _span(key: int) -> str:
    if key == _LAST_KEY:
        return LAST
    if key == _UNKNOWN_KEY:
        return UNKNOWN
    if key < 2:
        return str(key)
    return f"{2 ** (key - 1)}-{2**key - 1}"


def _edges(batch: TokenBatch, on: Bools) -> tuple[Bools, Bools]:
    """bool [tokens] each: no token before, or after, that the row's mask or positions join."""
    begins = np.ones(len(on), bool)
    begins[1:] = ~on[:-1]
    begins[batch.row_offsets[:-1][np.diff(batch.row_offsets) > 0]] = True
    if batch.positions is not None:
        begins[1:] |= np.diff(batch.positions) != 1
    ends = np.ones(len(on), bool)
    ends[:-1] = begins[1:] | ~on[1:]
    return begins, ends


def _unknown(batch: TokenBatch, edge: Int64, *, first: bool) -> Bools:
    """Whether a round that seems to begin (end) at these tokens may go on in another piece."""
    if not batch.has_positions:
        return np.zeros(len(edge), bool)
    row = np.searchsorted(batch.row_offsets, edge, "right") - 1
    position = batch.positions_of(edge, row)
    if first:
        at_edge = edge == batch.row_offsets[row]
        before = edge - 1
    else:
        at_edge = edge + 1 == batch.row_offsets[row + 1]
        before = edge + 1
    if batch.positions is not None:
        other = np.clip(before, 0, len(batch.positions) - 1)
        at_edge = at_edge | (np.abs(batch.positions[other] - position) != 1)
    unknown: Bools = at_edge & (position != 0) if first else at_edge
    return unknown


def _by_place(batch: TokenBatch, on: Bools, at: Int64, q: Float64) -> Int64:
    begins, _ = _edges(batch, on)
    first = np.flatnonzero(begins & on)
    run = np.searchsorted(first, at, "right") - 1
    index = at - first[run]
    return _index_bins(np.where(_unknown(batch, first, first=True)[run], -1, index))


def _by_end(batch: TokenBatch, on: Bools, at: Int64, q: Float64) -> Int64:
    _, ends = _edges(batch, on)
    last = np.flatnonzero(ends & on)
    run = np.searchsorted(last, at)
    keys = _index_bins(np.where(_unknown(batch, last, first=False)[run], -1, last[run] - at))
    row = np.searchsorted(batch.row_offsets, at, "right") - 1
    is_last = np.append(row[1:] != row[:-1], True) if len(at) else np.zeros(0, bool)
    # Whether more of the sample follows is not known of a piece.
    return np.where(is_last, _UNKNOWN_KEY if batch.has_positions else _LAST_KEY, keys)


def _by_position(batch: TokenBatch, on: Bools, at: Int64, q: Float64) -> Int64:
    row = np.searchsorted(batch.row_offsets, at, "right") - 1
    return _index_bins(batch.positions_of(at, row))


def _by_probability(batch: TokenBatch, on: Bools, at: Int64, q: Float64) -> Int64:
    keys = np.searchsorted(np.log(CHANCES), q, "right").astype(np.int64)
    keys[q > 0.0] = len(CHANCES) + 1
    keys[~np.isfinite(q)] = _UNKNOWN_KEY
    return keys


def _probability(key: int) -> str:
    if key == _UNKNOWN_KEY:
        return "not finite"
    if key > len(CHANCES):
        return "over 1"
    low = f"{CHANCES[key - 1]:g}" if key else "0"
    return f"{low}-{CHANCES[key]:g}" if key < len(CHANCES) else f"{low}-1"


Keys = Callable[[TokenBatch, Bools, Int64, Float64], Int64]
_KEYS: Final[dict[By, Keys]] = {
    "place": _by_place,
    "end": _by_end,
    "position": _by_position,
    "probability": _by_probability,
}


# --- drawing --------------------------------------------------------------------------------
def figure(found: AnatomyInfo) -> go.Figure:
    """Draw the mean |d| of each bin as a bar, its mean d as a mark, and the step's mean |d|."""
    title = f"Mismatch of step {found.step} by {found.by}"
    x, y = AXES[found.by], f"|d| and d, {UNIT}"
    if not found.bins:
        return style.empty(title, found.note or "no token counts", x=x, y=y, height=320)
    labels = [each.label for each in found.bins]
    texts = [_hover(each) for each in found.bins]
    drawn = go.Figure()
    drawn.add_bar(
        x=labels, y=[each.mean_abs for each in found.bins], name="mean |d|", hovertext=texts,
        hoverinfo="text", marker={"color": style.BLUE},
    )  # fmt: skip
    drawn.add_scatter(
        x=labels, y=[each.mean for each in found.bins], mode="markers", name="mean d",
        hovertext=texts, hoverinfo="text",
        marker={"symbol": "diamond", "size": 8, "color": style.VERMILLION},
    )  # fmt: skip
    if found.mean_abs is not None and math.isfinite(found.mean_abs):
        drawn.add_scatter(
            x=[labels[0], labels[-1]], y=[found.mean_abs] * 2, mode="lines",
            name="mean |d| of the step", hoverinfo="skip",
            line={"color": style.GREY, "dash": "dash", "width": 1.2},
        )  # fmt: skip
    drawn.update_xaxes(title={"text": x}, type="category")
    drawn.update_yaxes(title={"text": y}, rangemode="tozero")
    return style.legend_below(style.finished(drawn, title, 380))


def _hover(each: Bin) -> str:
    lines = [f"{each.label}: {counted(each.tokens, 'token')}"]
    lines.append(f"mean |d| {style.number(each.mean_abs, UNIT)}")
    lines.append(f"mean d {style.number(each.mean, UNIT)}")
    if each.nonfinite:
        lines.append(f"{counted(each.nonfinite, 'token')} not finite")
    return "<br>".join(lines)
