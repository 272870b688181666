"""Importance weights that a trainer's loss applies: the settings for `rollout_corr/rollout_is_*`.

The service computes two kinds of weights, for tokens or for sequences: those cut at an upper bound,
and those set to 0 outside two bounds. If a trainer applies others, or has renamed the options for
them, one line is logged. Without these settings the numbers describe untruncated weights. Each
process that hands over streams gives the same settings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from stagescope_workers.integrations.patches import log_once

Level = Literal["token", "sequence"]
Outside = Literal["cut", "zero"]
"""Treatment of a weight beyond its bounds: it is cut to the bound, or set to 0."""


def applied(
    trainer: str, level: Level, outside: Outside, *, low: float | None, high: float | None
) -> dict[str, object]:
    """Return the settings of the weights that a loss applies.

    Args:
        trainer: Its name, for the line.
        level: Level of the weights.
        outside: Treatment of weights beyond the bounds.
        low, high: The bounds; None or 0 for `low`, and None for `high`, is none.

    Returns:
        The settings of `init`; empty, with one line, where the service has no such weights.
    """
    bounds = f"{low or 0} and {'inf' if high is None else high}"
    if outside == "cut" and not low:
        return {"rollout_is": level, "rollout_is_threshold": "inf" if high is None else high}
    if outside == "zero" and low and high is not None:
        return {"rollout_is": level, "rollout_is_threshold": f"{low}_{high}"}
    what = "cuts weights" if outside == "cut" else "drops weights outside"
    return not_computed(trainer, f"its loss {what} at {bounds} ({level} weights)")


def not_computed(trainer: str, why: str) -> dict[str, object]:
    """Log once that the service does not compute the weights of a loss; return no settings."""
    line = (
        f"{trainer}: {why}. rollout_corr/rollout_is_* are therefore of untruncated weights, which "
        "are not those that the loss applies"
    )
    # Every rank finds the same: rank 0 logs it.
    if os.environ.get("RANK", "0") == "0":
        log_once(line)
    return {}


def not_known(trainer: str, *options: str) -> dict[str, object]:
    """Log once that no option tells which weights a loss applies; return no settings."""
    return not_computed(
        trainer,
        f"its configuration has no {' and no '.join(options)}, so it is not known which "
        "importance weights it applies (another version may have renamed these options)",
    )


def has(node: object, name: str) -> bool:
    """Return whether a configuration has an option, with any value."""
    if node is None:
        return False
    if isinstance(node, Mapping):
        return name in node
    try:
        return hasattr(node, name)
    except Exception:  # OmegaConf raises its own errors for failed interpolations
        return True
