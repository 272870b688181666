"""Arrays in, mergeable summaries out: exact mismatch statistics of two log-prob streams.

`TokenBatch.from_tensors` checks a payload, `summarise` takes every statistic in one pass,
`Summary.merge` adds summaries of disjoint tokens, `publish` names the numbers. No I/O, no Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.checks import Check
from stagescope_service.statistics.comparability import Comparability, examine, examine_cell
from stagescope_service.statistics.mismatch import publish, publish_cell
from stagescope_service.statistics.noise_checks import Calibration, calibration
from stagescope_service.statistics.part import PartRecord, RankRow, Recompute
from stagescope_service.statistics.settings import StatisticsSettings
from stagescope_service.statistics.step_summary import NOISE_PAIR, StepSummary, assemble, skip_of
from stagescope_service.statistics.summary import Summary
from stagescope_service.statistics.token_batch import TokenBatch, available_pairs, update_pair
from stagescope_wire.tensorfile import WireTensor

if TYPE_CHECKING:
    from stagescope_service.statistics.summarise import summarise, warm

__all__ = [
    "NOISE_PAIR", "Calibration", "Cell", "Check", "Comparability", "Field", "PartRecord", "RankRow",
    "Recompute", "StatisticsSettings", "StepSummary", "Summary", "TokenBatch", "WireTensor",
    "assemble", "available_pairs", "calibration", "examine", "examine_cell", "publish",
    "publish_cell", "skip_of", "summarise", "update_pair", "warm",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import the compiled loops when they are asked for: who only reads statistics needs none."""
    if name not in ("summarise", "warm"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.summarise")
    globals()["summarise"], globals()["warm"] = module.summarise, module.warm
    return globals()[name]
