"""Reports the exception that ends the driver of a Ray job.

Ray ends the actors of a job with its driver. It runs no `atexit` in them and does not say what
ended the driver. So only the driver can report it, and only while it is in the cluster: before
`ray.shutdown`, or at the end of the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from typing import Final

from stagescope_wire.discovery import NAMESPACE
from stagescope_workers.probe.stage import error_fields
from stagescope_workers.transport import link

_log = logging.getLogger("stagescope.workers")

_LEAVE_SECONDS: Final = 0.5
"""How long a driver that ends waits until its ranks have sent what they still have."""
_CONNECT_SECONDS: Final = 0.5

_reported: set[str] = set()
"""Attempt keys of jobs whose end was reported."""


def handled() -> BaseException | None:
    """Return the exception that the caller handles, if it may be what ends a training."""
    error = sys.exc_info()[1]
    if isinstance(error, (StopIteration, StopAsyncIteration)):
        return None
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return None  # a script that is done may call sys.exit()
    return error if isinstance(error, (Exception, KeyboardInterrupt, SystemExit)) else None


def fields_of(error: BaseException) -> dict[str, object]:
    """Return the fields of a driver's end; Ray's handler of SIGTERM calls `sys.exit(SIGTERM)`."""
    if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
        return {"error_type": "SIGTERM", "error_message": "", "interrupted": True}
    return error_fields(error)


def report_handled() -> None:
    """Report the exception that the caller handles; call it before this process leaves Ray."""
    report(handled())


def report(error: BaseException | None) -> None:
    """Report that `error` ends this driver, once for each job; never raises.

    It waits half a second for the ranks, and no more than two for a service that is silent. Without
    a job or an exception it returns at once.
    """
    try:
        process = None if error is None else link.ray_process()
        if error is None or process is None or not process.is_driver:
            return
        key = os.environ.get("STAGESCOPE_ATTEMPT") or process.attempt_key
        if key in _reported:
            return
        _reported.add(key)
        _check_head()
        service = link.find_link(None, None, NAMESPACE)
        if service is not None:
            with contextlib.closing(service):
                service.drain(None, _LEAVE_SECONDS, key, ended_by=fields_of(error))
    except (Exception, KeyboardInterrupt) as problem:  # the training ends: nothing may delay it
        _log.debug("the end of the driver was not reported: %r", problem)


def _check_head() -> None:
    """Raise OSError if the head of the cluster is gone: Ray would wait for it for a minute."""
    ray = sys.modules["ray"]
    host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
