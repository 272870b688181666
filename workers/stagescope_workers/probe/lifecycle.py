"""The probes of this process: created by `init`, flushed by `finish`, inert after a fork."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from stagescope_wire.discovery import NAMESPACE
from stagescope_wire.errors import NotReady, StagescopeError, Unauthorized
from stagescope_wire.names import normal_run_name
from stagescope_workers.device import DEFAULT_PINNED_BYTES
from stagescope_workers.probe import decorator, driver_end
from stagescope_workers.probe.options import ProbeOptions, checked_options
from stagescope_workers.probe.probe import RESTART_SECONDS, Probe
from stagescope_workers.transport.calls import ServiceLink
from stagescope_workers.transport.link import (
    before_shutdown,
    find_link,
    guard_shutdown,
    ray_process,
    warn_unconnected,
)
from stagescope_workers.transport.outbox import DEFAULT_MAX_BYTES, DEFAULT_MAX_EVENTS

_log = logging.getLogger("stagescope.workers")

_Function = TypeVar("_Function", bound=Callable[..., object])
_EXIT_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 0.5
"""Between two attempts of `finish` to reach a service that was reached before."""

_probes: weakref.WeakSet[Probe] = weakref.WeakSet()
_newest: Probe | None = None
_runs: set[str] = set()
_refused: dict[tuple[str, int | None], str] = {}
"""Role and rank, '' and None if they are no such -> why the last `init` of them was refused."""
_creation_lock = threading.Lock()


def init(
    run: str | None = None,
    *,
    role: str = "actor",
    rank: int | None = None,
    world_size: int | None = None,
    data_rank: int | None = None,
    attempt_key: str | None = None,
    layout: Mapping[str, object] | None = None,
    resumed_from_step: int | None = None,
    settings: Mapping[str, object] | None = None,
    plan: str | Path | Mapping[str, object] | None = None,
    keep: Mapping[str, object] | None = None,
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

    No call is made to Ray before the process has initialised it. Where the Ray cluster has no
    service, or the process joins none, everything is sent over HTTP. As in `stagescope.attach`,
    `STAGESCOPE_URL` or else `$STAGESCOPE_HOME/service.json` names the service. If none answers
    within ten seconds, the process logs once what was tried; `repr(probe)` shows it too.

    If the process has an open probe of this run, role, rank and attempt key, `init` returns it and
    logs that: there are never two. If its next stage belongs to an earlier step than it has reached
    (a rerun notebook cell), a new attempt begins there, unless a stage is open. The attempt
    has the arguments of the last `init`. If the next stage belongs to the same step, it is a
    further pass of that step, and a finding reports it.

    Args:
        run: the experiment's name, any text; else the variable STAGESCOPE_RUN. People see it as it
            is given. If it is not 1 to 100 of `A-Z a-z 0-9 . _ -`, it is stored under another
            name, which is logged once: `qwen3/grpo` as `qwen3-grpo-9bf7109e`.
        role: actor, ref, critic, reward_model or rollout, or a role of your own.
        rank: in the role; the variable RANK, else 0, where not given.
        world_size: number of ranks of the role; the variable WORLD_SIZE where not given.
        data_rank: the same for ranks that hold the same rows (TP, PP, replicas).
        attempt_key: the same for every process of one start of the training; else the variable
            STAGESCOPE_ATTEMPT, else Ray's session and job.
        layout: parallel coordinates (`stagescope_wire.schema.LAYOUT_COLUMNS`); host and device are
            detected where not given.
        resumed_from_step: step of the checkpoint that this start continues.
        settings: settings of the run, stored with its fingerprint: `rollout_is`,
            `rollout_is_threshold`.
        plan: captures that are active at once, without any service: see `plan.read_plan`.
        keep: what the service keeps of this process's stages, such as `{"every_n_steps": 10,
            "what": ["trajectories", "is_loss", "loss"]}`: `stagescope_wire.keep.KEEP_FIELDS`.
        captures: False where other processes run and report the operators of this process's stages,
            and capture them there. A text where they cannot be captured: it is then the reason for
            which captures are reported as skipped.
        expects: roles whose ranks report beside this process, as a trainer's driver knows. If none
            of them ever does, a finding reports it, and no step counts as complete.
        data_root: the directory of dumps whose capture names none; else the variable
            STAGESCOPE_DATA_DIR.
        strict: raise on bad input, instead of reporting it. An open probe uses its last `init`'s.
        url, token: the API's URL and access token, used instead of Ray. The default token is from
            STAGESCOPE_TOKEN, STAGESCOPE_TOKEN_FILE or, for its own URL only, service.json.
        max_pending_bytes: payload bytes that may wait for their receipt.
        max_pending_events: events that may wait; see `outbox` for what is dropped beyond that.
        max_pinned_bytes: pinned host memory for tensors that are copied from a device.
        device_events: measure stages with device events too.
        watchdog: seconds after which a blocked process (a call holds the interpreter lock) writes
            its stacks; 0 switches it off; else the variable STAGESCOPE_WATCHDOG, else 300. It uses
            the process's one `faulthandler.dump_traceback_later`: see `watchdog`.
        namespace: the coordinator's namespace, in Ray.

    Raises:
        InvalidInput, InvalidPlan: only when strict.
    """
    global _newest
    arguments = {**locals()}
    # Compared by exact type, since another object may raise at any access.
    named = (role if type(role) is str else "", rank if type(rank) is int else None)
    try:
        options = checked_options(arguments)
        with _creation_lock:
            found = _open_probe(options)
            probe = found or Probe(options)
            probe.start() if found is None else probe.init_again(options)
            _probes.add(probe)
    except Exception as error:
        if strict:
            raise
        expected = isinstance(error, StagescopeError)
        _log.warning("init was refused, nothing is reported: %s", error, exc_info=not expected)
        probe, _refused[named] = Probe.inert(), str(error)
    else:
        _runs.add(probe.run)
        _refused.pop(named, None)
    _newest = probe
    return probe


def _open_probe(options: ProbeOptions) -> Probe | None:
    """Return this process's open probe of the same rank, start and service; None without one."""
    names = ("run", "role", "rank", "attempt_key", "url", "namespace")
    for probe in list(_probes):
        same = all(getattr(probe.options, name) == getattr(options, name) for name in names)
        if same and not probe.is_inert:
            return probe
    return None


def current() -> Probe | None:
    """Return the probe that `init` returned last in this process."""
    return _newest


def as_stage(
    name: str, *, model: object = None, step: int | None = None
) -> Callable[[_Function], _Function]:
    """Decorate a function as a stage of the process's newest probe at the time of each call.

    For functions that are defined before `init` runs; see `decorator.as_stage`.
    """
    return decorator.as_stage(name, model=model, step=step, probe=current)


def finish(timeout: float = 30.0, *, run: str | None = None, namespace: str = NAMESPACE) -> bool:
    """Wait, `timeout` seconds at most, until the service has received everything of the run.

    Call it where training ends. It closes the probes of this process, and waits for the receipts of
    every other process of the run. A Ray job's actors end with its driver, and Ray runs no atexit
    in them. So on the driver, and in a process of the job whose role is `driver`, it requests each
    actor to send its data and to finish. Any later event of a process revokes that. If it is called
    while an exception is handled (in `finally` or `except`), it reports that exception as the
    end of the process.

    Args:
        timeout: seconds.
        run: which run; else those of this process's probes, else all.
        namespace: the coordinator's namespace, in Ray.

    Returns:
        Whether the service has everything. False if no service was reached, it refuses the access
        token (at once) or does not know the run. False if `init` was refused here, or if a rank
        never reported or did not answer. False also if events or payloads of any rank were dropped,
        refused or lost. Never raises.
    """
    if _refused:
        why = "; ".join(_refused.values())
        _log.warning("finish: init was refused here, nothing was reported: %.300s", why)
    started = time.monotonic()
    deadline = started + timeout
    probes = list(_probes)
    with_url = [probe.options for probe in probes if probe.options.url and not probe.is_inert]
    url, token = (with_url[0].url, with_url[0].token) if with_url else (None, None)
    key = _job_attempt_key()
    # A probe of this process reports the exception itself.
    crash = driver_end.handled() if key is not None and not probes else None
    complete = _close_all(deadline)
    reached = any(probe.status()["coordinator"] for probe in probes)
    while True:
        try:
            drained = _drain_all(url, token, namespace, run, key, deadline, crash)
            break
        except Unauthorized as error:
            _log.warning(
                "finish: the service refuses the access token, and did not receive what is left "
                "of the run: %s",
                error,
            )
            return False
        except Exception as error:
            # A service that was reached before, or that answers `not ready`, may come back; so may
            # one that was being restarted during the short life of this process.
            until = deadline
            if not (reached or isinstance(error, NotReady)):
                expected = [probe.answer_expected_until for probe in probes]
                until = min(deadline, max(expected, default=started + RESTART_SECONDS))
            if time.monotonic() > until - _RETRY_SECONDS:
                _log.warning("finish could not wait for the service: %r", error)
                return False
            time.sleep(_RETRY_SECONDS)
    if drained is None:
        warn_unconnected("finish", url, namespace)
        return complete and any(probe.has_arrived for probe in probes)
    # The other processes of a driver whose own init was refused have sent theirs meanwhile.
    return complete and drained and not _refused


def _drain_all(
    url: str | None,
    token: str | None,
    namespace: str,
    run: str | None,
    key: str | None,
    deadline: float,
    crash: BaseException | None,
) -> bool | None:
    """Wait for the receipts of a run, or of this process's runs; None without a service."""
    link = find_link(url, token, namespace)
    if link is None:
        return None
    named = None if run is None else normal_run_name(run)
    runs: list[str | None] = [named] if named is not None else [*sorted(_runs)] or [None]
    with contextlib.closing(link):
        drained = [
            _drain(link, name, max(0.1, deadline - time.monotonic()), key, crash) for name in runs
        ]
    return all(drained)


def _job_attempt_key() -> str | None:
    """Return the attempt key of the Ray job that this process drives; None elsewhere.

    A trainer may drive a job from an actor of it, as verl's does: its role is `driver`.
    """
    process = None
    with contextlib.suppress(Exception):
        process = ray_process()
    drives = any(probe.role == "driver" for probe in _probes if not probe.is_inert)
    if process is None or not (process.is_driver or drives):
        return None
    keys = [probe.options.attempt_key for probe in _probes]
    return next(filter(None, [*keys, os.environ.get("STAGESCOPE_ATTEMPT")]), process.attempt_key)


def _drain(
    link: ServiceLink,
    run: str | None,
    timeout: float,
    key: str | None,
    crash: BaseException | None,
) -> bool:
    if crash is None:
        answer = link.drain(run, timeout, key)
    else:
        answer = link.drain(run, timeout, key, ended_by=driver_end.fields_of(crash))
    name = "any run" if run is None else f"run {run}"
    if not answer.get("known", True):
        hint = "" if key is None else (
            f", with the attempt key {key} of this Ray job; where ranks have another one, "
            "name the run: finish(run=...)"
        )  # fmt: skip
        _log.warning(
            "finish: the service at %s has received nothing of %s%s", link.address, name, hint
        )
        return False
    if missing := answer.get("missing"):
        _log.warning(
            "finish: %s never reached the service, or did not answer within %.0f s: anything that "
            "they had not sent is lost",
            ", ".join(missing),
            timeout,
        )
    if lost := answer.get("lost"):
        _log.warning(
            "finish: the service will never have everything of %s (%s)%s",
            name,
            ", ".join(map(str, lost)),
            "" if run is None else f": `stagescope lost --run {run}` says why",
        )
    return bool(answer.get("drained", True)) and not lost


def _close_all(deadline: float) -> bool:
    complete = True
    for probe in list(_probes):
        if not probe.is_inert:
            complete = probe.close(deadline - time.monotonic()) and complete
        _probes.discard(probe)
    return complete


def _close_at_exit() -> None:
    crash = _unhandled_exception()
    for probe in list(_probes):
        probe.close(_EXIT_SECONDS, crash=crash)  # at once where there is no service
    driver_end.report(crash)


def watch_driver() -> None:
    """Let this process report what ends it, if it is the driver of a Ray job; call it again freely.

    Ray leaves the cluster in its own `atexit`: ours comes before it if it was registered later.
    """
    guard_shutdown()
    if driver_end.report_handled not in before_shutdown:
        before_shutdown.append(driver_end.report_handled)
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit)


watch_driver()


def _unhandled_exception() -> BaseException | None:
    """Return the exception that ends this process, None where none does."""
    # An interactive interpreter continues after an exception, and keeps it in the same variable.
    if hasattr(sys, "ps1") or sys.flags.interactive or "IPython" in sys.modules:
        return None
    found = getattr(sys, "last_value", None)
    return found if isinstance(found, BaseException) else None


def _forget_probes() -> None:
    global _creation_lock
    _creation_lock = threading.Lock()
    for probe in list(_probes):
        probe.forget()
    _probes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_probes)
