"""Puts the service on a Ray cluster: the coordinator and the API as detached actors.

The only place that knows every piece. `start_service` may be called again at any time: what runs
is found by name and left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import ray
from ray import exceptions

from stagescope.errors import Conflict, NotReady, Unreachable
from stagescope_service import embedded, service_file
from stagescope_service.api.auth import Tokens, check_bind, token_path
from stagescope_service.api_actor import ApiServer
from stagescope_service.engine.coordinator import NAME, NAMESPACE, DebugCoordinator
from stagescope_service.engine.ingestor import ingestor_name
from stagescope_service.settings import Settings

API_NAME: Final = "ApiServer"
CONCURRENCY: Final = 20_000
"""Pending polls count: one a process, so well above the number of ranks."""
LOCAL: Final = "local"
"""As an address: a cluster of the service's own, whatever else runs on the machine."""
_CALL_SECONDS: Final = 15.0
_START_SECONDS: Final = 60.0


@dataclasses.dataclass(frozen=True)
class ServiceInfo:
    """Where a service is and how to ask it."""

    url: str
    token_file: Path
    operate_token_file: Path
    address: str
    cluster: Literal["joined", "running", "embedded"]
    already_running: bool


def start_service(settings: Settings, *, address: str | None = None) -> ServiceInfo:
    """Start the service where it does not run, and say where it is.

    Args:
        settings: of the service; of one that runs already, its own settings stand.
        address: Ray cluster to join; default RAY_ADDRESS, else the one that was started for this
            home, else the one that runs on this machine, else one of its own. "local": one of its
            own in any case.

    Raises:
        Unreachable: no cluster at `address`.
        Conflict: the port is taken.
        NotReady: the service did not begin to answer in time.
    """
    tokens = Tokens.load(settings) if settings.auth else None
    check_bind(settings, tokens)
    cluster, joined = _find_cluster(settings, address)
    with _joined(joined):
        running = _actor(API_NAME) is not None
        options = json.loads(
            settings.model_dump_json(exclude={"read_token", "operate_token"}, exclude_none=True)
        )
        known = service_file.read(settings)
        service_file.change(
            settings,
            {
                **({} if running else {"url": None}),
                "read_token_file": str(token_path(settings.home, "read")),
                "operate_token_file": str(token_path(settings.home, "operate")),
                "cluster_address": joined,
                "cluster": cluster,
                "embedded_pid": known.get("embedded_pid") if cluster == "embedded" else None,
                "started": known.get("started") if running else time.time(),
            },
        )
        coordinator = _make(NAME, DebugCoordinator, options, max_concurrency=CONCURRENCY)
        ray.get(coordinator.status.remote(), timeout=_START_SECONDS)
        api = _make(API_NAME, ApiServer, options, max_concurrency=16)
        where = _await_url(api)
    home = Path(where["home"])
    return ServiceInfo(
        url=where["url"],
        token_file=token_path(home, "read"),
        operate_token_file=token_path(home, "operate"),
        address=joined,
        cluster=cluster,
        already_running=running,
    )


def stop_service(settings: Settings, *, address: str | None = None) -> bool:
    """Stop the service, and the cluster if it was started for it; what is stored stays.

    Returns whether one was running.
    """
    known = service_file.read(settings)
    given = None if address == LOCAL else address
    joined = given or known.get("cluster_address") or os.environ.get("RAY_ADDRESS")
    found = False
    if joined:
        with contextlib.suppress(Unreachable), _joined(joined):
            found = _stop_actors()
    pid = known.get("embedded_pid")
    if isinstance(pid, int):
        found = embedded.stop(pid, settings.home) or found
    service_file.path_of(settings).unlink(missing_ok=True)
    return found


# --- clusters -------------------------------------------------------------------------------
def _find_cluster(
    settings: Settings, address: str | None
) -> tuple[Literal["joined", "running", "embedded"], str]:
    if address and address != LOCAL:
        return "joined", address
    if not address and os.environ.get("RAY_ADDRESS"):
        return "joined", os.environ["RAY_ADDRESS"]
    known = service_file.read(settings)
    pid = known.get("embedded_pid")
    if isinstance(pid, int) and embedded.is_ours(pid, settings.home):
        return "embedded", str(known["cluster_address"])
    running = None if address == LOCAL else _running_address()
    if running is not None:
        return "running", running
    pid, started = embedded.start(settings.home)
    service_file.change(settings, {"embedded_pid": pid, "cluster_address": started})
    return "embedded", started


def _running_address() -> str | None:
    """Return the address of the cluster that `ray start` left on this machine, if it lives."""
    addresses: set[str] = ray._private.services.find_gcs_addresses()  # type: ignore[no-untyped-call]
    return sorted(addresses)[0] if addresses else None


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    """Be a driver of a cluster for a moment; a process that is one already stays one."""
    if ray.is_initialized():
        yield
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
        yield
    finally:
        ray.shutdown()


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


# --- actors ---------------------------------------------------------------------------------
def _actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


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
            resources={"node:__internal_head__": 0.001},
            scheduling_strategy="DEFAULT",
        )
        .remote(settings)
    )


def _await_url(api: Any) -> dict[str, Any]:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        where: dict[str, Any] = ray.get(api.where.remote(), timeout=_START_SECONDS)
        if where["url"]:
            return where
        if "is taken" in where["problem"]:
            ray.kill(api)
            raise Conflict(where["problem"], advice="choose another with --port (0 = any free one)")
        if time.monotonic() > deadline:
            raise NotReady(f"the API does not serve: {where['problem']}")
        time.sleep(0.05)


def _stop_actors() -> bool:
    found = False
    names = [API_NAME, NAME]
    names += [ingestor_name(node["NodeID"]) for node in ray.nodes()]  # type: ignore[no-untyped-call]
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
