"""The metric names that rules accept, and suggestions for unknown ones."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Mapping
from typing import Final

import numpy as np

from stagescope_service.statistics import cell as cells
from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.histogram import Histogram
from stagescope_service.statistics.mismatch import publish, publish_cell
from stagescope_service.statistics.sequence_row import ROW
from stagescope_service.statistics.settings import StatisticsSettings
from stagescope_service.statistics.step_summary import MISMATCH_PAIRS
from stagescope_service.statistics.summary import Sequences, Slices, Summary, Tokens
from stagescope_wire.errors import InvalidPlan

MISSING_RANKS: Final = "missing_ranks"
STAGE_SECONDS: Final = "stage_seconds"
OF_STAGES: Final = {
    MISSING_RANKS: "expected ranks that did not end a stage of the step, by stage",
    STAGE_SECONDS: "seconds that the slowest rank was in a stage of the step, by stage",
}
"""Metrics from stage events, which no summary publishes."""
NONFINITE_SCALAR: Final = "nonfinite_scalar/"
"""Prefix of metrics that count the NaN and infinite values of a scalar (a name, or a pattern of
names)."""

MEANS: Final[Mapping[str, tuple[Field, Field, Field]]] = {
    "logprob_abs_diff/mean": (Field.D_ABS_SUM, Field.D_SUM, Field.D_M2),
    "training/rollout_probs_diff_mean": (Field.A_SUM, Field.A_SUM, Field.A_M2),
}
"""Means of |x| over tokens, with a known standard error -> the fields of three sums: of |x|, of x,
and of squares of x around its mean."""

_ROUND: Final = re.compile(r"^per_round/round_\d+_")
_NAMED: Final = 5


@functools.cache
def step_metric_names() -> frozenset[str]:
    """Return the names that a step summary may publish; rounds as `round_0`."""
    weights = [
        StatisticsSettings(),
        *(
            StatisticsSettings(
                rollout_is=kind, rollout_is_threshold=bound, rollout_is_batch_normalize=True
            )
            for kind in ("token", "sequence")
            for bound in (2.0, "0.5_2")
        ),
    ]
    return frozenset(
        name
        for pair in MISMATCH_PAIRS
        for settings in weights
        for name in publish(_empty(pair, settings))
    ) | {"per_round/max_diff_value"}


@functools.cache
def cell_metric_names() -> frozenset[str]:
    """Return the names that a round, a rank or a staleness may publish."""
    nothing = Cell(np.zeros(cells.WIDTH))
    return frozenset(name for pair in MISMATCH_PAIRS for name in publish_cell(nothing, pair))


def check_metric(metric: str, by: str, field: str) -> None:
    """Check that a metric (a name, or a pattern with `*`) exists.

    Raises:
        InvalidPlan: no such metric, with similar names.
    """
    if scalar_of(metric):
        return  # the training chooses the names of scalars
    known = {*(cell_metric_names() if by in ("round", "rank") else step_metric_names()), *OF_STAGES}
    if is_pattern(metric):
        found = bool(fnmatch.filter(known, metric))
    else:
        found = _ROUND.sub("per_round/round_0_", metric) in known
    if found:
        return
    close = difflib.get_close_matches(metric, known, n=_NAMED, cutoff=0.5) or sorted(
        name for name in known if name.partition("/")[0] == metric.partition("/")[0]
    )
    where = f" by {by}" if metric in step_metric_names() else ""
    raise InvalidPlan(
        f"{field}: there is no metric {metric!r:.100}{where}",
        expected=f"one of {', '.join(close[:_NAMED])}" if close else "a published metric's name",
        advice="docs/metrics.md lists every name with its formula",
    )


def scalar_of(metric: str) -> str:
    """Return the scalar (a name or a pattern) whose non-finite values a metric counts, else ''."""
    return metric.removeprefix(NONFINITE_SCALAR) if metric.startswith(NONFINITE_SCALAR) else ""


def is_nonfinite(metric: str) -> bool:
    """Return whether a metric counts tokens whose log-probs are not finite."""
    return metric.startswith("nonfinite/")


def is_pattern(metric: str) -> bool:
    """Return whether a metric is a pattern of names."""
    return "*" in metric or "?" in metric


def _empty(pair: tuple[str, str], settings: StatisticsSettings) -> Summary:
    """Return the summary of one round without tokens, which publishes every name."""
    none = np.empty(0, np.int64)
    slices = Slices(np.zeros(1, np.int64), np.stack([cells.merge(cells.empty(0))]))
    nothing = Slices(none, cells.empty(0))
    tokens = Tokens(none, none, none, none, none, np.empty(0), np.empty(0))
    return Summary(
        pair=pair,
        settings=settings,
        dtypes={},
        rounds=slices,
        turns=nothing,
        staleness=nothing,
        histogram=Histogram.merge([]),
        worst=tokens,
        non_finite=tokens,
        sequences=Sequences(
            samples=(),
            source=none,
            row=none,
            placed=np.empty((0, 2), bool),
            values=np.empty((0, len(ROW))),
            cover=np.empty((0, 3), np.int64),
        ),
        sources=(),
        empty_samples=(),
        unnamed_empty=0,
        versions=(),
    )
