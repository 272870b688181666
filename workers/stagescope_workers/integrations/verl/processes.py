"""The probes of a verl process, one for each role in it, and the search for a service."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final

from stagescope_wire import discovery, proxies
from stagescope_wire.discovery import NAMESPACE
from stagescope_wire.nonfinite import JsonObject
from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.probe.lifecycle import init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.transport.calls import Reply, in_thread
from stagescope_workers.transport.link import RayLink, warn_unconnected

_SEARCH_INTERVAL: Final = 5.0
_WARN_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 2.0
_FIRST_WAIT: Final = 0.3
"""Seconds that the first search waits for an answer, once per process. A service on the same
machine answers in a fraction of that, and then the first step is reported too."""

_search_lock: Final = threading.Lock()
_found = False
_searched_at = float("-inf")
_first_search: float | None = None
_connecting: Future[Reply] | None = None


def has_service() -> bool:
    """Return whether a service was ever found; searches at most every five seconds.

    Once found, a service is expected to come back: meanwhile events wait in the probe, bounded.
    """
    if not _found:
        # An agent loop worker runs its introduction and its first prompts in different threads.
        # If it did not wait for a search that is under way, its first step would not be reported.
        with _search_lock:
            _search()
    return _found


def _search() -> None:
    global _found, _searched_at, _first_search
    now = time.monotonic()
    if _found or now - _searched_at <= _SEARCH_INTERVAL:
        return
    _searched_at = now
    _first_search = now if _first_search is None else _first_search
    _found = (
        bool(os.environ.get("STAGESCOPE_URL"))
        or RayLink.find() is not None
        or _listed_service_connects()
    )


def warn_without_service(run: str) -> None:
    """Log, once per process, that there is no service; call it where `has_service` is False."""
    if _first_search is not None and time.monotonic() - _first_search > _WARN_SECONDS:
        warn_unconnected(f"run {run} (STAGESCOPE_VERL=off silences this)", None, NAMESPACE)


def _listed_service_connects() -> bool:
    """Return whether service.json names a service that accepts connections; it may be outdated.

    It connects in a thread: an unreachable host must not delay the training.
    """
    global _connecting
    if _connecting is None:
        if not discovery.service_file().exists():
            return False
        _connecting = in_thread(_connect)
        with contextlib.suppress(Exception):
            _connecting.result(_FIRST_WAIT if _searched_at == _first_search else 0.0)
    if not _connecting.done():
        return False
    attempt, _connecting = _connecting, None
    return attempt.exception() is None


def _connect() -> Reply:
    address = proxies.first_address(discovery.locate().url)
    socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
    return {}


_lock: Final = threading.Lock()
# The process id is part of the key: a forked child cannot use its parent's probes.
_probes: Final[dict[tuple[int, str, str, int], Probe]] = {}


def get_probe(
    context: Context,
    role: str,
    rank: int,
    *,
    world_size: int | None = None,
    describe: Callable[[], JsonObject] = dict,
) -> Probe:
    """Return the probe of a role in this process, created on first use.

    Args:
        context: the driver's context.
        role, rank, world_size: as in `init`.
        describe: called once for further options of `init`: layout, data_rank, settings.
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


def call_actors(actors: Iterable[Any], function: Callable[..., None], *args: object) -> None:
    """Have Ray actors run `function(actor's object, *args)`, each once; does not wait.

    Args:
        actors: handles; an actor runs the function after its earlier calls.
        function: a function of a module; it must not raise.
        args: further arguments.
    """
    for actor in {id(each): each for each in actors}.values():
        actor.__ray_call__.remote(function, *args)


def forget() -> None:
    """Drop the probes, after `finish` has closed them."""
    with _lock:
        _probes.clear()
