"""Where in the tokens the mismatch lies: |d| and d by place, position, probability, staleness.

d = p - q. The numbers are the profiles and slices stored with every step (`statistics.profiles`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, Literal

import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_service.statistics import profile_bins as profiles
from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.comparability import Comparability
from stagescope_service.statistics.profile_bins import CHANCES, Dimension
from stagescope_service.statistics.summary import MAX_ENGINES
from stagescope_service.statistics.token_batch import PROCESS
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.figures import AnatomyBin
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_service.views.steps.numbers import comparability_fields, doubt
from stagescope_wire.errors import NotFound
from stagescope_wire.render import counted
from stagescope_wire.tensors import ROLLOUT_ROUTES, TRAINER_ROUTES

By = Literal[Dimension, "staleness", "engine"]
AXES: Final[dict[By, str]] = {
    "place": "tokens since the round's first",
    "end": "tokens until the round's last",
    "position": "position in the sample",
    "probability": "probability that the rollout gave the token",
    "lattice": "largest power of two that d is a multiple of",
    "routing": "number of layers with other experts in the trainer",
    "staleness": "staleness (policy versions)",
    "engine": "engine instance that sampled the token",
}
UNKNOWN: Final = "unknown"
"""Label of tokens of a round that begins or ends in another piece of the sample."""
LAST: Final = "last of the sample"
UNIT: Final = "nat"


@dataclasses.dataclass(frozen=True)
class AnatomyInfo:
    """The data of the figure."""

    run: str
    attempt: int
    step: int
    by: By
    bins: tuple[AnatomyBin, ...]
    """In the order of the axis."""
    mean_abs: float | None
    """Over all tokens of the step, nats."""
    left_out: int
    """Number of tokens under the mask that are in no bin."""
    comparability: Comparability | None
    """Whether the streams of the step can be compared; None: it has no numbers."""
    note: str | None


def info(deps: Dependencies, target: Target, by: By) -> AnatomyInfo:
    """Read the mismatch of a step by one property of its tokens."""
    heading = (target.run, target.number, target.step_number, by)
    try:
        measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
    except NotFound as error:
        return AnatomyInfo(*heading, (), None, 0, None, error.wrong)
    summary, total = measured.summary.summary, measured.summary.total
    mean = total.mean(Field.D_ABS_SUM) if total.tokens else None
    if by == "staleness":
        found = tuple(_of_cell(key, cell) for key, cell in summary.staleness.items())
        lacking = summary.why_no_staleness
    elif by == "engine":
        owners = {
            f"{PROCESS}{row['incarnation']}": f"{row['role']} {row['rank']}"
            for row in deps.catalogue.processes(target.attempt_id)
        }
        found = tuple(
            _of_sums(owners.get(name, name), values.tolist())
            for name, values in summary.engines.items()
        )
        lacking = (
            "which engine sampled which row is not recorded (engine_ids, of at most "
            f"{MAX_ENGINES} in a payload)"
        )
    else:
        # The last token of a sample comes before those that precede it.
        found = tuple(
            _of_sums(label(by, each.key), each[1:])
            for each in sorted(
                summary.profiles.bins(by), key=lambda b: -1 if _is_last(by, b.key) else b.key
            )
        )
        lacking = (
            "the experts that rollout and trainer chose are not recorded "
            f"({ROLLOUT_ROUTES[0]}, {TRAINER_ROUTES[0]})"
            if by == "routing"
            else "no token counts"
        )
    left_out = total.masked - sum(each.tokens + each.nonfinite for each in found)
    note = None if found else lacking
    if found and left_out:
        of = f"{left_out} of {total.masked} tokens are left out"
        note = f"{of}: their rows name no {by}"
    return AnatomyInfo(*heading, found, mean, left_out, measured.comparability, note)


def doubted(found: AnatomyInfo) -> AnatomyInfo:
    """Add to the note why the mismatch may not be the engine's numerics alone."""
    why = None if found.comparability is None else doubt(found.comparability)
    return dataclasses.replace(found, note="; ".join(filter(None, (found.note, why))) or None)


def answer(found: AnatomyInfo) -> JsonObject:
    """Return the answer of `/steps/{step}/anatomy`."""
    fields = dataclasses.asdict(dataclasses.replace(found, comparability=None))
    rows = fields.pop("bins")
    return {**fields, **comparability_fields(found.comparability), "rows": rows, "next": None}


def _is_last(by: By, key: int) -> bool:
    return by == "end" and key == profiles.LAST


def _of_cell(staleness: int, cell: Cell) -> AnatomyBin:
    has = bool(cell.tokens)
    return AnatomyBin(
        str(staleness), cell.tokens, cell.masked - cell.tokens,
        cell.mean(Field.D_ABS_SUM) if has else None, cell.mean(Field.D_SUM) if has else None,
    )  # fmt: skip


def _of_sums(label: str, sums: Sequence[float]) -> AnatomyBin:
    """Return the bin of `profiles.COLUMNS`."""
    tokens, nonfinite, total, size, _ = sums
    means = (size / tokens, total / tokens) if tokens else (None, None)
    return AnatomyBin(label, int(tokens), int(nonfinite), *means)


def label(by: By, key: int) -> str:
    """Return the common property of the tokens of a profile's bin."""
    return {"probability": _probability, "lattice": _lattice}.get(by, _span)(key)


def _span(key: int) -> str:
    if key == profiles.LAST:
        return LAST
    if key == profiles.UNKNOWN:
        return UNKNOWN
    return str(key) if key < 2 else f"{2 ** (key - 1)}-{2**key - 1}"


def _probability(key: int) -> str:
    if key == profiles.NOT_FINITE:
        return "not finite"
    if key == profiles.OVER_ONE:
        return "over 1"
    low = f"{CHANCES[key - 1]:g}" if key else "0"
    return f"{low}-{CHANCES[key]:g}" if key < len(CHANCES) else f"{low}-1"


def _lattice(key: int) -> str:
    if key == profiles.NOT_FINITE:
        return "not finite"
    if key == profiles.ZERO:
        return "d = 0"
    finer = key == profiles.FINER
    return f"below 2^{profiles.FINEST}" if finer else f"2^{profiles.exponent(key)}"


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


def _hover(each: AnatomyBin) -> str:
    lines = [f"{each.label}: {counted(each.tokens, 'token')}"]
    lines.append(f"mean |d| {style.number(each.mean_abs, UNIT)}")
    lines.append(f"mean d {style.number(each.mean, UNIT)}")
    if each.nonfinite:
        lines.append(f"{counted(each.nonfinite, 'token')} not finite")
    return "<br>".join(lines)
