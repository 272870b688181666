"""Keeps a bundle of each attempt that dies, in `data_dir/bundles`, the oldest deleted first.

It runs in a thread of the API's process, and reads the catalogue alone: the coordinator only
writes the finding that says where a bundle is.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stagescope_service.core.entities import CRASHED
from stagescope_service.core.findings import ATTEMPT_BUNDLED, describe
from stagescope_service.report.bundle.making import make_bundle
from stagescope_service.store.queries.runs import DiedAttempt
from stagescope_service.store.tables.training import SILENT
from stagescope_service.store.tensorfile import disk_errors
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_wire.errors import NotFound, StagescopeError
from stagescope_wire.render import format_bytes

log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 15.0
SETTLE_SECONDS: Final = 20.0
"""Wait after an attempt's end: its last payloads may still be read, and its step aggregated."""
NEWEST_SECONDS: Final = 24 * 3600.0
"""Greatest age of an attempt's end; older ones are not bundled."""
_SHARE: Final = 4
"""Most room of one bundle: this part of the room for all."""
_CHUNK: Final = 1 << 20

Note = Callable[[DiedAttempt, int | None, str, Path | None], None]
"""Reports an attempt to the coordinator: step, message, path (None: there is no bundle)."""


class BundleKeeper:
    """Makes the bundles of attempts that died, one at a time and one of each.

    Args:
        deps: the collaborators.
        note: writes the finding of an attempt; it may raise `StagescopeError`, and is called again.
        secrets: texts that must not be in a bundle.
    """

    def __init__(self, deps: Dependencies, note: Note, secrets: tuple[str, ...]) -> None:
        self._deps = deps
        self._note = note
        self._secrets = secrets
        self._room = deps.settings.bundle_bytes
        self.directory = deps.settings.data_path / "bundles"

    def run(self, stopping: threading.Event) -> None:
        """Check repeatedly until the event is set; no failure ends it."""
        while self._room and not stopping.wait(CHECK_SECONDS):
            try:
                self.check()
            except Exception:  # noqa: PERF203 - later attempts are still bundled
                log.exception("the bundle of an attempt that died could not be made")

    def check(self) -> int:
        """Make the bundles that are due; return how many attempts are done."""
        now = self._deps.clock()
        died = self._deps.catalogue.died_attempts(
            (CRASHED, SILENT), since=now - NEWEST_SECONDS, until=now - SETTLE_SECONDS,
            without=ATTEMPT_BUNDLED,
        )  # fmt: skip
        for attempt in died:
            step, message, path = self._keep(attempt)
            self._note(attempt, step, message, path)
        return len(died)

    def _keep(self, attempt: DiedAttempt) -> tuple[int | None, str, Path | None]:
        """Return the step of an attempt's bundle, the message of its finding, and its file."""
        deps = self._deps
        try:
            target = deps.finder.step(attempt["run"], attempt["number"], None)
        except NotFound:
            return None, "the attempt died before its first step: there is nothing to bundle", None
        step = target.step_number
        died = f"the attempt died in step {step} ({attempt['end_reason']})"
        try:
            with disk_errors(self.directory):
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                made = make_bundle(
                    deps, target, tensors=True, limit=max(self._room // _SHARE, 1),
                    secrets=self._secrets,
                )  # fmt: skip
                path = self.directory / made.name
                draft = path.with_name(f".{path.name}.tmp")
                with made.file as file, draft.open("wb") as to:
                    while piece := file.read(_CHUNK):
                        to.write(piece)
                os.replace(draft, path)
                self._delete_oldest(path)
        except StagescopeError as error:
            return step, f"{died}; it could not be bundled: {describe(error)}", None
        size = format_bytes(made.bytes)
        return step, f"{died}. It was saved as a bundle of {size} in {path}", path

    def _delete_oldest(self, newest: Path) -> None:
        """Delete the oldest bundles beyond the room for all, but not the newest."""
        files = [path for path in self.directory.glob("*.tar.gz") if path != newest]
        files.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        used = newest.stat().st_size
        for path in files:
            used += path.stat().st_size
            if used > self._room:
                path.unlink()
