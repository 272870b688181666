"""Send the files of a spool to the service as the processes that wrote them would."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypedDict

import click

from stagescope import terminal
from stagescope.session import Session
from stagescope_wire import render, spool
from stagescope_wire.errors import InvalidInput, NotReady, StagescopeError, Unreachable
from stagescope_wire.framing import read_header
from stagescope_wire.nonfinite import Json
from stagescope_wire.schema import Sender

MAX_BYTES: Final = 1 << 30
"""A larger file is no batch."""
_LOOK_SECONDS: Final = 0.5
"""Between two looks into a spool that is followed."""
_RETRY_SECONDS: Final = 2.0
_SHOWN: Final = 20


class SpoolReport(TypedDict):
    """Counts of the imported data, as `--json` prints them.

    Attributes:
        runs: their names.
        processes, batches, payloads: how many were sent.
        refused: what the service refused or lost: the event's process, its number, and why.
        unread: files that are no batches, and why.
    """

    runs: list[str]
    processes: int
    batches: int
    payloads: int
    refused: list[str]
    unread: list[str]


def send_spool(
    session: Session, directory: Path, *, follow: bool, delete: bool, show: bool
) -> SpoolReport:
    """Send what a spool holds, and with `follow` what comes, until SIGINT or SIGTERM.

    Args:
        session: with an operate token.
        directory: the spool.
        follow: whether to go on, also while the service does not answer.
        delete: whether to remove each file once the service has stored all of it.
        show: whether to print lines.

    Raises:
        StagescopeError: the service cannot be reached (without `follow`), or the token may not
            operate.
    """
    importer = _SpoolImport(session, directory, delete=delete, show=show)
    with terminal.interruption() as ended:
        while True:
            try:
                importer.send_new(ended)
                if follow:
                    importer.renew()
            except (Unreachable, NotReady) as error:
                if not follow:
                    raise
                importer.show_line(f"waiting for the service: {error.wrong}")
                ended.wait(_RETRY_SECONDS)
            if not follow or ended.wait(_LOOK_SECONDS):
                importer.show_line(importer.summary())
                return importer.report


class _SpoolImport:
    """A spool and what of it the service has.

    Args: as of `send_spool`.
    """

    def __init__(self, session: Session, directory: Path, *, delete: bool, show: bool) -> None:
        self._session = session
        self._directory = directory
        self._delete = delete
        self._show = show
        self._sent: dict[Path, int] = {}
        """Folder -> the number of the last batch that the service has."""
        self._alive: dict[Path, int] = {}
        """Folder -> last time at which its process reported that it is alive."""
        self._last_line = ""
        self.report: SpoolReport = {
            "runs": [], "processes": 0, "batches": 0, "payloads": 0, "refused": [], "unread": [],
        }  # fmt: skip

    def send_new(self, ended: threading.Event) -> None:
        """Send every batch that is there and was not sent, in the order of their writing.

        The order matters to steps: they close when their processes begin the next one.
        """
        waiting = {}
        for folder in spool.folders(self._directory):
            waiting[folder] = list(spool.batches(folder, self._sent.get(folder, 0)))
        while not ended.is_set():
            heads = [(_written(each[0][1]), folder) for folder, each in waiting.items() if each]
            if not heads:
                return
            _, folder = min(heads)
            number, path = waiting[folder].pop(0)
            pause = self._send(folder, path)
            self._sent[folder] = number
            ended.wait(pause)

    def _send(self, folder: Path, path: Path) -> float:
        """Send a batch and wait until its payloads are stored; return the requested pause."""
        try:
            if path.stat().st_size > MAX_BYTES:
                raise InvalidInput(f"{path.name} has more than {MAX_BYTES} bytes")
            body = path.read_bytes()
            header = read_header(body)
            sender = Sender.parse(header.sender)
        except (OSError, StagescopeError) as error:
            self.report["unread"].append(f"{path}: {error}")
            return 0.0
        try:
            answer = self._session.send_packed(body)
        except (Unreachable, NotReady):
            raise
        except StagescopeError as error:
            if error.code not in ("invalid_input", "invalid_event", "too_large"):
                raise
            self.report["refused"].append(f"{path}: {error}")
            return 0.0
        who = f"{sender.run} {sender.role} {sender.rank}"
        refused = {**answer.refused, **answer.refused_in_part}
        self.report["refused"] += [f"{who}, event {seq}: {why}" for seq, why in refused.items()]
        self._wait_for_payloads(who, header.sender, set(header.payloads) - {*answer.refused})
        if folder not in self._sent:
            self.report["processes"] += 1
        if sender.run not in self.report["runs"]:
            self.report["runs"].append(sender.run)
            self.show_line(f"importing run {sender.run}")
        self.report["batches"] += 1
        self.report["payloads"] += len(header.payloads)
        if self._delete and not refused:
            path.unlink(missing_ok=True)
        return answer.pause

    def _wait_for_payloads(self, who: str, sender: Sequence[Json], seqs: set[int]) -> None:
        while seqs:
            for seq, state in self._session.settled(sender, sorted(seqs)).items():
                seqs.discard(seq)
                if state != "ingested":
                    self.report["refused"].append(f"{who}, payload of event {seq}: {state}")

    def renew(self) -> None:
        """Tell the service which processes have said that they are alive since the last look."""
        for folder in self._sent:
            path = folder / spool.SENDER
            with contextlib.suppress(OSError, ValueError, InvalidInput):
                seen = path.stat().st_mtime_ns
                if seen == self._alive.get(folder):
                    continue
                sender = json.loads(path.read_bytes()[:65536])
                Sender.parse(sender)
                if folder in self._alive:  # at the first look it may be of long ago
                    self._session.renew(sender)
                self._alive[folder] = seen

    def summary(self) -> str:
        """Return what was taken in, as one line."""
        found = self.report
        counts = [
            render.counted(found["batches"], "batch", "batches"),
            render.counted(found["payloads"], "payload"),
        ]
        of = render.counted(found["processes"], "process", "processes")
        wrong = [*found["refused"], *found["unread"]]
        lines = [f"{' and '.join(counts)} of {of}, runs: {', '.join(found['runs']) or 'none'}"]
        lines += [f"  not imported: {render.printable(each)}" for each in wrong[:_SHOWN]]
        if len(wrong) > _SHOWN:
            lines.append(f"  ... {len(wrong) - _SHOWN} more (--json lists all)")
        return "\n".join(lines)

    def show_line(self, text: str) -> None:
        """Print a line that is not the one before."""
        if self._show and text != self._last_line:
            click.echo(text)
        self._last_line = text


def _written(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return time.time()
