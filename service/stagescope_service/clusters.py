"""Which Ray cluster a home's service is put on, and being a driver of it for a moment."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import ray
from ray._private import services, utils

from stagescope.wire.errors import Unreachable
from stagescope_service import embedded, service_file
from stagescope_service.coordinator.actor import NAMESPACE
from stagescope_service.settings import Settings

LOCAL: Final = "local"
"""As an address: a cluster of the service's own, whatever else runs on the machine."""
Kind = Literal["joined", "running", "embedded"]
_CONNECT_SECONDS: Final = 1.0


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster and how it came to be the one."""

    kind: Kind
    address: str
    passed_over: tuple[str, ...] = ()
    """Clusters of this machine that were not joined unasked, where one was started instead."""
    new_keeper: int | None = None
    """Pid of the keeper, where this call started the cluster."""


@contextlib.contextmanager
def chosen(
    settings: Settings, address: str | None, *, before_start: Callable[[], None] = lambda: None
) -> Iterator[Cluster]:
    """Be a driver of the cluster for a home's service; one started for it ends on a failure.

    The order: `address`, RAY_ADDRESS, the cluster of this home where it lives, the one that
    `ray start` left on this machine, one of its own. What `before_start` raises keeps that from
    being started.
    """
    cluster = _choose(settings, address, before_start)
    try:
        with joined(cluster.address) as actual:
            own = of_home(settings)
            if own is not None and own.kind == "embedded" and own.address == actual:
                cluster = dataclasses.replace(cluster, kind="embedded")
            yield dataclasses.replace(cluster, address=actual)
    except BaseException:
        if cluster.new_keeper is not None:
            embedded.stop(cluster.new_keeper, settings.home)
        raise


def of_home(settings: Settings) -> Cluster | None:
    """Return the cluster that service.json names, if it lives."""
    known = service_file.read(settings)
    address = str(known.get("cluster_address") or "")
    if keeper(settings) is not None:
        return Cluster("embedded", address)
    # Without a URL no service ever began to answer there.
    if known.get("cluster") == "embedded" or not known.get("url"):
        return None
    if address in _living():
        return Cluster("running", address)
    return Cluster("joined", address) if _answers(address) else None


def keeper(settings: Settings) -> int | None:
    """Return the pid that keeps the cluster that was started for this home, if it lives."""
    pid = service_file.read(settings).get("embedded_pid")
    return pid if isinstance(pid, int) and embedded.is_ours(pid, settings.home) else None


def to_stop(settings: Settings, address: str | None) -> str | None:
    """Return where a service that is to be stopped may be: never a cluster of a driver's own."""
    asked = [address, service_file.read(settings).get("cluster_address"), _environment()]
    named = [str(each) for each in asked if each and each != LOCAL]
    return named[0] if named else _left_by_ray_start(_living())


@contextlib.contextmanager
def joined(address: str) -> Iterator[str]:
    """Be a driver of a cluster for a moment; a process that is one already stays one.

    Yields the address by which the cluster knows itself.
    """
    if ray.is_initialized():
        yield _current_address()
        return
    try:
        _bring_token()
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Unreachable(
            f"no Ray cluster answers at {address}: {' '.join(str(error).split())[:300]}",
            expected="the address of a running cluster, host:port",
            advice="is `ray start --head` running there, with this user's ~/.ray/auth_token?",
        ) from error
    try:
        yield address if "://" in address else _current_address()
    finally:
        ray.shutdown()


# --- the choice -----------------------------------------------------------------------------
def _choose(settings: Settings, address: str | None, before_start: Callable[[], None]) -> Cluster:
    if ray.is_initialized():
        return Cluster("joined", _current_address())
    asked = address or _environment()
    if asked and asked != LOCAL:
        return Cluster("joined", asked)
    known = of_home(settings)
    if known is not None and (known.kind == "embedded" or asked != LOCAL):
        return known
    living: frozenset[str] = frozenset() if asked == LOCAL else _living()
    left = _left_by_ray_start(living)
    if left is not None:
        return Cluster("running", left)
    before_start()
    pid, started = embedded.start(settings.home)
    service_file.change(settings, {"embedded_pid": pid, "cluster_address": started})
    return Cluster("embedded", started, tuple(sorted(living)), pid)


def _environment() -> str | None:
    return os.environ.get("RAY_ADDRESS") or None


def _living() -> frozenset[str]:
    """Return every cluster with a node on this machine, drivers' own ones included."""
    find: Any = services.find_gcs_addresses
    if hasattr(find, "cache_clear"):  # newer Rays remember what they found first
        find.cache_clear()
    return frozenset(find())


def _left_by_ray_start(living: frozenset[str]) -> str | None:
    """Return the one that `ray start` wrote down; those of a driver's ray.init never are."""
    address: str | None = utils.read_ray_address()
    return address if address in living else None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _current_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _bring_token() -> None:
    """Authenticate to a cluster that is named by its address.

    Ray does so by itself only for a cluster that it finds ("auto"), yet it asks for the token in
    every cluster that `ray.init` started. Where the mode is said, that stands.
    """
    with contextlib.suppress(ImportError):  # older Rays have no tokens
        from ray._private.authentication.authentication_token_setup import (
            maybe_enable_token_auth_if_token_available,
        )

        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
