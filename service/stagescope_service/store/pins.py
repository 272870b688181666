"""Pins of a ring: names of steps and payloads, each a marker file beside the payloads.

A marker outlives the process, and may exist before the payload it pins arrives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

SUFFIX: Final = ".pin"
MOST: Final = 10_000
"""Maximum pins of one ring: each is a file, even if its payloads are gone."""


class Pinned(NamedTuple):
    """The result of a pin request."""

    payloads: int
    """Number of payloads that it pins now; more may arrive."""
    bytes: int
    """Their total size."""
    reason: str = ""
    """Why nothing was pinned, or not durably; empty on success."""


class Pins:
    """The pins of one directory; used under the ring's lock."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def found(self, marker: Path) -> None:
        """Register a marker found in the directory, or move it there from a gone node's."""
        if marker.parent != self._directory:
            marker.replace(self._directory / marker.name)
        self._names.add(marker.stem)

    def holds(self, *names: str) -> bool:
        """Return whether one of these names is pinned."""
        return not self._names.isdisjoint(names)

    def add(self, name: str) -> str:
        """Pin a name; return a warning, if any: on a full disk the pin ends with this process."""
        self._names.add(name)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / (name + SUFFIX)).touch()
        except OSError as error:
            return f"it is lost when the ingestor restarts: its marker cannot be written ({error})"
        return ""

    def remove(self, name: str) -> None:
        """Remove a pin.

        Raises:
            OSError: its marker cannot be removed; it stays pinned.
        """
        (self._directory / (name + SUFFIX)).unlink(missing_ok=True)
        self._names.discard(name)
