"""Chooses the Ray cluster of a home's service, and joins clusters as a driver."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import ray
from ray._private import services, utils

from stagescope_service import embedded, service_file
from stagescope_service.settings import Settings
from stagescope_wire.discovery import NAMESPACE
from stagescope_wire.errors import InvalidInput, Unreachable

LOCAL: Final = "local"
"""As an address: start a cluster for the service, whatever else runs on the machine."""
AUTO: Final = "auto"
"""As an address, Ray's: the cluster that runs on this machine, also one of a driver."""
Kind = Literal["joined", "running", "embedded"]
_CONNECT_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 0.25
_HEAD_SECONDS: Final = 5.0
"""Seconds for a head node to listen; Ray itself waits for minutes, and logs each try."""
_GREETING_SECONDS: Final = 10.0
"""Seconds for a listening head node to answer; another server never does."""
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""Begins HTTP/2, which gRPC uses: a server answers with its settings, a frame of type 4."""
_OTHER_ADDRESSES: Final = {
    "ray": "the address of Ray Client",
    "http": "the address of the dashboard, where `ray job submit` connects",
}  # fmt: skip
"""Scheme -> what an address of Ray with it is."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster and why it was chosen."""

    kind: Kind
    address: str
    passed_over: tuple[str, ...] = ()
    """Clusters of this machine that were not joined, because no address names them."""
    new_keeper: int | None = None
    """Pid of the keeper, where this call started the cluster."""


@contextlib.contextmanager
def chosen(
    settings: Settings, address: str | None, *, before_start: Callable[[], None] = lambda: None
) -> Iterator[Cluster]:
    """Join the cluster for a home's service; one that is started for it ends on a failure.

    The order: `address`, RAY_ADDRESS, the cluster of this home if it is alive, the one that
    `ray start` started on this machine, a new one. No cluster is started where `before_start`
    raises.
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


def end_dead(settings: Settings) -> str:
    """End what is left of this home's own cluster if its head is dead; return its address, or "".

    Its actors may run on for a minute, and would write to the same catalogue as the next service.
    """
    fields, pid = service_file.read(settings), keeper(settings)
    address = str(fields.get("cluster_address") or "")
    if pid is None or fields.get("cluster") != "embedded" or not address or _listens(address):
        return ""
    embedded.stop(pid, settings.home)
    service_file.change(settings, {"embedded_pid": None, "cluster_address": None})
    return address


def of_home(settings: Settings) -> Cluster | None:
    """Return the cluster that service.json names, if it is alive."""
    fields = service_file.read(settings)
    address = str(fields.get("cluster_address") or "")
    if keeper(settings) is not None:
        return Cluster("embedded", address)
    # Without a URL no service ever answered there.
    if fields.get("cluster") == "embedded" or not fields.get("url"):
        return None
    if not _answers(address):
        return None
    return Cluster("running" if address in _local_addresses() else "joined", address)


def keeper(settings: Settings) -> int | None:
    """Return the pid of the keeper of this home's embedded cluster, if it is alive."""
    pid = service_file.read(settings).get("embedded_pid")
    return pid if isinstance(pid, int) and embedded.is_ours(pid, settings.home) else None


def to_stop(settings: Settings, address: str | None) -> str | None:
    """Return the cluster of a service to stop; never one that a driver started for itself."""
    candidates = [address, service_file.read(settings).get("cluster_address"), _environment()]
    named = [str(each) for each in candidates if each and each != LOCAL]
    return named[0] if named else _started_by_ray_start(_local_addresses())


@contextlib.contextmanager
def joined(address: str) -> Iterator[str]:
    """Join a cluster as a driver inside the block; a process that has joined one stays in it.

    Yields the cluster's own address.

    Raises:
        InvalidInput: the address names no cluster, or `auto` may be several.
        Unreachable: no cluster answers there.
    """
    if ray.is_initialized():
        yield _current_address()
        return
    address = head_of(address)
    try:
        _use_token()
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, error) from error
    try:
        yield _current_address()
    finally:
        ray.shutdown()


def head_of(address: str) -> str:
    """Return the address of a head node that answers, for `ray.init`.

    Raises:
        InvalidInput: the address names no cluster, or `auto` may be several.
        Unreachable: no cluster answers there.
    """
    address = _on_this_machine() if address == AUTO else _check_address(address)
    try:
        _await_head(address)
    except ConnectionError as error:
        raise _no_cluster(address, error) from error
    return address


def _no_cluster(address: str, error: Exception) -> Unreachable:
    return Unreachable(
        f"no Ray cluster answers at {address}: {' '.join(str(error).split())[:300]}",
        expected="the address of a running cluster, host:port",
        advice="is `ray start --head` running there, with this user's ~/.ray/auth_token?",
    )


# --- the choice -----------------------------------------------------------------------------
def _choose(settings: Settings, address: str | None, before_start: Callable[[], None]) -> Cluster:
    if ray.is_initialized():
        return Cluster("joined", _current_address())
    requested = address or _environment()
    if requested and requested != LOCAL:
        return Cluster("joined", requested)
    own = of_home(settings)
    if own is not None and (own.kind == "embedded" or requested != LOCAL):
        return own
    local: frozenset[str] = frozenset() if requested == LOCAL else _local_addresses()
    running = _started_by_ray_start(local)
    if running is not None:
        return Cluster("running", running)
    before_start()
    pid, started = embedded.start(settings.home)
    service_file.change(settings, {"embedded_pid": pid, "cluster_address": started})
    return Cluster("embedded", started, tuple(sorted(local)), pid)


def _environment() -> str | None:
    return os.environ.get("RAY_ADDRESS") or None


def _local_addresses() -> frozenset[str]:
    """Return every cluster with a node on this machine, those of drivers included."""
    find: Any = services.find_gcs_addresses  # untyped in ray
    if hasattr(find, "cache_clear"):  # newer versions of Ray cache the first result
        find.cache_clear()
    return frozenset(find())


def _started_by_ray_start(local: frozenset[str]) -> str | None:
    """Return the cluster whose address `ray start` wrote; a driver's ray.init writes none."""
    address: str | None = utils.read_ray_address()
    return address if address in local else None


def _check_address(address: str) -> str:
    scheme, separator, _ = address.partition("://")
    if not separator:
        return address
    kind = _OTHER_ADDRESSES.get(scheme.lower().removesuffix("s"), "a URL")
    raise InvalidInput(
        f"{address!r:.200} is not the address of a Ray cluster, but {kind}",
        expected="host:port of the head node, as `ray start --head` prints it (port 6379)",
        advice="give it with --address, or set RAY_ADDRESS to it",
    )


def _on_this_machine() -> str:
    """Return the address of the cluster that runs on this machine.

    The one that `ray start` left is preferred. Ray itself takes any, and waits for minutes for one
    whose head node does not answer.

    Raises:
        Unreachable: none answers.
        InvalidInput: several do, and `ray start` left none of them.
    """
    left: str | None = utils.read_ray_address()
    first = [left] if left else []
    known: list[str] = [*dict.fromkeys([*first, *sorted(_local_addresses())])]
    answering = [address for address in known if _answers(address)]
    if not answering:
        tried = f"; tried {', '.join(known)}" if known else ""
        raise Unreachable(
            f"the address {AUTO} names the Ray cluster of this machine, and none answers{tried}",
            expected="a cluster that runs here",
            advice="`ray start --head` starts one; --address host:port, or RAY_ADDRESS, names "
            "one on another machine",
        )
    if answering[0] != left and len(answering) > 1:
        raise InvalidInput(
            f"the address {AUTO} may be any of the Ray clusters {', '.join(answering)}",
            expected="the address of one of them",
            advice="give it with --address, or set RAY_ADDRESS to it",
        )
    return answering[0]


def _await_head(address: str) -> None:
    """Wait until a Ray head answers at host:port; addresses of another form are Ray's to judge.

    Raises:
        ConnectionError: nothing listens there, or something else does.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    # Ray takes a loopback address as this node's own.
    local = host in ("localhost", "127.0.0.1")
    own = [f"{ray.util.get_node_ip_address()}:{port}"] if local else []  # type: ignore[no-untyped-call]
    if not _listens(address, *own):
        raise ConnectionError(f"nothing listens there ({_HEAD_SECONDS:.0f} s)")
    if not any(map(_greets, [address, *own])):
        raise ConnectionError("what listens there does not answer as the head node of a cluster")


def _listens(*addresses: str) -> bool:
    """Return whether a process listens at one of these within `_HEAD_SECONDS`."""
    deadline = time.monotonic() + _HEAD_SECONDS
    while not any(map(_answers, addresses)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_RETRY_SECONDS)
    return True


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _greets(address: str) -> bool:
    """Return whether what listens at an address speaks HTTP/2, as a head node does."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return True  # it speaks after a handshake only
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS
        ) as connection:
            connection.settimeout(_GREETING_SECONDS)
            connection.sendall(_PREFACE)
            return connection.recv(4)[3:4] == b"\x04"
    except (OSError, OverflowError):
        return False


def _current_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _use_token() -> None:
    """Authenticate to a cluster that is joined by its address.

    Ray does so itself only for a cluster that it finds ("auto"), yet every cluster that `ray.init`
    started requires the token. If the environment sets a mode, it stays.
    """
    with contextlib.suppress(ImportError):  # older versions of Ray have no tokens
        from ray._private.authentication.authentication_token_setup import (
            maybe_enable_token_auth_if_token_available,
        )

        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
