"""TRL's `GRPOTrainer` and `AsyncGRPOTrainer`, read in TRL 1.16."""

from __future__ import annotations

from stagescope_workers.integrations.patches import Patch
from stagescope_workers.integrations.trl import async_grpo, grpo


def patches() -> list[Patch]:
    """Return the patches of both trainers; subclasses inherit them."""
    return [*grpo.patches(), *async_grpo.patches()]
