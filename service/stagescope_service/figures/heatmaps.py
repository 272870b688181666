"""A number by rank and round, or by rank and step: a thousand ranks on one screen.

Up to `MAX_ROWS` ranks have a row each, the largest value on top. If there are more, the ranks that
differ from the others have rows of their own. The others are folded along the parallel dimension
that explains most of the differences between ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_service.figures.rank_rows import Fold, Grid, HeatRow, rows_of
from stagescope_service.statistics import cell as cells
from stagescope_service.statistics.cell import Field, Float64
from stagescope_service.statistics.codec import rounds_from_bytes
from stagescope_service.statistics.step_metrics import VERSION, SliceMetrics
from stagescope_service.statistics.step_summary import LATER_EPOCH, REPEATED
from stagescope_service.statistics.summary import Slices
from stagescope_service.store.parts import pair_name, part_key
from stagescope_service.views.reading.completeness import ROWS_REMOVED
from stagescope_service.views.reading.dependencies import Dependencies, Window
from stagescope_service.views.reading.rows import Lineage
from stagescope_service.views.reading.step_summaries import MeasuredSummary
from stagescope_service.views.reading.target import Target
from stagescope_service.views.steps.numbers import doubt, doubted_steps
from stagescope_wire.errors import NotFound
from stagescope_wire.names import unit_of_metric
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render import ranges_text, ranks_text
from stagescope_wire.schema import RankKey

Metric = Literal[
    "logprob_abs_diff/mean", "logprob_abs_diff/max", "rollout_corr/k3_kl", "rollout_corr/kl",
    "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max",
    "token_mult_prob_error", "tail/abs_diff_over_0.5_share", "counts/tokens",
]  # fmt: skip
"""Published numbers that can be folded over ranks, and the number of tokens."""
DEFAULT: Final[Metric] = "logprob_abs_diff/mean"
TOKENS: Final = "counts/tokens"

MAX_STEPS: Final = 200
"""Most steps that are drawn if no range is requested: the newest."""
_MAX_BYTES: Final = 96 << 20
"""Most bytes of ranks' numbers that one figure reads; beyond, some steps are left out."""
_MAX_LABELS: Final = 50
"""Most labels of rows; up to this number of rows, a row is 16 pixels high."""


class _Measure(NamedTuple):
    """How a number is computed from cells [..., WIDTH], and how it is folded over several ranks."""

    of_cells: Callable[[Float64], Float64]
    fold: Fold


def _mean_of(field: Field, sign: float = 1.0) -> _Measure:
    def of_cells(vectors: Float64) -> Float64:
        with np.errstate(invalid="ignore", divide="ignore"):
            return sign * vectors[..., field] / vectors[..., Field.TOKENS]

    return _Measure(of_cells, "mean")


def _abs_max(vectors: Float64) -> Float64:
    largest = np.maximum(np.abs(vectors[..., Field.D_MIN]), np.abs(vectors[..., Field.D_MAX]))
    return np.where(vectors[..., Field.TOKENS] > 0, largest, np.nan)


def _probs_max(vectors: Float64) -> Float64:
    return np.where(vectors[..., Field.TOKENS] > 0, vectors[..., Field.A_MAX], np.nan)


_MEASURES: Final[Mapping[Metric, _Measure]] = {
    "logprob_abs_diff/mean": _mean_of(Field.D_ABS_SUM),
    "logprob_abs_diff/max": _Measure(_abs_max, "max"),
    "rollout_corr/k3_kl": _mean_of(Field.K3_SUM),
    "rollout_corr/kl": _mean_of(Field.D_SUM, -1.0),
    "training/rollout_probs_diff_mean": _mean_of(Field.A_SUM),
    "training/rollout_probs_diff_max": _Measure(_probs_max, "max"),
    "token_mult_prob_error": _mean_of(Field.EXP_ABS_SUM),
    "tail/abs_diff_over_0.5_share": _mean_of(Field.ABS_OVER_1),
    "counts/tokens": _Measure(lambda vectors: vectors[..., Field.TOKENS] * 1.0, "sum"),
}


@dataclasses.dataclass(frozen=True)
class HeatInfo:
    """The data of a figure; the rows with the largest values are first."""

    run: str
    attempt: int | None
    step: int | None
    """None: the columns are steps."""
    metric: str
    unit: str
    columns: tuple[int, ...]
    rows: tuple[HeatRow, ...]
    ranks: int
    """Number of ranks."""
    folded_by: str | None
    note: str | None


# --- reading --------------------------------------------------------------------------------
def rounds_info(deps: Dependencies, target: Target, metric: Metric = DEFAULT) -> HeatInfo:
    """Read a number by rank and round of a step."""
    about = _About(target.run, target.number, target.step_number, metric)
    try:
        measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
    except NotFound as error:
        return about.empty(error.wrong)
    processes = deps.catalogue.processes(target.attempt_id)
    by_rank, lacking = _rounds_by_rank(deps, target, measured)
    if not by_rank:
        return about.empty(ROWS_REMOVED if lacking == ROWS_REMOVED else lacking or "no rank")
    columns = sorted({int(key) for found in by_rank.values() for key in found.keys})
    vectors = cells.empty(len(by_rank), len(columns))
    at = {column: index for index, column in enumerate(columns)}
    for row, found in enumerate(by_rank.values()):
        vectors[row, [at[int(key)] for key in found.keys]] = found.cells
    measure = _MEASURES[metric]
    values = measure.of_cells(vectors)
    tokens = vectors[..., Field.TOKENS]
    # A rank without tokens in a round has no number there, not even 0 tokens.
    values = np.where(vectors[..., Field.MASKED] > 0, values, np.nan)
    grid = Grid(tuple(by_rank), tuple(columns), values, tokens, measure.fold)
    notes = [*filter(None, (lacking, doubt(measured.comparability)))]
    return about.of(grid, processes, "; ".join(notes) or None)


def _rounds_by_rank(
    deps: Dependencies, target: Target, measured: MeasuredSummary
) -> tuple[dict[RankKey, Slices], str | None]:
    """Return the rounds of each rank's own tokens, and which numbers are missing.

    A rank's later passes over the same tokens do not count, as in its other numbers.
    """
    step_summary = measured.summary
    rows = deps.catalogue.summaries(
        target.attempt_id,
        target.step_number,
        stage=step_summary.stage,
        pair=pair_name(step_summary.summary.pair),
    )
    if not rows and target.step_row["rows_removed"] is not None:
        return {}, ROWS_REMOVED
    replaced = deps.catalogue.replaced(target.attempt_id, target.step_number)
    own: dict[RankKey, list[JsonObject]] = defaultdict(list)
    for row in rows:
        why = step_summary.left_out.get(part_key(row["incarnation"], row["seq"]))
        if row["summary"] is None or (row["incarnation"], row["seq"]) in replaced:
            continue
        if why not in (LATER_EPOCH, REPEATED):
            own[row["role"], row["rank"]].append(row)
    found: dict[RankKey, Slices] = {}
    for rank, parts in sorted(own.items()):
        epoch = min(row["epoch"] or 0 for row in parts)
        slices = [
            rounds_from_bytes(row["summary"]) for row in parts if (row["epoch"] or 0) == epoch
        ]
        found[rank] = slices[0] if len(slices) == 1 else Slices.merge(slices)
    totals = {(row.role, row.rank): row.cell.masked for row in step_summary.ranks}
    twice = [
        rank for rank, slices in found.items()
        if rank in totals and int(slices.cells[:, Field.MASKED].sum()) != totals[rank]
    ]  # fmt: skip
    lacking = None
    if twice:
        lacking = (
            f"{ranks_text(twice)} handed over some tokens more than once: their rounds count each "
            "copy"
        )
    return found, lacking


def steps_info(
    deps: Dependencies, run: str | None, attempt: int | None, window: Window, metric: Metric
) -> HeatInfo:
    """Read a number by rank and step, by default in the newest `MAX_STEPS` current steps."""
    target = deps.finder.attempt(run, attempt)
    attempts = deps.catalogue.attempts(target.run)
    lineage = Lineage(attempts)
    ids = [int(row["attempt_id"]) for row in attempts if attempt in (None, row["number"])]
    about = _About(target.run, attempt, None, metric)
    bounded = window["first"] is not None or window["last"] is not None
    limit = None if bounded else MAX_STEPS * max(len(ids), 1)
    states = deps.catalogue.step_states(ids, limit=limit, **window)
    by_step = {
        state.step: state.attempt_id
        for state in states
        if attempt is not None
        or (state.superseded_by or lineage.repeated_by(state.attempt_id, state.step)) is None
    }
    steps = sorted(by_step) if bounded else sorted(by_step)[-MAX_STEPS:]
    if not steps:
        return about.empty("there is no step in this range")
    processes = deps.catalogue.processes(by_step[steps[-1]])
    chosen = _affordable(steps, len(processes))
    blobs = deps.catalogue.slices([(by_step[step], step) for step in chosen], version=VERSION)
    found = {step: SliceMetrics.from_bytes(blob) for (_, step), blob in blobs.items()}
    ranks = sorted({key for each in found.values() for key in each.keys["rank"]}, key=str)
    if not ranks:
        return about.empty("no rank handed over both streams in these steps")
    at = {rank: index for index, rank in enumerate(ranks)}
    values = np.full((len(ranks), len(chosen)), np.nan)
    tokens = np.zeros_like(values)
    for column, step in enumerate(chosen):
        if step in found:
            rows = [at[key] for key in found[step].keys["rank"]]
            values[rows, column] = _column(found[step], metric)
            tokens[rows, column] = _column(found[step], TOKENS)
    keys = tuple((str(role), int(rank)) for role, rank in ranks)
    order = sorted(range(len(keys)), key=lambda row: keys[row])
    grid = Grid(keys, tuple(chosen), values, tokens, _MEASURES[metric].fold).take(order)
    notes = []
    if len(chosen) < len(steps):
        notes.append(f"of {len(steps)} steps every {len(steps) // len(chosen)}th is read")
    missing = [step for step in chosen if step not in found]
    if missing:
        notes.append(f"no numbers in {ranges_text('step', missing)}")
    notes += doubted_steps(deps, {step: by_step[step] for step in chosen})
    return about.of(grid, processes, "; ".join(notes) or None)


def _column(found: SliceMetrics, name: str) -> Float64:
    if name not in found.names:
        return np.full(len(found.keys["rank"]), np.nan)
    column: Float64 = found.values["rank"][:, found.names.index(name)]
    return column


def _affordable(steps: Sequence[int], ranks: int) -> list[int]:
    """Return steps, evenly spread and the last one included, whose numbers are not too large."""
    bytes_each = max(ranks, 1) * 600
    most = max(_MAX_BYTES // bytes_each, 8)
    every = -(-len(steps) // most)
    return sorted(steps[::-1][::every])


class _About(NamedTuple):
    run: str
    attempt: int | None
    step: int | None
    metric: Metric

    @property
    def unit(self) -> str:
        return unit_of_metric(self.metric)

    def empty(self, note: str) -> HeatInfo:
        """Return the answer without a rank."""
        heading = (self.run, self.attempt, self.step, self.metric, self.unit)
        return HeatInfo(*heading, (), (), 0, None, note)

    def of(self, grid: Grid, processes: Iterable[JsonObject], note: str | None) -> HeatInfo:
        """Return the answer: sorted, and folded if there are too many ranks."""
        layouts = {(row["role"], row["rank"]): row for row in processes}
        rows, folded_by, text = rows_of(grid, layouts)
        heading = (self.run, self.attempt, self.step, self.metric, self.unit)
        notes = [each for each in (text, note) if each]
        return HeatInfo(
            *heading, grid.columns, rows, len(grid.ranks), folded_by, "; ".join(notes) or None
        )


# --- drawing --------------------------------------------------------------------------------
_WIDE: Final = 6.0
"""Times the smallest value, beyond which colours follow the powers of a number."""


def figure(found: HeatInfo) -> go.Figure:
    """Draw the rows below each other, the largest value on top."""
    axis = "step" if found.step is None else "round"
    of_step = "" if found.step is None else f" of step {found.step}"
    title = f"{found.metric} by rank and {axis}{of_step}"
    if not found.rows:
        return style.empty(title, found.note or "", x=axis, y="rank")
    known = np.array(
        [[math.nan if v is None else v for v in row.values] for row in found.rows], np.float64
    )
    labels = [("▲ " if row.apart else "") + row.label for row in found.rows]
    # By powers if one rank would leave the others a single colour.
    is_log = style.spans_decades(known[~np.isnan(known)].tolist(), _WIDE)
    with np.errstate(invalid="ignore", divide="ignore"):
        shown = np.log10(known) if is_log else known
    bar: dict[str, object] = {
        "ticksuffix": f" {found.unit}" if found.unit else "",
        "orientation": "h", "thickness": 10, "x": 0.5, "len": 1.0,
        "yref": "container", "y": 0.985, "yanchor": "top", "ypad": 0,
        "tickfont": {"size": 10}, "nticks": 5, "outlinewidth": 0, "exponentformat": "e",
    }  # fmt: skip
    if is_log:
        bar |= _log_ticks(shown, found.unit)
    texts = [
        [_hover(row, at, found, axis) for at in range(len(found.columns))] for row in found.rows
    ]
    gap = 1 if len(found.columns) <= 40 else 0
    drawn = go.Figure(
        go.Heatmap(
            z=shown, x=np.array(found.columns), y=labels, colorscale=style.SCALE, colorbar=bar,
            xgap=gap, ygap=gap, hoverongaps=True, hoverinfo="text", text=texts,
        )
    )  # fmt: skip
    few = axis == "round" and len(found.columns) <= 10
    drawn.update_xaxes(title={"text": axis}, tickformat="d", dtick=1 if few else None)
    drawn.update_yaxes(
        title={"text": "rank"}, autorange="reversed", type="category", tickmode="array",
        tickvals=_labelled(found.rows, labels), tickfont={"size": 10},
    )  # fmt: skip
    height = min(max(len(found.rows) * 16, 60), 800) + 150
    drawn = style.finished(drawn, title, height)
    return drawn.update_layout(showlegend=False, margin={"t": 50}, yaxis={"showgrid": False})


def _labelled(rows: Sequence[HeatRow], labels: Sequence[str]) -> list[str]:
    """Return the labels that have room; ranks that differ always have a label."""
    every = -(-len(rows) // _MAX_LABELS)
    return [
        label
        for at, (row, label) in enumerate(zip(rows, labels, strict=True))
        if row.apart or at % every == 0
    ]


def _log_ticks(shown: Float64, unit: str) -> dict[str, object]:
    """Return ticks at some multiples of the powers of ten, or at the powers alone."""
    finite = shown[np.isfinite(shown)]
    least, most = float(finite.min()), float(finite.max())
    low, high = math.floor(least), math.ceil(most)
    steps = (1, 2, 5) if most - least < 1.2 else (1, 3) if most - least < 3.0 else (1,)
    values = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    shown_values = [value for value in values if least <= math.log10(value) <= most]
    return {
        "tickvals": [math.log10(value) for value in shown_values],
        "ticktext": [style.number(value, unit) for value in shown_values],
    }


def _hover(row: HeatRow, at: int, found: HeatInfo, axis: str) -> str:
    value, tokens = row.values[at], row.tokens[at]
    text = f"{row.label}, {axis} {found.columns[at]}<br>"
    if value is None:
        return f"{text}not measured: no token of it there"
    text += f"{style.number(value, found.unit)}, {tokens} tokens"
    return f"{text}<br>{row.largest[at]}" if row.largest else text
