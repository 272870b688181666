"""A probe that writes into a spool, and what arrived there: a trial needs no service and no Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stagescope_wire import spool
from stagescope_wire.schema import Event
from stagescope_wire.tensorfile import Array, parse
from stagescope_workers import init
from stagescope_workers.probe.probe import Probe


@dataclasses.dataclass(frozen=True)
class Arrived:
    """An event, and the tensors of its payload by name."""

    kind: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Array]


class SpooledProbe:
    """A probe and its spool in a directory of its own."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self._directory = directory
        self.probe: Probe = init(url=directory.as_uri(), attempt_key="trial", watchdog=0, **options)

    def take(self) -> Iterator[Arrived]:
        """Yield what was written since the last call, and delete it."""
        for folder in spool.folders(self._directory):
            for _, path in spool.batches(folder):
                body = path.read_bytes()
                path.unlink()
                yield from _events(body)

    def close(self) -> list[Arrived]:
        """Close the probe, and return what was not taken yet.

        Raises:
            RuntimeError: something did not arrive.
        """
        if not self.probe.close(60.0):
            raise RuntimeError(f"not everything arrived: {self.probe.status()}")
        return list(self.take())


@contextlib.contextmanager
def spooled_probe(**options: Any) -> Iterator[SpooledProbe]:
    """Open a probe whose spool is in a temporary directory."""
    # Its thread may still write while the directory goes: what it writes then, nobody wants.
    with tempfile.TemporaryDirectory(prefix="trial-device-", ignore_cleanup_errors=True) as name:
        spooled = SpooledProbe(Path(name), **options)
        try:
            yield spooled
        finally:
            spooled.probe.close(0.0)


def _events(body: bytes) -> Iterator[Arrived]:
    (length,) = struct.unpack_from("<Q", body)
    header = json.loads(body[8 : 8 + length])
    data = np.frombuffer(body, np.uint8, offset=8 + length)
    entries = parse(data, "a batch of the spool").tensors if data.size else {}
    by_seq: dict[str, dict[str, Array]] = {}
    for name, (_, _, array, _) in entries.items():
        seq, _, tensor = name.partition("/")
        by_seq.setdefault(seq, {})[tensor] = array
    for wire in header["events"]:
        event = Event.parse(wire)
        yield Arrived(event.kind, event.fields, by_seq.get(str(event.seq), {}))
