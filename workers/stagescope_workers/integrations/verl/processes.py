"""The probes of a verl process: one for each role that works in it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.lifecycle import init
from stagescope_workers.probe import Probe

_lock: Final = threading.Lock()
# The process is part of the key: a forked child has no use for its parent's probes.
_probes: Final[dict[tuple[int, str, str, int], Probe]] = {}


def probe_of(
    context: Context,
    role: str,
    rank: int,
    *,
    world_size: int | None = None,
    describe: Callable[[], Mapping[str, Any]] = dict,
) -> Probe:
    """Return the probe of a role in this process, made on first use.

    Args:
        context: what the driver planted.
        role, rank, world_size: as in `init`.
        describe: asked once for more options of `init`: layout, data_rank, settings.
    """
    key = (os.getpid(), context.run, role, rank)
    with _lock:
        probe = _probes.get(key)
        if probe is None:
            probe = _probes[key] = init(
                context.run,
                role=role,
                rank=rank,
                world_size=world_size,
                attempt_key=context.attempt_key,
                plan=context.profiler,
                **{"settings": context.settings, **describe()},
            )
        return probe


def forget() -> None:
    """Let go of the probes, after `finish` has closed them."""
    with _lock:
        _probes.clear()
