"""Who this process is, and the way to the service that is to know it; the background thread's."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stagescope.wire.schema import HELLO, Sender
from stagescope_workers.probe import identity
from stagescope_workers.probe.draft import plain
from stagescope_workers.probe.options import ProbeOptions
from stagescope_workers.probe.stage_tracker import StageTracker
from stagescope_workers.transport.calls import Clock
from stagescope_workers.transport.link import (
    Link,
    RayLink,
    RayPlace,
    find_link,
    ray_entrypoint,
    ray_place,
    warn_unconnected,
)
from stagescope_workers.transport.outbox import Entry, Outbox

_log = logging.getLogger("stagescope.workers")


class Handshake:
    """Finds the service, and says hello to it; its HELLO is the first event of the outbox."""

    def __init__(
        self, options: ProbeOptions, incarnation: str, outbox: Outbox, standing: StageTracker
    ) -> None:
        self.made = time.monotonic()
        self.is_leaving = False
        """True from where the probe closes: who takes leave joins no cluster any more."""
        self.attempt_key = options.attempt_key
        """As given, else Ray's session and job; None where neither is known yet."""
        self.place: RayPlace | None = None
        self._options = options
        self._incarnation = incarnation
        self._standing = standing
        self._by_ray = False
        self._hello: Entry = outbox.put(HELLO, {})

    def locate(self) -> None:
        """Find where in Ray this process runs, if it does."""
        if self.place is None:
            self.place = ray_place()
        if self.attempt_key is None and self.place is not None:
            self.attempt_key = self.place.attempt_key

    def connect(self) -> Link | None:
        """Look for the service once; None while there is none."""
        options = self._options
        link = find_link(
            options.url or None,
            options.token,
            options.namespace,
            waited=self._waited(),
        )
        if link is not None:
            self._by_ray = self._by_ray or isinstance(link, RayLink)
            self.locate()
            node = None if self.place is None else self.place.node_id
            self._hello.fields["watchdog"] = self._standing.watch()
            self._hello.fields["layout"] = plain(identity.detect_layout(options.layout, node=node))
            self._add_entrypoint()
        return link

    def _add_entrypoint(self) -> None:
        """Add the driver's command line to the fingerprint; an attempt's is that of a rank 0."""
        fingerprint = self._hello.fields.get("fingerprint")
        if self._options.rank == 0 and isinstance(fingerprint, dict):
            line = fingerprint.get("entrypoint") or ray_entrypoint()
            if line is not None:
                fingerprint["entrypoint"] = identity.visible_line(line)

    def _waited(self) -> float:
        """Return how long this process may have joined Ray and found no service there."""
        if self._by_ray and not os.environ.get("STAGESCOPE_URL"):
            # What is away is that service: one that runs elsewhere on this machine is another.
            return -math.inf
        return math.inf if self.is_leaving else time.monotonic() - self.made

    def sender(self, clock: Clock) -> tuple[Any, ...]:
        """Return the sender's tuple of a batch that leaves now."""
        best = clock.best(time.monotonic())
        return Sender(
            incarnation=self._incarnation,
            run=self._options.run,
            attempt_key=self.attempt_key,
            role=self._options.role,
            rank=self._options.rank,
            node_id=None if self.place is None else self.place.node_id,
            clock_offset=None if best is None else best.offset,
            clock_error=None if best is None else best.error,
        ).wire()

    def warn_unconnected(self, problem: str) -> None:
        """Log, once in a process, that nothing is reported; `problem`: of the last call, if any."""
        options = self._options
        who = f"run {options.run}, {options.role} {options.rank}"
        warn_unconnected(who, options.url, options.namespace, problem)

    def say_hello(self) -> None:
        """Fill the HELLO in: the fingerprint takes a while."""
        options = self._options
        fingerprint = identity.fingerprint(options.settings)
        self._say_versions(fingerprint.get("versions") or {})
        said = {
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
        self._hello.fields.update({k: v for k, v in said.items() if v is not None})

    def _say_versions(self, versions: Mapping[str, Sequence[str]]) -> None:
        """Log which packages may not work; every rank finds the same, the first says it."""
        if self._options.rank == 0:
            for line in versions.get("unsupported", ()):
                _log.warning("%s", line)
            for line in versions.get("untried", ()):
                _log.info("%s", line)
