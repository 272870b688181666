"""The published numbers of a step summary in a form for series over many steps.

A step summary holds every sequence of the step; a series over 10 000 steps needs one number of
each. The published numbers are therefore stored beside it at aggregation. Those of the step are
JSON; those of its ranks, rounds and stalenesses are one float64 matrix each.

The JSON also holds the numbers of the trainer against itself (`noise_floor/{name}`), if they were
measured, and some of the first stalenesses (`staleness_{k}/{name}`). Curves over all steps need
them, and the matrices of a thousand ranks are too large to be read for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np

from stagescope_service.statistics import cell as cells
from stagescope_service.statistics import codec
from stagescope_service.statistics.cell import Cell, Float64
from stagescope_service.statistics.exact import unequal_tokens
from stagescope_service.statistics.mismatch import publish, publish_cell
from stagescope_service.statistics.step_summary import StepSummary

VERSION: Final = 1
"""Incremented when a published number changes its name or formula; older rows are ignored."""

Dimension = Literal["rank", "round", "turn", "staleness"]
SliceKey = tuple[str | None, int]
"""(role, rank), or (None, round or staleness)."""

STALENESSES: Final = range(8)
"""Stalenesses whose numbers are stored beside those of the step, if there are several."""
OF_STALENESS: Final = (
    "rollout_corr/k3_kl", "rollout_corr/kl", "logprob_abs_diff/mean", "logprob_abs_diff/max",
    "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max",
    "training/rollout_actor_probs_pearson_corr", "calibration/z", "counts/tokens",
)  # fmt: skip
"""The numbers that are stored of each."""

_KIND: Final = "step metrics"


@dataclasses.dataclass(frozen=True)
class SliceMetrics:
    """The published numbers of the slices of a step.

    Attributes:
        names: The published names, one per column.
        keys: For each dimension, one key per row.
        values: For each dimension, float64 [slices, names].
    """

    names: tuple[str, ...]
    keys: Mapping[Dimension, tuple[SliceKey, ...]]
    values: Mapping[Dimension, Float64]

    @classmethod
    def from_step_summary(cls, step_summary: StepSummary) -> SliceMetrics:
        """Publish a step summary's ranks, rounds and stalenesses."""
        summary = step_summary.summary
        found: dict[Dimension, list[tuple[SliceKey, Cell]]] = {
            "rank": [((row.role, row.rank), row.cell) for row in step_summary.ranks],
            "round": [((None, key), cell) for key, cell in summary.rounds.items()],
            "turn": [((None, key), cell) for key, cell in summary.turns.items()],
            "staleness": [((None, key), cell) for key, cell in summary.staleness.items()],
        }
        names = tuple(publish_cell(Cell(cells.empty()), summary.pair))
        values: dict[Dimension, Float64] = {
            by: np.array(
                [[*publish_cell(cell, summary.pair).values()] for _, cell in items], np.float64
            ).reshape(-1, len(names))
            for by, items in found.items()
        }
        return cls(names, {by: tuple(key for key, _ in found[by]) for by in found}, values)

    def column(self, by: Dimension, name: str) -> dict[SliceKey, float]:
        """Return one number of each slice; {} if it is not published."""
        if name not in self.names or by not in self.values:
            return {}
        column = self.values[by][:, self.names.index(name)].tolist()
        return dict(zip(self.keys[by], column, strict=True))

    def to_bytes(self) -> bytes:
        """Return the bytes of `codec.save`."""
        return codec.save(_KIND, VERSION, dict(self.values.items()), _FIELDS.to_json(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> SliceMetrics:
        """Read bytes written by `to_bytes`.

        Raises:
            InvalidInput: malformed bytes, or another version.
        """
        arrays, document = codec.load(data, _KIND, VERSION)
        with codec.refusing(_KIND):
            return cls(**_FIELDS.from_json(document), values=arrays)  # type: ignore[arg-type]


_FIELDS: Final = codec.JsonFields(SliceMetrics, "names", "keys")


def floor_name(name: str) -> str:
    """Return the name of a number of the trainer against itself."""
    return f"noise_floor/{name}"


def staleness_name(staleness: int, name: str) -> str:
    """Return the name of a number of the tokens of one staleness."""
    return f"staleness_{staleness}/{name}"


def step_metrics(
    step_summary: StepSummary,
    *,
    verdict: str,
    suspects: Sequence[str],
    summary_wall: float,
    noise: StepSummary | None = None,
) -> dict[str, object]:
    """Return the columns of `step_metrics` without its key.

    Args:
        step_summary: the step summary.
        noise: the summary of the trainer against itself; None: not recorded.
        verdict: the comparability verdict of the step's answer.
        suspects: the failed checks.
        summary_wall: the time of the aggregation; the row is valid for that aggregation only.
    """
    return {
        "version": VERSION,
        "summary_wall": summary_wall,
        "stage": step_summary.stage,
        "verdict": verdict,
        "suspects": list(suspects),
        "metrics": {
            **publish(step_summary.summary),
            **_of_stalenesses(step_summary),
            **({} if noise is None else _of_noise(noise)),
        },
        "tokens": step_summary.total.tokens,
        "masked_tokens": step_summary.total.masked,
        "unequal_tokens": unequal_tokens(step_summary.total),
        "slices": SliceMetrics.from_step_summary(step_summary).to_bytes(),
    }


def _of_noise(noise: StepSummary) -> dict[str, float]:
    numbers = publish(noise.summary)
    return {
        floor_name(name): value
        for name, value in numbers.items()
        if not name.startswith("per_round/")
    }


def _of_stalenesses(step_summary: StepSummary) -> dict[str, float]:
    cells_of = step_summary.summary.staleness.items()
    if len(cells_of) < 2:
        return {}
    found: dict[str, float] = {}
    for staleness, cell in cells_of:
        if staleness in STALENESSES:
            numbers = publish_cell(cell, step_summary.summary.pair)
            found |= {staleness_name(staleness, name): numbers[name] for name in OF_STALENESS}
    return found
