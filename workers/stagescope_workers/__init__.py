"""The part of stagescope in training processes: reports a rank's stages, tensors and numbers.

::

    from stagescope_workers import finish, init

    probe = init(run="qwen3-8b-countdown", rank=rank, world_size=world_size)
    with probe.stage("actor_update", step=step, model=model) as stage:
        stage.record(old_log_probs=..., rollout_log_probs=..., response_mask=...)
        stage.log(loss=loss)
    finish(timeout=30)

No function raises or waits in a training process, and importing the package only needs numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from stagescope_workers.payload import host_tensor
from stagescope_workers.probe.lifecycle import as_stage, current, finish, init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    from stagescope_workers.capture.msprobe_capture import save
    from stagescope_workers.debug_metrics import calculate_debug_metrics

__all__ = [
    "Probe",
    "Stage",
    "as_stage",
    "calculate_debug_metrics",
    "current",
    "finish",
    "host_tensor",
    "init",
    "save",
]

# Imported on first use: most processes need neither the drop-in nor msprobe.
_LAZY = {
    "_calculate_per_round_metrics": "debug_metrics",
    "_find_contiguous_segments": "debug_metrics",
    "calculate_debug_metrics": "debug_metrics",
    "save": "capture.msprobe_capture",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
