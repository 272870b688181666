"""Starts and stops the service on a Ray cluster: the coordinator and the API as detached actors.

`start_service` may be called again at any time: actors that run are found by name and left alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import ray
from ray import exceptions

from stagescope_service import clusters, embedded, service_file
from stagescope_service.coordinator import control_socket
from stagescope_service.http.access_tokens import AccessTokens, token_path
from stagescope_service.http.auth import check_bind
from stagescope_service.http.server import bind
from stagescope_service.settings import Settings
from stagescope_wire.discovery import (
    API_NAME,
    COORDINATOR_NAME,
    NAMESPACE,
    ingestor_name,
    relay_name,
)
from stagescope_wire.errors import (
    Conflict,
    InvalidInput,
    NotReady,
    StagescopeError,
    StoreError,
    Unreachable,
)

if TYPE_CHECKING:
    from stagescope_service.api_actor import ApiLocation

CONCURRENCY: Final = 20_000
"""Pending calls of the coordinator: every process has a poll pending."""
_CALL_SECONDS: Final = 15.0
_SOCKET_SECONDS: Final = 5.0
_PORT_SECONDS: Final = 2.0
"""Seconds to wait for the port of a service that has just stopped."""
_START_SECONDS: Final = 60.0
_CATALOGUE_SECONDS: Final = 10.0
"""Seconds to wait for the catalogue: an older one is converted when it is opened."""

ActorHandle: TypeAlias = Any  # handles are untyped in ray


@dataclasses.dataclass(frozen=True)
class ServiceInfo:
    """Where a service is, and the files of its tokens."""

    url: str
    token_file: Path
    operate_token_file: Path
    address: str
    cluster: clusters.Kind
    already_running: bool
    home: Path
    """Home of the service; perhaps not the caller's, if the service ran already."""
    passed_over: tuple[str, ...] = ()
    """Clusters of this machine that were not joined, because no address names them."""
    dead_cluster: str = ""
    """Address of this home's earlier cluster, which was ended because its head had died."""
    not_ready: str = ""
    """Why it cannot accept data yet, such as a catalogue that cannot be opened; "": it can."""


def start_service(settings: Settings, *, address: str | None = None) -> ServiceInfo:
    """Start the service if it does not run, and return where it is.

    A failure leaves nothing behind: no actor, no cluster, and service.json as it was.

    Args:
        settings: of the service; one that runs already keeps its own settings.
        address: Ray cluster to join. By default the first of these: RAY_ADDRESS, this home's
            living cluster, the one of `ray start` on this machine, a new one.
            With "local" always a new one. A cluster that a driver's ray.init started ends with
            the driver, and is joined only by its address.

    Raises:
        InvalidInput: the file of triggers or of the keep policy cannot be read, or is invalid.
        Unreachable: no cluster at `address`.
        Conflict: the port is taken, or this home's service runs in another cluster.
        NotReady: the service did not answer in time.
        StoreError: this user may not write the home or the data directory.
    """
    tokens = AccessTokens.load(settings) if settings.auth else None
    check_bind(settings, tokens)
    _check_triggers(settings)
    _check_keep(settings)
    dead_cluster = clusters.end_dead(settings)
    previous = clusters.of_home(settings)
    with (
        service_file.kept_on_failure(settings),
        clusters.chosen(settings, address, before_start=lambda: _check_place(settings)) as cluster,
    ):
        running = _actor(API_NAME) is not None
        if not running:
            _check_no_other(settings, previous, cluster)
            if _actor(COORDINATOR_NAME) is None:
                _check_none_writes(settings)
            if _may_run_here(settings):
                _check_place(settings)
            _write_service_file(settings, cluster, {"url": None, "started": time.time()})
        with _ended_on_failure():
            url, api, not_ready = _start_actors(settings, running)
        home = Path(api["home"])
        if running and is_same(home, settings.home):
            started = service_file.read(settings).get("started") or api["started"]
            fields = {"url": url, "pid": api["pid"], "host": api["host"], "started": started}
            _write_service_file(settings, cluster, fields)
    return ServiceInfo(
        url=url,
        token_file=token_path(home, "read"),
        operate_token_file=token_path(home, "operate"),
        address=cluster.address,
        cluster=cluster.kind,
        already_running=running,
        home=home,
        passed_over=cluster.passed_over,
        dead_cluster=dead_cluster,
        not_ready=not_ready,
    )


def stop_service(settings: Settings, *, address: str | None = None) -> bool:
    """Stop the service, and the cluster if it was started for it; stored data stays.

    Returns whether one was running.

    Raises:
        Conflict: it is another home's, and no `address` was given.
        NotReady: its home is unknown, and neither service.json nor `address` names it.
    """
    given = None if address == clusters.LOCAL else address
    cluster = clusters.to_stop(settings, given)
    was_running = False
    if cluster:
        with contextlib.suppress(Unreachable), clusters.joined(cluster):
            home = _running_home()
            if not given:
                _check_own(settings, cluster, home)
            was_running = _end_actors(_names())
            if home is not None and not is_same(home, settings.home):
                return was_running
    pid = clusters.keeper(settings)
    if pid is not None:
        was_running = embedded.stop(pid, settings.home) or was_running
    service_file.path_of(settings).unlink(missing_ok=True)
    return was_running


def _check_triggers(settings: Settings) -> None:
    """Refuse an invalid file of rules here, where the user sees it, not in the coordinator."""
    if settings.triggers is None:
        return
    from stagescope_service.rules.document import read_yaml

    try:
        rules = read_yaml(settings.triggers.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"the triggers in {settings.triggers} cannot be read: {error}",
            expected="a YAML file of rules",
            advice="see STAGESCOPE_TRIGGERS",
        ) from error
    rules.check_hosts(settings.webhook_hosts)
    rules.check_captures()


def _check_keep(settings: Settings) -> None:
    """Refuse an invalid file of the keep policy."""
    if settings.keep is not None:
        from stagescope_service.core.captures.keep_policy import read_keep_policy

        read_keep_policy(settings.keep)


def is_same(home: Path, other: Path) -> bool:
    """Return whether two homes are the same directory."""
    return home.resolve() == other.resolve()


# --- homes ----------------------------------------------------------------------------------
def _write_service_file(
    settings: Settings, cluster: clusters.Cluster, fields: dict[str, object]
) -> None:
    service_file.change(
        settings,
        {
            **fields,
            "read_token_file": str(token_path(settings.home, "read")),
            "operate_token_file": str(token_path(settings.home, "operate")),
            "cluster_address": cluster.address,
            "cluster": cluster.kind,
            "embedded_pid": clusters.keeper(settings),
        },
    )


def _check_no_other(
    settings: Settings, other: clusters.Cluster | None, cluster: clusters.Cluster
) -> None:
    """Refuse a second service of a home: both would write to the same catalogue."""
    if other is not None and other.address != cluster.address:
        raise Conflict(
            f"the service of {settings.home} is in the Ray cluster at {other.address}",
            expected="one service a home",
            advice="`stagescope stop` ends it; another beside it needs its own STAGESCOPE_HOME",
        )


def _check_none_writes(settings: Settings) -> None:
    """Refuse while a coordinator of this home runs in a cluster whose head is dead."""
    ask = asyncio.wait_for(control_socket.call(settings.home, "status", {}), _SOCKET_SECONDS)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # the caller may have a loop
            status = thread.submit(asyncio.run, ask).result()
    except control_socket.Broken:
        return
    except (StagescopeError, asyncio.TimeoutError):
        status = {}
    pid = status.get("pid")
    raise Conflict(
        f"a coordinator of {settings.home} still runs{f' (pid {pid})' if pid else ''}, in a Ray "
        "cluster whose head does not answer",
        expected="one service a home",
        advice="Ray ends it a minute after its head died; then the same command starts the service",
    )


def _check_place(settings: Settings) -> None:
    """Refuse a data directory or a port that cannot be used, before anything is started.

    Raises:
        StoreError: this user may not write the data directory.
        Conflict, InvalidInput: as `_check_port`.
    """
    path = settings.data_path
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = "" if os.access(path, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        # A full disk refuses no start: the service waits for space.
        problem = "" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror)
    if problem:
        raise StoreError(
            f"the data directory {path} cannot be written: {problem}",
            expected="a directory that this user may write",
            advice="choose another with --data-dir or STAGESCOPE_DATA_DIR",
        )
    _check_port(settings)


def _check_port(settings: Settings) -> None:
    """Refuse a taken port before anything is started.

    Raises:
        Conflict: the port is taken; names the process that holds it, where that is known.
        InvalidInput: the address is not one of this host.
    """
    deadline = time.monotonic() + _PORT_SECONDS
    while settings.port:
        try:
            return bind(settings.host, settings.port).close()
        except Conflict:
            # A service that has just stopped, or was just killed, may still hold it.
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _may_run_here(settings: Settings) -> bool:
    """Return whether the API may run on this machine, with the port that it is to have.

    Raises:
        InvalidInput: it may run nowhere: no node has the resource.
    """
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    resource = settings.service_resource
    chosen = [node for node in nodes if node["Alive"] and resource in node.get("Resources", {})]
    if not chosen:
        raise InvalidInput(
            f"no node of the Ray cluster has the resource {resource}",
            expected="a node that was started with it",
            advice=f"`ray start --resources '{{\"{resource}\": 1}}'` on the nodes that may run the "
            "service; see STAGESCOPE_SERVICE_RESOURCE",
        )
    here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return any(node["NodeManagerAddress"] == here for node in chosen)


def _check_own(settings: Settings, address: str, home: Path | None) -> None:
    """Refuse to stop the service of another home, or of an unknown one."""
    anyway = f"`stagescope stop --address {address}` stops it all the same"
    if home is not None and not is_same(home, settings.home):
        raise Conflict(
            f"the service in the Ray cluster at {address} belongs to the home {home}, not to "
            f"{settings.home}",
            advice=f"`STAGESCOPE_HOME={home} stagescope stop` stops it, and {anyway}",
        )
    is_known = service_file.read(settings).get("cluster_address") == address
    if home is None and not is_known and any(map(_actor, (API_NAME, COORDINATOR_NAME))):
        raise NotReady(f"the service at {address} does not name its home", advice=anyway)


def _running_home() -> Path | None:
    """Return the home of the service of the joined cluster; None where it does not answer."""
    api = _actor(API_NAME)
    if api is None:
        return None
    with contextlib.suppress(exceptions.RayError):
        location: ApiLocation = ray.get(api.where.remote(), timeout=_CALL_SECONDS)
        return Path(location["home"])
    return None


# --- actors ---------------------------------------------------------------------------------
def _actor(name: str) -> ActorHandle | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _start_actors(settings: Settings, running: bool) -> tuple[str, ApiLocation, str]:
    """Create the actors that are missing; return the API's URL and location, and what fails."""
    # Not at the top: a command that stops a service or is refused needs nothing of these.
    from stagescope_service.api_actor import ApiActor
    from stagescope_service.coordinator.actor import DebugCoordinator

    options = json.loads(
        settings.model_dump_json(exclude={"read_token", "operate_token"}, exclude_none=True)
    )
    # Both import for seconds: side by side.
    coordinator = _create_actor(
        settings, COORDINATOR_NAME, DebugCoordinator, options, max_concurrency=CONCURRENCY
    )
    api = _create_actor(settings, API_NAME, ApiActor, options, max_concurrency=16)
    not_ready = _await_catalogue(coordinator)
    advice = "`stagescope stop` ends it" if running else "choose another with --port (0 = any)"
    return (*_await_url(api, advice), not_ready)


def _await_catalogue(coordinator: ActorHandle) -> str:
    """Wait until the coordinator has its catalogue open, or says why not; returns the reason.

    It goes on trying: a database may come back.
    """
    deadline = time.monotonic() + _CATALOGUE_SECONDS
    while True:
        status: dict[str, object] = ray.get(coordinator.status.remote(), timeout=_START_SECONDS)
        reason = str(status.get("not_ready") or "")
        if not reason or "cannot be" in reason or time.monotonic() > deadline:
            return reason
        time.sleep(0.05)


def _create_actor(
    settings: Settings, name: str, kind: type, argument: dict[str, object], *, max_concurrency: int
) -> ActorHandle:
    return (
        ray.remote(kind)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=max_concurrency,
            # Where the catalogue is, the head node by default; not in a caller's placement group.
            resources={settings.service_resource: 0.001},
            scheduling_strategy="DEFAULT",
        )
        .remote(argument)
    )


def _await_url(api: ActorHandle, advice: str) -> tuple[str, ApiLocation]:
    """Wait until the API serves; return its URL and location."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        location: ApiLocation = ray.get(api.where.remote(), timeout=_START_SECONDS)
        if url := location["url"]:
            return url, location
        if "is taken" in location["problem"]:
            raise Conflict(location["problem"], advice=advice)
        if time.monotonic() > deadline:
            raise NotReady(f"the API does not serve: {location['problem']}")
        time.sleep(0.05)


@contextlib.contextmanager
def _ended_on_failure() -> Iterator[None]:
    """End the actors that the block created, and no others, if the block fails."""
    before = {name for name in _names() if _actor(name) is not None}
    try:
        yield
    except BaseException:
        _end_actors([name for name in _names() if name not in before])
        raise


def _names() -> list[str]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    of_node = (name(node["NodeID"]) for node in nodes for name in (ingestor_name, relay_name))
    return [API_NAME, COORDINATOR_NAME, *of_node]


def _end_actors(names: list[str]) -> bool:
    """End actors; return whether the coordinator or the API was among them."""
    was_running = False
    for name in names:
        actor = _actor(name)
        if actor is None:
            continue
        if name in (API_NAME, COORDINATOR_NAME):
            was_running = True
            # Killed even if it does not answer: acknowledged events are on disk.
            with contextlib.suppress(exceptions.RayError):
                ray.get(actor.stop.remote(), timeout=_CALL_SECONDS)
        ray.kill(actor, no_restart=True)
    return was_running
