"""The probes of a verl process: one for each role that works in it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final
from urllib.parse import urlsplit

from stagescope import discovery
from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.probe.lifecycle import init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.transport.calls import in_thread
from stagescope_workers.transport.link import NAMESPACE, RayLink, warn_unconnected

_LOOK_AGAIN_SECONDS: Final = 5.0
_WARN_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 2.0
_FIRST_WAIT: Final = 0.3
"""Seconds that the first look waits for an answer, once a process: a host on the same machine
answers in a fraction, and the first step is then reported too."""

_found = False
_looked = float("-inf")
_first: float | None = None
_connecting: Future[dict[str, Any]] | None = None


def is_there() -> bool:
    """Say whether a service was there at any time; looked for at most every five seconds.

    Once found it is taken to come back: what it misses meanwhile waits in the probe, bounded.
    """
    global _found, _looked, _first
    now = time.monotonic()
    if not _found and now - _looked > _LOOK_AGAIN_SECONDS:
        _looked = now
        _first = now if _first is None else _first
        _found = (
            bool(os.environ.get("STAGESCOPE_URL"))
            or RayLink.find() is not None
            or _is_written_and_connects()
        )
    return _found


def warn_if_absent(run: str) -> None:
    """Log, once in a process, that there is no service; call where `is_there` said no."""
    if _first is not None and time.monotonic() - _first > _WARN_SECONDS:
        warn_unconnected(f"run {run} (STAGESCOPE_VERL=off silences this)", None, NAMESPACE)


def _is_written_and_connects() -> bool:
    """Say whether service.json names a service that takes connections; the file may be old.

    Asked in a thread: a host that is away must not hold up the training.
    """
    global _connecting
    if _connecting is None:
        if not discovery.service_file().exists():
            return False
        _connecting = in_thread(_connect)
        with contextlib.suppress(Exception):
            _connecting.result(_FIRST_WAIT if _looked == _first else 0.0)
    if not _connecting.done():
        return False
    asked, _connecting = _connecting, None
    return asked.exception() is None


def _connect() -> dict[str, Any]:
    place = urlsplit(discovery.find().url)
    address = (place.hostname or "", place.port or (443 if place.scheme == "https" else 80))
    socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
    return {}


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
