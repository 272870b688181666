"""Finds the service and describes this process to it; runs in the background thread."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from stagescope_wire.links import page_of_run
from stagescope_wire.schema import HELLO, Sender
from stagescope_workers.probe import identity
from stagescope_workers.probe.draft import plain
from stagescope_workers.probe.identity import script_of
from stagescope_workers.probe.options import ProbeOptions
from stagescope_workers.probe.watchdog import StageTracker
from stagescope_workers.transport.calls import Clock, ServiceLink
from stagescope_workers.transport.link import (
    RayLink,
    RayProcess,
    find_link,
    ray_directory,
    ray_entrypoint,
    ray_process,
    warn_unconnected,
)
from stagescope_workers.transport.outbox import Entry, Outbox

_WORLD: Final = "WORLD_SIZE"


def launch_text(
    environ: Mapping[str, str], world_size: int | None, *, in_ray: bool = False
) -> str | None:
    """Return a text that is unique to each start of this process's launcher; None: unknown.

    Args:
        environ: the process's variables.
        world_size: its role's size. Launchers of fewer ranks start some of the role's ranks alone.
        in_ray: whether it is a worker of a Ray cluster, whose variables are those of `ray start`.
    """
    if in_ray:
        return _ray_train_start()
    starts = (
        _slurm_start(environ, world_size),
        _jobset_start(environ),
        _torchrun_start(environ, world_size),
    )
    return "; ".join(filter(None, starts)) or None


def _torchrun_start(environ: Mapping[str, str], world_size: int | None) -> str | None:
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None or not _has_all(environ.get(_WORLD), world_size):
        return None
    # A run id may be used again: it is "none" where none was given. The folder of a worker's error
    # file is new with each torchrun and restart: .../RUN_ID_xxxxxxxx/attempt_1/0/error.json.
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    folder = "" if file is None else f", {'/'.join(Path(file).parts[-4:-2])}"
    return f"torchrun {run_id}, restart {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}{folder}"


def _slurm_start(environ: Mapping[str, str], world_size: int | None) -> str | None:
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    step = environ.get("SLURM_STEP_ID")
    # Each node's task may be a launcher itself.
    has_all = _has_all(environ.get("SLURM_STEP_NUM_TASKS"), world_size)
    is_launcher = "TORCHELASTIC_RUN_ID" in environ and _has_all(environ.get(_WORLD), world_size)
    named = "" if step is None or not (has_all or is_launcher) else f".{step}"
    return f"Slurm job {job}{named}, restart {environ.get('SLURM_RESTART_COUNT', '0')}"


def _jobset_start(environ: Mapping[str, str]) -> str | None:
    # As far as the pod's manifest hands them on: JobSet puts them into annotations.
    name, attempt = environ.get("JOBSET_NAME"), environ.get("JOBSET_RESTART_ATTEMPT")
    return None if attempt is None else f"JobSet {name or ''}, restart {attempt}"


def _ray_train_start() -> str | None:
    """Return the placement group of a Ray Train worker, which is new at each start."""
    with contextlib.suppress(Exception):
        train = sys.modules.get("ray.train")
        if train is not None and train.get_context().get_world_size():
            group = sys.modules["ray"].util.get_current_placement_group()
            return None if group is None else f"Ray Train, placement group {group.id.hex()}"
    return None


def _has_all(count: str | None, world_size: int | None) -> bool:
    return world_size is None or count == str(world_size)


_log = logging.getLogger("stagescope.workers")
_announced: set[tuple[int, str, str, int]] = set()
"""Process id, run, role and rank of which was logged that they are connected."""


def log_visibly(log: logging.Logger, text: str) -> None:
    """Log a line at level INFO, also where only warnings are logged, as by default.

    It stays away where a level above INFO was set for `log`, for the loggers of stagescope, or by
    `logging.disable`. Without any handler it goes to stderr.
    """
    levels = (logging.getLogger(name).level for name in ("stagescope", log.name))
    if max(logging.root.manager.disable, *levels) > logging.INFO:
        return
    if log.hasHandlers():
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None))
    elif sys.stderr is not None:
        sys.stderr.write(f"stagescope: {text}\n")


class Handshake:
    """Finds the service and fills in HELLO, the first event of the outbox."""

    def __init__(
        self, options: ProbeOptions, incarnation: str, outbox: Outbox, stage_tracker: StageTracker
    ) -> None:
        self.created = time.monotonic()
        self.is_leaving = False
        """True once the probe closes: from then on the process is not expected to join Ray."""
        self.attempt_key = options.attempt_key
        """The given key, else Ray's session and job; None where neither is known yet."""
        self.ray: RayProcess | None = None
        """This process in Ray; None while it is not in a cluster."""
        self._options = options
        self._incarnation = incarnation
        self._stage_tracker = stage_tracker
        self._used_ray = False
        self._hello: Entry = outbox.put(HELLO, {})

    def find_ray(self) -> None:
        """Read this process's ids in Ray, if it has joined a cluster."""
        if self.ray is None:
            self.ray = ray_process()
        if self.attempt_key is None and self.ray is not None:
            self.attempt_key = self.ray.attempt_key

    def connect(self) -> ServiceLink | None:
        """Search for the service once; None while there is none."""
        options = self._options
        link = find_link(
            options.url or None, options.token, options.namespace, waited=self._waited()
        )
        if link is not None:
            self._used_ray = self._used_ray or isinstance(link, RayLink)
            self.find_ray()
            node = None if self.ray is None else self.ray.node_id
            self._note_launch()
            self._hello.fields["watchdog"] = self._stage_tracker.start_watchdog()
            self._hello.fields["layout"] = plain(identity.detect_layout(options.layout, node=node))
            self._add_entrypoint()
        return link

    def _note_launch(self) -> None:
        size = self._options.world_size
        launch = launch_text(os.environ, size, in_ray=self.ray is not None)
        if launch is not None:
            self._hello.fields["launch"] = launch
        if self._options.is_single:
            self._hello.fields["single"] = True

    def _add_entrypoint(self) -> None:
        """Add the driver's command line and script to the fingerprint; only rank 0 sends them."""
        fingerprint = self._hello.fields.get("fingerprint")
        if self._options.rank == 0 and isinstance(fingerprint, dict):
            line = fingerprint.get("entrypoint") or ray_entrypoint()
            if line is not None:
                fingerprint["entrypoint"] = identity.visible_line(str(line))
                if isinstance(code := fingerprint.get("code"), dict):
                    code.update(filter(None, [script_of(str(line), ray_directory())]))

    def _waited(self) -> float:
        """Return for how long this process has had time to join Ray."""
        if self._used_ray and not os.environ.get("STAGESCOPE_URL"):
            # The service in the Ray cluster is away: another one on this machine is not used.
            return -math.inf
        return math.inf if self.is_leaving else time.monotonic() - self.created

    def sender(self, clock: Clock, plan_revision: int) -> tuple[object, ...]:
        """Return the sender's tuple of a batch or poll that is sent now."""
        best = clock.best(time.monotonic())
        return Sender(
            incarnation=self._incarnation,
            run=self._options.run,
            attempt_key=self.attempt_key,
            role=self._options.role,
            rank=self._options.rank,
            node_id=None if self.ray is None else self.ray.node_id,
            clock_offset=None if best is None else best.offset,
            clock_error=None if best is None else best.error,
            plan_revision=plan_revision,
            display_name=self._options.display_name,
        ).wire()

    def announce(self, address: str, page: str | None) -> None:
        """Log, once for each rank of the process, that it is connected, and where its page is."""
        options = self._options
        text = f"run {options.run}, {options.role} {options.rank}: connected to {address}"
        if page is not None:
            text += f"; its page: {page_of_run(page, options.run)}"
        who = (os.getpid(), options.run, options.role, options.rank)
        if who not in _announced:
            _announced.add(who)
            log_visibly(_log, text) if options.rank == 0 else _log.debug(text)

    def warn_unconnected(self, problem: str) -> None:
        """Log once per process that nothing is reported; `problem` is the last call's, if any."""
        options = self._options
        name = f"run {options.run}, {options.role} {options.rank}"
        warn_unconnected(name, options.url, options.namespace, problem)

    def fill_hello(self) -> None:
        """Fill in the fields of HELLO; the fingerprint takes a while."""
        options = self._options
        # An attempt has the fingerprint of its lowest rank.
        with_code = options.rank == 0
        fingerprint = identity.fingerprint(options.settings, ray_directory(), with_code=with_code)
        versions = fingerprint.get("versions")
        self._log_versions(versions if isinstance(versions, Mapping) else {})
        fields = {
            "world_size": options.world_size,
            "data_rank": options.data_rank,
            "layout": plain(identity.detect_layout(options.layout, node=None)),
            "fingerprint": plain(fingerprint),
            "settings": plain(options.settings),
            "resumed_from_step": options.resumed_from_step,
            "pid": os.getpid(),
            "captures": False if options.captures is False else None,
            "expects": [str(role) for role in options.expects] or None,
        }
        self._hello.fields.update({k: v for k, v in fields.items() if v is not None})

    def _log_versions(self, versions: Mapping[str, Sequence[str]]) -> None:
        """Log which packages may not work; on rank 0 only, since every rank finds the same."""
        if self._options.rank == 0:
            for line in versions.get("unsupported", ()):
                _log.warning("%s", line)
            for line in versions.get("untried", ()):
                _log.info("%s", line)
