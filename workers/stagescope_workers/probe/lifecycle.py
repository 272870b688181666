"""The probes of this process: made by `init`, flushed by `finish`, silent after a fork."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from stagescope.wire.errors import NotReady, StagescopeError
from stagescope_workers.device import DEFAULT_PINNED_BYTES
from stagescope_workers.probe import decorator
from stagescope_workers.probe.options import ProbeOptions, checked_options
from stagescope_workers.probe.probe import Probe
from stagescope_workers.transport.link import (
    NAMESPACE,
    Link,
    find_link,
    ray_place,
    warn_unconnected,
)
from stagescope_workers.transport.outbox import DEFAULT_MAX_BYTES, DEFAULT_MAX_EVENTS

_log = logging.getLogger("stagescope.workers")

_Function = TypeVar("_Function", bound=Callable[..., Any])
_EXIT_SECONDS: Final = 2.0
_BETWEEN_SECONDS: Final = 0.5
"""Between two attempts of `finish` to reach a service that was reached before."""

_probes: weakref.WeakSet[Probe] = weakref.WeakSet()
_newest: Probe | None = None
_runs: set[str] = set()
_making = threading.Lock()


def init(
    run: str,
    *,
    role: str = "actor",
    rank: int | None = None,
    world_size: int | None = None,
    data_rank: int | None = None,
    attempt_key: str | None = None,
    layout: Mapping[str, Any] | None = None,
    resumed_from_step: int | None = None,
    settings: Mapping[str, Any] | None = None,
    plan: str | Path | Mapping[str, Any] | None = None,
    keep: Mapping[str, Any] | None = None,
    captures: bool | str = True,
    expects: Sequence[str] = (),
    data_root: str | None = None,
    strict: bool = False,
    url: str | None = None,
    token: str | None = None,
    max_pending_bytes: int = DEFAULT_MAX_BYTES,
    max_pending_events: int = DEFAULT_MAX_EVENTS,
    max_pinned_bytes: int = DEFAULT_PINNED_BYTES,
    device_events: bool = False,
    watchdog: float | None = None,
    namespace: str = NAMESPACE,
) -> Probe:
    """Return this process's probe at once, whether or not a service runs.

    Nothing is asked of Ray before the process has initialised it. Where its Ray cluster has no
    service, or it joins none, everything goes over HTTP to the service that `STAGESCOPE_URL`, else
    `$STAGESCOPE_HOME/service.json` names, as `stagescope.attach` finds it. Where none answers
    within ten seconds, one line a process says what was looked for; `repr(probe)` says it too.

    Where the process has an open probe of this run, role, rank and attempt key, that one is
    returned and goes on, and one line says so: there are never two. If the next stage is of an
    earlier step than it has reached (a notebook's cell that is run again), a new attempt begins
    there, with what `init` was told last, unless a stage is open. Of the same step it is a further
    pass of it, and a finding says so.

    Args:
        run: the experiment's name, 1 to 100 of `A-Z a-z 0-9 . _ -`.
        role: actor, ref, critic, reward_model or rollout, or a role of your own.
        rank: in the role; the variable RANK, else 0, where not given.
        world_size: ranks of the role; the variable WORLD_SIZE where not given.
        data_rank: the same for ranks that hold the same rows (TP, PP, replicas).
        attempt_key: the same for every process of one start of the training; else the variable
            STAGESCOPE_ATTEMPT, else Ray's session and job.
        layout: parallel coordinates (`stagescope.wire.schema.LAYOUT_COLUMNS`); host and device are
            found where not given.
        resumed_from_step: of the checkpoint that this start continues.
        settings: of the run, kept with its fingerprint: `rollout_is`, `rollout_is_threshold`.
        plan: captures in force from now on, without any service: see `plan.read_plan`.
        keep: what the service keeps of this process's stages, such as `{"every_n_steps": 10,
            "what": ["trajectories", "is_loss", "loss"]}`: `stagescope.wire.keep.KEEP_FIELDS`.
        captures: False where the operators of this process's stages run in processes that report
            them too, and are captured there; a text where they run out of reach: captures are
            then reported as skipped, with the text as the reason.
        expects: roles whose ranks report beside this process, as a trainer's driver knows: where
            none of them ever does, a finding says so, and no step is called complete.
        data_root: where dumps go that name no directory; else the variable STAGESCOPE_DATA_DIR.
        strict: raise on bad input, instead of reporting it.
        url, token: of the API, to use it instead of Ray; the token else from STAGESCOPE_TOKEN,
            STAGESCOPE_TOKEN_FILE or, for its own URL alone, service.json.
        max_pending_bytes: payload bytes that may wait for their receipt.
        max_pending_events: events that may wait; see `outbox` for what goes when it is full.
        max_pinned_bytes: pinned host memory for tensors on their way from a device.
        device_events: measure stages with device events too.
        watchdog: seconds after which a process that stands still (a call holds the interpreter
            lock) writes its stacks; 0 is off; else the variable STAGESCOPE_WATCHDOG, else 300. It
            uses the process's one `faulthandler.dump_traceback_later`: see `watchdog`.
        namespace: of the coordinator, in Ray.

    Raises:
        InvalidInput, InvalidPlan: only when strict.
    """
    global _newest
    given = {**locals()}
    try:
        options = checked_options(given)
        with _making:
            found = _open_probe(options)
            probe = found or Probe(options)
            probe.start() if found is None else probe.init_again(options)
            _probes.add(probe)
    except Exception as error:
        if strict:
            raise
        known = isinstance(error, StagescopeError)
        _log.warning("init was refused, nothing is reported: %s", error, exc_info=not known)
        probe = Probe.inert()
    else:
        _runs.add(probe.run)
    _newest = probe
    return probe


def _open_probe(options: ProbeOptions) -> Probe | None:
    """Return this process's open probe of the same rank of the same start, at the same service."""
    names = ("run", "role", "rank", "attempt_key", "url", "namespace")
    for probe in list(_probes):
        same = all(getattr(probe.options, name) == getattr(options, name) for name in names)
        if same and not probe.is_inert:
            return probe
    return None


def current() -> Probe | None:
    """Return the probe that `init` made last in this process."""
    return _newest


def as_stage(
    name: str, *, model: object = None, step: int | None = None
) -> Callable[[_Function], _Function]:
    """Decorate a function as a stage of the process's newest probe, found when it is called.

    For functions that are defined before `init` runs; see `decorator.as_stage`.
    """
    return decorator.as_stage(name, model=model, step=step, probe=current)


def finish(timeout: float = 30.0, *, run: str | None = None, namespace: str = NAMESPACE) -> bool:
    """Wait, `timeout` seconds at most, until all that the run reported was received.

    Called where training ends. Closes the probes of this process, and waits for the receipts of
    every other process of the run. On the driver of a Ray job, whose actors end with it (Ray runs
    no atexit in them), it has each of them send what it has and take leave; one that goes on
    afterwards takes that back.

    Args:
        timeout: seconds.
        run: which run; else those of this process's probes, else all.
        namespace: of the coordinator, in Ray.

    Returns:
        Whether everything was received: False where no service was reached, nothing of the run
        ever came to it, or a rank never came or did not answer. Never raises.
    """
    deadline = time.monotonic() + timeout
    probes = list(_probes)
    named = [probe.options for probe in probes if probe.options.url and not probe.is_inert]
    url, token = (named[0].url, named[0].token) if named else (None, None)
    key = _key_of_job()
    complete = _close_all(deadline)
    reached = any(probe.status()["coordinator"] for probe in probes)
    while True:
        try:
            drained = _drain_all(url, token, namespace, run, key, deadline)
            break
        except Exception as error:
            # What was reached before, or says so itself, may be about to be back.
            may_return = reached or isinstance(error, NotReady)
            if not may_return or time.monotonic() > deadline - _BETWEEN_SECONDS:
                _log.warning("finish could not wait for the service: %r", error)
                return False
            time.sleep(_BETWEEN_SECONDS)
    if drained is None:
        warn_unconnected("finish", url, namespace)
        return complete and any(probe.has_arrived for probe in probes)
    return complete and drained


def _drain_all(
    url: str | None,
    token: str | None,
    namespace: str,
    run: str | None,
    key: str | None,
    deadline: float,
) -> bool | None:
    """Wait for the receipts of a run, or of this process's runs; None where no service is."""
    link = find_link(url, token, namespace)
    if link is None:
        return None
    runs: list[str | None] = [run] if run is not None else [*sorted(_runs)] or [None]
    with contextlib.closing(link):
        drained = [_drain(link, name, max(0.1, deadline - time.monotonic()), key) for name in runs]
    return all(drained)


def _key_of_job() -> str | None:
    """Return the attempt key of the job that this process is the driver of; None elsewhere."""
    place = None
    with contextlib.suppress(Exception):
        place = ray_place()
    if place is None or not place.is_driver:
        return None
    given = [probe.options.attempt_key for probe in _probes]
    return next(filter(None, [*given, os.environ.get("STAGESCOPE_ATTEMPT")]), place.attempt_key)


def _drain(link: Link, run: str | None, timeout: float, key: str | None) -> bool:
    answer = link.drain(run, timeout, key)
    name = "any run" if run is None else f"run {run}"
    if not answer.get("known", True):
        of = "" if key is None else (
            f", with the attempt key {key} of this Ray job; where ranks have another one, "
            "name the run: finish(run=...)"
        )  # fmt: skip
        _log.warning(
            "finish: nothing of %s has come to the service at %s%s", name, link.address, of
        )
        return False
    if missing := answer.get("missing"):
        _log.warning(
            "finish: %s never came to the service, or did not answer within %.0f s: what they "
            "had not sent is lost",
            ", ".join(missing),
            timeout,
        )
    return bool(answer.get("drained", True))


def _close_all(deadline: float) -> bool:
    complete = True
    for probe in list(_probes):
        if not probe.is_inert:
            complete = probe.close(deadline - time.monotonic()) and complete
        _probes.discard(probe)
    return complete


@atexit.register
def _close_at_exit() -> None:
    for probe in list(_probes):
        probe.close(_EXIT_SECONDS)  # at once where there is no service


def _silence() -> None:
    global _making
    _making = threading.Lock()
    for probe in list(_probes):
        probe.forget()
    _probes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_silence)
