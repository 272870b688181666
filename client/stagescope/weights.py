"""Answers about weights: what the rollout received, held bit for bit against what was sent."""

from __future__ import annotations

from typing import Final

from stagescope import render
from stagescope.frames import Table, context

WEIGHT_ORDER: Final = ("name", "verdict", "ranks", "odd_ranks", "dtype", "shape", "reason")
"""Columns that are shown first: a table in 80 columns leaves out the last."""
VERSION_ORDER: Final = (
    "version", "step", "differ", "missing", "replicas_differ", "not_comparable", "agree",
    "complete",
)  # fmt: skip
DEVICE_ORDER: Final = ("device", "odd", "suspected", "runs", "last_run", "last_step", "last_rank")


class Weights(Table):
    """The weights of one version, a row each, the worst first.

    `verdict` is `differs`, `missing`, `not comparable` (see `reason`), `not compared` or `agrees`;
    `ranks` are those of the rollout that differ, `odd_ranks` those whose replicas hold something
    else.

    Usage:
        >>> weights = session.step(5).weights()
        >>> weights.about["counts"]           # {"differs": 1, "agrees": 310}
        >>> weights.where(verdict="differs")["name"]
    """

    __slots__ = ()

    @property
    def heading(self) -> str:
        """The version, how many weights have which verdict, and of which run."""
        counts = self.about.get("counts") or {}
        words = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        said = f"weights of version {self.about.get('version')}: {words or 'none'}"
        return render.printable(", ".join(part for part in (said, context(self.about)) if part))
