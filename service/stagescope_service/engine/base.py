"""The contract of what carries out instructions that are not rows."""

from __future__ import annotations

from typing import Protocol

from stagescope_service.engine.instructions import Assemble, Digest, Ingest, ReadWatchdogs, Weigh


class Floor(Protocol):
    """What carries out instructions that are not rows."""

    def ingest(self, order: Ingest, payload: object) -> None:
        """Have an ingestor read a payload; its outcome comes back by `Reception.settle`."""

    def assemble(self, order: Assemble) -> None:
        """Form the whole of a step."""

    def read_watchdogs(self, order: ReadWatchdogs) -> None:
        """Read files of watchdogs; what they say comes back by `Reception.watchdog`."""

    def digest(self, order: Digest) -> None:
        """Have an ingestor make a dump's operator table."""

    def weigh(self, order: Weigh) -> None:
        """Compare the recorded weights of a version."""
