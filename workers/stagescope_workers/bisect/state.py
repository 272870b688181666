"""The state of a bisect in a directory: each arm's scores in a file, so that it can continue."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from stagescope_wire import tensorfile
from stagescope_wire.atomic_file import atomic_file
from stagescope_wire.errors import InvalidTensor, StoreError
from stagescope_wire.nonfinite import JsonObject
from stagescope_workers.bisect.arms import NAMES, Scores

_FILE: Final = "bisect.json"
_FORMAT: Final = 1
_MAX_BYTES: Final = 1 << 20
_LARGEST_ARM: Final = 1 << 30


class State:
    """What is done of a bisect.

    Args:
        folder: is created; it holds `bisect.json` and a file per arm.
        fingerprint: of the tokens, the engine and the models. State of another one is replaced, and
            so is that of a bisect that came to its end.

    Attributes:
        is_continued: whether an interrupted bisect continues.
        key: the attempt under which the arms are recorded.

    Raises:
        StoreError: the directory cannot be written.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder = folder
        self._fingerprint = fingerprint
        about = _read(folder / _FILE)
        is_same = about.get("format") == _FORMAT and about.get("fingerprint") == fingerprint
        self.is_continued = is_same and about.get("finished") is False
        recorded = about.get("recorded")
        self.recorded: set[str] = set()
        """The arms that the service has as steps."""
        if self.is_continued:
            self.key = str(about.get("key"))
            self.recorded |= {*map(str, recorded)} if isinstance(recorded, list) else set()
            return
        self.key = f"bisect-{uuid.uuid4().hex}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The description first: without it, files of arms that are left count for nothing.
            (folder / _FILE).unlink(missing_ok=True)
            for name in NAMES:
                self._file(name).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"{folder} cannot be written: {error.strerror or error}",
                advice="give another directory with --state",
            ) from error
        self._write(finished=False)

    def done(self) -> dict[str, Scores]:
        """Return the arms that are done, by name; a damaged file is none."""
        found = {name: self._read_arm(name) for name in NAMES}
        return {name: scores for name, scores in found.items() if scores is not None}

    def save(self, scores: Scores) -> None:
        """Write an arm's file, atomically.

        Raises:
            StoreError: it cannot be written.
        """
        about = {
            "format": _FORMAT,
            "status": scores.status,
            "floor": scores.floor,
            "floor_tokens": scores.floor_tokens,
            "seconds": scores.seconds,
            "reason": scores.reason,
        }
        values = np.ascontiguousarray(scores.values, np.float64)
        header, buffers, _ = tensorfile.encode_tensors(
            {"log_probs": ("float64", values.shape, values, None)}, {"arm": json.dumps(about)}
        )
        with atomic_file(self._file(scores.arm)) as file:
            for chunk in (header, *buffers):
                file.write(chunk)

    def mark_recorded(self, arm: str) -> None:
        """Write that the service has an arm as a step.

        Raises:
            StoreError: it cannot be written.
        """
        self.recorded.add(arm)
        self._write(finished=False)

    def finish(self) -> None:
        """Mark the bisect as done, so that the next one starts over.

        Raises:
            StoreError: it cannot be written.
        """
        self._write(finished=True)

    def _write(self, *, finished: bool) -> None:
        about = {"format": _FORMAT, "fingerprint": self._fingerprint, "key": self.key,
                 "finished": finished, "recorded": sorted(self.recorded)}  # fmt: skip
        with atomic_file(self.folder / _FILE) as file:
            file.write(json.dumps(about, indent=1).encode())

    def _file(self, arm: str) -> Path:
        return self.folder / f"{NAMES.index(arm):02}-{arm}.safetensors"

    def _read_arm(self, name: str) -> Scores | None:
        try:
            file = self._file(name)
            if file.stat().st_size > _LARGEST_ARM:
                return None
            found = tensorfile.parse(np.fromfile(file, np.uint8), file)
            about = json.loads(str(found.metadata["arm"]))
            if about["format"] != _FORMAT or about["status"] != "done":
                return None
            tag, _, values, _ = found.tensors["log_probs"]
            if tag != "float64":
                return None
            return Scores(
                arm=name,
                values=np.array(values),
                floor=float(about["floor"]),
                floor_tokens=int(about["floor_tokens"]),
                seconds=float(about["seconds"]),
            )
        except (OSError, ValueError, KeyError, TypeError, InvalidTensor):
            return None


def _read(file: Path) -> JsonObject:
    try:
        if file.stat().st_size > _MAX_BYTES:
            return {}
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}
