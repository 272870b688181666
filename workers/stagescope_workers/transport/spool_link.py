"""The link to a spool: batches become files, which `stagescope import --follow` imports."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, cast

from stagescope_wire import spool
from stagescope_wire.errors import Unreachable
from stagescope_wire.framing import WirePayload, pack_batch
from stagescope_wire.nonfinite import JsonObject, spell
from stagescope_wire.schema import Sender
from stagescope_workers.transport.calls import Payloads, Reply, ServiceLink, Wire, in_thread

_ADVICE: Final = "check that the directory of STAGESCOPE_URL may be written here, and its disk"


class SpoolLink(ServiceLink):
    """Writes what a probe would send into a directory; nothing comes back from there.

    A batch counts as accepted, and its payloads as settled, once its file exists. A spool brings
    no capture requests: `init(plan=...)` names those of a file.
    """

    def __init__(self, directory: Path) -> None:
        self._address = f"the spool {directory}"
        self._directory = directory
        self._numbers: dict[str, int] = {}
        self._closed = threading.Event()

    def record(self, sender: Wire, events: list[Wire], payloads: Payloads) -> Future[Reply]:
        """Write a batch."""
        return self._start(lambda: self._record(sender, events, payloads))

    def _record(self, sender: Wire, events: list[Wire], payloads: Payloads) -> Reply:
        incarnation = Sender.parse(sender).incarnation
        number = self._number(incarnation)
        path = spool.batch_path(self._directory, incarnation, number)
        packed = cast("dict[int, WirePayload]", payloads)
        spool.write(path, pack_batch(sender, events, packed))
        self._numbers[incarnation] = number
        return {**self._reply(), "receipts": dict.fromkeys(payloads, "spooled")}

    def _number(self, incarnation: str) -> int:
        """Return the number of the next batch; an earlier link may have written some."""
        last = self._numbers.get(incarnation)
        if last is None:
            folder = spool.batch_path(self._directory, incarnation, 1).parent
            there = [number for number, _ in spool.batches(folder)] if folder.is_dir() else []
            last = max(there, default=0)
        return last + 1

    def poll(
        self, sender: Wire, revision: int, unreceipted: list[int], wait: float
    ) -> Future[Reply]:
        """Write that the process is alive, and wait."""
        return self._start(lambda: self._poll(sender, wait))

    def _poll(self, sender: Wire, wait: float) -> Reply:
        path = self._directory / Sender.parse(sender).incarnation / spool.SENDER
        spool.write(path, json.dumps(spell(list(sender)), allow_nan=False).encode())
        self._closed.wait(wait)
        return {**self._reply(), "poll_seconds": spool.ALIVE_SECONDS}

    def _reply(self) -> Reply:
        # No `wall`: the offset of the service's clock is not known here.
        return {"coordinator": f"spool:{self._directory}", "plan": None, "receipts": {}}

    def _start(self, call: Callable[[], Reply]) -> Future[Reply]:
        def write() -> Reply:
            try:
                return call()
            except OSError as error:
                text = f"{self.address}: {error.strerror or error}"
                raise Unreachable(text, advice=_ADVICE) from error

        return in_thread(write)

    def metrics(self, run: str, attempt_key: str | None, step: int) -> Future[Reply]:
        """Fail: a spool has no numbers."""
        future: Future[Reply] = Future()
        future.set_exception(Unreachable(f"{self.address} has no numbers"))
        return future

    def drain(
        self,
        run: str | None,
        timeout: float,
        attempt_key: str | None = None,
        *,
        ended_by: JsonObject | None = None,
    ) -> JsonObject:
        """Return at once: what this process has sent is stored, and no other can reply."""
        return {"drained": True, "known": True}

    def close(self) -> None:
        """End the waits."""
        self._closed.set()
