"""Puts the service on a Ray cluster: the coordinator and the API as detached actors.

The only place that knows every piece. `start_service` may be called again at any time: what runs
is found by name and left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ray
from ray import exceptions

from stagescope.wire.errors import Conflict, InvalidInput, NotReady, Unreachable
from stagescope_service import clusters, embedded, service_file
from stagescope_service.api.auth import Tokens, check_bind, token_path
from stagescope_service.api.server import bind
from stagescope_service.api_actor import ApiServer
from stagescope_service.coordinator.actor import NAME, NAMESPACE, DebugCoordinator
from stagescope_service.core.captures.keep_policy import read_keep_policy
from stagescope_service.ingest.actor import ingestor_name
from stagescope_service.settings import Settings
from stagescope_service.triggers.rules import read_yaml

API_NAME: Final = "ApiServer"
CONCURRENCY: Final = 20_000
"""Pending polls count: one a process, so well above the number of ranks."""
_HEAD: Final = "node:__internal_head__"
_CALL_SECONDS: Final = 15.0
_LEAVING_SECONDS: Final = 2.0
_START_SECONDS: Final = 60.0


@dataclasses.dataclass(frozen=True)
class ServiceInfo:
    """Where a service is and how to ask it."""

    url: str
    token_file: Path
    operate_token_file: Path
    address: str
    cluster: clusters.Kind
    already_running: bool
    home: Path
    """The service's: where it ran already, perhaps not the caller's."""
    passed_over: tuple[str, ...] = ()
    """Clusters of this machine that were not joined unasked, where one was started instead."""


def start_service(settings: Settings, *, address: str | None = None) -> ServiceInfo:
    """Start the service where it does not run, and say where it is.

    What fails leaves nothing behind: no actor, no cluster, and service.json as it was.

    Args:
        settings: of the service; of one that runs already, its own settings stand.
        address: Ray cluster to join; default RAY_ADDRESS, else the one of this home's service
            where it lives, else the one that `ray start` left on this machine, else one of its
            own. "local": one of its own in any case. A cluster that a driver's ray.init made for
            itself ends with it, and is joined only by its address.

    Raises:
        InvalidInput: the file of triggers, or of what is kept, cannot be read, or a rule in it.
        Unreachable: no cluster at `address`.
        Conflict: the port is taken, or this home's service runs in another cluster.
        NotReady: the service did not begin to answer in time.
    """
    tokens = Tokens.load(settings) if settings.auth else None
    check_bind(settings, tokens)
    _check_triggers(settings)
    if settings.keep is not None:
        read_keep_policy(settings.keep)
    before = clusters.of_home(settings)
    with (
        service_file.kept_on_failure(settings),
        clusters.chosen(
            settings, address, before_start=lambda: _refuse_taken_port(settings)
        ) as cluster,
    ):
        running = _actor(API_NAME) is not None
        if not running:
            _refuse_second(settings, before, cluster)
            if _is_head_here():
                _refuse_taken_port(settings)
            _write_down(settings, cluster, {"url": None, "started": time.time()})
        with _ended_on_failure():
            where = _start_actors(settings, running)
        home = Path(where["home"])
        if running and is_same(home, settings.home):
            known = service_file.read(settings)
            started = known.get("started") or where["started"]
            said = {name: where[name] for name in ("url", "pid", "host")} | {"started": started}
            _write_down(settings, cluster, said)
    return ServiceInfo(
        url=where["url"],
        token_file=token_path(home, "read"),
        operate_token_file=token_path(home, "operate"),
        address=cluster.address,
        cluster=cluster.kind,
        already_running=running,
        home=home,
        passed_over=cluster.passed_over,
    )


def stop_service(settings: Settings, *, address: str | None = None) -> bool:
    """Stop the service, and the cluster if it was started for it; what is stored stays.

    Returns whether one was running.

    Raises:
        Conflict: it is another home's, and no `address` was given.
        NotReady: it does not say whose it is, and neither service.json nor `address` names it.
    """
    given = None if address == clusters.LOCAL else address
    joined = clusters.to_stop(settings, given)
    found = False
    if joined:
        with contextlib.suppress(Unreachable), clusters.joined(joined):
            home = _home_of_running()
            if not given:
                _refuse_foreign(settings, joined, home)
            found = _end(_names())
            if home is not None and not is_same(home, settings.home):
                return found
    pid = clusters.keeper(settings)
    if pid is not None:
        found = embedded.stop(pid, settings.home) or found
    service_file.path_of(settings).unlink(missing_ok=True)
    return found


def _check_triggers(settings: Settings) -> None:
    """Refuse a file of rules now, where somebody reads it, rather than in the coordinator."""
    if settings.triggers is None:
        return
    try:
        read_yaml(settings.triggers.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"the triggers in {settings.triggers} cannot be read: {error}",
            expected="a YAML file of rules",
            advice="see STAGESCOPE_TRIGGERS",
        ) from error


def is_same(home: Path, other: Path) -> bool:
    """Return whether two homes are one directory."""
    return home.resolve() == other.resolve()


# --- homes ----------------------------------------------------------------------------------
def _write_down(settings: Settings, cluster: clusters.Cluster, fields: dict[str, Any]) -> None:
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


def _refuse_second(
    settings: Settings, other: clusters.Cluster | None, cluster: clusters.Cluster
) -> None:
    """Refuse a second service for a home: both would write to one catalogue."""
    if other is not None and other.address != cluster.address:
        raise Conflict(
            f"the service of {settings.home} is in the Ray cluster at {other.address}",
            expected="one service a home",
            advice="`stagescope stop` ends it; another beside it needs its own STAGESCOPE_HOME",
        )


def _refuse_taken_port(settings: Settings) -> None:
    """Refuse a port that somebody holds before anything is started for it.

    Raises:
        Conflict: the port is taken; who holds it is named where that can be known.
        InvalidInput: the address is not one of this host.
    """
    deadline = time.monotonic() + _LEAVING_SECONDS
    while settings.port:
        try:
            return bind(settings.host, settings.port).close()
        except Conflict as error:
            # A service that was stopped a moment ago may hold it still.
            if API_NAME not in error.wrong or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _is_head_here() -> bool:
    """Return whether the API, which runs on the cluster's head node, runs on this machine."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    head = [node for node in nodes if _HEAD in node.get("Resources", {}) and node["Alive"]]
    here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return any(node["NodeManagerAddress"] == here for node in head)


def _refuse_foreign(settings: Settings, address: str, home: Path | None) -> None:
    anyway = f"`stagescope stop --address {address}` stops it all the same"
    if home is not None and not is_same(home, settings.home):
        raise Conflict(
            f"the service in the Ray cluster at {address} is that of the home {home}, not of "
            f"{settings.home}",
            advice=f"`STAGESCOPE_HOME={home} stagescope stop` stops it, and {anyway}",
        )
    is_known = service_file.read(settings).get("cluster_address") == address
    if home is None and not is_known and any(map(_actor, (API_NAME, NAME))):
        raise NotReady(f"the service at {address} does not say whose it is", advice=anyway)


def _home_of_running() -> Path | None:
    api = _actor(API_NAME)
    if api is None:
        return None
    with contextlib.suppress(exceptions.RayError):
        where: dict[str, Any] = ray.get(api.where.remote(), timeout=_CALL_SECONDS)
        return Path(where["home"])
    return None


# --- actors ---------------------------------------------------------------------------------
def _actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _start_actors(settings: Settings, running: bool) -> dict[str, Any]:
    """Make the actors that are missing; return where the API is."""
    options = json.loads(
        settings.model_dump_json(exclude={"read_token", "operate_token"}, exclude_none=True)
    )
    coordinator = _make(NAME, DebugCoordinator, options, max_concurrency=CONCURRENCY)
    ray.get(coordinator.status.remote(), timeout=_START_SECONDS)
    api = _make(API_NAME, ApiServer, options, max_concurrency=16)
    advice = "`stagescope stop` ends it" if running else "choose another with --port (0 = any)"
    return _await_url(api, advice)


def _make(name: str, kind: type, settings: dict[str, Any], *, max_concurrency: int) -> Any:
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
            # The catalogue's file is there; and not inside a caller's placement group.
            resources={_HEAD: 0.001},
            scheduling_strategy="DEFAULT",
        )
        .remote(settings)
    )


def _await_url(api: Any, advice: str) -> dict[str, Any]:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        where: dict[str, Any] = ray.get(api.where.remote(), timeout=_START_SECONDS)
        if where["url"]:
            return where
        if "is taken" in where["problem"]:
            raise Conflict(where["problem"], advice=advice)
        if time.monotonic() > deadline:
            raise NotReady(f"the API does not serve: {where['problem']}")
        time.sleep(0.05)


@contextlib.contextmanager
def _ended_on_failure() -> Iterator[None]:
    """End the actors that were made meanwhile, and none that was there before."""
    before = {name for name in _names() if _actor(name) is not None}
    try:
        yield
    except BaseException:
        _end([name for name in _names() if name not in before])
        raise


def _names() -> list[str]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [API_NAME, NAME, *(ingestor_name(node["NodeID"]) for node in nodes)]


def _end(names: list[str]) -> bool:
    found = False
    for name in names:
        actor = _actor(name)
        if actor is None:
            continue
        found = found or name in (API_NAME, NAME)
        if name in (API_NAME, NAME):
            # Killed all the same where it does not answer: what is acknowledged is on disk.
            with contextlib.suppress(exceptions.RayError):
                ray.get(actor.stop.remote(), timeout=_CALL_SECONDS)
        ray.kill(actor, no_restart=True)
    return found
