"""verl's own precision debugger steps aside where our capture carries out its orders.

Both would drive msprobe, which is one a process. And on its own it raises at the critic where it
is strict: it is asked about `train_batch`, which is none of its stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stagescope_workers.capture.verl_blocks import VERL_STAGES
from stagescope_workers.integrations.verl import ranks
from stagescope_workers.integrations.verl.guard import guarded

Function = Callable[..., Any]


def run_annotate(function: Function) -> Function:
    """Return `PrecisionDebuggerProfiler.annotate`, which leaves alone what is not its own."""

    def run(profiler: Any, *args: Any, **kwargs: Any) -> Any:
        steps_aside = False
        with guarded("stepping in for verl's precision debugger"):
            steps_aside = ranks.is_active() or kwargs.get("role") not in VERL_STAGES
        return _alone if steps_aside else function(profiler, *args, **kwargs)

    return run


def _alone(function: Function) -> Function:
    return function
