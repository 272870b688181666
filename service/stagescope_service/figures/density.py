"""The trainer's log-probs against the rollout's, with the verdict on whether they compare.

The catalogue has the moments of both streams, the worst tokens and the verdict of every step. They
give the ellipse of the cloud, the line of regression and its outliers. The cloud itself is counted
if the tensors still exist (kept, or in the ring).
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_service.statistics.cell import Cell, Field, Float64
from stagescope_service.statistics.token_batch import TokenBatch
from stagescope_service.store.parts import part_key
from stagescope_service.store.tables import ArtifactRow
from stagescope_service.store.tensorfile import map_tensors
from stagescope_service.views.kept import local_file, payload_artifacts
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.step_summaries import MeasuredSummary
from stagescope_service.views.reading.target import Target
from stagescope_wire.errors import InvalidTensor, NotFound, StagescopeError
from stagescope_wire.render import counted
from stagescope_wire.tensorfile import WireTensor

BINS: Final = 96
MAX_TOKENS: Final = 4_000_000
"""Most tokens that are counted for one figure; some payloads of a larger step are left out."""
_LOWEST: Final = -25.0
"""Nats. Axes begin here at the lowest; tokens below are counted as outside."""

Counts = npt.NDArray[np.int64]


class WorstToken(NamedTuple):
    """One of the tokens with the largest |p - q|."""

    p: float
    q: float
    round: int
    sample_uid: str | None


@dataclasses.dataclass(frozen=True)
class Moments:
    """Mean and deviation of both streams in nats, and their relation."""

    p_mean: float
    q_mean: float
    p_std: float
    q_std: float
    correlation: float
    slope: float
    """Slope of the regression of p on q: 1 if they differ only by noise or by a constant."""


@dataclasses.dataclass(frozen=True)
class Cloud:
    """Counts of tokens by (p, q)."""

    edges: tuple[float, ...]
    """Edges of the bins of both axes, nats, ascending."""
    counts: tuple[tuple[int, ...], ...]
    """[p bin][q bin]."""
    tokens: int
    outside: int
    """Tokens below the lowest edge."""


@dataclasses.dataclass(frozen=True)
class DensityInfo:
    """The data of the figure."""

    run: str
    attempt: int
    step: int
    pair: tuple[str, str] | None
    """Names of p and q."""
    tokens: int
    comparable: str
    reason: str | None
    """Why the streams cannot be compared, the likeliest cause."""
    moments: Moments | None
    cloud: Cloud | None
    worst: tuple[WorstToken, ...]
    low: float
    high: float
    """Range of both axes, nats."""
    note: str | None


def info(deps: Dependencies, target: Target) -> DensityInfo:
    """Read the moments of a step's streams, and count its tokens if they still exist."""
    heading = (target.run, target.number, target.step_number)
    try:
        measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
    except NotFound as error:
        return DensityInfo(
            *heading, None, 0, "unknown", None, None, None, (), _LOWEST, 0.0, error.wrong
        )
    summary = measured.summary.summary
    cell, verdict = summary.total, measured.comparability
    suspects = verdict.suspects
    low, high = _range(cell)
    cloud, lacking = _cloud(deps, target, measured, low, high) if cell.tokens else (None, None)
    note = lacking if cell.tokens else "no token counts: nothing was measured"
    samples = summary.sequences.samples
    worst = tuple(
        WorstToken(float(p), float(q), int(at), samples[int(sequence)] or None)
        for p, q, at, sequence in zip(
            summary.worst.p, summary.worst.q, summary.worst.round, summary.worst.sequence,
            strict=True,
        )
    )  # fmt: skip
    return DensityInfo(
        *heading,
        summary.pair,
        cell.tokens,
        verdict.verdict,
        suspects[0].text if suspects else None,
        moments_of(cell),
        cloud,
        worst,
        low,
        high,
        note,
    )


def moments_of(cell: Cell) -> Moments | None:
    """Return the moments of a cell's tokens; None below two tokens."""
    if cell.tokens < 2:
        return None
    variance = cell[Field.Q_M2]
    return Moments(
        p_mean=cell.mean(Field.P_SUM),
        q_mean=cell.mean(Field.Q_SUM),
        p_std=cell.std(Field.P_M2, Field.P_MIN, Field.P_MAX),
        q_std=cell.std(Field.Q_M2, Field.Q_MIN, Field.Q_MAX),
        correlation=cell.correlation(Field.P_M2, Field.Q_M2, Field.PQ_C),
        slope=cell[Field.PQ_C] / variance if variance > 0.0 else math.nan,
    )


def _range(cell: Cell) -> tuple[float, float]:
    """Return the range of both axes: from the lowest log-prob to 0, or to the highest one above."""
    if not cell.tokens:
        return _LOWEST, 0.0
    low = min(cell[Field.P_MIN], cell[Field.Q_MIN])
    high = max(cell[Field.P_MAX], cell[Field.Q_MAX], 0.0)
    low = max(math.floor(low), _LOWEST)
    return low, max(high, low + 1.0)


def _cloud(
    deps: Dependencies, target: Target, measured: MeasuredSummary, low: float, high: float
) -> tuple[Cloud | None, str | None]:
    """Count the tokens of the payloads that count in the step, and say what is missing."""
    wanted = set(measured.summary.counted)
    rows: dict[str, list[ArtifactRow]] = {}
    for row in payload_artifacts(deps, target, target.step_number):
        key = part_key(row["incarnation"], row["seq"])
        if key in wanted:
            rows.setdefault(key, []).append(row)
    edges = np.linspace(low, high, BINS + 1)
    counts = np.zeros((BINS, BINS), np.int64)
    total = outside = read = 0
    directory = deps.settings.data_path / "copies"
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as copies:
        for key in sorted(rows):
            if total >= MAX_TOKENS:
                break
            for row in rows[key]:
                try:
                    kept = map_tensors(local_file(deps, row, Path(copies)))
                    p, q = _streams(kept.tensors, measured.summary.summary.pair)
                except StagescopeError:  # gone, or it holds one stream alone
                    continue
                read, total = read + 1, total + len(p)
                inside = (p >= low) & (q >= low)
                outside += int((~inside).sum())
                counts += np.histogram2d(p[inside], q[inside], bins=[edges, edges])[0].astype(
                    np.int64
                )
                break
    if not read:
        return None, (
            "the tensors of this step are gone (the ring keeps the newest steps, and pinned ones). "
            "The figure uses the step's stored moments and its worst tokens"
        )
    lacking = []
    if read < len(wanted):
        lacking.append(f"counted are {read} of {counted(len(wanted), 'payload')} of the step")
    if outside:
        lacking.append(f"{counted(outside, 'token')} below {low:g} nat not drawn")
    cloud = Cloud(
        tuple(edges.tolist()), tuple(tuple(row) for row in counts.tolist()), total, outside
    )
    return cloud, "; ".join(lacking) or None


def _streams(tensors: Mapping[str, WireTensor], pair: tuple[str, str]) -> tuple[Float64, Float64]:
    """Return p and q of the tokens under the mask that are both finite.

    Raises:
        InvalidTensor: a stream or the mask is missing.
    """
    batch = TokenBatch.from_tensors(tensors, pair=pair)
    chosen = batch.mask == batch.mask_one
    p, q = (
        _as_float64(values, dtype)[chosen]
        for values, dtype in ((batch.p, batch.p_dtype), (batch.q, batch.q_dtype))
    )
    finite = np.isfinite(p) & np.isfinite(q)
    return p[finite], q[finite]


def _as_float64(values: npt.NDArray[np.generic], dtype: str) -> Float64:
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if not np.issubdtype(values.dtype, np.floating):
        raise InvalidTensor(f"a stream of dtype {dtype}", expected="a floating dtype")
    return values.astype(np.float64)


# --- drawing --------------------------------------------------------------------------------
_VERDICTS: Final = {
    "comparable": style.GREEN, "exact": style.GREEN, "suspect": style.VERMILLION,
    "not measured": style.ORANGE,
}  # fmt: skip


def figure(found: DensityInfo) -> go.Figure:
    """Draw p over q: the cloud, its ellipse and regression, the worst tokens, and the verdict."""
    p, q = found.pair or ("trainer", "rollout")
    x, y = f"{q} (q), nat", f"{p} (p), nat"
    title = f"Log-probs of step {found.step}: {p} against {q}"
    if not found.tokens:
        return style.empty(title, found.note or "", x=x, y=y, height=320)
    drawn = go.Figure()
    if found.cloud is not None:
        _draw_cloud(drawn, found.cloud)
    ends = [found.low, found.high]
    drawn.add_scatter(
        x=ends, y=ends, mode="lines", line={"color": style.GREY, "dash": "dash", "width": 1.2},
        name="p = q", hoverinfo="skip",
    )  # fmt: skip
    if found.moments is not None and found.moments.q_std > 0.0:
        _draw_moments(drawn, found.moments, found)
    drawn.add_scatter(
        x=[max(token.q, found.low) for token in found.worst],
        y=[max(token.p, found.low) for token in found.worst],
        mode="markers", name="worst tokens", hoverinfo="text",
        marker={"symbol": "x-thin", "size": 7, "line": {"width": 1.4, "color": style.VERMILLION}},
        hovertext=[
            f"|p - q| {style.number(abs(token.p - token.q), 'nat')}<br>p {token.p:.4g}, "
            f"q {token.q:.4g}, round {token.round}"
            + (f"<br>sample {style.wrapped(token.sample_uid)}" if token.sample_uid else "")
            for token in found.worst
        ],
    )  # fmt: skip
    colour = _VERDICTS.get(found.comparable, style.GREY)
    text = f"<b>{found.comparable}</b>"
    if found.reason:
        text += f"<br>{style.wrapped(_shortened(found.reason), 30)}"
    drawn.add_annotation(
        text=text, xref="x domain", yref="y domain", x=0.02, y=0.98, xanchor="left", yanchor="top",
        showarrow=False, align="left", font={"size": 10}, bordercolor=colour, borderwidth=2,
        borderpad=4, bgcolor="rgba(128,128,128,0.15)",
    )  # fmt: skip
    room = (found.high - found.low) * 0.02
    limits = [found.low - room, found.high + room]
    drawn.update_xaxes(title={"text": x}, range=limits, constrain="domain")
    drawn.update_yaxes(title={"text": y}, range=limits, constrain="domain", scaleanchor="x")
    drawn = style.legend_below(style.finished(drawn, title, 500))
    return drawn.update_layout(margin={"t": 60 if found.cloud is not None else 20})


def _shortened(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


def _draw_cloud(drawn: go.Figure, cloud: Cloud) -> None:
    counts = np.array(cloud.counts, np.float64)
    with np.errstate(divide="ignore"):
        shown = np.where(counts > 0, np.log10(counts), np.nan)
    edges = np.array(cloud.edges)
    most = max(float(np.nanmax(shown)) if (counts > 0).any() else 0.0, 1.0)
    powers = list(range(int(most) + 1))
    drawn.add_heatmap(
        z=shown, x=edges, y=edges, colorscale=style.SCALE, zmin=0.0, zmax=most,
        customdata=counts, hovertemplate="q %{x:.3f}, p %{y:.3f}: %{customdata} tokens"
        "<extra></extra>",
        colorbar={
            "thickness": 10, "tickvals": powers,
            # The unit once: with it the last label would not fit beside a narrow bar, and vanish.
            "ticktext": ["1 token", *(str(10**power) for power in powers[1:])],
            "outlinewidth": 0, "orientation": "h", "x": 0.5, "len": 1.0,
            "yref": "container", "y": 1.0, "yanchor": "top", "ypad": 0,
        },
    )  # fmt: skip


def _draw_moments(drawn: go.Figure, moments: Moments, found: DensityInfo) -> None:
    """Draw the ellipse of two standard deviations, and the line of regression."""
    angle = np.linspace(0.0, 2.0 * math.pi, 73)
    rho = 0.0 if math.isnan(moments.correlation) else moments.correlation
    q = moments.q_mean + 2.0 * moments.q_std * np.cos(angle)
    p = moments.p_mean + 2.0 * moments.p_std * (
        rho * np.cos(angle) + math.sqrt(max(1.0 - rho * rho, 0.0)) * np.sin(angle)
    )
    drawn.add_scatter(
        x=q, y=p, mode="lines", name="two standard deviations", hoverinfo="skip",
        line={"color": style.BLUE, "width": 1.5},
    )  # fmt: skip
    if math.isnan(moments.slope):
        return
    ends = np.array([found.low, found.high])
    drawn.add_scatter(
        x=ends, y=moments.p_mean + moments.slope * (ends - moments.q_mean), mode="lines",
        name=f"regression, slope {moments.slope:.3f}",
        line={"color": style.VERMILLION, "width": 1.5},
        hovertemplate=f"slope of p on q {moments.slope:.4g}, correlation "
        f"{moments.correlation:.4g}<extra></extra>",
    )  # fmt: skip
