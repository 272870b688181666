"""The ring: payloads of the last steps on one node's disk, kept without a request.

It holds at most `max_bytes`; the oldest unpinned payloads are evicted. Pinned ones are limited to a
share of it, so that there is always room for the newest. It leaves free disk space for others, and
never raises into ingestion: payloads that could not be kept are counted and reported.

All state is in the names of its files, so a new process continues with the files it finds:
`{attempt_id}~{step}~{seq}~{incarnation}.safetensors`, and `{attempt_id}~{step}.pin` or `{name}.pin`
for pins.

A machine whose Ray restarts is a new node, and so is the head of the next cluster on the same disk.
A ring takes over the directories that gone nodes left there (`rings_left`). Their payloads stay in
place, since the catalogue has their paths, and count as its own.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import urllib.parse
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from stagescope_service.store.contract import Health
from stagescope_service.store.tensorfile import (
    TensorFile,
    WireTensor,
    check_file,
    read_tensors,
    size_of,
    write_tensors,
)
from stagescope_wire.errors import InvalidTensor, NotFound, StagescopeError
from stagescope_wire.nonfinite import JsonObject

logger = logging.getLogger(__name__)

DEFAULT_BYTES: Final = 2 << 30
DEFAULT_RESERVE: Final = 512 << 20
DEFAULT_PIN_SHARE: Final = 0.5

_SUFFIX: Final = ".safetensors"
_PIN: Final = ".pin"
_MOST_PINS: Final = 10_000
"""Maximum pins of one ring: each is a file, even if its payloads are gone."""
_OWNER: Final = "owner"
"""Name of the file that says which node has taken a directory over."""


class RingKey(NamedTuple):
    """The key of a payload: the step it belongs to, and its identity (incarnation, seq)."""

    attempt_id: int
    step: int | None
    incarnation: str
    seq: int

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return f"{self.step_name}~{self.seq}~{urllib.parse.quote(self.incarnation, safe='')}"

    @property
    def step_name(self) -> str:
        """The name of the step that the payload belongs to."""
        return _step_name(self.attempt_id, self.step)

    @classmethod
    def parse(cls, name: str) -> RingKey:
        """Parse a `name`.

        Raises:
            ValueError: a name of another form.
        """
        attempt_id, step, seq, incarnation = name.split("~", 3)
        of_step = int(step) if step else None
        key = cls(int(attempt_id), of_step, urllib.parse.unquote(incarnation), int(seq))
        if key.name != name:
            raise ValueError(name)
        return key


class RingEntry(NamedTuple):
    """One payload in the ring."""

    key: RingKey
    path: Path
    bytes: int
    wall: float
    """When it was written, in Unix seconds of the node's clock."""
    pinned: bool


class Pinned(NamedTuple):
    """The result of a pin request."""

    payloads: int
    """Number of payloads that it pins now; more may arrive."""
    bytes: int
    """Their total size."""
    reason: str = ""
    """Why nothing was pinned, or not durably; empty on success."""


class Ring:
    """A bounded ring of payload files in `directory`; safe to use from several threads.

    One process writes a directory. Usage::

        ring = Ring(ring_directory(data_dir, node_id))
        entry = ring.keep(RingKey(attempt_id, step, incarnation, seq), tensors, metadata)
        ring.pin_step(attempt_id, step)
        ring.read(entry.key).tensors["old_log_probs"]

    Args:
        directory: created if absent. Incomplete and damaged files in it are removed.
        max_bytes: maximum bytes of all files, including pinned ones. 0 keeps nothing.
        reserve_bytes: bytes that the ring leaves free on its disk for the catalogue and others.
        pin_share: maximum share of `max_bytes` for pinned files, 0 to 1.
        left: directories of gone nodes to take over.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int = DEFAULT_BYTES,
        *,
        reserve_bytes: int = DEFAULT_RESERVE,
        pin_share: float = DEFAULT_PIN_SHARE,
        left: Sequence[Path] = (),
    ) -> None:
        self.directory = directory
        self._left = tuple(left)
        self.max_bytes = max_bytes
        self.reserve_bytes = reserve_bytes
        self.max_pinned = int(max_bytes * pin_share)
        self.not_kept = 0
        """Payloads that were not kept since the start."""
        self._lock = threading.RLock()
        self._entries: OrderedDict[RingKey, RingEntry] = OrderedDict()  # the oldest first
        self._bytes = 0
        self._pins: set[str] = set()  # of steps and of payloads, by name
        self._health = Health(True)
        self._evicted: deque[RingEntry] = deque(maxlen=10_000)
        self._unpinned: deque[RingEntry] = deque(maxlen=1000)
        self._taken_over: list[RingEntry] = []
        self._scanned = False
        try:
            self._scan()
        except OSError as error:  # tried again by the next `keep`
            self._health = Health(False, f"the ring in {directory} cannot be used: {error}")

    @property
    def bytes(self) -> int:
        """Bytes of all files in the ring."""
        return self._bytes

    def health(self) -> Health:
        """Return whether the last payload was kept, and if not, the reason and advice."""
        return self._health

    def entries(self) -> list[RingEntry]:
        """Return the payloads in the ring, the oldest first."""
        with self._lock:
            return list(self._entries.values())

    def take_evicted(self) -> list[RingEntry]:
        """Return the payloads evicted since the last call, for the catalogue."""
        with self._lock:
            evicted = list(self._evicted)
            self._evicted.clear()
            return evicted

    def take_taken_over(self) -> list[RingEntry]:
        """Return the payloads of gone nodes taken over since the last call, for the catalogue."""
        with self._lock:
            taken, self._taken_over = self._taken_over, []
            return taken

    def keep(
        self, key: RingKey, tensors: Mapping[str, WireTensor], metadata: JsonObject | None = None
    ) -> RingEntry | None:
        """Keep a payload; return None if that is not possible now (`health()` has the reason).

        Replaces a payload with the same key. Never raises.
        """
        with self._lock:
            try:
                if not self._scanned:
                    self._scan()
                self.directory.mkdir(parents=True, exist_ok=True)
                needed = size_of(tensors, metadata)
                self._make_room(needed, key)
                path = self.directory / (key.name + _SUFFIX)
                written = write_tensors(path, tensors, metadata, durable=False)
                entry = self._enter(key, path, written.bytes)
            except (StagescopeError, OSError, ValueError, TypeError) as error:
                self.not_kept += 1
                self._health = Health(False, f"the ring kept nothing of {key.name:.100}: {error}")
                return None
            self._health = Health(True)
            return entry

    def read(self, key: RingKey) -> TensorFile:
        """Read a payload.

        Raises:
            NotFound: it was never kept, or has been evicted.
            StoreError: its file is damaged or cannot be read.
        """
        with self._lock:
            entry = self._entries.get(key)
        if entry is None:
            raise NotFound(f"payload {key.name:.100} is not in the ring", advice="pin its step")
        return read_tensors(entry.path)

    def take_unpinned(self) -> list[RingEntry]:
        """Return the payloads of pinned steps that exceeded the pins' share since the last call."""
        with self._lock:
            unpinned = list(self._unpinned)
            self._unpinned.clear()
            return unpinned

    def pin(self, key: RingKey) -> Pinned:
        """Keep a payload until it is unpinned, even if it arrives later."""
        return self._pin(key.name)

    def unpin(self, key: RingKey) -> None:
        """Allow a payload to be evicted.

        Raises:
            OSError: the marker cannot be removed; it stays pinned.
        """
        self._unpin(key.name)

    def pin_step(self, attempt_id: int, step: int | None) -> Pinned:
        """Keep every payload of a step, including those that arrive later.

        Pins all present payloads or none: if they exceed the pins' share, nothing is pinned and
        the result has the reason. Never raises.
        """
        return self._pin(_step_name(attempt_id, step))

    def unpin_step(self, attempt_id: int, step: int | None) -> None:
        """Allow the payloads of a step to be evicted.

        Raises:
            OSError: the marker cannot be removed; it stays pinned.
        """
        self._unpin(_step_name(attempt_id, step))

    def sizes_of(self, attempt_ids: Collection[int]) -> list[int]:
        """Return the sizes in bytes that `remove_attempts` would return."""
        with self._lock:
            entries = self._entries.items()
            return [entry.bytes for key, entry in entries if key.attempt_id in attempt_ids]

    def remove_attempts(self, attempt_ids: Collection[int]) -> list[int]:
        """Remove every payload and pin of some attempts; return the sizes in bytes.

        Raises:
            OSError: a file cannot be removed; the others of the call may be gone.
        """
        with self._lock:
            sizes = []
            for key, entry in [*self._entries.items()]:
                if key.attempt_id in attempt_ids:
                    entry.path.unlink(missing_ok=True)
                    del self._entries[key]
                    self._bytes -= entry.bytes
                    sizes.append(entry.bytes)
            own = {str(attempt_id) for attempt_id in attempt_ids}
            for name in [each for each in self._pins if each.partition("~")[0] in own]:
                self._unpin(name)
            for news in (self._evicted, self._unpinned, self._taken_over):
                kept = [each for each in news if each.key.attempt_id not in attempt_ids]
                news.clear()
                news.extend(kept)
            return sizes

    # --- internals --------------------------------------------------------------------------------

    def _scan(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        found = self._found_in(self.directory)
        for left in self._left:
            try:
                theirs = self._found_in(left)
            except OSError as error:  # its own payloads are worth more
                logger.warning("the ring of a gone node cannot be taken over: %s", error)
                continue
            found += theirs
            if not theirs:
                shutil.rmtree(left, ignore_errors=True)
        for wall, key, path, size in sorted(found):
            entry = RingEntry(key, path, size, wall, self._may_pin(key, size))
            self._entries[key] = entry
            self._bytes += size
            if path.parent != self.directory:
                self._taken_over.append(entry)
        self._scanned = True
        with contextlib.suppress(_NoRoom):  # max_bytes may be smaller than before
            self._evict_to(self.max_bytes)

    def _found_in(self, directory: Path) -> list[tuple[float, RingKey, Path, int]]:
        """Return the payloads in a directory: when written, key, path, size; pins are registered.

        Incomplete and damaged files are removed.
        """
        found: list[tuple[float, RingKey, Path, int]] = []
        for path in directory.iterdir():
            if path.suffix == _PIN:
                if directory != self.directory:
                    path.replace(self.directory / path.name)
                self._pins.add(path.stem)
            elif path.suffix == ".tmp":
                path.unlink(missing_ok=True)
            elif path.suffix == _SUFFIX:
                with contextlib.suppress(ValueError):  # not a file of the ring
                    key = RingKey.parse(path.stem)
                    if size := _checked_size(path):
                        found.append((path.stat().st_mtime, key, path, size))
        return found

    def _enter(self, key: RingKey, path: Path, size: int) -> RingEntry:
        before = self._entries.pop(key, None)
        if before is not None and before.path != path:
            before.path.unlink(missing_ok=True)
        self._bytes += size - (before.bytes if before else 0)
        entry = RingEntry(key, path, size, path.stat().st_mtime, self._may_pin(key, size))
        self._entries[key] = entry
        if self._is_pinned(key) and not entry.pinned:
            self._unpinned.append(entry)
        return entry

    def _is_pinned(self, key: RingKey) -> bool:
        return not self._pins.isdisjoint((key.name, key.step_name))

    def _may_pin(self, key: RingKey, size: int) -> bool:
        return self._is_pinned(key) and self._pinned_bytes() + size <= self.max_pinned

    def _pinned_bytes(self) -> int:
        return sum(entry.bytes for entry in self._entries.values() if entry.pinned)

    def _make_room(self, needed: int, key: RingKey) -> None:
        replaced = self._entries.get(key)
        own = replaced.bytes if replaced else 0
        if needed > self.max_bytes:
            raise _NoRoom(
                f"it has {needed} bytes, and the ring holds at most {self.max_bytes}",
                advice="give the ring more bytes",
            )
        self._evict_to(self.max_bytes - needed + own, but=key)
        while (free := shutil.disk_usage(self.directory).free) < needed + self.reserve_bytes:
            if not self._evict_oldest(but=key):
                raise _NoRoom(
                    f"its disk has {free} bytes free, and {self.reserve_bytes} must stay free",
                    advice="free space on the disk of data_dir",
                )

    def _evict_to(self, most: int, but: RingKey | None = None) -> None:
        while self._bytes > most:
            if not self._evict_oldest(but):
                raise _NoRoom(
                    f"pinned payloads fill it ({self._bytes} of {self.max_bytes} bytes)",
                    advice="unpin steps, or give the ring more bytes",
                )

    def _evict_oldest(self, but: RingKey | None) -> bool:
        """Remove the oldest evictable entry; return False if there is none."""
        for key, entry in self._entries.items():
            if not entry.pinned and key != but:
                entry.path.unlink(missing_ok=True)
                del self._entries[key]
                self._bytes -= entry.bytes
                self._evicted.append(entry)
                return True
        return False

    def _pin(self, name: str) -> Pinned:
        with self._lock:
            own = [
                entry for key, entry in self._entries.items() if name in (key.name, key.step_name)
            ]
            size = sum(entry.bytes for entry in own)
            held = self._pinned_bytes()
            needed = sum(entry.bytes for entry in own if not entry.pinned)
            if held + needed > self.max_pinned:
                reason = (
                    f"its {needed} bytes do not fit: pinned payloads use {held} of their "
                    f"{self.max_pinned} bytes"
                )
                return Pinned(0, 0, reason)
            if len(self._pins) >= _MOST_PINS and name not in self._pins:
                return Pinned(0, 0, f"{_MOST_PINS} steps are pinned")
            for entry in own:
                self._entries[entry.key] = entry._replace(pinned=True)
            return Pinned(len(own), size, self._mark(name))

    def _mark(self, name: str) -> str:
        """Write the marker of a pin; return a warning if it ends with this process."""
        self._pins.add(name)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / (name + _PIN)).touch()
        except OSError as error:
            return f"it is lost when the ingestor restarts: its marker cannot be written ({error})"
        return ""

    def _unpin(self, name: str) -> None:
        with self._lock:
            (self.directory / (name + _PIN)).unlink(missing_ok=True)
            self._pins.discard(name)
            for key, entry in self._entries.items():
                if name in (key.name, key.step_name):
                    self._entries[key] = entry._replace(pinned=self._is_pinned(key))


def rings_left(rings: Path, own: str, alive: Collection[str]) -> list[Path]:
    """Return the directories below `rings` that gone nodes left, claimed for the node `own`.

    On a disk that nodes share, the first node that asks has them.

    Args:
        rings: the directory of all rings of a data directory.
        own: name of the directory of the node that asks.
        alive: names of the directories of living nodes, `own` among them.
    """
    if own not in alive or not rings.is_dir():
        return []
    left = (path for path in rings.iterdir() if path.is_dir() and path.name not in alive)
    return sorted(path for path in left if _claim(path, own, alive))


def _claim(directory: Path, own: str, alive: Collection[str]) -> bool:
    marker = directory / _OWNER
    try:
        with marker.open("x") as written:
            written.write(own)
    except FileExistsError:
        owner = marker.read_text()
        if owner != own and owner in alive:
            return False
        marker.write_text(own)
    return True


class _NoRoom(StagescopeError):
    """Raised inside the ring when nothing more may be evicted."""


def _step_name(attempt_id: int, step: int | None) -> str:
    return f"{attempt_id}~{'' if step is None else step}"


def _checked_size(path: Path) -> int:
    """Return the size of a file; 0 if it is damaged, and removed, or cannot be read now."""
    try:
        return check_file(path)
    except InvalidTensor:
        path.unlink(missing_ok=True)
    except OSError as error:  # it stays, and counts again from the next start on
        logger.warning("%s of the ring cannot be read, and is left out: %s", path, error)
    return 0
